"""Where the result of `pplan simulate` goes: standard output, and the files that were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..api.provenance import made_by
from ..api.simulation import Simulation
from ..cost_models.document import MadeBy
from ..cost_models.errors import FileError, UsageError
from ..cost_models.text_files import SVG, write_whole
from .field_names import command_line
from .output import Target
from .streams import console, remark, result


@dataclass(frozen=True)
class Pictures:
    """The files to be written; `replace`: existing ones may go."""

    trace: Path | None
    svg: Path | None
    replace: bool

    @property
    def _files(self) -> list[tuple[str, Path]]:
        files = (("--trace", self.trace), ("--svg", self.svg))
        return [(option, path) for option, path in files if path is not None]

    def check(self, *sources: Path | None) -> None:
        """Raises where a file could not be written, or would overwrite a source, before the work is done."""
        if self.trace is not None and self.trace == self.svg:
            raise UsageError(f"--trace and --svg {self.svg}: the same file", "Name two files.")
        for option, path in self._files:
            with _advising(option):
                Target(path, self.replace, kind="trace" if option == "--trace" else SVG).check(*sources)

    def write(self, simulation: Simulation) -> Iterator[Path]:
        """Writes them, one after another. Raises FileError."""
        for option, path in self._files:
            with _advising(option):
                write_whole(path, _draw(option, simulation), force=self.replace)
            yield path


@contextmanager
def _advising(option: str) -> Iterator[None]:
    """The advice of an error names this option."""
    try:
        yield
    except FileError as error:
        raise FileError(error.what, error.hint.replace("-o", option)) from error


def _draw(option: str, simulation: Simulation) -> str:
    if option == "--trace":
        from ..api.trace import trace_json

        return trace_json(simulation)
    from ..api.timeline_svg import timeline_svg

    return timeline_svg(simulation)


def show(simulation: Simulation, pictures: Pictures, *, as_json: bool, actions: bool) -> None:
    """Writes the files and prints what was found, also where a file could not be written.

    Raises UsageError, before anything is written, where an asynchronous schedule has no steady state.
    """
    _ = simulation.steady
    written: list[Path] = []
    try:
        written.extend(pictures.write(simulation))
    finally:
        try:
            _print(simulation, as_json=as_json, actions=actions)
        finally:
            # Also where the reader of standard output has gone.
            for path in written:
                remark(f"Wrote {path}")


def _print(simulation: Simulation, *, as_json: bool, actions: bool) -> None:
    if as_json:
        from ..api.simulation import simulation_file

        origin = made_by(MadeBy(), command=command_line())
        result(simulation_file(simulation, origin, actions=actions).to_json())
    else:
        from .simulate_tables import print_simulation

        print_simulation(simulation, console())
