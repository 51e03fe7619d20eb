"""Dependencies of a program's actions, and their order on a clock on which each takes one tick.

- A forward needs the forward of the previous place.
- A backward needs the backward of the next place and the forward of its place.
- A weight gradient needs the backward of its place.
- Every action needs the previous action in its device's list.

The order of the clock is also the one in which a process that drives all devices launches them (torchgpipe's
clock cycles). All functions take time and memory linear in the number of actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import UsageError
from .program import Action, Program

Indices = npt.NDArray[np.int64]
NONE = -1
KINDS = ("F", "B", "W")


@dataclass(frozen=True, eq=False)
class Order:
    """Actions of a program in the order of the clock, as arrays of shape (actions,).

    Attributes:
        program: Program of the actions.
        kind: Index of `KINDS`.
        device: Device that runs the action.
        chunk: Chunk of the device.
        micro_batch: Number of the micro-batch.
        pipe: Pipe of the micro-batch.
        place: Position in the pipe.
        previous: Position in this order of the previous action on the device, -1 for none.
        source: Position of the action on another device from which it receives, -1 for none.
        target: Position of the action on another device to which it sends, -1 for none.
        splits: Mask of backwards whose weight gradient is a separate action.
    """

    program: Program
    kind: Indices
    device: Indices
    chunk: Indices
    micro_batch: Indices
    pipe: Indices
    place: Indices
    previous: Indices
    source: Indices
    target: Indices
    splits: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def of_kind(self) -> tuple[Indices, Indices, Indices]:
        """Positions of the forwards, of the backwards, and of the weight gradients."""
        forwards, backwards, weights = (np.flatnonzero(self.kind == code) for code in range(3))
        return forwards, backwards, weights

    @cached_property
    def sends(self) -> Indices:
        """Positions of the actions whose result goes to another device."""
        return np.flatnonzero(self.target != NONE)

    @cached_property
    def pair_link(self) -> Indices:
        """Number from 0 for each ordered pair of devices that an action sends between, else -1."""
        link = np.full(len(self), NONE)
        pairs = self.device[self.sends] * self.program.devices + self.device[self.target[self.sends]]
        _, link[self.sends] = np.unique(pairs, return_inverse=True)
        return link

    @cached_property
    def cut(self) -> Indices:
        """Row of each action's transfer in a flattened table by (direction, pipe, cut).

        Actions that send nothing have the row after the last.
        """
        program = self.program
        pipes, cuts = len(program.pipes), program.slots - 1
        rows = (np.minimum(self.kind, 1) * pipes + self.pipe) * cuts + self.place - (self.kind == 1)
        return np.where(self.target == NONE, 2 * pipes * cuts, rows)

    @cached_property
    def finishing(self) -> npt.NDArray[np.bool_]:
        """Mask of the actions that end the work on their micro-batch and chunk: W, or B if there is no W."""
        finishing: npt.NDArray[np.bool_] = (self.kind == 2) | ((self.kind == 1) & ~self.splits)
        return finishing

    @cached_property
    def first_backwards(self) -> Indices:
        """Positions of the actions that accumulate no gradients: the first finished backward on each chunk.

        The array is empty for asynchronous programs, whose runtimes add to gradients set to 0.
        """
        if self.program.update_every is not None:
            return np.zeros(0, dtype=np.int64)
        finishing = np.flatnonzero(self.finishing)
        chunk = self.device[finishing] * self.program.chunks + self.chunk[finishing]
        _, first = np.unique(chunk, return_index=True)
        return np.sort(finishing[first])

    @cached_property
    def actions(self) -> list[Action]:
        """Actions in the order of the clock."""
        columns = (self.kind.tolist(), self.micro_batch.tolist(), self.chunk.tolist())
        return [Action(KINDS[kind], m, chunk) for kind, m, chunk in zip(*columns, strict=True)]  # type: ignore[arg-type]

    @cached_property
    def lists(self) -> dict[str, list[int]]:
        """Some columns as lists, which plain Python reads several times faster."""
        return {
            name: getattr(self, name).tolist() for name in ("device", "source", "target", "cut", "pair_link")
        }


def resolve_order(program: Program) -> Order:
    """Return the order of a program, cached for the program's lifetime.

    Raises:
        UsageError: Lists are incomplete, repeat an action, or wait for each other forever.
    """
    if "order" not in program.derived:
        program.derived["order"] = _ActionLists(program).order()
    order: Order = program.derived["order"]
    return order


class _ActionLists:
    """Actions of a program in the order of its lists, device after device."""

    def __init__(self, program: Program) -> None:
        self.program = program
        actions = [action for device_actions in program.actions for action in device_actions]
        lengths = [len(device_actions) for device_actions in program.actions]
        self.device = np.repeat(np.arange(len(lengths)), lengths)
        self.kind = np.array([_CODES.get(action[0], NONE) for action in actions], dtype=np.int64)
        self.micro_batch = np.array([action[1] for action in actions], dtype=np.int64)
        self.chunk = np.array([action[2] for action in actions], dtype=np.int64)
        self._check_known()
        self.pipe = np.array(program.pipe_of)[self.micro_batch]
        self.place = _positions(program)[self.pipe, self.device, self.chunk]
        self._check_placed()
        self.where = self._where()
        self._wire()

    def _action(self, index: int) -> Action:
        first = int(np.searchsorted(self.device, self.device[index]))
        return self.program.actions[int(self.device[index])][index - first]

    def _action_text(self, index: int) -> str:
        return f"{self._action(index)} of stage {self.device[index]}"

    def _check_known(self) -> None:
        counts = (self.program.micro_batches, self.program.chunks)
        odd = (self.kind == NONE) | (self.micro_batch < 0) | (self.micro_batch >= counts[0])
        odd |= (self.chunk < 0) | (self.chunk >= counts[1])
        if odd.any():
            raise UsageError(
                f"{self._action_text(int(odd.argmax()))}: there is no such action",
                f"Kinds are F, B and W, micro-batches 0 to {counts[0] - 1}, chunks 0 to {counts[1] - 1}.",
            )

    def _check_placed(self) -> None:
        astray = self.place == NONE
        if astray.any():
            index = int(astray.argmax())
            pipe = self.program.pipes[int(self.pipe[index])]
            raise UsageError(
                f"{self._action_text(index)} stands where its micro-batch does not pass",
                f"Its pipe goes through {', '.join(f'stage {p.device} chunk {p.chunk}' for p in pipe)}.",
            )

    def _where(self) -> Indices:
        """Return the (kinds, micro-batches, places) index of each action, -1 for none."""
        shape = (3, self.program.micro_batches, self.program.slots)
        keys = np.ravel_multi_index((self.kind, self.micro_batch, self.place), shape)
        where = np.full(int(np.prod(shape)), NONE, dtype=np.int64)
        where[keys] = np.arange(len(keys))
        repeated = where[keys] != np.arange(len(keys))
        if repeated.any():
            index = int(repeated.argmax())
            raise UsageError(
                f"stage {self.device[index]} runs {self._action(index)} twice", "List every action once."
            )
        table = where.reshape(shape)
        missing = np.argwhere(table[:2].transpose(1, 2, 0) == NONE)
        if len(missing):
            m, place, kind = (int(value) for value in missing[0])
            at = self.program.pipes[self.program.pipe_of[m]][place]
            action = Action(KINDS[kind], m, at.chunk)  # type: ignore[arg-type]
            raise UsageError(
                f"stage {at.device}: {action} is missing{self._waiting_for(table, kind, m, place)}",
                f"Every place runs F and B of the micro-batches 0 to {self.program.micro_batches - 1}.",
            )
        return table

    def _waiting_for(self, table: Indices, kind: int, m: int, place: int) -> str:
        """Name the listed action that would wait for a missing one.

        It is the action of the place that gets the result, else the next action of the same place.
        """
        following = place + (1 if KINDS[kind] == "F" else -1)
        sent = table[kind, m, following] if 0 <= following < self.program.slots else NONE
        waiting = int(sent if sent != NONE else table[kind + 1, m, place])
        return "" if waiting == NONE else f", and {self._action_text(waiting)} waits for it"

    def _wire(self) -> None:
        """Set the dependencies of each action: `previous` on its device, `received` from, and `own` place."""
        count, places = len(self.kind), self.program.slots
        first = np.ones(count, dtype=np.bool_)
        first[1:] = self.device[1:] != self.device[:-1]
        self.previous = np.where(first, NONE, np.arange(count) - 1)
        self.received, self.own = np.full(count, NONE), np.full(count, NONE)
        forward, backward, weight = (self.kind == code for code in range(3))
        for mask, step in ((forward & (self.place > 0), -1), (backward & (self.place < places - 1), 1)):
            at = (self.kind[mask], self.micro_batch[mask], self.place[mask] + step)
            self.received[mask] = self.where[at]
        for mask in (backward, weight):
            at = (self.kind[mask] - 1, self.micro_batch[mask], self.place[mask])
            self.own[mask] = self.where[at]

    def order(self) -> Order:
        """Return all actions in the order of the clock."""
        clock = np.array(self._clock(), dtype=np.int64)
        # One more entry, so that an index of -1 stays -1.
        rank = np.full(len(clock) + 1, NONE)
        rank[clock] = np.arange(len(clock))
        received = np.append(self.received, NONE)
        remote = (self.received != NONE) & (self.device[self.received] != self.device)
        source = rank[np.where(remote, received[:-1], NONE)][clock]
        target = np.full(len(clock) + 1, NONE)
        target[source] = np.arange(len(clock))
        split = (self.kind == 1) & (self.where[2, self.micro_batch, self.place] != NONE)
        return Order(
            self.program,
            kind=self.kind[clock],
            device=self.device[clock],
            chunk=self.chunk[clock],
            micro_batch=self.micro_batch[clock],
            pipe=self.pipe[clock],
            place=self.place[clock],
            previous=rank[self.previous][clock],
            source=source,
            target=target[:-1],
            splits=split[clock],
        )

    def _clock(self) -> list[int]:
        waits = (self.previous, self.received, self.own)
        missing: list[int] = np.sum([wait != NONE for wait in waits], axis=0).tolist()
        followers = [_inverse(wait) for wait in waits]
        order: list[int] = []
        ready = [index for index, count in enumerate(missing) if not count]
        while ready:
            order += ready
            following = []
            for index in ready:
                for follower in followers:
                    other = follower[index]
                    if other != NONE:
                        missing[other] -= 1
                        if not missing[other]:
                            following.append(other)
            ready = sorted(following)
        if len(order) < len(missing):
            raise self._deadlock(order)
        return order

    def _deadlock(self, order: list[int]) -> UsageError:
        """Return the error that names the cycle of devices that wait for each other."""
        done = np.zeros(len(self.kind) + 1, dtype=np.bool_)
        done[[*order, NONE]] = True
        stuck = np.flatnonzero(~done[:-1] & done[self.previous])
        heads = {int(self.device[index]): int(index) for index in stuck}
        waits: dict[int, str] = {}
        device = min(heads)
        while device not in waits:
            head = heads[device]
            needed = int(self.own[head] if not done[self.own[head]] else self.received[head])
            waits[device] = f"stage {device} waits at {self._action(head)} for {self._action_text(needed)}"
            device = int(self.device[needed])
        circle = list(waits)[list(waits).index(device) :]
        return UsageError(
            "the actions wait for each other: " + "; ".join(waits[d] for d in circle),
            "Change the order of one of them.",
        )


_CODES: dict[Any, int] = {kind: code for code, kind in enumerate(KINDS)}


def _inverse(wait: Indices) -> list[int]:
    """Return the action that waits for each action, -1 for none."""
    follower = np.full(len(wait) + 1, NONE)
    follower[wait] = np.arange(len(wait))
    inverse: list[int] = follower[:-1].tolist()
    return inverse


def _positions(program: Program) -> Indices:
    """Return the (pipes, devices, chunks) position of each place in each pipe, -1 for none."""
    positions = np.full((len(program.pipes), program.devices, program.chunks), NONE)
    for pipe, places in enumerate(program.pipes):
        for position, place in enumerate(places):
            positions[pipe, *place] = position
    return positions
