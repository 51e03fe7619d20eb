"""Starts the processes of a check with torchrun's own launcher (`-m`, with a folder and their number).

In a process of its own, so that `pplan check` needs no torch and can end it whatever it does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from .rank_journal import LAUNCHER, end_with


def main(arguments: Sequence[str]) -> int:
    """`FOLDER PROCESSES [NAME ...]`: of the job, how many, and what the user named; what they print goes to
    files in the folder."""
    folder, processes = Path(arguments[0]), int(arguments[1])
    end_with(os.getppid())
    (folder / LAUNCHER).write_text(json.dumps(os.getpid()))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="pplan-check",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs"), redirects=Std.ALL),
    )
    command = [sys.executable, "-m", "pplan.runtimes.checking.processes.worker", str(folder)]
    command += arguments[2:]
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        first, _ = error.get_first_failure()
        (folder / "ended.json").write_text(json.dumps({"first": first, "exit_codes": failures}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
