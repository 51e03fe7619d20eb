"""The tables of a profile: the heaviest layers, the totals by micro-batch size, what a reader should know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.console import Console

from ..cost_models.precision import training_precision
from ..cost_models.quantities import (
    format_amount,
    format_bytes,
    format_count,
    format_seconds,
    percent,
    three_digits,
)
from ..profiler.profile_file import LayerMeasurement, MeasuredLoss, Profile, ProfiledLayer, WholeMeasurement
from .table import Column, Value, line, number, print_table, text

HEAVIEST = 10


def print_profile(profile: Profile, console: Console, *, all_layers: bool = False) -> None:
    """Prints everything about a profile; of many layers the heaviest, or `all_layers`."""
    line(console, _headline(profile))
    for reason, count in Counter(_forbidden_cuts(profile)).items():
        line(console, f"Forbidden cuts: {count} of {len(profile.layers) - 1} ({reason}).")
    for tied in profile.tied:
        copies = "" if tied.bytes is None else f" ({format_bytes(tied.bytes)}): stages may have copies"
        line(console, f"Tied: {' and '.join(tied.layers)} share {tied.tensor}{copies}.")
    _print_layers(profile, console, len(profile.layers) if all_layers else HEAVIEST)
    if not profile.structure_only:
        _print_totals(profile, console)
    if profile.loss is not None and not profile.structure_only:
        line(console, _loss(profile.loss))
    if any(whole.peak_bytes is not None for whole in profile.whole):
        _print_peaks(profile, console)
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
        f"Micro-batch size {size.micro_batch_size} was not measured ({size.reason})"
        + (f": {size.detail}" if size.detail else "")
        for size in profile.unmeasured
    ]


def _headline(profile: Profile) -> str:
    shape = f", input {'x'.join(map(str, profile.input_shape))}" if profile.input_shape else ""
    on = f"{profile.device} ({profile.device_name})" if profile.device_name else profile.device
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    count = parameters / training_precision(profile.dtype).bytes.weight
    estimated = ", estimated and not measured" if profile.estimated else ""
    return (
        f"{profile.model} on {on}, {', '.join([profile.dtype, *_modes(profile)])}{shape}: "
        f"{format_count(len(profile.layers), 'layer')}{_granularity(profile)}, "
        f"{format_amount(count)} parameters ({format_bytes(parameters)})"
        f"{estimated}"
    )


def _modes(profile: Profile) -> list[str]:
    """The modes that the model was run in, other than the default."""
    words = {
        "compiled": profile.compiled,
        "channels last": profile.channels_last,
        f"autocast to {profile.amp}": profile.amp is not None,
        "TF32": profile.tf32,
        "cudnn.benchmark": profile.cudnn_benchmark,
    }
    return [name for name, on in words.items() if on]


def _granularity(profile: Profile) -> str:
    return "" if profile.granularity == "block" else f" ({profile.granularity})"


def _forbidden_cuts(profile: Profile) -> list[str]:
    return [layer.cut_reason or "no reason is given" for layer in profile.layers[:-1] if not layer.cut_after]


def _equal_layers(profile: Profile) -> list[list[int]]:
    """The layers by number, those together that are equal: where they were timed, in all figures."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(profile.layers):
        groups.setdefault((layer.kind, layer.crossing, *_figures(profile, layer)), []).append(index)
    return list(groups.values())


def _figures(profile: Profile, layer: ProfiledLayer) -> list[str]:
    """Of an estimate those that are printed: what else blocks with experts differ in is a few bytes."""
    if not (profile.estimated or profile.structure_only):
        return [str(layer.parameter_bytes), *(cost.model_dump_json() for cost in layer.costs)]
    cost = _largest_cost(layer)
    sizes = (cost.output_bytes, cost.saved_bytes, layer.parameter_bytes)
    return [*map(format_seconds, (cost.forward_seconds, cost.backward_seconds)), *map(format_bytes, sizes)]


