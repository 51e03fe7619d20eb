"""Steps predicted from stages alone, against closed forms; corrections, fitted to steps that follow them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.runtimes.checking.prediction import (
    cross_validate,
    find_minimum,
    fit_corrections,
    is_looped,
    predict_step,
    vary_case,
)
from pplan.runtimes.checking.records import (
    Case,
    CaseResult,
    Corrections,
    CutLink,
    LinkSeconds,
    RunSeconds,
    StageSeconds,
)

MakeCase = Callable[..., Case]
WHOLE = StageSeconds(forward=1.0, backward=2.0)
SPLIT = StageSeconds(forward=1.0, backward=2.0, input=1.0, weight=1.0)


def planned(case: Case, stages: list[StageSeconds]) -> Case:
    """The case with these planned seconds."""
    return case.model_copy(update={"planned": stages})


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages(make_case: MakeCase, schedule: str) -> None:
    case = make_case(schedule, devices=4, micro_batches=8)
    assert predict_step(planned(case, [WHOLE] * 4)).step_seconds == pytest.approx((8 + 3) * 3.0)


def test_interleaved(make_case: MakeCase) -> None:
    """Bubble (p - 1)(F + B) / v of the device's."""
    case = make_case("interleaved", devices=4, micro_batches=8, virtual_stages=2)
    half = StageSeconds(forward=0.5, backward=1.0)
    assert predict_step(planned(case, [half] * 8)).step_seconds == pytest.approx(8 * 3.0 + 3 * 1.5)


def test_zero_bubble_takes_the_parts(make_case: MakeCase) -> None:
    """ZB-H1: (p - 1)(F + B - W) idle seconds, B of the input; on the last device, and so the step."""
    case = make_case("zb-h1", devices=4, micro_batches=8)
    assert predict_step(planned(case, [SPLIT] * 4)).step_seconds == pytest.approx(8 * 3.0 + 3 * 1.0)


def test_links_and_corrections(make_case: MakeCase) -> None:
    """One micro-batch through two stages: there and back."""
    case = make_case("gpipe", micro_batches=1, link=CutLink(latency=0.25, occupancy=0.5), sent=100)
    assert predict_step(planned(case, [WHOLE] * 2)).step_seconds == pytest.approx(6.0 + 2 * 0.75)
    fixed = Corrections(overhead=0.1, looped_overhead=9.0, slowdown=2.0, latency=1.0, bandwidth=50.0)
    assert predict_step(planned(case, [WHOLE] * 2), fixed).step_seconds == pytest.approx(
        12.0 + 4 * 0.1 + 2 * 3.0
    )


def test_nothing_is_sent_inside_a_device(make_case: MakeCase) -> None:
    case = make_case("zb-v", micro_batches=2, virtual_stages=2, link=CutLink(latency=100.0, occupancy=0.0))
    assert [own.torch.stages for own in (case,)] == [[[0, 3], [1, 2]]]
    transfers = predict_step(planned(case, [SPLIT] * 4)).transfers
    assert {(transfer.stage, transfer.to_stage) for transfer in transfers} == {(0, 1), (1, 0)}
    assert len(transfers) == 2 * 2 * 2


def split_case(make_case: MakeCase, schedule: str, devices: int, micro_batches: int) -> Case:
    """A case whose stages are planned to take SPLIT."""
    return planned(make_case(schedule, devices, micro_batches), [SPLIT] * devices)


def measured(case: Case, true: Corrections) -> CaseResult:
    """As the case would be measured were the corrections true."""
    count = len(case.planned)
    slowed = StageSeconds(**{name: value * true.slowdown for name, value in SPLIT.model_dump().items()})
    step = predict_step(case, true).step_seconds
    return CaseResult(
        name=case.name,
        ran=RunSeconds(stages=[slowed] * count, step_seconds=[0.5 * step, step, 2 * step]),
    )


def test_corrections_are_found_again(make_case: MakeCase) -> None:
    true = Corrections(overhead=0.03, looped_overhead=0.11, slowdown=1.2, latency=1e-4, bandwidth=1e6)
    cases = [
        split_case(make_case, "gpipe", 4, 6),
        split_case(make_case, "1f1b", 4, 6),
        split_case(make_case, "zb-h1", 4, 6),
    ]
    sizes = [1000, 10_000, 100_000]
    links = LinkSeconds(sizes=sizes, seconds=[1e-4 + size / 1e6 for size in sizes])
    found = fit_corrections(cases, [measured(case, true) for case in cases], links)
    assert found.model_dump() == pytest.approx(true.model_dump(), rel=1e-2)
    own = split_case(make_case, "1f1b", 4, 8)
    assert not is_looped(own.torch)
    wanted = predict_step(own, true).step_seconds
    assert predict_step(own, found).step_seconds == pytest.approx(wanted, rel=1e-3)


