"""Runs a job in processes of this machine, and ends all of them as soon as one fails or hangs. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...cost_models.errors import MachineError
from .deaths import (
    CAUSE_SECONDS,
    PARENT,
    Death,
    find_death,
    is_follow_up,
    is_stopped,
    read_failures,
    while_doing,
)
from .records import CasePrediction, CheckMeasurements, Job

POLL_SECONDS = 0.05
STARTING_SECONDS = 60.0
"""At least allowed for the processes to start: they import torch, on a busy machine all at once."""
GRACE_SECONDS = 5.0
"""Seconds that this process waits for progress beyond the timeout by which the others watch themselves."""


@dataclass(frozen=True)
class ProgressCallbacks:
    """Who is told, meanwhile: what is being done, when it changes, and about how many seconds are left; and
    every prediction, with the name of its case, before that case runs."""

    doing: Callable[[str, float], object] = lambda *_: None
    predicted: Callable[[str, CasePrediction], object] = lambda *_: None


def run_in_processes(job: Job, callbacks: ProgressCallbacks | None = None) -> CheckMeasurements:
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
            deaths = _watch(workers, folder, job, callbacks or ProgressCallbacks())
        if (error := find_death(folder, deaths)) is not None:
            raise error
        return CheckMeasurements.model_validate_json((folder / "found.json").read_text())


@contextmanager
def _start_workers(
    folder: Path, processes: int, user_names: Sequence[str]
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """The processes by rank; at the end none of them is left."""
    command, shared = _command(folder, user_names), _environment(user_names)
    shared |= {
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
                    command,
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


def _environment(user_names: Sequence[str]) -> dict[str, str]:
    """This one's, with one thread a process: where the user named code of his own, the working directory is
    on the import path, and else never."""
    user_path = [str(Path.cwd())] if any(":" in name for name in user_names) else []
    path = [*user_path, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.environ | {
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "OMP_NUM_THREADS": "1",
        # The processes are all of this machine, whatever its name leads to.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
    }


def _loopback() -> str:
    return "lo" if sys.platform.startswith("linux") else "lo0"


def _watch(
    workers: Mapping[int, subprocess.Popen[bytes]], folder: Path, job: Job, callbacks: ProgressCallbacks
) -> list[Death]:
    """Deaths in their order, until one is no follow-up of another's; none if all processes end well.

    Raises MachineError when none makes progress.
    """
    doing: dict[str, Doing] = {}
    running, deaths, until = dict(workers), list[Death](), None
    since, predictions = time.monotonic(), [job.step_seconds]
    while running and (until is None or time.monotonic() < until):
        time.sleep(POLL_SECONDS)
        _report_predictions(folder, callbacks, predictions)
        now = _doing(folder)
        if now != doing:
            if "0" in now and now["0"] != doing.get("0"):
                steps_left = max(job.total_steps - now["0"].steps_done, 0)
                callbacks.doing(now["0"].doing, steps_left * predictions[-1])
            doing, since = now, time.monotonic()
        ended = {rank: code for rank, worker in running.items() if (code := worker.poll()) is not None}
        for rank, code in ended.items():
            del running[rank]
            deaths += [Death(rank=rank, exit_code=code, time=time.time())] if code else []
        failures = read_failures(folder)
        if any(not is_follow_up(death, failures, folder) for death in deaths):
            break
        if deaths and until is None:
            until = time.monotonic() + CAUSE_SECONDS
        all_began = len(doing) == job.processes
        time_limit = job.timeout_seconds if all_began else max(job.timeout_seconds, STARTING_SECONDS)
        if time.monotonic() - since > time_limit + GRACE_SECONDS:
            stopped = [rank for rank, worker in running.items() if is_stopped(worker.pid)]
            what = f"rank {stopped[0]} is stopped, rank 0 waits" if stopped else "rank 0 waits"
            raise MachineError(
                f"check: {what} {while_doing(folder, 0)}: nothing went on for {job.timeout_seconds:g} s",
                "Give a longer `timeout`, if that is how long it takes. Else see that no process is stopped.",
            )
    _report_predictions(folder, callbacks, predictions)
    return deaths


def _report_predictions(folder: Path, callbacks: ProgressCallbacks, step_seconds: list[float]) -> None:
    """Reports new predictions, and adds their steps to those so far, of which the plan's is the first."""
    while (path := folder / f"{len(step_seconds) - 1}.predicted").is_file():
        content = json.loads(path.read_text())
        prediction = CasePrediction.model_validate(content["predicted"])
        callbacks.predicted(content["name"], prediction)
        step_seconds.append(prediction.step_seconds)


class Doing(NamedTuple):
    """What a rank does, after so many steps of all."""

    doing: str
    steps_done: int


def _doing(folder: Path) -> dict[str, Doing]:
    return {path.stem: Doing(**json.loads(path.read_text())) for path in sorted(folder.glob("*.doing"))}


def _end(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Kills what still runs: each process has a session of its own, and may be stopped."""
    for worker in workers.values():
        if worker.poll() is None:
            with contextlib.suppress(OSError):
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
