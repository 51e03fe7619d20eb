"""The verbs, with the examples of their help, and the options before them, as typer takes them.

A verb's module is imported, and its options are made, when they are first asked for: the list of the verbs
needs the table below alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from .field_names import ENTER_ALL

VERBS = {
    "demo": "Plan GPT-2 XL on eight A100, from costs to a report: no GPU, no download, some ten seconds.",
    "profile": "Measure a model layer by layer, forward and backward, at several micro-batch sizes.",
    "profile-links": (
        "Measure the links between devices, started by torchrun, and write the file for solve --topology."
    ),
    "import": (
        "Make a profile of costs from elsewhere: a PipeDream graph, or a table, CSV or JSON, one row a layer."
    ),
    "solve": (
        "Find the fastest plan for a model on N GPUs, measured or by its configuration, and how far it is "
        "from\nthe best possible."
    ),
    "export": (
        "Write a plan for a training runtime, in that runtime's own words, and a script that trains by it."
    ),
    "import-plan": (
        "Make a plan of the partition that another tool holds: a balance or parts list, a Megatron "
        "layout,\n"
        "torchtitan's module names, a device_map, or what pplan export wrote."
    ),
    "replan": (
        "Plan again without the devices that are gone: a fast plan that moves the fewest bytes of weights."
    ),
    "show": "Show a profile or a plan in tables.",
    "explain": (
        "Explain a plan: what limits its step, what comes second, how far it holds, what changes would bring."
    ),
    "check": (
        "Run a plan for a few steps, in processes of this machine or torchrun's, and measure what was "
        "predicted."
    ),
    "compare": "Compare plans side by side: step, samples/s, bubble, memory, devices and gap.",
    "simulate": (
        "Simulate a step of a plan, or of given costs, under any schedule: its timeline, and where time goes."
    ),
    "report": (
        "Write a plan as one HTML page to look at and send on: cuts to move, timeline, memory, comparisons."
    ),
    "verify": "Verify a plan file: its structure, its sums, and that it fits and runs.",
    "schedules": (
        "List the schedules: their bubble, memory and weights, what they need, what runs them, their "
        "source; or\n"
        "show one, pplan's or your own."
    ),
    "topology": (
        "Show devices, links and what transfers take, of a machine or a topology file; or list the machines."
    ),
    "lint": (
        "Check a pipeline layout: is it the model's, does it fit the memory, how far is it from the best."
    ),
    "profile-kernels": (
        "Measure the products and attention of a transformer, and write the table for solve --kernels."
    ),
    "doctor": (
        "Tell versions, devices, links and runtimes of this machine, and what to install for what is missing."
    ),
    "schema": "Print the JSON Schema of a kind of file, for editors and other programs.",
    "config": "Show the defaults of options that pplan.toml, or [tool.pplan] of pyproject.toml, sets here.",
}
"""By name, the first paragraph of a verb's docstring: `xyz-links` is `xyz_links_command` of its module."""
REMOVED = {"degrees": "solve"}
"""Verbs of earlier versions, and those that do their work now."""
EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("pplan demo",),
    "profile": (
        "pplan profile vgg19",
        "pplan profile my_package.models:make_model --device cuda:0 --micro-batch-sizes 1,2,4,8",
        "pplan profile hf:gpt2 --device analytic:h100 --amp bf16",
    ),
    "profile-links": ("torchrun --nproc-per-node 4 --no-python pplan profile-links",),
    "import": ("pplan import costs.csv", "pplan import graph.txt --model vgg16 -o vgg16.profile.json"),
    "solve": (
        "pplan solve --gpus 8",
        "pplan solve vgg19.profile.json --gpus 16 --topology dgx-h100 --mini-batch 512 --optimizer adamw",
        "pplan solve --gpus 4 --gpu a100-40gb --runtime torchgpipe --details",
        "pplan solve config.json --gpus 64 --gpu h100",
    ),
    "export": ("pplan export torchgpipe", "pplan export torch vgg19.plan.json --script train.py"),
    "import-plan": ("pplan import-plan 12,34 --profile vgg19.profile.json --mini-batch 256",),
    "replan": ("pplan replan --lost 3", "pplan replan vgg19.plan.json --lost 3,7 --within 10%"),
    "show": ("pplan show", "pplan show vgg19.profile.json --all"),
    "explain": ("pplan explain", "pplan explain --current 12,34"),
    "check": ("pplan check", "pplan check vgg19.plan.json --emulate --fail-above 15%"),
    "compare": ("pplan compare --planners", "pplan compare new.plan.json old.plan.json --fail-above 10%"),
    "simulate": (
        "pplan simulate --schedule zb-h1 --micro-batches 32",
        "pplan simulate --trace step.json --svg step.svg",
        "pplan simulate --schedule 1f1b --stages 8 --micro-batches 32 --forward-ms 18.5 --backward-ms 37",
    ),
    "report": ("pplan report", "pplan report vgg19.plan.json --explain -o vgg19.html"),
    "verify": ("pplan verify vgg19.plan.json",),
    "schedules": ("pplan schedules", "pplan schedules show zb-h1"),
    "topology": ("pplan topology", "pplan topology show dgx-a100"),
    "lint": (
        "pplan lint 'Et*3|(tt|)*29m|L' --model config.json --pp 16",
        "pplan lint 'Et*15|t*16|t*16|t*17|t*16L' --model config.json --gpus 40 --gpu h100 --tp 8",
        "pplan lint even --model config.json --pp 8 --virtual-stages 4",
    ),
    "profile-kernels": ("pplan profile-kernels config.json --device cuda:0",),
    "doctor": ("pplan doctor",),
    "schema": ("pplan schema", "pplan schema plan"),
    "config": ("pplan config",),
}
_STATUSES = (
    "Exit status: 0 done; 1 an internal error of pplan; 2 what you or the machine must change{more}; "
    "130 interrupted."
)
_MORE = {
    "solve": "; 3 no feasible plan",
    "replan": "; 3 no feasible plan",
    "check": "; 4 beyond --fail-above",
    "compare": "; 4 beyond --fail-above",
    "verify": "; 4 something differs",
    "lint": "; 4 the layout is not the model's, or does not fit",
}


