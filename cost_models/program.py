"""Actions of a device, programs of actions, properties of a schedule, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from .errors import UsageError

Kind = Literal["F", "B", "W"]
Number = TypeVar("Number", int, float)


class Action(NamedTuple):
    """Action of a device on one micro-batch.

    Attributes:
        kind: "F" for forward. "B" for the gradient of the input, and of the weights if there is no W of the
            same micro-batch and chunk. "W" for the gradient of the weights.
        micro_batch: Number of the micro-batch, from 0.
        chunk: Number of the chunk among those of the device, from 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f".{self.chunk}" if self.chunk else "")


class StageSlot(NamedTuple):
    """Place where a part of the layers is computed: a device and one of its chunks."""

    device: int
    chunk: int = 0


@dataclass(frozen=True, eq=False)
class Program:
    """Actions of every device for given numbers of devices and micro-batches. Compared by identity.

    Attributes:
        actions: Actions of each device, in order.
        pipes: Places through which a micro-batch passes, in order. The layers are cut into as many parts as a
            pipe has places. The k-th place computes the k-th part.
        pipe_of: Pipe of each micro-batch.
        shares: Size of each entry relative to a whole micro-batch. None if all are whole.
        update_every: Micro-batches per update. An asynchronous device updates its weights after their last
            backward while the pipeline goes on. None for one update at the end.
    """

    actions: tuple[tuple[Action, ...], ...]
    pipes: tuple[tuple[StageSlot, ...], ...]
    pipe_of: tuple[int, ...]
    shares: tuple[float, ...] | None = None
    update_every: int | None = None
    derived: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    """Results that other modules derived from this program, cached for its lifetime."""

    @property
    def devices(self) -> int:
        """Number of devices of the pipeline."""
        return len(self.actions)

    @property
    def micro_batches(self) -> int:
        """Number of entries that go through a pipe."""
        return len(self.pipe_of)

    @cached_property
    def parts_by_slot(self) -> dict[StageSlot, int]:
        """Part of the layers that each place computes."""
        return {slot: part for pipe in self.pipes for part, slot in enumerate(pipe)}

    @property
    def slots(self) -> int:
        """Number of parts into which the layers are cut."""
        return len(self.pipes[0])

    @cached_property
    def parts(self) -> float:
        """Number of parts per device if they were spread evenly over the devices of a pipe."""
        return self.slots / len({place.device for place in self.pipes[0]})

    @cached_property
    def chunks(self) -> int:
        """Largest number of chunks of a device."""
        return 1 + max((place.chunk for pipe in self.pipes for place in pipe), default=0)

    @cached_property
    def splits_backward(self) -> bool:
        """True if some weight gradients are separate actions."""
        return any(action.kind == "W" for actions in self.actions for action in actions)

    def share(self, micro_batch: int) -> float:
        """Return the size of an entry relative to a whole micro-batch."""
        return 1.0 if self.shares is None else self.shares[micro_batch]

    def in_flight(self, device: int) -> Iterator[float]:
        """Yield the number of micro-batches in flight on a device at the start of each of its actions.

        A micro-batch is in flight from the start of its F to the end of its W, or of its B if it has no W. A
        chunk counts as its share of the device's layers: one of v chunks counts 1/v. Whole copies of a stage
        (Chimera) each count in full.
        """
        actions, level = self.actions[device], 0.0
        split = {action[1:] for action in actions if action.kind == "W"}
        last_of = ["W" if action[1:] in split else "B" for action in actions]
        for action, last in zip(actions, last_of, strict=True):
            share = self.share(action.micro_batch)
            level += share if action.kind == "F" else 0.0
            yield level / self.parts
            level -= share if action.kind == last else 0.0


