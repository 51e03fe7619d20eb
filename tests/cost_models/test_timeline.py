"""The simulator against closed forms, published figures, and a longest path over networkx."""

from __future__ import annotations

import networkx as nx
import numpy as np
import numpy.typing as npt
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import Costs, linear_costs
from pplan.cost_models.timeline import simulate, step_seconds
from tests.candidates import side_by_side

STRAIGHT = ("gpipe", "1f1b")
F0, B0, F1, B1 = Action("F", 0), Action("B", 0), Action("F", 1), Action("B", 1)


def random_costs(rng: np.random.Generator, stages: int, micro_batches: int) -> Costs:
    return linear_costs(
        forward=rng.random((stages, micro_batches)),
        backward=2 * rng.random((stages, micro_batches)),
        occupancy=rng.random(stages - 1) * rng.choice([0, 1, 3]),
        latency=rng.random(stages - 1) * rng.choice([0, 1]),
    )


def uniform_costs(
    forward: list[float], backward: list[float], micro_batches: int, transfer_latency: float = 0.0
) -> Costs:
    """Stages whose micro-batches all cost the same; transfers are latency only."""
    cuts = max(len(forward) - 1, 0)
    forwards, backwards = (
        np.repeat(np.array(own)[:, None], micro_batches, axis=1) for own in (forward, backward)
    )
    return linear_costs(forwards, backwards, np.zeros(cuts), np.full(cuts, transfer_latency))


def longest_path(actions: list[list[Action]], costs: Costs) -> float:
    """The step by another way: a graph of events, transfers on their links among them."""
    graph: nx.DiGraph = nx.DiGraph()
    assert costs.forward_occupancy is not None
    assert costs.forward_latency is not None
    tables = {"F": costs.forward, "B": costs.backward}

    def after(node: object, before: object, seconds: float) -> None:
        graph.add_edge(before, node, weight=float(seconds))

    for stage, own in enumerate(actions):
        sent: dict[str, object] = {}
        for index, action in enumerate(own):
            seconds = tables[action.kind][stage, 0, action.micro_batch]
            start, end = (stage, action, "start"), (stage, action, "end")
            after(end, start, seconds)
            after(start, "begin" if index == 0 else (stage, own[index - 1], "end"), 0)
            target = stage + (1 if action.kind == "F" else -1)
            if 0 <= target < len(actions):
                cut = min(stage, target)
                on_link, off_link = (stage, action, "on"), (stage, action, "off")
                after(on_link, end, 0)
                after(off_link, on_link, costs.forward_occupancy[0, cut])
                if action.kind in sent:
                    after(on_link, sent[action.kind], 0)
                sent[action.kind] = off_link
                after((target, action, "start"), off_link, costs.forward_latency[0, cut])
        after("done", (stage, own[-1], "end"), 0)
    return float(nx.dag_longest_path_length(graph))


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("seed", range(25))
def test_agrees_with_the_longest_path(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    stages, micro_batches = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    costs = random_costs(rng, stages, micro_batches)
    actions = find_schedule(name).actions(stages, micro_batches)
    assert simulate(actions, costs).step_seconds == pytest.approx(longest_path(actions, costs), rel=1e-12)


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 32])
def test_bubble_of_equal_stages(name: str, stages: int, micro_batches: int) -> None:
    costs = uniform_costs([3.0] * stages, [5.0] * stages, micro_batches)
    timeline = simulate(find_schedule(name).actions(stages, micro_batches), costs)
    assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), abs=1e-12)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "forward", "input_gradient", "weight_gradient", "transfer", "rate"),
    [(8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431), (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898)],
)
def test_published_bubble_rate_of_1f1b(
    stages: int,
    micro_batches: int,
    forward: float,
    input_gradient: float,
    weight_gradient: float,
    transfer: float,
    rate: float,
) -> None:
    """Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, table 5 from the times of table 9."""
    costs = uniform_costs(
        [forward] * stages, [input_gradient + weight_gradient] * stages, micro_batches, transfer
    )
    timeline = simulate(find_schedule("1f1b").actions(stages, micro_batches), costs)
    assert round(timeline.bubble_rate_span, 4) == rate


def test_gpipe_is_two_flow_shops() -> None:
    rng = np.random.default_rng(7)
    forward, backward, cut = rng.random(5), rng.random(5), 3 * rng.random(4)
    costs = linear_costs(
        forward=np.repeat(forward[:, None], 6, axis=1),
        backward=np.repeat(backward[:, None], 6, axis=1),
        occupancy=cut,
        latency=np.full(4, 0.25),
    )
    span = forward.sum() + backward.sum() + 2 * (cut.sum() + 4 * 0.25)
    span += 5 * (max(*forward, *cut) + max(*backward, *cut))
    assert simulate(find_schedule("gpipe").actions(5, 6), costs).step_seconds == pytest.approx(
        span, rel=1e-12
    )


