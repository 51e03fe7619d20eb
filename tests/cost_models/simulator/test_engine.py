"""The engine on random programs: against a longest path over networkx, and against a clock that is stepped
from event to event where transfers share links or devices wait for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, Program, StageSlot, linear_program
from pplan.cost_models.program_order import resolve_order
from pplan.cost_models.simulator import run, run_by_events
from pplan.cost_models.step_costs import TRANSFERS, Costs, has_static_link_order, lower_costs
from pplan.cost_models.timeline import Timeline, simulate, step_seconds
from tests.candidates import side_by_side

Node = tuple[str, int, int]
"""Kind, micro-batch, position in the pipe."""

seeds = st.integers(0, 10**6)


def random_program(rng: np.random.Generator) -> Program:
    """Any program: places anywhere, one pipe or two, some backwards split, lists in any order that works."""
    devices, places, micro_batches = (int(rng.integers(1, high)) for high in (5, 7, 6))
    pipes = [random_pipe(rng, devices, places, 0)]
    if rng.random() < 0.5:
        pipes.append(random_pipe(rng, devices, places, places))
    pipe_of = rng.integers(len(pipes), size=micro_batches).tolist()
    shares = rng.choice([0.5, 1.0], size=micro_batches).tolist() if rng.random() < 0.3 else None
    nodes: list[Node] = [(k, m, p) for k in "FB" for m in range(micro_batches) for p in range(places)]
    nodes += [("W", m, p) for m in range(micro_batches) for p in range(places) if rng.random() < 0.5]
    actions: list[list[Action]] = [[] for _ in range(devices)]
    done: set[Node] = set()
    while len(done) < len(nodes):
        ready = [n for n in nodes if n not in done and all(d in done for d in needs(n, places))]
        node = ready[int(rng.integers(len(ready)))]
        done.add(node)
        at = pipes[pipe_of[node[1]]][node[2]]
        actions[at.device].append(Action(node[0], node[1], at.chunk))  # type: ignore[arg-type]
    return Program(
        tuple(map(tuple, actions)),
        tuple(map(tuple, pipes)),
        tuple(pipe_of),
        None if shares is None else tuple(shares),
    )


def random_pipe(rng: np.random.Generator, devices: int, places: int, first_chunk: int) -> list[StageSlot]:
    return [StageSlot(int(rng.integers(devices)), first_chunk + p) for p in range(places)]


def needs(node: Node, places: int) -> list[Node]:
    kind, m, p = node
    if kind == "F":
        return [("F", m, p - 1)] if p else []
    if kind == "W":
        return [("B", m, p)]
    return [("F", m, p)] + ([("B", m, p + 1)] if p + 1 < places else [])


def random_costs(
    rng: np.random.Generator, program: Program, *, launches: bool = False, links: int = 0
) -> Costs:
    by_action = (program.devices, program.chunks, program.micro_batches)
    by_cut = (len(program.pipes), program.slots - 1)
    hosts: dict[str, Any] = {
        f"{name}_launch": rng.random(by_action) for name in ("forward", "backward", "weight")
    }
    if rng.random() < 0.6:
        hosts["recompute_launch"] = hosts["backward_launch"] * rng.choice([0, 0.3, 1], size=by_action)
    table = rng.integers(-1, links, size=(program.devices,) * 2) if links else None
    return Costs(
        forward=rng.random(by_action),
        backward=2 * rng.random(by_action),
        weight=rng.random(by_action),
        recompute=rng.random((program.devices, 1, program.micro_batches)) if rng.random() < 0.3 else None,
        forward_occupancy=rng.random(by_cut) * rng.choice([0, 1, 3]),
        forward_latency=rng.random(by_cut) * rng.choice([0, 1]),
        backward_occupancy=rng.random(by_cut) * rng.choice([0, 1, 3]),
        backward_latency=rng.random(by_cut) * rng.choice([0, 1]),
        overhead=rng.random(program.devices) if rng.random() < 0.3 else None,
        links=table,
        hosts="one" if rng.random() < 0.5 else "each",
        **(hosts if launches else {}),
    )


class Described:
    """A program and its costs in plain words, worked out apart from the engine."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.program, self.costs = program, costs
        self.lists: list[list[Node]] = [
            [(a.kind, a.micro_batch, self._position(device, a)) for a in own]
            for device, own in enumerate(program.actions)
        ]
        self.device = {node: device for device, own in enumerate(self.lists) for node in own}

    def _position(self, device: int, action: Action) -> int:
        return self.program.pipes[self.program.pipe_of[action.micro_batch]].index(
            StageSlot(device, action.chunk)
        )

    def _chunk(self, node: Node) -> tuple[int, int, int]:
        place = self.program.pipes[self.program.pipe_of[node[1]]][node[2]]
        return (*place, node[1])

    def seconds(self, node: Node) -> float:
        costs, at = self.costs, self._chunk(node)
        assert costs.weight is not None
        share = 1.0 if self.program.shares is None else self.program.shares[node[1]]
        overhead = 0.0 if costs.overhead is None else float(costs.overhead[at[0]])
        table = {"F": costs.forward, "B": costs.backward, "W": costs.weight}[node[0]]
        seconds = float(table[at])
        if node[0] == "B":
            if ("W", *node[1:]) not in self.device:
                seconds += float(costs.weight[at])
            if costs.recompute is not None:
                seconds += float(costs.recompute[at[0], 0, at[2]] * costs.forward[at])
        return seconds * share + overhead

    def launch_seconds(self, node: Node) -> float:
        costs, at = self.costs, self._chunk(node)
        tables = {"F": costs.forward_launch, "B": costs.backward_launch, "W": costs.weight_launch}
        own, weight = tables[node[0]], costs.weight_launch
        assert own is not None
        assert weight is not None
        whole = node[0] == "B" and ("W", *node[1:]) not in self.device
        return float(own[at]) + (float(weight[at]) if whole else 0.0)

    def repeat_seconds(self, node: Node) -> float:
        """What of its launch launches a forward again."""
        own = self.costs.recompute_launch
        return 0.0 if own is None or node[0] != "B" else float(own[self._chunk(node)])

    def target(self, node: Node) -> Node | None:
        kind, m, p = node
        other = {"F": ("F", m, p + 1), "B": ("B", m, p - 1), "W": None}[kind]
        if other is None or other not in self.device or self.device[other] == self.device[node]:
            return None
        return other

    def transfer(self, node: Node) -> tuple[float, float]:
        """Occupancy and latency."""
        costs, pipe = self.costs, self.program.pipe_of[node[1]]
        share = 1.0 if self.program.shares is None else self.program.shares[node[1]]
        forward = node[0] == "F"
        busy = costs.forward_occupancy if forward else costs.backward_occupancy
        late = costs.forward_latency if forward else costs.backward_latency
        assert busy is not None
        assert late is not None
        cut = node[2] if forward else node[2] - 1
        return float(busy[pipe, cut]) * share, float(late[pipe, cut])

    def link(self, node: Node) -> Any:
        target = self.target(node)
        assert target is not None
        pair = (self.device[node], self.device[target])
        return pair if self.costs.links is None else int(self.costs.links[pair])


