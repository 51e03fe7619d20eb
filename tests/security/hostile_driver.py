"""Runs pplan on hostile files in this process, and tells what it did besides: see test_hostile_files.py.

    hostile_driver.py CASES.json FOUND.json

Each case is a command line and the folder that it runs in. Of each: status, output, and what the audit hook
saw of modules of the files' names, commands, connections, and writing outside of the folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

EVIL = "evil"
"""What the modules begin with that the files name."""
COMMANDS = ("os.system", "os.exec", "os.posix_spawn", "os.startfile", "subprocess.Popen", "pty.spawn")
ELSEWHERE = ("socket.connect", "socket.getaddrinfo", "urllib.Request")
MOVES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate")
LONGEST = 120
"""Seconds of a case: one imports torch, and what matches for ever takes longer."""
seen: list[str] = []
watching = False


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not watching:
        return
    if event == "subprocess.Popen" and arguments[0] == "/sbin/ldconfig":
        return  # Python's own way to find a library
    if event in COMMANDS or event in ELSEWHERE:
        seen.append(f"{event} {arguments!r}"[:200])
    elif event == "import" and str(arguments[0]).startswith((EVIL, "os.system")):
        seen.append(f"import {arguments[0]}")
    elif event == "open" and _writes(arguments) and _outside(arguments[0]):
        seen.append(f"open {arguments!r}"[:200])
    elif event in MOVES and any(isinstance(path, str) and _outside(path) for path in arguments[:2]):
        seen.append(f"{event} {arguments!r}"[:200])


class TooLong(BaseException):
    """A case that goes on for ever."""


def refuse(job: Any, *_: object) -> None:
    """Instead of starting the processes of a check: what they were to build."""
    from pplan.cost_models.errors import MachineError

    model = job.model
    raise MachineError(f"check: processes for {model.name!r} {model.loss!r} {model.by_user}", "Not here.")


def give_up(*_: object) -> None:
    raise TooLong


def _writes(arguments: tuple[Any, ...]) -> bool:
    mode, flags = arguments[1], arguments[2]
    return any(mark in (mode or "") for mark in "wax+") or bool(flags & (os.O_WRONLY | os.O_RDWR))


def _outside(path: object) -> bool:
    if isinstance(path, int) or str(path) == os.devnull:
        return False
    name = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
    return not Path(os.path.abspath(name)).is_relative_to(os.environ["HOSTILE_ROOT"])  # noqa: PTH100


def ran(arguments: list[str], folder: str) -> dict[str, Any]:
    global watching
    from pplan.api import check
    from pplan.cli.app import main

    check.run_in_processes = refuse  # type: ignore[assignment, attr-defined]
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    seen.clear()
    began = time.monotonic()
    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LONGEST)
    watching = True
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sys.argv = ["pplan", *arguments]
            status = main(arguments)
    except TooLong:
        status = None
    finally:
        watching = False
        signal.alarm(0)
    return {
        "status": status,
        "out": out.getvalue(),
        "err": err.getvalue(),
        "seen": list(seen),
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    sys.addaudithook(watch)
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = Path(sys.argv[2])
    results = []
    for case in cases:
        results.append(ran(*case))
        if os.environ.get("HOSTILE_TOLD") and (results[-1]["seconds"] > 0.5 or results[-1]["seen"]):
            print(case, results[-1], file=sys.stderr, flush=True)
    found.write_text(json.dumps(results), encoding="utf-8")