def _largest_cost(layer: ProfiledLayer) -> LayerMeasurement:
    return max(layer.costs, key=lambda cost: cost.micro_batch_size)


def _name_together(names: Sequence[str]) -> str:
    """`layers.0-79 x 80` where the names are numbered in turn."""
    if len(names) == 1:
        return names[0]
    stem, _, first = names[0].rpartition(".")
    if (
        first.isdecimal()
        and len(first) <= 18
        and list(names) == [f"{stem}.{int(first) + i}" for i in range(len(names))]
    ):
        return f"{stem}.{first}-{int(first) + len(names) - 1} x {len(names)}"
    return f"{names[0]} and {len(names) - 1} equal"


def _layers_title(profile: Profile, groups: int, most: int) -> str:
    rows, count = min(most, groups), len(profile.layers)
    if groups < count:
        title = "All layers" if rows == groups else f"The {rows} heaviest layers"
        return f"{title}, equal ones together, at micro-batch size {profile.micro_batch_sizes[-1]}"
    every = "All layers, heaviest first" if count > 1 else "The layer"
    title = f"The {rows} heaviest of {count} layers" if rows < count else every
    return f"{title}, at micro-batch size {profile.micro_batch_sizes[-1]}"


def _print_layers(profile: Profile, console: Console, most: int) -> None:
    """The heaviest layers at the largest size: by seconds, or where there are none by what they keep."""
    has_times = not profile.structure_only
    layers = profile.layers
    costs = [_largest_cost(layer) for layer in layers]
    weights = [
        _both(cost) if has_times else layer.parameter_bytes + cost.saved_bytes
        for layer, cost in zip(layers, costs, strict=True)
    ]
    total = sum(weights)
    equal_layers = {group[0]: group for group in _equal_layers(profile)}
    group_weights = {row: sum(weights[index] for index in group) for row, group in equal_layers.items()}

    def share(row: int) -> float | None:
        return group_weights[row] / total if total else None

    columns: list[Column[int]] = [
        number("layer", lambda row: row),
        text("name", lambda row: _name_together([layers[index].name for index in equal_layers[row]])),
        text("kind", lambda row: layers[row].kind, drop=2),
        number("forward", lambda row: costs[row].forward_seconds, format_seconds, visible=has_times),
        number("backward", lambda row: costs[row].backward_seconds, format_seconds, visible=has_times),
        number("share", share, percent, drop=6, visible=has_times),
        number("output", lambda row: costs[row].output_bytes, format_bytes, drop=3),
        number(
            "tensors",
            lambda row: layers[row].crossing,
            drop=2,
            visible=any((layer.crossing or 0) > 1 for layer in layers),
        ),
        number("saved", lambda row: costs[row].saved_bytes, format_bytes, drop=5),
        number("params", lambda row: layers[row].parameter_bytes, format_bytes, drop=4),
        number(
            "spread",
            lambda row: costs[row].spread,
            percent,
            drop=1,
            visible=any(cost.spread is not None for cost in costs),
        ),
    ]
    heaviest = sorted(equal_layers, key=lambda row: (-group_weights[row], row))[:most]
    print_table(console, columns, heaviest, title=_layers_title(profile, len(equal_layers), most))


class _Total(NamedTuple):
    """A measured size: what the layers cost at it, and the whole model where it was measured."""

    size: int
    costs: list[LayerMeasurement]
    whole: WholeMeasurement | None

    @property
    def forward(self) -> float:
        return sum(cost.forward_seconds for cost in self.costs)

    @property
    def backward(self) -> float:
        return sum(cost.backward_seconds for cost in self.costs)

    @property
    def launch(self) -> float:
        """Seconds of the host for all layers, forward and backward."""
        return sum(
            (cost.forward_host_seconds or 0) + (cost.backward_host_seconds or 0) for cost in self.costs
        )

    @property
    def samples_per_second(self) -> float | None:
        """Rate of the whole model; where that was not measured, of its layers on one device."""
        whole = self.whole
        if whole is None:
            seconds = max(self.forward + self.backward, self.launch)
        else:
            seconds = whole.forward_seconds + whole.backward_seconds
        return self.size / seconds if seconds else None