def help_footer(verb: str) -> str:
    """The examples of a verb, each on a line of its own, and its exit statuses."""
    examples = "\n\n".join(f"$ {example}" for example in EXAMPLES[verb])
    return f"Examples:\n\n{examples}\n\n{_STATUSES.format(more=_MORE.get(verb, ''))}"


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


class _Program(_TakesText, TyperGroup):
    """The command before the verb."""


class Verb(_TakesText, TyperCommand):
    """A verb: its `params`, `callback` and `help` are made when one of them is first asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, short_help=_escape(VERBS[name]), epilog=help_footer(name))
        del self.params, self.callback, self.help

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback", "help"):
            raise AttributeError(name)
        from .option_parameters import make_command

        command = make_command(str(self.name))
        self.params, self.callback, self.help = command.params, command.callback, _escape(command.help or "")
        return getattr(self, name)


class TakesTrainerArguments(Verb):
    """A verb whose argument may be the arguments of a trainer, in one word: `"--degree 4 --bf16"`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. A space before a trainer's arguments keeps them from being taken for an option."""
        return super().parse_args(ctx, [f" {word}" if re.match(_TRAINER, word) else word for word in args])


_TRAINER = r"--[\w.-]+\s|--[\w.-]*(?:layout|module_fqns_per_model_part)="
"""An option with its value in one word. pplan has no option with such a name."""


def _escape(text: str) -> str:
    """Text without markup: typer would print no word in brackets."""
    return text.replace("[", r"\[")


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


app = typer.Typer(
    name="pplan",
    cls=_Program,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measures a PyTorch model layer by layer and finds the pipeline plan for your GPUs.",
    epilog="The main job: pplan profile vgg19; pplan solve --gpus 8; pplan export torchgpipe",
)


@app.callback(invoke_without_command=True)
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
    """Takes the options before the verb; without a verb it prints the help."""
    context.ensure_object(Session).debug = debug
    if context.invoked_subcommand is None:
        print(context.get_help())


root: Any = typer.main.get_command(app)
"""The command made of all the above."""
root.commands |= {
    verb: TakesTrainerArguments(verb) if verb == "import-plan" else Verb(verb) for verb in VERBS
}


def enter_all_fields() -> None:
    """Have the options of all verbs made, which enters their fields in `FIELDS`."""
    for verb in root.commands.values():
        verb.params  # noqa: B018  made by being asked for


ENTER_ALL.append(enter_all_fields)
