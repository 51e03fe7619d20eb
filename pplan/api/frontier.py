"""The plans on the frontier of time and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from ..cost_models.errors import UsageError
from ..cost_models.machines.machine_options import MachineOptions
from ..cost_models.option_fields import (
    describe_options,
    options_from,
)
from ..planner.objectives.frontier import Frontier, build_frontier
from ..planner.plan_options import PlanOptions
from ..profiler.profile_file import Profile
from ..profiler.profile_warnings import list_warnings
from .degree_profiles import one_degree
from .options import FrontierKeywords, FrontierOptions
from .provenance import made_by
from .solve import make_problem


@describe_options(FrontierKeywords, MachineOptions, PlanOptions, FrontierOptions)
def frontier(
    profile: Profile | str | Path,
    *,
    profile_file: str = "",
    profile_sha256: str = "",
    **options: Unpack[FrontierKeywords],
) -> Frontier:
    """The plans of which none is both faster and smaller: step time against the most that a device holds.

    At most `points` of them (24), the fastest first, each with less memory than the one before by the share
    `memory_step` at least (0.02; 0: none is left out). The other `options` are those of `solve`, but for
    `objective` and `price`. Of the result: `points`, each with `step_seconds`, `memory_bytes`, `exact` and
    its `plan`.

    >>> import pplan
    >>> curve = pplan.frontier("gpt.profile.json", gpus=4, mini_batch=64)
    >>> steps = [point.step_seconds for point in curve.points]
    >>> steps == sorted(steps)
    True

    Raises UsageError, FileError (the profile, the topology), InfeasibleError (no plan fits).
    """
    for name in ("objective", "price"):
        if name in options:
            raise UsageError(
                f"{name}={dict(options)[name]!r}: a frontier is of step time against memory",
                f"Omit {name}.",
            )
    machine, plan_options, frontier_options = options_from(
        options, MachineOptions, PlanOptions, FrontierOptions, of="frontier"
    )
    measured_profile, reference = one_degree(profile, profile_file, profile_sha256, plan_options, "frontier")
    problem = make_problem(measured_profile, reference, machine, plan_options)
    curve = build_frontier(
        problem,
        model=measured_profile.model,
        profile=reference,
        warnings=list_warnings(measured_profile, problem.topology, plan_options.runtime),
        points=frontier_options.points,
        memory_step=frontier_options.memory_step,
    )
    return curve.model_copy(update={"made_by": made_by(curve.made_by, measured=measured_profile.made_by)})
