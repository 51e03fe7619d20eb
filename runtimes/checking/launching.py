"""Runs a job in processes of this machine, and ends all of them as soon as one fails or hangs. No torch."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...cost_models.errors import MachineError, PplanError
from .deaths import CAUSE_SECONDS, advice, describe_exit, find_death, read_lines, while_doing
from .records import CasePrediction, CheckMeasurements, Job

POLL_SECONDS = 0.1
STARTING_SECONDS = 60.0
"""At least allowed for the processes to start: they import torch, on a busy machine all at once."""
GRACE_SECONDS = 5.0
"""How much longer than the processes, which watch themselves, this one waits for progress."""
FOLDER = "pplan-check-"
"""What the name of a check's folder begins with; the id of its process follows."""


@dataclass(frozen=True)
class ProgressCallbacks:
    """Who is told, meanwhile: what is being done, when it changes, and about how many seconds are left; and
    every prediction, with the name of its case, before that case runs."""

    doing: Callable[[str, float], object] = lambda *_: None
    predicted: Callable[[str, CasePrediction], object] = lambda *_: None


def run_in_processes(job: Job, callbacks: ProgressCallbacks | None = None) -> CheckMeasurements:
    """Runs the job; no process of it is left behind.

    Raises MachineError with the words of the process that failed, or that hangs: it began nothing anew for
    `job.timeout_seconds`.
    """
    _remove_abandoned_folders()
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER}{os.getpid()}-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.model_dump_json(by_alias=True))
        user_names = () if job.model is None else job.model.by_user
        with _launch(folder, job.processes, user_names) as launcher:
            _watch(launcher, folder, job, callbacks or ProgressCallbacks())
        measurements_file = folder / "found.json"
        if not measurements_file.is_file():
            raise _error(folder)
        return CheckMeasurements.model_validate_json(measurements_file.read_text())


def _remove_abandoned_folders() -> None:
    """Removes what checks that were killed left in the temporary folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER}*-*"):
        process = folder.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(OSError, ValueError):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                shutil.rmtree(folder)


@contextmanager
def _launch(folder: Path, processes: int, user_names: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The launcher with its processes; at the end none of them is left."""
    with (folder / "launcher.log").open("wb") as log:
        launcher = subprocess.Popen(
            _command(folder, processes, user_names),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(user_names),
        )
    try:
        yield launcher
    finally:
        _end(launcher, folder)


def _command(folder: Path, processes: int, user_names: Sequence[str]) -> list[str]:
    launcher = "pplan.runtimes.checking.processes.launcher"
    return [sys.executable, "-m", launcher, str(folder), str(processes), *user_names]


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


def _watch(launcher: subprocess.Popen[bytes], folder: Path, job: Job, callbacks: ProgressCallbacks) -> None:
    """Watches the processes until the launcher ends. Raises MachineError when one fails, or none makes
    progress."""
    doing: dict[str, Doing] = {}
    since, predictions = time.monotonic(), [job.step_seconds]
    while launcher.poll() is None:
        time.sleep(POLL_SECONDS)
        _report_predictions(folder, callbacks, predictions)
        now = _doing(folder)
        if now != doing:
            if "0" in now and now["0"] != doing.get("0"):
                steps_left = max(job.total_steps - now["0"].steps_done, 0)
                callbacks.doing(now["0"].doing, steps_left * predictions[-1])
            doing, since = now, time.monotonic()
        if any(folder.glob("*.failed")):
            # The launcher knows who died before, and ends the others.
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(2 * CAUSE_SECONDS)
            raise _error(folder)
        all_began = len(doing) == job.processes
        time_limit = job.timeout_seconds if all_began else max(job.timeout_seconds, STARTING_SECONDS)
        if time.monotonic() - since > time_limit + GRACE_SECONDS:
            what = f"check: rank 0 waits {while_doing(folder, 0)}"
            raise MachineError(
                f"{what}: nothing went on for {job.timeout_seconds:g} s",
                "Give a longer `timeout`, if that is how long it takes. Else see that no process is stopped.",
            )
    _report_predictions(folder, callbacks, predictions)
    if launcher.returncode < 0:
        raise MachineError(
            f"check: the launcher of the processes died {while_doing(folder, 0)}: "
            f"{describe_exit(launcher.returncode)}",
            advice(launcher.returncode) or "Run it again.",
        )
    if launcher.returncode:
        raise _error(folder)


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


def _error(folder: Path) -> PplanError:
    """The error of the process that is the cause, else of the launcher."""
    if (error := find_death(folder)) is not None:
        return error
    lines = read_lines(folder / "launcher.log")
    return MachineError(
        f"check: the launcher of the processes ended: {lines[-1] if lines else 'it printed nothing'}",
        "See that torch works here.",
    )


def _end(launcher: subprocess.Popen[bytes], folder: Path) -> None:
    """Kills what still runs: each process has a session of its own, and may be stopped."""
    if launcher.poll() is None:
        groups = [*children(launcher.pid), *_pids(folder).values(), launcher.pid]
    else:
        # A launcher that was killed leaves its processes behind; of others the ids may be anyone's by now.
        groups = [pid for pid in _pids(folder).values() if _works_in(pid, folder)]
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    launcher.wait()


def _works_in(pid: int, folder: Path) -> bool:
    """Whether a process is one of this check; where the system does not tell, it ends by itself."""
    with contextlib.suppress(OSError):
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def children(pid: int) -> list[int]:
    """The processes that a process started, where the system tells. Elsewhere those of a launcher that have
    not begun to write down anything end by themselves, as soon as they look for it."""
    with contextlib.suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _pids(folder: Path) -> dict[str, int]:
    """Process ids by rank, of processes that have begun."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("[0-9]*.pid")}


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