def longest_path(program: Program, costs: Costs) -> dict[Node, float]:
    """When each action ends: the longest path to it, where each pair of devices has its own link."""
    words, graph = Described(program, costs), nx.DiGraph()

    def after(later: object, earlier: object, seconds: float = 0.0) -> None:
        graph.add_edge(
            earlier, later, weight=max(seconds, graph.get_edge_data(earlier, later, {"weight": 0})["weight"])
        )

    for own in words.lists:
        last_on: dict[Any, Node] = {}
        for index, node in enumerate(own):
            after((node, "end"), (node, "start"), words.seconds(node))
            after((node, "start"), "begin" if index == 0 else (own[index - 1], "end"))
            for needed in needs(node, program.slots):
                if words.device[needed] == words.device[node]:
                    after((node, "start"), (needed, "end"))
            target = words.target(node)
            if target is None:
                continue
            busy, late = words.transfer(node)
            after((node, "on"), (node, "end"))
            after((node, "off"), (node, "on"), busy)
            after((node, "there"), (node, "off"), late)
            after((target, "start"), (node, "there"))
            if (link := words.link(node)) in last_on:
                after((node, "on"), (last_on[link], "off"))
            last_on[link] = node
            if costs.transfers == "blocking" and index + 1 < len(own):
                after((own[index + 1], "start"), (node, "there"))
    if costs.forward_launch is not None:
        for node in words.device:
            after((node, "launched"), (node, "launch"), words.launch_seconds(node))
            after((node, "repeated"), (node, "launch"), words.repeat_seconds(node))
            after((node, "start"), (node, "launch"))
            after((node, "end"), (node, "launched"))
        for later, earlier in launch_waits(words, program):
            after((later, "launch"), earlier)
    times: dict[object, float] = {}
    for point in nx.topological_sort(graph):
        times[point] = max(
            (times[p] + graph[p][point]["weight"] for p in graph.predecessors(point)), default=0.0
        )
    return {node: times[node, "end"] for node in words.device}


