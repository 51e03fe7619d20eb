"""Layers that several processes share, measured by all of them together.

Every process runs the same passes, layer by layer, so that the collectives inside a layer meet. A layer's
seconds are those of the process that takes longest, its bytes those of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ...cost_models.errors import MachineError, ModelError, UsageError
from ...profiler.clocks import Clock, clock_for
from ...profiler.layer import Layer
from ...profiler.layers import sequential
from ...profiler.local_machine import device_memory_bytes, device_name, versions
from ...profiler.passes import CountedBytes, LayerStamps, LayerTimes, OutputGradients, SavedBytes, run_layers
from ...profiler.profile_file import Profile
from ...profiler.timed_passes import TimedPasses
from ...profiler.torchrun_env import COMMAND, read_torchrun_env
from ...profiler.user_model import LoadedModel
from .ranks import share_matrices, styles_by_module

WARM_UPS = 2
FEWEST, MOST = 3, 30
"""Timed passes at each micro-batch size."""


def profile_shared_layers(
    loaded: LoadedModel,
    structure: Profile,
    tensor_plan: Mapping[str, object] | None,
    processes: int,
    *,
    device: torch.device,
    budget_seconds: float,
) -> Profile:
    """The profile of one of `processes` that share the matrices of every layer, on each of them the same.

    `structure`: of the unshared model, on the meta device, at the sizes to measure. `tensor_plan`: default:
    that of the transformers model. Raises UsageError, ModelError, MachineError.
    """
    check_processes(processes)
    plan = tensor_plan or _own_plan(loaded)
    with _joined(device):
        layers = sequential(
            loaded.module.to(device), loaded.example_input_for(1).to(device).layer_input,
            granularity=structure.granularity,
        )  # fmt: skip
        if layers.layer_names != tuple(layer.name for layer in structure.layers):
            raise ModelError(
                f"{loaded.name}: it has other layers on {device.type} than on the meta device",
                "Name the layers: granularity='module:PATTERN'.",
            )
        share_matrices(
            layers, styles_by_module(layers, plan, "tensor_plan"), init_device_mesh(device.type, (processes,))
        )
        run = _SharedLayers(list(layers), layers.layer_names, clock_for(device), device)
        sizes = structure.micro_batch_sizes
        seconds, saved = [], []
        for size in sizes:
            batch = loaded.example_input_for(size).to(device).layer_input
            saved.append(run.saved_bytes(batch))
            seconds.append(run.timed(batch, budget_seconds / len(sizes)))
        return _written(structure, run, saved, seconds, processes)


def _own_plan(loaded: LoadedModel) -> dict[str, object]:
    plan = getattr(getattr(loaded.module, "config", None), "base_model_tp_plan", None)
    if not plan:
        raise UsageError(
            f"{loaded.name}: has no plan of its own of which modules several devices share",
            "Name the modules to split with `tensor_plan`, colwise or rowwise each.",
        )
    return dict(plan)


def check_processes(processes: int) -> None:
    """Raises UsageError where there are not so many processes, this among them."""
    if dist.is_initialized():
        count = dist.get_world_size()
    else:
        count = read_torchrun_env(os.environ, "profile", at_least=1).world_size
    if count != processes:
        raise UsageError(
            f"tensor_parallel={processes}: there are {count} processes",
            f"Start as many as share a layer: {COMMAND.replace(' 2 ', f' {processes} ')} profile",
        )


@contextmanager
def _joined(device: torch.device) -> Iterator[None]:
    """A process group of all, where there is none yet."""
    if dist.is_initialized():
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=5))
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UsageError | ModelError | MachineError):
            raise
        raise MachineError(
            f"profile: the processes that share layers failed: {str(error).splitlines()[0][:200]}",
            "See what the other processes printed.",
        ) from error
    finally:
        dist.destroy_process_group()


class _LocalBytes(SavedBytes):
    """Saved bytes of this process: of a tensor that is split, its part."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        tensors = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]
        weights = [nn.Parameter(_local(tensor), requires_grad=False) for tensor in tensors]
        super().__init__(nn.ParameterList(weights), len(layers))

    def _pack(self, tensor: Tensor) -> Tensor:
        super()._pack(_local(tensor))
        return tensor.detach()


