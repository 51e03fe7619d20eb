"""Plans as records: words, energy, summaries and baselines by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.alternatives import larger_micro_batches
from pplan.planner.asynchronous import bubble
from pplan.planner.build_plan import list_norm_warnings
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.plan_simulation import busy_seconds, list_prediction_limits, plan_stages
from pplan.planner.problem import Problem
from pplan.planner.scoring import assemble, fastest

MakeChain = Callable[..., Chain]


@pytest.fixture
def equal(make_chain: MakeChain) -> Chain:
    """Four layers of 1 s forward and 2 s backward a sample, of 10 bytes between them, measured at 1 and 2."""
    chain = make_chain(0, 4, sizes=(1, 2), cuts=1.1)
    each = np.outer(np.ones(4), (1.0, 2.0))
    return replace(
        chain,
        forward_seconds=each,
        backward_seconds=2 * each,
        forward_host_seconds=0 * each,
        backward_host_seconds=0 * each,
        output_bytes=10 * each,
        parameter_bytes=np.full(4, 100.0),
        trainable_bytes=np.full(4, 100.0),
        buffer_bytes=np.zeros(4),
        saved_bytes=40 * each,
        saved_input_bytes=0 * each,
        workspace_bytes=0 * each,
    )


def line(gpus: int, memory: int | None = None) -> Topology:
    return Topology((Group(Device("toy", memory), gpus),), (Level("node", None, Link(1e12, 0.0)),))


def straight(micro_batches: int, size: int, ends: tuple[int, ...] = (2, 4)) -> Proposal:
    devices = tuple((stage,) for stage in range(len(ends)))
    return Proposal(PipelineConfig("1f1b", "by_stage", micro_batches, size), ends, devices)


def test_stages_by_hand(equal: Chain) -> None:
    """Two stages of two layers, of two samples: 4 s forward, 8 backward, four micro-batches and a fill of
    one: 5 * 12 s, of which each computes 4 * 12."""
    space = Problem(equal, line(2), PlanOptions(mini_batch=8)).space
    scored = fastest(space, [straight(4, 2)])
    assert scored is not None
    assert scored.step_seconds == pytest.approx(60.0)
    assert bubble(space, scored) == pytest.approx(1 / 5)
    first, second = plan_stages(space, scored)
    assert (first.first_layer, first.last_layer, second.first_layer, second.last_layer) == (0, 1, 2, 3)
    assert (first.forward_seconds, first.backward_seconds) == pytest.approx((4.0, 8.0))
    assert first.memory_limit_bytes is None
    # Two layers' weights and gradients; activations of two micro-batches, and of one.
    assert (first.memory["weights"], first.memory["gradients"]) == (200, 200)
    saved = [own.memory_bytes for own in (first, second)]
    assert saved[0] > saved[1]
    assert busy_seconds([first, second], 4) == pytest.approx({0: 48.0, 1: 48.0})
    assert busy_seconds([first, first], 4) == pytest.approx({0: 96.0})
    again = ScoredPlan(scored.proposal, ("always", "never"), 1.0)
    recomputing, other = plan_stages(space, again)
    assert recomputing.backward_seconds == pytest.approx(12.0)
    assert (recomputing.recompute, other.recompute) == ("always", "never")
    assert first.recompute is None


def test_larger_micro_batches_are_named_where_they_are_faster(equal: Chain) -> None:
    """Launches of 1 s a layer and direction: 2 (4 (m + 1)) s whatever the size. 16 samples in micro-batches
    of 2 take 9 * 12 s; of 4 5 * 24, of which the launches hide nothing. With launches of 20 s a stage takes
    80 a micro-batch: twice the size is nearly half."""
    slow = replace(
        equal,
        forward_host_seconds=np.full((4, 2), 20.0),
        backward_host_seconds=np.full((4, 2), 20.0),
    )
    for chain, says in ((equal, False), (slow, True)):
        problem = Problem(chain, line(2), PlanOptions(mini_batch=16, schedule="1f1b"))
        best = fastest(problem.space, [straight(8, 2)])
        assert best is not None
        texts = larger_micro_batches(problem, best)
        assert bool(texts) == says
    assert re.match(
        r"the profile measured at most 2 samples per micro-batch: with (8|16) \(extrapolated\) these stages "
        "would take ",
        texts[0],
    )
    assert texts[0].endswith("x faster; profile with larger `micro_batch_sizes`")
    assert best is not None
    fixed = Problem(slow, line(2), PlanOptions(mini_batch=16, micro_batches=8))
    assert larger_micro_batches(fixed, best) == []
    assert larger_micro_batches(problem, replace(best, proposal=straight(1, 16))) == []


def test_batch_norms_of_few_samples_are_named(equal: Chain) -> None:
    problem = Problem(replace(equal, batch_norms=("bn1",)), line(2), PlanOptions(mini_batch=16))
    few, many = (ScoredPlan(straight(16 // size, size), ("never", "never"), 1.0) for size in (2, 8))
    (text,) = list_norm_warnings(problem, few)
    assert text.startswith("bn1 is a batch norm: it normalises each micro-batch of 2 samples a replica by")
    assert list_norm_warnings(problem, many) == []
    assert list_norm_warnings(Problem(equal, line(2), PlanOptions(mini_batch=16)), few) == []


def warnings(chain: Chain, schedule: str, recompute: Any = "never", size: int = 2) -> list[str]:
    space = Problem(chain, line(2), PlanOptions(mini_batch=8)).space
    proposal = Proposal(PipelineConfig(schedule, "by_stage", 4, size), (2, 4), ((0,), (1,)))
    return list(
        list_prediction_limits(assemble(replace(space, past_largest=True), proposal, (recompute,) * 2))
    )


def test_what_is_taken_for_granted_is_said(equal: Chain) -> None:
    assert warnings(equal, "1f1b") == []
    assert warnings(equal, "1f1b", size=4) == [
        "micro-batch size 4 is past the largest measured (2): extrapolated"
    ]
    halves, pending, again = warnings(equal, "zb-h1", "always")
    assert halves.startswith("the profile measured whole backwards: 50 % of a layer with weights is assumed")
    assert pending.startswith("the profile does not state which gradients the first part")
    assert again.startswith("stages that recompute are charged one more forward per micro-batch")
    assert len(warnings(equal, "zb-h1")) == 2
    parts = replace(
        equal,
        backward_input_seconds=equal.forward_seconds,
        backward_weight_seconds=equal.forward_seconds,
        pending_gradient_bytes=equal.saved_bytes,
    )
    assert warnings(parts, "zb-h1") == []
    # 1.3 times a whole backward of 2 s a sample, and 1.5 times.
    assert warnings(replace(parts, backward_weight_seconds=1.6 * equal.forward_seconds), "zb-h1") == []
    longer = replace(parts, backward_weight_seconds=2 * equal.forward_seconds)
    assert warnings(longer, "zb-h1") == [
        "micro-batch size 2: a backward in two parts takes 1.50 times as long as a whole one; zero-bubble "
        "schedules pay for it: compare them with 1f1b, or use a larger micro-batch"
    ]
    assert warnings(longer, "1f1b") == []
