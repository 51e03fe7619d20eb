"""`pplan check`: runs a plan for real, and holds the prediction against the clock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .compare_command import TOLD, share
from .options import whole_number, word
from .streams import console, remark, result, watched

if TYPE_CHECKING:
    from ..api.check import CheckOptions
    from ..api.load import PlanAndProfile
    from ..runtimes.checking.check_report import Check
    from ..runtimes.checking.job import CasePrediction
    from .output import Target

RUNTIMES = ("torch", "torchgpipe", "fairscale", "deepspeed")
PlanFile = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN", help="A plan; default: newest in this directory.", show_default=False),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The plan's profile, where it is not beside it."),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="The model, where it is your own: package.module:factory. A file's word runs no code.",
    ),
]
LossName = Annotated[
    str | None,
    typer.Option("--loss", metavar="NAME", help="The loss, where it is your own: package.module:function."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="As the model was profiled with; repeatable."),
]
RuntimeName = Annotated[
    str,
    typer.Option(
        "--runtime",
        metavar="NAME",
        help=f"What runs it: {', '.join(RUNTIMES)}.",
        parser=word("--runtime", RUNTIMES),
    ),
]
Device = Annotated[
    Any,
    typer.Option(
        "--device",
        metavar="auto|cpu|cuda",
        help="auto: CUDA where there are enough GPUs, else a core for each process.",
        parser=word("--device", ("auto", "cpu", "cuda")),
    ),
]
Emulate = Annotated[
    bool,
    typer.Option(
        "--emulate",
        help="Stages wait as long as the plan says they compute: for more devices than this machine has.",
    ),
]
NoEven = Annotated[bool, typer.Option("--no-even", help="Do not run the even split beside the plan.")]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate",
        help="Run other schedules first, fit overhead, link and slowdown to them, write both beside the plan "
        "and solve again.",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="Corrections that an earlier --calibrate wrote."),
]
Steps = Annotated[
    int,
    typer.Option(
        "--steps", parser=whole_number("--steps", at_least=1), metavar="N", help="Steps that are timed."
    ),
]
Timeout = Annotated[
    str,
    typer.Option("--timeout", metavar="120s", help="How long a step may take before the check gives up."),
]
FailAbove = Annotated[
    float | None,
    typer.Option(
        "--fail-above",
        metavar="15%",
        help=f"End with status {TOLD} where the predicted step is off by more, or the losses differ.",
        parser=share,
    ),
]
Save = Annotated[bool, typer.Option("--save", help="Write NAME.check.json beside the plan.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def check_command(
    plan_file: PlanFile = None,
    profile_file: ProfileFile = None,
    model: ModelName = None,
    setting: Settings = None,
    loss: LossName = None,
    runtime: RuntimeName = "torch",
    device: Device = "auto",
    emulate: Emulate = False,
    no_even: NoEven = False,
    calibrate: Calibrate = False,
    calibration: Calibration = None,
    steps: Steps = 5,
    timeout: Timeout = "120s",
    fail_above: FailAbove = None,
    save: Save = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a few steps, in processes of this machine or torchrun's, and measure what was predicted.

    Several nodes: torchrun --nnodes 2 ... --no-python pplan check PLAN
    """
    from ..api.check import CheckOptions
    from ..api.load import read_plan
    from ..cost_models.errors import UsageError
    from ..cost_models.quantities import parse_seconds
    from ..runtimes.checking.calibration import Calibration
    from .default_input import named_or_newest
    from .settings import parse_settings

    if calibrate and calibration is not None:
        raise UsageError("check: both --calibrate and --calibration", "Give one of them.")
    timeout_seconds = parse_seconds(timeout, name="--timeout")
    if timeout_seconds < 1:
        raise UsageError(f"--timeout {timeout}: must be at least 1 s", "For example: --timeout 120s")
    options = CheckOptions(
        runtime=runtime,
        model=model,
        loss=loss,
        settings=parse_settings(setting or ()),
        device=device,
        emulate=emulate,
        even=not no_even,
        calibrate=calibrate,
        corrections=None if calibration is None else Calibration.load(calibration).corrections,
        steps=steps,
        timeout_seconds=timeout_seconds,
    )
    read = read_plan(named_or_newest(plan_file, ("plan",)), profile_file)
    if save:
        _saved(read).check(read.plan_file, read.profile_file)
    found = _run(read, options)
    if found is None:
        return
    _tell(found, read, save=save, as_json=as_json, calibrate=calibrate)
    _fail(found, fail_above)


