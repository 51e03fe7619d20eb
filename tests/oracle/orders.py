"""The order of actions of every synchronous schedule, each by its rule.

An action is a kind (F, B; W where the gradient of the weights is apart), a micro-batch and a chunk of the
device, counted from 0. There are p devices, m micro-batches, and v parts of the layers on each device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

Action = tuple[str, int, int]
Slot = tuple[int, int]
"""A device of the pipeline, and a chunk of it."""


class ImpossiblePlanError(Exception):
    """The plan has values that no plan can have."""


@dataclass(frozen=True, eq=False)
class Order:
    """`lists`: each device's actions in order. `routes`: the places that a micro-batch passes, one route or
    one a pipe. `route_of`: the route of each micro-batch. `shares`: what part of a micro-batch each entry is.
    """

    lists: list[list[Action]]
    routes: list[list[Slot]]
    route_of: list[int]
    shares: list[float]

    @property
    def devices(self) -> int:
        """Devices of the pipeline."""
        return len(self.lists)

    @property
    def parts(self) -> int:
        """Parts that the layers are cut into."""
        return len(self.routes[0])

    @property
    def split(self) -> list[set[tuple[int, int]]]:
        """By device, the micro-batches and chunks whose gradients of weights are actions."""
        return [{action[1:] for action in actions if action[0] == "W"} for actions in self.lists]

    def device_parts(self, device: int) -> list[int]:
        """By chunk of a device, the part of the layers that it computes."""
        places = (place for route in self.routes for place in enumerate(route))
        part_of = {chunk: part for part, (at, chunk) in places if at == device}
        return [part_of[chunk] for chunk in sorted(part_of)]

    def most_in_flight(self, device: int) -> float:
        """The most micro-batches that a device holds, from F to W, or to B without one."""
        level = peak = 0.0
        for kind, batch, chunk in self.lists[device]:
            if kind == "F":
                level += self.shares[batch]
                peak = max(peak, level)
            elif kind == "W" or (batch, chunk) not in self.split[device]:
                level -= self.shares[batch]
        return peak * self.devices / self.parts


def make_order(schedule: str, p: int, m: int, v: int) -> Order:
    """The order of a schedule. Raises ImpossiblePlanError for a name or numbers that cannot be."""
    parts, build = ORDERS.get(schedule, (0, None))
    if build is None or min(p, m, v) < 1 or (parts and v != parts):
        raise ImpossiblePlanError(f"{schedule} with {p} devices, {m} micro-batches, {v} parts on each")
    return build(p, m, v)


def _linear(lists: list[list[Action]], m: int) -> Order:
    return Order(lists, [[(device, 0) for device in range(len(lists))]], [0] * m, [1.0] * m)


def _naive(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    return _linear([[(kind, batch, 0) for batch in range(m) for kind in "FB"]] * p, m)


def _gpipe(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    order = [("F", batch, 0) for batch in range(m)] + [("B", m - 1 - batch, 0) for batch in range(m)]
    return _linear([order] * p, m)


def _in_flight(m: int, ahead: int, late: int | None) -> Iterator[Action]:
    """F while fewer than `ahead` micro-batches wait for their B, and any are left; else B. Where the weights'
    gradients are apart, a W once more than `late` of them wait."""
    forwards = backwards = weights = 0
    while backwards < m:
        if forwards < m and forwards - backwards < ahead:
            yield "F", forwards, 0
            forwards += 1
            continue
        yield "B", backwards, 0
        backwards += 1
        if late is not None and backwards - weights > late:
            yield "W", weights, 0
            weights += 1
    if late is not None:
        yield from (("W", batch, 0) for batch in range(weights, m))


def _one_f_one_b(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    return _linear([list(_in_flight(m, p - i, None)) for i in range(p)], m)


def _zb_h1(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    return _linear([list(_in_flight(m, p - i, i)) for i in range(p)], m)


def _zb_h2(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    return _linear([list(_in_flight(m, 2 * (p - i) - 1, 2 * i)) for i in range(p)], m)


def _autopipe(p: int, m: int, v: int) -> Order:
    """1F1B whose first micro-batch is in halves."""
    lists = [
        [(kind, entry, 0) for kind, batch, _ in actions for entry in ((0, 1) if batch == 0 else (batch + 1,))]
        for actions in _one_f_one_b(p, m, v).lists
    ]
    return Order(lists, _linear(lists, m).routes, [0] * (m + 1), [0.5, 0.5, *([1.0] * (m - 1))])


def _avgpipe(p: int, m: int, v: int) -> Order:
    """Two pipelines of 1F1B in turn."""
    if m % 2:
        raise ImpossiblePlanError(f"avgpipe deals micro-batches to 2 pipelines, and there are {m}")
    lists = _one_f_one_b(p, m // 2, v).lists
    both = [[(kind, 2 * batch + i, i) for kind, batch, _ in actions for i in (0, 1)] for actions in lists]
    routes = [[(device, pipe) for device in range(p)] for pipe in (0, 1)]
    return Order(both, routes, [batch % 2 for batch in range(m)], [1.0] * m)


def _looped(lists: list[list[Action]], p: int, m: int, v: int) -> Order:
    return Order(lists, [[(device, chunk) for chunk in range(v) for device in range(p)]], [0] * m, [1.0] * m)


def _looped_bfs(p: int, m: int, v: int) -> Order:
    forwards = [("F", batch, chunk) for chunk in range(v) for batch in range(m)]
    return _looped([forwards + [("B", *action[1:]) for action in reversed(forwards)]] * p, p, m, v)


def _interleaved(p: int, m: int, v: int) -> Order:
    return _in_rounds(p, m, v, [(v - 1) * p + 2 * (p - 1 - i) for i in range(p)])


def _wpipe(p: int, m: int, v: int) -> Order:
    return _in_rounds(p, m, v, [2 * p - 1 - i for i in range(p)])


def _in_rounds(p: int, m: int, v: int, ahead: list[int]) -> Order:
    """Rounds of p micro-batches through all parts of a device, with so many F ahead on each."""
    if m % p:
        raise ImpossiblePlanError(f"the schedule goes in rounds of {p} micro-batches, and there are {m}")
    batches = [turn // (p * v) * p + turn % p for turn in range(m * v)]
    forwards = [("F", batch, turn // p % v) for turn, batch in enumerate(batches)]
    backwards = [("B", batch, v - 1 - turn // p % v) for turn, batch in enumerate(batches)]
    lists = []
    for most in (min(number, m * v) for number in ahead):
        pairs = zip(forwards[most:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        lists.append(forwards[:most] + steady + backwards[m * v - most :])
    return _looped(lists, p, m, v)


def _chimera(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    """Halves of each p micro-batches in opposite directions, by the clock on which F and B take a tick."""
    if p % 2 or m % p:
        raise ImpossiblePlanError(f"chimera needs an even number of devices that divides {m}, not {p}")
    route_of, lists = [batch % p * 2 // p for batch in range(m)], []
    for device in range(p):
        ticks = []
        for batch, route in enumerate(route_of):
            stage = p - 1 - device if route else device
            tick = 2 * p * (batch // p) + 2 * (batch % (p // 2))
            ticks += [(tick + stage, ("F", batch, route)), (tick + 2 * p - 1 - stage, ("B", batch, route))]
        lists.append([action for _, action in sorted(ticks)])
    routes = [[(device, 0) for device in range(p)], [(device, 1) for device in reversed(range(p))]]
    return Order(lists, routes, route_of, [1.0] * m)


def _number_actions(turns: list[str], m: int) -> list[Action]:
    """Turns such as `F0`, a kind and a chunk: each kind takes the micro-batches of each chunk in order."""
    taken: dict[str, int] = {}
    actions = []
    for turn in turns:
        batch = taken.get(turn, 0)
        taken[turn] = batch + 1
        if batch < m:
            actions.append((turn[0], batch, int(turn[1])))
    return actions


def _v_order(lists: list[list[Action]], p: int, m: int) -> Order:
    route = [(device, 0) for device in range(p)] + [(device, 1) for device in reversed(range(p))]
    return Order(lists, [route], [0] * m, [1.0] * m)


def _zb_v(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    """The turns of torch.distributed.pipelining's ScheduleZBVZeroBubble."""
    lists, most = [], max(m, 2 * p - 1)
    for i in range(p):
        left = p - i
        turns = ["F0"] * (2 * left - 1) + ["F1", "F0"] * i + ["F1", "B1", "W1"] * left
        turns += ["F0", "B0", "W0", "F1", "B1", "W1"] * (most - 2 * p + i + 1)
        turns += ["B0", "W0", "F1", "B1", "W1"] * (left - 1)
        turns += ["B0", "B1"] * i + ["B0", "W0"] * left + ["W1"] * i + ["W0"] * i
        lists.append(_number_actions(turns, m))
    return _v_order(lists, p, m)


