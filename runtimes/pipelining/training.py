"""Training by a plan: one object with the same methods for every runtime that pplan builds.

The loss of a step is that of the whole global batch. With `loss_reduction="mean"` the loss function returns
the mean over the samples of a micro-batch, and every sample counts the same. With "sum" it returns a sum, of
the losses of all valid labels say, and `step` divides by a `divisor` that counts them in the whole batch.
Then micro-batches with unequal numbers of valid labels, or none, count as in the plain model. (A mean over no
labels is NaN; it counts as zero where the output is finite.)

A last batch with fewer samples is filled up by repeating its samples where stages are processes; what is
repeated counts in no loss and no output (but in the statistics of batch norms).
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ...cost_models.errors import UsageError
from ...profiler.torch_private import tree_flatten, tree_leaves, tree_unflatten
from ...profiler.user_model import ModelInput
from ..documents import BuiltExport, DeepspeedExport, PipeExport, TorchExport
from ..loggers import Logger, make_logger
from .batch_norms import join_batch_norms
from .checkpoints import (
    TAG,
    ModelTensors,
    TrainingState,
    find_checkpoint,
    read_about,
    read_checkpoint,
    replace_folder,
    write_checkpoint,
)
from .plan_layers import match_layers, prepare_pipe
from .process import PipelineProcess
from .runtime_internals import take_step, wrap_instructions
from .stage import (
    CONSTANTS,
    InputForm,
    Loss,
    LossPart,
    OutputForm,
    Samples,
    StageLoss,
    map_samples,
    take_rows,
)

Reduction = Literal["mean", "sum"]
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def build_training(
    document: BuiltExport,
    model: nn.Module,
    loss_fn: Loss | None,
    example_input: object,
    *,
    optimizer: MakeOptimizer | None = None,
    loss_reduction: Reduction = "mean",
    device: str | None = None,
    layer_names: Sequence[str] | None = None,
    sync_batch_norm: bool = False,
    builders: Mapping[str, Callable[..., Any]],
    start: Callable[[str], object],
    **options: Any,
) -> Training:
    """See `pplan.runtimes.training.build`.

    `builders`: those of the runtimes whose stages are processes. `start`: it initializes DeepSpeed.
    """
    if loss_reduction not in ("mean", "sum"):
        raise UsageError(f"loss_reduction={loss_reduction!r} is unknown", "Use 'mean' or 'sum'.")
    kind = {"torch": TorchTraining, "deepspeed": DeepspeedTraining}.get(document.runtime, PipeTraining)
    example = ModelInput.of(example_input)
    loss = loss_fn or _returned_loss
    if loss_fn is not None and loss_reduction == "mean" and kind is not PipeTraining:
        loss = _without_nan(loss_fn)
    layers = match_layers(document, model, example, layer_names)
    training: Training = kind(
        document,
        ModelTensors(model, layers),
        InputForm.of(example),
        StageLoss(OutputForm(), loss),
        loss_reduction,
    )
    training.returns_loss = loss_fn is None
    training.make_optimizer, training.start_deepspeed = optimizer, start
    training.build_stages = builders.get(document.runtime)
    training.construct(layers, example, device, **options)
    if sync_batch_norm and training.groups.replicas is not None:
        join_batch_norms(training.modules, training.groups.replicas)
    if optimizer is not None and not training.has_optimizer:
        training.optimizer = optimizer([{"params": training.parameters()}])
    return training


def _returned_loss(output: Any, target: object) -> Tensor:
    """The loss that the model returned."""
    del target
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    scalars = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not leaf.dim()]
    if isinstance(loss, Tensor):
        return loss
    if len(scalars) != 1:
        raise UsageError(
            f"the model's output holds {len(scalars)} scalars, and no loss by that name",
            "Give a `loss_fn` that makes the loss of an output and a target.",
        )
    return scalars[0]


def _without_nan(loss_fn: Loss) -> Loss:
    """A mean loss that is zero for a micro-batch without valid labels."""

    def loss_of(output: Any, target: Any) -> Tensor:
        loss = loss_fn(output, target)
        sums = [
            leaf.detach().sum(dtype=torch.float32)
            for leaf in tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        is_empty = loss.isnan() & torch.stack([own.to(loss.device) for own in sums]).isfinite().all()
        return torch.where(is_empty, torch.zeros_like(loss), loss)

    return loss_of


@dataclass(frozen=True, eq=False)
class NamedTensor:
    """A tensor of this process: its names in the model, and where it is now."""

    names: tuple[str, ...]
    layer: nn.Module
    key: str
    is_copy: bool
    """Whether an earlier stage has the weight, too."""

    @property
    def value(self) -> Tensor:
        """The tensor, or the part of it that this process has (DTensor)."""
        module, _, name = self.key.rpartition(".")
        value: Tensor = getattr(self.layer.get_submodule(module), name)
        return value


@dataclass(frozen=True)
class TrainingGroups:
    """Processes of a job: of this pipeline, and of the replicas of this process; None where it has no others.

    `last`: number of the process in the pipeline that has the last stage.
    """

    pipeline: dist.ProcessGroup | None = None
    last: int = 0
    replicas: dist.ProcessGroup | None = None
    replica: int = 0

    def broadcast(self, value: Tensor) -> Tensor:
        """Return the value that the last stage has."""
        if self.pipeline is not None:
            dist.broadcast(value, group=self.pipeline, group_src=self.last)
        return value

    def gather(self, value: Any, group: dist.ProcessGroup | None) -> list[Any]:
        """Return the values of all processes of a group."""
        if group is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values


class StepLog:
    """The lines of a training. `logger`: None in processes that write none."""

    def __init__(self, logger: Logger | None, every: int) -> None:
        self.logger, self.every = logger, every
        self._steps, self._line, self._since = 0, 0, time.perf_counter()

    def is_due(self) -> bool:
        """Count a step; return whether a line is to be written."""
        self._steps += 1
        return self._steps % self.every == 0

    def write(self, loss: float, predicted_seconds: float, peaks: Sequence[int | None]) -> None:
        """Write a line; the first says no seconds: its steps were slower."""
        now, since, self._line = time.perf_counter(), self._since, self._line + 1
        self._since = now
        if self.logger is None:
            return
        scalars = {"loss": loss, "step/predicted_seconds": predicted_seconds}
        if self._line > 1:
            scalars["step/measured_seconds"] = (now - since) / self.every
        scalars |= {f"memory/process_{i}_bytes": peak for i, peak in enumerate(peaks) if peak is not None}
        self.logger(self._steps, scalars)


class Training(ABC):
    """A model that is trained by a plan; use `build` to make one.

    `step` runs forward and backward, `optimizer.step()` updates. Methods are called by all processes of a
    job with the same arguments; every process is given the whole global batch.
    """

    optimizer: torch.optim.Optimizer
    """Optimizer of the parameters of this process. Unset if `build` was given none."""
    make_optimizer: MakeOptimizer | None = None
    build_stages: Callable[..., Any] | None = None
    start_deepspeed: Callable[[str], object]
    returns_loss = False
    """Whether the model returns its loss."""
    device: torch.device
    """The device of the loss; where stages are processes, of this process."""
    modules: Sequence[nn.Module]
    """The stages of this process as they are run, in order."""
    is_first = True
    """Whether this process reads the input."""
    is_last = True
    """Whether this process computes the output and the loss."""

    def __init__(
        self,
        document: BuiltExport,
        tensors: ModelTensors,
        form: InputForm,
        loss: StageLoss,
        reduction: Reduction,
    ) -> None:
        self.document, self.tensors, self.form, self.loss = document, tensors, form, loss
        self.reduction, self.groups = reduction, TrainingGroups()
        self._tensors: list[NamedTensor] = []
        self._starts_distributed = False
        self._autocast = {kind: _autocast_dtype(kind) for kind in ("cpu", "cuda")}
        self._dtype: torch.dtype | None = None
        self._log: StepLog | None = None

    @abstractmethod
    def construct(
        self,
        layers: nn.Sequential,
        example: ModelInput,
        device: str | None,
        **options: Any,
    ) -> None:
        """Build what this process trains."""

    @property
    def is_main(self) -> bool:
        """Return True in one process of the job, which prints."""
        return not dist.is_initialized() or dist.get_rank() == 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this process, by their first names in the model."""
        for tensor in self._tensors:
            if isinstance(tensor.value, nn.Parameter):
                yield tensor.names[0], tensor.value

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this process that are trained, each once."""
        parameters = {id(own): own for _, own in self.named_parameters() if own.requires_grad}
        return list(parameters.values())

    def step(
        self,
        input: object,
        target: object = None,
        *,
        divisor: float | Tensor | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Tensor:
        """Run forward and backward of a global batch. Gradients are those of this step alone.

        Args:
            input: The arguments of the model, as the example input.
            target: A tensor, or tuples, lists and dicts of tensors in any nesting; or None.
            divisor: What a loss that is a sum is divided by, the valid labels of the batch for instance.
                Defaults to the number of samples.
            scaler: It scales the loss. Call its `unscale_`, `step` and `update` afterwards as always: it
                finds an overflow of any process in all of them.

        Returns:
            The loss of the global batch, in every process.

        Raises:
            UsageError: The batch holds more samples than the plan's, or has another structure.
        """
        samples = self._count(input)
        self._forget_gradients()
        weight = self._weight(samples, divisor)
        factor = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.device))
        self.loss.total = 0.0
        with self._precision():
            self._train(input, target, samples, weight, factor)
        if scaler is not None:
            self._share_overflow()
        total = self._total()
        self._log_step(total)
        return total

    def log_to(self, logger: str | Logger, *, every: int = 10) -> None:
        """Log the loss, the step's seconds as measured and as the plan predicts, and peak memory.

        Seconds are those between steps, the update included. Memory is that of CUDA's allocator, by process
        of this pipeline.

        Args:
            logger: "tensorboard:FOLDER", "wandb", "wandb:PROJECT", "mlflow", or what is called with the
                number of a step and its scalars by name. The main process writes.
            every: Steps from one line to the next, of which means are taken.

        Raises:
            UsageError: The name is unknown.
            MachineError: The package is not installed.
        """
        write = make_logger(logger) if isinstance(logger, str) and self.is_main else logger
        self._log = StepLog(write if callable(write) else None, every)

    def _log_step(self, loss: Tensor) -> None:
        if self._log is None or not self._log.is_due():
            return
        is_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if is_cuda else None
        peaks = self.groups.gather(peak, self.groups.pipeline)
        self._log.write(loss.item(), self.document.step_seconds, peaks)

    def eval(self, input: object, target: object = None, *, divisor: float | Tensor | None = None) -> Any:
        """Run the forward of any number of samples in evaluation mode, without gradients.

        Args:
            input: As of `step`, of any number of samples.
            target: As of `step`. None: the output is returned.
            divisor: As of `step`.

        Returns:
            With a target, or where the model returns its loss: the loss of the batch, in every process.
            Else the output where `is_last`, and None in the other processes.
        """
        samples, most = self.form.samples(input), self.document.mini_batch
        modes = [(part, part.training) for module in self.modules for part in module.modules()]
        for module in self.modules:
            module.eval()
        outputs: list[Any] = []
        self.loss.total = 0.0
        try:
            with torch.no_grad(), self._precision():
                for start in range(0, samples, most):
                    count = min(most, samples - start)
                    rows = torch.arange(start, start + count)
                    part = input if count == samples else self._pick(input, rows, samples)
                    self._count(part)
                    self.loss.outputs = None if self.returns_loss else []
                    outputs += self._evaluate(part, count, self._weight(samples, divisor))
                if target is None and not self.returns_loss:
                    return _join(outputs) if self.is_last else None
                if self.is_last and not self.returns_loss:
                    whole = map_samples(self._move, target, "the target", _samples(samples))
                    weight = self._weight(samples, divisor) * (samples if self.reduction == "mean" else 1)
                    self.loss.total = self.loss.loss_fn(_join(outputs), whole).detach() * weight
        finally:
            self.loss.outputs = None
            for part, mode in modes:
                part.training = mode
        return self._total(shared=not self.returns_loss)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole model by their norm.

        Args:
            max_norm: The largest norm.
            norm_type: The p of the norm; may be infinite.

        Returns:
            The norm before clipping, of all stages and shards. A weight that stages share counts once.
        """
        counted = {id(tensor.value): tensor.value for tensor in self._tensors if not tensor.is_copy}
        gradients = [own.grad for own in counted.values() if own.grad is not None]
        parts = [torch.linalg.vector_norm(gradient, norm_type) for gradient in gradients]
        norms = [part.full_tensor() if isinstance(part, DTensor) else part for part in parts]
        everywhere = torch.stack([norm.to(self.device) for norm in norms or [torch.zeros(())]])
        norm = torch.linalg.vector_norm(everywhere.double(), norm_type)
        if self.groups.pipeline is not None:
            is_largest = math.isinf(norm_type)
            power = norm if is_largest else norm**norm_type
            how = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
            dist.all_reduce(power, how, group=self.groups.pipeline)
            norm = power if is_largest else power ** (1 / norm_type)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.device, parameter.grad.dtype))
        result: Tensor = norm.to(everywhere.dtype)
        return result

    def state_dict(self) -> dict[str, Tensor]:
        """Return the weights and buffers of the whole model by its own names, on the CPU, in every process.

        `save` keeps large models in parts instead.
        """
        local = {name: own.cpu() for name, own in self.local_state(whole=True).items()}
        merged: dict[str, Tensor] = {}
        for part in self.groups.gather(local, self.groups.pipeline):
            merged |= part
        return {name: merged[name] for name in self.tensors.shapes}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights and buffers from a state dict of the plain model.

        Raises:
            UsageError: It lacks a name, has another one, or a tensor of another shape.
        """
        shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}
        names = shapes | self.tensors.shapes
        wrong = sorted(name for name in names if shapes.get(name) != self.tensors.shapes.get(name))
        if wrong:
            other, own = (table.get(wrong[0], "not there") for table in (shapes, self.tensors.shapes))
            raise UsageError(
                f"the state dict is not {self.tensors.model}'s: {wrong[0]} is {other}, the model's is {own}",
                "Give the state_dict() of the same model.",
            )
        with torch.no_grad():
            for tensor in self._tensors:
                value, loaded = tensor.value, state[tensor.names[0]]
                if isinstance(value, DTensor):
                    loaded = distribute_tensor(loaded.to(self.device), value.device_mesh, value.placements)
                value.copy_(loaded)
            for name, unused in self.tensors.unused.items():
                unused.copy_(state[name])

    def local_state(self, *, whole: bool = False) -> dict[str, Tensor]:
        """Return the weights and buffers of this process by their names in the model.

        Args:
            whole: Gather those that processes have parts of. Then all replicas call it.
        """
        state = dict(self.tensors.unused)
        for tensor in self._tensors:
            value = tensor.value.detach()
            gathered = value.full_tensor() if whole and isinstance(value, DTensor) else value
            state |= dict.fromkeys(tensor.names, gathered)
        return state

    @property
    def has_optimizer(self) -> bool:
        """Whether `optimizer` is set."""
        return hasattr(self, "optimizer")

    def save(self, path: str | Path, **progress: Any) -> None:
        """Write weights and optimizer state to a folder that all processes see.

        A plan with another number of stages reads them with `load`, and the plain model with
        torch.distributed.checkpoint, under the keys "model" and "optimizer". A checkpoint that is there is
        replaced when the new one is whole.

        Args:
            path: The folder.
            progress: Values of JSON that `load` returns: `step=10`, `scheduler=scheduler.state_dict()`.
        """
        write_checkpoint(self._state(), Path(path), progress)

    def has_checkpoint(self, path: str | Path) -> bool:
        """Return whether `load` finds a checkpoint: the folder, or where a save was interrupted NAME.old."""
        return find_checkpoint(Path(path)).exists()

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read what `save` wrote, with any number of stages, or what the plain model wrote.

        If a save was interrupted after it moved the earlier checkpoint away, that one is read: NAME.old.

        Returns:
            The progress that was saved.

        Raises:
            FileError: No checkpoint is there, or it is of another model.
        """
        progress = read_checkpoint(self._state(), find_checkpoint(Path(path)))
        loaded = {tensor.names: tensor for tensor in self._tensors}  # of several copies, the last
        with torch.no_grad():
            for tensor in self._tensors:
                if tensor is not loaded[tensor.names]:
                    tensor.value.copy_(loaded[tensor.names].value)
        return progress

    def close(self) -> None:
        """End the threads and process groups that `build` began."""
        gc.collect()
        if self._starts_distributed and dist.is_initialized():
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @abstractmethod
    def _train(
        self, input: object, target: object, samples: int, weight: float | Tensor, factor: float | Tensor
    ) -> None:
        """Run forward and backward; a loss (of a sample, where it is a mean) counts by `weight`, and its
        gradient by `factor` besides."""

    @abstractmethod
    def _evaluate(self, input: object, samples: int, weight: float | Tensor) -> list[Any]:
        """Return the outputs of at most a global batch, in parts, where `is_last`; or none, and the losses of
        a model that returns them, which count by `weight`, are in `loss.total`."""

    def _state(self) -> TrainingState:
        optimizer = self.optimizer if self.has_optimizer else None
        parameters = list(self.named_parameters())
        return TrainingState(self.tensors, self.local_state(), parameters, optimizer, self.is_main)

    def _forget_gradients(self) -> None:
        for parameter in self.parameters():
            parameter.grad = None

    def _name(self, layers: Sequence[nn.Module], origins: Sequence[Mapping[str, tuple[int, bool]]]) -> None:
        """Remember the model's names of the tensors of layers that this process has."""
        self._tensors += [
            NamedTensor(self.tensors.names[origin], layer, key, is_copy)
            for layer, keys in zip(layers, origins, strict=True)
            for key, (origin, is_copy) in keys.items()
            if origin in self.tensors.names
        ]

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """The autocast of the caller, or else that of `build`."""
        kind = self.device.type
        self._dtype = _autocast_dtype(kind) or self._autocast.get(kind)
        with self._stage_precision():
            yield

    def _stage_precision(self) -> AbstractContextManager[Any]:
        """The autocast of the step that runs, in any thread."""
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, self._dtype)

    def _count(self, input: object) -> int:
        samples, most = self.form.samples(input), self.document.mini_batch
        if samples > most:
            raise UsageError(
                f"the batch holds {samples} samples, the plan's {most}",
                f"Give the DataLoader batch_size={most}.",
            )
        if samples < most and self.returns_loss and not isinstance(self.document, PipeExport):
            raise UsageError(
                f"the batch holds {samples} samples, the plan's {most}, and the model returns its own loss",
                "Give the DataLoader drop_last=True, or compute the loss in a `loss_fn`.",
            )
        return samples

    def _weight(self, samples: int, divisor: float | Tensor | None) -> float | Tensor:
        """Return the factor of the loss of a sample, or of the sum. Raises UsageError."""
        if divisor is None:
            return 1 / samples
        if self.reduction == "mean" or not float(divisor) > 0:
            raise UsageError(
                f"divisor={float(divisor):g} with loss_reduction={self.reduction!r}",
                "Give a positive one, and build with loss_reduction='sum'.",
            )
        return 1 / float(divisor)

    def _pick(self, input: object, rows: Tensor, samples: int) -> Any:
        return map_samples(
            lambda tensor: tensor[rows.to(tensor.device)],
            input,
            "the input",
            _samples(samples),
            form=self.form,
            constants=CONSTANTS,
        )

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def _total(self, *, shared: bool = False) -> Tensor:
        """The loss of all replicas, in every process. `shared`: every replica knows it."""
        # The other processes do not know the dtype.
        total = torch.as_tensor(self.loss.total, dtype=torch.float64, device=self.device)
        if self.is_last and not shared and self.groups.replicas is not None:
            dist.all_reduce(total, group=self.groups.replicas)
        return self.groups.broadcast(total)

    def _share_overflow(self) -> None:
        """Let an infinite gradient of one process stand in all: their scalers then do the same."""
        if self.groups.pipeline is None:
            return
        gradients = [own.grad for own in self.parameters() if own.grad is not None]
        local = [own.to_local() if isinstance(own, DTensor) else own for own in gradients]
        finite = [own.isfinite().all() for own in local]
        overflow = (~torch.stack(finite).all() if finite else torch.zeros((), device=self.device)).float()
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self.groups.pipeline)
        if local:
            largest = max(local, key=Tensor.numel)  # shards may be empty
            first = largest[(slice(1),) * largest.dim()]
            first.copy_(torch.where(overflow > 0, torch.full_like(first, math.inf), first))


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _samples(number: int) -> Samples:
    return Samples(number, f"the input {number}", "Give input and target of the same samples.")


