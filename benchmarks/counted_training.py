"""The bytes that a training step really holds, counted on live storages: nothing here is of pplan's ledger.

A step is run with torch's own optimizer, float32 master weights where they belong, autocast and
torch.utils.checkpoint; every storage that an operation makes is noted with a weak reference, and those that
are alive are added up when a step holds most for its backward: at the end of its forward, or, where it
recomputes, at the end of the forward that its backward runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pplan.profiler.torch_private import TorchDispatchMode, storage_key, tree_leaves

_weak: Any = reductions.StorageWeakRef
Context = Callable[[], AbstractContextManager[Any]]


class LiveStorages(TorchDispatchMode):
    """Notes the storages that operations make while it is entered."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[Any, int]] = {}
        self.note(tensors)

    def note(self, tensors: Iterable[Any]) -> None:
        """Besides those of operations."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._seen[storage_key(storage)] = _weak(storage), storage.nbytes()

    @property
    def bytes(self) -> int:
        """Of those that are alive."""
        self._seen = {key: own for key, own in self._seen.items() if not own[0].expired()}
        return sum(size for _, size in self._seen.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.note(tree_leaves(made))
        return made


@dataclass(frozen=True)
class Setup:
    """`precision`: fp32, mixed (the module's weights are bfloat16) or autocast; `gradient_dtype`: of what the
    micro-batches add up. `autocast`: makes its context, where that is the precision."""

    precision: str
    optimizer: str
    recompute: bool
    gradient_dtype: torch.dtype = torch.float32
    autocast: Context = nullcontext


class _Optimizer:
    """torch's optimizer, on float32 master weights where the model's are bfloat16."""

    def __init__(self, model: nn.Module, setup: Setup) -> None:
        self._own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [p.detach().float() for p in self._own] if setup.precision == "mixed" else None
        self.main_gradients: list[Tensor] | None = None
        if setup.precision == "mixed" and setup.gradient_dtype is torch.float32:
            self.main_gradients = [torch.zeros_like(p, dtype=torch.float32) for p in self._own]
        kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[setup.optimizer]
        self._torch: Any = kind(self._masters or self._own, lr=1e-3, foreach=False)

    def add_up(self) -> None:
        """Moves the gradients of a backward to the float32 ones."""
        if self.main_gradients is not None:
            for parameter, main in zip(self._own, self.main_gradients, strict=True):
                if parameter.grad is not None:
                    main.add_(parameter.grad)
                    parameter.grad = None

    def step(self) -> None:
        """Updates the weights; gradients stay, as those of the next micro-batch are added to them."""
        if self._masters is not None:
            gradients: Sequence[Tensor | None] = self.main_gradients or [p.grad for p in self._own]
            for master, gradient in zip(self._masters, gradients, strict=True):
                master.grad = None if gradient is None else gradient.float()
        self._torch.step()
        if self._masters is not None:
            with torch.no_grad():
                for parameter, master in zip(self._own, self._masters, strict=True):
                    parameter.copy_(master)
                    master.grad = None


def held_bytes(model: nn.Module, given: Tensor, setup: Setup) -> int:
    """Bytes of weights, buffers, gradients, optimizer state and activations, when a step's backward has most
    of them; of the second step, so that gradients and states exist."""
    with LiveStorages([*model.parameters(), *model.buffers(), given]) as live:
        optimizer = _Optimizer(model, setup)
        _pass(model, given, setup, live)
        optimizer.add_up()
        optimizer.step()
        return _pass(model, given, setup, live)


def _pass(model: nn.Module, given: Tensor, setup: Setup, live: LiveStorages) -> int:
    """A micro-batch; the bytes that are alive when all is saved that its backward needs."""
    found: list[int] = []

    def note(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
        found.append(live.bytes - _unsaved(output))

    if not setup.recompute:
        with setup.autocast():
            output = model(given)
        note(model, (), output)
        output.backward(torch.ones_like(output))
        return found[-1]
    contexts = lambda: (nullcontext(), setup.autocast())  # noqa: E731
    with set_checkpoint_early_stop(False):
        with setup.autocast():
            output = checkpoint(model, given, use_reentrant=False, context_fn=contexts)
        handle = model.register_forward_hook(note)
        output.backward(torch.ones_like(output))
        handle.remove()
    # The first forward's output is alive while backward runs, and what backward starts from.
    return found[-1] - 2 * int(output.untyped_storage().nbytes())


def _unsaved(output: Tensor) -> int:
    """Bytes of the output, unless its own operation saved it."""
    saved = getattr(output.grad_fn, "_saved_result", None)
    is_saved = isinstance(saved, Tensor) and saved.data_ptr() == output.data_ptr()
    return 0 if is_saved else int(output.untyped_storage().nbytes())
