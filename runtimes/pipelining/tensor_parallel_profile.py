"""Layers that several processes share, measured by all of them together.

Every process runs the same passes, layer by layer, so that the collectives inside a layer meet. A layer's
seconds are those of the process that takes longest, its bytes those of one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ...cost_models.errors import MachineError, ModelError, UsageError
from ...profiler.local_machine import device_memory_bytes, device_name, versions
from ...profiler.profile_file import Profile
from ...profiler.sequential import sequential
from ...profiler.torchrun_env import COMMAND, read_torchrun_env
from ...profiler.user_model.loaded_model import LoadedModel
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
        run = _SharedLayers(list(layers), device)
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


@dataclass(frozen=True)
class _Saved:
    """Bytes by layer, as `LayerMeasurement` defines them."""

    saved: list[int]
    saved_input: list[int]


@dataclass
class _SharedLayers:
    """The layers of this process, in order."""

    layers: list[nn.Module]
    device: torch.device

    def timed(self, batch: Any, budget_seconds: float) -> np.ndarray:
        """Seconds [pass, layer, forward and backward] of the slowest process."""
        for _ in range(WARM_UPS):
            one = self._pass(batch)
        count = torch.tensor([budget_seconds / max(float(one.sum()), 1e-9)], dtype=torch.float64)
        count = count.clamp(FEWEST, MOST).to(self.device)
        dist.broadcast(count, src=0)
        times = torch.from_numpy(np.stack([self._pass(batch) for _ in range(int(count))])).to(self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return np.asarray(times.cpu())

    def _pass(self, batch: Any) -> np.ndarray:
        """Each layer's forward, then each one's backward; gradients are added to those that are there."""
        times = np.zeros((len(self.layers), 2))
        leaves: list[list[Tensor]] = []
        outputs: list[list[Tensor]] = []
        value, gradients = batch, None
        for index, layer in enumerate(self.layers):
            own: list[Tensor] = []
            value = _apart(value, own)
            start = self._now()
            value = layer(value)
            times[index, 0] = self._now() - start
            leaves.append(own)
            outputs.append([each for each in _tensors(value) if each.requires_grad])
        for index in reversed(range(len(self.layers))):
            results = outputs[index]
            if gradients is None:
                gradients = [torch.ones_like(each) for each in results]
            start = self._now()
            if results:
                torch.autograd.backward(results, gradients)
            times[index, 1] = self._now() - start
            gradients = [torch.zeros_like(own) if own.grad is None else own.grad for own in leaves[index]]
        return times

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return perf_counter()

    def saved_bytes(self, batch: Any) -> _Saved:
        """Of one forward through all layers, each storage once, parameters and buffers not at all."""
        own = {_key(each) for layer in self.layers for each in (*layer.parameters(), *layer.buffers())}
        users: dict[int, list[int]] = {}
        bytes: dict[int, int] = {}
        alive: list[Tensor] = []
        inputs: list[set[int]] = []
        now = 0

        def pack(tensor: Tensor) -> Tensor:
            key = _key(tensor)
            if key not in own:
                users.setdefault(key, []).append(now)
                bytes[key] = _local(tensor).untyped_storage().nbytes()
                alive.append(tensor)
            return tensor

        value = batch
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            for now, layer in enumerate(self.layers):  # noqa: B007
                inputs.append({_key(each) for each in _tensors(value)})
                alive += _tensors(value)
                value = layer(value)
        saved, saved_input = [0] * len(self.layers), [0] * len(self.layers)
        for key, layers in users.items():
            saved[layers[0]] += bytes[key]
            for index in range(layers[0] + 1, layers[-1] + 1):
                saved_input[index] += bytes[key] * (key in inputs[index])
        return _Saved(saved, saved_input)


def _written(
    structure: Profile,
    run: _SharedLayers,
    saved: Sequence[_Saved],
    seconds: Sequence[np.ndarray],
    processes: int,
) -> Profile:
    """The structure with what was measured. Bytes that stage outputs and workspaces take are the unshared
    model's: a layer's output is whole on every process."""
    document = structure.model_dump(mode="python", by_alias=True)
    for index, (layer, own) in enumerate(zip(document["layers"], run.layers, strict=True)):
        parameters = [_local(each) for each in own.parameters()]
        trainable = [_local(each).nbytes for each in own.parameters() if each.requires_grad]
        layer |= {
            "parameter_bytes": sum(each.nbytes for each in parameters),
            "trainable_bytes": sum(trainable),
            "largest_parameter_bytes": max(trainable, default=0),
            "buffer_bytes": sum(each.nbytes for each in own.buffers()),
        }
        for cost, bytes, times in zip(layer["costs"], saved, seconds, strict=True):
            both = times[:, index].sum(axis=1)
            low, middle, high = np.percentile(both, (25, 50, 75))
            forward, backward = np.median(times[:, index], axis=0)
            cost |= {
                "forward_seconds": float(forward),
                "backward_seconds": float(backward),
                "saved_bytes": bytes.saved[index],
                "saved_input_bytes": bytes.saved_input[index],
                "spread": float((high - low) / middle) if middle and len(times) > 1 else None,
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


def _apart(value: Any, leaves: list[Tensor]) -> Any:
    """A copy of what crosses a cut, whose gradients are put into new leaves, in the order of the tensors."""
    if isinstance(value, Tensor):
        if not value.requires_grad:
            return value
        leaf = value.detach().requires_grad_()
        leaves.append(leaf)
        return leaf.clone()  # a layer may write to its input
    if isinstance(value, tuple | list):
        return type(value)(_apart(each, leaves) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    """All, in order."""
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for each in inner for tensor in _tensors(each)]


def _local(tensor: Tensor) -> Tensor:
    """This process's part."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.to_local()
    return local


def _key(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()
