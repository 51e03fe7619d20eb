"""Plans in the simulator: as they stand they take what they say; overridden, what a hand count gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Topology
from pplan.planner.build_plan import build_problem
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import Overrides, PlanOptions
from pplan.planner.plan_simulation import count_devices, simulate_plan

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]


def _solved(chain: Chain, topology: Topology, **options: object) -> Plan:
    asked = PlanOptions(**options)  # type: ignore[arg-type]
    return solve_objective(
        Objective(),
        build_problem(chain, topology, asked, ProfileReference(file="", sha256=""), {}),
        model="toy",
        profile=ProfileReference(file="", sha256=""),
    )


WISHES = [
    {"schedule": "1f1b"},
    {"schedule": "gpipe", "recompute": "never"},
    {"schedule": "gpipe", "recompute": "except_last"},
    {"schedule": "1f1b", "recompute": "always", "optimizer": "adam"},
    {"runtime": "torchgpipe", "recompute": "never"},
    {"runtime": "torchgpipe", "recompute": "except_last"},
    {"runtime": "torchgpipe", "recompute": "always"},
]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", WISHES, ids=lambda options: "-".join(options.values()))
def test_a_plan_as_it_is_takes_what_it_says(
    make_chain: MakeChain, make_topology: MakeTopology, options: dict[str, str], seed: int
) -> None:
    chain, topology = make_chain(seed, 12), make_topology(4, per_node=2, latency=0.01)
    if "runtime" in options:
        topology = make_topology(4, per_node=4, latency=0.01)
    plan = _solved(chain, topology, mini_batch=16, **options)
    found = simulate_plan(plan, chain, topology)
    assert found.timeline.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-12)
    assert found.timeline.bubble == pytest.approx(plan.prediction.bubble, abs=1e-12)
    assert [own for (own,) in found.layers] == [(s.first_layer, s.last_layer) for s in plan.stages]
    for own, stage in zip(found.memory, plan.stages, strict=True):
        assert own.terms == stage.memory


def test_a_faster_device_scales_the_computing(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, topology = make_chain(2, 10), make_topology(3)
    fast = Topology(
        tuple(group._replace(device=Device("fast", None, speed=2.0)) for group in topology.groups),
        topology.levels,
    )
    plan = _solved(chain, fast, mini_batch=12, schedule="1f1b")
    assert simulate_plan(plan, chain, fast).timeline.step_seconds == pytest.approx(
        plan.prediction.step_seconds, rel=1e-12
    )


@pytest.fixture
def chain(make_chain: MakeChain) -> Chain:
    """Twelve layers; all cuts are allowed, nothing is sent, and replicas would have much to add up."""
    weights = np.full(12, 1e4)
    return replace(make_chain(3, 12, traffic=0.0, cuts=1.1), parameter_bytes=weights, trainable_bytes=weights)


@pytest.fixture
def plan(chain: Chain, make_topology: MakeTopology) -> Plan:
    """Four stages, eight micro-batches of two, 1F1B."""
    plan = _solved(chain, make_topology(4), mini_batch=16, micro_batches=8, schedule="1f1b")
    assert plan.replicas == [1, 1, 1, 1]
    return plan


def test_what_torch_runs_again_for_weight_gradients_is_said(
    chain: Chain, plan: Plan, make_topology: MakeTopology
) -> None:
    for schedule, recompute, said in (
        ("zb-h1", "always", True),
        ("zb-h1", "never", False),
        ("1f1b", "always", False),
    ):
        recomputing = plan.model_copy(update={"recompute": recompute})
        own = simulate_plan(recomputing, chain, make_topology(4), Overrides(schedule=schedule))
        assert any("another one for the weight gradients" in note for note in own.notes) == said


def test_replicas_share_a_micro_batch(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    stages = [stage.model_copy(update={"devices": [n]}) for n, stage in enumerate(plan.stages)]
    stages[3] = stages[3].model_copy(update={"replicas": 2, "devices": [3, 4]})
    shared = plan.model_copy(update={"stages": stages})
    found = simulate_plan(shared, chain, make_topology(5))
    first, last = found.layers[3][0]
    costs, own = chain.at(plan.micro_batch_size / 2), slice(first, last + 1)
    work = (costs.forward_seconds[own] + costs.backward_seconds[own]).sum()
    assert found.timeline.busy_seconds[3] == pytest.approx(plan.micro_batches * work)
    assert [reduction.stages for reduction in found.timeline.reductions] == [(3,)]
    recut = simulate_plan(shared, chain, make_topology(5), Overrides(stages=5))
    assert any("replicas are dropped" in note for note in recut.notes)
    assert recut.timeline.reductions == ()


def test_transfers_take_the_links_time(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, topology = make_chain(4, 8), make_topology(4, per_node=2, latency=0.25)
    plan = _solved(chain, topology, mini_batch=4, micro_batches=2, schedule="1f1b")
    wide = simulate_plan(plan, chain, topology, Overrides(stages=4))
    at = [own[0][1] for own in wide.layers[:-1]]
    sizes = chain.at(2).output_bytes[at]
    occupied = wide.timeline.costs.forward_occupancy
    assert occupied is not None
    np.testing.assert_allclose(occupied[0], sizes / np.array([20.0, 5.0, 20.0]))
    latency = wide.timeline.costs.backward_latency
    assert latency is not None
    np.testing.assert_allclose(latency[0], [0.25, 1.0, 0.25])


def test_a_runtime_that_does_not_run_the_schedule(make_chain: MakeChain, make_topology: MakeTopology) -> None:
    chain, topology = make_chain(5, 8), make_topology(2)
    options = {"runtime": "torchgpipe", "recompute": "except_last"}
    plan = _solved(chain, topology, mini_batch=8, micro_batches=4, **options)
    own = simulate_plan(plan, chain, topology)
    assert own.timeline.costs.hosts == "one"
    assert own.notes == ()
    other = simulate_plan(plan, chain, topology, Overrides(schedule="1f1b"))
    assert other.timeline.costs.hosts == "each"
    assert other.notes == (
        "recompute always: except-last is for gpipe",
        "torchgpipe does not run 1f1b: simulated with one process per stage",
    )


def test_the_counter_peaks_at_the_ledger(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    for schedule in ("1f1b", "interleaved", "chimera", "zb-v"):
        found = simulate_plan(plan, chain, make_topology(4), Overrides(schedule=schedule))
        for stage, own in enumerate(found.memory):
            peak = max(level for _, level in own.over_time(found.timeline, stage))
            assert peak == pytest.approx(own.bytes, rel=1e-9)
            assert own.resident_bytes > 0


@pytest.mark.parametrize(
    ("overrides", "what", "hint"),
    [
        (Overrides(stages=13), "stages 13: the allowed cuts make at most", "fewer stages"),
        (
            Overrides(micro_batches=5),
            "micro-batches 5: does not divide the global batch of 16",
            "1, 2, 4, 8, 16",
        ),
        (Overrides(micro_batches=2**15), "micro-batches 32768", "fewer"),
        (Overrides(schedule="chimera", stages=3), "stages 3: chimera", "2 or 4"),
        (Overrides(schedule="interleaved", micro_batches=2), "micro-batches 2: interleaved", "4"),
    ],
)
def test_what_cannot_be(
    chain: Chain, plan: Plan, make_topology: MakeTopology, overrides: Overrides, what: str, hint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        simulate_plan(plan, chain, make_topology(16), overrides)
    assert what in refused.value.what
    assert hint in refused.value.hint


def test_plans_that_cannot_be(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    selective = plan.model_copy(update={"recompute": "by_stage"})
    with pytest.raises(UsageError, match="does not state the recomputation"):
        simulate_plan(selective, chain, make_topology(4))
    forbidden = replace(chain, cut_after=np.zeros(12, dtype=np.bool_))
    with pytest.raises(UsageError, match="at most 1 parts"):
        simulate_plan(plan, forbidden, make_topology(4))
    one = plan.stages[0].last_layer
    cuts = np.ones(12, dtype=np.bool_)
    cuts[one] = False
    with pytest.raises(UsageError, match=f"layer {one}, layer{one}, where the profile allows no cut"):
        simulate_plan(plan, replace(chain, cut_after=cuts), make_topology(4))


def test_a_device_with_a_profile_of_its_own(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    own = make_topology(4)
    device = Device("other", None, profile="other.profile.json")
    topology = Topology(tuple(group._replace(device=device) for group in own.groups), own.levels)
    with pytest.raises(
        UsageError, match=r"names the profile other\.profile\.json for other, which was not given"
    ):
        simulate_plan(plan, chain, topology)


def test_devices_as_they_were_profiled_themselves(
    chain: Chain, plan: Plan, make_topology: MakeTopology
) -> None:
    """Stages 0 and 1 on the profiled kind, 2 and 3 on one with a profile in which all takes thrice as long,
    and the launches of one process in torchgpipe too."""
    slow = replace(
        chain,
        forward_seconds=3 * chain.forward_seconds,
        backward_seconds=3 * chain.backward_seconds,
        cut_after=np.zeros(12, dtype=np.bool_),
    )
    device = make_topology(1).device(0)
    kinds = (Group(device, 2), Group(Device("other", None, profile="other.profile.json"), 2))
    mixed = Topology(kinds, make_topology(4).levels)
    busy = simulate_plan(plan, chain, make_topology(4)).timeline.busy_seconds
    found = simulate_plan(plan, chain, mixed, profiles={"other.profile.json": slow}).timeline
    assert found.busy_seconds == pytest.approx([busy[0], busy[1], 3 * busy[2], 3 * busy[3]])
    thirds = (Group(device, 2), Group(Device("other", None, speed=1 / 3), 2))
    same = simulate_plan(plan, chain, Topology(thirds, make_topology(4).levels)).timeline
    assert found.step_seconds == pytest.approx(same.step_seconds)
    renamed = replace(slow, names=tuple(f"another {name}" for name in chain.names))
    with pytest.raises(UsageError, match=r"other\.profile\.json: has other layers than the plan's profile"):
        simulate_plan(plan, chain, mixed, profiles={"other.profile.json": renamed})


def test_what_does_not_fit_is_told(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    needs = [own.bytes for own in simulate_plan(plan, chain, make_topology(4)).memory]
    found = simulate_plan(plan, chain, make_topology(4, memory=sorted(needs)[1]))
    worst = needs.index(max(needs))
    (note,) = found.notes
    assert note.startswith(f"it does not fit: stage {worst} needs ")
    assert note.endswith("(2 stages in all)")
    assert simulate_plan(plan, chain, make_topology(4, memory=max(needs))).notes == ()


def test_replicas_of_several_kinds_fit_on_the_least_memory(
    chain: Chain, plan: Plan, make_topology: MakeTopology
) -> None:
    stages = [stage.model_copy(update={"devices": [n]}) for n, stage in enumerate(plan.stages)]
    stages[3] = stages[3].model_copy(update={"replicas": 3, "devices": [3, 4, 5]})
    shared = plan.model_copy(update={"stages": stages})
    kinds = (Group(Device("any", None), 4), Group(Device("small", 100), 1), Group(Device("large", 200), 1))
    found = simulate_plan(shared, chain, Topology(kinds, make_topology(6).levels))
    assert [own.limit_bytes for own in found.memory] == [None, None, None, 100]
    assert any(note.startswith("it does not fit: stage 3 needs ") for note in found.notes)


@pytest.fixture
def shared(make_chain: MakeChain, make_topology: MakeTopology) -> tuple[Plan, Chain, Topology]:
    """Data parallelism over four devices."""
    chain, topology = make_chain(1, 6, traffic=1e4), make_topology(4)
    plan = _solved(chain, topology, mini_batch=16)
    assert plan.replicas == [4]
    return plan, chain, topology


def test_another_schedule_keeps_the_replicas(shared: tuple[Plan, Chain, Topology]) -> None:
    """On one device there is no pipeline to fill: the devices work as long as in the plan itself."""
    plan, chain, topology = shared
    own = simulate_plan(plan, chain, topology)
    found = simulate_plan(plan, chain, topology, Overrides(schedule="zb-v"))
    assert found.timeline.busy_seconds[0] == pytest.approx(own.timeline.busy_seconds[0])
    assert any("4 replicas" in note for note in found.notes)
    alone = simulate_plan(plan, chain, topology, Overrides(schedule="zb-v", replicas=1))
    assert alone.timeline.busy_seconds[0] > 2 * own.timeline.busy_seconds[0]


def test_replicas_that_cannot_stay_are_refused(chain: Chain, plan: Plan, make_topology: MakeTopology) -> None:
    stages = [stage.model_copy(update={"devices": [n]}) for n, stage in enumerate(plan.stages)]
    stages[3] = stages[3].model_copy(update={"replicas": 2, "devices": [3, 4]})
    shared = plan.model_copy(update={"stages": stages})
    with pytest.raises(UsageError, match="replicas \\(1-1-1-2\\) do not apply to the new stages"):
        simulate_plan(shared, chain, make_topology(5), Overrides(schedule="zb-v"))
    wide = simulate_plan(plan, chain, make_topology(10), Overrides(stages=5, replicas=2))
    assert sorted(reduction.stages for reduction in wide.timeline.reductions) == [(n,) for n in range(5)]
    assert count_devices(plan, Overrides(stages=5, replicas=2)) == 10
