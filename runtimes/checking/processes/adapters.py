"""A pipeline as the loop of a check runs it, and the seconds of its stages: alone, and by stamps in a step.

torchgpipe and FairScale run their partitions themselves. The forward of a stage is then what its module
takes. Its backward lies between the gradients of its output and of its input: both pass an identity of ours.
If the input wants no gradient, as the first stage's, the last gradient of a parameter ends it. A forward
while the backward is under way is one that runs again.
"""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from itertools import pairwise
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....cost_models.runtime import find_runtime
from ....profiler.clocks import Clock, clock_for
from ....profiler.torch_private import backward_parts
from ....profiler.user_model import ModelInput
from ...deepspeed import build as build_deepspeed
from ...documents import DeepspeedExport
from ...pipelining.runtime_internals import wrap_instructions
from ...pipelining.stage import InputForm, StageLoss, StageModule, as_tuple, pack_tensor
from ...torch_actions import splits_backward
from ...torch_pipelining import build as build_torch
from ..records import Case, StageSeconds
from .trained_model import LEARNING_RATE, TrainingTarget, apply_sgd

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
    """The seconds of one stage on its device. `backward_runs`: set while the step goes backward."""

    def __init__(self, number: int, partition: nn.Module, device: torch.device) -> None:
        super().__init__(clock_for(device))
        self.number, self.backward_runs = number, False
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
        kind = "again" if self.backward_runs else "forward"
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
    """The same tensors; `on_gradient` is called when their gradients are known."""
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


REPEATS, WARM_UPS, FIRSTS = 5, 2, 3
Pass = tuple[float, float, float]
"""Seconds of the forward, of the backward or its first part, and of the second."""


@contextmanager
def kept_buffers(module: nn.Module) -> Iterator[None]:
    """Its buffers are afterwards what they were: a pass that only measures counts in no statistics, which
    the next pass may compute with."""
    own = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for part, name, buffer, value in own:
                buffer.copy_(value)
                setattr(part, name, buffer)


