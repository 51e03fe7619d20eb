"""This process as one of a check, where a torchrun of the user's started all of them."""

from __future__ import annotations

from ....cost_models.errors import MachineError
from ....profiler.torchrun_env import Launched
from ..job import CheckMeasurements, Job
from .rank_journal import RankJournal, describe_failure
from .worker import run_job


def run_in_torchrun(job: Job, process: Launched) -> CheckMeasurements | None:
    """What was found, in the first process; None in the others.

    Raises RankFailed in the process that fails on its own account, Lost in those that lose it.
    """
    try:
        return run_job(job, process, RankJournal(None, process.rank))
    except Exception as error:
        failure = describe_failure(error)
        kind = Lost if failure["lost"] else RankFailed
        raise kind(
            f"check: rank {process.rank}: {failure['what']}",
            failure["hint"] or _hint(failure["what"], job),
        ) from error


class RankFailed(MachineError):
    """This process failed."""


class Lost(MachineError):
    """Another process is gone, or does not answer."""


def _hint(what: str, job: Job) -> str:
    if "EADDRINUSE" in what or "in use" in what:
        return "Another program has this port: name another with torchrun --master-port."
    return f"See what the other processes printed; each waits {job.timeout_seconds:g} s (`timeout`)."
