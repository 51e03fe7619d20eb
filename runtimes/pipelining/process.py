"""One process of a pipeline: its stages, their schedule, and a step of both."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from ...cost_models.errors import ExportError, UsageError
from ...cost_models.memory import count_first_layers
from ...cost_models.runtime import OFFLOAD
from ...profiler.user_model import ModelInput
from ..documents import TorchExport
from ..torch_actions import OWN_ORDER, splits_backward
from .plan_layers import (
    StageLayers,
    TiedGradients,
    check_equal_buffers,
    check_groups,
    find_tied_weights,
    match_layers,
    names_of_copies,
    split_stage,
    tie_stages,
)
from .ranks import (
    RankCoordinates,
    Replicate,
    TensorPlan,
    average_gradients,
    find_coordinates,
    make_mesh,
    replicate_stage,
    share_matrices,
    styles_by_module,
    tensor_dimension,
)
from .runtime_internals import Stage, load_order
from .stage import (
    CONSTANTS,
    InputForm,
    LossPart,
    Samples,
    StageLoss,
    StageModule,
    StageShapes,
    map_samples,
    names_in_stage,
    take_rows,
    trace_shapes,
    written_buffers,
)

_SCHEDULES = (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti)


@dataclass(frozen=True, eq=False)
class PipelineProcess:
    """What one process trains.

    `modules` are the layers of its stages, by stage; `wrapped` the same as the schedule runs them, inside
    DistributedDataParallel or sharded where there are replicas. `schedule` is PyTorch's, for `eval` say.
    """

    document: TorchExport
    device: torch.device
    coordinates: RankCoordinates
    modules: dict[int, nn.Sequential]
    wrapped: dict[int, nn.Module]
    schedule: Any
    form: InputForm
    averages: bool
    """Whether `step` averages the gradients over the replicas, and not the wrapped modules."""
    stages: list[PipelineStage]
    """PyTorch's, which `schedule` runs."""
    stage_layers: dict[int, StageLayers]
    """Tensors of the model in each stage of the process."""
    tied: TiedGradients
    """Copies of weights that other stages use, too: `step` adds up their gradients."""
    loss: StageLoss | None
    """Loss of the last stage. None if another process has that stage."""

    @property
    def seat(self) -> RankCoordinates:
        """`coordinates`, as scripts of earlier versions call it."""
        warnings.warn("`seat` is called `coordinates`", DeprecationWarning, stacklevel=2)
        return self.coordinates

    @property
    def is_first(self) -> bool:
        """Whether it is to be given the input."""
        return 0 in self.modules

    @property
    def is_last(self) -> bool:
        """Whether it is to be given the target, and knows the losses."""
        return len(self.document.parts) - 2 in self.modules

    @property
    def samples(self) -> int:
        """Samples of a step of this process: the global batch, or its replica's part of it."""
        return self.document.mini_batch // self.document.replicas

    def parameters(self) -> list[nn.Parameter]:
        """The parameters to optimise; a process whose stages have none needs no optimizer."""
        parameters = (parameter for module in self.wrapped.values() for parameter in module.parameters())
        return [parameter for parameter in parameters if parameter.requires_grad]

    def share(self, whole: Any) -> Any:
        """This replica's samples of a global batch: its part of each micro-batch.

        Args:
            whole: The input or the target: a tensor, or tuples, lists and dicts of tensors in any nesting.
                Dimension 0 of every tensor is the global batch. Tensors that all samples share, as in the
                example input, and None, numbers and texts stay as they are.

        Returns:
            The same structure.

        Raises:
            UsageError: It holds something else, or not as many samples as the plan's global batch.
        """
        document = self.document

        def pick(tensor: Tensor) -> Tensor:
            parts = tensor.reshape(
                document.micro_batches, document.replicas, document.replica_samples, *tensor.shape[1:]
            )
            return parts[:, self.coordinates.replica].reshape(self.samples, *tensor.shape[1:])

        return map_samples(
            pick,
            whole,
            "the global batch",
            Samples.of_plan(document.mini_batch),
            form=self.form,
            constants=CONSTANTS,
        )

    def step(self, input: object = None, target: object = None) -> list[Tensor]:
        """Run forward and backward of a global batch.

        Gradients are added to what is there. Where stages share a weight, each has its gradients of
        all of them after the step: set them to None before it.

        Args:
            input: The arguments of the model, as the example input. Read where `is_first`.
            target: A tensor, or tuples, lists and dicts of tensors in any nesting. The loss function is given
                a micro-batch of it in the same structure. Read where `is_last`.

        Returns:
            The loss of each micro-batch where `is_last`, else nothing.

        Raises:
            UsageError: The input or the target does not hold `samples` samples, or has another structure.
        """
        return self.train_parts(input, self._cut_target(target))

    def train_parts(self, input: object, parts: Sequence[LossPart]) -> list[Tensor]:
        """Run forward and backward of this replica's samples, whose micro-batches count in the loss as the
        `parts` say, and add up the gradients; see `step`."""
        losses = self.run_parts(self.schedule.step, input, parts)
        if self.averages and self.coordinates.replicas is not None:
            average_gradients(self.parameters(), self.coordinates.replicas)
        self.tied.add_up()
        return losses

    def eval(self, input: object = None, target: object = None) -> list[Tensor]:
        """Run the forward of a global batch alone, without gradients; see `step`.

        The layers stay in the mode they are in: call `eval()` of `modules` first for evaluation mode.
        """
        with torch.no_grad():
            return self.run_parts(self.schedule.eval, input, self._cut_target(target))

    def run_parts(self, run: Callable[..., object], input: object, parts: Sequence[LossPart]) -> list[Tensor]:
        """Return the losses of the micro-batches that PyTorch's schedule runs."""
        count = self.document.micro_batches
        tensors: tuple[Tensor, ...] = ()
        options: dict[str, Any] = {"return_outputs": False}
        losses: list[Tensor] = []
        if self.is_first:
            batch = ModelInput.of(input, "the global batch").to(self.device)
            tensors = self.form.repeat_shared(batch, self.samples, count)
        if self.loss is None:
            run(*tensors, **options)
            return losses
        self.loss.parts = parts
        try:
            run(*tensors, **options, target=torch.arange(count), losses=losses)
        finally:
            self.loss.parts = None
        return [loss.detach() for loss in losses]

    def _cut_target(self, target: object) -> list[LossPart]:
        """The target of each micro-batch, on this device."""
        if self.loss is None:
            return []
        count, share = self.document.micro_batches, self.loss.share
        whole = map_samples(
            lambda tensor: tensor.to(self.device),
            target,
            "the target",
            Samples.of_process(self.samples),
        )
        size = self.samples // count
        rows = [slice(number * size, (number + 1) * size) for number in range(count)]
        return [LossPart(take_rows(whole, own), share=share) for own in rows]


