"""The tables of a profile: the heaviest layers, the totals by micro-batch size, what a reader should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..profiler.profile_file import LayerMeasurement, MeasuredLoss, Profile, ProfiledLayer, WholeMeasurement
from .number_format import percent, three_digits
from .table_style import Column, figure, line, table, text, titled

HEAVIEST = 10


def print_profile(profile: Profile, console: Console) -> None:
    """Prints everything about a profile."""
    line(console, _headline(profile))
    for reason, count in Counter(_forbidden(profile)).items():
        line(console, f"Forbidden cuts: {count} of {len(profile.layers) - 1} ({reason}).")
    for tied in profile.tied:
        line(console, f"Tied: {' and '.join(tied.layers)} share {tied.tensor}.")
    titled(console, _layers_title(profile), _layers(profile, console))
    if not profile.structure_only:
        titled(
            console,
            "Layer sum vs. end-to-end time; ratio: layer-sum coverage",
            _totals(profile, console),
        )
    if profile.loss is not None and not profile.structure_only:
        line(console, _loss(profile.loss))
    if any(whole.peak_bytes is not None for whole in profile.whole):
        titled(console, "Memory of a step of the whole model, without an optimizer", _peaks(profile, console))
    remarks = [*_unmeasured(profile), *(f"Note: {note}" for note in profile.notes)]
    if remarks:
        console.print()
    for remark in remarks:
        line(console, remark)


def _loss(loss: MeasuredLoss) -> str:
    cost = max(loss.costs, key=lambda cost: cost.micro_batch_size)
    return (
        f"The loss ({loss.name}), which the last stage computes besides, at micro-batch size "
        f"{cost.micro_batch_size}: {format_seconds(cost.forward_seconds)} forward, "
        f"{format_seconds(cost.backward_seconds)} backward."
    )


def _unmeasured(profile: Profile) -> list[str]:
    """Sizes without figures. Of those that pplan itself left out, the notes tell."""
    if profile.made_by.pplan:
        return []
    return [
        f"Micro-batch size {left.micro_batch_size} was not measured ({left.reason})"
        + (f": {left.detail}" if left.detail else "")
        for left in profile.unmeasured
    ]


def _headline(profile: Profile) -> str:
    shape = f", input {'x'.join(map(str, profile.input_shape))}" if profile.input_shape else ""
    on = f"{profile.device} ({profile.device_name})" if profile.device_name else profile.device
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    estimated = ", estimated and not measured" if profile.estimated else ""
    return (
        f"{profile.model} on {on}, {', '.join([profile.dtype, *_modes(profile)])}{shape}: "
        f"{counted(len(profile.layers), 'layer')}{_granularity(profile)}, "
        f"{format_bytes(parameters)} of parameters{estimated}"
    )


def _modes(profile: Profile) -> list[str]:
    """How the model was run, where that is not as it is."""
    named = {
        "compiled": profile.compiled,
        "channels last": profile.channels_last,
        f"autocast to {profile.amp}": profile.amp is not None,
        "TF32": profile.tf32,
    }
    return [name for name, on in named.items() if on]


def _granularity(profile: Profile) -> str:
    return "" if profile.granularity == "block" else f" ({profile.granularity})"


def _forbidden(profile: Profile) -> list[str]:
    return [layer.cut_reason or "no reason is given" for layer in profile.layers[:-1] if not layer.cut_after]


def _layers_title(profile: Profile) -> str:
    shown, count = min(HEAVIEST, len(profile.layers)), len(profile.layers)
    every = "All layers, heaviest first" if count > 1 else "The layer"
    what = f"The {shown} heaviest of {count} layers" if shown < count else every
    return f"{what}, at micro-batch size {profile.micro_batch_sizes[-1]}"


def _layers(profile: Profile, console: Console) -> Table:
    """The heaviest layers at the largest size: by seconds, or where there are none by what they keep."""
    timed = not profile.structure_only
    several = any((layer.crossing or 0) > 1 for layer in profile.layers)
    costs = [max(layer.costs, key=lambda cost: cost.micro_batch_size) for layer in profile.layers]
    weights = [
        _both(cost) if timed else layer.parameter_bytes + cost.saved_bytes
        for layer, cost in zip(profile.layers, costs, strict=True)
    ]
    heaviest = sorted(range(len(costs)), key=lambda index: (-weights[index], index))[:HEAVIEST]
    layers, whole = [profile.layers[index] for index in heaviest], sum(weights)
    shares = [percent(weights[index] / whole) if whole else "-" for index in heaviest]
    costs = [costs[index] for index in heaviest]
    columns = [
        (figure("layer"), [str(index) for index in heaviest], True),
        (text("name"), [layer.name for layer in layers], True),
        (text("kind", leaves=2), [layer.kind for layer in layers], True),
        (figure("forward"), [format_seconds(cost.forward_seconds) for cost in costs], timed),
        (figure("backward"), [format_seconds(cost.backward_seconds) for cost in costs], timed),
        (figure("share", leaves=6), shares, timed),
        (figure("output", leaves=3), [format_bytes(cost.output_bytes) for cost in costs], True),
        (figure("tensors", leaves=2), [_crossing(layer) for layer in layers], several),
        (figure("saved", leaves=5), [format_bytes(cost.saved_bytes) for cost in costs], True),
        (figure("params", leaves=4), [format_bytes(layer.parameter_bytes) for layer in layers], True),
        (figure("spread", leaves=1), [percent(cost.spread) for cost in costs], timed),
    ]
    return _of_columns(console, columns)


def _of_columns(console: Console, columns: Sequence[tuple[Column, Sequence[str], bool]]) -> Table:
    """A table of those columns, given with their cells, that are to be shown."""
    shown = [(column, cells) for column, cells, is_shown in columns if is_shown]
    rows = list(zip(*(cells for _, cells in shown), strict=True))
    return table(console, [column for column, _ in shown], rows)


def _totals(profile: Profile, console: Console) -> Table:
    """The sums over the layers and the whole model, a row for each measured size."""
    sizes, measured = profile.micro_batch_sizes, {whole.micro_batch_size: whole for whole in profile.whole}
    wholes = [measured.get(size) for size in sizes]
    costs = [[layer.costs[position] for layer in profile.layers] for position in range(len(sizes))]
    forward = [sum(cost.forward_seconds for cost in own) for own in costs]
    backward = [sum(cost.backward_seconds for cost in own) for own in costs]
    hosts = any(cost.forward_host_seconds is not None for cost in profile.layers[0].costs)
    parts = any(whole.backward_parts_ratio is not None for whole in profile.whole)

    def of_wholes(cell: Callable[[WholeMeasurement], str]) -> list[str]:
        return ["-" if whole is None else cell(whole) for whole in wholes]

    # Where the whole model was not measured, its layers' sums stand for it.
    seconds = [
        ahead + back if whole is None else whole.forward_seconds + whole.backward_seconds
        for ahead, back, whole in zip(forward, backward, wholes, strict=True)
    ]
    columns = [
        (figure("micro-\nbatch"), [str(size) for size in sizes], True),
        (figure("layers\nfwd", leaves=5), [format_seconds(own) for own in forward], True),
        (figure("layers\nbwd", leaves=5), [format_seconds(own) for own in backward], True),
        (figure("to\nlaunch", leaves=3), [format_seconds(_launch(own)) for own in costs], hosts),
        (figure("model\nfwd"), of_wholes(lambda whole: format_seconds(whole.forward_seconds)), True),
        (figure("model\nbwd"), of_wholes(lambda whole: format_seconds(whole.backward_seconds)), True),
        (figure("samples\n/s", leaves=4), list(map(_per_second, sizes, seconds)), True),
        (figure("ratio\n"), of_wholes(lambda whole: _ratio(whole.closing_ratio)), True),
        (figure("ratio\nfwd", leaves=2), of_wholes(lambda whole: _ratio(whole.forward_closing_ratio)), True),
        (figure("ratio\nbwd", leaves=2), of_wholes(lambda whole: _ratio(whole.backward_closing_ratio)), True),
        (
            figure("ratio\nparts", leaves=1),
            of_wholes(lambda whole: _ratio(whole.backward_parts_ratio)),
            parts,
        ),
        (figure("spread\n", leaves=1), of_wholes(lambda whole: percent(whole.spread)), True),
    ]
    return _of_columns(console, columns)


def _peaks(profile: Profile, console: Console) -> Table:
    """The peak predicted from the layers' parts against the one that was measured."""
    columns = [
        figure("micro-\nbatch"),
        figure("saved\n", leaves=1),
        figure("peak,\npredicted"),
        figure("peak,\nmeasured"),
        figure("error\n"),
    ]
    rows = []
    for position, size in enumerate(profile.micro_batch_sizes):
        whole = next((whole for whole in profile.whole if whole.micro_batch_size == size), None)
        if whole is None or not whole.peak_bytes or whole.predicted_peak_bytes is None:
            continue
        saved = sum(layer.costs[position].saved_bytes for layer in profile.layers)
        error = whole.predicted_peak_bytes / whole.peak_bytes - 1
        peaks = (saved, whole.predicted_peak_bytes, whole.peak_bytes)
        rows.append([str(size), *map(format_bytes, peaks), f"{error:+.1%}"])
    return table(console, columns, rows)


def _launch(costs: Sequence[LayerMeasurement]) -> float:
    """Seconds of the host for all layers, forward and backward."""
    return sum((cost.forward_host_seconds or 0) + (cost.backward_host_seconds or 0) for cost in costs)


def _crossing(layer: ProfiledLayer) -> str:
    return "-" if layer.crossing is None else str(layer.crossing)


def _both(cost: LayerMeasurement) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _per_second(samples: int, duration: float) -> str:
    return three_digits(samples / duration) if duration else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
