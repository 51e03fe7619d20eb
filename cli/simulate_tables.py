"""What `pplan simulate` prints, the answer, the drawing, and where the time of each stage goes; and the files
that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..api.provenance import made_by
from ..cost_models.document import MadeBy
from ..cost_models.errors import FileError, UsageError
from ..cost_models.figures import Drawing, FigureOptions, draw_timelines, figure_format
from ..cost_models.quantities import format_bytes, format_seconds, ranges
from ..cost_models.text_files import PDF, PNG, SVG, write_whole
from ..cost_models.timeline import StageTime
from ..planner.plan_file import TIE
from ..planner.plan_simulation import Simulation, describe_simulation
from .output import Target
from .plan_tables import StageMemory, print_ledger
from .streams import console, remark, result
from .table import Column, number, print_head, print_notes, print_table, text
from .timeline_drawing import print_drawing


def print_simulation(simulation: Simulation, console: Console) -> None:
    """Prints everything about a simulated step."""
    print_head(console, describe_simulation(simulation))
    console.print()
    print_drawing(simulation.timeline, console)
    _print_stages(simulation, console)
    if simulation.memory:
        memory = [StageMemory(stage.terms, stage.bytes, stage.limit_bytes) for stage in simulation.memory]
        print_ledger(memory, console)
    print_notes(console, simulation.notes)


def _print_stages(simulation: Simulation, console: Console) -> None:
    """A row a stage; columns that have nothing to say are left out."""
    chunks, memory = simulation.layers, simulation.memory
    columns: list[Column[int]] = [
        number("stage", lambda row: row),
        text(
            "layers", lambda row: _layers(chunks[row]), drop=2, min_width=9, visible=bool(simulation.layers)
        ),
        *_times(simulation),
        number("in flight", lambda row: simulation.timeline.peak_in_flight[row], "{:g}".format, drop=6),
        *_weights(simulation),
        number("memory", lambda row: memory[row].bytes, format_bytes, drop=7, visible=bool(memory)),
        number(
            "limit",
            lambda row: memory[row].limit_bytes,
            format_bytes,
            drop=1,
            visible=any(device.limit_bytes is not None for device in memory),
        ),
    ]
    print_table(console, columns, range(simulation.stages), title="Where the time of each stage goes")


def _layers(chunks: Sequence[tuple[int, int]]) -> str:
    return ranges({layer for first, last in chunks for layer in range(first, last + 1)})


def _times(simulation: Simulation) -> list[Column[int]]:
    times = simulation.timeline.stage_times

    def seconds(heading: str, value: Callable[[StageTime], float], drop: int = 0) -> Column[int]:
        return number(
            heading,
            lambda row: _drop_rounding(value(times[row]), simulation.timeline.step_seconds),
            drop=drop,
        )

    columns = [
        seconds("compute", lambda stage: stage.compute),
        seconds("transfers", lambda stage: stage.transfer),
        seconds("warm-up,\ncool-down", lambda stage: stage.warm_up_cool_down, drop=8),
        seconds("imbalance", lambda stage: stage.imbalance),
    ]
    if any(stage.update for stage in times):
        columns.append(seconds("update", lambda stage: stage.update))
    return columns


def _weights(simulation: Simulation) -> list[Column[int]]:
    """Columns for the weight versions and the staleness of an asynchronous schedule."""
    if simulation.schedule.synchronous:
        return []
    return [
        number("versions", lambda row: simulation.weight_versions[row], "{:g}".format, drop=4),
        number("stale by", lambda row: simulation.staleness[row], drop=3),
    ]


def _drop_rounding(seconds: float, step: float) -> str:
    """Zero for the rounding errors of sums."""
    return "-" if seconds <= TIE * step else format_seconds(seconds)


@dataclass(frozen=True)
class Pictures:
    """Files to write. `replace`: existing ones may go. `figure`: the look of that of `plot`."""

    trace: Path | None
    plot: Path | None
    replace: bool
    figure: FigureOptions

    @property
    def _files(self) -> list[tuple[str, Path]]:
        files = (("--trace", self.trace), ("--plot", self.plot))
        return [(option, path) for option, path in files if path is not None]

    def check(self, *sources: Path | None) -> None:
        """Raises where a file could not be written, or would overwrite a source, before the work is done."""
        if self.trace is not None and self.trace == self.plot:
            raise UsageError(f"--trace and --plot {self.plot}: the same file", "Name two files.")
        kinds = {"pdf": PDF, "png": PNG, "svg": SVG}
        for option, path in self._files:
            kind = "trace" if option == "--trace" else kinds[figure_format(option, path)]
            with _advising(option):
                Target(path, self.replace, kind=kind).check(*sources)

    def write(self, simulation: Simulation, others: Sequence[Simulation]) -> Iterator[Path]:
        """Write them, one after another. `others`: drawn below the simulation.

        Raises:
            FileError: A file cannot be written.
            MachineError: matplotlib is not installed.
        """
        for option, path in self._files:
            with _advising(option):
                if option == "--trace":
                    from ..api.trace import trace_json

                    write_whole(path, trace_json(simulation), force=self.replace)
                else:
                    drawing = self._draw(simulation, others)
                    write_whole(path, drawing.to_bytes(figure_format(option, path)), force=self.replace)
            yield path

    def _draw(self, simulation: Simulation, others: Sequence[Simulation]) -> Drawing:
        if not others:
            return draw_timelines(simulation.title, {"": simulation.timeline}, self.figure)
        timelines = {one.schedule.name: one.timeline for one in (simulation, *others)}
        return draw_timelines("Schedules side by side", timelines, self.figure)


@contextmanager
def _advising(option: str) -> Iterator[None]:
    """The advice of an error names this option."""
    try:
        yield
    except FileError as error:
        raise FileError(error.what, error.hint.replace("-o", option)) from error


def show(
    simulation: Simulation,
    pictures: Pictures,
    others: Sequence[Simulation],
    *,
    as_json: bool,
    actions: bool,
) -> None:
    """Write the files and print what was found, also where a file could not be written.

    `others` are drawn below the simulation.

    Raises UsageError, before anything is written, where an asynchronous schedule has no steady state.
    """
    _ = simulation.steady
    written: list[Path] = []
    try:
        written.extend(pictures.write(simulation, others))
    finally:
        try:
            _print(simulation, as_json=as_json, actions=actions)
        finally:
            # Also where the reader of standard output has gone.
            for path in written:
                remark(f"Wrote {path}")


def _print(simulation: Simulation, *, as_json: bool, actions: bool) -> None:
    if as_json:
        from ..api.simulate import simulation_file

        result(simulation_file(simulation, made_by(MadeBy()), actions=actions).to_json())
    else:
        print_simulation(simulation, console())