def _join(outputs: Sequence[Any]) -> Any:
    """The output of all samples, from those of parts."""
    leaves, spec = zip(*(tree_flatten(output) for output in outputs), strict=True)
    joined = [
        torch.cat(parts) if isinstance(parts[0], Tensor) and parts[0].dim() else parts[0]
        for parts in zip(*leaves, strict=True)
    ]
    return outputs[0] if len(outputs) == 1 else tree_unflatten(joined, spec[0])


class PipeTraining(Training):
    """Training with torchgpipe or FairScale, in one process.

    The loss function is given the whole global batch: any loss is the plain model's. A model that returns its
    loss is refused. `pipe` is the runtime's own object.
    """

    pipe: Any

    def construct(
        self,
        layers: nn.Sequential,
        example: ModelInput,
        device: str | None,
        **options: Any,
    ) -> None:
        """Build the pipe; `deferred_batch_norm=True` computes running statistics over the global batch."""
        document = cast(PipeExport, self.document)
        devices = None if device is None else [device] * len(document.balance)
        prepared = prepare_pipe(cast(Any, document), layers, cast(Any, example), devices, None)
        prepared.arguments.update(options)
        module, kind = {"torchgpipe": ("torchgpipe", "GPipe")}.get(document.runtime, ("fairscale.nn", "Pipe"))
        others = set(threading.enumerate())
        self.pipe = prepared.construct(document.runtime, module, kind)
        self._workers = set(threading.enumerate()) - others
        self.loss.form, self.modules = prepared.form, [self.pipe]
        self.device = torch.device(self.pipe.devices[-1])
        for partition in self.pipe.partitions:
            partition.forward = _within(self._stage_precision, partition.forward)
        self._name([layer for part in self.pipe.partitions for layer in part], prepared.origins)

    def close(self) -> None:
        """Drop the pipe, whose threads may keep the interpreter from ending."""
        self._tensors, self.loss.form, self.modules = [], OutputForm(), []
        del self.pipe
        super().close()
        for worker in self._workers:
            worker.join(1.0)

    def _run(self, input: object, samples: int) -> Any:
        first = torch.device(self.pipe.devices[0])
        tensors = tuple(tensor.to(first) for tensor in self.form.tensors(input, samples))
        chunks = len(tensors[0].chunk(self.pipe.chunks))
        for part in self.pipe.modules():
            if hasattr(part, "tracked"):  # a deferred batch norm, which waits for so many micro-batches
                part.chunks = chunks
        output = self.pipe(tensors[0] if len(tensors) == 1 else tensors)
        return self.loss.form.build(output)

    def _train(
        self, input: object, target: object, samples: int, weight: float | Tensor, factor: float | Tensor
    ) -> None:
        output = self._run(input, samples)
        if target is not None:
            target = map_samples(self._move, target, "the target", _samples(samples))
        loss = self.loss.loss_fn(output, target)
        if self.reduction == "sum":
            loss = loss * weight
        self.loss.total = loss.detach()
        torch.autograd.backward(loss * factor)

    def _evaluate(self, input: object, samples: int, weight: float | Tensor) -> list[Any]:
        del weight
        return [self._run(input, samples)]


