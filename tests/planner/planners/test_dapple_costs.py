"""What DAPPLE's search knows of its moves and plans, against loops over devices, layers and stages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.port_sharing import Routes
from pplan.cost_models.topology import Topology
from pplan.planner.planners.dapple_moves import POLICIES, CostedPlans, Moves, split_machines
from pplan.planner.planners.replica_groups import MicroBatchChoice
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@pytest.fixture(params=[(4, 2, None), (4, 4, None), (3, 2, (1, 2))])
def moves(request: pytest.FixtureRequest, make_chain: MakeChain, make_topology: MakeTopology) -> Moves:
    """Of one or two nodes; of any numbers of devices a stage, and of one or two."""
    gpus, per_node, counts = request.param
    topology = make_topology(gpus, per_node=per_node, latency=0.05)
    space = Space(make_chain(gpus, 4, cuts=1.1), topology, "sgd", 1500.0)
    choice = MicroBatchChoice("1f1b", 3, 4, ("by_stage",))
    return Moves(space, choice, split_machines(gpus, per_node), Routes(topology), counts)


def states_of(moves: Moves) -> list[int]:
    """All that are reached from nothing, as they are met."""
    met = [0]
    for state in met:
        _, after = moves.after(np.array([state]))
        met += [own for own in dict.fromkeys(moves.states(after).tolist()) if own not in met]
    return met


def test_moves_from_each_state(moves: Moves) -> None:
    """Of each number of devices, the most first, by each policy; the first is what takes the rest."""
    gpus, rooms = moves.space.topology.gpus, moves.machines.rooms
    met, seen = states_of(moves), set()
    for state in met:
        used = moves._used[state]
        free = gpus - sum(used)
        assert moves.free_devices(np.array([state])).tolist() == [free]
        positions, after = moves.after(np.array([state, 0, state]))
        first = after[positions == 0].tolist()
        assert after[positions == 2].tolist() == first
        assert np.diff(positions).min(initial=0) >= 0
        expected = list[Any]()
        for count in range(min(free, 4), 0, -1):
            if moves.counts is None or count in moves.counts:
                for policy in POLICIES if len(rooms) > 1 else POLICIES[:1]:
                    given = policy(rooms, used, count)
                    if given not in expected:
                        expected.append(given)
        assert [moves.ranks(move) for move in first] == [
            moves.machines.ranks(used, given) for given in expected
        ]
        taken = [tuple(a + b for a, b in zip(used, given, strict=True)) for given in expected]
        assert [moves._used[own] for own in moves.states(np.array(first, dtype=int)).tolist()] == taken
        (rest,) = moves.rest(np.array([state])).tolist()
        assert (moves.ranks(rest) if rest >= 0 else None) == (moves.ranks(first[0]) if first else None)
        seen.add(free)
    assert seen == set(range(gpus + 1))


def test_transfers_and_what_moves_cost(moves: Moves) -> None:
    """Of the larger part that a device sends or receives, by the route between them."""
    states = [state for state in states_of(moves) if state]
    topology, size = moves.space.topology, moves.choice.size
    _, before = moves.after(np.zeros(1, dtype=int))
    pairs = []
    for move in before.tolist():
        _, after = moves.after(moves.states(np.array([move])))
        pairs += [(move, other) for other in after.tolist()]
    senders, receivers = (np.array(own) for own in zip(*pairs, strict=True))
    joints = moves.joints(senders, receivers)
    assert moves.joints(senders[::-1], receivers[::-1]).tolist() == joints.tolist()[::-1]
    for cut in (1, 3):
        found = moves.transfer(joints, senders, receivers, np.full(len(joints), cut))
        for (sender, receiver), seconds in zip(pairs, found.tolist(), strict=True):
            ends = moves.ranks(sender), moves.ranks(receiver)
            latency, pace = Routes(topology).route(*ends)
            sent = [float(moves.space.chain.at(-(-size // len(own))).output_bytes[cut - 1]) for own in ends]
            assert seconds == pytest.approx(latency + max(sent) * pace * min(map(len, ends)))
    assert states
    forward = moves.table("forward")
    for move in before.tolist():
        layers = moves.space.chain.at(-(-size // len(moves.ranks(move))))
        own = forward[moves.costs_indices(np.array([move]))[0]]
        assert own[1, 3] == pytest.approx(float(layers.forward_seconds[1:3].sum()))
    assert len(moves.work(1)) == len(moves.table("never")) == len(moves.costs)


def test_the_least_work_that_is_left(moves: Moves) -> None:
    """Of each layer the least device seconds, by however many devices share its samples."""
    chain, gpus = moves.space.chain, moves.space.topology.gpus
    least = []
    for layer in range(4):
        shared = []
        for replicas in range(1, min(4, gpus) + 1):
            layers = chain.at(-(-4 // replicas))
            shared.append(replicas * float(layers.forward_seconds[layer] + layers.backward_seconds[layer]))
        least.append(min(shared))
    assert moves.least_work.tolist() == pytest.approx([sum(least[place:]) for place in range(5)])


def test_plans_stage_by_stage(moves: Moves) -> None:
    """Of a last stage one micro-batch in flight, of each before it one more, up to three; where they do not
    fit a stage recomputes, and where they do not fit then, neither does the plan."""
    random, tried = np.random.default_rng(1), set()
    for stages in (1, 2):
        plans = []
        for _ in range(40):
            state, row = np.zeros(1, dtype=int), list[int]()
            while len(row) < stages:
                _, after = moves.after(state)
                if not len(after):
                    break
                row.append(int(random.choice(after)))
                state = moves.states(np.array(row[-1:]))
            if len(row) == stages:
                plans.append(
                    (row, [*sorted(random.choice([1, 2, 3], stages - 1, replace=False).tolist()), 4])
                )
        rows = np.array([row for row, _ in plans]).T
        ends = np.array([own for _, own in plans]).T
        joints = [moves.joints(a, b) for a, b in pairwise(rows)]
        for complete in (stages, stages + 1):
            costed = CostedPlans(moves, ends, rows, np.array(joints).reshape(-1, len(plans)), complete)
            parts, transfers = costed.parts
            assert (len(parts), len(transfers)) == (stages, stages - 1)
            for plan, (row, own) in enumerate(plans):
                fits = before = True
                recomputes, start = False, 0
                for stage, (move, end) in enumerate(zip(row, own, strict=True)):
                    work = moves.costs[int(moves.costs_indices(np.array([move]))[0])]
                    held = min(3, complete - stage)
                    again = held > work.never[start, end]
                    before, fits = fits, fits and bool(not again or held <= work.always[start, end])
                    recomputes = recomputes or bool(again)
                    backward = work.backward[start, end] + (work.forward[start, end] if again else 0.0)
                    assert parts[stage].forward[plan] == work.forward[start, end]
                    assert parts[stage].backward[plan] == backward
                    assert parts[stage].all_reduce[plan] == work.all_reduce[start, end]
                    if stage:
                        one = [
                            np.array([value])
                            for value in (joints[stage - 1][plan], row[stage - 1], move, start)
                        ]
                        assert transfers[stage - 1][plan] == moves.transfer(*one)[0]
                    start = end
                assert (bool(costed.fits[plan]), bool(costed.start_fits[plan])) == (fits, before)
                assert bool(costed.recomputes[plan]) == recomputes
                tried.add((fits, recomputes))
    assert len(tried) > 1
