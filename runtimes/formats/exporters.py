"""The export of a plan to a runtime, by its name."""

from __future__ import annotations

from typing import Protocol

from ...cost_models.document import MadeBy
from ...cost_models.errors import ExportError, UsageError
from ...cost_models.runtime import RUNTIMES, find_runtime, other_layers_warning
from ...planner.plan_file import Plan
from . import (
    deepspeed_export,
    huggingface_export,
    megatron_export,
    nemo_export,
    pipe_export,
    torch_export,
    torchtitan_export,
)
from .export_document import ExportDocument, default_device
from .trainer_text import join_remarks


class Exporter(Protocol):
    """Writes a plan in one runtime's words; see `export`."""

    def __call__(self, plan: Plan, *, device: str, made_by: MadeBy) -> tuple[ExportDocument, str | None]: ...


EXPORTERS: dict[str, Exporter] = {
    "torchgpipe": pipe_export.export_torchgpipe,
    "fairscale": pipe_export.export_fairscale,
    "deepspeed": deepspeed_export.export,
    "torch": torch_export.export,
    "huggingface": huggingface_export.export,
    "megatron": megatron_export.export,
    "megatron-bridge": megatron_export.export_bridge,
    "torchtitan": torchtitan_export.export,
    "nemo-automodel": nemo_export.export,
}


SUFFIXES = {
    kind.kind: kind.suffix
    for kind in (
        megatron_export.MegatronExport,
        megatron_export.MegatronBridgeExport,
        torchtitan_export.TorchtitanExport,
        nemo_export.NemoExport,
    )
}
"""Of the file that a trainer takes as it is, where that is no JSON."""


def _measured_on(plan: Plan) -> str:
    return f", {plan.profile.device_name}" if plan.profile.device_name not in ("", "cpu") else ""


SHARES_LAYERS = tuple(name for name, runtime in RUNTIMES.items() if runtime.shares_layers)
"""Runtimes that take a plan of devices that are groups, which share every layer."""


def export(
    runtime: str, plan: Plan, *, device: str | None = None, made_by: MadeBy | None = None
) -> tuple[ExportDocument, str | None]:
    """The document `runtime` is to be given for `plan`, and a remark where it is not the plan itself.

    A runtime is never given what it does not run: where the plan's schedule, replicas or recomputation are
    not for it, the document holds the best of the plan's alternatives that is, and the remark, a sentence for
    standard error, says which, its step time and why. `device` "cpu" puts all stages on the CPU, so that the
    file can be tried without a GPU (DeepSpeed is told its devices when it is launched); None takes the
    devices that the plan is for: processors where one was profiled and no GPU was named.

    Raises UsageError (unknown runtime or device, "cuda" for a plan of processors), ExportError (nothing in
    the plan is for this runtime).
    """
    runtime = find_runtime(runtime).name
    exporter = EXPORTERS[runtime]
    if device not in ("cuda", "cpu", None):
        raise UsageError(
            f"device={device!r}: cannot be exported for", "Use 'cuda', or 'cpu' to try without a GPU."
        )
    if device == "cuda" and plan.device_kind == "CPU":
        raise UsageError(
            f"device='cuda': the plan is for processors, by seconds measured on one{_measured_on(plan)}",
            "Plan for GPUs: with a profile of one, or pplan.profile(MODEL, device='analytic:h100'). Where a "
            "processor's seconds are meant: pplan.solve(gpu='h100', seconds_of='cpu').",
        )
    sharers = plan.profile.tensor_parallel
    if sharers > 1 and runtime not in SHARES_LAYERS:
        raise ExportError(
            f"each device of the plan is {sharers} that share every layer: {runtime} does not share layers",
            f"Export for one of: {', '.join(SHARES_LAYERS)}.",
        )
    document, remark = exporter(plan, device=device or default_device(plan), made_by=made_by or MadeBy())
    if sharers > 1 and runtime == "torch":
        remark = join_remarks(
            remark,
            f"Start {sharers} processes for each device of the plan, and give build tensor_parallel, the "
            "plan that the profile was measured with.",
        )
    other_layers = other_layers_warning(runtime, plan.profile.device)
    update: dict[str, object] = {"estimated": plan.profile.estimated}
    if other_layers:
        update["warnings"] = [other_layers]
        remark = join_remarks(f"Warning: {other_layers}.", remark)
    return document.model_copy(update=update), remark
