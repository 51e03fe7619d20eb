"""Steps of stages that share a thread predicted, against what one computes by hand."""

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
    stages = [own.model_copy(update={"backward": own.backward + own.forward * bool(again)}) for own in STAGES]
    case = case.model_copy(update={"planned": stages})
    assert predict_seconds(case) == pytest.approx(4 * 10.0 + again * 4.0)


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
