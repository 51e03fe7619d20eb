"""What the actions and transfers of a program take, and how its runtime goes about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..port_sharing import Loads
from ..schedules.action import Program
from ..tied_weights import TiedSum

Array = npt.NDArray[np.float64]
Transfers = Literal["overlapped", "blocking", "blocking-receive", "rendezvous"]
TRANSFERS: tuple[Transfers, ...] = ("overlapped", "blocking", "blocking-receive", "rendezvous")
Hosts = Literal["one", "each"]


def find_transfers(name: str) -> Transfers:
    """How a runtime goes about transfers, by its word. Raises UsageError."""
    for word in TRANSFERS:
        if name == word:
            return word
    raise UsageError(f"transfers {name!r}: not known", f"Use one of: {', '.join(TRANSFERS)}.")


_BY_ACTION = (
    "forward",
    "backward",
    "weight",
    "accumulation",
    "recompute",
    "forward_launch",
    "backward_launch",
    "weight_launch",
    "recompute_launch",
)
_BY_CUT = ("forward_occupancy", "forward_latency", "backward_occupancy", "backward_latency")


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Seconds of any program; for many candidates side by side, one more axis at the end of every array but
    `links`.

    By (device, chunk, micro-batch), an axis along which nothing changes may be 1 long:
      `forward`, `backward`, and `weight` where the gradient of the weights is computed apart: then `backward`
      is that of the input, and a B that is not split takes both. `accumulation`: what of it (of `weight`,
      where there is one) the first backward of a chunk does not take, as there are no gradients to add to.
      `recompute`: the share of the forward that is run again at the beginning of B (0 to 1).
      `forward_launch`, `backward_launch`, `weight_launch`: host seconds; None: the host is never late.
      `recompute_launch`: what of `backward_launch`, at its beginning, launches the forward again; None:
      nothing.
    By (pipe, cut), the cut after each place but the last; the pipe's axis may be 1 long:
      `forward_occupancy` (bytes / bandwidth) and `forward_latency` of activations, `backward_...` of their
      gradients. A transfer between chunks of one device is free.
    By device: `overhead` of each action, `optimizer` of an update. By (device, chunk): `all_reduce` of the
      gradients.

    `links` (devices, devices): the link from one device to another, -1 for one that carries any number of
    transfers at a time; None: each ordered pair has its own. A link carries one transfer at a time, in the
    order in which they are ready, for its occupancy; the latency follows and occupies nothing.

    `reduce_loads`: by part of the layers whose all-reduce goes through ports that others go through as well,
    the seconds for which it takes each of them (see `port_sharing`). `port_seconds`: for how long the most
    loaded port is taken: no step is shorter.

    `transfers`, by what a device does meanwhile:
      "overlapped": it computes on.
      "blocking": a device starts nothing until what its last action sent has arrived. The receiver takes it
        beside its computing.
      "blocking-receive": a transfer begins when, besides, the action before the one it is for has ended on
        the receiving device, which waits; the sender computes on.
      "rendezvous": both. What a device sends of one action and receives for the next is posted together when
        the former ends (as by torch.distributed.batch_isend_irecv); a transfer begins when both sides have
        posted it, and the next action when both have arrived. Some schedules hang so, and are refused.

    `hosts`: actions are launched ahead of the devices, by "one" process that drives all of them, forwards one
    after another and backwards from a thread a device, or by the host of "each" device in the order of its
    list; see `launches`. An action neither starts before its launch starts nor ends before its launch ends.

    All-reduces go on beside all else. A chunk's gradients are ready when its last backward ends, or in
    `buckets` equal parts while it runs; each device has one all-reduce under way at a time. Where several
    places compute the same part of the layers (replicas, Chimera's directions), all of them take part.
    `tied`: sums of the gradients of weights that several parts use, one after another; each begins when all
    its devices have run their lists and ended their own all-reduces and earlier sums.
    """

    forward: Array
    backward: Array
    weight: Array | None = None
    accumulation: Array | None = None
    recompute: Array | None = None
    forward_launch: Array | None = None
    backward_launch: Array | None = None
    weight_launch: Array | None = None
    recompute_launch: Array | None = None
    forward_occupancy: Array | None = None
    forward_latency: Array | None = None
    backward_occupancy: Array | None = None
    backward_latency: Array | None = None
    overhead: Array | None = None
    optimizer: Array | None = None
    all_reduce: Array | None = None
    links: npt.NDArray[np.int64] | None = None
    reduce_loads: Mapping[int, Loads] = field(default_factory=dict)
    port_seconds: float = 0.0
    tied: tuple[TiedSum, ...] = ()
    transfers: Transfers = "overlapped"
    hosts: Hosts = "one"
    buckets: int = 1

    @property
    def candidates(self) -> int | None:
        """Candidates side by side; None where the costs are of one, without that axis."""
        return self.forward.shape[3] if self.forward.ndim == 4 else None

    @staticmethod
    def side_by_side(candidates: Sequence[Costs]) -> Costs:
        """Many in one, of the same runtime and links; all have an array or none has it."""
        stacked: dict[str, Any] = {}
        for name in _ARRAYS:
            arrays = [getattr(costs, name) for costs in candidates]
            if any(values is None for values in arrays) and any(values is not None for values in arrays):
                raise UsageError(f"{name} is None for some candidates", "Give it to all, or to none.")
            if arrays[0] is not None:
                stacked[name] = np.stack(np.broadcast_arrays(*arrays), axis=-1)
        return replace(candidates[0], **stacked)

    def arrays(self) -> dict[str, Array]:
        """All seconds and shares that are given, by name."""
        arrays = ((name, getattr(self, name)) for name in _ARRAYS)
        return {name: values for name, values in arrays if values is not None}

    def candidate(self, index: int) -> Costs:
        """The costs of one of many candidates."""
        arrays: dict[str, Any] = {name: values[..., index] for name, values in self.arrays().items()}
        return replace(self, **arrays)

    def check(self, program: Program) -> None:
        """Raises UsageError, with the argument, where a shape or a value cannot be."""
        devices, chunks = ("stages", program.devices), ("chunks", program.chunks)
        by_action = (devices, chunks, ("micro-batches", program.micro_batches))
        by_cut = (("pipes", len(program.pipes)), ("cuts", program.slots - 1))
        shapes: dict[str, Any] = {
            "all_reduce": (devices, chunks),
            "overhead": (devices,),
            "optimizer": (devices,),
        }
        shapes |= dict.fromkeys(_BY_ACTION, by_action) | dict.fromkeys(_BY_CUT, by_cut)
        many = () if self.candidates is None else (("candidates", self.candidates),)
        for name, shape in shapes.items():
            values = getattr(self, name)
            if values is not None:
                check_shape(name, values, (*shape, *many))
                (check_share if name == "recompute" else check_finite)(name, values)
        if self.weight is None and program.splits_backward:
            raise UsageError(
                "weight is None, and the program has W's", "Give the seconds of the weight gradient."
            )
        self._check_runtime(program)

    def _check_runtime(self, program: Program) -> None:
        check_count("buckets", self.buckets)
        if self.tied and program.update_every is not None:
            raise UsageError(
                f"{self.tied[0].name} is on several stages, and each updates its weights by itself",
                "Keep the layers that use it on one stage.",
            )
        for name, words in (("transfers", TRANSFERS), ("hosts", ("one", "each"))):
            if getattr(self, name) not in words:
                raise UsageError(
                    f"{name} {getattr(self, name)!r}: not known", f"Use one of: {', '.join(words)}."
                )
        if (self.forward_launch is None) != (self.backward_launch is None):
            raise UsageError("one of forward_launch and backward_launch is None", "Give both or neither.")
        if self.recompute_launch is not None and (
            self.backward_launch is None or (self.recompute_launch > self.backward_launch).any()
        ):
            raise UsageError(
                "recompute_launch is a part of backward_launch, and longer",
                "Give what backward_launch has of it.",
            )
        if self.links is not None and self.links.shape != (program.devices,) * 2:
            raise UsageError(
                f"links of shape {self.links.shape} for {program.devices} stages",
                f"Give a link from each to each: ({program.devices}, {program.devices}).",
            )