def launch_waits(words: Described, program: Program) -> Iterator[tuple[Node, object]]:
    """Each launch, and what it waits for: everything that comes before, not the last of it alone."""
    for own in filter(None, words.lists):
        yield own[0], "begin"
        if words.costs.hosts == "each":
            yield from ((later, (earlier, "launched")) for earlier, later in pairwise(own))
    if words.costs.hosts == "each":
        return
    clock = clock_order(program)
    for index, node in enumerate(clock):
        for earlier in clock[:index]:
            same_thread = words.device[earlier] == words.device[node]
            if "F" in (node[0], earlier[0]) or same_thread or earlier in needs(node, program.slots):
                yield node, (earlier, "launched")
            elif words.repeat_seconds(earlier) and words.repeat_seconds(node):
                yield node, (earlier, "repeated")


def clock_order(program: Program) -> list[Node]:
    order = resolve_order(program)
    columns = (order.kind.tolist(), order.micro_batch.tolist(), order.place.tolist())
    return [("FBW"[kind], m, place) for kind, m, place in zip(*columns, strict=True)]


def stepped(program: Program, costs: Costs) -> dict[Node, float]:
    """When each action ends: a clock goes from event to event, and whatever can begin then does."""
    words = Described(program, costs)
    rank = {node: index for index, node in enumerate(clock_order(program))}
    sending = costs.transfers in ("rendezvous", "blocking")
    receiving = costs.transfers in ("rendezvous", "blocking-receive")
    heads = [0] * program.devices
    running: dict[Node, float] = {}
    ended: dict[Node, float] = {}
    ready: dict[Node, float] = {}
    under_way: dict[Node, float] = {}
    arrived: set[Node] = set()
    link_until: dict[Any, float] = {}
    now = 0.0

    def posted(node: Node) -> bool:
        """Whether a transfer may be asked for."""
        target = words.target(node)
        if target is None or node in ready:
            return False
        own = words.lists[words.device[target]]
        before = own.index(target) - 1
        return not receiving or before < 0 or own[before] in ended

    def can_start(device: int) -> bool:
        own, index = words.lists[device], heads[device]
        if index == len(own) or any(words.device[node] == device for node in running):
            return False
        node = own[index]
        sent = index == 0 or words.target(own[index - 1]) is None or own[index - 1] in arrived
        here = all(
            (n in ended) if words.device[n] == device else (n in arrived) for n in needs(node, program.slots)
        )
        return here and (sent or not sending)

    def begin_transfer() -> bool:
        for node in sorted(ready, key=lambda n: (ready[n], rank[n])):
            link, target = words.link(node), words.target(node)
            if node in under_way or target is None or (link != -1 and link_until.get(link, 0.0) > now):
                continue
            busy, late = words.transfer(node)
            if link != -1:
                link_until[link] = now + busy
            under_way[node] = now + busy + late
            return True
        return False

    while len(ended) < len(words.device):
        for node in [n for n, until in running.items() if until <= now]:
            ended[node] = running.pop(node)
        arrived |= {n for n, until in under_way.items() if until <= now}
        for node in ended:
            if posted(node):
                ready[node] = now
        begun = False
        for device in range(program.devices):
            if can_start(device):
                node = words.lists[device][heads[device]]
                running[node] = now + words.seconds(node)
                heads[device] += 1
                begun = True
        begun = begin_transfer() or begun
        if not begun:
            events = [*running.values(), *under_way.values(), *link_until.values()]
            following = [second for second in events if second > now]
            if not following and len(ended) < len(words.device):
                raise RuntimeError("deadlock")
            now = min(following, default=now)
    return ended