def test_transfers_of_no_cost_change_nothing() -> None:
    actions = find_schedule("1f1b").actions(4, 6)
    free = simulate(actions, uniform_costs([1.0, 2.0, 1.5, 1.0], [2.0] * 4, 6))
    latent = simulate(actions, uniform_costs([1.0, 2.0, 1.5, 1.0], [2.0] * 4, 6, transfer_latency=0.0))
    assert free.spans == latent.spans


def test_a_link_carries_one_transfer_at_a_time() -> None:
    costs = linear_costs(
        np.array([[1.0, 1.0], [1.0, 1.0]]), np.zeros((2, 2)), np.array([4.0]), np.array([0.5])
    )
    timeline = simulate(find_schedule("gpipe").actions(2, 2), costs)
    arrivals = [span.start for span in timeline.spans if span.stage == 1 and span.action.kind == "F"]
    assert arrivals == [1 + 4 + 0.5, 1 + 4 + 4 + 0.5]


def test_one_process_launches_in_turn() -> None:
    """Two stages, one micro-batch: launches of 5 s each in the order F, F, B, B outlast work of 1 s each."""
    costs = linear_costs(
        forward=np.ones((2, 1)),
        backward=np.ones((2, 1)),
        occupancy=np.zeros(1),
        latency=np.zeros(1),
        forward_launch=np.full((2, 1), 5.0),
        backward_launch=np.full((2, 1), 5.0),
    )
    timeline = simulate(find_schedule("gpipe").actions(2, 1), costs)
    assert [(span.stage, str(span.action), span.start, span.end) for span in timeline.spans] == [
        (0, "F0", 0.0, 5.0),
        (1, "F0", 5.0, 10.0),
        (1, "B0", 10.0, 15.0),
        (0, "B0", 15.0, 20.0),
    ]


def test_all_reduce_follows_the_last_backward() -> None:
    costs = linear_costs(
        np.ones((2, 1)), np.ones((2, 1)), np.zeros(1), np.zeros(1), all_reduce=np.array([0.5, 3.0])
    )
    assert simulate(find_schedule("gpipe").actions(2, 1), costs).stage_end == (4.5, 6.0)


def test_candidates_side_by_side_are_the_single_ones() -> None:
    rng = np.random.default_rng(3)
    single = [random_costs(rng, 4, 5) for _ in range(7)]
    together = side_by_side(single)
    for name in STRAIGHT:
        actions = find_schedule(name).actions(4, 5)
        expected = [simulate(actions, costs).step_seconds for costs in single]
        assert step_seconds(find_schedule(name).program(4, 5), together).tolist() == expected
        assert simulate(actions, together.candidate(2)).step_seconds == expected[2]


def test_memory_over_time() -> None:
    timeline = simulate(find_schedule("1f1b").actions(2, 3), uniform_costs([1, 1], [1, 1], 3))
    levels: npt.NDArray[np.float64] = np.array(timeline.memory_over_time(0, 100, 10))
    assert levels[:, 1].tolist() == [100, 110, 120, 110, 120, 110, 100]
    assert levels[:, 0].tolist() == [0, 0, 1, 4, 4, 6, 8]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([[F0, B0], [F0]], "stage 1: B0 is missing"),
        ([[F0, F0, B0]], "stage 0 runs F0 twice"),
        ([[F0, B0, F1, B1], [F1, B1, F0, B0]], "stage 0 waits at B0 for B0 of stage 1"),
        ([[B0, F0]], "stage 0 waits at B0 for F0 of stage 0"),
    ],
)
def test_impossible_lists_are_refused(actions: list[list[Action]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        simulate(actions, uniform_costs([1.0] * len(actions), [1.0] * len(actions), 2))


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_costs_are_refused(bad: float) -> None:
    with pytest.raises(UsageError, match="forward holds"):
        simulate(find_schedule("gpipe").actions(2, 1), uniform_costs([1.0, bad], [1.0, 1.0], 1))


def test_a_timeline_is_of_one_candidate() -> None:
    costs = linear_costs(np.ones((2, 1, 3)), np.ones((2, 1, 3)), np.zeros((1, 3)), np.zeros((1, 3)))
    program = find_schedule("gpipe").program(2, 1)
    with pytest.raises(UsageError, match="costs of 3 candidates: a timeline is of one"):
        simulate(program, costs)
    assert step_seconds(program, costs).tolist() == [4, 4, 4]
