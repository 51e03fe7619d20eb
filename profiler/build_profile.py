"""From measurements to a profile: layers, their costs at every size, the whole model, and notes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch
from torch import nn

from ..cost_models.errors import MachineError
from ..cost_models.layer import parts_warning
from ..cost_models.memory import FRAGMENTATION_RESERVE
from .layer import LayerChain
from .local_machine import device_memory_bytes, device_name, versions
from .modes import MeasurementTarget
from .names import public_name, public_settings
from .profile_file import (
    InputTensor,
    LayerMeasurement,
    MeasuredLoss,
    OutputTensor,
    Profile,
    ProfiledLayer,
    ReadOnlyBuffer,
    Tied,
    Unmeasured,
    WholeMeasurement,
    closing_warning,
)
from .timed_passes import SizeResult

_WORTH_A_NOTE = 0.05
"""Share by which the first backward of a step may differ from the others without a word."""
_DOMINATES = 1 / 3
"""Share of all seconds from which on a layer put together from several modules is worth a remark."""


def build_profile(
    subject: MeasurementTarget,
    results: Sequence[SizeResult],
    unmeasured: Sequence[Unmeasured],
    notes: Sequence[str],
    accumulation: Sequence[float] | None = None,
) -> Profile:
    """The profile; `accumulation`: seconds by layer, where they are known. Raises MachineError where the
    clock saw no time pass."""
    loaded, chain, device, modes = subject.loaded, subject.chain, subject.device, subject.modes
    costs = [_costs(result, len(chain)) for result in results]
    whole = [_whole(result) for result in results if result.rounds.whole]
    example = loaded.example_input_for(1).to(dtype=subject.dtype)
    layers = [
        ProfiledLayer(
            name=layer.name,
            kind=layer.kind,
            parameter_bytes=layer.parameter_bytes,
            trainable_bytes=layer.trainable_bytes,
            largest_parameter_bytes=layer.largest_parameter_bytes,
            buffer_bytes=layer.buffer_bytes,
            cut_after=layer.cut_reason is None,
            cut_reason=layer.cut_reason,
            crossing=layer.crossing,
            accumulation_seconds=None if accumulation is None else accumulation[index],
            costs=[of_size[index] for of_size in costs],
        )
        for index, layer in enumerate(chain.layers)
    ]
    return Profile(
        model=public_name(loaded.name),
        device=device.type,
        device_name=device_name(device),
        device_memory_bytes=device_memory_bytes(device),
        dtype=_dtype_name(subject.dtype),
        input_shape=list(loaded.input_shape),
        inputs=[
            InputTensor(shape=list(tensor.shape[1:]), dtype=_dtype_name(tensor.dtype))
            for tensor in example.tensors
        ],
        outputs=[
            OutputTensor(name=own.name, shape=list(own.shape), dtype=own.dtype, has_samples=own.has_samples)
            for own in chain.outputs
        ],
        input_bytes_per_sample=example.bytes_per_sample,
        classes=loaded.classes,
        settings=public_settings(loaded.settings_in_json),
        input_like=loaded.input_like,
        seed=subject.seed,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        granularity=chain.granularity,
        compiled=modes.compile,
        channels_last=modes.channels_last,
        amp=modes.amp,
        tf32=modes.tf32,
        cudnn_benchmark=modes.cudnn_benchmark,
        layers=layers,
        edges=[(chain.layers[a].name, chain.layers[b].name) for a, b in chain.edges],
        whole=whole,
        loss=_loss(subject, results),
        tied=_tied(chain),
        shared_buffers=_read_only(chain),
        unmeasured=list(unmeasured),
        notes=[
            *subject.notes,
            *notes,
            *_evaluation_note(subject),
            *(note for each in whole for note in closing_warning(each, notes)),
            *(note for each in whole for note in _parts_note(each)),
            *_first_backward_note(whole, accumulation),
            *_reserved_note(whole),
            *_dominating_note(loaded.module, chain, layers),
            *_checkpoint_note(chain),
            *_unused_note(chain),
            *(chain.comparison.notes if chain.comparison else ()),
        ],
        made_by=versions(),
    )


def _costs(result: SizeResult, layers: int) -> list[LayerMeasurement]:
    """The layers with their costs; without passes (on the meta device) there are no seconds."""
    rounds, timed = result.rounds, bool(result.rounds.layers)
    zeros, nothing = [0.0] * layers, [None] * layers
    forward, backward = (rounds.medians(way).tolist() if timed else zeros for way in ("forward", "backward"))
    host = [rounds.host_medians(way) if timed else nothing for way in ("forward", "backward")]
    parts = [rounds.part_medians(part) if timed else nothing for part in ("input", "weight")]
    spreads = rounds.spreads() if timed else nothing
    counted, memory = result.counted, result.counted.memory
    workspace = memory.workspace if memory else [0] * layers
    pending = result.pending_gradient_bytes or rounds.pending_bytes() or nothing
    return [
        LayerMeasurement(
            micro_batch_size=result.size,
            forward_seconds=forward[index],
            backward_seconds=backward[index],
            output_bytes=counted.output_bytes[index],
            saved_bytes=counted.saved_bytes[index],
            saved_input_bytes=counted.saved_input_bytes[index],
            workspace_bytes=workspace[index],
            spread=spreads[index],
            forward_host_seconds=host[0][index],
            backward_host_seconds=host[1][index],
            backward_input_seconds=parts[0][index],
            backward_weight_seconds=parts[1][index],
            pending_gradient_bytes=pending[index],
            forward_workspace_bytes=memory.forward[index] if memory else None,
            backward_workspace_bytes=memory.backward[index] if memory else None,
        )
        for index in range(layers)
    ]


def _loss(subject: MeasurementTarget, results: Sequence[SizeResult]) -> MeasuredLoss | None:
    if subject.loss is None:
        return None
    costs = []
    for result in results:
        times, workspace = result.rounds.loss_medians(), result.counted.loss_workspace
        costs.append(
            LayerMeasurement(
                micro_batch_size=result.size,
                forward_seconds=times.forward if times else 0.0,
                backward_seconds=times.backward if times else 0.0,
                forward_host_seconds=times.forward_host if times else None,
                backward_host_seconds=times.backward_host if times else None,
                output_bytes=result.counted.loss_output_bytes,
                saved_bytes=result.counted.loss_saved_bytes,
                workspace_bytes=workspace.larger if workspace else 0,
                forward_workspace_bytes=workspace.forward if workspace else None,
                backward_workspace_bytes=workspace.backward if workspace else None,
            )
        )
    return MeasuredLoss(name=subject.loss.name, costs=costs)


def _whole(result: SizeResult) -> WholeMeasurement:
    rounds = result.rounds
    forward, backward = rounds.whole_medians()
    own_forward = float(rounds.medians("forward").sum())
    own_backward = float(rounds.medians("backward").sum())
    if forward + backward <= 0 or own_forward + own_backward <= 0:
        raise MachineError(
            f"micro-batch size {result.size}: the clock reads 0 s for the whole pass",
            "The model is too fast for this machine's clock: name larger `micro_batch_sizes`.",
        )
    return WholeMeasurement(
        micro_batch_size=result.size,
        forward_seconds=forward,
        backward_seconds=backward,
        closing_ratio=(own_forward + own_backward) / (forward + backward),
        forward_closing_ratio=own_forward / forward if forward else None,
        backward_closing_ratio=own_backward / backward if backward else None,
        backward_parts_ratio=rounds.backward_parts_ratio(),
        first_backward_seconds=rounds.first_backward(),
        spread=rounds.whole_spread(),
        rounds=len(rounds),
        peak_bytes=result.counted.peak_bytes,
        reserved_bytes=result.reserved_bytes,
        predicted_peak_bytes=result.counted.memory.predicted_peak if result.counted.memory else None,
    )


def _parts_note(whole: WholeMeasurement) -> list[str]:
    return parts_warning(whole.micro_batch_size, whole.backward_parts_ratio or 0.0)


def _read_only(chain: LayerChain) -> list[ReadOnlyBuffer]:
    """Of each name one: constants that tracing made have none of their own."""
    names = count()
    return [
        ReadOnlyBuffer(
            tensor=shared.name if shared.name != "a tensor" else f"constant {next(names)}",
            layers=[chain.layers[index].name for index in shared.layers],
            bytes=shared.tensor.nbytes,
        )
        for shared in chain.users
        if shared.is_read_only
    ]


def _tied(chain: LayerChain) -> list[Tied]:
    """Parameters and buffers that several layers use; the bytes of those of which stages may have copies."""
    return [
        Tied(
            tensor=shared.name,
            layers=[chain.layers[index].name for index in shared.layers],
            bytes=shared.tensor.nbytes if shared.is_tied else None,
            trainable=shared.tensor.requires_grad,
            dtype=_dtype_name(shared.tensor.dtype),
        )
        for shared in chain.users
        if len(shared.layers) > 1 and not shared.is_read_only
    ]


def _evaluation_note(subject: MeasurementTarget) -> list[str]:
    measured = "the model is in evaluation mode and was measured so"
    return [] if subject.loaded.module.training else [measured]


def _first_backward_note(
    whole: Sequence[WholeMeasurement], accumulation: Sequence[float] | None
) -> list[str]:
    """A note where the first backward of a step differs from the others minus what they add."""
    adding = sum(accumulation or ())
    shares = {
        each.micro_batch_size: (each.first_backward_seconds + adding) / each.backward_seconds - 1
        for each in whole
        if each.first_backward_seconds is not None and each.backward_seconds
    }
    if all(abs(share) <= _WORTH_A_NOTE for share in shares.values()):
        return []
    by_size = ", ".join(f"{share:+.0%} at size {size}" for size, share in shares.items())
    return [
        "the first backward of a step, which adds to no gradients, takes another time than predicted from "
        f"the others: {by_size} of a backward"
    ]


def _reserved_note(whole: Sequence[WholeMeasurement]) -> list[str]:
    """Where a caching allocator takes more of the device than the ledger's reserve says."""
    shares = [
        each.reserved_bytes / each.peak_bytes - 1 for each in whole if each.reserved_bytes and each.peak_bytes
    ]
    if not shares or shares[-1] <= FRAGMENTATION_RESERVE:
        return []
    return [
        f"micro-batch size {whole[-1].micro_batch_size}: the caching allocator took {shares[-1]:.0%} more "
        f"of the device than was in use, the ledger's reserve is {FRAGMENTATION_RESERVE:.0%}; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True takes less"
    ]


