"""Checks of plans: their cases, which processes run, predictions against measurements, and a calibration."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..cost_models.arguments import arguments_class, options_from, takes
from ..cost_models.errors import ExportError, MachineError, PplanError, UsageError
from ..cost_models.layer import Chain
from ..cost_models.memory import recompute_kinds
from ..cost_models.quantities import format_count
from ..cost_models.runtime import OFFLOAD, RUNNABLE, find_runtime
from ..cost_models.step_costs import Costs
from ..cost_models.topology import Group, Link, Topology
from ..cost_models.topology_file import to_toml
from ..planner.balance import balance
from ..planner.build_plan import build_problem, plan_partition, plan_without_comparison
from ..planner.candidate import FIRST_LAYERS
from ..planner.joint_search import find_best_plan
from ..planner.plan_file import Partition, Plan
from ..planner.plan_options import PlanOptions
from ..planner.plan_simulation import Simulation, simulate_plan
from ..profiler.names import input_function_for, loss_for, model_for
from ..profiler.profile_file import Profile
from ..profiler.torchrun_env import is_launched, read_torchrun_env
from ..runtimes.checking.launching import OnProgress, cores, gpus, run_in_processes
from ..runtimes.checking.prediction import (
    Calibration,
    cross_validate,
    fit_corrections,
    is_serial,
    predict_seconds,
    vary_case,
)
from ..runtimes.checking.records import (
    PLAN,
    Case,
    CaseResult,
    Check,
    CheckedCase,
    CheckedDevice,
    CheckedStage,
    CheckMeasurements,
    Corrections,
    CrossValidation,
    CutLink,
    Device,
    HeldOutCase,
    Job,
    ModelSpec,
    StageSeconds,
    StageWaits,
    WeightSum,
)
from ..runtimes.choice import choose
from ..runtimes.documents import BuiltExport, TorchExport
from ..runtimes.exports import export_on
from ..runtimes.loggers import Logger, make_logger
from ..runtimes.trainer_words import INSTEAD
from .check_options import CheckOptions
from .load import PlanAndProfile, as_plan, check_layers, plan_of_profile, profile_and_reference
from .machine import planned_machine

WARM_UPS = 2
"""Steps before those that are timed."""
LEAST_TIMEOUT = 120.0
"""Seconds: processes import torch, and a first step is slower."""
TIMEOUT_STEPS = 5
"""Two steps of the plain model are compared; the rest is for a busy machine."""
LEAST_SIZE = 1024
"""Bytes of the smallest transfer that is measured."""
Runner = Callable[[Job], CheckMeasurements | None]


@arguments_class
class CheckArguments(CheckOptions):
    """The arguments of `check`."""

    plan: Plan | str | Path = field(kw_only=False)
    profile: Profile | str | Path = field(kw_only=False)


@takes(CheckArguments)
def check(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    **options: Any,
) -> Check:
    """Run `plan`, made from `profile`, for `steps` timed steps in processes of this machine.

    The `options` are the fields of `CheckOptions`, which says what they are; those of `pplan check --help`.
    Where the runtime does not run the plan itself, the plan's best alternative for it is checked, and a note
    says so. The processes make the model again by the name in its profile where that is torchvision's or
    transformers' own; one of yours is named by `model`.

    Of the result: `of_plan` and `cases`, each with `measured_step_seconds`, `predicted_step_seconds` (the
    plan's), `error`, `stages`, `devices` (peak memory against the ledger) and `losses`, which are compared
    with the plain model's.

    Raises UsageError, FileError, ExportError (the runtime does not run the plan), MachineError: too few
    devices, a missing package, or a process that failed, died or hangs, with its own words.
    """
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    name = Path(plan).name if isinstance(plan, str | Path) else "plan"
    plan = as_plan(plan)
    measured_profile, reference = profile_and_reference(profile, "", "")
    if plan.training is not None:
        plan = plan_of_profile(plan, measured_profile, reference.file)
    measured_profile = measured_profile.at_degree(plan.profile.tensor_parallel)
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
    inputs = PlanInputs(profile.chain(), *planned_machine(plan, profile, folder))
    calibrates = options.calibrate or options.calibration is not None
    check_runtime(options.runtime, emulate=options.emulate, calibrate=calibrates)
    plan, remark = inputs.choose_plan(plan, options.runtime)
    notes = [*_notes(profile, options), *([] if remark is None else [remark])]
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
    notes += [*_crowding_note(job), *serial_note(job.cases[0]), *_device_note(profile, device, options)]
    notes += [*_memory_note(job)]
    corrections = None if options.calibration is None else Calibration.load(options.calibration).corrections
    logger = None if options.log is None else make_logger(options.log)
    measurements = run(job)
    if measurements is None:
        return None
    check = _build_check(measurements, cases, job, corrections, name, notes)
    if logger is not None:
        log_check(check, logger)
    return check


def _crowding_note(job: Job) -> list[str]:
    if job.device == "cpu" and job.processes > cores() and job.model is not None:
        return [f"{job.processes} processes share {format_count(cores(), 'core')}: the seconds say little"]
    return []


def _device_note(profile: Profile, device: Device, options: CheckOptions) -> list[str]:
    """A note where the plan's seconds are not those of the devices that the check runs on."""
    if options.emulate or (profile.device.startswith(device) and not profile.estimated):
        return []
    where = f"estimated for {profile.device}" if profile.estimated else f"measured on {profile.device}"
    return [f"the profile was {where}, the check ran on {device}: its seconds say little about the plan's"]


def _memory_note(job: Job) -> list[str]:
    """A note on what the measured memory is."""
    if job.model is None:
        return []
    if job.device == "cpu" and job.processes == 1 and len(job.cases[0].parts) > 2:
        return ["memory was not measured: one process has all stages of the CPU"]
    how = (
        "by CUDA's allocator"
        if job.device == "cuda"
        else "as the live tensors of a process, each storage once"
    )
    return [
        f"memory is measured {how}, over a step and its update; the input of the global batch is left out, "
        "which the plan does not count"
    ]


def _job(plan: Plan, cases: list[Case], profile: Profile, device: Device, options: CheckOptions) -> Job:
    return Job(
        model=None if options.emulate else model_spec(profile, options),
        cases=cases,
        device=device,
        steps=options.steps,
        warm_ups=WARM_UPS,
        step_seconds=plan.prediction.step_seconds,
        timeout_seconds=_timeout(options, plan),
        calibration=vary_case(cases[0]) if options.calibrate else [],
        link_sizes=_sizes(cases) if options.calibrate and cases[0].processes > 1 else [],
    )


def _timeout(options: CheckOptions, plan: Plan) -> float:
    """Seconds after which a process hangs. The longest that it does at a time are the steps of the plain
    model, in turn for all devices."""
    if options.timeout is not None:
        return options.timeout
    return max(LEAST_TIMEOUT, TIMEOUT_STEPS * plan.device_count * plan.prediction.step_seconds)


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
    corrections: Corrections | None,
    name: str,
    notes: list[str],
) -> Check:
    if job.calibration:
        corrections = fit_corrections(job.calibration, measurements.calibration, measurements.links)
    checked = [
        case.check_against(result, corrections)
        for case, result in zip(cases, measurements.cases, strict=True)
    ]
    validation = _cross_validation(job, measurements, checked)
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


