"""The tables of a profile: the heaviest layers, the totals by micro-batch size, what a reader should know."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from ..cost_models.quantities import counted, format_bytes, format_seconds
from ..profiler.profile_file import LayerMeasurement, Profile, ProfiledLayer, WholeMeasurement
from .figures import percent, three_digits
from .table_style import figure, line, table, text, titled

HEAVIEST = 10


def print_profile(profile: Profile, console: Console) -> None:
    """Prints everything about a profile."""
    line(console, _headline(profile))
    for reason, count in Counter(_forbidden(profile)).items():
        line(console, f"Forbidden cuts: {count} of {len(profile.layers) - 1} ({reason}).")
    titled(console, _layers_title(profile), _layers(profile, console))
    titled(
        console,
        "The layers' sums, the untouched model, and their ratio (closing ratio)",
        _totals(profile, console),
    )
    remarks = [*_unmeasured(profile), *(f"Note: {note}" for note in profile.notes)]
    if remarks:
        console.print()
    for remark in remarks:
        line(console, remark)


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
        f"{profile.model} on {on}, {profile.dtype}{shape}: {counted(len(profile.layers), 'layer')}, "
        f"{format_bytes(parameters)} of parameters{estimated}"
    )


def _forbidden(profile: Profile) -> list[str]:
    return [layer.cut_reason or "no reason is given" for layer in profile.layers[:-1] if not layer.cut_after]


def _layers_title(profile: Profile) -> str:
    shown, count = min(HEAVIEST, len(profile.layers)), len(profile.layers)
    every = "All layers, heaviest first" if count > 1 else "The layer"
    what = f"The {shown} heaviest of {count} layers" if shown < count else every
    return f"{what}, at micro-batch size {profile.micro_batch_sizes[-1]}"


def _layers(profile: Profile, console: Console) -> Table:
    """The heaviest layers at the largest size."""
    costs = [max(layer.costs, key=lambda cost: cost.micro_batch_size) for layer in profile.layers]
    whole = sum(_both(cost) for cost in costs)
    heaviest = sorted(range(len(costs)), key=lambda index: (-_both(costs[index]), index))[:HEAVIEST]
    columns = [
        figure("layer"),
        text("name"),
        text("kind", leaves=2),
        figure("forward"),
        figure("backward"),
        figure("share", leaves=6),
        figure("output", leaves=3),
        figure("saved", leaves=5),
        figure("params", leaves=4),
        figure("spread", leaves=1),
    ]
    rows = [_layer_row(index, profile.layers[index], costs[index], whole) for index in heaviest]
    return table(console, columns, rows)


def _layer_row(index: int, layer: ProfiledLayer, cost: LayerMeasurement, whole: float) -> list[str]:
    return [
        str(index),
        layer.name,
        layer.kind,
        format_seconds(cost.forward_seconds),
        format_seconds(cost.backward_seconds),
        percent(_both(cost) / whole) if whole else "-",
        format_bytes(cost.output_bytes),
        format_bytes(cost.saved_bytes),
        format_bytes(layer.parameter_bytes),
        percent(cost.spread),
    ]


def _totals(profile: Profile, console: Console) -> Table:
    """The sums over the layers and the whole model, a row for each measured size."""
    wholes = {whole.micro_batch_size: whole for whole in profile.whole}
    hosts = any(cost.forward_host_seconds is not None for cost in profile.layers[0].costs)
    columns = [
        figure("micro-\nbatch"),
        figure("layers\nfwd", leaves=5),
        figure("layers\nbwd", leaves=5),
        *([figure("to\nlaunch", leaves=3)] if hosts else []),
        figure("model\nfwd"),
        figure("model\nbwd"),
        figure("samples\n/s", leaves=4),
        figure("ratio\n"),
        figure("ratio\nfwd", leaves=2),
        figure("ratio\nbwd", leaves=2),
        figure("spread\n", leaves=1),
    ]
    rows = []
    for position, size in enumerate(profile.micro_batch_sizes):
        costs = [layer.costs[position] for layer in profile.layers]
        rows.append([str(size), *_totals_row(size, costs, wholes.get(size), hosts=hosts)])
    return table(console, columns, rows)


def _totals_row(
    size: int, costs: list[LayerMeasurement], whole: WholeMeasurement | None, *, hosts: bool
) -> list[str]:
    forward = sum(cost.forward_seconds for cost in costs)
    backward = sum(cost.backward_seconds for cost in costs)
    launch = sum((cost.forward_host_seconds or 0) + (cost.backward_host_seconds or 0) for cost in costs)
    row = [format_seconds(forward), format_seconds(backward), *([format_seconds(launch)] if hosts else [])]
    if whole is None:
        return [*row, "-", "-", _per_second(size, forward + backward), "-", "-", "-", "-"]
    return [
        *row,
        format_seconds(whole.forward_seconds),
        format_seconds(whole.backward_seconds),
        _per_second(size, whole.forward_seconds + whole.backward_seconds),
        _ratio(whole.closing_ratio),
        _ratio(whole.forward_closing_ratio),
        _ratio(whole.backward_closing_ratio),
        percent(whole.spread),
    ]


def _both(cost: LayerMeasurement) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _per_second(samples: int, duration: float) -> str:
    return three_digits(samples / duration) if duration else "-"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