def _checkpoint_note(chain: LayerChain) -> list[str]:
    note = (
        "the model recomputes parts of itself (torch.utils.checkpoint), which its layers do not: "
        "pplan plans recomputation itself"
    )
    return [note] if chain.drops_checkpoints else []


def _unused_note(chain: LayerChain) -> list[str]:
    if not chain.unused:
        return []
    first, count = chain.unused[0], len(chain.unused)
    names = first if count == 1 else f"{first} and {count - 1} more parameters and buffers"
    return [f"forward does not use {names}: no layer has them, nor the state dict of pplan.sequential"]


def _dominating_note(model: nn.Module, chain: LayerChain, layers: Sequence[ProfiledLayer]) -> list[str]:
    """A layer that holds much of the model limits every plan; finer cuts may part it."""
    seconds = [layer.costs[-1].forward_seconds + layer.costs[-1].backward_seconds for layer in layers]
    heaviest = max(range(len(layers)), key=lambda index: seconds[index])
    share = seconds[heaviest] / sum(seconds) if any(seconds) else float(len(layers) == 1)
    put_together = chain.layers[heaviest].path is None
    if chain.granularity == "fine" or not put_together or share <= _DOMINATES:
        return []
    takes = (
        f"takes {share:.0%} of the time, and no stage can be shorter"
        if any(seconds)
        else "is the whole model"
    )
    return [f"layer {layers[heaviest].name} {takes}; {_remedy(chain.layers[heaviest].module, model)}"]


def _remedy(layer: nn.Module, model: nn.Module) -> str:
    """Where the model's own modules stand in a list there, they are the better cuts."""
    own = {id(parameter) for parameter in layer.parameters()}
    for name, module in model.named_modules():
        entries = list(module.children()) if isinstance(module, nn.ModuleList | nn.Sequential) else []
        if name and sum(any(id(p) in own for p in entry.parameters()) for entry in entries) > 1:
            return f"granularity='module:{name}.*' makes the modules in there layers; {_FINE}"
    return _FINE


_FINE = "granularity='fine' cuts inside it, where several tensors cross"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
