"""The part of `pplan solve` that solves a grid of problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.provenance import made_by
from ..cost_models.document import write_whole
from ..cost_models.errors import InfeasibleError
from .invocation import command_line
from .output import Target
from .streams import console, remark, result
from .sweep_options import grid_of
from .sweep_table import as_csv, print_sweep

if TYPE_CHECKING:
    from ..profiler.profile_file import Profile


@dataclass(frozen=True)
class SweepOptions:
    """What the options hold, as typed."""

    sweep: Sequence[str]
    csv: Path | None
    backend: str
    jobs: int | None
    force: bool
    as_json: bool

    @property
    def grid(self) -> dict[str, list[Any]]:
        """Raises UsageError."""
        return grid_of(self.sweep)


def run_sweep(options: SweepOptions, profile: Profile, given: Mapping[str, Any]) -> None:
    """Solves the grid and prints it; `given` are the arguments of `solve` that the options hold.

    What the grid has replaces what is given. Raises UsageError, FileError, MachineError.
    """
    from ..api.solve import sweep

    grid = options.grid
    if options.csv is not None:
        Target(options.csv, options.force).check()
    fixed = {name: value for name, value in given.items() if name not in grid}
    made = sweep(profile, grid, jobs=options.jobs, backend=options.backend, **fixed)
    origin = made_by(made.made_by, command=command_line(), measured=profile.made_by)
    made = made.model_copy(update={"made_by": origin})
    if options.as_json:
        result(made.to_json())
    else:
        print_sweep(made, console())
    if options.csv is not None:
        write_whole(options.csv, as_csv(made), force=options.force)
        remark(f"Wrote {options.csv}")
    if all(row.step_seconds is None for row in made.rows):
        raise InfeasibleError("no point of the sweep has a plan", "Every row says why.")
