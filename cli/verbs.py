"""The verbs, with the examples of their help, and the options before them, as typer takes them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.markup import escape

from .check_command import check_command
from .compare_command import compare_command
from .config_command import config_command
from .degrees_command import degrees_command
from .doctor_command import doctor_command
from .explain_command import explain_command
from .export_command import export_command
from .import_command import import_command
from .import_plan_command import import_plan_command
from .lint_command import lint_command
from .option_parameters import Command, TakesTrainerArguments, with_common_options, with_options
from .profile_command import profile_command
from .profile_kernels_command import profile_kernels_command
from .profile_links_command import profile_links_command
from .replan_command import replan_command
from .report_command import report_command
from .schedules_command import schedules_command
from .schema_command import schema_command
from .show_command import show_command
from .simulate_command import simulate_command
from .solve_command import solve_command
from .topology_command import topology_command
from .verify_command import verify_command

app = typer.Typer(
    name="pplan",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measures a PyTorch model layer by layer and finds the pipeline plan for your GPUs.",
    epilog="The main job: pplan profile vgg19; pplan solve --gpus 8; pplan export torchgpipe",
)
VERBS: dict[str, Command] = {
    "profile": profile_command,
    "profile-links": profile_links_command,
    "import": import_command,
    "solve": solve_command,
    "export": export_command,
    "import-plan": import_plan_command,
    "replan": replan_command,
    "show": show_command,
    "explain": explain_command,
    "check": check_command,
    "compare": compare_command,
    "simulate": simulate_command,
    "report": report_command,
    "verify": verify_command,
    "schedules": schedules_command,
    "topology": topology_command,
    "degrees": degrees_command,
    "lint": lint_command,
    "profile-kernels": profile_kernels_command,
    "doctor": doctor_command,
    "schema": schema_command,
    "config": config_command,
}
EXAMPLES: dict[str, tuple[str, ...]] = {
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
    "degrees": ("pplan degrees config.json --gpus 64 --gpu h100",),
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
    "degrees": "; 3 no feasible plan",
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


for verb, command in VERBS.items():
    # typer takes words in brackets for markup: [tool.pplan] would vanish.
    summary = escape(inspect.getdoc(command) or "")
    kind = TakesTrainerArguments if command is import_plan_command else None
    app.command(verb, cls=kind, help=summary, epilog=help_footer(verb))(
        with_common_options(with_options(command))
    )


@dataclass
class Session:
    """What the options before the verb say."""

    debug: bool = False


def _print_version(version: bool) -> None:
    if version:
        from ..api.provenance import installed

        print(f"pplan {installed('pplan') or '(not installed)'}")
        raise typer.Exit


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
"""The command made of all the above, once: typer would read every verb's parameters again at each call."""