def build_process(
    document: TorchExport,
    model: nn.Module,
    example_input: object,
    loss_fn: Callable[..., Tensor],
    *,
    device: torch.device | str | None,
    mesh: DeviceMesh | None,
    replicate: Replicate,
    sum_losses: bool,
    layer_names: Sequence[str] | None,
    tensor_parallel: TensorPlan | None,
) -> PipelineProcess:
    """See `pplan.runtimes.torch_pipelining.build`."""
    example = ModelInput.of(example_input)
    layers = match_layers(document, model, example, layer_names)
    tied = find_tied_weights(layers, document.parts)
    check_groups(layers, len(document.stages))
    check_equal_buffers(layers)
    place = _device(document) if device is None else torch.device(device)
    if tensor_parallel is not None and OFFLOAD in document.recompute:
        raise UsageError(
            "tensor_parallel: a stage offloads to the host's memory what it saves for backward, which is not "
            "done with shared matrices",
            "Omit tensor_parallel, or make the plan with recompute='auto'.",
        )
    mesh = mesh or make_mesh(document, place.type, shares=tensor_parallel is not None)
    coordinates = find_coordinates(mesh, document)
    styles = {} if tensor_parallel is None else styles_by_module(layers, tensor_parallel)
    form = InputForm.of(example)
    first_inputs = form.micro_batch(example, document.replica_samples)
    splits = splits_backward(document.actions)
    shapes = trace_shapes(layers, document.parts, first_inputs, form, splits_backward=splits, device=place)
    written = written_buffers(layers)
    stage_layers = {
        stage: split_stage(layers, document.parts, stage, tied)
        for stage in document.stages[coordinates.index]
    }
    stages = {
        stage: _stage_module(document, stage_layers[stage].layers, stage, shapes, form, written)
        for stage in stage_layers
    }
    wrapped: dict[int, nn.Module] = {stage: module.to(place) for stage, module in stages.items()}
    if tensor_parallel is not None:
        _check_tensor_parallel(tied, coordinates, replicate)
        for own in stages.values():
            share_matrices(own.layers, styles, tensor_dimension(mesh))
    averages = replicate == "ddp" and splits
    device_of = {
        stage: device for device, device_stages in enumerate(document.stages) for stage in device_stages
    }
    gradients = tie_stages(tied, wrapped, stage_layers, coordinates, device_of, sharded=replicate == "fsdp")
    if coordinates.replicas is not None:
        wrapped = {
            i: replicate_stage(
                module,
                coordinates.replicas,
                replicate,
                splits_backward=splits,
                apart=names_of_copies(tied, i, module, stage_layers[i]),
            )
            for i, module in wrapped.items()
        }
    count, group = len(document.parts) - 1, coordinates.pipeline
    shape_arguments: list[dict[str, Any]] = [{}] * count
    if shapes is not None:
        shape_arguments = [{"input_args": shape.inputs, "output_args": shape.outputs} for shape in shapes]
    pipeline_stages: list[PipelineStage] = [
        Stage(module, stage, count, place, group=group, **shape_arguments[stage])
        for stage, module in wrapped.items()
    ]
    last = stages.get(count - 1)
    # Each loss counts by its share: to divide the gradients after the step is one more pass over all.
    share = 1.0 if sum_losses else 1 / document.micro_batches
    loss = None if last is None else StageLoss(last.output_form, loss_fn, share)
    schedule = _schedule(document, pipeline_stages, loss or loss_fn)
    modules = {stage: module.layers for stage, module in stages.items()}
    return PipelineProcess(
        document,
        place,
        coordinates,
        modules,
        wrapped,
        schedule,
        form,
        averages,
        pipeline_stages,
        stage_layers,
        gradients,
        loss,
    )


