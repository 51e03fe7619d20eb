"""The order of actions of every synchronous schedule, each by its own rule, and whether it can be run.

An action is a kind (F, B; W where the gradient of the weights is apart), a micro-batch and a chunk of the
device, counted from 0. p devices, device i of them, m micro-batches, v parts of the layers on each device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from .report import ImpossiblePlan, NotChecked

Action = tuple[str, int, int]
Slot = tuple[int, int]
"""A device of the pipeline, and a chunk of it."""
MOST_CELLS = 2**21
"""Micro-batches times parts of the layers; each some 2 KiB."""


@dataclass(frozen=True, eq=False)
class ScheduleOrder:
    """`lists`: each device's actions in order. `routes`: the places that a micro-batch passes, one route or
    one a pipe; `route_of` each micro-batch; `shares`: what part of a micro-batch each entry is. `most_held`:
    the micro-batches that each device holds at the most, as the schedule's definition says. `rule` in words.
    """

    lists: list[list[Action]]
    routes: list[list[Slot]]
    route_of: list[int]
    shares: list[float]
    most_in_flight: list[float]
    rule: str

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return len(self.lists)

    @property
    def parts(self) -> int:
        """Parts that the layers are cut into."""
        return len(self.routes[0])

    @property
    def splits(self) -> bool:
        """Whether some gradients of weights are actions of their own."""
        return any(kind == "W" for own in self.lists for kind, _, _ in own)

    def device_stages(self, device: int) -> list[int]:
        """The parts that the plan has on a device: those of its first route."""
        return [part for part, (at, _) in enumerate(self.routes[0]) if at == device]

    def device_parts(self, device: int) -> list[int]:
        """By chunk of a device, the part of the layers that it computes."""
        part_of_chunk = {
            chunk: part for way in self.routes for part, (at, chunk) in enumerate(way) if at == device
        }
        return [part_of_chunk[chunk] for chunk in range(len(part_of_chunk))]


def make_order(schedule: str, p: int, m: int, v: int) -> ScheduleOrder:
    """The order of a schedule. Raises NotLegal for a name or numbers that cannot be, NotChecked for so many
    micro-batches and stages that it would not fit into memory."""
    if schedule not in _RULES:
        raise ImpossiblePlan(f"schedule {schedule[:40]!r} is none of {', '.join(_RULES)}")
    if min(p, m, v) < 1:
        raise ImpossiblePlan(f"{p} devices, {m} micro-batches, {v} parts of the layers on a device")
    rule, parts, build = _RULES[schedule]
    if parts and v != parts:
        raise ImpossiblePlan(f"{schedule} has {parts} parts of the layers on a device, the plan {v}")
    if p * m * v > MOST_CELLS:
        raise NotChecked(f"{m} micro-batches on {p * v} stages are more than {MOST_CELLS} together")
    return ScheduleOrder(*build(p, m, v), rule=rule)


OrderParts = tuple[list[list[Action]], list[list[Slot]], list[int], list[float], list[float]]


def _linear(lists: list[list[Action]], m: int, most_in_flight: list[float]) -> OrderParts:
    return lists, [[(device, 0) for device in range(len(lists))]], [0] * m, [1.0] * m, most_in_flight


def _naive(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    order = [(kind, batch, 0) for batch in range(m) for kind in "FB"]
    return _linear([order] * p, m, [1.0] * p)


def _gpipe(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    order = [("F", batch, 0) for batch in range(m)] + [("B", m - 1 - batch, 0) for batch in range(m)]
    return _linear([order] * p, m, [float(m)] * p)


def _limited_in_flight(m: int, ahead: int, weights_behind: int | None) -> Iterator[Action]:
    """F while fewer than `ahead` micro-batches wait for their B, and any are left; else B, and where the
    weights' gradients are apart, a W once more than so many of them are behind."""
    forwards = backwards = weights = 0
    while backwards < m:
        if forwards < m and forwards - backwards < ahead:
            yield "F", forwards, 0
            forwards += 1
            continue
        yield "B", backwards, 0
        backwards += 1
        if weights_behind is not None and backwards - weights > weights_behind:
            yield "W", weights, 0
            weights += 1
    if weights_behind is not None:
        yield from (("W", batch, 0) for batch in range(weights, m))


