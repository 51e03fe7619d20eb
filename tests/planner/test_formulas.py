"""Single lines of the planner against the same worked out by hand: `benchmarks/mutation.py` found that no
other quick test tells them from their opposites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, TiedWeight, list_cut_points
from pplan.cost_models.optimizers import Precision
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.planner.candidate import PipelineConfig, abbreviate, linear_pipeline
from pplan.planner.coverage import _any_plan, _runs
from pplan.planner.cut_limits import CutLimits
from pplan.planner.cut_search.shape_search import _spread as _spread_cuts
from pplan.planner.degrees.degree_baselines import _megatron
from pplan.planner.degrees.degree_options import _read_zero
from pplan.planner.degrees.degree_search import DegreeAnswer
from pplan.planner.explanation.explain_context import resolve, with_memory
from pplan.planner.joint_search import joint_search
from pplan.planner.mini_batch import _neighbours
from pplan.planner.objectives.least_cost import _CostSearch
from pplan.planner.plan_options import PlanOptions
from pplan.planner.planners.asteroid import _least_shares
from pplan.planner.planners.base import stage_counts
from pplan.planner.planners.critical_stages import Times, _longest_part, _next_partitions
from pplan.planner.planners.replica_groups import thin_cuts
from pplan.planner.problem import Problem
from pplan.planner.replica_exchange import ReplicaExchange, bytes_at_end
from pplan.planner.search.least_exchange import exposed_exchange
from pplan.planner.search.near_plans import _fit_replicas, _Stage
from pplan.planner.search.space import Space
from pplan.planner.search.stage_figures import spread_cuts
from pplan.planner.search.stage_recompute import cheapest_mode
from pplan.planner.stage_table import StageTable
from pplan.planner.universal_bound import _input_backward
from pplan.planner.weight_moves import list_moves

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


@pytest.fixture
def even(make_chain: MakeChain) -> Chain:
    """Twelve layers of equal costs."""
    chain = make_chain(0, 12, cuts=1.1)
    ones = np.ones_like(chain.forward_seconds)
    return replace(chain, forward_seconds=ones, backward_seconds=ones)


def test_long_lists_say_their_end() -> None:
    assert abbreviate(range(1, 13)) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
    assert abbreviate([*range(1, 13), 20, 30]).endswith("11, 12, … 30")


@pytest.mark.parametrize(("batch", "others"), [(6, [3, 12]), (5, [10]), (1, [2])])
def test_mini_batches_beside_one(batch: int, others: list[int]) -> None:
    assert list(_neighbours(cast(Any, SimpleNamespace(mini_batch=batch)))) == others


@pytest.mark.parametrize(("gpus", "replicas"), [(1, False), (2, True), (3, True)])
def test_several_devices_have_replicas_in_any_order(
    even: Chain, make_topology: MakeTopology, gpus: int, replicas: bool
) -> None:
    words = _any_plan(Problem(even, make_topology(gpus), PlanOptions(mini_batch=12)), ("1f1b",))
    assert ("replicas" in words) == ("any order of the devices" in words) == replicas


def test_other_memory_is_of_devices_and_of_the_limit(even: Chain, make_topology: MakeTopology) -> None:
    options = PlanOptions(mini_batch=12, memory_limit=500)
    problem = Problem(even, make_topology(2, memory=1000), options)
    twice, any_ = with_memory(problem, 2.0), with_memory(problem, None)
    assert [group.device.memory_bytes for group in twice.topology.groups] == [2000]
    assert twice.options.memory_limit == 1000
    assert [group.device.memory_bytes for group in any_.topology.groups] == [None]
    assert any_.options.memory_limit is None


@pytest.mark.parametrize(("zero", "amount"), [(0, 100.0), (1, 150.0), (2, 100.0), (3, 0.0)])
def test_bytes_of_gradients_and_weights_at_the_end_of_a_step(zero: int, amount: float) -> None:
    """200 bytes of weights of 4, gradients of 2: an all-reduce of 100; half of one for each of the gradients'
    reduce-scatter and the weights' all-gather; the latter alone; nothing."""
    assert bytes_at_end(np.array([200.0]), Precision(4, 2), zero).tolist() == [amount]


