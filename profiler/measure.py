"""A model becomes a profile: it is taken apart, measured as it fits on the device, and written down."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch import nn

from ..cost_models.errors import ModelError, PplanError, UsageError
from ..cost_models.quantities import format_bytes
from .build_profile import build_profile
from .cache import ProfileCache, Request
from .clocks import Clock, clock_for
from .comparison import left_alone
from .estimate import (
    SIZES,
    AnalyticTarget,
    as_on_the_cpu,
    count_structure,
    estimate,
    find_equal_layers,
)
from .fingerprint import fingerprint
from .journal import Journal
from .layer import KEEP_BATCH, ShapeDependsOnBatch, storage_aliases
from .layers import build_chain
from .local_machine import free_bytes, parse_device
from .losses import load_loss
from .models import from_module
from .modes import MeasurementTarget, Modes, Setup, dtype_for, dtype_text
from .profile_file import Interrupted, Profile, Unmeasured
from .profile_options import ProfileOptions
from .segments import SegmentedSweep
from .size_run import release
from .size_sweep import Progress, SizeSweep, WholeSweep, host_note
from .tracing import refuse_hooks
from .trial import experts_on_meta
from .user_model import (
    DoesNotFit,
    LoadedModel,
    copy_model,
    copy_to_host,
    copy_to_meta,
    first_line,
    fixed_seed,
    is_out_of_memory,
    refusal,
)

_VERIFYING = 0.2
"""Of the budget, what comparing layers and model may take, but for a first pass of both."""


@dataclass(frozen=True)
class MeasurementLimits:
    """What is measured of it, and how long."""

    request: Request
    progress: Callable[[Progress], None] | None
    estimate_for: AnalyticTarget | None = None
    profile_cache: ProfileCache = field(default_factory=lambda: ProfileCache(None))
    remark: Callable[[str], None] = lambda _: None
    begun: float = 0.0
    """By the clock; loading is before it."""
    key: str = ""
    """Of the cache."""

    @property
    def smallest(self) -> int:
        """The micro-batch size that comes first."""
        return self.request.sizes[0] if self.request.sizes else 1


def profile_model(
    model: LoadedModel | tuple[nn.Module, object],
    options: ProfileOptions | None = None,
    *,
    rounds: int | None = None,
    parts: bool = True,
    memory_bytes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
    estimate_for: AnalyticTarget | None = None,
    remark: Callable[[str], None] | None = None,
    name_key: str | None = None,
) -> Profile:
    """Measures every layer of `model`, and the whole model, at several micro-batch sizes.

    `model`: loaded, or a module and an example input as `ModelInput.of` takes it. It is measured on a copy,
    in the mode (training or not) it is in, as the `options` say; the notes say which sizes were asked for and
    left out. `rounds`: so many timed passes at each size instead of a budget. `parts`: backward in two parts
    too. `memory_bytes`: as if the device had no more free than that. `remark` is told of what earlier runs
    kept, and of a budget that the smallest size exceeds. `name_key`: of a model that its name determines (see
    `cache.name_key`), with which a later run finds the profile without the model.

    On the meta device nothing is timed: the layers and all bytes are counted; with `estimate_for` the seconds
    are estimated for that GPU, whatever `device` says. A model that does not fit on a CUDA device, or into
    `memory_bytes`, is measured segment by segment, without a whole to hold the layers against.

    Raises UsageError, ModelError, MachineError; Interrupted, which holds a profile of what there is, at
    Ctrl-C after a micro-batch size was measured.
    """
    settings = options or ProfileOptions()
    loaded = model if isinstance(model, LoadedModel) else from_module(*model)
    check_limits(rounds, memory_bytes)
    request = Request.of(settings, rounds, parts=parts, memory_bytes=memory_bytes)
    place = parse_device(settings.device if estimate_for is None else "meta")
    modes = Modes(
        compile=settings.compile,
        channels_last=settings.channels_last,
        amp=settings.amp,
        tf32=settings.tf32,
        cudnn_benchmark=settings.cudnn_benchmark,
    )
    passing = modes if estimate_for is None else replace(modes, tf32=False, cudnn_benchmark=False)
    passing.check(place)
    setup = Setup(
        device=place,
        dtype=settings.dtype,
        granularity=loaded.granularity if settings.granularity is None else settings.granularity,
        keep_together=tuple(settings.keep_together),
        loss=loaded.loss if settings.loss is None else settings.loss,
        modes=modes,
        seed=settings.seed,
        clock=clock or clock_for(place),
        verify_seconds=_VERIFYING * settings.budget_seconds if rounds is None else inf,
    )
    clock_start = setup.clock.now()
    profile_cache = ProfileCache(None) if place.type == "meta" else ProfileCache.of_user(settings, remark)
    limits = MeasurementLimits(
        request,
        progress,
        estimate_for,
        replace(profile_cache, link=name_key),
        remark or (lambda _: None),
        clock_start,
    )
    # The device first: CUDA has no random numbers to seed before it is initialised.
    with _on(place), fixed_seed(settings.seed), torch.enable_grad():
        if profile_cache.folder is not None:
            limits = _with_key(limits, loaded, setup)
            profile = limits.profile_cache.find(limits.key, request, loaded)
            if profile is not None:
                return profile
        return _measured(loaded, setup, limits)


def _with_key(limits: MeasurementLimits, loaded: LoadedModel, setup: Setup) -> MeasurementLimits:
    """The limits with the key of the cache; without a cache where the model cannot be described."""
    try:
        return replace(limits, key=fingerprint(loaded, setup))
    except PplanError:
        raise
    except Exception as error:  # whatever the user's objects raise
        limits.remark(f"Nothing is kept for a later run: the model cannot be described: {first_line(error)}")
        return replace(limits, profile_cache=ProfileCache(None))


def check_limits(rounds: int | None, memory_bytes: int | None) -> None:
    """Raises UsageError."""
    if rounds is not None and rounds < 1:
        raise UsageError(f"rounds={rounds}: must be at least 1", "Measure once at least.")
    if memory_bytes is not None and memory_bytes < 1:
        raise UsageError(
            f"memory_bytes={memory_bytes}: must be at least 1", "Give the device's memory in bytes."
        )


def _measured(loaded: LoadedModel, setup: Setup, limits: MeasurementLimits) -> Profile:
    """Measures the model whole where it fits, else in segments."""
    if limits.progress is not None:
        limits.progress(Progress("tracing", limits.smallest, None, 0.0))
    if setup.device.type == "meta":
        with experts_on_meta():
            return _structure(loaded, setup, limits)
    try:
        return _in_one(loaded, setup, limits)
    except DoesNotFit:
        if setup.device.type != "cuda" and limits.request.memory_bytes is None:
            raise
    # Only here, behind the except block, is nothing held by the traceback any more.
    release(setup.device)
    return _in_segments(loaded, setup, limits)


def _in_one(loaded: LoadedModel, setup: Setup, limits: MeasurementLimits) -> Profile:
    """Measures with the whole model on the device. Raises DoesNotFit."""
    subject = _build_target(loaded, setup, limits.smallest)
    _check_fits(subject, limits.smallest, limits.request.memory_bytes)

    sweep = partial(WholeSweep, parts=limits.request.parts, memory_bytes=limits.request.memory_bytes)
    return _sweep_profile(subject, limits, sweep)


def _in_segments(loaded: LoadedModel, setup: Setup, limits: MeasurementLimits) -> Profile:
    """Measures with only a part of the weights on the device at a time. This keeps no journal."""
    limits = replace(limits, key=f"{limits.key}-segments")
    profile = limits.profile_cache.find(limits.key, limits.request, loaded)
    if profile is not None:
        return profile
    subject = _build_target(loaded, setup, limits.smallest, host=True)
    free = partial(_usable_bytes, setup.device, limits.request.memory_bytes)
    return _sweep_profile(subject, limits, partial(SegmentedSweep, free_bytes=free), journal=False)


def _sweep_profile(
    subject: MeasurementTarget,
    limits: MeasurementLimits,
    kind: Callable[..., SizeSweep[Any]],
    *,
    journal: bool = True,
) -> Profile:
    """The profile, measured and kept. Raises Interrupted."""

    def measure(journal: Journal | None) -> Profile:
        sweep_limits = (
            limits.request.sizes,
            limits.request.budget_seconds,
            limits.request.rounds,
            limits.progress,
        )
        earlier = subject.clock.now() - limits.begun + subject.loaded.loading_seconds
        sweep = kind(subject, *sweep_limits, journal, limits.remark, earlier)
        sweep.measure()
        results, gpu = sweep.results, sweep.gpu_record()
        host = [note for note in map(host_note, results) if note]
        warnings = gpu.notes() if gpu else []
        notes = [
            *sweep.notes,
            *warnings,
            *host,
            *left_notes(sweep.unmeasured, sweep.sizes),
            *_continued(journal),
        ]
        profile = build_profile(subject, results, sweep.unmeasured, notes, sweep.accumulation())
        profile = profile if gpu is None else profile.model_copy(update={"gpu": gpu})
        if sweep.interrupted:
            raise Interrupted(profile)
        return profile

    layers = len(subject.chain) if journal else None
    return limits.profile_cache.keep(limits.key, limits.request, layers, measure)


def _build_target(
    loaded: LoadedModel, setup: Setup, smallest: int, *, host: bool = False
) -> MeasurementTarget:
    """The working copy on the device (`host`: left on the CPU), and its layers. Raises DoesNotFit."""
    kind, notes = dtype_for(loaded, setup.dtype)
    place = torch.device("cpu") if host else setup.device
    refuse_hooks(loaded.module, loaded.name)  # a copy of a GraphModule has none
    try:
        copy = setup.modes.converted(_copied_to(place, loaded).to(kind))
        for parameter in copy.parameters():
            parameter.grad = None
        example = loaded.example_input_for(smallest).to(dtype=kind)
        with left_alone(loaded.module, loaded.name):
            chain = build_chain(
                copy,
                example,
                name=loaded.name,
                granularity=setup.granularity,
                keep_together=setup.keep_together,
                aliases=storage_aliases(loaded.module),
                verify=True,
                verify_seconds=setup.verify_seconds,
            )
        if chain.faults.any_size:
            raise ShapeDependsOnBatch(f"{loaded.name}: {chain.faults.any_size}", KEEP_BATCH)
        layouts = setup.modes.notes((*copy.parameters(), *copy.buffers(), *example.tensors))
        return MeasurementTarget(
            replace(loaded, module=copy),
            chain,
            setup.device,
            kind,
            setup.clock,
            setup.seed,
            (*loaded.notes, *notes, *layouts),
            setup.modes,
            load_loss(setup.loss, setup.seed),
        )
    except Exception as error:
        if isinstance(error, ModelError) and notes:
            error.hint = (
                f"Its parameters are of several dtypes, and were converted to {dtype_text(kind)} before it "
                f"ran: let forward convert by the weights at hand, as in x.to(layer.weight.dtype). "
                f"{error.hint}"
            )
        if not is_out_of_memory(error):
            raise
        reason = refusal(error)
    raise DoesNotFit(
        f"{loaded.name}: the model does not fit on {place}: {reason}",
        "Use a smaller `dtype`, a smaller model, or a device of more memory.",
    )


def _copied_to(place: torch.device, loaded: LoadedModel) -> nn.Module:
    """A copy there. To another device than the model's own, it does not lie on that twice."""
    model, name = loaded.module, loaded.name
    if place.type == "meta":
        return copy_to_meta(model, name)
    if place.type == "cpu" and any(parameter.device.type == "cuda" for parameter in model.parameters()):
        return copy_to_host(model, name)
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name}: {path} is on the meta device and has no values",
                "Build it outside torch.device('meta'), or look at its structure alone: device='meta'.",
            )
    return copy_model(model, name).to(place)