def _run(read: PlanAndProfile, options: CheckOptions) -> Check | None:
    """Of several processes that a torchrun started, one says what went wrong: the one that failed."""
    from ..api.check import check_plan, run_here
    from ..api.provenance import made_by
    from ..runtimes.checking.launching import ProgressCallbacks
    from .invocation import command_line

    told = (
        ProgressCallbacks(doing=remark, predicted=_announce)
        if watched()
        else ProgressCallbacks(predicted=_announce)
    )
    folder = read.plan_file.parent
    try:
        found = check_plan(
            read.plan, read.profile, folder, read.plan_file.name, options, lambda job: run_here(job, told)
        )
    except Exception as error:
        # What all fail with is told by the first.
        if os.environ.get("RANK", "0") != "0" and type(error).__name__ != "RankFailed":
            raise typer.Exit(2) from None
        raise
    if found is None:
        return None
    from ..cost_models.document import MadeBy, sha256

    origin = made_by(MadeBy(), command=command_line(), measured=read.profile.made_by)
    return found.model_copy(update={"made_by": origin, "plan_sha256": sha256(read.plan_file.read_bytes())})


def _announce(name: str, predicted: CasePrediction) -> None:
    """What is expected, before it runs."""
    from ..cost_models.quantities import format_seconds

    fixed = predicted.calibrated_step_seconds
    more = "" if fixed is None else f", calibrated {format_seconds(fixed)}"
    remark(f"Predicted, {name}: {format_seconds(predicted.step_seconds)}{more}")


def _tell(found: Check, read: PlanAndProfile, *, save: bool, as_json: bool, calibrate: bool) -> None:
    if as_json:
        result(found.to_json())
    else:
        from .check_tables import print_check

        print_check(found, console())
    stem = _stem(read)
    if save:
        place = _saved(read)
        place.put(found.to_json())
        remark(f"Wrote {place.path}")
    if calibrate:
        _write_calibration(found, read, stem)


def _write_calibration(found: Check, read: PlanAndProfile, stem: str) -> None:
    """Writes the calibration and the topology beside the plan, and says what solving again finds."""
    from ..api.calibrate import calibrate
    from .output import Target

    made = calibrate(found, read, stem)
    if made is None:
        return
    for path, content in made.files.items():
        Target(path, replace=False, own=True).put(content)
    remark(f"Wrote {' and '.join(map(str, made.files))}")
    again = made.again
    if isinstance(again, str):
        remark(f"Solved again: {again}")
        return
    from ..cost_models.quantities import format_seconds

    plan, step = read.plan, format_seconds(again.prediction.step_seconds)
    same = (again.balance, again.schedule, again.micro_batches, again.replicas) == (
        plan.balance,
        plan.schedule,
        plan.micro_batches,
        plan.replicas,
    )
    if same:
        remark(f"Solved again with it: the plan stays, its step is {step}")
        return
    remark(
        f"Solved again with it: {', '.join(map(str, again.balance))}, {again.micro_batches} x "
        f"{again.micro_batch_size}, {again.schedule}: {step}; "
        f"pplan solve --topology {made.topology_file} writes it"
    )


def _stem(read: PlanAndProfile) -> str:
    return read.plan_file.name.removesuffix(".json").removesuffix(".plan")


def _saved(read: PlanAndProfile) -> Target:
    """NAME.check.json beside NAME.plan.json: an earlier one goes that nobody changed."""
    from .output import Target

    return Target(read.plan_file.with_name(f"{_stem(read)}.check.json"), replace=False, own=True)


def _fail(found: Check, fail_above: float | None) -> None:
    """Ends with status 4 where a prediction is off by more, or the losses are not the plain model's."""
    from .check_tables import signed
    from .number_format import percent

    if fail_above is None:
        return
    own = found.of_plan
    if own.same_losses is False:
        remark("the losses are not the plain model's")
        raise typer.Exit(TOLD)
    if abs(own.error) > fail_above:
        remark(f"the predicted step is off by {signed(own.error)}, more than {percent(fail_above)}")
        raise typer.Exit(TOLD)