def log_check(check: Check, logger: Logger) -> None:
    """Log the plan's case: its steps; seconds of its stages and memory of its devices at the last step."""
    case = check.of_plan
    for number, seconds in enumerate(case.step_seconds):
        logger(
            number,
            {"step/predicted_seconds": case.expected_step_seconds, "step/measured_seconds": seconds},
        )
    scalars: dict[str, float] = {}
    for index, stage in enumerate(case.stages):
        for source, own in (("predicted", stage.planned), ("measured", stage.measured)):
            scalars[f"stage_{index}/{source}_forward_seconds"] = own.forward
            scalars[f"stage_{index}/{source}_backward_seconds"] = own.backward
    for device in case.devices:
        scalars[f"memory/device_{device.device}_predicted_bytes"] = device.expected_bytes
        if device.measured_bytes is not None:
            scalars[f"memory/device_{device.device}_measured_bytes"] = device.measured_bytes
    logger(len(case.step_seconds) - 1, scalars)


def run_here(job: Job, on_progress: OnProgress = lambda *_: None) -> CheckMeasurements | None:
    """Runs the job in processes of this machine; or, where the user's launcher started this process, as one
    of its processes.

    None in one that is not the first.
    """
    if not is_launched(os.environ):
        return run_in_processes(job, on_progress)
    process = read_torchrun_env(os.environ, "check", at_least=1)
    if process.world_size != job.processes:
        raise UsageError(
            f"check: world size {process.world_size} for a plan of {format_count(job.processes, 'device')}",
            f"Start {job.processes}: torchrun --no-python --nproc-per-node {job.processes} pplan check",
        )
    from ..runtimes.checking.processes.worker import run_in_torchrun

    return run_in_torchrun(job, process)


