"""An action of a device, a program of actions, what a schedule has to say of itself, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import UsageError

Kind = Literal["F", "B", "W"]
Number = TypeVar("Number", int, float)


class Action(NamedTuple):
    """What a device does with one micro-batch (0-based) on one of its chunks.

    F: forward. B: the gradient of the input, and of the weights too unless a W of the same micro-batch and
    chunk stands in the list. W: the gradient of the weights. `chunk` is the stage among the device's own.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class StageSlot(NamedTuple):
    """Where a part of the layers is computed: a device and a chunk of it."""

    device: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Program:
    """What runs where, for given numbers of devices and micro-batches. Compared by identity: it is large.

    `actions`: each device's list. `pipes`: the places that a micro-batch goes through, in order; the layers
    are cut into as many parts as a pipe has places, and its k-th place computes the k-th part. `pipe_of`: the
    pipe of each micro-batch. `shares`: the part of a micro-batch that each entry is (None: all are whole).
    `update_every`: micro-batches after whose last backward a device updates its weights at once, beside what
    goes on (asynchronous schedules); None: one update, at the end.
    """

    actions: tuple[tuple[Action, ...], ...]
    pipes: tuple[tuple[StageSlot, ...], ...]
    pipe_of: tuple[int, ...]
    shares: tuple[float, ...] | None = None
    update_every: int | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """What others have worked out of this program, kept as long as it is."""

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return len(self.actions)

    @property
    def micro_batches(self) -> int:
        """Entries that go through a pipe."""
        return len(self.pipe_of)

    @cached_property
    def parts_by_slot(self) -> dict[StageSlot, int]:
        """The part of the layers that each place computes."""
        return {slot: part for pipe in self.pipes for part, slot in enumerate(pipe)}

    @property
    def slots(self) -> int:
        """Parts that the layers are cut into."""
        return len(self.pipes[0])

    @cached_property
    def parts(self) -> float:
        """Parts that make up the layers of a device, were they spread evenly over the devices of a pipe."""
        return self.slots / len({place.device for place in self.pipes[0]})

    @cached_property
    def chunks(self) -> int:
        """Most chunks of a device."""
        return 1 + max((place.chunk for pipe in self.pipes for place in pipe), default=0)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some weight gradients are actions of their own."""
        return any(action.kind == "W" for own in self.actions for action in own)

    def share(self, micro_batch: int) -> float:
        """The part of a micro-batch that this entry is."""
        return 1.0 if self.shares is None else self.shares[micro_batch]

    def in_flight(self, device: int) -> Iterator[float]:
        """Micro-batches in flight on a device as it starts each of its actions.

        One is in flight from the start of its F to the end of its W, or of its B where it has no W. Of a
        part of the device's layers counts what the part is of them: a chunk of v counts 1/v, and of whole
        copies of a stage (Chimera) each counts in full.
        """
        own, level = self.actions[device], 0.0
        split = {action[1:] for action in own if action.kind == "W"}
        last_of = ["W" if action[1:] in split else "B" for action in own]
        for action, last in zip(own, last_of, strict=True):
            share = self.share(action.micro_batch)
            level += share if action.kind == "F" else 0.0
            yield level / self.parts
            level -= share if action.kind == last else 0.0


def list_unshards(actions: Sequence[Action], most: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """List the gathers of weights that are sharded over replicas, of a device with several chunks.

    As torch's looped schedules place them (torch 2.14, `distributed/pipelining/schedules.py`,
    `_add_unshard_reshard`): when an action begins, the weights of the chunks that the next actions are of are
    gathered, `most` at a time, and those of all others are resharded.

    Args:
        actions: The device's list.
        most: Most chunks that are gathered at a time.

    Returns:
        By action, the chunks that are gathered as it begins, and all that are gathered then.
    """
    upcoming: list[int] = []
    windows: list[tuple[int, ...]] = []
    for action in reversed(actions):
        upcoming = [action.chunk, *(chunk for chunk in upcoming if chunk != action.chunk)]
        windows.append(tuple(upcoming[:most]))
    windows.reverse()
    return [
        (tuple(chunk for chunk in chunks if chunk not in earlier), chunks)
        for earlier, chunks in zip([(), *windows], windows, strict=False)
    ]


def linear_program(actions: list[list[Action]], *, update_every: int | None = None) -> Program:
    """The program of lists without chunks: every micro-batch goes through the devices in order."""
    micro_batches = 1 + max((action.micro_batch for own in actions for action in own), default=-1)
    return Program(
        tuple(tuple(own) for own in actions),
        (tuple(StageSlot(device) for device in range(len(actions))),),
        (0,) * micro_batches,
        update_every=update_every,
    )


def same_on_every_stage(value: Number) -> Callable[[int, int, int], Number]:
    """A figure of a schedule that is the same on every stage, whatever the numbers."""
    return lambda stage, stages, micro_batches: value  # noqa: ARG005 - called as those that differ


_ONE_VERSION, _NONE_STALE = same_on_every_stage(1), same_on_every_stage(0)


@dataclass(frozen=True)
class Schedule:
    """A schedule. `build(stages, micro_batches)` makes its program, or `build(stages, micro_batches,
    virtual_stages)` with `any_virtual_stages`; it checks what is special to it, `program` what all have in
    common.

    `source`: the paper. `needs`: what a runtime must be able to do, in words. `copies`: weights that a device
    holds. `synchronous`: whether one version of the weights makes a whole step; where not, `micro_batches` go
    through in a row without a flush. `trains_one_model`: whether the copies have the same weights.
    `splits_backward`: whether some weight gradients are actions of their own. `weight_versions` and
    `staleness` (in updates) take stage, stages, micro-batches; `chunk_versions`: by chunk, where they differ.
    `closed_in_flight`: the most micro-batches that a stage holds, where a formula says it. `bubble` and
    `in_flight_formula`, to be read: the idle share of the longest span of a stage, from its first to its last
    action, of equal stages without transfers, and the micro-batches that stage i of p (0-based) holds, of m
    micro-batches and v virtual stages; F, B, W are seconds.
    """

    name: str
    build: Callable[..., Program]
    source: str
    needs: str
    bubble: str
    in_flight_formula: str
    synchronous: bool = True
    trains_one_model: bool = True
    splits_backward: bool = False
    copies: int = 1
    default_virtual_stages: int = 1
    any_virtual_stages: bool = False
    weight_versions: Callable[[int, int, int], float] = _ONE_VERSION
    chunk_versions: tuple[float, ...] = ()
    staleness: Callable[[int, int, int], int] = _NONE_STALE
    closed_in_flight: Callable[[int, int, int], int] | None = None

    def program(self, stages: int, micro_batches: int, virtual_stages: int | None = None) -> Program:
        """What runs where. Raises UsageError, with the argument, for numbers the schedule cannot run."""
        chunks = self.default_virtual_stages if virtual_stages is None else virtual_stages
        counts = (("stages", stages), ("micro-batches", micro_batches), ("virtual stages", chunks))
        for argument, value in counts:
            if value < 1:
                raise UsageError(f"{argument} {value}: must be at least 1", "Give a count of 1 or more.")
        if self.any_virtual_stages:
            return self.build(stages, micro_batches, chunks)
        if chunks != self.default_virtual_stages:
            raise UsageError(
                f"virtual stages {chunks}: {self.name} runs {self.default_virtual_stages} on a device",
                f"Leave virtual stages at {self.default_virtual_stages}, or take a schedule of several: "
                "interleaved, looped-bfs.",
            )
        return self.build(stages, micro_batches)

    def actions(self, stages: int, micro_batches: int) -> list[list[Action]]:
        """Each stage's actions in order."""
        return [list(own) for own in self.program(stages, micro_batches).actions]

    def in_flight(self, stage: int, stages: int, micro_batches: int) -> float:
        """The most micro-batches that `stage` (0-based) holds at a time."""
        if self.closed_in_flight is not None:
            return self.closed_in_flight(stage, stages, micro_batches)
        return max(self.program(stages, micro_batches).in_flight(stage))


def check_multiple(name: str, micro_batches: int, unit: int, of: str) -> None:
    """Raises UsageError unless the micro-batches of schedule `name` are a multiple of `unit`, named `of`."""
    if micro_batches % unit:
        below = micro_batches - micro_batches % unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise UsageError(
            f"micro-batches {micro_batches}: {name} needs a multiple of {of}, {unit}", f"Use {nearest}."
        )


def check_at_least(name: str, argument: str, value: int, least: int, why: str) -> None:
    """Raises UsageError where `value` of `argument` is below `least`."""
    if value < least:
        raise UsageError(f"{argument} {value}: {name} needs at least {least}, {why}", f"Use {least} or more.")
