"""The script that starts a trainer of its own with the arguments that were exported for it."""

from __future__ import annotations

import shlex
from importlib.resources import files
from pathlib import Path
from string import Template

from ...cost_models.errors import ExportError
from ..formats.trainer_text import TrainerArguments

PROGRAMS = {
    "megatron": ("pretrain_gpt.py", "ARGUMENTS"),
    "megatron-bridge": ("", "RECIPE.py [OVERRIDES]"),
    "torchtitan": ("-m torchtitan.train", "--module MODULE --config CONFIG [OPTIONS]"),
}
"""By runtime: what torchrun starts, and what the user gives the script."""


def trainer_script(document: TrainerArguments, path: Path, beside: Path) -> tuple[str, str]:
    """The text of the script at `path`, which reads the arguments in the file `beside`; and its command.

    Raises ExportError where that file is none that a shell reads.
    """
    if beside.suffix == ".json":
        raise ExportError(
            f"`script`: {beside} would be the plan for pplan, the script needs it as arguments for a shell",
            "Omit `output`, or name a file that ends in .sh.",
        )
    program, needs = PROGRAMS[document.runtime]
    command = f"bash {shlex.quote(path.name)}"
    template = files(__package__).joinpath("trainer.template").read_text(encoding="utf-8")
    text = Template(template).substitute(
        command=command,
        needs=needs,
        model="".join(c if c.isprintable() else "_" for c in document.model),
        plan_path=shlex.quote(beside.as_posix()),
        launch=" ".join(["torchrun", document.torchrun_options, *([program] if program else [])]),
    )
    return text, f"{command} {needs}"
