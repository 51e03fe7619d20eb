"""A training script for an exported plan: complete, short, and running as it is. Needs no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ...cost_models.errors import ExportError
from ...cost_models.quantities import format_seconds
from ...planner.plan_file import Plan
from ...profiler.named_model import model_for, quote_name
from ...profiler.profile_file import Profile
from ..formats.deepspeed_export import DeepspeedExport
from ..formats.export_document import ExportDocument
from ..formats.pipe_export import PipeExport
from ..formats.torch_export import TorchExport
from ..formats.trainer_text import TrainerArguments
from .model_lines import model_lines, write_literal

OPTIMIZERS = {
    "sgd": ("torch.optim.SGD", "lr=0.01"),
    "momentum": ("torch.optim.SGD", "lr=0.01, momentum=0.9"),
    "adam": ("torch.optim.Adam", "lr=0.001"),
    "adamw": ("torch.optim.AdamW", "lr=0.001"),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", "lr=0.001"),
}
"""By the plan's word; the learning rates are for the user to change."""

_PROGRAMS = {
    "megatron": ("pretrain_gpt.py", "ARGUMENTS"),
    "megatron-bridge": ("", "RECIPE.py [OVERRIDES]"),
    "torchtitan": ("-m torchtitan.train", "--module MODULE --config CONFIG [OPTIONS]"),
}
"""By runtime: what torchrun starts, and what the user gives the script."""

_BUILD = {
    "torchgpipe": "from pplan.runtimes.torchgpipe import build",
    "fairscale": "from pplan.runtimes.fairscale import build",
    "deepspeed": "from pplan.runtimes.deepspeed import DeepspeedExport, build, start",
    "torch": "from pplan.runtimes.torch_pipelining import build",
}


@dataclass(frozen=True)
class Script:
    """A script's text, the command that runs it in its folder, and the line of a loss to be replaced."""

    text: str
    command: str
    placeholder_line: int | None = None


def write_script(
    document: ExportDocument,
    plan: Plan,
    profile: Profile | None,
    *,
    path: Path,
    plan_path: Path,
    device: str,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Script:
    """The script that is to stand at `path` and trains by the `document`, which stands at `plan_path`.

    `profile`: the plan's; it says how the model was built and what it takes. A trainer of its own needs none.
    `model` and `settings`: as the user names it, where it is neither torchvision's nor transformers' own: a
    file's word puts no code into the script. What it builds is held against the plan's layers when it runs.
    Raises ExportError where the runtime is trained with no script of ours, ModelError for the name.
    """
    _check_names(path, plan_path)
    plan_reference = Path(os.path.relpath(plan_path.absolute(), path.absolute().parent))
    if isinstance(document, TrainerArguments):
        return Script(*_trainer_script(document, path, plan_reference))
    if not isinstance(document, PipeExport | DeepspeedExport | TorchExport):  # as needs_profile
        raise ExportError(
            f"`script`: {document.runtime} trains by its own recipes, in which what is written belongs: "
            f"{plan_path.name} says where",
            "Omit `script`. Or export for torch: pplan.export('torch')",
        )
    if profile is None:
        raise ExportError(
            f"`script`: the profile that the plan of {plan.model} was made from says how it is built",
            "Name it: profile=FILE",
        )
    command = _command(document, path)
    names = _common_fields(document, plan, path, plan_reference, command) | _runtime_fields(document, device)
    named_model = model_for(profile, model, settings or {})
    names |= model_lines(profile, named_model, document, _BUILD[document.runtime], optimizer=plan.optimizer)
    template = files(__package__).joinpath(f"{document.runtime}.template").read_text(encoding="utf-8")
    text = Template(template).substitute(names)
    loss_line = text[: text.index("def loss_of(")].count("\n") + 1
    return Script(text, command, loss_line if names["warning"] else None)


def needs_profile(document: ExportDocument) -> bool:
    """Whether a script for it builds the model, and so has to know it."""
    return isinstance(document, PipeExport | DeepspeedExport | TorchExport)


def _command(document: PipeExport | DeepspeedExport | TorchExport, path: Path) -> str:
    name = shlex.quote(path.name)
    if isinstance(document, PipeExport):
        return f"python {name}"
    processes, per_node = len(document.devices), None
    if isinstance(document, TorchExport):
        per_node = document.gpus_per_node
    nodes = -(-processes // (per_node or processes))
    spread = f"--nnodes {nodes} " if nodes > 1 else ""
    return f"torchrun {spread}--nproc-per-node {-(-processes // nodes)} {name}"


def _common_fields(
    document: PipeExport | DeepspeedExport | TorchExport, plan: Plan, path: Path, beside: Path, command: str
) -> dict[str, object]:
    count = len(document.balance if isinstance(document, PipeExport) else document.parts[1:])
    if plan.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"`script`: the plan's optimizer is {quote_name(plan.optimizer)}",
            f"Known are {', '.join(OPTIMIZERS)}.",
        )
    optimizer, options = OPTIMIZERS[plan.optimizer]
    checkpoint = f"{path.stem}.pt" if isinstance(document, PipeExport) else f"{path.stem}.checkpoint"
    return {
        "command": command,
        "model": _printable_name(document.model),
        "plan_name": _printable_name(beside.name),
        "plan_path": f"HERE / {write_literal(beside.as_posix())}",
        "checkpoint_name": _printable_name(checkpoint),
        "checkpoint_path": f"HERE / {write_literal(checkpoint)}",
        "stages": f"{count} stage{'s' * (count > 1)}",
        "estimated": " (estimated)" if document.estimated else "",
        "step_seconds": format_seconds(document.step_seconds),
        "mini_batch": document.mini_batch,
        "micro_batches": document.mini_batch // document.micro_batch_size,
        "optimizer": optimizer,
        "optimizer_options": options,
    }


def _runtime_fields(document: PipeExport | DeepspeedExport | TorchExport, device: str) -> dict[str, object]:
    if isinstance(document, PipeExport):
        return {}
    device_text = '"cuda"' if isinstance(document, DeepspeedExport) else "None"
    comment = "" if isinstance(document, DeepspeedExport) else "  # None: the plan's for this process"
    return {
        "micro_batch": document.micro_batch_size,
        "replicas": document.replicas,
        "device": f'{device_text} if torch.cuda.is_available() else "cpu"{comment}'
        if device == "cuda"
        else '"cpu"',
    }


def _check_names(*paths: Path) -> None:
    """Raises ExportError for a name that would end the line of the script on which it stands."""
    for path in paths:
        if not path.name.isprintable():
            raise ExportError(f"`script`: the file's name is {quote_name(path.name)}", "Name it in one line.")


def _printable_name(name: str) -> str:
    """A name as it may stand in a docstring."""
    return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in name)


def _trainer_script(document: TrainerArguments, path: Path, beside: Path) -> tuple[str, str]:
    """The text of the script at `path`, which reads the arguments in the file `beside`; and its command.

    Raises ExportError where that file is none that a shell reads.
    """
    if beside.suffix == ".json":
        raise ExportError(
            f"`script`: {beside} would be the plan for pplan, the script needs it as arguments for a shell",
            "Omit `output`, or name a file that ends in .sh.",
        )
    program, needs = _PROGRAMS[document.runtime]
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
