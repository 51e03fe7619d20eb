"""A pipeline as the loop of a check runs it: what differs from runtime to runtime, behind one interface."""

from __future__ import annotations

import gc
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ....cost_models.runtime import find_runtime
from ....profiler.passes.clocks import clock_for
from ....profiler.user_model.loaded_model import ModelInput
from ...deepspeed import build as build_deepspeed
from ...documents import DeepspeedExport
from ...pipelining.runtime_internals import wrap_instructions
from ...pipelining.stage import InputForm, StageLoss, StageModule
from ...torch_actions import splits_backward
from ...torch_pipelining import build as build_torch
from ..records import Case, StageSeconds
from .stage_times import ActionStamps, PartitionStamps, measure_isolated, stage_inputs
from .trained_model import LEARNING_RATE, TrainingTarget, apply_sgd


class PipelineAdapter(ABC):
    """A case that its runtime has built in this process.

    `devices`: of the pipeline, those that this process computes on, in their order. `model`: all layers of
    this process, as they are trained. `stamps`: of the actions since `watch`.
    """

    devices: Sequence[torch.device]
    model: nn.Module
    stamps: Sequence[ActionStamps]

    @abstractmethod
    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures each stage of this process alone. All processes measure at the same time."""

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
        self.case, self._target, self._threads = case, target, threading.enumerate()
        runtime = import_module(f"...{find_runtime(case.document.runtime).module}", __package__)
        self._pipe: Any = runtime.build(case.document, target.layers, target.example.layer_input)
        self.model = self._pipe
        self.devices = [torch.device(device) for device in self._pipe.devices]
        self.stamps: list[PartitionStamps] = []

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Each stage is fed what the one before makes of a micro-batch."""
        tensors = self._target.example.repeated(self.case.document.micro_batch_size).tensors
        seconds: dict[int, StageSeconds] = {}
        for number, (partition, device) in enumerate(zip(self._pipe.partitions, self.devices, strict=True)):
            is_last = number == len(self.devices) - 1
            stage, tensors = SeparateTensors(partition), tuple(tensor.to(device) for tensor in tensors)
            seconds[number] = measure_isolated(
                stage,
                tensors,
                device,
                loss=self._target.loss if is_last else None,
                is_first=number == 0,
                splits=False,
            )
            if not is_last:
                tensors = _outputs(stage, tensors)
        return seconds

    def step(self, batch: ModelInput) -> list[Tensor]:
        """The mean over the micro-batches, each by itself as in the plain model."""
        self._set_backward(runs=False)
        inputs = batch.to(device=self.devices[0])
        output = self._pipe(inputs.layer_input if isinstance(inputs.layer_input, Tensor) else inputs.tensors)
        parts = _micro_batches(output, self.case.micro_batches)
        loss = torch.stack([self._target.loss(part, None) for part in parts]).sum() / len(parts)
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


def _outputs(stage: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of the next stage."""
    with torch.no_grad():
        output = stage(*inputs)
    tensors = (output,) if isinstance(output, Tensor) else tuple(output)
    return tuple(tensor.detach().clone() for tensor in tensors)


def _micro_batches(output: Any, count: int) -> list[Any]:
    """The output of each micro-batch."""
    if isinstance(output, Tensor):
        return list(output.chunk(count))
    return list(zip(*(tensor.chunk(count) for tensor in output), strict=True))


class TorchAdapter(PipelineAdapter):
    """This process's stages of a case."""

    def __init__(self, case: Case, target: TrainingTarget, device: torch.device) -> None:
        self.document = case.torch
        self.devices, self._loss = [device], target.loss
        self._inputs = self._stage_inputs(target)  # before the layers are moved to the device
        self._stamps = ActionStamps(clock_for(device))
        self.process = build_torch(
            self.document,
            target.layers,
            example_input=target.example,
            loss_fn=self._stamps.time_calls(len(case.parts) - 2, "loss", target.loss),
            device=device,
        )
        self.model, self.stamps = nn.ModuleList(self.process.wrapped.values()), [self._stamps]

    def _stage_inputs(self, target: TrainingTarget) -> dict[int, tuple[Tensor, ...]]:
        """The input of each of this process's stages for a micro-batch."""
        size = self.document.replica_samples
        arguments = target.example.repeated(size).layer_input
        first = InputForm.of(target.example).micro_batch(target.example, size)
        tensors = (arguments,) if isinstance(arguments, Tensor) else arguments
        return {
            stage: first if stage == 0 else stage_inputs(target.layers, self.document.parts[stage], tensors)
            for stage in self.document.stages[dist.get_rank() // self.document.replicas]
        }

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures each stage as the schedule runs it, without the replicas' exchange of gradients."""
        last, seconds = len(self.document.parts) - 2, {}
        for stage, module in self.process.wrapped.items():
            inner = cast(StageModule, getattr(module, "module", module))  # inside DistributedDataParallel
            seconds[stage] = measure_isolated(
                inner,
                self._inputs[stage],
                self.devices[0],
                loss=StageLoss(inner, self._loss) if stage == last else None,
                is_first=stage == 0,
                splits=splits_backward(self.document.actions),
            )
        return seconds

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

        self.case, self.document, self.devices, self._loss = case, document, [device], target.loss
        self.stage, self.replica = divmod(dist.get_rank(), document.replicas)
        example = target.example.repeated(document.replica_samples)
        self._inputs = stage_inputs(target.layers, document.parts[self.stage], example.tensors)
        stage = build_deepspeed(document, target.layers, target.loss, target.example.layer_input)
        config = {name: value for name, value in document.config.items() if name != "optimizer"}
        optimizer = torch.optim.SGD(stage.parameters(), lr=LEARNING_RATE)
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=stage, optimizer=optimizer, config=config)
        self.model, self.stamps = self.engine.module, [ActionStamps(clock_for(device))]

    def measure_stages(self) -> dict[int, StageSeconds]:
        """Measures this process's stage alone."""
        seconds = measure_isolated(
            SeparateTensors(self.model),
            self._inputs,
            self.devices[0],
            loss=self._loss if self.stage == self.document.num_stages - 1 else None,
            is_first=self.stage == 0,
            splits=False,
        )
        return {self.stage: seconds}

    def feed(self, samples: ModelInput) -> Iterator[tuple[Any, Tensor]]:
        """Input and a target that nothing reads, of each micro-batch of this replica."""
        device, parts = self.devices[0], self.case.micro_batches * self.case.replicas
        size = samples.batch // parts
        own = []
        for part in range(self.replica, parts, self.document.replicas):
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
