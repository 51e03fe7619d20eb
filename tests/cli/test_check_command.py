"""`pplan check` around the running: what is asked of the processes, printed, written, and refused."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from statistics import median
from textwrap import dedent
from typing import Any

import pytest

import pplan
from pplan.api.check import model_spec
from pplan.api.check_options import CheckOptions
from pplan.cost_models.errors import MachineError
from pplan.cost_models.quantities import format_seconds
from pplan.planner.plan_file import Plan, PlanRow
from pplan.profiler.profile_file import Profile
from pplan.runtimes.checking.launching import OnProgress
from pplan.runtimes.checking.prediction import Calibration, is_serial, predict_seconds
from pplan.runtimes.checking.records import (
    Case,
    CaseResult,
    Check,
    CheckMeasurements,
    Corrections,
    Job,
    LinkSeconds,
    Losses,
    RunSeconds,
    StageSeconds,
)
from pplan.runtimes.documents import FairscaleExport, TorchgpipeExport

Run = Callable[..., Any]
SLOWER = 1.25
FITTED = Corrections(overhead=1e-3, looped_overhead=1e-3, slowdown=1.1, latency=5e-5, bandwidth=4e9)


def pretended(
    job: Job, plain: float = 2.0, measured: Callable[[Case], float] | None = None
) -> CheckMeasurements:
    """Measurements of steps that take a quarter longer than predicted, or as long as `measured` says.

    Stages and transfers are slower as FITTED says.
    """

    def result(case: Any) -> CaseResult:
        together = [
            StageSeconds(**{name: FITTED.slowdown * value for name, value in stage.model_dump().items()})
            for stage in case.planned
        ]
        step = predict_seconds(case) if measured is None else measured(case) / SLOWER
        losses = None if case.waits is not None else Losses(pipeline=[2.0, 1.5], plain=[plain, 1.5])
        return CaseResult(
            name=case.name,
            ran=RunSeconds(
                stages=together,
                step_seconds=[SLOWER * step, SLOWER * step, 2 * step],
                peak_bytes=[2**30] * len(case.document.stages),
            ),
            losses=losses,
        )

    if job.cases[0].document.runtime != "torch":
        return CheckMeasurements(
            backend="one process" if job.processes == 1 else "gloo",
            device_name="some CPU",
            cases=[pretended_run(case, plain) for case in job.cases],
        )
    links = None
    if job.link_sizes:
        seconds = [5e-5 + size / 4e9 for size in job.link_sizes]
        links = LinkSeconds(sizes=job.link_sizes, seconds=seconds)
    return CheckMeasurements(
        backend="gloo",
        device_name="some CPU",
        cases=[result(case) for case in job.cases],
        calibration=[result(case) for case in job.calibration],
        links=links,
    )


def pretended_run(case: Case, plain: float) -> CaseResult:
    """Of another runtime."""
    step = predict_seconds(case) if is_serial(case) else 1.0
    return CaseResult(
        name=case.name,
        ran=RunSeconds(stages=case.planned, step_seconds=[SLOWER * step]),
        losses=Losses(pipeline=[2.0, 1.5], plain=[plain, 1.5]),
    )


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were to be run; no process is started."""
    asked: list[Job] = []

    def pretend(job: Job, _: OnProgress) -> CheckMeasurements:
        asked.append(job)
        return pretended(job)

    monkeypatch.setattr("pplan.api.check.run_in_processes", pretend)
    monkeypatch.setattr("pplan.api.check.cores", lambda: 2)
    monkeypatch.setattr("pplan.api.check.gpus", lambda: 0)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return asked


@pytest.fixture
def planned(here: Path, profile: Profile) -> Callable[..., Plan]:
    """Writes the profile and a plan of it."""

    def make(
        balance: str = "4,8", schedule: str = "1f1b", mini_batch: int = 32, virtual_stages: int = 1
    ) -> Plan:
        profile.save(here / "toy.profile.json", force=True)
        plan = pplan.import_plan(
            balance,
            here / "toy.profile.json",
            schedule=schedule,
            mini_batch=mini_batch,
            micro_batches=8,
            virtual_stages=virtual_stages,
        )
        plan.save(here / "toy.plan.json", force=True)
        return plan

    return make


