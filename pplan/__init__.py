"""pplan: measures a PyTorch model layer by layer, and finds the pipeline plan for your GPUs.

    profile = pplan.profile("vgg19")
    plan = pplan.solve(profile, gpus=8)
    pplan.export("torchgpipe", plan).save("vgg19.torchgpipe.json", force=False)

The words are those of the command line. Importing pplan loads no torch: only `profile` and `sequential` do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .cost_models.errors import (
    ExportError,
    FileError,
    InfeasibleError,
    MachineError,
    ModelError,
    PplanError,
    UsageError,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from .cli.problem_arguments import ProblemArguments
    from .cost_models.machines.topology_options import ProfiledDevice
    from .cost_models.timeline import Timeline
    from .cost_models.topology import Topology
    from .planner.explanation.compare import Comparison
    from .planner.explanation.explain import Explanation
    from .planner.objectives.frontier_file import Frontier
    from .planner.plan_file import Plan, ProfileReference
    from .planner.sweep import Sweep
    from .profiler.loaded_model import LoadedModel
    from .profiler.profile_file import Profile
    from .profiler.sweep import Progress
    from .runtimes.checking.check_report import Check
    from .runtimes.formats.export_document import ExportDocument
    from .verification.report import Report

    ExampleInput = torch.Tensor | tuple[object, ...] | list[object] | Mapping[str, object]
    __version__: str

__all__ = [
    "ExportError",
    "FileError",
    "InfeasibleError",
    "MachineError",
    "ModelError",
    "Plan",
    "PplanError",
    "Profile",
    "UsageError",
    "__version__",
    "check",
    "compare",
    "explain",
    "export",
    "frontier",
    "import_plan",
    "import_profile",
    "load_model",
    "load_plan",
    "load_profile",
    "profile",
    "sequential",
    "simulate",
    "solve",
    "sweep",
    "topology",
    "verify",
]


def solve(
    profile: Profile | str | Path,
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: float | Sequence[float] | None = None,
    latency: float | Sequence[float] | None = None,
    topology: str | Path | None = None,
    runtime: str | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    schedule: str = "auto",
    recompute: str = "auto",
    optimizer: str = "sgd",
    precision: Literal["auto", "fp32", "mixed", "bf16"] | str = "auto",
    gradient_dtype: Literal["auto", "fp32", "bf16", "fp16"] | str = "auto",
    zero: int = 0,
    planner: str = "best",
    time_limit: float = 30.0,
    use_all: bool = False,
    max_stages: int | None = None,
    cut_after: Sequence[str] = (),
    keep_together: Sequence[str] = (),
    pins: Sequence[tuple[str, int]] = (),
    memory_limit: float | None = None,
    robust: bool = False,
    objective: Literal["step-time", "throughput", "memory", "cost"] | str = "step-time",
    price: float | str | Mapping[str, float] | None = None,
    seconds_of: Literal["cpu"] | str | None = None,
    profile_file: str = "",
    profile_sha256: str = "",
) -> Plan:
    """The fastest plan for `profile` on `gpus` devices, with its proven bound.

    `profile` is a profile or the path of its file. `bandwidth` (bytes per second) and `latency` (seconds)
    hold one value inside a node and, where given, a second between nodes; None takes those of `gpu`, of the
    profiled device or of `topology`, a machine's name or a TOML file. `mini_batch` defaults to 32 samples a
    GPU, as nearly as micro-batches make it, `micro_batches` to the best number. `schedule`: one of `pplan
    schedules`, or auto, the better of gpipe and 1f1b; `recompute`: never, always, except_last or auto;
    `optimizer`: sgd, momentum, adam, adamw or adamw-8bit; `runtime` keeps the answer to what that runtime
    runs.

    `precision`: fp32, mixed or bf16; auto is mixed for a profile in 16 bits or under autocast. Micro-batches
    add their gradients up in `gradient_dtype`: fp32, bf16 or fp16. `zero`: what the replicas of a stage
    spread over them, 1 the optimizer's states, 2 the gradients too, 3 the weights too.

    `planner`: "best", the joint search, or a known tool's way. `time_limit`: seconds of processor time for
    the whole answer. `use_all`: no device may stay free. `cut_after`: layers after which a stage must end;
    `keep_together`: patterns of layers between which none may; `pins`: layers and their stages, from 0.
    `memory_limit`: bytes that no device may exceed, besides what it has. `robust`: of plans near the fastest,
    the one with the best step at the 90th percentile, as the layers' seconds vary in the profile.

    `objective`: "step-time"; "throughput", for which the weights may be an update or more late; "memory", the
    least that the fullest device holds with a step at most 5 % longer than the fastest ("memory:10%"); or
    "cost", dollars per sample. `price`: dollars per device hour, one for all or by the kind of device.

    `seconds_of`: "cpu" where GPUs are to be planned with the seconds of a profile of a processor, which is
    refused otherwise.

    `profile_file` and `profile_sha256` are what the plan says of its profile (default: the name and the hash
    of the file, or the hash of the profile's JSON).

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    from .cli.problem_arguments import ProblemArguments

    given = ProblemArguments(
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        gpu=gpu,
        memory_bytes=memory_bytes,
        bandwidth=bandwidth,
        latency=latency,
        topology=topology,
        runtime=runtime,
        mini_batch=mini_batch,
        micro_batches=micro_batches,
        schedule=schedule,
        recompute=recompute,
        optimizer=optimizer,
        precision=precision,
        gradient_dtype=gradient_dtype,
        zero=zero,
        planner=planner,
        time_limit=time_limit,
        use_all=use_all,
        max_stages=max_stages,
        cut_after=cut_after,
        keep_together=keep_together,
        pins=pins,
        memory_limit=memory_limit,
        robust=robust,
        objective=objective,
        price=price,
        seconds_of=seconds_of,
    )
    return _solved(profile, given, profile_file, profile_sha256)


def _solved(
    profile: Profile | str | Path,
    given: ProblemArguments,
    profile_file: str,
    profile_sha256: str,
    *,
    compared: bool = True,
) -> Plan:
    from .cli.provenance import made_by
    from .planner.objectives.solved import solve_for
    from .profiler.profile_warnings import notes_of, warnings_of

    measured, reference = _profile_and_origin(profile, profile_file, profile_sha256)
    aim, problem = given.aim, given.problem(measured, reference)
    plan = solve_for(
        aim,
        problem,
        model=measured.model,
        profile=reference,
        notes=notes_of(measured),
        warnings=warnings_of(measured, problem.topology),
        compared=compared,
    )
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=measured.made_by)})


