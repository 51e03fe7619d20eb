"""A model becomes a profile: the sweep over micro-batch sizes, and what it found put into the file's form."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..cost_models.errors import MachineError, ModelError, UsageError
from .clocks import Clock, CpuClock, CudaClock
from .copies import copied
from .layers import chain_of
from .machine import DTYPES, device_memory_bytes, device_name, device_named, dtype_named, versions
from .models import LoadedModel, checked_seed, from_module, is_positive, own_dtype, refuse_lazy, seeded
from .out_of_memory import is_out_of_memory, refusal
from .profile_file import LayerMeasurement, Profile, ProfiledLayer, WholeMeasurement
from .sweep import Progress, SizeRun, Subject, Sweep

CLOSES = 0.05
"""How far the closing ratio may be from 1 before the profile says so."""


def profile_model(
    model: LoadedModel | tuple[nn.Module, Tensor],
    *,
    micro_batch_sizes: Sequence[int] | None = None,
    dtype: str | None = None,
    device: str | None = None,
    budget_seconds: float = 60.0,
    rounds: int | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measures every layer of `model`, and the whole model, at several micro-batch sizes.

    `model`: loaded, or a module and an example input, shape (batch, ...). It is measured on a copy, in the
    mode (training or not) it is in. `dtype`: what the copy and floating inputs are converted to; by default
    the model's own, or float32 where it has several or none. `micro_batch_sizes`: those, or by default 1, 2,
    4, ..., the smallest first and as far as `budget_seconds` and memory reach; the notes say what was
    asked for and left out. `rounds`: so many timed passes at each size instead of a budget. `seed`: 0 to
    2**63 - 1.

    Raises UsageError, ModelError, MachineError.
    """
    seed = checked_seed(seed)
    loaded = model if isinstance(model, LoadedModel) else from_module(*model, seed=seed)
    sizes = _checked(micro_batch_sizes, budget_seconds, rounds)
    subject = _subject(loaded, sizes[0] if sizes else 1, dtype, device, seed, clock)
    sweep = Sweep(subject, sizes, budget_seconds, rounds, progress)
    with seeded(seed), torch.enable_grad(), _on(subject.device):
        sweep.measure()
    return _profile(subject, sweep)


def _checked(
    sizes: Sequence[int] | None, budget_seconds: float, rounds: int | None
) -> tuple[int, ...] | None:
    if not budget_seconds > 0 or budget_seconds == float("inf"):
        raise UsageError(f"budget {budget_seconds:g} s: must be above 0", "Give seconds, as in --budget 60s.")
    if rounds is not None and rounds < 1:
        raise UsageError(f"rounds {rounds}: must be at least 1", "Measure once at least.")
    if sizes is None:
        return None
    if isinstance(sizes, str) or not isinstance(sizes, Collection):
        seen, right = repr(sizes), False
    else:
        seen = ", ".join(map(str, sizes)) or "(none)"
        right = len(sizes) > 0 and all(map(is_positive, sizes))
    if not right:
        raise UsageError(
            f"micro-batch sizes {seen}: whole numbers of at least 1 are needed",
            "For example 1, 2, 4 and 8: --micro-batch-sizes 1,2,4,8.",
        )
    return tuple(sorted(set(map(int, sizes))))