def test_fewer_cuts_stand_at_equal_work(even: Chain, make_topology: MakeTopology) -> None:
    space = Space(even, make_topology(2), "sgd")
    assert list_cut_points(thin_cuts(space, 4).chain) == (0, 3, 6, 9, 12)


def test_a_stage_that_fills_its_device_fits() -> None:
    room = {"never": 2.0, "always": 3.0}
    group: Any = SimpleNamespace(most_in_flight=lambda mode: np.full((1, 2), room[mode]))
    config = PipelineConfig("1f1b", "by_stage", 4, 1)
    modes = [cheapest_mode(group, config, 0, 1, in_flight) for in_flight in (2.0, 3.0, 3.5)]
    assert modes == ["never", "always", None]


def test_memory_is_of_one_replica_where_none_is_said(even: Chain) -> None:
    table = StageTable.of(even, 1)
    alone, own, two = (
        table.memory(1, "never", "adam", *replicas, zero=1)[0, -1] for replicas in ((), (1,), (2,))
    )
    assert alone == own > two


def test_a_backward_that_recomputes_takes_a_forward_more(even: Chain) -> None:
    costs = replace(even, forward_seconds=3.0 * even.forward_seconds).at(1)
    alone, again = (_input_backward(costs, recompute=own) for own in (False, True))
    assert again - alone == pytest.approx(costs.forward_seconds)


def test_a_pinned_layer_is_of_its_own_stage_alone() -> None:
    """Stages of layers 0 to 2 and 3 to 5."""
    bounds = [(0, 3), (3, 6)]
    fitting = [CutLimits(pins=((layer, 0),)).allow(bounds) for layer in range(6)]
    assert fitting == [True, True, True, False, False, False]
    assert not CutLimits(pins=((5, 2),)).allow(bounds)
    assert [CutLimits(must_cut=(layer,)).allow(bounds) for layer in (1, 2, 5)] == [False, True, True]


def test_zero_may_be_none() -> None:
    assert _read_zero("0, 1", "zero") == (0, 1)