def test_a_plan_and_the_even_split(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    plan = planned()
    ran = run("check", "--save", "--set", "depth=3")
    assert ran.status == 0
    (job,) = jobs
    assert [case.name for case in job.cases] == ["plan", "even split"]
    assert [case.torch.parts for case in job.cases] == [[0, plan.balance[0], 12], [0, 6, 12]]
    assert job.model is not None
    assert (job.model.name, job.model.settings) == (plan.model, {"depth": 3})
    assert (job.device, job.calibration, job.link_sizes) == ("cpu", [], [])
    assert job.cases[0].crossing_bytes == [4 * 2**18]
    assert job.cases[0].links[0].latency > 0
    predicted = plan.prediction.step_seconds
    assert predict_seconds(job.cases[0]) == pytest.approx(predicted)
    for shown in (
        f"{plan.model}: a step takes {format_seconds(SLOWER * predicted)}",
        "(-20.0 %)",
        "2 processes of torch.distributed.pipelining over gloo on some CPU; trained for real, median of 3",
        "even split",
        "than the even split, measured.",
        "The losses of 2 steps are the plain model's (difference 0.0e+00).",
        "1.00 GiB",
    ):
        assert shown in ran.out
    assert ran.lines[0] == "Using toy.plan.json (newest plan in this directory)"
    assert ran.lines[-1] == "Wrote toy.check.json"
    found = Check.load(here / "toy.check.json")
    assert found.of_plan.predicted_step_seconds == pytest.approx(predicted)
    assert found.of_plan.measured_step_seconds == pytest.approx(SLOWER * predicted)
    assert found.of_plan.error == pytest.approx(1 / SLOWER - 1)
    assert [stage.planned.forward for stage in found.of_plan.stages] == pytest.approx(
        [stage.forward_seconds for stage in plan.stages]
    )
    # The plan is for any runtime, and PyTorch has buffers for all micro-batches of a step.
    for device, stage in zip(found.of_plan.devices, plan.stages, strict=True):
        assert device.planned_bytes > stage.memory_bytes
        assert device.unseen.keys() == {"reserve"}
        assert device.expected_bytes == device.planned_bytes - device.unseen["reserve"]
        assert device.error == pytest.approx(device.expected_bytes / 2**30 - 1)


def test_scalars_are_logged(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for every step, and one of stages and memory."""
    lines: list[tuple[int, dict[str, float]]] = []
    monkeypatch.setattr(
        "pplan.api.check.make_logger", lambda _: lambda step, scalars: lines.append((step, scalars))
    )
    plan = planned()
    assert run("check", "--log", "tensorboard:runs", "--save").status == 0
    found = Check.load(here / "toy.check.json").of_plan
    assert [line["step/measured_seconds"] for _, line in lines[:-1]] == found.step_seconds
    assert {line["step/predicted_seconds"] for _, line in lines[:-1]} == {found.predicted_step_seconds}
    assert len(jobs) == 1
    step, last = lines[-1]
    assert step == len(found.step_seconds) - 1
    assert last["stage_1/predicted_forward_seconds"] == pytest.approx(plan.stages[1].forward_seconds)
    assert last["stage_1/measured_backward_seconds"] == found.stages[1].measured.backward
    assert last["memory/device_1_predicted_bytes"] == found.devices[1].expected_bytes
    assert last["memory/device_1_measured_bytes"] == 2**30


def test_a_wrong_logger_ends_before_anything_runs(
    run: Run, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    planned()
    ran = run("check", "--log", "csv:runs")
    assert (ran.status, jobs) == (2, [])
    assert "logger 'csv:runs' is not known" in ran.err


def test_a_long_check_says_how_long_and_waits_for_its_steps(
    run: Run, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    """2 cases of 2 compared steps, each also on the 2 devices in turn, 2 to warm up, 40 on the clock and 2
    whose memory is measured."""
    step = planned().prediction.step_seconds
    ran = run("check", "--steps", "40")
    assert ran.lines[1].startswith(f"Runs 100 steps of about {step:.2f} s")
    assert f"about {100 * step / 60:.0f} min" in ran.lines[1]
    run("check", "--timeout", "30s")
    planned(mini_batch=3200)
    run("check")
    longer = 5 * 2 * planned(mini_batch=3200).prediction.step_seconds
    assert [job.timeout_seconds for job in jobs] == [120, 30, pytest.approx(longer)]
    assert longer > 1000


@pytest.mark.parametrize(
    ("above", "plain", "status", "said"),
    [
        ("25%", 2.0, 0, ""),
        ("15%", 2.0, 4, "the predicted step is off by -20.0 %, more than 15.0 %"),
        ("25%", 2.1, 4, "the losses are not the plain model's"),
    ],
)
def test_fail_above(
    run: Run,
    planned: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
    above: str,
    plain: float,
    status: int,
    said: str,
) -> None:
    planned()
    monkeypatch.setattr("pplan.api.check.run_in_processes", lambda job, _: pretended(job, plain))
    monkeypatch.setattr("pplan.api.check.cores", lambda: 2)
    ran = run("check", "toy.plan.json", "--fail-above", above, "--json")
    assert ran.status == status
    assert ran.err == (said and f"{said}\n")
    losses = json.loads(ran.out)["cases"][0]["losses"]
    assert losses["plain"] == [plain, 1.5]


@pytest.fixture
def calibrated(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Runs `check --calibrate` with steps that take as long as `measured` says."""

    def calibrate(measured: Callable[[Case], float], *options: str, **plan: Any) -> tuple[Job, Any]:
        def pretend(job: Job, _: OnProgress) -> CheckMeasurements:
            jobs.append(job)
            return pretended(job, measured=measured)

        planned(**plan)
        monkeypatch.setattr("pplan.api.check.run_in_processes", pretend)
        ran = run("check", "--calibrate", *options)
        return jobs[-1], ran

    return calibrate


def as_fitted(case: Case) -> float:
    """Seconds of a step that FITTED predicts exactly."""
    return predict_seconds(case, FITTED)


def test_calibrate(run: Run, here: Path, calibrated: Callable[..., Any], jobs: list[Job]) -> None:
    """Other cases are run first; the link and the speed go to a topology, and all to a file for later."""
    job, ran = calibrated(as_fitted)
    assert ran.status == 0
    reported = {(case.document.order, case.document.micro_batches) for case in job.cases}
    assert reported.isdisjoint((case.document.order, case.document.micro_batches) for case in job.calibration)
    assert len(job.calibration) == 3
    assert len(job.link_sizes) >= 3
    assert "Calibrated: an action takes 1.00 ms besides" in ran.out
    shown = [line.split() for line in ran.out.partition("Calibration, tested on")[2].splitlines()]
    held_out = {words[0]: words for words in shown if words and words[0].startswith("plan")}
    assert len(held_out) == 4
    for words in held_out.values():
        assert words[-4:-2] == words[-2:] or words[-6:-4] == words[-2:]  # calibrated as measured
    assert "The calibration improves the prediction of cases that it was not fitted to" in ran.out
    assert ran.lines[-2] == "Wrote toy.calibration.json and toy.topology.toml"
    assert ran.lines[-1].startswith("Solved again with it: ")
    topology = pplan.topology(here / "toy.topology.toml", gpus=2)
    link = topology.levels[0].link
    assert link.bandwidth_bytes_per_second == pytest.approx(4e9, rel=1e-2)
    assert link.latency_seconds == pytest.approx(5e-5 + 1e-3, rel=1e-2)
    assert topology.device(0).speed == pytest.approx(1 / FITTED.slowdown)
    assert run("solve", "toy.profile.json", "--topology", "toy.topology.toml", "--gpus", "2").status == 0
    fitted = Calibration.load(here / "toy.calibration.json").corrections
    assert fitted.model_dump() == pytest.approx(FITTED.model_dump(), rel=1e-2)
    assert run("check", "toy.plan.json", "--calibration", "toy.calibration.json").status == 0
    assert jobs[-1].calibration == []


def test_the_seconds_of_emulated_stages_are_not_those_of_the_devices(
    here: Path, calibrated: Callable[..., Any]
) -> None:
    _, ran = calibrated(as_fitted, "--emulate")
    assert ran.status == 0
    topology = pplan.topology(here / "toy.topology.toml", gpus=2)
    assert topology.device(0).speed == 1.0
    assert topology.levels[0].link.latency_seconds == pytest.approx(5e-5 + 1e-3, rel=1e-2)


def off_at_random(case: Case) -> float:
    """Seconds that differ from the prediction in either direction, with no reason that a fit could find."""
    return predict_seconds(case) * (1.6 if case.torch.micro_batches % 3 == 0 else 0.7)


def off_but_for_the_plan(case: Case) -> float:
    """Seconds of a machine that was slow until the plan ran."""
    slowed = 1.0 if case.name in ("plan", "even split") else 1.5
    return slowed * predict_seconds(case)


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        (off_at_random, "does not improve the prediction of cases that it was not fitted to"),
        (off_but_for_the_plan, "makes the prediction of the plan worse"),
    ],
)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_calibration_that_does_not_help_is_not_written(
    here: Path, calibrated: Callable[..., Any], measured: Any, reason: str, earlier: bool
) -> None:
    """An earlier one stays; the answer is the prediction without it."""
    files = [here / "toy.calibration.json", here / "toy.topology.toml"]
    for file in files if earlier else []:
        file.write_text("earlier")
    job, ran = calibrated(measured, "--save", "--fail-above", "90%")
    assert ran.status == 4
    assert f"The calibration is rejected, because it {reason}" in " ".join(ran.out.split())
    assert ran.lines[-1].startswith("Wrote no calibration: it does not improve the prediction of cases")
    assert [file.exists() for file in files] == [earlier] * 2
    assert all(file.read_text() == "earlier" for file in files if earlier)
    check = Check.load(here / "toy.check.json")
    assert check.corrections is None
    assert check.of_plan.expected_step_seconds == check.of_plan.predicted_step_seconds
    assert check.cross_validation is not None
    by_name = {case.name: case for case in check.cross_validation.cases}
    assert by_name.keys() == {case.name for case in (*job.calibration, *job.cases)}
    assert all(name in ran.out for name in by_name)
    assert not check.cross_validation.improves