def _check_tensor_parallel(
    tied: Sequence[object], coordinates: RankCoordinates, replicate: Replicate
) -> None:
    """Raises UsageError for what is not done with shared matrices."""
    if tied:
        raise UsageError(
            "tensor_parallel: the stages share weights, whose copies are added up whole",
            "Omit tensor_parallel, or keep the layers that share weights on one stage.",
        )
    if coordinates.replicas is not None and replicate != "fsdp":
        raise UsageError(
            f"tensor_parallel with replicas and replicate={replicate!r}",
            "Give replicate='fsdp', which shards what tensor parallelism leaves of a matrix.",
        )


def _device(document: TorchExport) -> torch.device:
    """The plan's for this rank, by its number on its node; the CPU without CUDA, and for gloo."""
    if not (torch.cuda.is_available() and dist.is_initialized()) or dist.get_backend() == "gloo":
        return torch.device("cpu")
    rank = dist.get_rank()
    number = document.devices[rank] if rank < len(document.devices) else rank
    return torch.device("cuda", number % (document.gpus_per_node or torch.cuda.device_count()))


def _stage_module(
    document: TorchExport,
    layers: nn.Sequential,
    stage: int,
    shapes: Sequence[StageShapes] | None,
    form: InputForm,
    written: Sequence[Tensor],
) -> StageModule:
    end, word = document.parts[stage + 1], document.recompute[stage]
    first = count_first_layers(word)
    module = StageModule(
        layers,
        None if shapes is None else shapes[stage].crossings,
        recompute=(len(layers) if word == "always" else 0) if first is None else first,
        written=names_in_stage(layers, written),
        offloads=word == OFFLOAD,
        outputs=None if shapes is None else shapes[stage].outputs,
        form=form if stage == 0 else None,
        is_last=end == document.parts[-1],
    )
    module.is_told_nothing = shapes is None
    return module


def _schedule(document: TorchExport, stages: list[PipelineStage], loss: Callable[..., Tensor]) -> Any:
    """PyTorch's schedule of the class that the document names, with its order where it has none."""
    kind = getattr(schedules, document.schedule, None)
    if not (isinstance(kind, type) and issubclass(kind, _SCHEDULES)):
        raise ExportError(
            f"schedule {document.schedule!r} is no class of torch.distributed.pipelining.schedules",
            f"This PyTorch is {torch.__version__}; make the file again with pplan export torch.",
        )
    stage_argument: Any = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
    make: Any = kind
    schedule = make(stage_argument, document.micro_batches, loss_fn=loss, scale_grads=False)
    if document.schedule == OWN_ORDER:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "schedule.csv"
            path.write_text(document.csv)
            load_order(schedule, path)
    return schedule