def list_unshards(actions: Sequence[Action], most: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the gathers of weights that are sharded over replicas, of a device with several chunks.

    The gathers are those of torch's looped schedules (torch 2.14, `distributed/pipelining/schedules.py`,
    `_add_unshard_reshard`): when an action begins, the weights of the chunks of the next actions are
    gathered, `most` at a time, and those of all other chunks are resharded.

    Args:
        actions: Actions of the device.
        most: Most chunks that are gathered at a time.

    Returns:
        By action, the chunks that are gathered at its start, and all that are gathered then.
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
    """Return the program of lists without chunks: every micro-batch passes through the devices in order.

    Args:
        actions: Actions of each device.
        update_every: Micro-batches per update. None for one update at the end.
    """
    micro_batches = 1 + max(
        (action.micro_batch for device_actions in actions for action in device_actions), default=-1
    )
    return Program(
        tuple(tuple(device_actions) for device_actions in actions),
        (tuple(StageSlot(device) for device in range(len(actions))),),
        (0,) * micro_batches,
        update_every=update_every,
    )


def same_on_every_stage(value: Number) -> Callable[[int, int, int], Number]:
    """Return a function of stage, stages and micro-batches that always gives `value`."""
    return lambda stage, stages, micro_batches: value  # noqa: ARG005 - called as those that differ


_ONE_VERSION, _NONE_STALE = same_on_every_stage(1), same_on_every_stage(0)


@dataclass(frozen=True)
class Schedule:
    """Schedule with its properties.

    Attributes:
        name: Name of the schedule.
        build: Function that returns the program for (stages, micro_batches), or for (stages, micro_batches,
            virtual_stages) with `any_virtual_stages`. It checks what is special to the schedule. `program`
            checks the rest.
        source: Paper.
        needs: Requirements on a runtime, as text.
        bubble: Idle share of the longest span of a stage from its first to its last action, as text. It holds
            for p equal stages without transfers, m micro-batches and v virtual stages. F, B and W are
            seconds.
        in_flight_formula: Micro-batches that stage i (0-based) holds, as text.
        synchronous: Whether a step uses one version of the weights. Otherwise micro-batches follow each other
            without a flush.
        trains_one_model: Whether all copies have the same weights.
        splits_backward: Whether some weight gradients are separate actions.
        copies: Copies of the weights that a device holds.
        default_virtual_stages: Chunks per device if none are requested.
        any_virtual_stages: Whether any number of chunks per device is possible.
        weight_versions: Function from stage, stages and micro-batches to the number of weight versions.
        chunk_versions: Weight versions by chunk, if chunks differ.
        staleness: Function from stage, stages and micro-batches to the staleness in updates.
        closed_in_flight: Function from stage, stages and micro-batches to the most micro-batches that the
            stage holds. None without a formula.
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
        """Return the program for given numbers of stages, micro-batches and chunks per device.

        Raises:
            UsageError: The schedule cannot run these numbers.
        """
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
        """Return the actions of each stage, in order."""
        return [list(stage_actions) for stage_actions in self.program(stages, micro_batches).actions]

    def in_flight(self, stage: int, stages: int, micro_batches: int) -> float:
        """Return the most micro-batches that `stage` (0-based) holds at a time."""
        if self.closed_in_flight is not None:
            return self.closed_in_flight(stage, stages, micro_batches)
        return max(self.program(stages, micro_batches).in_flight(stage))


def check_multiple(name: str, micro_batches: int, unit: int, of: str) -> None:
    """Check that the number of micro-batches is a multiple of `unit`.

    Args:
        name: Name of the schedule.
        micro_batches: Number of micro-batches.
        unit: Divisor.
        of: Description of the divisor for the message.

    Raises:
        UsageError: The number is not a multiple.
    """
    if micro_batches % unit:
        below = micro_batches - micro_batches % unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise UsageError(
            f"micro-batches {micro_batches}: {name} needs a multiple of {of}, {unit}", f"Use {nearest}."
        )


def check_at_least(name: str, argument: str, value: int, least: int, why: str) -> None:
    """Check that an argument of a schedule is at least `least`.

    Args:
        name: Name of the schedule.
        argument: Name of the argument for the message.
        value: Value of the argument.
        least: Smallest allowed value.
        why: Reason for the message.

    Raises:
        UsageError: The value is too small.
    """
    if value < least:
        raise UsageError(f"{argument} {value}: {name} needs at least {least}, {why}", f"Use {least} or more.")
