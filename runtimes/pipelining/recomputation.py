"""Layers that run again in backward, for their activations: in the state in which they ran first.

Forward may change buffers: the statistics of a batch norm, the vectors of a spectral norm, a queue. To run
it again as torch.utils.checkpoint does changes them twice, and of another state come other activations than
those whose gradient is asked for. Here the second run works on copies of the buffers as the first one found
them, which every micro-batch in flight keeps. Of what torch.jit made, whose buffers cannot be replaced, the
values are put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from ...cost_models.quantities import format_count
from ...profiler.chain.layer_sequential import LayerSequential


def written_buffers(layers: nn.Sequential) -> list[Tensor]:
    """Buffers that forward changes, where the layers were made of a model and know it; else all of them."""
    names = layers.written_buffers if isinstance(layers, LayerSequential) else None
    return [buffer for name, buffer in layers.named_buffers() if names is None or name in names]


def names_in_stage(layers: nn.Sequential, written: Sequence[Tensor]) -> tuple[str, ...]:
    """Names in a stage's layers of the buffers that are `written`."""
    identities = {id(buffer) for buffer in written}
    return tuple(name for name, own in layers.named_buffers() if id(own) in identities)


def run_recomputed(
    layers: nn.Sequential,
    make_input: Callable[..., Any],
    tensors: Sequence[Tensor],
    written: Sequence[str],
    scripted: Sequence[str] = (),
) -> Any:
    """What `layers` make of `make_input(*tensors)`, without keeping their activations.

    `written`: names of the buffers that they change. `scripted`: of the modules that torch.jit made: they do
    not let the exception through by which torch.utils.checkpoint ends the second run early.
    """
    buffers = dict(layers.named_buffers())
    before = {name: buffers[name].clone() for name in written if name in buffers}
    runs = 0

    def run(*own: Tensor) -> Any:
        nonlocal runs
        runs += 1
        if runs == 1 or not before:
            return layers(make_input(*own))
        inside = tuple(f"{path}." for path in scripted)
        state = {name: buffer.clone() for name, buffer in before.items() if not name.startswith(inside)}
        fixed = [(buffers[name], buffer) for name, buffer in before.items() if name.startswith(inside)]
        with _put_back(fixed):
            return functional_call(layers, state, (make_input(*own),))

    call: Callable[..., Any] = checkpoint
    with set_checkpoint_early_stop(False) if scripted else nullcontext():
        return call(run, *tensors, use_reentrant=False)


@contextmanager
def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, each of these buffers has the values that stand beside it."""
    values = [(buffer, buffer.detach().clone()) for buffer, _ in buffers]
    _assign(buffers)
    try:
        yield
    finally:
        _assign(values)


def _assign(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)


def warn_of_second_runs(layers: nn.Sequential, runtime: str) -> None:
    """A UserWarning where a runtime that recomputes by itself changes buffers twice for a micro-batch."""
    names = (layers.written_buffers or ()) if isinstance(layers, LayerSequential) else ()
    if not names:
        return
    others = f" and {format_count(len(names) - 1, 'more buffer')}" if len(names) > 1 else ""
    warnings.warn(
        f"forward changes {_in_model(layers, names[0])}{others}: {runtime}, which recomputes by running it "
        "again, changes them twice for a micro-batch (pplan.runtimes.torch_pipelining does not)",
        UserWarning,
        stacklevel=4,
    )


def _in_model(layers: nn.Sequential, name: str) -> str:
    """A buffer of the layers by its layer's name, where that is known."""
    index, _, key = name.partition(".")
    names = layers.layer_names if isinstance(layers, LayerSequential) else ()
    return f"{names[int(index)]}.{key}" if names else name
