"""The console script. `main` alone prints errors and chooses the exit status; verbs raise.

0    done
1    an internal error of pplan
2    what the user or the machine must change
3    no feasible plan
4    a threshold was crossed, or a check failed
130  interrupted

What takes time to import is imported in `main`, so that an interruption finds it there.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..cost_models.errors import PplanError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; `arguments` default to those of the process. Returns the exit status."""
    with _quick_start():
        return _run(list(sys.argv[1:] if arguments is None else arguments))


@contextmanager
def _quick_start() -> Iterator[None]:
    """Start with less work.

    What is imported stays, so garbage is collected less often. pydantic does not read the metadata of every
    installed package to find its plugins.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, *thresholds[1:])
    is_set = _PLUGINS in os.environ
    os.environ.setdefault(_PLUGINS, "__all__")
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not is_set:
            os.environ.pop(_PLUGINS, None)


_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


def _run(words: list[str]) -> int:
    """Run the command of the words. Returns the exit status."""
    session = None
    try:
        from .config_command import default_map
        from .field_names import ARGUMENTS, TYPED
        from .streams import begin
        from .verbs import Session, root

        begin()
        ARGUMENTS.set(tuple(words))
        TYPED.set({})
        session = Session()
        options = {"standalone_mode": False, "obj": session, "default_map": default_map(root)}
        status = root(args=words, prog_name="pplan", **options)
        sys.stdout.flush()
    except SystemExit as end:
        # typer leaves so where the reader of the pipe has gone
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        return _silence_output()
    except BrokenPipeError:
        return _silence_output()
    except KeyboardInterrupt:
        status = 130
    except Exception as error:
        return _report(error, words, debug=session is not None and session.debug)
    if status == 130:
        print("pplan: interrupted", file=sys.stderr)
        _print_json_error(
            words, {"status": 130, "kind": "interrupted", "message": "interrupted", "advice": ""}
        )
    return status if isinstance(status, int) else 0


def _report(error: Exception, words: Sequence[str], *, debug: bool) -> int:
    """Prints the two lines of an error, and returns its exit status."""
    from .streams import printable

    own_error = _as_own_error(error, words)
    if own_error is not None:
        from ..cost_models.errors import InfeasibleError
        from .field_names import as_options

        own_error.what, own_error.hint = as_options(own_error.what), as_options(own_error.hint)
        if isinstance(own_error, InfeasibleError) and "would_fit" in own_error.details:
            own_error.details["would_fit"] = [as_options(change) for change in own_error.details["would_fit"]]
    if debug:
        import traceback

        traceback.print_exception(error)
    if own_error is None:
        first = printable((str(error).splitlines() or [""])[0][:300])
        message = f"internal error: {type(error).__name__}{': ' if first else ''}{first}"
        print(f"pplan: {message}\n  {_REPORT}", file=sys.stderr)
        _print_json_error(words, {"status": 1, "kind": "defect", "message": message, "advice": _REPORT})
        return 1
    print(f"pplan: {printable(_one_line(own_error.what))}", file=sys.stderr)
    if own_error.hint:
        print(f"  {printable(_one_line(own_error.hint))}", file=sys.stderr)
    _print_json_error(words, own_error.as_json)
    if isinstance(error, OSError):
        _drop_output()  # of a full disk, which would fail once more at the interpreter's exit
    return own_error.exit_status


_OF_THE_MACHINE = {
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ESTALE),
}
"""Of the operating system: what no program can help."""
_REPORT = "Please report it, with what the same command prints as pplan --debug ..."


def _print_json_error(words: Sequence[str], error: Mapping[str, object]) -> None:
    """Prints {"error": ...} on standard output where JSON was asked for, and none was printed yet."""
    from . import streams

    if "--json" not in words or streams.printed_result():
        return
    import contextlib
    import json

    # A reader that has gone, or a full disk: the lines on standard error tell.
    with contextlib.suppress(OSError, ValueError):
        print(json.dumps({"error": error}, indent=1), flush=True)


def _as_own_error(error: Exception, words: Sequence[str]) -> PplanError | None:
    """The error in our own words; None where it is a defect of pplan."""
    from ..cost_models.errors import MachineError, PplanError, short_repr

    if isinstance(error, PplanError):
        return error
    if (usage := _usage_error(error, words)) is not None:
        return usage
    if isinstance(error, ModuleNotFoundError) and (error.name or "pplan").split(".")[0] != "pplan":
        return MachineError(
            f"the Python package {error.name!r} is not installed",
            "Install it, or pplan anew: pip install pplan",
        )
    if isinstance(error, MemoryError):
        return MachineError("this machine's memory is full", "Close other programs, or use a smaller size.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG):
        return MachineError(f"cannot write: {error.strerror}", "Free some space, or write to another place.")
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return MachineError("the working directory does not exist any more", "Go to another one, with cd.")
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        what = "a file" if error.filename is None else short_repr(str(error.filename))
        return MachineError(
            f"cannot use {what}: {error.strerror}", "Check the path, its rights, and what else runs."
        )
    return None


def _usage_error(error: Exception, words: Sequence[str]) -> PplanError | None:
    """What typer refused, in our own words."""
    if "typer" not in sys.modules:
        return None  # it is what could not be imported
    from .usage import explain_usage, is_usage_error
    from .verb_table import REMOVED
    from .verbs import root

    return explain_usage(error, root, words, REMOVED) if is_usage_error(error) else None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _silence_output() -> int:
    """Silences standard output once its reader has gone, also at the interpreter's exit."""
    _drop_output()
    return 0


def _drop_output() -> None:
    """Sends what standard output still has to write to the null device."""
    import contextlib

    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
