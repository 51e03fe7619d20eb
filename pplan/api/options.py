"""What a caller may ask for: the options, each declared once, where it is used, and their keywords."""

from __future__ import annotations

from typing import Required

from ..cost_models.machines.machine_options import MachineKeywords, MachineOptions
from ..cost_models.option_fields import Option, Options, declared, options_from, unknown_option
from ..planner.objectives.objective import ObjectiveKeywords, ObjectiveOptions
from ..planner.plan_options import PlanKeywords, PlanOptions


class ProblemKeywords(MachineKeywords, PlanKeywords, total=False):
    """The options of a problem."""

    gpus: Required[int]


class SolveKeywords(ProblemKeywords, ObjectiveKeywords, total=False):
    """The options of a problem, and what its plan is to be the best of."""


class PointKeywords(MachineKeywords, PlanKeywords, ObjectiveKeywords, total=False):
    """The same, where the number of devices may be one of what is swept."""

    gpus: int


__all__ = [
    "MachineKeywords",
    "MachineOptions",
    "ObjectiveKeywords",
    "ObjectiveOptions",
    "Option",
    "Options",
    "PlanKeywords",
    "PlanOptions",
    "PointKeywords",
    "ProblemKeywords",
    "SolveKeywords",
    "declared",
    "options_from",
    "unknown_option",
]