def _within(context: Callable[[], AbstractContextManager[Any]], run: Callable[..., Any]) -> Any:
    """`run` inside a context: the workers of a pipe do not know the main thread's."""

    def run_inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return run(*args, **kwargs)

    return run_inside


class ProcessTraining(Training):
    """Training where every stage and replica is a process of its own.

    Micro-batches have one size: the last of a smaller batch are filled up.
    """

    def _begin(self, device: str | None, start: Callable[[str], object]) -> str:
        """Initialize torch.distributed where nobody did; the kind of device."""
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if not dist.is_initialized() and "RANK" in os.environ:
            start(kind)
            self._starts_distributed = True
        return kind

    def _inputs(self, input: object, samples: int) -> Any:
        """The samples of this replica, filled up."""
        document = self.document
        whole = torch.arange(document.mini_batch) % samples
        if samples == document.mini_batch and self.groups.replicas is None:
            return input
        by_replica = whole.reshape(-1, document.replicas, document.replica_samples)
        return self._pick(input, by_replica[:, self.groups.replica].flatten(), samples)

    def _parts(
        self, target: object, samples: int, weight: float | Tensor, factor: float | Tensor = 1.0
    ) -> list[LossPart]:
        """The micro-batches of this replica in the loss."""
        size, replicas = self.document.replica_samples, self.document.replicas
        if not self.is_last:
            return []
        if target is not None:
            target = map_samples(self._move, target, "the target", _samples(samples))
        parts = []
        for start in range(self.groups.replica * size, self.document.mini_batch, replicas * size):
            rows = min(max(samples - start, 0), size)
            counts = weight * rows if self.reduction == "mean" else weight
            # Gradients are averaged over replicas.
            share = counts * factor * replicas
            own = None if target is None else take_rows(target, slice(start, start + rows))
            parts.append(LossPart(own, None if rows == size else rows, counts, share))
        return parts

    def _gather_outputs(self) -> list[Any]:
        """The outputs of all replicas, by micro-batch."""
        if not self.loss.outputs:
            return []
        replicas = self.groups.gather(self.loss.outputs, self.groups.replicas)
        return [output for micro_batch in zip(*replicas, strict=True) for output in micro_batch]


