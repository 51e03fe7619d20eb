"""Exports that a trainer takes as a text of its own: arguments of its command line, or a piece of YAML."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...cost_models.document import DeviceCount, LayerCount
from ...cost_models.quantities import format_seconds
from ...planner.plan_file import Plan
from ...planner.plan_records import ScheduleName
from .export_document import ExportDocument
from .plan_choice import Choice, document_fields


class TrainerText(ExportDocument):
    """A plan as a trainer's own text.

    The file is that text; one whose name ends in `.json` is this document instead, which pplan reads again.
    """

    suffix: ClassVar[str] = "txt"
    """Of the text's file, where the user names none."""

    processes: DeviceCount
    """To be started: one a device."""
    nodes: DeviceCount = 1
    """That they are spread over, as many on each."""
    pipeline_size: DeviceCount
    """Devices of a pipeline."""
    replicas: DeviceCount
    """Of every stage. Ranks count those of a stage before the next stage."""

    order: ScheduleName
    """The plan's word for the schedule."""
    virtual_stages: LayerCount
    """Of each device."""
    recompute: Literal["never", "always"]
    warnings: list[str] = []
    """Reasons why the prediction may be wrong for this trainer."""
    actions: list[str] = []
    """Where the trainer is given the order of the actions: its lines, one a device of the pipeline."""

    @property
    def warning_comments(self) -> list[str]:
        """The warnings as lines of comment, which bash and YAML share."""
        return [shell_comment(f"Warning: {warning}") for warning in self.warnings]

    @property
    def torchrun_options(self) -> str:
        """The launcher's options for the processes; on several nodes it needs a rendezvous, too."""
        nodes = f"--nnodes {self.nodes} " if self.nodes > 1 else ""
        return f"{nodes}--nproc-per-node {-(-self.processes // self.nodes)}"

    def text(self, path: Path) -> str:
        """What the trainer takes, in a file of that name."""
        raise NotImplementedError

    def files(self, path: Path) -> dict[Path, str]:
        """The text, and beside it the CSV of its actions; at a name that ends in `.json`, this document."""
        if path.suffix == ".json":
            return {path: self.to_json()}
        order = {path.with_suffix(".csv"): "\n".join([*self.actions, ""])} if self.actions else {}
        return {path: self.text(path)} | order


class TrainerArguments(TrainerText):
    """Arguments of a trainer's command line, one text each; the file sets them as a bash array."""

    suffix: ClassVar[str] = "sh"
    command: ClassVar[str] = ""
    """How the trainer is started, before its own arguments."""

    arguments: list[str]

    def arguments_in(self, path: Path) -> list[str]:
        """The arguments in a file of that name, which they may name files beside."""
        del path
        return self.arguments

    def text(self, path: Path) -> str:
        """A piece of bash that sets PPLAN, with the command that uses it in its first lines."""
        estimated = " (estimated)" if self.estimated else ""
        return "\n".join(
            [
                shell_comment(
                    f"{self.model} on {self.processes} devices, predicted{estimated}: "
                    f"{format_seconds(self.step_seconds)} a step"
                ),
                *self.warning_comments,
                shell_comment(
                    f'source {path.name}; torchrun {self.torchrun_options} {self.command} ... "${{PPLAN[@]}}"'
                ),
                "PPLAN=(",
                *(f"  {line}" for line in _lines(self.arguments_in(path))),
                ")",
                "",
            ]
        )


def trainer_fields(plan: Plan, choice: Choice, runtime: str) -> dict[str, Any]:
    """The fields that every TrainerText has, but `actions` and `made_by`."""
    devices = len(choice.balance) // choice.virtual_stages
    sharers = plan.profile.tensor_parallel
    processes = devices * choice.replicas * sharers
    per_node = sharers * plan.gpus_per_node if plan.gpus_per_node else processes
    return {
        **document_fields(plan, choice, runtime),
        "processes": processes,
        "nodes": -(-processes // per_node),
        "pipeline_size": devices,
        "replicas": choice.replicas,
        "order": choice.schedule,
        "virtual_stages": choice.virtual_stages,
        "recompute": choice.recompute,
    }


def shell_comment(text: str) -> str:
    """A line of comment: names out of a file may not begin another."""
    return "# " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _lines(arguments: Sequence[str]) -> list[str]:
    """The arguments as bash reads them, an option and its values a line; `name:word` is a subcommand."""
    lines: list[list[str]] = []
    for argument in arguments:
        alone = argument.startswith("--") or ":" in argument
        if not lines or alone or not lines[-1][0].startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return [" ".join(line) for line in lines]


def join_remarks(*remarks: str | None) -> str | None:
    """The sentences that there are, as one remark."""
    return " ".join(remark for remark in remarks if remark) or None


def device_remark(choice: Choice) -> str | None:
    """A sentence where the ranks are not to be started on devices 0, 1, ... in turn: the trainer numbers its
    processes itself."""
    if choice.devices == tuple(range(len(choice.devices))):
        return None
    return f"Start ranks 0, 1, ... on devices {', '.join(map(str, choice.devices))}: there the plan has them."
