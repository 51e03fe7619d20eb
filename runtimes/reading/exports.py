"""What `pplan export` wrote as JSON, read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from ..formats.deepspeed_export import DeepspeedExport
from ..formats.export_document import ExportDocument
from ..formats.huggingface_export import HuggingfaceExport
from ..formats.megatron_export import LayoutExport, MegatronBridgeExport, MegatronExport
from ..formats.nemo_export import NemoExport
from ..formats.pipe_export import FairscaleExport, PipeExport, TorchgpipeExport
from ..formats.torch_export import TorchExport
from ..formats.torchtitan_export import TorchtitanExport
from .megatron_layout import from_layout
from .module_names import from_device_map, from_modules
from .partition import Partition, check_stages, partition_error

KINDS: dict[str, type[ExportDocument]] = {
    kind.kind: kind
    for kind in (
        TorchgpipeExport,
        FairscaleExport,
        DeepspeedExport,
        TorchExport,
        HuggingfaceExport,
        MegatronExport,
        MegatronBridgeExport,
        TorchtitanExport,
        NemoExport,
    )
}


def from_export(text: str, runtime: str, names: Sequence[str], where: str) -> Partition:
    """The partition in a file for `runtime`. Raises FileError."""
    document = KINDS[runtime].parse(text, where)
    made = _partition(document, names, where)
    if made.ends[-1] != len(names):
        raise partition_error(
            where,
            f"it has {made.ends[-1]} layers, the profile {len(names)}",
            "Name the profile of that model: profile=FILE",
        )
    replicas = getattr(document, "replicas", 1)
    return check_stages(
        replace(
            made,
            format=runtime,
            runtime=runtime,
            replicas=replicas,
            mini_batch=document.mini_batch,
            samples=document.micro_batch_size // replicas,
        ),
        where,
    )


def _partition(document: ExportDocument, names: Sequence[str], where: str) -> Partition:
    """The stages, schedule and recomputation."""
    if isinstance(document, PipeExport):
        made = Partition("", tuple(accumulate(document.balance)), schedule="gpipe")
        return replace(made, virtual_stages=1, recompute=document.checkpoint)
    if isinstance(document, DeepspeedExport):
        pipeline = document.config.get("pipeline")
        interval = pipeline.get("activation_checkpoint_interval") if isinstance(pipeline, dict) else None
        again = isinstance(interval, int) and interval > 0
        made = Partition("", tuple(document.parts[1:]), virtual_stages=1, schedule="1f1b")
        return replace(made, recompute="always" if again else "never")
    if isinstance(document, TorchExport):
        words = set(document.recompute)
        return Partition(
            "",
            tuple(document.parts[1:]),
            virtual_stages=len(document.stages[0]),
            schedule=document.order,
            recompute=document.recompute[0] if len(words) == 1 else None,
        )
    if isinstance(document, HuggingfaceExport):
        return replace(from_device_map(document.device_map, names, where), virtual_stages=1)
    return _of_trainer(document, names, where)


def _of_trainer(document: ExportDocument, names: Sequence[str], where: str) -> Partition:
    if isinstance(document, LayoutExport):
        made = from_layout(document.layout, names, where, {})
    elif isinstance(document, TorchtitanExport | NemoExport):
        made = from_modules(document.module_fqns_per_model_part, names, where, {})
    else:
        raise partition_error(where, f"files for {document.runtime} are not read")
    return replace(
        made,
        virtual_stages=document.virtual_stages,
        schedule=document.order,
        recompute=document.recompute,
    )
