"""A plan in the words of a training runtime."""

from __future__ import annotations

import warnings
from typing import Literal

from ..cost_models import arguments
from ..cost_models.document import MadeBy
from ..planner.plan_file import Plan
from ..runtimes.documents import ExportDocument
from ..runtimes.exports import export as export_plan
from .load import check_is_plan
from .provenance import made_by


def export(runtime: str, plan: Plan, *, device: Literal["cuda", "cpu"] | str | None = None) -> ExportDocument:
    """`plan` in the words of `runtime`, one of those that `pplan export --help` names.

    Where the runtime cannot run the plan itself, the best of its alternatives is taken, and a UserWarning
    says which. `device` "cuda" or "cpu" says where the stages stand; None: on what the plan is for,
    processors where one was profiled and no GPU was named.
    `.save(path, force=False)` writes the file.

    >>> import pplan
    >>> plan = pplan.solve("gpt.profile.json", gpus=4, mini_batch=64, runtime="torchgpipe")
    >>> pplan.export("torchgpipe", plan).balance
    [3, 2, 2, 2]

    Raises UsageError, ExportError (nothing in the plan is for this runtime).
    """
    check_is_plan(plan)
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