def _totals(profile: Profile) -> list[_Total]:
    wholes = {whole.micro_batch_size: whole for whole in profile.whole}
    return [
        _Total(size, [layer.costs[position] for layer in profile.layers], wholes.get(size))
        for position, size in enumerate(profile.micro_batch_sizes)
    ]


def _print_totals(profile: Profile, console: Console) -> None:
    """The sums over the layers and the whole model, a row for each measured size."""

    def whole(value: Callable[[WholeMeasurement], Value | None]) -> Callable[[_Total], Value | None]:
        return lambda row: None if row.whole is None else value(row.whole)

    hosts = any(cost.forward_host_seconds is not None for cost in profile.layers[0].costs)
    parts = any(measurement.backward_parts_ratio is not None for measurement in profile.whole)
    spread = whole(lambda measurement: measurement.spread)
    first, totals = whole(lambda measurement: measurement.first_backward_seconds), _totals(profile)
    columns: list[Column[_Total]] = [
        number("micro-\nbatch", lambda row: row.size),
        number("layers\nfwd", lambda row: row.forward, format_seconds, drop=5),
        number("layers\nbwd", lambda row: row.backward, format_seconds, drop=5),
        number("to\nlaunch", lambda row: row.launch, format_seconds, drop=3, visible=hosts),
        number("model\nfwd", whole(lambda measurement: measurement.forward_seconds), format_seconds),
        number("model\nbwd", whole(lambda measurement: measurement.backward_seconds), format_seconds),
        number("first\nbwd", first, format_seconds, drop=3, visible=any(map(first, totals))),
        number("samples\n/s", lambda row: row.samples_per_second, three_digits, drop=4),
        number("ratio\n", whole(lambda measurement: measurement.closing_ratio), _ratio),
        number("ratio\nfwd", whole(lambda measurement: measurement.forward_closing_ratio), _ratio, drop=2),
        number("ratio\nbwd", whole(lambda measurement: measurement.backward_closing_ratio), _ratio, drop=2),
        number(
            "ratio\nparts",
            whole(lambda measurement: measurement.backward_parts_ratio),
            _ratio,
            drop=1,
            visible=parts,
        ),
        number("spread\n", spread, percent, drop=1, visible=any(spread(row) is not None for row in totals)),
    ]
    title = "Layer sum vs. end-to-end time; ratio: layer-sum coverage"
    print_table(console, columns, totals, title=title)


def _print_peaks(profile: Profile, console: Console) -> None:
    """The peak predicted from the layers' parts against the one that was measured."""
    rows = [
        (
            row.size,
            sum(cost.saved_bytes for cost in row.costs),
            row.whole.predicted_peak_bytes,
            row.whole.peak_bytes,
        )
        for row in _totals(profile)
        if row.whole is not None and row.whole.peak_bytes and row.whole.predicted_peak_bytes is not None
    ]
    columns: list[Column[tuple[int, int, int, int]]] = [
        number("micro-\nbatch", lambda row: row[0]),
        number("saved\n", lambda row: row[1], format_bytes, drop=1),
        number("peak,\npredicted", lambda row: row[2], format_bytes),
        number("peak,\nmeasured", lambda row: row[3], format_bytes),
        number("error\n", lambda row: f"{row[2] / row[3] - 1:+.1%}"),
    ]
    print_table(console, columns, rows, title="Memory of a step of the whole model, without an optimizer")


def _both(cost: LayerMeasurement) -> float:
    return cost.forward_seconds + cost.backward_seconds


def _ratio(value: float) -> str:
    return f"{value:.3f}"
