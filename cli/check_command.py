"""`pplan check`: runs a plan for real, and holds the prediction against the clock."""

from __future__ import annotations

import os
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from ..api.check_options import CheckOptions
from ..cost_models.quantities import format_seconds, percent
from .compare_command import DIFFERENCE, share
from .output import AsJson, PlanFile, ProfileFile, Target, choose_input
from .streams import console, format_clock, remark, result, waiting

LONG_SECONDS = 150.0

if TYPE_CHECKING:
    from ..api.load import PlanAndProfile
    from ..runtimes.checking.records import Check, CheckMeasurements, Job
    from .output import Target

FailAbove = Annotated[
    float | None,
    typer.Option(
        "--fail-above",
        metavar="15%",
        help=f"End with status {DIFFERENCE} where the predicted step is off by more, or the losses differ.",
        parser=share,
    ),
]
Save = Annotated[bool, typer.Option("--save", help="Write NAME.check.json beside the plan.")]


def check_command(
    plan_file: PlanFile = None,
    profile_file: ProfileFile = None,
    *,
    options: CheckOptions,
    fail_above: FailAbove = None,
    save: Save = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan for a few steps, and measure what was predicted.

    It runs in processes of this machine, or in those of torchrun.
    Several nodes: torchrun --nnodes 2 ... --no-python pplan check PLAN
    """
    from ..api.load import read_plan

    files = read_plan(choose_input(plan_file, ("plan",)), profile_file, takes_others=True)
    if save:
        _check_target(files).check(files.plan_file, files.profile_file)
    check = _run(files, options)
    if check is None:
        return
    _print_result(check, files, save=save, as_json=as_json)
    is_written = not options.calibrate or _write_calibration(check, files, _stem(files))
    _fail(check, fail_above)
    if not is_written:
        raise typer.Exit(DIFFERENCE)


def _run(files: PlanAndProfile, options: CheckOptions) -> Check | None:
    """Runs the check. Of several processes that torchrun started, the one that failed says so, and
    the first of a node that it lost another. What all fail with is told by the first."""
    from ..api.check import check_plan, run_here
    from ..api.provenance import made_by

    folder = files.plan_file.parent
    is_first = os.environ.get("RANK", "0") == "0"

    def run(job: Job) -> CheckMeasurements | None:
        if is_first:
            _announce_length(job)
        with waiting("Checking") as wait:

            def tell(doing: str, seconds: float) -> None:
                wait.tell_left(seconds, doing[:1].upper() + doing[1:])

            return run_here(job, tell)

    try:
        check = check_plan(files.plan, files.profile, folder, files.plan_file.name, options, run)
    except Exception as error:
        if not (is_first or getattr(error, "reports", False)):
            raise typer.Exit(2) from None
        raise
    if check is None:
        return None
    from ..cost_models.document import MadeBy
    from ..cost_models.text_files import sha256

    origin = made_by(MadeBy(), measured=files.profile.made_by)
    update = {"made_by": origin, "plan_sha256": sha256(files.plan_file.read_bytes())}
    return check.model_copy(update=update)


def _announce_length(job: Job) -> None:
    """Of a check that takes some minutes: how many."""
    seconds = job.total_steps * job.step_seconds
    if seconds > LONG_SECONDS:
        remark(
            f"Runs {job.total_steps} steps of about {format_seconds(job.step_seconds)}, the plain model's "
            f"among them: about {format_clock(seconds)}; a plan of a smaller `mini_batch` is checked sooner"
        )


def _print_result(check: Check, files: PlanAndProfile, *, save: bool, as_json: bool) -> None:
    if as_json:
        result(check.to_json())
    else:
        from .check_tables import print_check

        print_check(check, console())
    if save:
        place = _check_target(files)
        place.write_text(check.to_json())
        remark(f"Wrote {place.path}")


def _write_calibration(check: Check, files: PlanAndProfile, stem: str) -> bool:
    """Write calibration and topology next to the plan, and print what solving again finds.

    Returns False, and writes nothing, if the check rejected the calibration.
    """
    from ..api.check import calibrate
    from ..cost_models.text_files import file_kind

    calibration = calibrate(check, files, stem)
    if calibration is None:
        remark("Wrote no calibration: it does not improve the prediction of cases that it was not fitted to")
        return False
    for path, content in calibration.files.items():
        Target(path, replace=False, own=True, kind=file_kind(content)).write_text(content)
    remark(f"Wrote {' and '.join(map(str, calibration.files))}")
    new_plan = calibration.new_plan
    if isinstance(new_plan, str):
        remark(f"Solved again: {new_plan}")
        return True
    plan, step = files.plan, format_seconds(new_plan.prediction.step_seconds)
    same = (new_plan.balance, new_plan.schedule, new_plan.micro_batches, new_plan.replicas) == (
        plan.balance,
        plan.schedule,
        plan.micro_batches,
        plan.replicas,
    )
    if same:
        remark(f"Solved again with it: the plan stays, its step is {step}")
        return True
    remark(
        f"Solved again with it: {', '.join(map(str, new_plan.balance))}, "
        f"{new_plan.batch}, {new_plan.schedule}: {step}; "
        f"pplan solve --topology {quote(str(calibration.topology_file))} writes it"
    )
    return True


def _stem(files: PlanAndProfile) -> str:
    return files.plan_file.name.removesuffix(".json").removesuffix(".plan")


def _check_target(files: PlanAndProfile) -> Target:
    """NAME.check.json beside NAME.plan.json: an earlier one goes that nobody changed."""

    return Target(
        files.plan_file.with_name(f"{_stem(files)}.check.json"), replace=False, own=True, kind="check"
    )


def _fail(check: Check, fail_above: float | None) -> None:
    """Ends with status 4 where a prediction is off by more, or the losses are not the plain model's."""
    from .check_tables import signed

    if fail_above is None:
        return
    case = check.of_plan
    if case.same_losses is False:
        remark("the losses are not the plain model's")
        raise typer.Exit(DIFFERENCE)
    if abs(case.error) > fail_above:
        remark(f"the predicted step is off by {signed(case.error)}, more than {percent(fail_above)}")
        raise typer.Exit(DIFFERENCE)
