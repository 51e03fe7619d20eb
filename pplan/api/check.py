"""Checks a plan: prepares its cases, has processes run them, and puts predictions beside measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Unpack

from ..cost_models.errors import MachineError, PplanError, UsageError
from ..cost_models.option_fields import describe_options, options_from
from ..cost_models.quantities import format_count
from ..cost_models.runtime import find_runtime
from ..planner.plan_file import Plan
from ..profiler.named_model import input_function_for, loss_for, model_for
from ..profiler.profile_file import Profile
from ..profiler.torchrun_env import is_launched, read_torchrun_env
from ..runtimes.checking.launching import ProgressCallbacks, cores, gpus, run_in_processes
from ..runtimes.checking.prediction import Calibration, cross_validate, vary_case
from ..runtimes.checking.records import (
    PLAN,
    Case,
    Check,
    CheckedCase,
    CheckMeasurements,
    Corrections,
    CrossValidation,
    Device,
    HeldOutCase,
    Job,
    ModelSpec,
)
from .check_cases import EVEN, TORCH, CheckCase, PlanInputs, check_runtime, serial_note
from .check_options import CheckKeywords, CheckOptions
from .load import as_plan, check_layers, profile_and_reference
from .machine import planned_machine

WARM_UPS = 2
LEAST_TIMEOUT = 120.0
"""Seconds: processes import torch, and a first step is slower."""
TIMEOUT_STEPS = 5
"""Two steps of the plain model are compared; the rest is for a busy machine."""
"""Steps before those that are timed."""
LEAST_SIZE = 1024
"""Bytes of the smallest transfer that is measured."""
Runner = Callable[[Job], CheckMeasurements | None]


@describe_options(CheckKeywords, CheckOptions)
def check(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    **options: Unpack[CheckKeywords],
) -> Check:
    """Runs `plan`, made from `profile`, for `steps` timed steps in processes of this machine.

    The `options` are the fields of `CheckOptions`, which says what they are; those of `pplan check --help`.
    Where the runtime does not run the plan itself, the plan's best alternative for it is checked, which a
    note says. The processes make the model again by the name in its profile where that is torchvision's or
    transformers' own; one of yours is named by `model`.

    Of the result: `of_plan` and `cases`, each with `measured_step_seconds`, `predicted_step_seconds` (written
    down before the steps, from the stages measured alone), `planned_step_seconds` (the plan's own), `error`,
    `stages` and `losses`, which are held against the plain model's.

    Raises UsageError, FileError, ExportError (the runtime does not run the plan), MachineError: too few
    devices, a missing package, or a process that failed, died or hangs, with its own words.
    """
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    name = Path(plan).name if isinstance(plan, str | Path) else "plan"
    plan = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, "", "", plan)
    check_layers(plan, reference)
    (check_options,) = options_from(options, CheckOptions, of="check")
    result = check_plan(plan, measured_profile, folder, name, check_options, run_in_processes)
    if result is None:
        raise MachineError("check: nothing was measured", "Call it outside torchrun.")
    return result


def check_plan(
    plan: Plan, profile: Profile, folder: Path, name: str, options: CheckOptions, run: Runner
) -> Check | None:
    """Runs the plan. `folder`: of the profiles that kinds of devices have of their own. None in a process
    that is not the first of those that the user started.

    Raises UsageError, FileError, ExportError, ModelError, MachineError.
    """
    if plan.profile.tensor_parallel > 1:
        raise UsageError(
            f"each device of the plan is {plan.profile.tensor_parallel} that share every layer: check runs "
            "whole layers",
            "Train it: pplan.export(plan, 'torch'), and build(..., tensor_parallel=...).",
        )
    inputs, notes = (
        PlanInputs(profile.chain(), *planned_machine(plan, profile, folder)),
        _notes(profile, options),
    )
    if options.runtime != TORCH:
        calibrates = options.calibrate or options.calibration is not None
        check_runtime(options.runtime, emulate=options.emulate, calibrate=calibrates)
        plan, remark = inputs.choose_plan(plan, options.runtime)
        notes += [] if remark is None else [remark]
    one_process = find_runtime(options.runtime).one_process
    device = choose_device(plan.device_count, options, one_process=one_process)
    cases = [inputs.prepare_case(PLAN, plan, options.runtime, device, emulate=options.emulate)]
    if options.even and len(plan.stages) > 1:
        try:
            even = inputs.even_plan(plan)
            cases.append(inputs.prepare_case(EVEN, even, options.runtime, device, emulate=options.emulate))
        except PplanError as error:
            notes.append(f"no even split beside it: {error.what}")
    job = _job(plan, [case.case for case in cases], profile, device, options)
    notes += [*_crowding_note(job), *serial_note(job.cases[0])]
    measurements = run(job)
    return None if measurements is None else _build_check(measurements, cases, job, name, notes)


def _crowding_note(job: Job) -> list[str]:
    if job.device == "cpu" and job.processes > cores() and job.model is not None:
        return [f"{job.processes} processes share {format_count(cores(), 'core')}: the seconds say little"]
    return []


def _job(plan: Plan, cases: list[Case], profile: Profile, device: Device, options: CheckOptions) -> Job:
    return Job(
        model=None if options.emulate else model_spec(profile, options),
        cases=cases,
        device=device,
        steps=options.steps,
        warm_ups=WARM_UPS,
        step_seconds=plan.prediction.step_seconds,
        timeout_seconds=_timeout(options, plan),
        corrections=_corrections(options),
        calibration=vary_case(cases[0]) if options.calibrate else [],
        link_sizes=_sizes(cases) if options.calibrate and cases[0].processes > 1 else [],
    )


def _timeout(options: CheckOptions, plan: Plan) -> float:
    """Seconds after which a process hangs. The longest that it does at a time are the steps of the plain
    model, in turn for all devices."""
    if options.timeout is not None:
        return options.timeout
    return max(LEAST_TIMEOUT, TIMEOUT_STEPS * plan.device_count * plan.prediction.step_seconds)


def _corrections(options: CheckOptions) -> Corrections | None:
    """The corrections that an earlier check fitted. Raises FileError."""
    return None if options.calibration is None else Calibration.load(options.calibration).corrections


def _sizes(cases: list[Case]) -> list[int]:
    """Transfer sizes to measure, from a small one to the largest of the cases'."""
    most = max([LEAST_SIZE, *(size for case in cases for size in case.crossing_bytes)])
    return sorted({LEAST_SIZE, 16 * LEAST_SIZE, max(most // 4, LEAST_SIZE), max(most, 64 * LEAST_SIZE)})


def model_spec(profile: Profile, options: CheckOptions) -> ModelSpec:
    """How the processes build the model: as it was profiled, unless another is named.

    Raises ModelError where the profile names code, which only the user may.
    """
    named_model = model_for(profile, options.model, options.settings)
    loss = loss_for(profile, options.loss)
    input_like = input_function_for(profile, options.input_like)
    user_names = (named_model.name if named_model.by_user else None, options.loss, options.input_like)
    return ModelSpec(
        name=named_model.name,
        settings=dict(named_model.settings),
        input_shape=profile.input_shape if len(profile.inputs) < 2 and input_like is None else None,
        input_like=input_like,
        classes=profile.classes if ":" not in named_model.name else None,
        seed=profile.seed or 0,
        dtype=profile.dtype,
        granularity=profile.granularity,
        loss=loss,
        channels_last=profile.channels_last,
        layers_sha256=profile.layers_sha256,
        profiled=profile.model,
        by_user=tuple(name for name in user_names if name is not None),
    )


def choose_device(devices: int, options: CheckOptions, *, one_process: bool = False) -> Device:
    """The kind of device to run on; `one_process`: a single process uses all of them. Raises MachineError
    where there are too few."""
    if options.emulate or options.device == "cpu":
        return "cpu"
    count = gpus()
    device_count = devices
    if is_launched(os.environ) and not one_process:
        device_count = read_torchrun_env(os.environ, "check", at_least=1).local_world_size
    if count >= device_count:
        return "cuda"
    machine = f"{format_count(count, 'CUDA device')} and {format_count(cores(), 'core')}"
    if options.device == "cuda" or (device_count > cores() and not one_process):
        raise MachineError(
            f"check: the plan takes {format_count(device_count, 'device')}, here are {machine}",
            "With `emulate` its stages wait instead of computing; `device='cpu'` shares the cores.",
        )
    return "cpu"


def _notes(profile: Profile, options: CheckOptions) -> list[str]:
    notes = []
    if options.emulate:
        notes.append("emulated: each stage waits as long as the plan says it computes")
        return notes
    modes = {"autocast": profile.amp, "torch.compile": profile.compiled, "TF32": profile.tf32}
    if on := [name for name, value in modes.items() if value]:
        notes.append(f"the profile was measured with {', '.join(on)}, the check runs without")
    return notes


def _build_check(
    measurements: CheckMeasurements,
    cases: Sequence[CheckCase],
    job: Job,
    name: str,
    notes: list[str],
) -> Check:
    checked = [case.check_against(result) for case, result in zip(cases, measurements.cases, strict=True)]
    validation = _cross_validation(job, measurements, checked)
    corrections = measurements.corrections
    if validation is not None and not validation.improves:
        corrections = None
        checked = [case.model_copy(update={"calibrated_step_seconds": None}) for case in checked]
    return Check(
        plan=name,
        model=cases[0].plan.model,
        runtime=cases[0].case.document.runtime,
        backend=measurements.backend,
        device_name=measurements.device_name,
        processes=job.processes,
        emulated=job.model is None,
        cases=checked,
        links=measurements.links,
        corrections=corrections,
        calibration=measurements.calibration,
        cross_validation=validation,
        notes=notes,
    )


def _cross_validation(
    job: Job, measurements: CheckMeasurements, checked: Sequence[CheckedCase]
) -> CrossValidation | None:
    """The calibration cases, each held out in turn, and the cases that nothing was fitted to."""
    if not job.calibration:
        return None
    held_out = cross_validate(job.calibration, measurements.calibration, measurements.links)
    held_out += [
        HeldOutCase(
            name=case.name,
            predicted_step_seconds=case.predicted_step_seconds,
            calibrated_step_seconds=case.expected_step_seconds,
            measured_step_seconds=case.measured_step_seconds,
        )
        for case in checked
    ]
    return CrossValidation(cases=held_out)


def run_here(job: Job, callbacks: ProgressCallbacks | None = None) -> CheckMeasurements | None:
    """Runs the job in processes of this machine; or, where the user's launcher started this process, as one
    of its processes.

    None in one that is not the first.
    """
    if not is_launched(os.environ):
        return run_in_processes(job, callbacks)
    process = read_torchrun_env(os.environ, "check", at_least=1)
    if process.world_size != job.processes:
        raise UsageError(
            f"check: world size {process.world_size} for a plan of {format_count(job.processes, 'device')}",
            f"Start {job.processes}: torchrun --no-python --nproc-per-node {job.processes} pplan check",
        )
    from ..runtimes.checking.processes.worker import run_in_torchrun

    return run_in_torchrun(job, process)
