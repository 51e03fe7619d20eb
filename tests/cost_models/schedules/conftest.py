"""What the tests of the schedules share: a second simulator, which knows no clock, and drawings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from pplan.cost_models.program import Action, Program, StageSlot
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import simulate

Result = tuple[str, StageSlot, int]
"""A kind, the place and the micro-batch that it is of."""


@dataclass(frozen=True)
class Played:
    """Every action of each device's list with its start and end."""

    spans: list[list[tuple[Action, float, float]]]

    @property
    def makespan(self) -> float:
        return max(own[-1][2] for own in self.spans)

    @property
    def busy(self) -> list[float]:
        return [sum(end - start for _, start, end in own) for own in self.spans]

    @property
    def bubble(self) -> float:
        """Idle share of all devices over the makespan."""
        return 1 - sum(self.busy) / len(self.spans) / self.makespan

    @property
    def rate(self) -> float:
        """Idle share of the longest span of a device, from its first start to its last end."""
        lengths = [own[-1][2] - own[0][1] for own in self.spans]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        return 1 - self.busy[longest] / lengths[longest]


def _needs(program: Program, device: int, action: Action) -> Iterator[Result]:
    """What must be there first: a forward from upstream, its own forward, a gradient from downstream."""
    kind, m, chunk = action
    pipe = program.pipes[program.pipe_of[m]]
    at = pipe.index(StageSlot(device, chunk))
    if kind == "F":
        yield from ((kind, place, m) for place in pipe[at - 1 : at] if at)
    else:
        yield ("F" if kind == "B" else "B", pipe[at], m)
    if kind == "B":
        yield from ((kind, place, m) for place in pipe[at + 1 : at + 2])


def _play(
    program: Program,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    transfer: float = 0.0,
    together: frozenset[tuple[int, int]] = frozenset(),
) -> Played:
    """Any device runs its next action as soon as what it needs is there, until nothing moves.

    Seconds are of a chunk; a B without a W takes both, where the program has W's. `together`: (device,
    position) of an action that is one with the next: neither's result is there before both have ended.
    """
    split = {(d, *a[1:]) for d, own in enumerate(program.actions) for a in own if a.kind == "W"}
    whole = backward + weight if split else backward
    done: dict[Result, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in program.actions]

    def arrival(result: Result, device: int) -> float | None:
        ready = done.get(result)
        return ready if ready is None or result[1].device == device else ready + transfer

    def seconds(device: int, action: Action) -> float:
        kind, m, chunk = action
        takes = {"F": forward, "B": backward if (device, m, chunk) in split else whole, "W": weight}[kind]
        return takes * (1.0 if program.shares is None else program.shares[m])

    def step(device: int) -> bool:
        own, ran = program.actions[device], spans[device]
        group = own[len(ran) : len(ran) + (2 if (device, len(ran)) in together else 1)]
        arrivals = [arrival(need, device) for action in group for need in _needs(program, device, action)]
        if not group or None in arrivals:
            return False
        now = max([ran[-1][2] if ran else 0.0, *(at for at in arrivals if at is not None)])
        for action in group:
            ran.append((action, now, now := now + seconds(device, action)))
        for kind, m, chunk in group:
            done[kind, StageSlot(device, chunk), m] = now
        return True

    while any([step(device) for device in range(program.devices)]):  # noqa: C419 - every device, every time
        pass
    stuck = [own[len(ran)] for own, ran in zip(program.actions, spans, strict=True) if len(ran) < len(own)]
    assert not stuck, f"waiting for ever: {stuck}"
    return Played(spans)


def _play_both(
    program: Program,
    forward: float = 1.0,
    backward: float = 1.0,
    weight: float = 1.0,
    transfer: float = 0.0,
) -> Played:
    """The same, seen to be what pplan's simulator gives."""
    played = _play(program, forward, backward, weight, transfer)

    def table(seconds: float) -> npt.NDArray[np.float64]:
        return np.full((program.devices, program.chunks, 1), float(seconds))

    latency = np.full((1, len(program.pipes[0]) - 1), float(transfer))
    costs = Costs(
        forward=table(forward),
        backward=table(backward),
        weight=table(weight) if any(a.kind == "W" for own in program.actions for a in own) else None,
        forward_latency=latency,
        backward_latency=latency,
    )
    simulated = {(s.stage, s.action): (s.start, s.end) for s in simulate(program, costs).spans}
    expected = {(device, action): times for device, own in enumerate(played.spans) for action, *times in own}
    assert simulated.keys() == expected.keys()
    times = [simulated[key] for key in expected]
    np.testing.assert_allclose(times, list(expected.values()), rtol=1e-12, atol=1e-12)
    return played


def _picture(program: Program, tick: float = 1.0, **seconds: float) -> str:
    """A row a device, a cell a tick; lower case for a second chunk, - where an action goes on."""
    played = _play_both(program, **seconds)
    rows = []
    for own in played.spans:
        row = ["."] * round(played.makespan / tick)
        for action, start, end in own:
            first, last = round(start / tick), round(end / tick)
            row[first:last] = ["-"] * (last - first)
            row[first] = (action.kind.lower() if action.chunk else action.kind) + str(action.micro_batch)
        rows.append(" ".join(cell.ljust(2) for cell in row).rstrip(" ."))
    return "\n".join(rows)


@pytest.fixture
def play() -> Callable[..., Played]:
    """`play(program, forward=1, backward=1, weight=1, transfer=0)`, in both simulators."""
    return _play_both


@pytest.fixture
def play_together() -> Callable[..., Played]:
    """The same with `together`, which pplan's simulator does not know."""
    return _play


@pytest.fixture
def picture() -> Callable[..., str]:
    """`picture(program, tick=1, **seconds)`: a drawing, to be compared with `drawn`."""
    return _picture


@pytest.fixture
def drawn() -> Callable[[str], str]:
    """A drawing as it stands in a test, in the form that `picture` gives."""

    def plain(text: str) -> str:
        rows = (" ".join(cell.ljust(2) for cell in line.split()) for line in text.strip().splitlines())
        return "\n".join(row.rstrip(" .") for row in rows)

    return plain