def _subject(
    loaded: LoadedModel, smallest: int, dtype: str | None, device: str | None, seed: int, clock: Clock | None
) -> Subject:
    place = device_named(device)
    kind, notes = _dtype(loaded, dtype)
    clock = clock or (CudaClock(place) if place.type == "cuda" else CpuClock())
    try:
        copy = copied(loaded.module, loaded.name).to(place, kind)
        for parameter in copy.parameters():
            parameter.grad = None
        example = loaded.example_input_for(smallest)
        if example.dtype.is_floating_point:
            example = example.to(kind)
        chain = chain_of(copy, example, name=loaded.name)
        return Subject(dataclasses.replace(loaded, module=copy), chain, place, kind, clock, seed, notes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = refusal(error)
    raise MachineError(
        f"{loaded.name}: the model does not fit on {place}: {said}",
        "Use a smaller --dtype, a smaller model, or a device of more memory.",
    )


def _dtype(loaded: LoadedModel, name: str | None) -> tuple[torch.dtype, tuple[str, ...]]:
    """What the model is converted to, and what is to be said of it. Raises UsageError, ModelError."""
    asked = None if name is None else dtype_named(name)
    module = loaded.module
    refuse_lazy(loaded.name, module)
    tensors = list(itertools.chain(module.named_parameters(), module.named_buffers()))
    for path, tensor in tensors:
        if tensor.is_complex():
            raise ModelError(
                f"{loaded.name}: {path} is {_dtype_name(tensor.dtype)}; only real numbers can be measured",
                "Keep real and imaginary parts in tensors of their own (torch.view_as_real).",
            )
    if asked is not None:
        return asked, ()
    own = own_dtype(module)
    if own is not None and own in DTYPES.values():
        return own, ()
    kinds = sorted({_dtype_name(tensor.dtype) for _, tensor in tensors if tensor.dtype.is_floating_point})
    note = f"the model is in {' and '.join(kinds)} and was measured in float32; choose another with --dtype"
    return torch.float32, (note,) if kinds else ()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    """Makes a CUDA device the current one, for its events; nothing for a CPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        # Gives autograd's thread a CUDA context: a backward that begins with cuBLAS would warn of none.
        torch.autograd.backward([torch.ones(1, device=device, requires_grad=True).exp()])
        yield


def _profile(subject: Subject, sweep: Sweep) -> Profile:
    loaded, chain, device = subject.loaded, subject.chain, subject.device
    whole = [_whole(run) for run in sweep.runs]
    one = loaded.example_input_for(1)
    item = subject.dtype.itemsize if one.dtype.is_floating_point else one.dtype.itemsize
    costs = [_costs(run) for run in sweep.runs]
    return Profile(
        model=loaded.name,
        device=device.type,
        device_name=device_name(device),
        device_memory_bytes=device_memory_bytes(device),
        dtype=_dtype_name(subject.dtype),
        input_shape=list(loaded.input_shape),
        input_bytes_per_sample=one.numel() * item,
        classes=loaded.classes,
        seed=subject.seed,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        layers=[
            ProfiledLayer(
                name=layer.name,
                kind=layer.kind,
                parameter_bytes=layer.parameter_bytes,
                trainable_bytes=layer.trainable_bytes,
                buffer_bytes=layer.buffer_bytes,
                cut_after=layer.cut_reason is None,
                cut_reason=layer.cut_reason,
                costs=[of_size[index] for of_size in costs],
            )
            for index, layer in enumerate(chain.layers)
        ],
        edges=list(itertools.pairwise(layer.name for layer in chain.layers)),
        whole=whole,
        unmeasured=sweep.unmeasured,
        notes=[*_notes(subject, sweep), *(note for each in whole for note in _closing_note(each))],
        made_by=versions(),
    )


def _costs(run: SizeRun) -> list[LayerMeasurement]:
    """Of every layer."""
    rounds = run.rounds
    forward, backward, spreads = rounds.medians("forward"), rounds.medians("backward"), rounds.spreads()
    forward_host, backward_host = rounds.host_medians("forward"), rounds.host_medians("backward")
    return [
        LayerMeasurement(
            micro_batch_size=run.size,
            forward_seconds=float(forward[index]),
            backward_seconds=float(backward[index]),
            output_bytes=run.saved.output_bytes[index],
            saved_bytes=run.saved.saved_bytes[index],
            saved_input_bytes=run.saved.saved_input_bytes[index],
            workspace_bytes=run.workspace_bytes[index],
            spread=float(spreads[index]),
            forward_host_seconds=forward_host[index],
            backward_host_seconds=backward_host[index],
        )
        for index in range(len(spreads))
    ]


def _whole(run: SizeRun) -> WholeMeasurement:
    forward, backward = run.rounds.whole_medians()
    own_forward = float(run.rounds.medians("forward").sum())
    own_backward = float(run.rounds.medians("backward").sum())
    if forward + backward <= 0 or own_forward + own_backward <= 0:
        raise MachineError(
            f"micro-batch size {run.size}: the clock reads 0 s for the whole pass",
            "The model is too fast for this machine's clock: name larger --micro-batch-sizes.",
        )
    return WholeMeasurement(
        micro_batch_size=run.size,
        forward_seconds=forward,
        backward_seconds=backward,
        closing_ratio=(own_forward + own_backward) / (forward + backward),
        forward_closing_ratio=own_forward / forward if forward else None,
        backward_closing_ratio=own_backward / backward if backward else None,
        spread=run.rounds.whole_spread(),
        rounds=len(run.rounds),
    )


def _notes(subject: Subject, sweep: Sweep) -> list[str]:
    notes = [*subject.notes, *sweep.notes]
    if not subject.loaded.module.training:
        notes.append("the model is in evaluation mode and was measured so")
    for left in sweep.unmeasured:
        was = "was not" if sweep.sizes is None else "was asked for and not"
        notes.append(
            f"micro-batch size {left.micro_batch_size} {was} measured ({left.reason}): {left.detail}"
        )
    return notes


def _closing_note(whole: WholeMeasurement) -> list[str]:
    if abs(whole.closing_ratio - 1) <= CLOSES:
        return []
    return [
        f"micro-batch size {whole.micro_batch_size}: the layers add up to {whole.closing_ratio:.3f} of the "
        f"whole model's time, more than {CLOSES:.0%} off; measure again on a quiet machine"
    ]