def _dualpipe_v(p: int, m: int, v: int) -> Order:  # noqa: ARG001
    """The turns of torch.distributed.pipelining's ScheduleDualPipeV; a B without W is a whole one."""
    if m < 2 * p:
        raise ImpossiblePlanError(f"dualpipe-v needs {2 * p} micro-batches on {p} devices, there are {m}")
    lists = []
    for i in range(p):
        right, left = p - 1 - i, i + 1
        turns = ["F0"] * (2 * right) + ["F0", "F1"] * left + ["B1", "W1", "F1"] * right
        turns += ["F0", "B1", "F1", "B0"] * (m - 2 * p + left) + ["B1", "F1", "B0"] * right
        fill = len(turns)
        order = _number_actions(turns + ["B1", "B0"] * left + ["B0"] * right, m)
        drain = order[fill:]
        late = [("W", batch, chunk) for _, batch, chunk in drain[left:]]
        end = drain[: 2 * left]
        for weight, backward in zip(late, drain[2 * left :], strict=False):
            end += [weight, backward]
        lists.append(order[:fill] + end + late[right:])
    return _v_order(lists, p, m)


ORDERS: dict[str, tuple[int, Callable[[int, int, int], Order]]] = {
    "naive": (1, _naive),
    "gpipe": (1, _gpipe),
    "1f1b": (1, _one_f_one_b),
    "dapple": (1, _one_f_one_b),
    "autopipe": (1, _autopipe),
    "avgpipe": (1, _avgpipe),
    "zb-h1": (1, _zb_h1),
    "zb-h2": (1, _zb_h2),
    "interleaved": (0, _interleaved),
    "wpipe": (2, _wpipe),
    "looped-bfs": (0, _looped_bfs),
    "chimera": (1, _chimera),
    "zb-v": (2, _zb_v),
    "dualpipe-v": (2, _dualpipe_v),
}
"""By schedule the parts of a device (0: any number), and what builds it."""
ASYNCHRONOUS = ("pipedream", "pipedream-2bw", "wpipe", "xpipe")
"""Never flushed. All but WPipe run 1F1B's lists without an end."""


def read_order(lines: Sequence[str], p: int, m: int, v: int) -> Order:
    """The order that a plan writes out."""
    texts = dict(line.split(":", 1) for line in lines)
    lists = [[_action(word) for word in texts[f"device {device}"].split()] for device in range(p)]
    is_v = texts.get("places", "").strip() == "v"
    return _v_order(lists, p, m) if is_v else _looped(lists, p, m, v)


def _action(word: str) -> Action:
    batch, _, chunk = word[1:].partition(".")
    return word[0], int(batch), int(chunk or 0)