def test_what_a_narrow_search_finds_again_is_proven_by_nothing(
    even: Chain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(even, make_topology(2), PlanOptions(mini_batch=4, schedule="gpipe"))
    best = joint_search(problem, [])
    assert best.exact
    assert best.best is not None
    assert resolve(problem, [best.best]).exact
    monkeypatch.setattr("pplan.planner.explanation.explain_context.MANY", 1)
    assert not resolve(problem, [best.best]).exact


def test_kernels_without_a_table_are_all_assumed() -> None:
    known: Any = SimpleNamespace(has=lambda kernel: kernel == "known")
    kernels = ("known", "unknown")
    for table, assumed in ((None, ["known", "unknown"]), (known, ["unknown"])):
        plan: Any = SimpleNamespace(kernels=kernels, costs=SimpleNamespace(table=table))
        assert DegreeAnswer.assumed_kernels.fget(plan) == assumed  # type: ignore[attr-defined]


def test_megatron_shares_matrices_in_all_of_a_node_before_it_makes_stages() -> None:
    def one(tensor: int, pipeline: int) -> Any:
        degrees = ParallelDegrees(tensor=tensor, pipeline=pipeline, zero=1)
        return SimpleNamespace(degrees=degrees, micro_batch_size=1)

    every = [one(1, 1), one(2, 1), one(1, 2), one(2, 2)]
    chosen = [(own.degrees.tensor, own.degrees.pipeline) for own in _megatron(every)]
    assert chosen == [(1, 1), (2, 1), (2, 2)]


def test_devices_of_stages_on_all_devices_leave_none() -> None:
    placement = SimpleNamespace(ranks=(0, 1, 2), starts_after=lambda position: range(position, 3))
    some, whole = (cast(Any, SimpleNamespace(placement=placement, on_all=on_all)) for on_all in (False, True))
    assert list(_runs(some, (2,))) == [((0, 1),), ((1, 2),)]
    assert list(_runs(whole, (2,))) == []
    assert list(_runs(whole, (1, 2))) == [((0,), (1, 2))]


def test_numbers_of_stages_that_are_tried() -> None:
    """All up to 64, then a tenth more each, the most, and what divides the devices."""
    problem: Any = SimpleNamespace(
        stage_counts=range(1, 121),
        space=SimpleNamespace(chain=SimpleNamespace(max_stages=240)),
        usable_gpus=144,
    )
    assert stage_counts(problem) == [*range(1, 65), 71, 72, 80, 88, 97, 107, 118, 120]
    assert stage_counts(problem, 4) == list(range(1, 61))


def test_of_many_devices_of_a_kind_powers_of_two_are_tried(
    even: Chain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pplan.planner.objectives.least_cost.EVERY_COUNT", 3)
    groups = (Group(Device("fast", None, speed=2.0), 9), Group(Device("slow", None), 2))
    problem = Problem(even, replace(make_topology(11), groups=groups), PlanOptions(mini_batch=2))
    search = _CostSearch(problem, [1.0] * 11, cast(Any, SimpleNamespace(by_planner={})))
    tried: list[tuple[str, int, int]] = []
    monkeypatch.setattr(
        _CostSearch,
        "_look_at_group",
        lambda _, group, start: tried.append((group.device.name, group.number, start)),
    )
    search._look_at_kinds()
    fast = [("fast", count, 0) for count in (1, 2, 3, 4, 8)]
    assert tried == [*fast, ("slow", 1, 9), ("slow", 2, 9)]


def test_parts_go_to_the_devices_that_end_first_with_them() -> None:
    """The first device is three times as fast; then where one has room for fewer; and in too little room."""
    times = [np.array([[0.0] * 5, own])[:, :, None, None] for own in ([0.0, 1, 2, 3, 10], [0.0, 3, 6, 9, 12])]
    for room, shares in (([4, 4], [3, 1]), ([2, 4], [2, 2]), ([1, 4], [1, 3])):
        assert _least_shares(times, np.array(room)[:, None, None], 4).ravel().tolist() == shares
    too_little = np.array([[[2]], [[1]]])
    assert (_least_shares(times, too_little, 4) > too_little).any()


@pytest.mark.parametrize(
    ("gpus", "options", "every"),
    [
        (17, {}, True),
        (18, {}, False),
        (18, {"runtime": "deepspeed"}, False),
        (18, {"schedule": "zb-h1"}, True),  # nothing is searched of which some are left out
        (12, {"runtime": "torchgpipe"}, True),
    ],
)
def test_whether_a_number_of_replicas_was_left_out(
    gpus: int, options: dict[str, Any], every: bool, even: Chain, make_topology: MakeTopology
) -> None:
    topology = make_topology(gpus, per_node=20)
    assert Problem(even, topology, PlanOptions(mini_batch=gpus, **options)).every_replica_count == every


def test_one_process_on_many_devices_has_no_replicas(
    make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    options = PlanOptions(mini_batch=20, runtime="torchgpipe")
    assert Problem(make_chain(0, 20, cuts=1.1), make_topology(20, per_node=20), options).every_replica_count


def test_cuts_are_spread_to_places_of_their_own() -> None:
    assert _spread_cuts([0, 0, 0, 5]) == (0, 1, 2, 5)
    assert _spread_cuts([0, 5, 5, 5]) == (0, 3, 4, 5)
    assert _spread_cuts([0, 2, 2, 5]) == (0, 2, 3, 5)
    assert _spread_cuts([0, 1, 4, 5]) == (0, 1, 4, 5)
    assert _spread_cuts([0, 9]) == (0, 9)


@pytest.mark.parametrize(("zero", "share"), [(1, 1.0), (2, 0.5), (3, 0.0)])
def test_what_follows_the_last_backward_under_zero(
    zero: int, share: float, even: Chain, make_topology: MakeTopology
) -> None:
    """An all-gather of the weights, half an all-reduce, and of ZeRO 1 a reduce-scatter of the gradients."""
    heavy = replace(even, parameter_bytes=np.full(12, 40.0), trainable_bytes=np.full(12, 40.0))
    space = Space(heavy, make_topology(2), "sgd", zero=zero)
    table = space.table(1)
    exposed = exposed_exchange(space, 2, table, np.zeros(12))
    # 20 B/s: two devices exchange all bytes once in an all-reduce.
    assert exposed[0, 12] == pytest.approx(share * 12 * 40.0 / 20.0)
    assert not exposed_exchange(space, 1, table, np.zeros(12)).any()


def test_the_part_that_is_longest_on_a_path() -> None:
    """Four actions, each after the one before, of parts 0, 1, 0 and 1."""
    times, places = Times([0.0, 1, 3, 6], [1.0, 3, 6, 7], [-1, 0, 1, 2]), [0, 1, 0, 1]
    parts = {within: _longest_part(3, times, places, within) for within in ((1, 6), (0, 3), (9, 9))}
    assert parts == {(1, 6): 0, (0, 3): 1, (9, 9): 0}
    assert _longest_part(1, times, places, (0, 7)) == 1
    assert (
        _longest_part(1, Times([0.0, 1], [1.0, 2], [-1, 0]), places, (0, 7)) == 0
    )  # the earliest of equal ones


def test_partitions_beside_one() -> None:
    """Eight equal layers, of which the critical part gives its first or its last; the first part none."""
    work = np.ones(8)
    assert list(_next_partitions(work, (2, 5, 8), 1)) == [(3, 5, 8), (2, 4, 8)]
    assert list(_next_partitions(work, (2, 5, 8), 2)) == [(3, 6, 8)]
    assert list(_next_partitions(work, (2, 5, 8), 0)) == []
    assert list(_next_partitions(work, (2, 3, 8), 1)) == []


@pytest.mark.parametrize(("zero", "seconds"), [(1, 10.0), (2, 5.0), (3, 0.0)])
def test_exchanges_at_the_end_of_a_step_by_hand(
    zero: int, seconds: float, make_topology: MakeTopology
) -> None:
    """200 bytes of float32 weights on two devices, 20 B/s: a gather takes half of them, and so does a
    scatter."""
    exchange = ReplicaExchange(make_topology(2), (0, 1), Precision(4, 4), zero)
    assert exchange.at_end(np.array([200.0])).tolist() == [seconds]
    assert exchange.is_by_layer == (zero >= 2)
    assert not ReplicaExchange(make_topology(2), (0,), Precision(4, 4), zero).is_by_layer


@pytest.mark.parametrize("trainable", [0.0, 60.0])
def test_a_copy_of_a_frozen_weight_has_no_gradient(trainable: float, even: Chain) -> None:
    """60 bytes that the first and the last layer use; the first layer's own are counted there."""
    tied = replace(even, tied=(TiedWeight("shared", 60.0, trainable, (0, 11)),))
    plain, own = (StageTable.of(chain, 1).stage_bytes for chain in (even, tied))
    for field, copied in (("parameters", 60.0), ("trainable", trainable)):
        more = np.asarray(getattr(own, field)) - np.asarray(getattr(plain, field))
        assert more[6, 12] == pytest.approx(copied)
        assert more[0, 12] == more[0, 6] == more[3, 6] == pytest.approx(0.0)


def test_weights_that_move_by_hand() -> None:
    """100 and 300 bytes, which device 0 has, go to devices 1 and 2 at 20 B/s: both leave by its port, in
    20 s; where device 3 has them, too, the second comes from there, in 15. What nobody has is read."""
    topology = Topology((Group(Device("toy", None), 4),), (Level("node", None, Link(20.0, 0.5)),))
    proposal = linear_pipeline(PipelineConfig("1f1b", "never", 2, 1), [1, 2], 1)
    weights = np.array([100.0, 300.0])
    alone, seconds = list_moves(topology, {0: (0, 2)}, [0, 1, 2], proposal, weights)
    assert [(own.sender, own.receiver, own.bytes) for own in alone] == [(0, 1, 100), (0, 2, 300)]
    assert seconds == pytest.approx(20.5)
    both, seconds = list_moves(topology, {0: (0, 2), 3: (0, 2)}, [0, 1, 2, 3], proposal, weights)
    assert [(own.sender, own.receiver) for own in both] == [(0, 1), (3, 2)]
    assert seconds == pytest.approx(15.5)
    assert list_moves(topology, {1: (0, 1), 2: (0, 2)}, [1, 2], proposal, weights) == ((), 0.0)
    (lost,), seconds = list_moves(topology, {1: (0, 1)}, [1, 2], proposal, weights)
    assert (lost.sender, lost.receiver, lost.first_layer, lost.last_layer, seconds) == (None, 2, 1, 1, 0.0)


def test_as_few_first_layers_as_a_stage_must() -> None:
    """Four blocks; with room for 1, 1.5, 2, 3 and 4 micro-batches as none, one, two, three, all run again."""
    group: Any = SimpleNamespace(
        most_in_flight=lambda mode: np.full((1, 5), {"never": 1.0, "always": 4.0}[mode]),
        room=lambda *_, recompute_end: np.array([1.5, 2.0, 3.0])[recompute_end - 1],
        table=SimpleNamespace(cut_points=(0, 1, 2, 3, 4)),
    )
    config = PipelineConfig("1f1b", "first_layers", 4, 1)
    modes = [cheapest_mode(group, config, 0, 4, in_flight) for in_flight in (1.0, 1.5, 1.6, 3.0, 4.0, 4.1)]
    assert modes == ["never", "first_1", "first_2", "first_3", "always", None]


def test_few_places_of_a_long_chain_stand_at_equal_seconds(even: Chain, make_topology: MakeTopology) -> None:
    """In thirds of twelve equal layers; behind a first layer that is most of all, once."""
    thirds = spread_cuts(Space(even, make_topology(1), "sgd"), 4)
    assert np.flatnonzero(thirds).tolist() == [3, 7]
    first = replace(even, forward_seconds=even.forward_seconds * np.append(100.0, np.ones(11))[:, None])
    assert np.flatnonzero(spread_cuts(Space(first, make_topology(1), "sgd"), 4)).tolist() == [0]
    last = replace(even, forward_seconds=even.forward_seconds * np.append(np.ones(11), 100.0)[:, None])
    assert np.flatnonzero(spread_cuts(Space(last, make_topology(1), "sgd"), 4)).tolist() == [10]


@pytest.mark.parametrize(
    ("works", "replicas", "devices", "expected"),
    [
        (
            (6.0, 2.0),
            (3, 3),
            4,
            (3, 1),
        ),
        ((6.0, 4.0), (1, 1), 4, (2, 2)),
        ((9.0, 1.0), (1, 1), 4, (3, 1)),
        ((6.0, 2.0), (2, 1), 3, (2, 1)),
        ((1.0, 1.0, 1.0), (1, 1, 1), 2, None),
        ((8.0, 8.0), (4, 4), 5, (2, 2)),
    ],
)
def test_replicas_that_fit_on_the_devices(
    works: tuple[float, ...],
    replicas: tuple[int, ...],
    devices: int,
    expected: tuple[int, ...] | None,
) -> None:
    """One less where the stage stays the quickest, and one more for the slowest; of 1, 2, 3 or 4, and in the
    last row of 1, 2 or 4."""
    counts = (1, 2, 4) if works == (8.0, 8.0) else (1, 2, 3, 4)
    stages = [_Stage(1, 0, own, work) for own, work in zip(replicas, works, strict=True)]
    fits = _fit_replicas(stages, counts, devices)
    assert fits == (expected is not None)
    if expected is not None:
        assert tuple(own.replicas for own in stages) == expected
