"""Steps of torchgpipe, FairScale and DeepSpeed predicted, against what one computes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.runtimes.checking.prediction import is_serial, predict_seconds
from pplan.runtimes.checking.records import Case, Job, StageSeconds

MakeCase = Callable[..., Case]
STAGES = [StageSeconds(forward=1.0, backward=2.0), StageSeconds(forward=3.0, backward=4.0)]


@pytest.mark.parametrize(("checkpoint", "again"), [("never", 0), ("always", 4), ("except_last", 3)])
def test_on_the_cpu_all_actions_follow_one_another(
    make_runtime_case: MakeCase, checkpoint: str, again: int
) -> None:
    case = make_runtime_case("torchgpipe", [1, 1], micro_batches=4, checkpoint=checkpoint)
    assert is_serial(case)
    assert predict_seconds(case, STAGES) == pytest.approx(4 * 10.0 + again * 4.0)


@pytest.mark.parametrize(("checkpoint", "again"), [("never", 0.0), ("always", 1.0)])
def test_on_gpus_stages_run_side_by_side(make_runtime_case: MakeCase, checkpoint: str, again: float) -> None:
    """GPipe of equal stages: (m + p - 1) forwards and as many backwards."""
    case = make_runtime_case("fairscale", [1, 1, 1], micro_batches=4, checkpoint=checkpoint, device="cuda")
    assert not is_serial(case)
    step = predict_seconds(case, [StageSeconds(forward=1.0, backward=2.0)] * 3)
    assert step == pytest.approx((4 + 3 - 1) * (1.0 + 2.0 + again))


@pytest.mark.parametrize(("checkpoint", "again"), [("never", 0), ("except_last", 6)])
def test_one_host_launches_for_all(make_runtime_case: MakeCase, checkpoint: str, again: int) -> None:
    """Where launching takes longer than computing, the step is all forwards in turn, then five backwards: two
    stages launch them on a thread each. Four of the five run a forward again, and two of them wait for
    what the other stage launches again."""
    case = make_runtime_case("torchgpipe", [1, 1], micro_batches=4, checkpoint=checkpoint, device="cuda")
    own = StageSeconds(forward=1e-6, backward=1e-6, forward_launch=1.0, backward_launch=2.0)
    assert predict_seconds(case, [own] * 2) == pytest.approx(2 * 4 * 1.0 + 5 * 2.0 + again * 1.0, rel=1e-4)


def test_deepspeed_is_1f1b(make_runtime_case: MakeCase) -> None:
    case = make_runtime_case("deepspeed", [1, 1], micro_batches=4)
    assert (is_serial(case), case.processes, case.parts) == (False, 2, [0, 1, 2])
    step = predict_seconds(case, [StageSeconds(forward=1.0, backward=2.0)] * 2)
    assert step == pytest.approx((4 + 2 - 1) * 3.0)


def test_a_job_is_of_one_runtime(make_runtime_case: MakeCase, make_case: Callable[..., Case]) -> None:
    pipe = make_runtime_case("torchgpipe", [1, 1])
    made: Any = Job(model=None, cases=[pipe])
    assert made.processes == 1
    assert Job.model_validate_json(made.model_dump_json(by_alias=True)) == made
    for others in (
        {"cases": [pipe, make_runtime_case("fairscale", [1, 1])]},
        {"cases": [pipe, make_case("gpipe", devices=1)]},
        {"cases": [pipe, make_runtime_case("deepspeed", [1, 1])]},
    ):
        with pytest.raises(ValueError, match="they must"):
            Job.model_validate({"model": None, **others})
