"""The verbs in one table, and the program as typer takes it.

A verb's module is imported, and its options are made, when they are first asked for: the list of the verbs
needs the table alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from .field_names import ENTER_ALL


class Entry(NamedTuple):
    """A verb, or a group of them.

    `summary`: the first line of its docstring. `panel`: its heading in the list of verbs; None hides it.
    `status`: what its exit status may be besides those of all verbs. `is_group`: holds the verbs whose names
    begin with its own; it runs a command itself if it has examples.
    """

    summary: str
    examples: tuple[str, ...] = ()
    panel: str | None = None
    status: str = ""
    is_group: bool = False


MAIN, LOOK, TRUST, MACHINE = "The main job", "Look", "Trust", "Machine"
VERBS = {
    "demo": Entry(
        "Plan GPT-2 XL on eight A100: no GPU, no download.",
        ("pplan demo",),
        MAIN,
    ),
    "profile": Entry(
        "Measure a model layer by layer.",
        (
            "pplan profile vgg19",
            "pplan profile my_package.models:make_model --device cuda:0 --micro-batch-sizes 1,2,4,8",
            "pplan profile hf:gpt2 --device analytic:h100 --amp bf16",
        ),
        MAIN,
    ),
    "import": Entry(
        "Make a profile of another tool's costs, or a plan of its partition.",
        (
            "pplan import costs.csv",
            "pplan import graph.txt --model vgg16 -o vgg16.profile.json",
            "pplan import 12,34 --profile vgg19.profile.json --mini-batch 256",
        ),
        MAIN,
    ),
    "solve": Entry(
        "Find the fastest plan, and how far it is from the best possible.",
        (
            "pplan solve --gpus 8",
            "pplan solve vgg19.profile.json --gpus 16 --topology dgx-h100 --mini-batch 512 --optimizer adamw",
            "pplan solve --gpus 4 --gpu a100-40gb --runtime torchgpipe --details",
            "pplan solve config.json --gpus 64 --gpu h100",
            "pplan solve vgg19.plan.json --lost 3,7",
        ),
        MAIN,
        "3 no feasible plan",
    ),
    "export": Entry(
        "Write a plan for a training runtime, or a script that trains.",
        ("pplan export torchgpipe", "pplan export torch vgg19.plan.json --script train.py"),
        MAIN,
    ),
    "show": Entry(
        "Show a profile or a plan in tables.",
        ("pplan show", "pplan show vgg19.profile.json --all"),
        LOOK,
    ),
    "explain": Entry(
        "Explain a plan: its limits, the second best, what changes bring.",
        ("pplan explain", "pplan explain --current 12,34"),
        LOOK,
    ),
    "compare": Entry(
        "Compare plans side by side, or with those of other planners.",
        ("pplan compare --planners", "pplan compare new.plan.json old.plan.json --fail-above 10%"),
        LOOK,
        "4 beyond --fail-above",
    ),
    "report": Entry(
        "Write a plan as one HTML page.",
        ("pplan report", "pplan report vgg19.plan.json --explain -o vgg19.html"),
        LOOK,
    ),
    "simulate": Entry(
        "Simulate a step of a plan, or of given costs, under a schedule.",
        (
            "pplan simulate --schedule zb-h1 --micro-batches 32",
            "pplan simulate --trace step.json --svg step.svg",
            "pplan simulate --schedule 1f1b --stages 8 --micro-batches 32 --forward-ms 18.5 --backward-ms 37",
            "pplan simulate --list",
        ),
        LOOK,
    ),
    "check": Entry(
        "Run a plan for a few steps, and measure what was predicted.",
        ("pplan check", "pplan check vgg19.plan.json --emulate --fail-above 15%"),
        TRUST,
        "4 beyond --fail-above",
    ),
    "lint": Entry(
        "Check plan files, or a pipeline layout, without running them.",
        (
            "pplan lint vgg19.plan.json",
            "pplan lint 'Et*3|(tt|)*29m|L' --model config.json --pp 16",
            "pplan lint 'Et*15|t*16|t*16|t*17|t*16L' --model config.json --gpus 40 --gpu h100 --tp 8",
            "pplan lint even --model config.json --pp 8 --virtual-stages 4",
        ),
        TRUST,
        "4 something differs, or does not fit",
    ),
    "machine": Entry(
        "Show machines, look at this one, and measure it.",
        panel=MACHINE,
        is_group=True,
    ),
    "machine list": Entry(
        "List the machines that --topology knows.",
        ("pplan machine list",),
        MACHINE,
    ),
    "machine show": Entry(
        "Show devices, links and transfer times of a machine.",
        ("pplan machine show dgx-a100", "pplan machine show dgx-a100 --gpus 8 --toml"),
        MACHINE,
    ),
    "machine doctor": Entry(
        "Tell what works on this computer, and what to install.",
        ("pplan machine doctor",),
        MACHINE,
        "2 something that pplan needs is missing",
    ),
    "machine measure": Entry(
        "Measure links and kernels for solve.",
        panel=MACHINE,
        is_group=True,
    ),
    "machine measure links": Entry(
        "Measure the links between devices; writes links.toml for --topology.",
        ("torchrun --nproc-per-node 4 --no-python pplan machine measure links",),
        MACHINE,
    ),
    "machine measure kernels": Entry(
        "Measure a transformer's kernels; writes kernels.csv for --kernels.",
        ("pplan machine measure kernels config.json --device cuda:0",),
        MACHINE,
    ),
    "schema": Entry(
        "Print the JSON Schema of a kind of file.",
        ("pplan schema", "pplan schema plan"),
    ),
    "config": Entry(
        "Show the defaults of options that are set here.",
        ("pplan config",),
    ),
}
"""By name. The function of `machine list` is `machine_list_command` in the module of its group."""
PROGRAM = Entry(
    "Measure a PyTorch model layer by layer, and find the fastest pipeline plan for your GPUs.",
    ("pplan profile vgg19", "pplan solve --gpus 8", "pplan export torchgpipe"),
)
REMOVED = {
    "degrees": "pplan solve config.json --gpus N --gpu NAME",
    "doctor": "pplan machine doctor",
    "import-plan": "pplan import PARTITION",
    "profile-kernels": "pplan machine measure kernels CONFIG",
    "profile-links": "pplan machine measure links",
    "replan": "pplan solve PLAN --lost N",
    "schedules": "pplan simulate --list, or pplan simulate --list --schedule NAME",
    "topology": "pplan machine list, or pplan machine show NAME",
    "verify": "pplan lint PLAN",
}
"""Verbs of earlier versions, and the commands that do their work now."""


def _process_value(parameter: Any, context: Any, value: Any) -> Any:
    """Return the value of a parameter as it was typed, or what its callback makes of it.

    pplan reads values itself: the readers of typer import pydantic, which takes longer than all else. A flag
    from the environment, a value of typer's own options and one that is missing go the usual way.
    """
    of_typer = context.parent is None and not isinstance(value, bool | None)
    if of_typer or (parameter.required and parameter.value_is_missing(value)):
        return type(parameter).process_value(parameter, context, value)
    value = () if value is None and parameter.multiple else value
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


class _TakesText:
    """A command whose parameters take values as they are typed."""

    def get_params(self, ctx: Any) -> Any:
        """List the parameters, typer's --help too."""
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            parameter.process_value = partial(_process_value, parameter)
        return parameters


