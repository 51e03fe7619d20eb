"""Deaths of the processes of a check: which of them is the cause of the others, and what it means. No torch.

A process that raises writes down why (`RANK.failed`). The exit code tells how a process died. The other
processes fail next, because they lost that one: their errors are follow-ups.
"""

from __future__ import annotations

import contextlib
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

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it, other than the one with which a process aborts itself."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGABRT


def read_failures(folder: Path) -> dict[int, dict[str, Any]]:
    """The errors that processes raised, by rank."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.failed")}


def is_follow_up(death: Death, failures: Mapping[int, Mapping[str, Any]], folder: Path) -> bool:
    """Return whether a process died because it lost another: it raised so, or printed so and aborted."""
    if death.rank in failures:
        return bool(failures[death.rank]["lost"])
    lines = _last_lines(folder, death.rank)
    return not death.is_killed and any(word in line for line in lines for word in LOST)


def find_death(folder: Path, deaths: Sequence[Death]) -> MachineError | None:
    """The error of the process that failed or died first, else of one that lost another; None if none did.

    A signal comes from outside, or from a fault of the process: it is always a cause. An abort and an exit
    status may be follow-ups, as errors may be that torch raises in other words than those that are known.
    """
    failures = read_failures(folder)
    silent = [death for death in deaths if death.rank not in failures]
    causes = [death for death in silent if death.is_killed]
    causes = causes or [death for death in silent if not is_follow_up(death, failures, folder)]
    raised = [rank for rank in failures if not failures[rank]["lost"]]
    candidates = raised if raised or causes else list(failures)
    first = min(candidates, key=lambda rank: float(failures[rank]["time"]), default=None)
    is_later = bool(causes) and first is not None and causes[0].time < failures[first]["time"]
    if first is not None and not is_later and not (causes and causes[0].is_killed):
        return _raised(first, failures[first], folder)
    return _died(causes or silent, folder) if silent else None


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: f"{number.name} (signal {number.value})" for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def while_doing(folder: Path, rank: int | str) -> str:
    """Last action of a rank."""
    path = folder / f"{rank}.doing"
    return f"while {json.loads(path.read_text())['doing']}" if path.is_file() else "before it began"


def _raised(rank: int, failure: Mapping[str, Any], folder: Path) -> MachineError:
    lost, what = "lost another process " if failure["lost"] else "", failure["what"]
    if not what.startswith("check: "):  # a process that hangs says what it was doing
        what = f"check: rank {rank} {lost}{while_doing(folder, rank)}: {what}"
    return MachineError(what, failure["hint"] or _printed(folder, rank) or "Run it alone to see more.")


def _died(deaths: Sequence[Death], folder: Path) -> MachineError:
    (rank, code, _), *others = deaths
    advice = OUT_OF_MEMORY if code == -signal.SIGKILL else ""
    hints = [
        advice,
        *(f"Rank {other.rank} died, too: {describe_exit(other.exit_code)}." for other in others),
        _printed(folder, rank) or ("" if advice else "It printed nothing."),
    ]
    return MachineError(
        f"check: rank {rank} died {while_doing(folder, rank)}: {describe_exit(code)}",
        " ".join(filter(None, hints)),
    )


def _printed(folder: Path, rank: int) -> str:
    lines = _last_lines(folder, rank)
    return "It printed: " + " | ".join(lines) if lines else ""


def _last_lines(folder: Path, rank: int) -> list[str]:
    """Lines that are not blank; none where there is no file."""
    path = folder / f"{rank}.stderr"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]


def is_stopped(pid: int) -> bool:
    """Return whether a signal holds the process, if the system tells."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    return False


def end_with(parent: int) -> None:
    """End this process when its `parent` is gone, whatever it is doing."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