def stage_inputs(layers: nn.Sequential, first: int, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the stage that begins with layer `first` is sent for a micro-batch: the layers before are run, on
    the CPU and without gradients."""
    if not first:
        return inputs
    with torch.no_grad(), kept_buffers(layers[:first]):
        output: Any = inputs[0] if len(inputs) == 1 else inputs
        for layer in layers[:first]:
            output = layer(output)
    return tuple(pack_tensor(tensor).detach().clone() for tensor in as_tuple(output))


def measure_isolated(
    module: nn.Module,
    inputs: Sequence[Tensor],
    device: torch.device,
    *,
    loss: Callable[..., Tensor] | None,
    is_first: bool,
    splits: bool,
    repeats: int = REPEATS,
) -> StageSeconds:
    """Medians over `repeats` micro-batches, after some that do not count, and over some more that find no
    gradients to add to, as the first of a step. The module's buffers stay as they are.

    `loss`: the last stage's. `splits`: the gradient of the input and those of the weights apart, as PyTorch
    computes them; on the first stage it computes both with the weights'.
    """
    clock = clock_for(device)

    def one_pass() -> tuple[Pass, Pass]:
        stage_inputs = tuple(_leaf(tensor.to(device), wants=not is_first) for tensor in inputs)
        return _pass(module, stage_inputs, clock, loss=loss, is_first=is_first, splits=splits)

    with kept_buffers(module):
        passes, firsts = [one_pass() for _ in range(WARM_UPS + repeats)], []
        for _ in range(FIRSTS):
            _forget_gradients(module)
            firsts.append(sum(one_pass()[0][1:]))
    _forget_gradients(module)
    seconds = [device_seconds for device_seconds, _ in passes[WARM_UPS:]]
    forward, input, weight = (median(values) for values in zip(*seconds, strict=True))
    backward = median(first + second for _, first, second in seconds)
    hosts = [host for _, host in passes[WARM_UPS:]] if clock.has_host else [(0.0, 0.0, 0.0)]
    return StageSeconds(
        forward=forward,
        backward=backward,
        input=input if splits else 0.0,
        weight=weight if splits else 0.0,
        accumulation=min(max(backward - median(firsts), 0.0), weight if splits else backward),
        forward_launch=median(first for first, _, _ in hosts),
        backward_launch=median(second + third for _, second, third in hosts),
    )


def _pass(
    module: nn.Module,
    inputs: tuple[Tensor, ...],
    clock: Clock,
    *,
    loss: Callable[..., Tensor] | None,
    is_first: bool,
    splits: bool,
) -> tuple[Pass, Pass]:
    """The device's and the host's."""
    input_gradients, weight_gradients = backward_parts()
    stamps = [clock.stamp()]
    output = module(*inputs)
    outputs = as_tuple(output if loss is None else loss(output, None))
    stamps.append(clock.stamp())
    differentiable = [tensor for tensor in outputs if tensor.requires_grad]
    gradients = None if loss is not None else [torch.ones_like(tensor) for tensor in differentiable]
    if not differentiable:
        stamps += [stamps[-1]] * 2
    elif splits and not is_first:
        _, groups = input_gradients(differentiable, gradients, list(inputs), module.parameters())
        stamps.append(clock.stamp())
        weight_gradients(module.parameters(), groups)
        stamps.append(clock.stamp())
    else:
        # PyTorch's schedules compute the first stage's gradients with those of its weights.
        stamps += [clock.stamp()] if splits else []
        torch.autograd.backward(differentiable, gradients)
        stamps += [clock.stamp()] * (1 if splits else 2)
    clock.settle()
    on_device = [clock.seconds(one, other) for one, other in pairwise(stamps)]
    on_host = [clock.host_seconds(one, other) for one, other in pairwise(stamps)]
    return cast(Pass, tuple(on_device)), cast(Pass, tuple(on_host))


def _forget_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def _leaf(tensor: Tensor, *, wants: bool) -> Tensor:
    return tensor.detach().requires_grad_(wants and tensor.is_floating_point())


class PipelineAdapter(ABC):
    """A case that its runtime has built in this process.

    `devices`: of the pipeline, those that this process computes on, in their order. `model`: all layers of
    this process, as they are trained. `stamps`: of the actions since `watch`.
    """

    devices: Sequence[torch.device]
    model: nn.Module
    stamps: Sequence[ActionStamps]
    splits: bool = False
    """Whether gradients of inputs and weights are computed apart."""

    def __init__(self, case: Case, target: TrainingTarget, stages: Sequence[int]) -> None:
        """Finds what the `stages` of this process are sent, before their layers are moved to a device."""
        self.case, self.target = case, target
        tensors = target.example.repeated(case.document.replica_samples).tensors
        self._inputs = {stage: stage_inputs(target.layers, case.parts[stage], tensors) for stage in stages}

    @abstractmethod
    def stages(self) -> Mapping[int, nn.Module]:
        """The stages of this process, each as it is called with its tensors one by one."""

    def loss_of(self, stage: nn.Module) -> Callable[..., Tensor]:
        """The loss of what the last stage returns."""
        del stage
        return self.target.loss

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures each stage of this process alone, without the exchange of gradients between replicas.

        All processes measure at the same time.
        """
        return {
            stage: measure_isolated(
                module,
                self._inputs[stage],
                self.devices[number],
                loss=self.loss_of(module) if stage == len(self.case.parts) - 2 else None,
                is_first=stage == 0,
                splits=self.splits,
            )
            for number, (stage, module) in enumerate(self.stages().items())
        }

    def feed(self, samples: ModelInput) -> Any:
        """The input of a step for a global batch, prepared before the step's clock starts."""
        return samples

    @abstractmethod
    def step(self, batch: Any) -> list[Tensor]:
        """Forward and backward of a global batch; the losses that this process knows, of equal parts."""

    def update(self) -> None:
        """A step of plain SGD with the gradients."""
        apply_sgd(list(self.model.parameters()))

    @abstractmethod
    def watch(self) -> None:
        """Stamps every action from now on."""

    def stage_seconds(self) -> dict[int, StageSeconds]:
        """The seconds of each stage of this process, from the stamps."""
        return {stage: seconds for own in self.stamps for stage, seconds in own.stages().items()}

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """The case is over."""


class SeparateTensors(nn.Module):
    """A stage that takes a tensor or the tuple of several, as one that takes them one by one."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *tensors: Tensor) -> Any:
        """The stage's output."""
        return self.stage(tensors[0] if len(tensors) == 1 else tensors)


class PipeAdapter(PipelineAdapter):
    """All stages of a case."""

    def __init__(self, case: Case, target: TrainingTarget, device: torch.device) -> None:
        del device  # each stage has its own
        super().__init__(case, target, range(len(case.parts) - 1))
        self._threads = threading.enumerate()
        runtime = import_module(f"...{find_runtime(case.document.runtime).module}", __package__)
        self._pipe: Any = runtime.build(case.document, target.layers, target.example.layer_input)
        self.model = self._pipe
        self.devices = [torch.device(device) for device in self._pipe.devices]
        self.stamps: list[PartitionStamps] = []

    def stages(self) -> dict[int, nn.Module]:
        """The partitions."""
        return dict(enumerate(map(SeparateTensors, self._pipe.partitions)))

    def step(self, batch: ModelInput) -> list[Tensor]:
        """The mean over the micro-batches, each by itself as in the plain model."""
        self._set_backward(runs=False)
        inputs = batch.to(device=self.devices[0])
        output = self._pipe(inputs.layer_input)
        parts = _micro_batches(output, self.case.micro_batches)
        loss = torch.stack([self.target.loss(part, None) for part in parts]).sum() / len(parts)
        self._set_backward(runs=True)
        torch.autograd.backward(loss)
        return [loss.detach()]

    def _set_backward(self, *, runs: bool) -> None:
        for stamps in self.stamps:
            stamps.backward_runs = runs

    def watch(self) -> None:
        """Stamps the actions by hooks on the partitions."""
        stages = enumerate(zip(self._pipe.partitions, self.devices, strict=True))
        self.stamps = [PartitionStamps(number, *partition) for number, partition in stages]

    def close(self) -> None:
        """Drop the pipe and wait for FairScale's threads: a living Pipe would keep the interpreter from
        ending, and a thread whose end meets the interpreter's may abort it."""
        for stamps in self.stamps:
            stamps.remove()
        del self.stamps, self._pipe, self.model
        gc.collect()
        for thread in set(threading.enumerate()).difference(self._threads):
            thread.join(timeout=10)


def _micro_batches(output: Any, count: int) -> list[Any]:
    """The output of each micro-batch."""
    if isinstance(output, Tensor):
        return list(output.chunk(count))
    return list(zip(*(tensor.chunk(count) for tensor in output), strict=True))


class TorchAdapter(PipelineAdapter):
    """This process's stages of a case."""

    def __init__(self, case: Case, target: TrainingTarget, device: torch.device) -> None:
        document = self.document = case.torch
        stages = document.stages[dist.get_rank() // document.replicas]
        super().__init__(case, target, stages)
        if 0 in stages:
            form = InputForm.of(target.example)
            self._inputs[0] = form.micro_batch(target.example, document.replica_samples)
        self._stamps = ActionStamps(clock_for(device))
        self.process = build_torch(
            document,
            target.layers,
            example_input=target.example,
            loss_fn=self._stamps.time_calls(len(case.parts) - 2, "loss", target.loss),
            device=device,
        )
        self.splits = splits_backward(document.actions)
        self.devices = [device] * len(stages)
        self.model, self.stamps = nn.ModuleList(self.process.wrapped.values()), [self._stamps]

    def stages(self) -> dict[int, nn.Module]:
        """As the schedule runs them, but outside DistributedDataParallel."""
        wrapped = self.process.wrapped.items()
        return {stage: getattr(module, "module", module) for stage, module in wrapped}

    def loss_of(self, stage: nn.Module) -> Callable[..., Tensor]:
        """The loss of the model's output, which the stage's tensors make."""
        return StageLoss(cast(StageModule, stage).output_form, self.target.loss)

    def step(self, batch: ModelInput) -> list[Tensor]:
        """The losses of the micro-batches, in the process of the last stage."""
        process, samples = self.process, self.document.mini_batch
        share = batch.mapped(
            lambda tensor: process.share(tensor) if tensor.dim() and len(tensor) == samples else tensor
        )
        target = torch.zeros(process.samples) if process.is_last else None
        return process.step(share if process.is_first else None, target)

    def watch(self) -> None:
        """Stamps the actions where PyTorch's schedule calls them."""
        stages: list[Any] = list(self.process.stages)
        for stage in stages:
            index = stage.stage_index
            stage.forward_one_chunk = self._stamps.time_calls(index, "forward", stage.forward_one_chunk)
            stage.backward_weight_one_chunk = self._stamps.time_calls(
                index, "weight", stage.backward_weight_one_chunk
            )
            full = self._stamps.time_calls(index, "backward", stage.backward_one_chunk)
            input_only = self._stamps.time_calls(index, "input", stage.backward_one_chunk)
            stage.backward_one_chunk = _choose_backward(full, input_only)


def _choose_backward(full: Callable[..., Any], input_only: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of all gradients, or of the input's alone."""

    def backward(
        index: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        run = full if full_backward else input_only
        return run(index, loss=loss, full_backward=full_backward, last_backward=last_backward)

    return backward


class DeepspeedAdapter(PipelineAdapter):
    """One stage of a case. Plain SGD takes the place of the plan's optimizer, as for the plain model."""

    def __init__(self, case: Case, target: TrainingTarget, device: torch.device) -> None:
        import deepspeed

        document = cast(DeepspeedExport, case.document)
        self.stage, self.replica = divmod(dist.get_rank(), document.replicas)
        super().__init__(case, target, [self.stage])
        stage = build_deepspeed(document, target.layers, target.loss, target.example.layer_input)
        config = {name: value for name, value in document.config.items() if name != "optimizer"}
        optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
        self.devices, self.model = [device], self.engine.module
        self.stamps = [ActionStamps(clock_for(device))]

    def stages(self) -> dict[int, nn.Module]:
        """This process's stage."""
        return {self.stage: SeparateTensors(self.model)}

    def feed(self, samples: ModelInput) -> Iterator[tuple[Any, Tensor]]:
        """Input and a target that nothing reads, of each micro-batch of this replica."""
        device, replicas = self.devices[0], self.case.replicas
        parts = self.case.micro_batches * replicas
        size = samples.batch // parts
        own = []
        for part in range(self.replica, parts, replicas):
            cut = tuple(tensor[part * size : (part + 1) * size].to(device) for tensor in samples.tensors)
            own.append((cut[0] if len(cut) == 1 else cut, torch.zeros(size, device=device)))
        return iter(own)

    def step(self, batch: Iterator[tuple[Any, Tensor]]) -> list[Tensor]:
        """The mean loss, which DeepSpeed tells every process; the weights are new after it."""
        return [self.engine.train_batch(batch)]

    def update(self) -> None:
        """Nothing: DeepSpeed's step includes its optimizer."""

    def watch(self) -> None:
        """Every forward and backward of the engine, which looks up what an instruction does."""
        from deepspeed.runtime.pipe import schedule

        timed = partial(self.stamps[0].time_calls, self.stage)
        wrappers = {
            schedule.ForwardPass: partial(timed, "forward"),
            schedule.BackwardPass: partial(timed, "backward"),
        }
        wrap_instructions(self.engine, wrappers)
