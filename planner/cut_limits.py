"""Cuts of a chain that the options allow or require."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain
from ..cost_models.quantities import format_count
from ..cost_models.runtime import find_runtime
from .plan_options import PlanOptions


@dataclass(frozen=True)
class CutLimits:
    """Cuts and pins that the options require, all 0-based.

    Attributes:
        must_cut: Layers after which a stage must end.
        pins: (layer, stage that must hold it).
    """

    must_cut: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()

    @property
    def are_set(self) -> bool:
        """True if a cut or a pin is required."""
        return bool(self.must_cut or self.pins)

    def allow(self, bounds: Sequence[tuple[int, int]]) -> bool:
        """Return whether stages with these (first layer, layer after the last) pairs are allowed."""
        ends = {end for _, end in bounds}
        return all(layer + 1 in ends for layer in self.must_cut) and all(
            stage < len(bounds) and bounds[stage][0] <= layer < bounds[stage][1] for layer, stage in self.pins
        )


def limit_cuts(chain: Chain, options: PlanOptions, *, untied_reason: str = "") -> tuple[Chain, CutLimits]:
    """Return the chain without the cuts that the options forbid, and the cuts and pins that they require.

    Args:
        chain: Costs of the layers.
        options: Options of the plan.
        untied_reason: Why the chain has no cuts between the users of one weight. Empty if it has.

    Raises:
        UsageError: The options name unknown layers or contradict each other.
    """
    cut_after = chain.cut_after.copy()
    for pattern in options.keep_together:
        matching = np.array([fnmatchcase(name, pattern) for name in chain.names])
        if not matching.any():
            raise _no_such_layer(chain, "keep_together", pattern)
        cut_after[:-1] &= ~(matching[:-1] & matching[1:])
    must_cut = tuple(dict.fromkeys(_cuts(chain, cut_after, options, untied_reason)))
    pins = tuple((_layer(chain, "pins", name), stage) for name, stage in options.pins)
    _check_pins(options, pins)
    same = bool((cut_after == chain.cut_after).all())
    return (chain if same else replace(chain, cut_after=cut_after)), CutLimits(must_cut, pins)


def _cuts(
    chain: Chain, cut_after: npt.NDArray[np.bool_], options: PlanOptions, untied_reason: str
) -> Iterator[int]:
    for name in options.cut_after:
        layer = _layer(chain, "cut_after", name)
        if layer == len(chain) - 1:
            raise UsageError(f"cut_after={name!r}: it is the last layer", "Omit it: the model ends there.")
        if not chain.cut_after[layer]:
            raise UsageError(
                f"cut_after={name!r}: no stage may end there",
                "The profile forbids it (see pplan show)"
                + (f", or it splits users of one weight ({untied_reason})" if untied_reason else "")
                + ". Name an earlier or a later layer.",
            )
        if not cut_after[layer]:
            raise UsageError(
                f"cut_after={name!r}: `keep_together` keeps it with {chain.names[layer + 1]}",
                "Omit one of the two.",
            )
        yield layer


def _check_pins(options: PlanOptions, pins: Sequence[tuple[int, int]]) -> None:
    """Check that no layer of a later stage comes before a layer of an earlier stage."""
    for (name, stage), (layer, _) in zip(options.pins, pins, strict=True):
        if stage < 0:
            raise UsageError(f"pins={(name, stage)!r}: stages count from 0", "Use stage0 or higher.")
        for (other_name, other_stage), (other_layer, _) in zip(options.pins, pins, strict=True):
            if layer == other_layer and stage != other_stage:
                raise UsageError(
                    f"pins={(name, stage)!r}: it is pinned to stage{other_stage}, too", "Omit one of them."
                )
            if layer < other_layer and stage > other_stage:
                raise UsageError(
                    f"pins={(name, stage)!r}: the later layer {other_name} is pinned to stage{other_stage}",
                    "Stages hold the layers in order. Pin later layers to the same or later stages.",
                )


def _layer(chain: Chain, field: str, name: str) -> int:
    if name not in chain.names:
        raise _no_such_layer(chain, field, name)
    return chain.names.index(name)


def _no_such_layer(chain: Chain, field: str, name: str) -> UsageError:
    near = get_close_matches(name, chain.names, n=1, cutoff=0.4)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(
        f"{field}={name!r}: the model has no such layer",
        f"{guess}Its layers are {', '.join(chain.names[:3])} … {chain.names[-1]}; pplan show lists them.",
    )


def check_layer_count(chain: Chain, gpus: int, options: PlanOptions) -> None:
    """Check that there are not more devices than layers, if the runtime has no replicas.

    Args:
        chain: Costs of the layers.
        gpus: Number of devices.
        options: Options of the plan.

    Raises:
        UsageError: There are more devices than layers.
    """
    if gpus > len(chain) and options.runtime is not None and find_runtime(options.runtime).replicas == "none":
        raise UsageError(
            f"gpus={gpus}: the model has {format_count(len(chain), 'layer')}, and a stage needs at least one",
            f"Use at most {format_count(len(chain), 'device')} (its allowed cuts make "
            f"{format_count(chain.max_stages, 'stage')}); a profile with granularity='fine' may have more.",
        )
