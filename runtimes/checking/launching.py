"""Runs a job in processes of this machine, and ends all of them as soon as one fails or hangs. No torch.

A process that raises writes down why (`RANK.failed`). The exit code tells how a process died. The other
processes fail next, because they lost that one: their errors are follow-ups.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...cost_models.errors import MachineError
from .records import CheckMeasurements, Job

POLL_SECONDS = 0.05
STARTING_SECONDS = 60.0
"""At least allowed for the processes to start: they import torch, on a busy machine all at once."""
GRACE_SECONDS = 5.0
"""Seconds that this process waits for progress beyond the timeout by which the others watch themselves."""
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


OnProgress = Callable[[str, float], object]
"""Called when what is being done changes: with that, and about how many seconds are left."""


def run_in_processes(job: Job, on_progress: OnProgress = lambda *_: None) -> CheckMeasurements:
    """Runs the job; no process of it is left behind.

    Raises MachineError with the words of the process that failed, died, or hangs: it began nothing anew for
    `job.timeout_seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="pplan-check-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
        (folder / PARENT).write_text(json.dumps(os.getpid()))
        user_names = () if job.model is None else job.model.by_user
        with _start_workers(folder, job.processes, user_names) as workers:
            deaths = _watch(workers, folder, job, on_progress)
        if deaths:
            raise describe_death(folder, deaths)
        return CheckMeasurements.model_validate_json((folder / "found.json").read_text())


@contextmanager
def _start_workers(
    folder: Path, processes: int, user_names: Sequence[str]
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The processes by rank, with one thread each; at the end none of them is left.

    Where the user named code of his own, the working directory is on the import path, and else never.
    """
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    user_path = [str(Path.cwd())] if any(":" in name for name in user_names) else []
    path = [*user_path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    shared = os.environ | {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        # The processes are all of this machine, whatever its name leads to.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", loopback),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        # As torchrun names them; the processes find each other by a file of their folder.
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank in range(processes):
            with (folder / f"{rank}.stdout").open("wb") as out, (folder / f"{rank}.stderr").open("wb") as err:
                workers[rank] = subprocess.Popen(
                    _command(folder, user_names),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
        yield workers
    finally:
        _end(workers)


def _command(folder: Path, user_names: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "pplan.runtimes.checking.processes.worker", str(folder), *user_names]


def end_with_parent(folder: Path) -> None:
    """End this process when the one that started it is gone, and delete their folder."""
    parent = json.loads((folder / PARENT).read_text())

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(folder, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


class Death(NamedTuple):
    """A process that died, its exit code (minus the signal) and when that was noticed (s since 1970)."""

    rank: int
    exit_code: int
    time: float

    @property
    def is_killed(self) -> bool:
        """Whether a signal ended it, other than the one with which a process aborts itself."""
        return self.exit_code < 0 and self.exit_code != -signal.SIGABRT


def _watch(
    workers: Mapping[int, subprocess.Popen[bytes]], folder: Path, job: Job, on_progress: OnProgress
) -> list[Death]:
    """Deaths in their order, until one is no follow-up of another's; none if all processes end well.

    Raises MachineError when none makes progress.
    """
    running, deaths, until = dict(workers), list[Death](), math.inf
    doing, since = dict[int, Any](), time.monotonic()
    while running and time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        now = _read_ranks(folder, "doing")
        if 0 in now and now[0] != doing.get(0):
            steps_left = max(job.total_steps - now[0]["steps_done"], 0)
            on_progress(now[0]["doing"], steps_left * job.step_seconds)
        if now != doing:
            doing, since = now, time.monotonic()
        for rank, worker in list(running.items()):
            if (code := worker.poll()) is not None:
                del running[rank]
                deaths += [Death(rank, code, time.time())] * (code != 0)
        if not all(is_follow_up(death, folder) for death in deaths):
            break
        if deaths:
            until = min(until, time.monotonic() + CAUSE_SECONDS)
        least = 0.0 if len(doing) == job.processes else STARTING_SECONDS
        if time.monotonic() - since > max(job.timeout_seconds, least) + GRACE_SECONDS:
            stopped = [rank for rank, worker in running.items() if _is_stopped(worker.pid)]
            what = f"rank {stopped[0]} is stopped, rank 0 waits" if stopped else "rank 0 waits"
            raise MachineError(
                f"check: {what} {_while_doing(folder, 0)}: nothing went on for {job.timeout_seconds:g} s",
                "Give a longer `timeout`, if that is how long it takes. Else see that no process is stopped.",
            )
    return deaths


def _read_ranks(folder: Path, suffix: str) -> dict[int, Any]:
    """What the processes wrote into their files of this suffix, by rank."""
    paths = sorted(folder.glob(f"[0-9]*.{suffix}"))
    return {int(path.stem): json.loads(path.read_text()) for path in paths}


def is_follow_up(death: Death, folder: Path) -> bool:
    """Return whether a process died because it lost another: it raised so, or printed so and aborted."""
    failure = _read_ranks(folder, "failed").get(death.rank)
    if failure is not None:
        return bool(failure["lost"])
    printed = " ".join(_last_lines(folder, death.rank))
    return not death.is_killed and any(word in printed for word in LOST)


def describe_death(folder: Path, deaths: Sequence[Death]) -> MachineError:
    """The error of the process that failed or died first; of one that lost another only where all did.

    A signal comes from outside, or from a fault of the process: it is always a cause. An abort and an exit
    status may be follow-ups, as errors may be that torch raises in other words than those that are known.
    """
    failures = _read_ranks(folder, "failed")

    def precedence(death: Death) -> tuple[bool, bool, float]:
        time_of_death = failures[death.rank]["time"] if death.rank in failures else death.time
        return is_follow_up(death, folder), not death.is_killed, time_of_death

    death, *others = sorted(deaths, key=precedence)
    doing, lines = _while_doing(folder, death.rank), _last_lines(folder, death.rank)
    printed = "It printed: " + " | ".join(lines) if lines else ""
    if failure := failures.get(death.rank):
        what = failure["what"]
        if not what.startswith("check: "):  # a process that hangs says what it was doing
            lost = "lost another process " if failure["lost"] else ""
            what = f"check: rank {death.rank} {lost}{doing}: {what}"
        return MachineError(what, failure["hint"] or printed or "Run it alone to see more.")
    advice = OUT_OF_MEMORY if death.exit_code == -signal.SIGKILL else ""
    hints = [
        advice,
        *(f"Rank {own.rank} died, too: {_describe_exit(own.exit_code)}." for own in others if own.is_killed),
        printed or ("" if advice else "It printed nothing."),
    ]
    return MachineError(
        f"check: rank {death.rank} died {doing}: {_describe_exit(death.exit_code)}",
        " ".join(filter(None, hints)),
    )


def _describe_exit(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exit status {code}"
    names = {number.value: f"{number.name} (signal {number.value})" for number in signal.Signals}
    return f"killed by {names.get(-code, f'signal {-code}')}"


def _while_doing(folder: Path, rank: int) -> str:
    """Last action of a rank."""
    doing = _read_ranks(folder, "doing").get(rank)
    return f"while {doing['doing']}" if doing else "before it began"


def _last_lines(folder: Path, rank: int) -> list[str]:
    """Lines that are not blank; none where there is no file."""
    path = folder / f"{rank}.stderr"
    text = path.read_text(errors="replace") if path.is_file() else ""
    return [line.strip() for line in text.splitlines() if line.strip()][-LAST_LINES:]


def _is_stopped(pid: int) -> bool:
    """Return whether a signal holds the process, if the system tells."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "Tt"
    return False


def _end(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Kills what still runs: each process has a session of its own, and may be stopped."""
    for worker in workers.values():
        if worker.poll() is None:
            with suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Without any of them there is no GPU, and no need to wait for torch."""


def gpus() -> int:
    """The number of GPUs that torch finds."""
    if not any(Path(name).exists() for name in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def cores() -> int:
    """The number of processor cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
