"""DeepSpeed (https://github.com/deepspeedai/DeepSpeed, 0.19.8): one process a stage and replica.

Its PipelineModule partitions by its own rules only; `build` makes one that takes the plan's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..cost_models.errors import ExportError, MachineError
from ..planner.plan_file import Plan
from .documents import DeepspeedExport, import_package
from .exports import load_document

if TYPE_CHECKING:
    import torch
    from deepspeed.pipe import PipelineModule
    from torch import nn

    from .pipelining.plan_layers import CopiedWeight, StageLayers

__all__ = ["DeepspeedExport", "build", "start"]


def start(device: str, timeout: timedelta | None = None) -> ModuleType:
    """Import DeepSpeed for a kind of device and let the processes find each other.

    On a CPU, DeepSpeed would compile a communication operation of its own first, which takes a minute or
    hangs. gloo works without it. Call this in every process that torchrun or DeepSpeed's launcher started,
    before anything imports DeepSpeed.

    Args:
        device: "cuda" or "cpu".
        timeout: How long a process waits for the others. Defaults to DeepSpeed's.

    Returns:
        The module `deepspeed`.

    Raises:
        MachineError: DeepSpeed is not installed, or no launcher started this process.
    """
    if "LOCAL_RANK" not in os.environ:
        raise MachineError(
            "no launcher started this process: LOCAL_RANK is not set",
            "Start one process for each device: torchrun --nproc-per-node N SCRIPT",
        )
    os.environ["DS_ACCELERATOR"] = device
    deepspeed: ModuleType = import_package("deepspeed", "deepspeed")
    if device == "cpu":
        from .pipelining.runtime_internals import without_compiled_operations

        without_compiled_operations()
    options = {} if timeout is None else {"timeout": timeout}
    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo", **options)
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    return deepspeed


def build(
    source: Plan | DeepspeedExport | str | Path,
    model: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    example_input: object = None,
    *,
    layer_names: Sequence[str] | None = None,
) -> PipelineModule:
    """This process's stage of `model`; call it in every process after `start(device)`.

    `source`: a plan (or its best alternative for DeepSpeed, of which a UserWarning tells), its export, or the
    export's file. `model`: any module, made sequential as `pplan.sequential` does it, or an nn.Sequential of
    the plan's layers. `loss_fn(output, target)` makes the loss of a micro-batch. `example_input`: an input of
    it, of any batch; without one, `model` must be sequential, one contiguous tensor with a gradient crosses
    each cut, and every stage works on a clone of what it is handed (else only those that overwrite it).
    `layer_names`: those of the model's profile, where the model does not know them; an nn.Sequential without
    names must only have as many layers.

    Pass the result to `deepspeed.initialize(model=..., config=..., model_parameters=...)` with the `config`
    of the export. Its `train_batch` takes an iterator over (input, target) of a micro-batch of one replica,
    the input a tensor or the tuple of all tensors of the input.
    Weights that stages share are DeepSpeed's tied modules, one a weight.
    Raises UsageError, FileError; ExportError where the model is not the one of the plan, stages share a
    buffer, the plan is not for DeepSpeed, or a stage has nothing to train, which DeepSpeed's optimizers
    refuse; ModelError as `pplan.sequential` does; MachineError without DeepSpeed, before `start` (or
    `deepspeed.init_distributed()`) or with another number of processes.
    """
    import torch.distributed
    from torch import nn

    from ..profiler.user_model import ModelInput
    from .pipelining.plan_layers import (
        check_equal_buffers,
        find_tied_weights,
        guard_cuts,
        match_layers,
        split_stage,
    )
    from .pipelining.ranks import count_sharers
    from .pipelining.runtime_internals import partitioned_module
    from .pipelining.stage import OutputForm, warn_of_second_runs

    document = load_document(source, DeepspeedExport)
    example = None if example_input is None else ModelInput.of(example_input)
    layers = match_layers(document, model, example, layer_names)
    recomputes = document.recompute == "always"
    if recomputes:
        warn_of_second_runs(layers, "deepspeed")
    tied = find_tied_weights(layers, document.parts)
    _check_parameters(document, layers, tied)
    deepspeed, pipe = (import_package("deepspeed", name) for name in ("deepspeed", "deepspeed.pipe"))
    hint = "Call pplan.runtimes.deepspeed.start(device) or deepspeed.init_distributed() first, in a script "
    count_sharers(document.num_stages, document.replicas, hint=f"{hint}started with torchrun.")
    check_equal_buffers(layers)
    stage = torch.distributed.get_rank() // document.replicas
    stage_layers = split_stage(layers, document.parts, stage, tied)
    first, end = document.parts[stage : stage + 2]
    layers = nn.Sequential(*layers[:first], *stage_layers.layers, *layers[end:])
    form = OutputForm()
    safe = guard_cuts(
        layers,
        document.parts,
        example,
        document.replica_samples,
        packs_all=True,
        recomputes=recomputes,
        form=form,
    )
    tied_modules = partial(_tied_modules, document=document, tied=tied, own=stage_layers)
    kind = partitioned_module(pipe.PipelineModule, document.parts, deepspeed.__version__, tied_modules)
    module: PipelineModule = kind(safe, num_stages=document.num_stages, loss_fn=loss_fn)
    module.planned_stage, module.output_form = stage_layers, form
    return module


def _tied_modules(
    module: Any, *, document: DeepspeedExport, tied: Sequence[CopiedWeight], own: StageLayers
) -> dict[str, dict[str, Any]]:
    """DeepSpeed's record of tied layers, as its PipelineModule keeps them for TiedLayerSpecs: by name, who
    has copies of the weights of this process."""
    import torch

    modules: dict[str, dict[str, Any]] = {}
    for index, weight in enumerate(tied):
        for replica in range(document.replicas):
            ranks = [stage * document.replicas + replica for stage in weight.stages]
            group = torch.distributed.new_group(ranks)
            if module.global_rank in ranks:
                holder = torch.nn.Module()
                holder.register_parameter("weight", own.copies[index])
                own.copies[index].ds_pipe_replicated = module.global_rank != ranks[0]  # type: ignore[attr-defined]
                name = f"tied_{index}"
                module.tied_modules[name], module.tied_weight_attrs[name] = holder, ["weight"]
                modules[name] = {"ranks": ranks, "group": group, "weight_attr": ["weight"], "module": holder}
    return modules


def _check_parameters(document: DeepspeedExport, model: nn.Sequential, tied: Sequence[CopiedWeight]) -> None:
    for stage, (first, end) in enumerate(pairwise(document.parts)):
        parameters = [parameter for layer in model[first:end] for parameter in layer.parameters()]
        parameters += [weight.parameter for weight in tied if stage in weight.stages]
        if not any(parameter.requires_grad for parameter in parameters):
            raise ExportError(
                f"stage {stage} (layers {first} to {end - 1}) has nothing to train: "
                "DeepSpeed's optimizers refuse an empty list",
                "Make a plan with fewer stages: pplan.solve(runtime='deepspeed', gpus=N)",
            )
