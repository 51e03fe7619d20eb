"""Starts the processes of a check (`-m`, with a folder and their number), and writes down how they die.

It sets the variables that torchrun sets, and hosts the store in which the processes find each other. It is a
process of its own, so that `pplan check` needs no torch and can end it whatever it does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..deaths import CAUSE_SECONDS, LAUNCHER, Death, end_with, is_follow_up, read_failures, write_deaths

POLL_SECONDS = 0.02


def main(arguments: Sequence[str]) -> int:
    """`FOLDER PROCESSES [NAME ...]`: of the job, how many, and what the user named; what they print goes to
    files in the folder."""
    folder, processes = Path(arguments[0]), int(arguments[1])
    end_with(os.getppid())
    (folder / LAUNCHER).write_text(json.dumps(os.getpid()))
    worker = "pplan.runtimes.checking.processes.worker"
    command = [sys.executable, "-m", worker, str(folder), *arguments[2:]]
    store, port = _serve_store()
    status = run_workers(command, folder, processes, port)
    del store
    return status


def _serve_store() -> tuple[object, int]:
    """The store in which the processes find each other, and its port."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined,unused-ignore]

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return store, store.port


def run_workers(command: Sequence[str], folder: Path, processes: int, port: int) -> int:
    """Run a command in every rank until all ranks end or one dies, which ends the others.

    Args:
        command: What each rank runs.
        folder: The folder of the check, where the deaths are written down.
        processes: Number of ranks.
        port: Port of the store.

    Returns:
        0, or 1 if a rank died.
    """
    workers = {rank: _start(command, folder, rank, processes, port) for rank in range(processes)}
    try:
        deaths = _wait_for_deaths(workers, folder)
    finally:
        _kill(workers)
    if deaths:
        write_deaths(folder, deaths)
    return 1 if deaths else 0


def _start(
    command: Sequence[str], folder: Path, rank: int, processes: int, port: int
) -> subprocess.Popen[bytes]:
    number, count = str(rank), str(processes)
    variables = {
        "RANK": number,
        "LOCAL_RANK": number,
        "GROUP_RANK": "0",
        "WORLD_SIZE": count,
        "LOCAL_WORLD_SIZE": count,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    with (folder / f"{rank}.stdout").open("wb") as out, (folder / f"{rank}.stderr").open("wb") as error:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=error,
            start_new_session=True,
            env=os.environ | variables,
        )


def _wait_for_deaths(workers: Mapping[int, subprocess.Popen[bytes]], folder: Path) -> list[Death]:
    """Deaths in their order, until one is no follow-up of another's; none if all ranks end well."""
    running, deaths, until = dict(workers), [], None
    while running and (until is None or time.monotonic() < until):
        ended = {rank: code for rank, worker in running.items() if (code := worker.poll()) is not None}
        for rank, code in ended.items():
            del running[rank]
            if code:
                deaths.append(Death(rank=rank, exit_code=code, time=time.time()))
        failures = read_failures(folder)
        if any(not is_follow_up(death, failures, folder) for death in deaths):
            break
        if deaths and until is None:
            until = time.monotonic() + CAUSE_SECONDS
        if not ended:
            time.sleep(POLL_SECONDS)
    return deaths


def _kill(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    for worker in workers.values():
        if worker.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