UNSEEN = ("context", "reserve", "master_weights")
"""Terms of the ledger that a check does not see: what the driver takes, what the allocator may waste, and
float32 copies of 16-bit weights, with which no check trains."""
EVEN = "even split"
TORCH = "torch"


@dataclass(frozen=True, eq=False)
class CheckCase:
    """A plan to be run, what it predicts, and its case."""

    name: str
    plan: Plan
    simulated: Simulation
    case: Case

    @property
    def predicted_step_seconds(self) -> float:
        """The plan's step: simulated for its machine, or summed up where all stages share a thread."""
        return predict_seconds(self.case) if is_serial(self.case) else self.simulated.timeline.step_seconds

    def check_against(self, result: CaseResult, corrections: Corrections | None) -> CheckedCase:
        """The prediction next to the measurement."""
        replicas = self.plan.stages[0].replicas
        peaks = result.ran.peak_bytes or [None] * len(self.simulated.memory)
        return CheckedCase(
            name=self.name,
            balance=self.plan.balance,
            schedule=self.plan.schedule,
            micro_batches=self.plan.micro_batches,
            micro_batch_size=self.plan.micro_batch_size,
            predicted_step_seconds=self.predicted_step_seconds,
            calibrated_step_seconds=None if corrections is None else predict_seconds(self.case, corrections),
            step_seconds=result.ran.step_seconds,
            stages=[
                CheckedStage(
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    devices=stage.devices,
                    planned=self.case.planned[index],
                    measured=result.ran.stages[index],
                )
                for index, stage in enumerate(self.plan.stages)
            ],
            devices=[
                CheckedDevice(
                    device=device * replicas,
                    planned_bytes=memory.bytes,
                    unseen={name: memory.terms[name] for name in UNSEEN if memory.terms.get(name)},
                    measured_bytes=peak,
                )
                for device, (memory, peak) in enumerate(zip(self.simulated.memory, peaks, strict=True))
            ],
            losses=result.losses,
        )