class TorchTraining(ProcessTraining):
    """Training with torch.distributed.pipelining. `process` is its process.

    Where `build` was inside no autocast, steps cannot be: the processes agree on what crosses the cuts when
    they are built.
    """

    process: PipelineProcess

    def construct(
        self,
        layers: nn.Sequential,
        example: ModelInput,
        device: str | None,
        **options: Any,
    ) -> None:
        """Build the stages of this process."""
        document = cast(TorchExport, self.document)
        backends = {"cuda": "nccl", "cpu": "gloo"}
        kind = self._begin(device, lambda kind: dist.init_process_group(backends[kind]))
        process: PipelineProcess = cast(Any, self.build_stages)(
            document,
            layers,
            example_input=example,
            loss_fn=self.loss.loss_fn,
            device="cpu" if kind == "cpu" else None,
            **options,
        )
        if process.device.type == "cuda":
            torch.cuda.set_device(process.device)
        self.process, self.loss, self.device = process, process.loss or self.loss, process.device
        self.modules = list(process.modules.values())
        self.is_first, self.is_last = process.is_first, process.is_last
        for stage, own in process.stage_layers.items():
            self._name(list(process.modules[stage]), own.origins)
        place, last = process.coordinates, len(document.parts) - 2
        self.groups = TrainingGroups(
            place.pipeline,
            next(index for index, stages in enumerate(document.stages) if last in stages),
            None if place.replicas is None else place.replicas.get_group(),
            place.replica,
        )

    def _train(
        self, input: object, target: object, samples: int, weight: float | Tensor, factor: float | Tensor
    ) -> None:
        parts = self._parts(target, samples, weight, factor)
        self.process.train_parts(self._inputs(input, samples) if self.is_first else None, parts)

    def _evaluate(self, input: object, samples: int, weight: float | Tensor) -> list[Any]:
        inputs = self._inputs(input, samples) if self.is_first else None
        self.process.run_parts(self.process.schedule.eval, inputs, self._parts(None, samples, weight))
        for module in self.process.wrapped.values():
            if isinstance(module, FSDPModule):
                module.reshard()
        return self._gather_outputs()