def _check_fits(subject: MeasurementTarget, size: int, memory_bytes: int | None) -> None:
    """Raises DoesNotFit where `size` needs more than `memory_bytes`, as far as counting tells."""
    if memory_bytes is None:
        return
    try:
        segments = SegmentedSweep(subject, (size,), 0.0, free_bytes=lambda: memory_bytes).segments(size)
    except ModelError:
        # The sweep says of it what there is to say.
        return
    if len(segments) > 1:
        raise DoesNotFit(
            f"{subject.loaded.name}: micro-batch size {size} does not fit into {format_bytes(memory_bytes)}",
            "Give more memory_bytes, or smaller micro-batch sizes.",
        )


def _usable_bytes(device: torch.device, memory_bytes: int | None) -> int:
    """Free bytes of the device, at most `memory_bytes`; on a CPU `memory_bytes`."""
    limits = [memory_bytes, free_bytes(device) if device.type == "cuda" else None]
    return min(limit for limit in limits if limit is not None)


def _structure(loaded: LoadedModel, setup: Setup, limits: MeasurementLimits) -> Profile:
    """On the meta device."""
    target = limits.estimate_for
    kernels = None if target is None else target.kernels
    # Not at size 1, which batch norm refuses.
    size = (limits.request.sizes or SIZES)[-1]
    subject = _build_target(loaded, setup, limits.smallest)
    with (kernels or as_on_the_cpu)():
        blocks = find_equal_layers(subject, size)
    memory = None if target is None else target.roofline.memory_bytes
    estimates = target is not None
    results, refused, notes = count_structure(
        blocks, limits.request.sizes, kernels, limits.progress, memory, operations=estimates
    )
    notes += left_notes(refused, limits.request.sizes)
    if target is not None:
        return estimate(blocks, results, refused, notes, target)
    return build_profile(subject, results, refused, notes)


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


def _continued(journal: Journal | None) -> list[str]:
    """What to say of a profile in several sittings."""
    if journal is None or not journal.passes:
        return []
    return [f"continued: {journal.passes} of its passes are those of an interrupted run"]


def left_notes(unmeasured: Sequence[Unmeasured], sizes: Sequence[int] | None) -> list[str]:
    """Return a note on each size without figures; `sizes`: those that the user asked for."""
    was = "was not" if sizes is None else "was asked for and not"
    return [
        f"micro-batch size {left.micro_batch_size} is left out: {left.detail}"
        if left.reason == "refused"
        else f"micro-batch size {left.micro_batch_size} {was} measured ({left.reason}): {left.detail}"
        for left in unmeasured
    ]