@dataclass(frozen=True, eq=False)
class PlanInputs:
    """The layers and the machine that a plan was made for."""

    chain: Chain
    topology: Topology
    profiles: Mapping[str, Chain]

    def choose_plan(self, plan: Plan, runtime: str) -> tuple[Plan, str | None]:
        """The plan itself, or a plan of its alternative for the runtime, and then a remark on it.

        Raises ExportError where the runtime runs neither.
        """
        about = find_runtime(runtime)
        choice, remark = choose(plan, about)
        launches = plan.runtime is not None and find_runtime(plan.runtime).one_process
        if INSTEAD not in (remark or "") and (launches or not about.one_process):
            return plan, remark
        words: Any = choice.part_recompute
        kinds = recompute_kinds(words)
        by_stage: list[Any] = [kind for kind in (OFFLOAD, FIRST_LAYERS) if kind in kinds]
        by_stage += ["auto"] * (len(kinds) > 1)
        options = PlanOptions(
            micro_batches=choice.micro_batches,
            schedule=choice.schedule,
            recompute=by_stage[0] if by_stage else words[0],
            runtime=runtime,
        )
        partition = Partition(
            "",
            tuple(accumulate(choice.balance)),
            choice.virtual_stages,
            choice.replicas[0],
            stage_recompute=words if by_stage and choice.virtual_stages == 1 else None,
        )
        text = None if remark is None else remark.replace("Exported instead", "Checked instead")
        return self._plan_partition(plan, partition, options), text

    def even_plan(self, plan: Plan) -> Plan:
        """The plan with its layers spread evenly by number.

        Raises:
            UsageError: The cuts allow no such plan.
            ExportError: The plan is the even split.
        """
        counts = balance(np.ones(len(self.chain)), len(plan.stages), cut_after=self.chain.cut_after)
        options = PlanOptions(
            micro_batches=plan.micro_batches,
            schedule=plan.schedule,
            recompute="auto" if plan.recompute == "by_stage" else plan.recompute,
            runtime=plan.runtime,
        )
        partition = Partition("", tuple(accumulate(counts)), plan.virtual_stages, plan.stages[0].replicas)
        even = self._plan_partition(plan, partition, options)
        if even.balance == plan.balance:
            raise ExportError("the plan is the even split", "Check the plan alone: `even=False`.")
        return even

    def _plan_partition(self, plan: Plan, partition: Partition, options: PlanOptions) -> Plan:
        """Another partition with the training setting of the plan."""
        setting = replace(
            options,
            mini_batch=plan.mini_batch,
            optimizer=plan.optimizer,
            precision=plan.training_precision.name,
            gradient_dtype=plan.training_precision.gradient_dtype,
            zero=plan.zero,
        )
        problem = build_problem(self.chain, self.topology, setting, plan.profile, self.profiles)
        return plan_partition(problem, partition, model=plan.model, profile=plan.profile)

    def prepare_case(
        self, name: str, plan: Plan, runtime: str = TORCH, device: Device = "cpu", *, emulate: bool = False
    ) -> CheckCase:
        """The case of a plan. Raises ExportError where the runtime does not run the plan itself."""
        document, remark = export_on(find_runtime(runtime), plan, device)
        if remark is not None and INSTEAD in remark:
            raise ExportError(
                f"check: {remark.partition(INSTEAD)[0]}",
                f"Make one that it runs: pplan.solve(runtime={runtime!r}).",
            )
        of_runtime = plan.model_copy(update={"runtime": runtime})  # whose buffers count
        simulated = simulate_plan(of_runtime, self.chain, self.topology, profiles=self.profiles)
        costs, crossing, waits = simulated.timeline.costs, list[int](), None
        if isinstance(document, TorchExport):
            share = document.micro_batch_size / document.replicas
            output_bytes = self.chain.at(share, past_largest=True).output_bytes
            crossing = [round(float(output_bytes[end - 1])) for end in document.parts[1:-1]]
            if emulate:
                waits = StageWaits(stages=stage_seconds(simulated), crossing_bytes=crossing)
                alone = {
                    "parts": list(range(len(document.parts))),
                    "recompute": ["never"] * len(document.recompute),
                    "layers_sha256": "",
                }
                document = document.model_copy(update=alone)
        case = Case(
            name=name,
            document=cast(BuiltExport, document),
            planned=stage_seconds(simulated),
            optimizer=plan.optimizer,
            links=cut_links(costs, len(plan.stages) - 1),
            crossing_bytes=crossing,
            all_reduce=None if costs.all_reduce is None else costs.all_reduce.tolist(),
            tied=[] if emulate else WeightSum.from_costs(costs),
            waits=waits,
        )
        return CheckCase(name, plan, simulated, case)


def stage_seconds(simulated: Simulation) -> list[StageSeconds]:
    """The simulated seconds of each stage; backward includes what it recomputes."""
    costs, program = simulated.timeline.costs, simulated.timeline.program
    seconds = []
    for device, chunk in program.pipes[0]:
        forward = float(costs.forward[device, chunk, 0])
        share = 0.0 if costs.recompute is None else float(costs.recompute[device, 0, 0])
        first = float(costs.backward[device, chunk, 0]) + share * forward
        weight = 0.0 if costs.weight is None else float(costs.weight[device, chunk, 0])
        seconds.append(
            StageSeconds(
                forward=forward,
                backward=first + weight,
                input=first if program.splits_backward else 0.0,
                weight=weight,
                accumulation=0.0
                if costs.accumulation is None
                else float(costs.accumulation[device, chunk, 0]),
            )
        )
    return seconds


