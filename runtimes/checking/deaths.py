"""Deaths of the processes of a check: which of them is the cause of the others, and what it means. No torch.

A process that raises writes down why (`RANK.failed`). The exit code tells how a process died. The other
processes fail next, because they lost that one: their errors are follow-ups.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...cost_models.errors import MachineError

PARENT = "parent.json"
"""File with the id of the process that started the others."""
CAUSE_SECONDS = 5.0
"""Wait for the death of the process that another one lost: a GPU driver may keep a dying process longer
than its sockets."""
LOST = (
    *("Connection closed", "Connection reset", "Broken pipe", "connect", "Timed out", "timed out"),
    *("wait timeout", "NCCL"),
)
"""Words of what torch.distributed raises for a process that is gone or silent."""
LAST_LINES = 3
OUT_OF_MEMORY = (
    "SIGKILL usually means out of memory: see dmesg. Plan with smaller micro-batches, or with less "
    "`memory_bytes` per device."
)


class Death(NamedTuple):
    """A process that died, its exit code (minus the signal) and when that was noticed (s since 1970)."""

    rank: int
    exit_code: int
    time: float


def read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """The errors that processes raised, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.failed")}


def is_follow_up(death: Death, failures: Mapping[int, Mapping[str, Any]], folder: Path) -> bool:
    """Return whether a process died because it lost another: it raised so, or printed so and aborted."""
    if death.rank in failures:
        return bool(failures[death.rank]["lost"])
    return not _is_killed(death) and any(
        word in line for line in _last_lines(folder, death.rank) for word in LOST
    )


def find_death(folder: Path, deaths: Sequence[Death]) -> MachineError | None:
    """The error of the process that failed or died first, else of one that lost another; None if none did.

    A signal comes from outside, or from a fault of the process: it is always a cause. An abort and an exit
    status may be follow-ups, as errors may be that torch raises in other words than those that are known.
    """
    failures = read_failures(folder)
    silent = [death for death in deaths if death.rank not in failures]
    killed = [death for death in silent if _is_killed(death)]
    causes = killed or [death for death in silent if not is_follow_up(death, failures, folder)]
    raised = {rank: failure for rank, failure in failures.items() if not failure["lost"]}
    first = min((float(failure["time"]) for failure in raised.values()), default=None)
    if raised and not killed and (not causes or first is None or first <= causes[0].time):
        return _raised(raised, folder)
    if causes:
        return _died(causes, folder)
    if failures:
        return _raised(failures, folder)
    return _died(silent, folder) if silent else None


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exit status {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        return f"killed by signal {-code}"
    return f"killed by {name} (signal {-code})"


def advice(code: int) -> str:
    """Advice for a process that ended so. Empty if the code alone does not say."""
    return OUT_OF_MEMORY if code == -9 else ""


def while_doing(folder: Path, rank: int | str) -> str:
    """Last action of a rank."""
    path = folder / f"{rank}.doing"
    return f"while {json.loads(path.read_text())['doing']}" if path.is_file() else "before it began"


def _raised(failures: Mapping[int, Mapping[str, Any]], folder: Path) -> MachineError:
    rank, failure = min(failures.items(), key=lambda item: float(item[1]["time"]))
    lost = "lost another process " if failure["lost"] else ""
    hint = failure["hint"] or _printed(folder, rank) or "Run it alone to see more."
    what = failure["what"]
    if not what.startswith("check: "):  # a process that hangs says what it was doing
        what = f"check: rank {rank} {lost}{while_doing(folder, rank)}: {what}"
    return MachineError(what, hint)


def _died(deaths: Sequence[Death], folder: Path) -> MachineError:
    (rank, code, _), *others = deaths
    hints = [
        advice(code),
        *(f"Rank {other.rank} died, too: {describe_exit(other.exit_code)}." for other in others),
        _printed(folder, rank) or ("" if advice(code) else "It printed nothing."),
    ]
    return MachineError(
        f"check: rank {rank} died {while_doing(folder, rank)}: {describe_exit(code)}",
        " ".join(filter(None, hints)),
    )


def _is_killed(death: Death) -> bool:
    """Return whether a signal ended it, other than the one with which a process aborts itself."""
    return death.exit_code < 0 and death.exit_code != -signal.SIGABRT


def _printed(folder: Path, rank: int) -> str:
    lines = _last_lines(folder, rank)
    return "It printed: " + " | ".join(lines) if lines else ""


def _last_lines(folder: Path, rank: int) -> list[str]:
    return read_lines(folder / f"{rank}.stderr")[-LAST_LINES:]


def read_lines(path: Path) -> list[str]:
    """Lines that are not blank; none where there is no file."""
    if not path.is_file():
        return []
    return [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]


def end_with(parent: int) -> None:
    """End this process when its `parent` is gone, whatever it is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
