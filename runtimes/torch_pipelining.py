"""torch.distributed.pipelining: one process a device, with its stages of the model and their schedule.

`build` makes them of the plan's layers. `split_spec` has the cuts for torch's own `pipeline()`, which traces
the model as it is: it names submodules to cut in front of, so only cuts before a submodule that is a layer of
its own, and is called once, can be told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cost_models.errors import ExportError, UsageError
from ..planner.plan_file import Plan
from .documents import TorchExport, check_names
from .exports import load_document

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.pipelining import SplitPoint

    from ..profiler.layer import LayerChain
    from .pipelining.process import PipelineProcess
    from .pipelining.ranks import TensorPlan

__all__ = ["TorchExport", "build", "split_spec"]


def build(
    source: Plan | TorchExport | str | Path,
    model: nn.Module,
    *,
    example_input: object,
    loss_fn: Callable[..., torch.Tensor],
    device: torch.device | str | None = None,
    mesh: DeviceMesh | None = None,
    replicate: Literal["ddp", "fsdp"] | None = None,
    sum_losses: bool = False,
    layer_names: Sequence[str] | None = None,
    tensor_parallel: TensorPlan | None = None,
) -> PipelineProcess:
    """This process's stages of `model`, ready to train; call it in every process after
    `torch.distributed.init_process_group()`.

    `source`: a plan, its export, or the export's file. `model`: any module, made sequential as
    `pplan.sequential` does it, or what that returned; `example_input` is an input of it, of any batch. A
    stage that overwrites what it is handed works on a clone. Recomputation is torch.utils.checkpoint's.
    `loss_fn(output, target)` makes the loss of a micro-batch. The step's gradients are those of the mean of
    these losses, or with `sum_losses` of their sum, averaged over replicas.
    `device`: this process's; by default the plan's CUDA device of this rank, or the CPU. `mesh`: dimensions
    "pp" and, with replicas, "dp"; by default made of all processes, those of a stage side by side.
    `replicate`: how replicas share gradients, by DistributedDataParallel or FSDP2's fully_shard; None: by the
    latter where the plan spreads states over them (zero 1).
    `layer_names`: those of the model's profile, where the model does not know them.
    `tensor_parallel`: modules whose matrices several processes share, with "colwise", "rowwise" or another
    style of torch.distributed.tensor.parallel, by their names with wildcards: for a model of transformers
    `model.config.base_model_tp_plan`. The processes of `mesh`'s dimension "tp" share them; by default as many
    as there are for each device of the plan. All of them are to be given the same samples.

    Raises UsageError, FileError; ExportError where the model is not the one of the plan or stages share
    parameters; ModelError as `pplan.sequential` does; MachineError before `init_process_group()` or with
    another number of processes.
    """
    from .pipelining.process import build_process

    document = load_document(source, TorchExport)
    replication = replicate or ("fsdp" if document.zero else "ddp")
    if document.zero and replication != "fsdp":
        raise UsageError(
            f"replicate {replicate!r} with a plan of zero {document.zero}: it spreads nothing over replicas",
            "Omit replicate, or make a plan with zero=0.",
        )
    return build_process(
        document,
        model,
        example_input,
        loss_fn,
        device=device,
        mesh=mesh,
        replicate=replication,
        sum_losses=sum_losses,
        layer_names=layer_names,
        tensor_parallel=tensor_parallel,
    )


def split_spec(
    source: Plan | TorchExport | str | Path, model: nn.Module, example_input: object
) -> dict[str, SplitPoint]:
    """`{name of the first submodule of a stage: SplitPoint.BEGINNING}`, for every stage but the first.

    `source`: a plan, its export for torch, or the export's file. `example_input`: as of `pplan.sequential`.
    `pipeline(model, micro_batch, split_spec=...)` then has the plan's stages, in its order.

    Raises UsageError, FileError, ModelError; ExportError where the model is not the plan's, or a stage begins
    where there is no submodule of its own.
    """
    from torch.distributed.pipelining import SplitPoint

    from ..profiler.layers import build_chain

    document = load_document(source, TorchExport)
    chain = build_chain(model, example_input, granularity=document.granularity, verify=True)
    names = [layer.name for layer in chain.layers]
    check_names(document, len(names), names, chain.model_name)
    return {_first_module(chain, first): SplitPoint.BEGINNING for first in document.parts[1:-1]}


def _first_module(chain: LayerChain, first: int) -> str:
    layer: Any = chain.layers[first]
    uses = [other.path for other in chain.layers].count(layer.path)
    if layer.path is not None and uses == 1:
        return str(layer.path)
    if layer.path is None:
        why = f"layer {first}, {layer.name}, is no submodule of {chain.model_name}"
    else:
        why = f"layer {first}, {layer.path}, is called {uses} times in {chain.model_name}"
    raise ExportError(
        f"a stage begins with what pipeline() cannot be told: {why}",
        "Train it with pplan.runtimes.torch_pipelining.build, or cut in front of submodules: "
        "pplan.profile(granularity='module:PATTERN'), with the names of those that may begin a stage.",
    )