def frontier(
    profile: Profile | str | Path,
    *,
    points: int = 24,
    memory_step: float = 0.02,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Frontier:
    """The plans of which none is both faster and smaller: step time against the most that a device holds.

    At most `points` of them, the fastest first, each with less memory than the one before by the share
    `memory_step` at least (0: none is left out). `options` are those of `solve`, but for `objective` and
    `price`. Of the result: `points`, each with `step_seconds`, `memory_bytes`, `exact` and its `plan`.

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    from .cli import arguments
    from .cli.problem_arguments import ProblemArguments
    from .cli.provenance import made_by
    from .planner.objectives.frontier import frontier_of
    from .profiler.profile_warnings import warnings_of

    for name in ("objective", "price"):
        if name in options:
            raise UsageError(
                f"{name}={options[name]!r}: a frontier is of step time against memory", f"Leave {name} away."
            )
    measured, reference = _profile_and_origin(profile, profile_file, profile_sha256)
    problem = ProblemArguments(**options).problem(measured, reference)
    found = frontier_of(
        problem,
        model=measured.model,
        profile=reference,
        warnings=warnings_of(measured, problem.topology),
        points=arguments.whole("points", points),
        memory_step=arguments.number("memory_step", memory_step),
    )
    return found.model_copy(update={"made_by": made_by(found.made_by, measured=measured.made_by)})


def sweep(
    profile: Profile | str | Path,
    grid: Mapping[str, Sequence[Any]],
    *,
    jobs: int | None = None,
    backend: Literal["processes", "dask", "ray"] | str = "processes",
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Any,
) -> Sweep:
    """A grid of problems, each solved by itself: `pplan.sweep(profile, {"gpus": [2, 4]}, mini_batch=64)`.

    `grid`: values for some options of `solve`, by name; every combination is a point, the last name changing
    fastest. `options`: those of `solve` that are the same for all. `jobs`: how many run side by side (None:
    as many as there are cores). `backend`: processes of this machine, or a cluster of Dask (at
    DASK_SCHEDULER_ADDRESS) or Ray. Of the result: `rows`, each with its `point`, the figures of the plan
    (step_seconds, memory_bytes, balance and so on), or the `reason` why there is none.

    Raises UsageError (also the points', where none is usable), FileError, MachineError (the backend is not
    installed).
    """
    from .cli import arguments
    from .cli.problem_arguments import check_grid
    from .cli.provenance import made_by
    from .cost_models.document import MadeBy
    from .planner.sweep import Sweep, points_of, solve_points

    check_grid(grid, options)
    measured, reference = _profile_and_origin(profile, profile_file, profile_sha256)
    rows = solve_points(
        partial(_solved_point, measured, reference.file, reference.sha256, options),
        points_of(grid),
        backend=arguments.word("backend", backend),
        jobs=arguments.optional_whole("jobs", jobs),
    )
    return Sweep(
        model=measured.model,
        rows=rows,
        warnings=list(dict.fromkeys(text for row in rows for text in row.warnings)),
        made_by=made_by(MadeBy(), measured=measured.made_by),
    )


def _solved_point(
    profile: Profile, profile_file: str, profile_sha256: str, options: Mapping[str, Any], **point: Any
) -> Plan:
    """In a process of its own: without comparisons, which no row shows."""
    from .cli.problem_arguments import ProblemArguments

    given = ProblemArguments(**{**options, **point})
    return _solved(profile, given, profile_file, profile_sha256, compared=False)


def simulate(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    *,
    topology: str | Path | None = None,
    schedule: str | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    virtual_stages: int | None = None,
    replicas: int | None = None,
) -> Timeline:
    """A step of `plan`, simulated with the costs of `profile`: start and end of every action.

    `plan` and `profile` may be the paths of their files. `topology` is a machine's name or a TOML file; None
    is the machine that the plan was made for. `schedule`, `stages` (devices of the pipeline),
    `micro_batches`, `virtual_stages` (of a device) and `replicas` (of every stage) override the plan's, as
    `pplan simulate` does. The plan's replicas stay, or have to be named where they cannot; other `stages`
    than the plan's are on one device each. Of the result: `step_seconds`, `bubble`, `stage_times`,
    `peak_in_flight`, `spans`, `transfers`.

    Raises UsageError (numbers that the schedule, the mini-batch or the cuts do not allow, a profile of other
    layers), FileError.
    """
    from .cli import arguments
    from .cli.own_profiles import own_profiles
    from .cost_models.machines.measured_on import check_processor_seconds
    from .cost_models.machines.topology_options import make_topology
    from .planner.layout import Overrides, devices_needed, machine_of
    from .planner.simulated import simulate_plan

    plan = _plan(plan)
    measured, reference = _profile_and_origin(profile, "", "")
    _check_layers(plan, reference)
    overrides = Overrides(
        schedule=arguments.optional_word("schedule", schedule),
        stages=arguments.optional_whole("stages", stages),
        micro_batches=arguments.optional_whole("micro_batches", micro_batches),
        virtual_stages=arguments.optional_whole("virtual_stages", virtual_stages),
        replicas=arguments.optional_whole("replicas", replicas),
    )
    file = None if topology is None else arguments.path("topology", topology)
    machine = make_topology(
        gpus=devices_needed(plan, overrides),
        file=machine_of(plan, "plan") if file is None else file,
        profiled=_profiled(measured),
    )
    if file is not None:
        check_processor_seconds(_profiled(measured), machine, plan.wishes.seconds_of)
    profiles = own_profiles(machine, Path() if file is None else file.parent)
    return simulate_plan(plan, measured.chain(), machine, overrides, profiles).timeline


def explain(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    *,
    current: Sequence[int] | None = None,
    replicas: int = 1,
    micro_batches: int | None = None,
    schedule: str | None = None,
) -> Explanation:
    """Why `plan`, made from `profile`, is as it is, on the machine that it was made for.

    Of the result: `limits` (the critical path, the busiest stage, whether memory forbids a faster plan),
    `second_best` and `other_stages`, `holds` (the bandwidth and the layers' seconds at which another plan
    becomes better) and `what_if` (one more GPU, double the bandwidth or memory, recomputation forced or
    forbidden). `current`: the layers of each stage of a split in use, each on `replicas` devices, with so
    many `micro_batches` and that `schedule` (else the best for it): `current` of the result says why it is
    slower.

    Raises UsageError (a profile of other layers, a split that cannot be), FileError.
    """
    from .cli import arguments
    from .cli.planned_machine import planned_machine
    from .planner.explanation.current import Current
    from .planner.explanation.explain import explain as explain_plan

    split = arguments.wholes("current", current)
    of_it = (
        arguments.whole("replicas", replicas),
        arguments.optional_whole("micro_batches", micro_batches),
        arguments.optional_word("schedule", schedule),
    )
    used = None if split is None else Current(split, *of_it)
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    plan = _plan(plan)
    measured, reference = _profile_and_origin(profile, "", "")
    _check_layers(plan, reference)
    machine, profiles = planned_machine(plan, measured, folder)
    return explain_plan(plan, measured.chain(), machine, profiles, used)


def check(
    plan: Plan | str | Path,
    profile: Profile | str | Path,
    *,
    runtime: str = "torch",
    model: str | None = None,
    settings: Mapping[str, object] | None = None,
    loss: str | None = None,
    device: Literal["auto", "cpu", "cuda"] | str = "auto",
    emulate: bool = False,
    even: bool = True,
    calibrate: bool = False,
    steps: int = 5,
    timeout: float = 120.0,
) -> Check:
    """Runs `plan`, made from `profile`, for `steps` timed steps in processes of this machine.

    `runtime`: torch (torch.distributed.pipelining), torchgpipe, fairscale or deepspeed; where it does not run
    the plan itself, the plan's best alternative for it is checked, which a note says.

    They make the model again by the name in its profile where that is torchvision's or transformers' own; one
    of yours is named by `model` (its code is imported then, and else never), with `settings`, what it was
    profiled with, and a `loss` of yours likewise. `device`: CUDA with a GPU each, "cpu" with
    one thread each, or what there is enough of. `emulate`: the stages wait as long as the plan says they
    compute. `even`: the even split of as many stages runs
    beside it. `calibrate`: other schedules run first, and overhead, link and slowdown are fitted to them.
    `timeout`: seconds after which a step that does not end is given up.

    Of the result: `of_plan` and `cases`, each with `measured_step_seconds`, `predicted_step_seconds` (written
    down before the steps, from the stages measured alone), `planned_step_seconds` (the plan's own), `error`,
    `stages` and `losses`, which are held against the plain model's.

    Raises UsageError, FileError, ExportError (the runtime does not run the plan), MachineError: too few
    devices, a missing package, or a process that failed, died or hangs, with its own words.
    """
    from .cli import arguments
    from .cli.checking import CheckOptions, check_plan
    from .runtimes.checking.launching import run_in_processes

    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    named = Path(plan).name if isinstance(plan, str | Path) else "plan"
    plan = _plan(plan)
    measured, reference = _profile_and_origin(profile, "", "")
    _check_layers(plan, reference)
    arguments.word("device", device)
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known", "Use auto, cpu or cuda.")
    options = CheckOptions(
        runtime=arguments.word("runtime", runtime),
        model=arguments.optional_word("model", model),
        settings=arguments.settings("settings", settings) or {},
        loss=arguments.optional_word("loss", loss),
        device=device,
        emulate=arguments.flag("emulate", emulate),
        even=arguments.flag("even", even),
        calibrate=arguments.flag("calibrate", calibrate),
        steps=arguments.whole("steps", steps),
        timeout_seconds=arguments.number("timeout", timeout),
    )
    found = check_plan(plan, measured, folder, named, options, run_in_processes)
    if found is None:
        raise MachineError("check: nothing was measured", "Call it outside torchrun.")
    return found


def compare(*plans: Plan | str | Path, profile: Profile | str | Path | None = None) -> Comparison:
    """The plans side by side: step, samples/s, bubble, memory, devices and gap of each.

    With the `profile` that the first was made from, what every named planner makes of its problem, too. Of
    the result: `rows`, and `first_slower`, the first plan's seconds a sample over those of the best of the
    others, less 1.

    Raises UsageError (no plan, a profile of other layers), FileError.
    """
    from .cli.planned_machine import planned_machine
    from .planner.explanation.compare import compare as compare_plans
    from .planner.explanation.question import question_of

    if not plans:
        raise UsageError("compare: no plan is given", "Give plans, or the paths of their files.")
    named = [
        (str(plan) if isinstance(plan, str | Path) else f"plan {number}", _plan(plan))
        for number, plan in enumerate(plans)
    ]
    if profile is None:
        return compare_plans(named)
    first = named[0][1]
    measured, reference = _profile_and_origin(profile, "", "")
    _check_layers(first, reference)
    folder = Path(plans[0]).parent if isinstance(plans[0], str | Path) else Path()
    machine, profiles = planned_machine(first, measured, folder)
    return compare_plans(named, question_of(first, measured.chain(), machine, profiles))


def profile(
    model: str | nn.Module,
    example_input: ExampleInput | None = None,
    *,
    input_shape: Sequence[int] | None = None,
    classes: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    dtype: str | None = None,
    device: str | None = None,
    granularity: str | None = None,
    keep_together: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    loss: str | None = None,
    compile: bool = False,
    channels_last: bool = False,
    amp: Literal["bf16", "fp16"] | None = None,
    tf32: bool = False,
    budget_seconds: float = 60.0,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    calibrate: str | Path | Profile | None = None,
    cache: bool = False,
    resume: bool = False,
    remark: Callable[[str], None] | None = None,
) -> Profile:
    """Measures every layer of `model`, forward and backward, at several micro-batch sizes.

    `model` is a torchvision model's name, `hf:` and a transformers model's name, `package.module:factory`, or
    a module with its `example_input`: a tensor, a tuple of forward's arguments, or a dict of its keyword
    arguments, with at least one sample along dimension 0. `settings` are the factory's keyword arguments, or
    keys of the transformers configuration (also layers, hidden, heads, sequence, vocabulary). `input_shape`
    is that of one sample. `dtype` defaults to the model's own, `device` to CUDA where there is one ("meta":
    layers and bytes only; "analytic:h100", any preset or a TOML file: seconds estimated from FLOPs and bytes,
    with the efficiencies of `calibrate`, a measured profile of the same model, where it is given).

    `granularity`: "block" (cuts that one tensor crosses), "fine" (any number), or "module:PATTERN[,PATTERN]";
    no cut is allowed between layers that match a pattern of `keep_together`. `loss`: "cross-entropy", "mse",
    "none" or "package.module:function" of the model's output; else what is usual for such a model. `compile`,
    `channels_last`, `amp` and `tf32`: as the training will run.

    The measuring takes about `budget_seconds` over all sizes together; `progress` is told what is in hand.

    `cache`: a profile of the same layers, input, dtype, device and versions that an earlier run kept is
    taken, whatever the model's name, and this one is kept ($PPLAN_CACHE, else ~/.cache/pplan). `resume`: so
    are the passes of a run that was interrupted or killed. `remark` is told of it, a line each.

    Raises UsageError, FileError (`calibrate`, the TOML file), ModelError, MachineError. At Ctrl-C, after a
    micro-batch size was measured, the KeyboardInterrupt holds what there is as its `profile`.
    """
    from .cli import arguments

    _require_torch()
    from .profiler.analytic import target_named
    from .profiler.machine import device_named, dtype_named
    from .profiler.measure import profile_model
    from .profiler.profile_file import Profile

    # A model can take long to build: what is refused anyway is refused before.
    seed = arguments.whole("seed", seed, at_least=0, at_most=2**63 - 1)
    sizes = arguments.wholes("micro_batch_sizes", micro_batch_sizes)
    budget_seconds = arguments.number("budget_seconds", budget_seconds)
    settings = arguments.settings("settings", settings)
    granularity = arguments.optional_word("granularity", granularity)
    loss = arguments.optional_word("loss", loss)
    keep_together = arguments.words("keep_together", keep_together)
    arguments.optional_word("amp", amp)
    flags = {"compile": compile, "channels_last": channels_last, "tf32": tf32, "cache": cache}
    for name, value in {**flags, "resume": resume}.items():
        arguments.flag(name, value)
    for name, told in {"progress": progress, "remark": remark}.items():
        arguments.function(name, told)
    if calibrate is not None and not isinstance(calibrate, Profile):
        calibrate = arguments.path("calibrate", calibrate)
    target = target_named(arguments.optional_word("device", device), calibrate)
    device = device if target is None else "meta"
    device_named(device)
    if dtype is not None:
        dtype_named(arguments.word("dtype", dtype))
    loaded = _loaded(
        model,
        example_input,
        input_shape=arguments.wholes("input_shape", input_shape),
        classes=arguments.optional_whole("classes", classes),
        settings=settings,
        seed=seed,
        on_meta=device == "meta",
    )
    return profile_model(
        loaded,
        granularity=granularity,
        keep_together=keep_together,
        loss=loss,
        compile=compile,
        channels_last=channels_last,
        amp=amp,
        tf32=tf32,
        micro_batch_sizes=sizes,
        dtype=dtype,
        device=device,
        budget_seconds=budget_seconds,
        seed=seed,
        progress=progress,
        estimate_for=target,
        cache=cache,
        resume=resume,
        remark=remark,
    )


def import_profile(
    path: str | Path,
    *,
    format: Literal["pipedream", "csv", "json"] | str | None = None,
    model: str | None = None,
    micro_batch_size: int | None = None,
    granularity: Literal["block", "fine"] | str | None = None,
    dtype: str = "float32",
) -> Profile:
    """The profile of costs from elsewhere: PipeDream's graph.txt, or a table as CSV or JSON, one row a layer.

    `format` defaults to what the content tells, `model`, its name, to the file's. `micro_batch_size` is that
    of a file that does not say it (default: 128 for a graph, as PipeDream's own; 1 for a table).
    `granularity` of a graph: "block" (cuts that one tensor crosses; the default) or "fine" (each operation a
    layer). Columns of a table: name, forward_seconds, backward_seconds, activation_bytes (the output),
    parameter_bytes; optional saved_bytes (else the output's), micro_batch_size, backward_input_seconds; times
    also as forward_ms and so on. With one micro-batch size, costs at any other scale with the samples, and
    plans say so.

    Raises UsageError, FileError (the file, with the line or index).
    """
    from .cli import arguments
    from .cli.provenance import made_by
    from .cost_models.document import MadeBy
    from .profiler.importing.importer import ImportOptions
    from .profiler.importing.importer import import_profile as import_file

    options = ImportOptions(
        format=arguments.optional_word("format", format),
        model=arguments.optional_word("model", model),
        micro_batch_size=arguments.optional_whole("micro_batch_size", micro_batch_size),
        granularity=arguments.optional_word("granularity", granularity),
        dtype=arguments.word("dtype", dtype),
    )
    imported = import_file(arguments.path("path", path), options)
    return imported.model_copy(update={"made_by": made_by(MadeBy())})


def import_plan(
    source: str | Path,
    profile: Profile | str | Path,
    *,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    bandwidth: float | Sequence[float] | None = None,
    latency: float | Sequence[float] | None = None,
    topology: str | Path | None = None,
    runtime: str | None = None,
    mini_batch: int | None = None,
    micro_batches: int | Literal["auto"] | None = None,
    schedule: str | None = None,
    virtual_stages: int | None = None,
    replicas: int | None = None,
    recompute: str | None = None,
    optimizer: str = "sgd",
    seconds_of: Literal["cpu"] | str | None = None,
    precision: Literal["auto", "fp32", "mixed", "bf16"] | str = "auto",
    gradient_dtype: Literal["auto", "fp32", "bf16", "fp16"] | str = "auto",
    zero: int = 0,
    profile_file: str = "",
    profile_sha256: str = "",
) -> Plan:
    """The partition that another tool holds, as a plan of the layers of `profile`.

    `source` is a file, or the partition itself: "12,34" (a balance list), "0,12,46" (DeepSpeed's parts),
    "Et*3|t*5L" (a Megatron layout; also the options it stands among), torchtitan's lists of module names, a
    device_map, or what `export` wrote. `virtual_stages` are those of a device, `replicas` those of every
    stage; `gpus` defaults to what the partition takes. What is not given is as the source says: else the best
    schedule of 1f1b and gpipe (interleaved, where devices have several stages), the best number of
    micro-batches, recomputation where it does not fit without. The rest as for `solve`.

    A plan that does not fit says so in its warnings. Raises UsageError, FileError (the source, the profile,
    the topology).
    """
    from .cli import arguments
    from .cli.given_plan import ImportOptions, imported_plan
    from .cli.provenance import made_by

    measured, reference = _profile_and_origin(profile, profile_file, profile_sha256)
    options = ImportOptions(
        gpus=arguments.optional_whole("gpus", gpus),
        machine={
            "gpu": arguments.optional_word("gpu", gpu),
            "memory_bytes": arguments.optional_whole("memory_bytes", memory_bytes, example="16 * 2**30"),
            "bandwidth": arguments.by_level("bandwidth", bandwidth, "(300e9, 25e9)"),
            "latency": arguments.by_level("latency", latency, "(5e-6, 20e-6)"),
            "gpus_per_node": arguments.optional_whole("gpus_per_node", gpus_per_node),
            "file": None if topology is None else arguments.path("topology", topology),
            "profiled": _profiled(measured),
        },
        runtime=arguments.optional_word("runtime", runtime),
        mini_batch=arguments.optional_whole("mini_batch", mini_batch),
        micro_batches=arguments.whole_or_auto("micro_batches", micro_batches),
        schedule=arguments.optional_word("schedule", schedule),
        virtual_stages=arguments.optional_whole("virtual_stages", virtual_stages),
        replicas=arguments.optional_whole("replicas", replicas),
        recompute=arguments.optional_word("recompute", recompute),
        optimizer=arguments.word("optimizer", optimizer),
        seconds_of=arguments.optional_word("seconds_of", seconds_of),
        precision=arguments.word("precision", precision),
        gradient_dtype=arguments.word("gradient_dtype", gradient_dtype),
        zero=arguments.whole("zero", zero, at_least=0),
    )
    if not isinstance(source, Path):
        source = arguments.word("source", source)
    plan = imported_plan(source, measured, reference, options)
    return plan.model_copy(update={"made_by": made_by(plan.made_by, measured=measured.made_by)})


def verify(plan: Plan | str | Path, profile: Profile | str | Path | None = None) -> Report:
    """A second opinion on `plan`: all of it worked out again, by code that shares nothing with `solve`.

    `plan` and `profile` may be the paths of their files; without `profile` the file that the plan names is
    taken, beside the plan's. Of the result: `agrees`; `lines`, each with its `name`, its `state` ("ok",
    "differs" or "not checked"), what the plan `said` and what was `found`; `differing`; `to_json()`.

    Raises UsageError, FileError (a file that cannot be read, or is broken).
    """
    from .cli import arguments
    from .profiler.profile_file import Profile
    from .verification.documents import LARGEST_PROFILE, read_content
    from .verification.verify import Sources, sources_of
    from .verification.verify import verify as verify_sources

    if isinstance(plan, str | Path):
        path = profile if isinstance(profile, str | Path) else None
        made = sources_of(Path(plan), None if path is None else Path(path))
    else:
        _check_plan(plan)
        made = Sources(plan.to_json().encode(), "plan")
        if isinstance(profile, str | Path):
            made.profile = read_content(Path(profile), "profile", LARGEST_PROFILE)
            made.profile_name, made.folder = str(profile), Path(profile).parent
    if profile is not None and not isinstance(profile, str | Path):
        arguments.instance(
            "profile", profile, Profile, "Give what pplan.profile returns, or the path of its file."
        )
        made.profile, made.profile_name, made.is_file = profile.to_json().encode(), "profile", False
    return verify_sources(made)


def sequential(
    model: nn.Module,
    example_input: ExampleInput,
    *,
    granularity: str = "block",
    keep_together: Sequence[str] = (),
) -> nn.Sequential:
    """`model` as an nn.Sequential of its layers, one element a layer of the profile, sharing its parameters.

    `example_input`, `granularity` and `keep_together` as for `profile`. Where several tensors cross a cut,
    the layers hand each other a tuple; the nn.Sequential itself takes the tensor, or the tuple of all tensors
    of the input in their order, and returns what the model returns.

    Raises ModelError where the model cannot be taken apart, MachineError without torch.
    """
    _require_torch()
    from torch import nn

    from .cli import arguments
    from .profiler.sequential import sequential as as_sequential

    granularity = arguments.word("granularity", granularity)
    keep_together = arguments.words("keep_together", keep_together)
    arguments.instance("model", model, nn.Module, "Give a torch.nn.Module.")
    return as_sequential(
        model,
        example_input,
        granularity=granularity,
        keep_together=keep_together,
    )


def export(runtime: str, plan: Plan, *, device: Literal["cuda", "cpu"] | str | None = None) -> ExportDocument:
    """`plan` in the words of `runtime`, one of those that `pplan export --help` names.

    Where the runtime cannot run the plan itself, the best of its alternatives is taken, and a UserWarning
    says which. `device` "cuda" or "cpu" says where the stages stand; None: on what the plan is for,
    processors where one was profiled and no GPU was named.
    `.save(path, force=False)` writes the file.

    Raises UsageError, ExportError (nothing in the plan is for this runtime).
    """
    import warnings

    from .cli import arguments
    from .cli.provenance import made_by
    from .cost_models.document import MadeBy
    from .runtimes.formats.exporters import export as export_plan

    _check_plan(plan)
    origin = made_by(MadeBy(), measured=plan.made_by)
    document, remark = export_plan(
        arguments.word("runtime", runtime),
        plan,
        device=arguments.optional_word("device", device),
        made_by=origin,
    )
    if remark:
        warnings.warn(remark, UserWarning, stacklevel=2)
    return document


def load_model(
    name: str,
    *,
    classes: int | None = None,
    input_shape: Sequence[int] | None = None,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
) -> tuple[nn.Module, ExampleInput]:
    """The model that `profile` builds for this name and options, and an example input of at least one sample.

    The example is a tensor, a tuple of forward's arguments, or a dict of its keyword arguments.

    Raises UsageError, ModelError, MachineError.
    """
    from .cli import arguments

    _require_torch()
    from .profiler.models import load_model as load

    loaded = load(
        arguments.word("name", name),
        classes=arguments.optional_whole("classes", classes),
        input_shape=arguments.wholes("input_shape", input_shape),
        settings=arguments.settings("settings", settings),
        seed=arguments.whole("seed", seed, at_least=0, at_most=2**63 - 1),
    )
    example = loaded.example
    if example.kwargs and not example.args:
        return loaded.module, example.kwargs
    return loaded.module, example.args[0] if len(example.args) == 1 else example.args


def topology(name: str | Path, *, gpus: int | None = None) -> Topology:
    """The devices and links of a machine, such as "dgx-a100", or of a TOML file, on `gpus` devices.

    `gpus` defaults to those of one machine, or of the file; more are several machines. `.device(rank)` and
    `.link(a, b)` are what costs are made of.

    Raises UsageError, FileError.
    """
    from .cli import arguments
    from .cost_models.machines.topology_options import described_topology

    return described_topology(arguments.path("name", name), arguments.optional_whole("gpus", gpus))


def load_profile(path: str | Path) -> Profile:
    """The profile in a file. Raises FileError."""
    from .cli import arguments
    from .profiler.profile_file import Profile

    return Profile.load(arguments.path("path", path))


def load_plan(path: str | Path) -> Plan:
    """The plan in a file. Raises FileError."""
    from .cli import arguments
    from .planner.plan_file import Plan

    return Plan.load(arguments.path("path", path))


def _plan(plan: Plan | str | Path) -> Plan:
    """The plan, read where it is named by its path."""
    if isinstance(plan, str | Path):
        return load_plan(plan)
    _check_plan(plan)
    return plan


def _check_plan(plan: Plan) -> None:
    from .cli import arguments
    from .planner.plan_file import Plan

    arguments.instance(
        "plan", plan, Plan, 'Give what pplan.solve returns, or pplan.load_plan("a.plan.json").'
    )


def _check_layers(plan: Plan, profile: ProfileReference) -> None:
    """Raises UsageError where the profile has other layers than the plan's."""
    if plan.profile.layers_sha256 not in ("", profile.layers_sha256):
        raise UsageError(
            f"profile {profile.file or 'given'}: has other layers than the one that the plan for "
            f"{plan.model} was made from ({plan.profile.file or 'without a name'})",
            "Give that profile, or plan again with pplan.solve.",
        )


def _profiled(measured: Profile) -> ProfiledDevice:
    from .profiler.profile_warnings import profiled_device

    return profiled_device(measured)


def _profile_and_origin(
    profile: Profile | str | Path, file: str, sha: str
) -> tuple[Profile, ProfileReference]:
    """The profile, read where it is named by its path, and what a plan says of it."""
    from .cli import arguments
    from .cost_models.document import as_text, read_bytes, sha256
    from .planner.plan_file import ProfileReference
    from .profiler.profile_file import Profile

    file, sha = arguments.word("profile_file", file), arguments.word("profile_sha256", sha)
    if isinstance(profile, str | Path):
        path = Path(profile)
        content = read_bytes(path, "profile")
        profile = Profile.parse(as_text(content, path, "profile"), str(path))
        file, sha = file or path.name, sha or sha256(content)
    arguments.instance(
        "profile", profile, Profile, "Give what pplan.profile returns, or the path of its file."
    )
    return profile, ProfileReference(
        file=file,
        sha256=sha or sha256(profile.to_json()),
        layers_sha256=profile.layers_sha256,
        dtype=profile.dtype,
        amp=profile.amp,
        device_name=profile.device_name or profile.device,
        granularity=profile.granularity,
        estimated=profile.estimated,
        device=profile.device,
    )


def _loaded(
    model: str | nn.Module,
    example_input: ExampleInput | None,
    *,
    input_shape: Sequence[int] | None,
    classes: int | None,
    settings: Mapping[str, object] | None,
    seed: int,
    on_meta: bool,
) -> LoadedModel:
    from torch import nn

    from .cli import arguments
    from .profiler.models import from_module, load_model

    if isinstance(model, str):
        if example_input is not None:
            raise UsageError(
                f"example_input is given with the name {model!r}", "Give input_shape, or the module itself."
            )
        return load_model(
            model, classes=classes, input_shape=input_shape, settings=settings, seed=seed, on_meta=on_meta
        )
    arguments.instance("model", model, nn.Module, "Give the name of a model, or a torch.nn.Module.")
    if example_input is None:
        raise UsageError("a module is given without example_input", "Give a batch of its input as a tensor.")
    if input_shape is not None or classes is not None or settings:
        raise UsageError(
            "input_shape, classes or settings are given with a module", "Leave them away: the module decides."
        )
    return from_module(model, example_input)


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except (ImportError, OSError) as error:
        raise MachineError(f"torch cannot be imported: {error}", "Install it: pip install torch") from error


def __getattr__(name: str) -> Any:
    """Plan, Profile and __version__, when they are first asked for."""
    if name == "__version__":
        from importlib.metadata import version

        return version("pplan")
    if name == "Plan":
        from .planner.plan_file import Plan

        return Plan
    if name == "Profile":
        from .profiler.profile_file import Profile

        return Profile
    raise AttributeError(f"module 'pplan' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
