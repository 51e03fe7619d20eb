"""`pplan explain`: why a plan is as it is, and why a split in use is slower."""

from __future__ import annotations

from ..cost_models.errors import UsageError
from ..planner.explanation.explain_options import ExplainOptions
from .field_names import FIELDS, typed_text
from .output import AsJson, PlanFile, ProfileFile, choose_input


def explain_command(
    plan_file: PlanFile = None,
    profile_file: ProfileFile = None,
    *,
    split: ExplainOptions,
    as_json: AsJson = False,
) -> None:
    """Explain a plan: its limits, the second best, what changes bring.

    It says how far the plan holds, too: how wrong its costs may be before another plan wins.
    """
    for name in ("replicas", "micro_batches", "schedule"):
        if split.current is None and (text := typed_text(name)) is not None:
            raise UsageError(
                f"explain {FIELDS[name]} {text}: without --current",
                "It tells of the split in use: give its balance, as in --current 12,34.",
            )

    from ..api.explain import explain
    from ..api.load import read_plan
    from .streams import console, result, waiting

    files = read_plan(choose_input(plan_file, ("plan",)), profile_file)
    with waiting("Solving the changed problems") as wait:
        explanation = explain(files.plan_file, files.profile_file, progress=wait.tell_share, **vars(split))
    if as_json:
        result(explanation.to_json())
        return
    from .explain_tables import print_explanation

    print_explanation(explanation, console())