def cut_links(costs: Costs, cuts: int) -> list[CutLink]:
    """The latency and occupancy of a transfer over each cut."""
    latency, occupancy = costs.forward_latency, costs.forward_occupancy
    return [
        CutLink(
            latency=0.0 if latency is None else float(latency[0, cut]),
            occupancy=0.0 if occupancy is None else float(occupancy[0, cut]),
        )
        for cut in range(cuts)
    ]


def check_runtime(runtime: str, *, emulate: bool, calibrate: bool) -> None:
    """Raises UsageError for what only torch.distributed.pipelining does, MachineError without the package."""
    if runtime not in RUNNABLE:
        raise UsageError(f"check: no steps are run on {runtime!r}", f"Use one of {', '.join(RUNNABLE)}.")
    for option, is_given in (("`emulate`", emulate), ("`calibrate` and `calibration`", calibrate)):
        if is_given and runtime != TORCH:
            raise UsageError(
                f"check: {option} with runtime={runtime!r}: only torch.distributed.pipelining does that",
                "Leave it out, or check with runtime='torch'.",
            )
    if find_spec(runtime) is None:
        raise MachineError(
            f"check: {runtime} is not installed", f'Install it: pip install "pplan[{runtime}]"'
        )


def serial_note(case: Case) -> list[str]:
    """A note on the prediction, where stages share one thread."""
    if not is_serial(case) or len(case.parts) == 2:
        return []
    return [
        f"on the CPU all stages of {case.document.runtime} share one thread and run one after another: the "
        "predicted step is the sum of all their work, whatever the cut; the plan's is that of its own machine"
    ]


@dataclass(frozen=True)
class CalibrationFiles:
    """`files`: what to write beside the plan. `new_plan`: the plan solved again, or why there is none."""

    files: Mapping[Path, str]
    topology_file: Path
    new_plan: Plan | str


def calibrate(result: Check, files: PlanAndProfile, stem: str) -> CalibrationFiles | None:
    """Files of a check's corrections; None if the check has none, or did not keep them.

    `stem` begins the files' names.
    """
    corrections = result.corrections
    if corrections is None:
        return None
    folder = files.plan_file.parent
    calibration = Calibration(
        backend=result.backend,
        device_name=result.device_name,
        processes=result.processes,
        corrections=corrections,
        made_by=result.made_by,
    )
    topology, profiles = planned_machine(files.plan, files.profile, folder)
    # The seconds of stages that wait are not the device's.
    slower = 1.0 if result.emulated else corrections.slowdown
    new_topology = corrected_topology(topology, corrections, slower)
    topology_file = folder / f"{stem}.topology.toml"
    description = to_toml(new_topology, f"{topology.describe()}, as pplan check measured it")
    texts = {folder / f"{stem}.calibration.json": calibration.to_json(), topology_file: description}
    return CalibrationFiles(texts, topology_file, _solve_again(files, new_topology, profiles))


def _solve_again(files: PlanAndProfile, topology: Topology, profiles: Mapping[str, Chain]) -> Plan | str:
    try:
        plan_options = files.plan.options
        problem = build_problem(files.profile.chain(), topology, plan_options, files.plan.profile, profiles)
        answer = find_best_plan(problem)
    except PplanError as error:
        return error.what
    if answer.best is None:
        return "no plan fits"
    return plan_without_comparison(
        problem, answer.best, answer.result, model=files.plan.model, profile=files.plan.profile
    )


def corrected_topology(topology: Topology, corrections: Corrections, slower: float) -> Topology:
    """The topology with devices that are `slower` by a factor, and links as the check measured them.

    The search knows no overhead of an action. A transfer's latency carries it, because one transfer goes with
    every action.
    """
    # A kind with a profile of its own has no speed: its seconds are those of the profile.
    groups = tuple(
        Group(device if device.profile else replace(device, speed=device.speed / slower), number)
        for device, number in topology.groups
    )
    levels = tuple(replace(level, link=_corrected_link(level.link, corrections)) for level in topology.levels)
    return replace(topology, groups=groups, levels=levels)


def _corrected_link(link: Link, corrections: Corrections) -> Link:
    latency, bandwidth = corrections.latency, corrections.bandwidth
    return replace(
        link,
        latency_seconds=(link.latency_seconds if latency is None else latency) + corrections.overhead,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second if bandwidth is None else bandwidth,
    )