def _one_f_one_b(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    lists = [list(_limited_in_flight(m, p - i, None)) for i in range(p)]
    return _linear(lists, m, [float(min(m, p - i)) for i in range(p)])


def _zb_h1(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    return _linear([list(_limited_in_flight(m, p - i, i)) for i in range(p)], m, [float(min(m, p))] * p)


def _zb_h2(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    lists = [list(_limited_in_flight(m, 2 * (p - i) - 1, 2 * i)) for i in range(p)]
    return _linear(lists, m, [float(min(m, 2 * p - 1))] * p)


def _autopipe(p: int, m: int, v: int) -> OrderParts:
    lists, _, _, _, most_in_flight = _one_f_one_b(p, m, v)
    halves = [
        [(kind, entry, 0) for kind, batch, _ in own for entry in ((0, 1) if batch == 0 else (batch + 1,))]
        for own in lists
    ]
    halved = _linear(halves, m + 1, most_in_flight)
    return *halved[:3], [0.5, 0.5, *([1.0] * (m - 1))], most_in_flight


def _avgpipe(p: int, m: int, v: int) -> OrderParts:
    if m % 2:
        raise ImpossiblePlan(f"avgpipe deals micro-batches to 2 pipelines in turn, and there are {m}")
    lists, _, _, _, most_in_flight = _one_f_one_b(p, m // 2, v)
    both = [[(kind, 2 * batch + pipe, pipe) for kind, batch, _ in own for pipe in (0, 1)] for own in lists]
    routes = [[(device, pipe) for device in range(p)] for pipe in (0, 1)]
    return both, routes, [batch % 2 for batch in range(m)], [1.0] * m, [2 * own for own in most_in_flight]


def _looped_places(p: int, v: int) -> list[list[Slot]]:
    return [[(device, chunk) for chunk in range(v) for device in range(p)]]


def _looped_bfs(p: int, m: int, v: int) -> OrderParts:
    forwards = [("F", batch, chunk) for chunk in range(v) for batch in range(m)]
    order = forwards + [("B", batch, chunk) for _, batch, chunk in reversed(forwards)]
    return [order] * p, _looped_places(p, v), [0] * m, [1.0] * m, [float(m)] * p


def _interleaved(p: int, m: int, v: int) -> OrderParts:
    lists = _in_rounds(p, m, v, [(v - 1) * p + 2 * (p - 1 - i) for i in range(p)])
    most_in_flight = [min(v * m, 2 * (p - i - 1) + (v - 1) * p + 1) / v for i in range(p)]
    return lists, _looped_places(p, v), [0] * m, [1.0] * m, most_in_flight


def _wpipe(p: int, m: int, v: int) -> OrderParts:
    lists = _in_rounds(p, m, v, [2 * p - 1 - i for i in range(p)])
    return lists, _looped_places(p, v), [0] * m, [1.0] * m, [p - i / 2 for i in range(p)]


def _in_rounds(p: int, m: int, v: int, ahead_of: list[int]) -> list[list[Action]]:
    """Of p micro-batches through all parts of a device, with so many F ahead on each."""
    if m % p:
        raise ImpossiblePlan(f"the schedule goes in rounds of {p} micro-batches, and there are {m}")
    lists, turns = list[list[Action]](), m * v

    def forward(turn: int) -> Action:
        return "F", turn // (p * v) * p + turn % p, turn // p % v

    def backward(turn: int) -> Action:
        return "B", turn // (p * v) * p + turn % p, v - 1 - turn // p % v

    for most in ahead_of:
        ahead = min(most, turns)
        own = [forward(turn) for turn in range(ahead)]
        for turn in range(turns - ahead):
            own += [forward(turn + ahead), backward(turn)]
        lists.append(own + [backward(turn) for turn in range(turns - ahead, turns)])
    return lists


def _chimera(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    if p % 2 or m % p:
        raise ImpossiblePlan(
            f"chimera needs an even number of devices that divides the {m} micro-batches, not {p}"
        )
    way_of = [batch % p * 2 // p for batch in range(m)]
    lists = []
    for device in range(p):
        ticks = []
        for batch, way in enumerate(way_of):
            stage = p - 1 - device if way else device
            tick = 2 * p * (batch // p) + 2 * (batch % (p // 2))
            ticks += [(tick + stage, ("F", batch, way)), (tick + 2 * p - 1 - stage, ("B", batch, way))]
        lists.append([action for _, action in sorted(ticks)])
    down = [(device, 0) for device in range(p)]
    up = [(device, 1) for device in range(p - 1, -1, -1)]
    return lists, [down, up], way_of, [1.0] * m, [float(p)] * p


def _number_actions(turns: list[str], m: int) -> list[Action]:
    """Turns such as `F0`, a kind and a chunk: each kind takes the micro-batches of each chunk in order."""
    done: dict[str, int] = {}
    actions = []
    for turn in turns:
        batch = done.get(turn, 0)
        done[turn] = batch + 1
        if batch < m:
            actions.append((turn[0], batch, int(turn[1])))
    return actions


def _v_places(p: int) -> list[list[Slot]]:
    return [[(device, 0) for device in range(p)] + [(device, 1) for device in range(p - 1, -1, -1)]]


def _zb_v(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    lists, most = [], max(m, 2 * p - 1)
    for i in range(p):
        left = p - i
        turns = ["F0"] * (2 * left - 1) + ["F1", "F0"] * i + ["F1", "B1", "W1"] * left
        turns += ["F0", "B0", "W0", "F1", "B1", "W1"] * (most - 2 * p + i + 1)
        turns += ["B0", "W0", "F1", "B1", "W1"] * (left - 1)
        turns += ["B0", "B1"] * i + ["B0", "W0"] * left + ["W1"] * i + ["W0"] * i
        lists.append(_number_actions(turns, m))
    return lists, _v_places(p), [0] * m, [1.0] * m, [float(min(m, p))] * p


def _dualpipe_v(p: int, m: int, v: int) -> OrderParts:  # noqa: ARG001
    """A B whose W does not stand in the list is a whole backward."""
    if m < 2 * p:
        raise ImpossiblePlan(f"dualpipe-v needs {2 * p} micro-batches on {p} devices, there are {m}")
    lists = []
    for i in range(p):
        after, own = p - 1 - i, i + 1
        turns = ["F0"] * (2 * after) + ["F0", "F1"] * own + ["B1", "W1", "F1"] * after
        turns += ["F0", "B1", "F1", "B0"] * (m - 2 * p + own) + ["B1", "F1", "B0"] * after
        fill = len(turns)
        order = _number_actions(turns + ["B1", "B0"] * own + ["B0"] * after, m)
        drain = order[fill:]
        late = [("W", batch, chunk) for _, batch, chunk in drain[own:]]
        end = drain[: 2 * own]
        for weight, backward in zip(late, drain[2 * own :], strict=False):
            end += [weight, backward]
        lists.append(order[:fill] + end + late[after:])
    return lists, _v_places(p), [0] * m, [1.0] * m, [p + 0.5] * p


_ONE = "device i runs F while fewer than p - i micro-batches wait for their B, else B"
_RULES: dict[str, tuple[str, int, Callable[[int, int, int], OrderParts]]] = {
    "naive": ("F and B of a micro-batch before the F of the next", 1, _naive),
    "gpipe": ("all F, then all B, the last micro-batch first", 1, _gpipe),
    "1f1b": (_ONE, 1, _one_f_one_b),
    "dapple": (_ONE, 1, _one_f_one_b),
    "autopipe": (f"{_ONE}; micro-batch 0 in halves", 1, _autopipe),
    "avgpipe": (f"{_ONE}; two pipelines in turn", 1, _avgpipe),
    "zb-h1": (f"{_ONE}; W once i more B than W are done", 1, _zb_h1),
    "zb-h2": ("F while fewer than 2(p - i) - 1 wait, else B; W once 2i more B than W are done", 1, _zb_h2),
    "interleaved": (
        "rounds of p micro-batches; (v - 1) p + 2 (p - 1 - i) F ahead, then F and B",
        0,
        _interleaved,
    ),
    "wpipe": ("rounds of p micro-batches; 2p - 1 - i F ahead, then F and B, without an end", 2, _wpipe),
    "looped-bfs": ("all F chunk by chunk, then all B the other way round", 0, _looped_bfs),
    "chimera": (
        "halves of each p micro-batches in opposite directions, by the clock of equal F and B",
        1,
        _chimera,
    ),
    "zb-v": ("the turns of torch.distributed.pipelining's ScheduleZBVZeroBubble", 2, _zb_v),
    "dualpipe-v": ("the turns of torch.distributed.pipelining's ScheduleDualPipeV", 2, _dualpipe_v),
}
"""By schedule the rule in words, the parts of a device (0: any number), and what builds it."""
ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "wpipe", "xpipe")
"""Never flushed: their step is that of a steady state, which is not checked. All but WPipe run 1f1b's lists
without an end."""
SYNCHRONOUS = tuple(name for name in _RULES if name not in ASYNCHRONOUS)


_ACTION = re.compile(r"([FBW])(\d{1,7})(?:\.(\d{1,3}))?")


def read_written_order(lines: Sequence[str], p: int, m: int, v: int) -> ScheduleOrder:
    """The order that a plan writes out, of p devices, m micro-batches and v parts of the layers on each.

    Raises ImpossiblePlan for lines that are none; wiring it checks that it is complete and can be run."""
    places = "line"
    lists: dict[int, list[Action]] = {}
    for line in lines:
        key, _, content = line.partition(":")
        if key == "places":
            places = content.strip()
        elif key.startswith("device "):
            number = key.removeprefix("device ")
            if not number.isdigit() or len(number) > 7 or int(number) in lists:
                raise ImpossiblePlan(f"{line[:40]!r} is a line of no device, or of one that has one already")
            lists[int(number)] = [_action(word) for word in content.split()]
        elif key not in ("name", "source", "chunks"):
            raise ImpossiblePlan(f"{line[:40]!r} is no line of an order")
    if sorted(lists) != list(range(p)):
        raise ImpossiblePlan(f"the order is of {len(lists)} devices, the plan's pipeline has {p}")
    actions = [lists[device] for device in range(p)]
    if any(batch >= m or chunk >= v for own in actions for _, batch, chunk in own):
        raise ImpossiblePlan(f"an action is of none of the {m} micro-batches, or of no part of its device")
    route = _route(places, p, v)
    return ScheduleOrder(actions, [route], [0] * m, [1.0] * m, [inf] * p, rule="as the plan writes it")


def _action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if match is None:
        raise ImpossiblePlan(f"{word[:40]!r} is no action")
    return match[1], int(match[2]), int(match[3] or 0)


def _route(places: str, p: int, v: int) -> list[Slot]:
    if places == "v" and v == 2:
        return [(device, 0) for device in range(p)] + [(device, 1) for device in reversed(range(p))]
    if places == "loop" or (places == "line" and v == 1):
        return [(device, chunk) for chunk in range(v) for device in range(p)]
    raise ImpossiblePlan(f"places {places[:40]!r} with {v} parts of the layers on a device")