_ARRAYS = (*_BY_ACTION, *_BY_CUT, "overhead", "optimizer", "all_reduce")


def recompute_shares(mode: str | Sequence[str], program: Program) -> Array:
    """The share of the forward that every B runs again, shape (devices, 1, micro-batches).

    `mode`, one word or one a device: "never"; "always"; "except_last", all micro-batches but the last
    (torchgpipe).
    """
    modes = [mode] * program.devices if isinstance(mode, str) else list(mode)
    if len(modes) != program.devices:
        raise UsageError(
            f"recompute: {len(modes)} words for {program.devices} stages",
            "Give one word, or one for each stage.",
        )
    shares = np.zeros((program.devices, 1, program.micro_batches))
    for own, word in zip(shares, modes, strict=True):
        if word not in ("never", "always", "except_last"):
            raise UsageError(f"recompute {word!r}: not known", "Use one of: never, always, except_last.")
        own[:] = 0.0 if word == "never" else 1.0
        if word == "except_last":
            own[:, -1] = 0.0
    return shares


def check_finite(name: str, values: Any) -> None:
    """Raises UsageError unless all are finite and none is negative."""
    array = np.asarray(values)
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        bad = array[~(np.isfinite(array) & (array >= 0))]
        raise UsageError(f"{name} holds {bad.flat[0]}", "Costs must be finite and not negative.")


def check_share(name: str, values: Any) -> None:
    """Raises UsageError unless all lie between 0 and 1."""
    check_finite(name, values)
    if np.max(values, initial=0.0) > 1:
        raise UsageError(f"{name} holds {np.max(values)}", "A share lies between 0 and 1.")


def check_count(name: str, value: int) -> None:
    """Raises UsageError unless it is 1 or more."""
    if value < 1:
        raise UsageError(f"{name} {value}: must be at least 1", "Give a count of 1 or more.")


def check_shape(name: str, values: Any, shape: tuple[tuple[str, int], ...]) -> None:
    """Raises UsageError where an axis has neither the length it is to have nor 1."""
    lengths = np.shape(values)
    expected = tuple(length for _, length in shape)
    fits = len(lengths) == len(expected) and all(n in (1, m) for n, m in zip(lengths, expected, strict=True))
    if not fits:
        words = ", ".join(f"{name} {length}" for name, length in shape)
        raise UsageError(
            f"{name} of shape {lengths}",
            f"Give ({words}); an axis along which nothing changes may be 1 long.",
        )