def test_a_case_to_hold_out_is_needed(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    """A V of stages in an order of the user's, which holds for one number of micro-batches, has none."""
    text = run(
        "simulate", "--list", "--schedule", "zb-v", "--stages", "2", "--micro-batches", "8", "--text"
    ).out
    (here / "mine.schedule").write_text(text, encoding="utf-8")
    (here / "toy.calibration.json").write_text("earlier")
    planned("2,2,3,5", schedule=str(here / "mine.schedule"), virtual_stages=2)
    ran = run("check", "--calibrate")
    assert (ran.status, ran.out, jobs) == (2, "", [])
    assert "--calibrate needs 2 other cases" in ran.lines[-2]
    assert "'my-zb-v' on 2 devices has 0" in ran.lines[-2]
    assert ran.lines[-1].strip().endswith("pplan solve --schedule interleaved")
    assert (here / "toy.calibration.json").read_text() == "earlier"
    assert not (here / "toy.topology.toml").exists()


def test_more_devices_than_there_are(run: Run, planned: Callable[..., Plan], jobs: list[Job]) -> None:
    planned("2,2,3,5")
    ran = run("check", "toy.plan.json")
    assert (ran.status, ran.out, jobs) == (2, "", [])
    assert ran.lines == [
        "pplan: check: the plan takes 4 devices, here are 0 CUDA devices and 2 cores",
        "  With --emulate its stages wait instead of computing; --device cpu shares the cores.",
    ]
    ran = run("check", "toy.plan.json", "--device", "cpu")
    assert "Note: 4 processes share 2 cores: the seconds say little" in ran.out


def test_emulate(run: Run, planned: Callable[..., Plan], jobs: list[Job]) -> None:
    plan = planned("2,2,3,5", schedule="zb-h1")
    ran = run("check", "toy.plan.json", "--emulate", "--no-even", "--steps", "3")
    assert ran.status == 0
    (job,) = jobs
    (case,) = job.cases
    assert (job.model, job.steps, job.processes) == (None, 3, 4)
    assert case.torch.parts == [0, 1, 2, 3, 4]
    assert case.waits is not None
    assert [own.forward for own in case.waits.stages] == pytest.approx(
        [stage.forward_seconds for stage in plan.stages]
    )
    assert [own.input + own.weight for own in case.waits.stages] == pytest.approx(
        [own.backward for own in case.waits.stages]
    )
    assert case.waits.crossing_bytes == [4 * 2**18] * 3
    assert "stages that wait, emulated" in ran.out
    assert "Note: emulated: each stage waits as long as the plan says it computes" in ran.out
    assert "losses" not in ran.out


def test_gpus_are_taken_where_there_are_enough(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    monkeypatch.setattr("pplan.api.check.gpus", lambda: 2)
    assert run("check", "toy.plan.json").status == 0
    assert run("check", "toy.plan.json", "--device", "cpu").status == 0
    assert [job.device for job in jobs] == ["cuda", "cpu"]
    monkeypatch.setattr("pplan.api.check.gpus", lambda: 1)
    ran = run("check", "toy.plan.json", "--device", "cuda")
    assert ran.lines[0] == "pplan: check: the plan takes 2 devices, here are 1 CUDA device and 2 cores"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--steps", "0"], "--steps 0: must be at least 1"),
        (["--timeout", "0s"], "--timeout 0s: must be at least 1 s"),
        (["--fail-above", "lots"], "--fail-above lots: is not a share"),
        (["--device", "tpu"], "--device tpu: is not one of auto, cpu, cuda"),
        (["--runtime", "none"], "--runtime none: is not one of torch, torchgpipe, fairscale, deepspeed"),
        (["--runtime", "torchgpipe"], "torchgpipe cannot run this plan"),
        (["--runtime", "torchgpipe", "--emulate"], "check: --emulate with --runtime torchgpipe"),
        (["--runtime", "fairscale", "--calibrate"], "check: --calibrate and --calibration with --runtime"),
        (["--set", "depth"], "--set 'depth': there is no ="),
        (["--calibrate", "--calibration", "x.json"], "both --calibrate and --calibration"),
        (["--calibration", "none.json"], "none.json: no such calibration file"),
        (["--profile", "none.json"], "none.json: no such profile file"),
    ],
)
def test_what_is_refused(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], arguments: list[str], what: str
) -> None:
    planned()
    ran = run("check", "toy.plan.json", *arguments)
    assert (ran.status, ran.out, jobs) == (2, "", [])
    assert what in ran.lines[0]
    assert len(ran.lines) == 2