class _SharedLayers:
    """The layers of this process, in order."""

    def __init__(
        self, modules: Sequence[nn.Module], names: Sequence[str], clock: Clock, device: torch.device
    ) -> None:
        self.modules, self.clock, self.device = modules, clock, device
        self._layers = [
            Layer(name, type(module).__name__, module, None, (), (), None)
            for name, module in zip(names, modules, strict=True)
        ]
        self._gradients = OutputGradients(0)

    def timed(self, batch: Any, budget_seconds: float) -> TimedPasses:
        """The passes, each with the seconds of the slowest process."""
        for _ in range(WARM_UPS):
            times = self._pass(batch)
        count = torch.tensor([budget_seconds / max(float(times.sum()), 1e-9)], dtype=torch.float64)
        count = count.clamp(FEWEST, MOST).to(self.device)
        dist.broadcast(count, src=0)
        passes = torch.from_numpy(np.stack([self._pass(batch) for _ in range(int(count))])).to(self.device)
        dist.all_reduce(passes, op=dist.ReduceOp.MAX)
        return TimedPasses([LayerTimes(*directions) for directions in np.asarray(passes.cpu())])

    def _pass(self, batch: Any) -> np.ndarray:
        """Seconds [forward or backward, layer] of this process."""
        stamps = LayerStamps(self.clock, len(self._layers))
        self.clock.settle()
        run_layers(self._layers, batch, self._gradients, stamps)
        times = stamps.times()
        return np.stack([times.forward, times.backward])

    def saved_bytes(self, batch: Any) -> CountedBytes:
        """Return the bytes that one forward through all layers saves."""
        watcher = _LocalBytes(self.modules)
        with watcher.hooks():
            run_layers(self._layers, batch, self._gradients, watcher)
        return watcher.counted


def _written(
    structure: Profile,
    run: _SharedLayers,
    saved: Sequence[CountedBytes],
    seconds: Sequence[TimedPasses],
    processes: int,
) -> Profile:
    """The structure with what was measured. Bytes that stage outputs and workspaces take are the unshared
    model's: a layer's output is whole on every process."""
    document = structure.model_dump(mode="python", by_alias=True)
    for index, (layer, own) in enumerate(zip(document["layers"], run.modules, strict=True)):
        parameters = [_local(each) for each in own.parameters()]
        trainable = [_local(each).nbytes for each in own.parameters() if each.requires_grad]
        layer |= {
            "parameter_bytes": sum(each.nbytes for each in parameters),
            "trainable_bytes": sum(trainable),
            "largest_parameter_bytes": max(trainable, default=0),
            "buffer_bytes": sum(each.nbytes for each in own.buffers()),
        }
        for cost, counted, passes in zip(layer["costs"], saved, seconds, strict=True):
            cost |= {
                "forward_seconds": float(passes.medians("forward")[index]),
                "backward_seconds": float(passes.medians("backward")[index]),
                "saved_bytes": counted.saved_bytes[index],
                "saved_input_bytes": counted.saved_input_bytes[index],
                "spread": passes.spreads()[index],
            }
    note = (
        f"measured by {processes} processes that share each layer: its seconds, with the collectives inside, "
        "are the slowest one's, its weights and what it saves one's; workspaces are the whole layer's, and "
        "the loss is not in it"
    )
    document |= {
        "device": run.device.type,
        "device_name": device_name(run.device),
        "device_memory_bytes": device_memory_bytes(run.device),
        "threads": torch.get_num_threads() if run.device.type == "cpu" else None,
        "tensor_parallel": processes,
        # Here the layers were compared with the model, on a device that has values.
        "notes": [*(own for own in structure.notes if "meta device" not in own), note],
        "made_by": versions(),
    }
    return Profile.model_validate(document)


def _local(tensor: Tensor) -> Tensor:
    """This process's part."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local
