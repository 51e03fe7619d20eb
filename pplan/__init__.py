"""pplan: measures a PyTorch model layer by layer, and finds the pipeline plan for your GPUs.

    profile = pplan.profile("vgg19")
    plan = pplan.solve(profile, gpus=8)
    pplan.export("torchgpipe", plan).save("vgg19.torchgpipe.json", force=False)

What is named here is imported when it is first asked for: `import pplan` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cost_models.errors import (
    ExportError,
    FileError,
    InfeasibleError,
    MachineError,
    ModelError,
    PplanError,
    UsageError,
)

if TYPE_CHECKING:
    from .api.check import check
    from .api.explain import compare, data_parallel, explain, replan
    from .api.export import export
    from .api.html_report import report
    from .api.import_plan import import_plan
    from .api.lint import lint
    from .api.lint_layout import lint_layout
    from .api.load import load_plan, load_profile
    from .api.machine import topology
    from .api.profiles import import_profile, load_model, profile, sequential
    from .api.schedule_comparison import compare_schedules, schedules
    from .api.simulate import plot_timelines, simulate, simulate_costs
    from .api.solve import frontier, solve
    from .api.sweep import sweep
    from .cost_models.schedule_text import register_schedule
    from .planner.plan_file import Plan
    from .profiler.profile_file import Profile

    __version__: str

# fmt: off
__all__ = [
    "ExportError", "FileError", "InfeasibleError", "MachineError", "ModelError", "Plan",
    "PplanError", "Profile", "UsageError", "__version__", "check", "compare", "compare_schedules",
    "data_parallel", "explain", "export", "frontier", "import_plan", "import_profile", "lint", "lint_layout",
    "load_model", "load_plan", "load_profile", "plot_timelines", "profile", "register_schedule", "replan",
    "report", "schedules", "sequential", "simulate", "simulate_costs", "solve", "sweep", "topology",
]
# fmt: on

_ROOMS = {
    "api.check": "check",
    "api.explain": "compare data_parallel explain replan",
    "api.export": "export",
    "api.import_plan": "import_plan",
    "api.lint": "lint",
    "api.lint_layout": "lint_layout",
    "api.load": "load_plan load_profile",
    "api.machine": "topology",
    "api.profiles": "import_profile load_model profile sequential",
    "api.html_report": "report",
    "api.schedule_comparison": "compare_schedules schedules",
    "api.simulate": "plot_timelines simulate simulate_costs",
    "api.solve": "frontier solve",
    "api.sweep": "sweep",
    "cost_models.schedule_text": "register_schedule",
    "planner.plan_file": "Plan",
    "profiler.profile_file": "Profile",
}
"""By module, the names that it has; as above, for the interpreter."""
_REMOVED = {
    "degrees": "pplan.solve('config.json', gpus=64, gpu='h100')",
    "verify": "pplan.lint('vgg19.plan.json')",
}
"""By functions of earlier versions, what to call now."""
_MODULES = {name: module for module, names in _ROOMS.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pplan")
    if name in _REMOVED:
        raise AttributeError(f"pplan.{name} is another function now: {_REMOVED[name]}")
    if name not in _MODULES:
        raise AttributeError(f"module 'pplan' has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
