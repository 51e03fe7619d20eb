"""What the user asks of a plan, and what that leaves of the cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.layer import Chain
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.runtime import runtime_named
from ..cost_models.schedules import SCHEDULES
from .setting import MODES, MOST_MICRO_BATCHES

ASYNCHRONOUS = tuple(name for name, schedule in SCHEDULES.items() if not schedule.synchronous)


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; None and "auto" leave it to the search. Raises UsageError.

    `planner`: "best", the joint search, or a named planner. `use_all`: no device may stay free.
    `cut_after`: names of layers after which a stage must end; `keep_together`: patterns of names, no cut
    between neighbours that match the same; `pins`: (name of a layer, number of its stage, from 0).
    `memory_limit`: bytes that no device may exceed, besides what it has.
    """

    mini_batch: int | None = None
    micro_batches: int | None = None
    schedule: str = "auto"
    recompute: str = "auto"
    optimizer: str = "sgd"
    runtime: str | None = None
    planner: str = "best"
    use_all: bool = False
    max_stages: int | None = None
    cut_after: tuple[str, ...] = ()
    keep_together: tuple[str, ...] = ()
    pins: tuple[tuple[str, int], ...] = ()
    memory_limit: float | None = None
    time_limit: float = 30.0
    """About so many seconds of one core for the search; counted as work, so that answers do not vary."""

    def __post_init__(self) -> None:
        counts = (
            ("--mini-batch", self.mini_batch),
            ("--micro-batches", self.micro_batches),
            ("--max-stages", self.max_stages),
        )
        for option, value in counts:
            if value is not None and value < 1:
                raise UsageError(f"{option} {value}: must be at least 1", "Give a count of 1 or more.")
        if self.micro_batches is not None and self.micro_batches > MOST_MICRO_BATCHES:
            raise UsageError(
                f"--micro-batches {self.micro_batches}: at most {MOST_MICRO_BATCHES} are simulated",
                "The bubble of so many is nothing: use fewer, larger ones.",
            )
        if not self.time_limit > 0:
            raise UsageError(f"--time-limit {self.time_limit:g}: must be above 0", "Give 30s, say.")
        self._check_words()

    def _check_words(self) -> None:
        synchronous = tuple(name for name in SCHEDULES if name not in ASYNCHRONOUS)
        modes = tuple(mode for mode in MODES if mode != "by_stage")
        for option, word, known in (
            ("--schedule", self.schedule, ("auto", *synchronous)),
            ("--recompute", self.recompute, ("auto", *modes)),
            ("--optimizer", self.optimizer, tuple(OPTIMIZERS)),
        ):
            if word not in known:
                near = get_close_matches(word, known, n=1)
                start = f"Did you mean {near[0]}? " if near else ""
                raise UsageError(f"{option} {word!r}: not known", f"{start}Use one of: {', '.join(known)}.")
        if self.runtime is not None:
            runtime_named(self.runtime)
        if self.recompute == "except_last" and self.schedule not in ("auto", "gpipe"):
            raise UsageError(
                f"--recompute except-last with --schedule {self.schedule}: only GPipe's backward begins with "
                "the last one",
                "Use --schedule gpipe, or --recompute always.",
            )


@dataclass(frozen=True)
class Limits:
    """`must_cut`: layers after which a stage ends; `pins`: (layer, its stage). All 0-based."""

    must_cut: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()

    def allow(self, bounds: Sequence[tuple[int, int]]) -> bool:
        """Whether stages with these first layers and layers after the last may be."""
        ends = {end for _, end in bounds}
        return all(layer + 1 in ends for layer in self.must_cut) and all(
            stage < len(bounds) and bounds[stage][0] <= layer < bounds[stage][1] for layer, stage in self.pins
        )


def constrained(chain: Chain, wishes: Wishes) -> tuple[Chain, Limits]:
    """The chain without the cuts that the wishes forbid, and what else they ask. Raises UsageError."""
    cut_after = chain.cut_after.copy()
    for pattern in wishes.keep_together:
        matching = np.array([fnmatchcase(name, pattern) for name in chain.names])
        if not matching.any():
            raise _no_such_layer(chain, "--keep-together", pattern)
        cut_after[:-1] &= ~(matching[:-1] & matching[1:])
    must_cut = tuple(dict.fromkeys(_cuts(chain, cut_after, wishes)))
    pins = tuple((_layer(chain, "--pin", name), stage) for name, stage in wishes.pins)
    _check_pins(wishes, pins)
    same = bool((cut_after == chain.cut_after).all())
    return (chain if same else replace(chain, cut_after=cut_after)), Limits(must_cut, pins)


def _cuts(
    chain: Chain, cut_after: np.ndarray[tuple[int], np.dtype[np.bool_]], wishes: Wishes
) -> Iterator[int]:
    for name in wishes.cut_after:
        layer = _layer(chain, "--cut-after", name)
        if layer == len(chain) - 1:
            raise UsageError(
                f"--cut-after {name}: it is the last layer", "Leave it away: the model ends there."
            )
        if not chain.cut_after[layer]:
            raise UsageError(
                f"--cut-after {name}: no stage may end there",
                "The profile forbids it (pplan show tells why); name a layer before or behind.",
            )
        if not cut_after[layer]:
            raise UsageError(
                f"--cut-after {name}: --keep-together keeps it with {chain.names[layer + 1]}",
                "Leave one of the two away.",
            )
        yield layer


def _check_pins(wishes: Wishes, pins: Sequence[tuple[int, int]]) -> None:
    """Layers of later stages may not stand before layers of earlier ones."""
    for (name, stage), (layer, _) in zip(wishes.pins, pins, strict=True):
        if stage < 0:
            raise UsageError(f"--pin {name}=stage{stage}: stages count from 0", "Use stage0, say.")
        for (other, later), (other_layer, _) in zip(wishes.pins, pins, strict=True):
            if layer <= other_layer and stage > later:
                raise UsageError(
                    f"--pin {name}=stage{stage}: {other} comes behind it and is pinned to stage{later}",
                    "Stages hold the layers in their order: pin them so.",
                )


def _layer(chain: Chain, option: str, name: str) -> int:
    if name not in chain.names:
        raise _no_such_layer(chain, option, name)
    return chain.names.index(name)


def _no_such_layer(chain: Chain, option: str, name: str) -> UsageError:
    near = get_close_matches(name, chain.names, n=1, cutoff=0.4)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(
        f"{option} {name}: the model has no such layer",
        f"{guess}Its layers are {', '.join(chain.names[:3])} … {chain.names[-1]}; pplan show lists them.",
    )