def test_an_overhead_of_the_other_loop_is_taken_where_one_was_not_run(make_case: MakeCase) -> None:
    case = split_case(make_case, "gpipe", 2, 4)
    found = fit_corrections([case], [measured(case, Corrections(overhead=0.05))], None)
    assert found.overhead == pytest.approx(0.05, rel=1e-2)
    assert found.looped_overhead == found.overhead
    assert (found.latency, found.bandwidth) == (None, None)


def test_no_overhead_where_steps_are_shorter_than_predicted(make_case: MakeCase) -> None:
    case = split_case(make_case, "gpipe", 2, 4)
    result = measured(case, Corrections())
    short = result.model_copy(update={"ran": result.ran.model_copy(update={"step_seconds": [1.0]})})
    assert fit_corrections([case], [short], None).overhead == 0.0


def test_measurements_that_do_not_explain_the_steps_are_not_taken(make_case: MakeCase) -> None:
    """Transfers and stages were disturbed while they were measured: steps would be 3 times too long."""
    true = Corrections(overhead=0.05)
    cases = [
        split_case(make_case, "gpipe", 4, 6),
        split_case(make_case, "1f1b", 4, 6),
        split_case(make_case, "1f1b", 4, 12),
    ]
    disturbed = true.model_copy(update={"slowdown": 3.0})
    results = [
        measured(case, disturbed).model_copy(
            update={"ran": measured(case, disturbed).ran.model_copy(update={"step_seconds": [step]})}
        )
        for case in cases
        for step in [predict_step(case, true).step_seconds]
    ]
    links = LinkSeconds(sizes=[1000, 10_000, 100_000], seconds=[2.0, 2.0, 2.0])
    found = fit_corrections(cases, results, links)
    assert (found.slowdown, found.latency, found.bandwidth) == (1.0, None, None)
    assert found.overhead == pytest.approx(0.05, rel=1e-2)
    for case in cross_validate(cases, results, links):
        assert case.calibrated_step_seconds == pytest.approx(case.measured_step_seconds, rel=1e-3)


@pytest.mark.parametrize(("count", "held_out"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_a_held_out_case_is_predicted_from_the_others(make_case: MakeCase, count: int, held_out: int) -> None:
    """Steps of the i-th case are longer as an overhead of its own says."""
    cases = [split_case(make_case, "gpipe", 2, micro_batches) for micro_batches in (2, 4, 6)][:count]
    overheads = [0.1, 0.1, 0.3][:count]
    results = [
        measured(case, Corrections(overhead=overhead))
        for case, overhead in zip(cases, overheads, strict=True)
    ]
    predictions = cross_validate(cases, results, None)
    assert [case.name for case in predictions] == [case.name for case in cases][:held_out]
    if count == 3:
        expected = predict_step(cases[2], Corrections(overhead=0.1)).step_seconds
        assert predictions[2].calibrated_step_seconds == pytest.approx(expected, rel=1e-3)
        assert predictions[2].calibrated_error < 0


@pytest.mark.parametrize("valley", [0.0, 0.3, 1.0])
def test_least(valley: float) -> None:
    assert find_minimum(lambda x: (x - valley) ** 2, 0.0, 1.0, 1e-6) == pytest.approx(valley, abs=1e-5)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("gpipe", {}),
        ("1f1b", {}),
        ("zb-h1", {}),
        ("interleaved", {"virtual_stages": 2}),
        ("zb-v", {"virtual_stages": 2}),
    ],
)
def test_calibration_runs_other_cases(make_case: MakeCase, schedule: str, options: dict[str, Any]) -> None:
    case = make_case(schedule, devices=2, micro_batches=4, **options)
    made = vary_case(case)
    assert len(made) >= 2
    keys = {(other.torch.order, other.torch.micro_batches) for other in made}
    assert len(keys) == len(made)
    assert (schedule, 4) not in keys
    for other in made:
        assert other.torch.parts == case.torch.parts
        assert other.torch.stages == case.torch.stages
        assert other.document.micro_batch_size == case.document.micro_batch_size
