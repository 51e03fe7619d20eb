"""A case as its runtime trains it in a process of a check, with the seconds and the memory of its stages.

torchgpipe and FairScale run their partitions themselves. The forward of a stage is then what its module
takes. Its backward lies between the gradients of its output and of its input: both pass an identity of ours.
If the input wants no gradient, as the first stage's, the last gradient of a parameter ends it. A forward
inside a backward is one that runs again.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....profiler.clocks import Clock, clock_for
from ....profiler.memory import CpuAllocations, LiveBytes, lasting, sees_kernels
from ....profiler.torch_private import tree_leaves
from ....profiler.user_model import ModelInput
from ...documents import PipeExport, TorchExport
from ...pipelining.runtime_internals import runs_backward, wrap_instructions
from ...pipelining.stage import take_rows
from ...pipelining.training import DeepspeedTraining, PipeTraining, TorchTraining, Training
from ...training import build
from ..records import Case, StageSeconds
from .trained_model import LEARNING_RATE, Loss, TrainingTarget

KINDS = ("forward", "loss", "backward", "again", "input", "weight")
"""Of actions; `again` is a forward that the backward runs."""


class ActionStamps:
    """The seconds of a process's actions, by stage and kind."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._pending: list[tuple[int, str, Any, Any]] = []
        self._seconds: dict[tuple[int, str], list[float]] = {}

    def time_calls(self, stage: int, kind: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run` with a stamp before and after."""

        def run_timed(*args: Any, **kwargs: Any) -> Any:
            start = self._clock.stamp()
            output = run(*args, **kwargs)
            self._pending.append((stage, kind, start, self._clock.stamp()))
            return output

        return run_timed

    def settle(self) -> None:
        """Reads the stamps of a step that is over."""
        self._clock.settle()
        for stage, kind, start, end in self._pending:
            self._seconds.setdefault((stage, kind), []).append(self._clock.seconds(start, end))
        self._pending.clear()

    def forget(self) -> None:
        """Drops the stamps so far, those of warm-ups."""
        self.settle()
        self._seconds.clear()

    def stages(self) -> dict[int, StageSeconds]:
        """Medians over all micro-batches of all steps, with the loss and with what a backward recomputes."""
        seconds: dict[int, StageSeconds] = {}
        for stage in {stage for stage, _ in self._seconds}:
            forward, loss, backward, again, input, weight = (
                median(self._seconds.get((stage, kind), [0.0])) for kind in KINDS
            )
            whole = backward + again or input + weight
            seconds[stage] = StageSeconds(forward=forward + loss, backward=whole, input=input, weight=weight)
        return seconds


class PartitionStamps(ActionStamps):
    """The seconds of one stage on its device."""

    def __init__(self, number: int, partition: nn.Module, device: torch.device) -> None:
        super().__init__(clock_for(device))
        self.number = number
        self._forward: Any = None
        self._backward: list[Any] = []
        self._handles = [
            partition.register_forward_pre_hook(self._enter, prepend=True),
            partition.register_forward_hook(self._leave),
        ]
        self._parameters = [parameter for parameter in partition.parameters() if parameter.requires_grad]
        self._watched = False

    def settle(self) -> None:
        """Reads the stamps of a step that is over."""
        self._close()
        super().settle()

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:  # noqa: ARG002
        tensors = inputs[0] if isinstance(inputs[0], tuple) else (inputs[0],)
        if not any(tensor.requires_grad for tensor in tensors):
            self._watch_parameters()
        marked = _mark_gradients(inputs[0], self._end_backward)
        self._forward = self._clock.stamp()
        return (marked,)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:  # noqa: ARG002
        kind = "again" if runs_backward() else "forward"
        self._pending.append((self.number, kind, self._forward, self._clock.stamp()))
        return _mark_gradients(output, self._begin_backward)

    def _watch_parameters(self) -> None:
        if not self._watched:
            self._watched = True
            self._handles += [
                parameter.register_post_accumulate_grad_hook(lambda _: self._end_backward())  # type: ignore[no-untyped-call]
                for parameter in self._parameters
            ]

    def _begin_backward(self) -> None:
        self._close()
        self._backward = [self._clock.stamp()]

    def _end_backward(self) -> None:
        if self._backward:
            self._backward[1:] = [self._clock.stamp()]

    def _close(self) -> None:
        """The backward that is over: until the last of the gradients."""
        if len(self._backward) == 2:
            self._pending.append((self.number, "backward", *self._backward))
        self._backward = []


def _mark_gradients(output: Any, on_gradient: Callable[[], None]) -> Any:
    """Return the tensors, and call `on_gradient` when their gradients are computed."""
    tensors = output if isinstance(output, tuple) else (output,)
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in tensors):
        return output
    with_gradient = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
    identities = iter(_Mark.apply(on_gradient, *(tensors[number] for number in with_gradient)))
    result = tuple(
        next(identities) if number in with_gradient else tensor for number, tensor in enumerate(tensors)
    )
    return result if isinstance(output, tuple) else result[0]


class _Mark(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, on_gradient: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on_gradient = on_gradient
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ctx.on_gradient()
        return (None, *gradients)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
"""By the plan's word: their states are measured."""


class CheckedTraining:
    """A case as its runtime trains it in this process, by plain SGD.

    Attributes:
        training: The training object that users have.
        devices: Those of the pipeline that this process computes on, in their order.
        stamps: Seconds of the actions since `watch`.
    """

    def __init__(self, case: Case, target: TrainingTarget, device: torch.device) -> None:
        document, loss = case.document, target.loss
        self.case = case
        self.stamps: Sequence[ActionStamps] = [ActionStamps(clock_for(device))]
        if isinstance(document, TorchExport):
            loss = self.stamps[0].time_calls(len(case.parts) - 2, "loss", loss)
        elif isinstance(document, PipeExport):
            loss = partial(_mean_loss, loss, case.micro_batches)
        self.training: Training = build(
            document,
            target.layers,
            loss,
            target.example,
            optimizer=partial(torch.optim.SGD, lr=LEARNING_RATE),
            device=None if isinstance(document, PipeExport) else device.type,
        )
        self.devices = [self.training.device]
        if isinstance(self.training, PipeTraining):
            self.devices = [torch.device(own) for own in self.training.pipe.devices]

    @property
    def model(self) -> nn.Module:
        """The layers of this process, as they are trained."""
        return nn.ModuleList(self.training.modules)

    def step(self, batch: ModelInput) -> Tensor:
        """Run forward and backward of a global batch; the loss, in every process."""
        return self.training.step(batch.kwargs or batch.args)

    def update(self) -> None:
        """Update the weights with the gradients, and forget these."""
        self.training.optimizer.step()
        self.training.optimizer.zero_grad()

    def watch(self) -> None:
        """Stamp every action from now on."""
        training = self.training
        if isinstance(training, PipeTraining):
            partitions = enumerate(zip(training.pipe.partitions, self.devices, strict=True))
            self.stamps = [PartitionStamps(number, *partition) for number, partition in partitions]
        elif isinstance(training, TorchTraining):
            _watch_stages(training.process.stages, self.stamps[0])
        elif isinstance(training, DeepspeedTraining):
            _watch_engine(training, self.stamps[0])

    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The seconds of each stage of this process, from the stamps."""
        return {stage: seconds for own in self.stamps for stage, seconds in own.stages().items()}

    def peak_bytes(self, batch: ModelInput, between: Callable[[], object]) -> list[int]:
        """The most bytes held in a step and its update with the plan's optimizer, after one that makes its
        states. The input of the global batch is left out.

        Args:
            batch: The global batch.
            between: Called after the first step.

        Returns:
            By device: what CUDA's allocator says, or on a CPU the live tensors, each storage once; 0 where
            one process has all stages of a CPU.
        """
        training = self.training
        if not getattr(training, "keeps_gradients", False):
            make = OPTIMIZERS.get(self.case.optimizer, torch.optim.SGD)
            groups = [{"params": training.parameters()}]
            training.optimizer = make(groups, lr=LEARNING_RATE, weight_decay=0.01)  # as the ledger counts

        def train() -> None:
            self.step(batch)
            self.update()

        kinds = {device.type for device in self.devices}
        if kinds == {"cpu"} and isinstance(training, PipeTraining):
            return [0] * len(self.devices)
        input_bytes = sum(tensor.nbytes for tensor in batch.tensors)
        if kinds == {"cpu"}:
            tensors = [tensor for module in training.modules for tensor in lasting(module)]
            with LiveBytes("cpu", [*tensors, *batch.tensors]) as live:
                train()
                between()
                gc.collect()
                base = live.held_after(live.mark())
                if not sees_kernels(self.devices[0]):
                    train()
                    peak = live.peak_in(live.mark())
            if sees_kernels(self.devices[0]):  # what they allocate for themselves counts, too
                with CpuAllocations(()) as allocations:
                    allocations.mark()
                    train()
                    interval = allocations.mark()
                peak = base + allocations.peak_in(interval)
            shared = self.case.replicas > 1 and training.is_first
            return [peak - input_bytes - shared * input_bytes // self.case.replicas]
        train()
        between()
        gc.collect()
        for device in self.devices:
            torch.cuda.reset_peak_memory_stats(device)
        train()
        peaks = [torch.cuda.max_memory_allocated(device) for device in self.devices]
        if training.is_first:
            peaks[0] -= input_bytes // self.case.replicas
        return peaks

    def close(self) -> None:
        """End what the runtime began: a living Pipe would keep the interpreter from ending."""
        for stamps in self.stamps:
            if isinstance(stamps, PartitionStamps):
                stamps.remove()
        self.stamps = []
        self.training.close()


def _mean_loss(loss: Loss, count: int, output: Any, target: object) -> Tensor:
    """The mean over the micro-batches, each by itself as in the plain model."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()]
    size = -(-len(tensors[0]) // count)
    starts = range(0, len(tensors[0]), size)
    return torch.stack([loss(take_rows(output, slice(at, at + size)), target) for at in starts]).mean()


def _watch_stages(stages: Sequence[Any], stamps: ActionStamps) -> None:
    """Stamp the actions where PyTorch's schedule calls them."""
    for stage in stages:
        index = stage.stage_index
        stage.forward_one_chunk = stamps.time_calls(index, "forward", stage.forward_one_chunk)
        stage.backward_weight_one_chunk = stamps.time_calls(index, "weight", stage.backward_weight_one_chunk)
        full = stamps.time_calls(index, "backward", stage.backward_one_chunk)
        input_only = stamps.time_calls(index, "input", stage.backward_one_chunk)
        stage.backward_one_chunk = _choose_backward(full, input_only)


def _choose_backward(full: Callable[..., Any], input_only: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of all gradients, or of the input's alone."""

    def backward(
        index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        run = full if full_backward else input_only
        return run(index, loss=loss, full_backward=full_backward, last_backward=last_backward)

    return backward


def _watch_engine(training: DeepspeedTraining, stamps: ActionStamps) -> None:
    """Stamp every forward and backward of DeepSpeed's engine, which looks up what an instruction does."""
    from deepspeed.runtime.pipe import schedule

    timed = partial(stamps.time_calls, training.engine.stage_id)
    wrappers = {
        schedule.ForwardPass: partial(timed, "forward"),
        schedule.BackwardPass: partial(timed, "backward"),
    }
    wrap_instructions(cast(Any, training.engine), wrappers)
