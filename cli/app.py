"""The console script. `main` alone prints errors and chooses the exit status; verbs raise.

0    done
1    a defect of pplan
2    what the user or the machine must change
3    no feasible plan
130  interrupted
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from ..cost_models.errors import MachineError, PplanError
from .export_command import export_command
from .profile_command import profile_command
from .show_command import show_command
from .solve_command import solve_command
from .usage import explain_usage, is_usage_error

app = typer.Typer(
    name="pplan",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measures a PyTorch model layer by layer and finds the pipeline plan for your GPUs.",
    epilog="The main job: pplan profile vgg19; pplan solve --gpus 8; pplan export torchgpipe",
)
app.command("profile")(profile_command)
app.command("solve")(solve_command)
app.command("export")(export_command)
app.command("show")(show_command)


@dataclass
class Session:
    """What the options before the verb say."""

    debug: bool = False


def _print_version(wanted: bool) -> None:
    if wanted:
        from .provenance import installed

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; `arguments` default to those of the process. Returns the exit status."""
    session = Session()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = app(args=given, prog_name="pplan", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except SystemExit as end:
        # typer leaves so where the reader of the pipe has gone
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _reader_gone()
    except BrokenPipeError:
        return _reader_gone()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        return _report(error, given, debug=session.debug)
    if status == 130:
        print("pplan: interrupted", file=sys.stderr)
    return status if isinstance(status, int) else 0


def _report(error: Exception, given: Sequence[str], *, debug: bool) -> int:
    """Prints the two lines of an error, and returns its exit status."""
    known = _as_ours(error, given)
    if debug:
        import traceback

        traceback.print_exception(error)
    if known is None:
        first = (str(error).splitlines() or [""])[0]
        print(
            f"pplan: a defect of pplan: {type(error).__name__}{': ' if first else ''}{first}\n"
            "  Please report it to its makers, with what the same command prints as pplan --debug ...",
            file=sys.stderr,
        )
        return 1
    print(f"pplan: {_one_line(known.what)}", file=sys.stderr)
    if known.hint:
        print(f"  {_one_line(known.hint)}", file=sys.stderr)
    return known.exit_status


def _as_ours(error: Exception, given: Sequence[str]) -> PplanError | None:
    """The error in our own words; None where it is a defect of pplan."""
    if isinstance(error, PplanError):
        return error
    if is_usage_error(error):
        return explain_usage(error, app, given)
    if isinstance(error, ModuleNotFoundError) and (error.name or "pplan").split(".")[0] != "pplan":
        return MachineError(
            f"the Python package {error.name!r} is not installed",
            "Install it, or pplan anew: pip install pplan",
        )
    if isinstance(error, MemoryError):
        return MachineError("this machine's memory is full", "Close other programs, or use a smaller size.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return MachineError(f"cannot write: {error.strerror}", "Free some space, or write to another place.")
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reader_gone() -> int:
    """Quiet where the reader of standard output has gone, also at the interpreter's exit."""
    import contextlib
    import os

    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