def ends_of(timeline: Timeline) -> dict[Node, float]:
    return dict(zip(clock_order(timeline.program), timeline.run.end.tolist(), strict=True))


def equal_ends(timeline: Timeline, other: dict[Node, float]) -> None:
    mine = ends_of(timeline)
    assert mine.keys() == other.keys()
    for node, end in mine.items():
        assert end == pytest.approx(other[node], rel=1e-9, abs=1e-12), node


@pytest.mark.slow
@given(seeds, st.sampled_from(["overlapped", "blocking"]), st.booleans())
@settings(max_examples=100, deadline=None)
def test_agrees_with_the_longest_path(seed: int, transfers: str, launches: bool) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = replace(random_costs(rng, program, launches=launches), transfers=transfers)
    equal_ends(simulate(program, costs), longest_path(program, costs))


@pytest.mark.slow
@given(seeds, st.sampled_from(TRANSFERS), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_agrees_with_a_stepped_clock(seed: int, transfers: str, links: int) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = replace(random_costs(rng, program, links=links), transfers=transfers)
    try:
        expected = stepped(program, costs)
    except RuntimeError:
        with pytest.raises(
            UsageError, match=f"with {transfers} transfers the stages wait for each other: stage"
        ):
            simulate(program, costs)
        return
    equal_ends(simulate(program, costs), expected)


@given(seeds, st.booleans(), st.sampled_from(["overlapped", "blocking"]), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_clock_gives_the_bits_of_the_event_loop(
    seed: int, launches: bool, transfers: str, links: int
) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = replace(random_costs(rng, program, launches=launches, links=links), transfers=transfers)
    order = resolve_order(program)
    values = lower_costs(order, costs)
    if has_static_link_order(values):
        found, expected = run(values), run_by_events(values)
        for name in ("start", "end", "free"):
            assert getattr(found, name).tolist() == getattr(expected, name).tolist()
        for name in ("begin", "arrival"):
            assert getattr(found, name)[order.sends].tolist() == getattr(expected, name)[order.sends].tolist()


def test_random_programs_meet_what_they_are_for() -> None:
    """Shared links make some waits, blocking transfers some deadlocks, and most programs none."""
    slower = deadlocks = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        program = random_program(rng)
        costs = random_costs(rng, program, links=1)
        alone = simulate(program, replace(costs, links=None)).step_seconds
        slower += simulate(program, replace(costs, links=np.zeros_like(costs.links))).step_seconds > alone
        try:
            simulate(program, replace(costs, transfers="rendezvous"))
        except UsageError:
            deadlocks += 1
    assert slower > 10
    assert 3 < deadlocks < 50


@given(seeds, st.booleans(), st.sampled_from(["overlapped", "blocking"]), st.integers(0, 2))
@settings(max_examples=100, deadline=None)
def test_what_every_timeline_keeps(seed: int, launches: bool, transfers: str, links: int) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = replace(random_costs(rng, program, launches=launches, links=links), transfers=transfers)
    timeline = simulate(program, costs)
    words, ends = Described(program, costs), ends_of(timeline)
    starts = {node: float(timeline.run.start[i]) for i, node in enumerate(ends)}
    for device, own in enumerate(words.lists):
        if not launches:
            busy = sum(words.seconds(node) for node in own)
            assert timeline.busy_seconds[device] == pytest.approx(busy, rel=1e-9)
            assert timeline.step_seconds >= busy * (1 - 1e-9)
        for before, after in pairwise(own):
            assert starts[after] >= ends[before]
        for node in own:
            assert ends[node] - starts[node] >= words.seconds(node) * (1 - 1e-9) - 1e-12
            for needed in needs(node, program.slots):
                away = words.target(needed) == node
                taken = sum(words.transfer(needed)) if away else 0.0
                assert starts[node] >= ends[needed] + taken - 1e-9
    for m in range(program.micro_batches):
        path = [(kind, m, p) for kind in "FB" for p in range(program.slots)]
        taken = sum(words.seconds(n) + (sum(words.transfer(n)) if words.target(n) else 0.0) for n in path)
        assert timeline.step_seconds >= taken * (1 - 1e-9)


def scaled(costs: Costs, factor: float) -> Costs:
    arrays: dict[str, Any] = {n: v if n == "recompute" else v * factor for n, v in costs.arrays().items()}
    return replace(costs, **arrays)


@given(seeds, st.sampled_from([0.25, 2.0, 1024.0]), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_scaling_all_costs_scales_the_step(seed: int, factor: float, links: int) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = random_costs(rng, program, launches=True, links=links)
    step = simulate(program, costs).step_seconds
    assert simulate(program, scaled(costs, factor)).step_seconds == step * factor


@given(seeds, st.data())
@settings(max_examples=100, deadline=None)
def test_no_cost_is_better_larger(seed: int, data: st.DataObject) -> None:
    """Where links are not shared; where they are, a longer action may let a more urgent transfer go first."""
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    costs = random_costs(rng, program, launches=True)
    arrays = {name: values for name, values in costs.arrays().items() if values.size}
    name = data.draw(st.sampled_from(sorted(set(arrays) - {"recompute"})))
    larger = arrays[name].copy()
    larger.flat[int(rng.integers(larger.size))] += rng.random() * 5
    more: dict[str, Any] = {name: larger}
    if name == "recompute_launch":
        more[name] = np.minimum(larger, arrays["backward_launch"])
    before, after = ends_of(simulate(program, costs)), ends_of(simulate(program, replace(costs, **more)))
    assert all(after[node] >= end for node, end in before.items())


@given(seeds, st.booleans(), st.sampled_from(["overlapped", "blocking"]), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_candidates_side_by_side_are_the_single_ones(
    seed: int, launches: bool, transfers: str, links: int
) -> None:
    rng = np.random.default_rng(seed)
    program = random_program(rng)
    first = replace(random_costs(rng, program, launches=launches, links=links), transfers=transfers)
    singles = [first]
    for _ in range(3):
        arrays: dict[str, Any] = {
            name: values * rng.random(values.shape) for name, values in first.arrays().items()
        }
        if "recompute_launch" in arrays:
            arrays["backward_launch"] = arrays["backward_launch"] + arrays["recompute_launch"]
        singles.append(replace(first, **arrays))
    together = side_by_side(singles)
    expected = [simulate(program, costs).step_seconds for costs in singles]
    assert step_seconds(program, together).tolist() == expected
    assert [float(step_seconds(program, together.candidate(i))[0]) for i in range(4)] == expected


@pytest.mark.parametrize("ask", [simulate, step_seconds])
def test_memory_is_linear_in_the_actions(ask: Callable[..., Any]) -> None:
    """Twice the micro-batches, at most twice the arrays (and lists): nothing is kept by pairs of actions."""
    import tracemalloc

    def peak(micro_batches: int) -> int:
        own = [Action(kind, m) for kind in ("F", "B") for m in range(micro_batches)]
        program = linear_program([own] * 4)
        costs = Costs(forward=np.ones((4, 1, micro_batches)), backward=np.ones((4, 1, micro_batches)))
        resolve_order(program)
        tracemalloc.start()
        ask(program, costs)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(1600) < 2.5 * peak(800)