class _MadeLate(_TakesText):
    """A command whose `params`, `callback` and `help` are made when one of them is first asked for."""

    def __init__(self, verb: str, **more: Any) -> None:
        self.verb, self.entry = verb, VERBS[verb]
        super().__init__(name=verb.rpartition(" ")[2], hidden=self.entry.panel is None, **more)  # type: ignore[call-arg]
        if self.entry.examples:
            del self.params, self.callback, self.help

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback", "help"):
            raise AttributeError(name)
        from .option_parameters import make_command

        command = make_command(self.verb, is_group=self.entry.is_group)
        self.params, self.callback, self.help = command.params, command.callback, command.help
        return getattr(self, name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from .help import write_help

        write_help(self, self.entry, ctx, formatter)


class Verb(_MadeLate, TyperCommand):
    """A verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words.

        An argument may be the arguments of a trainer in one word, `"--degree 4 --bf16"`: a space before it
        keeps it from being taken for an option.
        """
        return super().parse_args(ctx, [f" {word}" if re.match(_TRAINER, word) else word for word in args])


class Group(_MadeLate, TyperGroup):
    """A verb that holds others."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb, commands=make_verbs(f"{verb} "), invoke_without_command=True)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any, a group that runs no command of its own prints its help."""
        return super().parse_args(ctx, args or ([] if self.entry.examples else ["--help"]))


def make_verbs(group: str = "") -> dict[str, Any]:
    """Make the verbs of a group by their last words; `group`: its name with a space."""
    names = [verb for verb in VERBS if verb.startswith(group) and " " not in verb.removeprefix(group)]
    return {verb.removeprefix(group): (Group if VERBS[verb].is_group else Verb)(verb) for verb in names}


_TRAINER = r"--[\w.-]+\s|--[\w.-]*(?:layout|module_fqns_per_model_part)="
"""An option with its value in one word. pplan has no option with such a name."""


@dataclass
class Session:
    """What the options before the verb say."""

    debug: bool = False


def _print_version(version: bool) -> None:
    if version:
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as installed

        try:
            print(f"pplan {installed('pplan')}")
        except PackageNotFoundError:
            print("pplan (not installed)")
        raise typer.Exit


class _Program(_TakesText, TyperGroup):
    """The command before the verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; without any it prints its help."""
        return super().parse_args(ctx, args or ["--help"])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from .help import write_help

        write_help(self, PROGRAM, ctx, formatter)


app = typer.Typer(
    name="pplan",
    cls=_Program,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback()
def options_before_the_verb(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", envvar="PPLAN_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[  # noqa: ARG001  typer calls _print_version with it
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit."),
    ] = False,
) -> None:
    """Measure a PyTorch model layer by layer, and find the fastest pipeline plan for your GPUs."""
    context.ensure_object(Session).debug = debug


root: Any = typer.main.get_command(app)
"""The command made of all the above."""
root.commands |= make_verbs()


def enter_all_fields(group: Any = root) -> None:
    """Have the options of all verbs made, which enters their fields in `FIELDS`."""
    for verb in group.commands.values():
        verb.params  # noqa: B018  made by being asked for
        if isinstance(verb, Group):
            enter_all_fields(verb)


ENTER_ALL.append(enter_all_fields)