def test_a_plan_that_torch_does_not_run(run: Run, planned: Callable[..., Plan], jobs: list[Job]) -> None:
    planned(schedule="chimera")
    ran = run("check", "toy.plan.json")
    assert (ran.status, jobs) == (2, [])
    assert "pplan solve --runtime torch" in ran.err


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale"])
def test_one_process_for_all_stages(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job], runtime: str
) -> None:
    """More stages than cores: on the CPU they run one after another, which the prediction sums up."""
    plan = planned("2,2,3,5", schedule="gpipe")
    ran = run("check", "--runtime", runtime, "--save")
    assert (ran.status, len(jobs)) == (0, 1)
    (job,) = jobs
    assert (job.processes, job.device) == (1, "cpu")
    assert [case.parts for case in job.cases] == [[0, 2, 4, 7, 12], [0, 3, 6, 9, 12]]
    document = job.cases[0].document
    assert (document.runtime, document.mini_batch, document.micro_batch_size) == (runtime, 32, 4)
    predicted = 8 * sum(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    for shown in (
        f"a step takes {format_seconds(SLOWER * predicted)}, predicted were {format_seconds(predicted)} (-20",
        f"1 process of {runtime} on some CPU; trained for real, median of 1 step.",
        f"on the CPU all stages of {runtime} share one thread and run one after another",
        "The losses of 2 steps are the plain model's",
    ):
        assert shown in " ".join(ran.out.split())
    found = Check.load(here / "toy.check.json")
    assert (found.runtime, found.processes, found.of_plan.balance) == (runtime, 1, plan.balance)
    assert found.of_plan.predicted_step_seconds == pytest.approx(predicted)


def test_the_alternative_for_the_runtime(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    """It is checked in place of a plan that the runtime does not run, which is said."""
    plan = planned("4,8")
    other = PlanRow(
        runtimes=["torchgpipe", "fairscale"],
        balance=[6, 6],
        replicas=[1, 1],
        devices=[[0], [1]],
        schedule="gpipe",
        micro_batches=4,
        micro_batch_size=8,
        recompute="except_last",
        step_seconds=1.0,
    )
    plan.model_copy(update={"alternatives": [other]}).save(here / "toy.plan.json", force=True)
    ran = run("check", "--runtime", "fairscale", "--no-even")
    assert ran.status == 0
    (case,) = jobs[0].cases
    document = case.document
    assert isinstance(document, FairscaleExport)
    assert (document.balance, document.chunks, document.checkpoint) == ([6, 6], 4, "except_last")
    said = " ".join(ran.out.split())
    assert "Note: fairscale cannot run the plan itself: its schedule is 1f1b, fairscale runs gpipe." in said
    assert "Checked instead its best alternative for fairscale: balance 6,6" in said


def test_the_alternative_for_torch(
    run: Run, here: Path, planned: Callable[..., Plan], jobs: list[Job]
) -> None:
    """With its replicas and the recomputation of each stage, as `pplan export torch` writes it."""
    plan = planned("4,8")
    other = PlanRow(
        runtimes=["torch"],
        balance=[6, 6],
        replicas=[1, 1],
        devices=[[0], [1]],
        schedule="1f1b",
        micro_batches=4,
        micro_batch_size=8,
        recompute="by_stage",
        stage_recompute=["first_2", "never"],
        step_seconds=1.0,
    )
    plan.model_copy(update={"alternatives": [other]}).save(here / "toy.plan.json", force=True)
    ran = run("check", "--no-even")
    assert ran.status == 0
    document = jobs[0].cases[0].torch
    assert (document.parts, document.micro_batches) == ([0, 6, 12], 4)
    assert document.recompute == ["first_2", "never"]
    said = " ".join(ran.out.split())
    assert "Note: torch has buffers for all micro-batches of a step" in said
    assert "Checked instead its best alternative for torch: balance 6,6" in said


def test_gpus_for_one_process(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU for each stage; the host's launches are part of the prediction, nothing is summed up."""
    planned(schedule="gpipe")
    monkeypatch.setattr("pplan.api.check.gpus", lambda: 2)
    ran = run("check", "--runtime", "torchgpipe", "--no-even")
    document = jobs[0].cases[0].document
    assert isinstance(document, TorchgpipeExport)
    assert (jobs[0].device, document.devices) == ("cuda", ["cuda:0", "cuda:1"])
    assert "one after another" not in ran.out
    monkeypatch.setattr("pplan.api.check.gpus", lambda: 1)
    ran = run("check", "--runtime", "torchgpipe", "--device", "cuda")
    assert ran.lines[-2] == "pplan: check: the plan takes 2 devices, here are 1 CUDA device and 2 cores"


def test_deepspeed(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    monkeypatch.setattr("pplan.api.check.find_spec", lambda _: object())
    ran = run("check", "--runtime", "deepspeed")
    assert ran.status == 0
    (job,) = jobs
    assert [case.parts for case in job.cases] == [[0, 4, 12], [0, 6, 12]]
    assert (job.processes, job.device) == (2, "cpu")
    assert "2 processes of deepspeed over gloo on some CPU" in ran.out
    assert "one after another" not in ran.out


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale", "deepspeed"])
def test_a_missing_package(
    run: Run,
    planned: Callable[..., Plan],
    jobs: list[Job],
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
) -> None:
    planned()
    monkeypatch.setattr("pplan.api.check.find_spec", lambda _: None)
    ran = run("check", "toy.plan.json", "--runtime", runtime)
    assert (ran.status, ran.out, jobs) == (2, "", [])
    assert ran.lines == [
        f"pplan: check: {runtime} is not installed",
        f'  Install it: pip install "pplan[{runtime}]"',
    ]


def test_a_process_that_fails(
    run: Run, planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MachineError("check: rank 1 died while step 2 (plan): exit status 7", "It printed nothing.")

    planned()
    monkeypatch.setattr("pplan.api.check.run_in_processes", fail)
    monkeypatch.setattr("pplan.api.check.cores", lambda: 2)
    ran = run("check", "toy.plan.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines == [
        "pplan: check: rank 1 died while step 2 (plan): exit status 7",
        "  It printed nothing.",
    ]


MINE = "small_models:small"
LAUNCHED = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_inside_a_torchrun_of_the_users(
    run: Run, planned: Callable[..., Plan], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rendezvous that is not set, another number of processes; errors of all are told once."""
    planned()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    ran = run("check", "toy.plan.json")
    assert ran.status == 2
    assert ran.lines[0] == "pplan: check: torchrun did not start this process (LOCAL_RANK is not set)"
    assert ran.lines[1].endswith("torchrun --no-python --nproc-per-node 2 pplan check")
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    ran = run("check", "toy.plan.json")
    assert ran.lines[0] == "pplan: check: world size 3 for a plan of 2 devices"
    monkeypatch.setenv("RANK", "1")
    assert run("check", "toy.plan.json") == type(ran)(2, "", "")
    assert jobs == []


MODEL = """
    import torch
    from torch import nn

    def small():
        layers = [nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
        return nn.Sequential(*layers), torch.randn(3, 6)
"""


@pytest.fixture
def small(here: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A plan of two stages of a real model; the environment of processes that are to find the model."""
    (here / "small_models.py").write_text(dedent(MODEL))
    monkeypatch.syspath_prepend(str(here))
    profile = pplan.profile(
        "small_models:small", micro_batch_sizes=[4], device="cpu", budget_seconds=1.0, loss="cross-entropy"
    )
    profile.save(here / "small.profile.json", force=False)
    pplan.import_plan(
        "2,3", here / "small.profile.json", schedule="1f1b", mini_batch=16, micro_batches=4
    ).save(here / "small.plan.json", force=False)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}


@pytest.mark.slow
def test_two_processes_of_torchrun(
    here: Path, small: dict[str, str], forked_python: Callable[..., Any]
) -> None:
    """Each is a process of the check; the first prints and writes."""
    (here / "run_pplan.py").write_text("import sys; from pplan.cli.app import main; sys.exit(main())")
    command = [
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run_pplan.py"),
        *("check", "small.plan.json", "--model", MINE, "--device", "cpu", "--save", "--steps", "2"),
    ]
    ran = forked_python(here / "torchrun", here, *command, **small).wait(300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("a step takes") == 1
    assert "The losses of 2 steps are the plain model's" in ran.stdout
    assert ran.stderr.count("Wrote small.check.json") == 1
    found = Check.load(here / "small.check.json")
    assert (found.processes, found.backend, found.emulated) == (2, "gloo", False)
    assert median(found.of_plan.step_seconds) > 0


@pytest.mark.slow
def test_a_port_that_is_in_use(here: Path, small: dict[str, str], forked_python: Callable[..., Any]) -> None:
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as taken:
        taken.bind(("", 0))
        taken.listen()
        told = LAUNCHED | {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(taken.getsockname()[1])}
        code = (
            "import sys; from pplan.cli.app import main; "
            f"sys.exit(main(['check', 'small.plan.json', '--model', '{MINE}']))"
        )
        ran = forked_python(here / "check", here, "-c", code, **(small | told)).wait(300)
    assert ran.returncode == 2
    lines = [line for line in ran.stderr.splitlines() if not line.startswith(("[W", "[E"))]
    assert "EADDRINUSE" in lines[0]
    assert "--master-port" in lines[1]
    assert len(lines) == 2


COST = ("micro_batch_size", "forward_seconds", "backward_seconds", "output_bytes", "saved_bytes")


def test_the_model_is_made_with_the_settings_it_was_profiled_with() -> None:
    layer = {"name": "a", "parameter_bytes": 0, "costs": [dict.fromkeys(COST, 1)]}
    content = {"schema": 1, "model": "hf:gpt2", "layers": [layer], "settings": {"n_layer": 3, "n_embd": 8}}
    profile = Profile.model_validate(content)
    own = model_spec(profile, CheckOptions(settings={"n_embd": 4}))
    assert own.settings == {"n_layer": 3, "n_embd": 4}
    assert model_spec(profile, CheckOptions(model="package.module:other")).settings == {}
