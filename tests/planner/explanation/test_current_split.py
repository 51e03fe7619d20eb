"""Why a split in use is slower: the plan's own split is not, and the causes sum to the difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Topology
from pplan.planner.explanation.current_split import SplitComparison, compare_split
from pplan.planner.explanation.explain_options import ExplainOptions

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
Solve = Callable[..., Any]


@pytest.fixture
def made(make_chain: MakeChain, make_topology: MakeTopology, solved: Solve) -> Any:
    """A straight pipeline on three devices, with heavy weights."""
    chain = make_chain(2, 9, cuts=1.0, traffic=0.2)
    weights = np.full(len(chain), 1e4)
    chain = replace(chain, parameter_bytes=weights, trainable_bytes=weights)
    found = solved(chain, make_topology(3, memory=10**6), mini_batch=8, schedule="1f1b")
    assert len(found.plan.balance) == 3
    return found


def total(split: SplitComparison) -> tuple[float, float]:
    return (
        sum(cause.current_seconds for cause in split.causes),
        sum(cause.plan_seconds for cause in split.causes),
    )


def test_the_plans_own_split_is_as_fast(made: Any) -> None:
    split = compare_split(made.question, ExplainOptions(current=tuple(made.plan.balance)))
    assert split.current.plan == split.plan.plan
    assert split.slower == pytest.approx(0, abs=1e-12)
    assert all(
        cause.current_seconds == pytest.approx(cause.plan_seconds, abs=1e-12) for cause in split.causes
    )
    assert split.best_setting is None
    assert split.best_cuts is None
    assert split.notes == []


def test_a_lopsided_split_is_slower_by_its_busiest_stage(made: Any) -> None:
    balance = (7, 1, 1)
    split = compare_split(
        made.question, ExplainOptions(current=balance, micro_batches=made.plan.micro_batches)
    )
    assert split.current.plan.balance == list(balance)
    assert split.slower > 0.1
    assert total(split) == pytest.approx((split.current.plan.step_seconds, split.plan.plan.step_seconds))
    work = next(cause for cause in split.causes if cause.name == "work of the busiest stage")
    more = {cause.name: cause.current_seconds - cause.plan_seconds for cause in split.causes}
    assert more[work.name] == max(more.values())
    assert split.best_cuts is not None
    assert split.best_cuts.step_seconds == pytest.approx(made.plan.prediction.step_seconds)


def test_few_micro_batches_are_told_from_the_cuts(made: Any) -> None:
    balance = tuple(made.plan.balance)
    split = compare_split(made.question, ExplainOptions(current=balance, micro_batches=2))
    assert split.current.plan.micro_batches == 2
    assert split.best_setting is not None
    assert split.best_setting.step_seconds == pytest.approx(made.plan.prediction.step_seconds)
    assert total(split) == pytest.approx((split.current.plan.step_seconds, split.plan.plan.step_seconds))


def test_another_schedule_and_replicas(made: Any) -> None:
    split = compare_split(made.question, ExplainOptions(current=(9,), replicas=3, schedule="gpipe"))
    assert split.current.plan.schedule == "gpipe"
    assert split.current.plan.replicas == [3]
    names = [cause.name for cause in split.causes]
    assert "all-reduce and update" in names
    assert total(split) == pytest.approx((split.current.plan.step_seconds, split.plan.plan.step_seconds))


def test_what_is_run_again_is_told(made: Any, solved: Solve) -> None:
    """Of the busiest stage, the forward of every micro-batch."""
    recompute = solved(made.chain, made.topology, mini_batch=8, schedule="1f1b", recompute="always")
    split = compare_split(recompute.question, ExplainOptions(current=(7, 1, 1)))
    cause = next(cause for cause in split.causes if cause.name == "recompute")
    for side, seconds in ((split.current, cause.current_seconds), (split.plan, cause.plan_seconds)):
        forward = side.stages[side.busiest.stage].forward_seconds
        assert seconds == pytest.approx(side.plan.micro_batches * forward)
    assert total(split) == pytest.approx((split.current.plan.step_seconds, split.plan.plan.step_seconds))


def test_a_split_that_does_not_fit_says_so(made: Any, solved: Solve) -> None:
    needed = max(stage.memory_bytes for stage in made.plan.stages)
    device = replace(made.topology.groups[0].device, memory_bytes=needed)
    topology = replace(made.topology, groups=(made.topology.groups[0]._replace(device=device),))
    tight = solved(made.chain, topology, mini_batch=8, schedule="1f1b")
    split = compare_split(tight.question, ExplainOptions(current=(7, 1, 1)))
    assert any(note.startswith("it does not fit: device 0 needs") for note in split.notes)


@pytest.mark.parametrize(
    ("current", "message"),
    [
        (ExplainOptions(current=(3, 3)), "holds 6 layers, the model has 9"),
        (ExplainOptions(current=(1,) * 9), "takes 9 devices"),
        (ExplainOptions(current=(5, 4), micro_batches=3), "does not divide"),
        (ExplainOptions(current=(5, 4), schedule="chimera", micro_batches=1), "chimera"),
    ],
)
def test_a_split_that_cannot_be(made: Any, current: ExplainOptions, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare_split(made.question, current)


def test_a_stage_without_a_layer() -> None:
    with pytest.raises(UsageError, match=r"current\[1\]=0: must be at least 1"):
        ExplainOptions(current=(3, 0, 6))