class DeepspeedTraining(ProcessTraining):
    """Training with DeepSpeed. `engine` is its own object.

    With 16-bit weights or ZeRO, DeepSpeed's optimizer keeps gradients and float32 weights for itself:
    `clip_grad_norm_` sets the norm by which the coming update clips, and returns NaN; a GradScaler is
    refused. An autocast counts where `build` is inside it, and not where a step alone is.
    """

    engine: Any

    def construct(
        self,
        layers: nn.Sequential,
        example: ModelInput,
        device: str | None,
        **options: Any,
    ) -> None:
        """Build the stage of this process, whose steps end before the update."""
        import deepspeed
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        document = cast(DeepspeedExport, self.document)
        kind = self._begin(device, self.start_deepspeed)
        stage = cast(Any, self.build_stages)(document, layers, self.loss, example, **options)
        config = dict(document.config)
        if (dtype := self._autocast.get(kind)) is not None:
            config["torch_autocast"] = {"enabled": True, "dtype": str(dtype).removeprefix("torch.")}
        client = None
        if self.make_optimizer is not None:
            client = self.make_optimizer([{"params": list(stage.parameters())}])
            del config["optimizer"]
        self.engine, *_ = deepspeed.initialize(
            model=stage, optimizer=client, config=config, model_parameters=list(stage.parameters())
        )
        wrap_instructions(self.engine, {OptimizerStep: lambda _: _skip})
        self.loss.form = stage.output_form
        self._name(stage.forward_funcs, stage.planned_stage.origins)
        self.device, self.modules = torch.device(self.engine.device), [self.engine.module]
        self.is_first, self.is_last = self.engine.is_first_stage(), self.engine.is_last_stage()
        grid = self.engine.grid
        self.groups = TrainingGroups(
            grid.get_pipe_parallel_group() if document.num_stages > 1 else None,
            document.num_stages - 1,
            grid.get_data_parallel_group() if document.replicas > 1 else None,
            grid.get_data_parallel_rank(),
        )
        self.keeps_gradients = self.engine.optimizer is not self.engine.basic_optimizer
        self.optimizer = EngineOptimizer(self.engine) if self.keeps_gradients else self.engine.optimizer

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradients of the whole model by their norm; see the class for 16-bit weights and ZeRO."""
        if not self.keeps_gradients:
            return super().clip_grad_norm_(max_norm, norm_type)
        self.engine.optimizer.clip_grad = max_norm
        return torch.full((), math.nan)

    def save(self, path: str | Path, **progress: Any) -> None:
        """Write weights and optimizer state; where DeepSpeed keeps them, in its own files."""
        if not self.keeps_gradients:
            return super().save(path, **progress)
        write = partial(self.engine.save_checkpoint, tag=TAG)
        return replace_folder(
            self._state(), Path(path), progress, lambda folder: write(str(folder)), self._layout
        )

    def load(self, path: str | Path) -> dict[str, Any]:
        """Read what `save` wrote; DeepSpeed's own files with the same stages and replicas alone.

        DeepSpeed unpickles its own files, which may run anything: read those of people you trust.
        """
        if not self.keeps_gradients:
            return super().load(path)
        folder = find_checkpoint(Path(path))
        progress = read_about(self._state(), folder, self._layout)
        load, replicas = self.engine.optimizer.load_state_dict, self.document.replicas
        if self.engine.bfloat16_enabled() and not self.engine.zero_optimization():
            # DeepSpeed 0.19.8 hands its optimizer a state where that reads a list of them, and forgets the
            # float32 weights.
            self.engine.optimizer.load_state_dict = lambda state, load_optimizer_states: load(
                [state] * replicas, load_optimizer_states=load_optimizer_states, load_from_fp32_weights=True
            )
        self.engine.load_checkpoint(str(folder), tag=TAG)
        self.engine.optimizer.load_state_dict = load
        return progress

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take weights and buffers from a state dict of the plain model, DeepSpeed's float32 weights, too."""
        refresh = getattr(self.engine.optimizer, "refresh_fp32_params", None)
        if self.keeps_gradients and refresh is None:
            raise UsageError(
                f"DeepSpeed's {type(self.engine.optimizer).__name__} keeps float32 weights, and takes none",
                "Load the model before `build`, or export without ZeRO and 16-bit weights.",
            )
        super().load_state_dict(state)
        if self.keeps_gradients:
            cast(Any, refresh)()

    @property
    def _layout(self) -> str:
        """Return the layout that DeepSpeed's own files depend on."""
        document = cast(DeepspeedExport, self.document)
        return f"{document.num_stages} stages with cuts {document.parts} on {document.replicas} replicas"

    def _forget_gradients(self) -> None:
        if not self.keeps_gradients:
            super()._forget_gradients()

    def _feed(self, input: object, samples: int) -> Iterator[tuple[Any, Tensor]]:
        """Input and number of each micro-batch."""
        size, dtype = self.document.replica_samples, self.parameters()[0].dtype
        count = self.document.mini_batch // self.document.micro_batch_size
        tensors = self.form.tensors(self._inputs(input, samples), size * count)
        if self.keeps_gradients:  # the model is converted, its input is not
            tensors = tuple(own.to(dtype) if own.is_floating_point() else own for own in tensors)
        for number in range(count):
            rows = slice(number * size, (number + 1) * size)
            own = tuple(
                tensor if shared else tensor[rows]
                for tensor, shared in zip(tensors, self.form.shared, strict=True)
            )
            yield own[0] if len(own) == 1 else own, torch.tensor(number)

    def _train(
        self, input: object, target: object, samples: int, weight: float | Tensor, factor: float | Tensor
    ) -> None:
        if self.keeps_gradients and isinstance(factor, Tensor):
            raise UsageError("a GradScaler with DeepSpeed, which scales by itself", "Omit `scaler`.")
        # DeepSpeed divides the loss by the number of micro-batches.
        factor = factor * self.engine.gradient_accumulation_steps()
        self.loss.parts = self._parts(target, samples, weight, factor)
        self.engine.train_batch(self._feed(input, samples))

    def _evaluate(self, input: object, samples: int, weight: float | Tensor) -> list[Any]:
        self.loss.parts = self._parts(None, samples, weight)
        self.engine.eval_batch(self._feed(input, samples), bcast_loss=False, reduce_output=None)
        return self._gather_outputs()


def _skip(engine: object, **arguments: object) -> None:
    """Do nothing in the place of an instruction of DeepSpeed."""


class EngineOptimizer(torch.optim.Optimizer):
    """DeepSpeed's optimizer, as learning-rate schedules and `Training` take it."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.defaults = engine, {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, whose learning rates DeepSpeed reads."""
        groups: list[dict[str, Any]] = self.engine.optimizer.param_groups
        return groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights with the gradients of the latest step, and forget these."""
        del closure
        take_step(self.engine)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: a step forgets the gradients."""
