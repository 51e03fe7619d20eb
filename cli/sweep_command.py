"""The part of `pplan solve` that solves a grid of problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..api.options import SweepOptions
from ..api.provenance import made_by
from ..cost_models.document import write_whole
from ..cost_models.errors import InfeasibleError
from .invocation import command_line
from .output import Target
from .streams import console, remark, result
from .sweep_options import GridOptions
from .sweep_table import as_csv, print_sweep

if TYPE_CHECKING:
    from ..profiler.profile_file import Profile


def run_sweep(
    grid: GridOptions,
    options: SweepOptions,
    profile: Profile,
    given: Mapping[str, Any],
    *,
    force: bool,
    as_json: bool,
) -> None:
    """Solves the grid and prints it; `given` are the arguments of `solve` that the options hold.

    What the grid has replaces what is given. Raises UsageError, FileError, MachineError.
    """
    from ..api.solve import sweep

    if grid.csv is not None:
        Target(grid.csv, force).check()
    fixed = {name: value for name, value in given.items() if name not in grid.sweep}
    made = sweep(profile, grid.sweep, **vars(options), **fixed)
    origin = made_by(made.made_by, command=command_line(), measured=profile.made_by)
    made = made.model_copy(update={"made_by": origin})
    if as_json:
        result(made.to_json())
    else:
        print_sweep(made, console())
    if grid.csv is not None:
        write_whole(grid.csv, as_csv(made), force=force)
        remark(f"Wrote {grid.csv}")
    if all(row.step_seconds is None for row in made.rows):
        raise InfeasibleError("no point of the sweep has a plan", "Every row says why.")
