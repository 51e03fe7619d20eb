"""What becomes of a check when a process of it fails: python benchmarks/faults.py [--times N]

Every rank is killed, stopped, slowed, made to raise or never comes, at a random instant.
Then there must be one clear message within the time limit, no process of the check 10 s later, and nothing in
shared memory or the temporary folder. Takes some 20 s a fault and rank on two cores: about 8 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

from pplan.cost_models.errors import MachineError
from pplan.runtimes.checking.launching import run_in_processes
from pplan.runtimes.checking.records import Case, CutLink, Job, ModelSpec
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.torch_actions import action_rows, build_program, device_stages, schedule_class

FAULTS: Mapping[str, str] = {
    "killed": r"rank {rank} died .*: killed by SIGKILL",
    "stopped": r"rank {rank} is stopped, .*: nothing went on for",
    "slowed": "",
    "raises": r"rank {rank} .*: RuntimeError: the layer of rank {rank}",
    "runs out of memory": r"rank {rank} .*: does not fit in memory",
    "never comes": r"rank \d hangs ",
    "port taken": "",
}
"""With what is said; nothing where the check goes on."""
GONE_SECONDS = 10
MODEL = """
    import os
    import time
    from pathlib import Path

    import torch
    from torch import nn

    RANK = os.environ.get("RANK", "none")


    def asked(fault):
        return Path(f"{fault}.{RANK}").exists()


    if asked("never comes"):
        time.sleep(3600)


    class Layer(nn.Linear):
        def forward(self, value):
            if asked("raises"):
                raise RuntimeError(f"the layer of rank {RANK}")
            if asked("runs out of memory"):
                raise torch.OutOfMemoryError("CUDA out of memory")
            if asked("slowed"):
                time.sleep(0.05)
            return super().forward(value)


    def make(layers):
        return nn.Sequential(*(Layer(4, 4) for _ in range(layers))), torch.randn(2, 4)
"""


@dataclass(frozen=True)
class Verdict:
    """What was said, and what was left: processes still there after GONE_SECONDS, and names of files."""

    message: str
    hint: str
    gone_seconds: float
    processes: list[int]
    files: list[str]


def make_job(processes: int, steps: int, timeout_seconds: float) -> Job:
    """A pipeline of a layer a process."""
    program = build_program("1f1b", processes, 4, 1)
    document = TorchExport(
        runtime="torch",
        model="faulty:make",
        mini_batch=8,
        micro_batch_size=2,
        step_seconds=1.0,
        micro_batches=4,
        order="1f1b",
        schedule=schedule_class("1f1b", program),
        parts=list(range(processes + 1)),
        stages=device_stages(program),
        replicas=1,
        devices=list(range(processes)),
        recompute=["never"] * processes,
        actions=action_rows(program),
    )
    case = Case(
        name="faults",
        document=document,
        links=[CutLink(latency=0.0, occupancy=0.0)] * (processes - 1),
        crossing_bytes=[32] * (processes - 1),
    )
    model = ModelSpec(
        name="faulty:make", settings={"layers": processes}, loss="mse", by_user=("faulty:make",)
    )
    return Job(model=model, cases=[case], steps=steps, warm_ups=1, timeout_seconds=timeout_seconds)


class Fault(threading.Thread):
    """Lets one happen to a rank: `delay` seconds after that has begun to look for the others."""

    def __init__(self, fault: str, rank: int, folder: Path, delay: float) -> None:
        super().__init__(daemon=True)
        self.fault, self.rank, self.folder, self.delay = fault, rank, folder, delay
        self.started: set[int] = set()
        self._ended = threading.Event()
        self.happened = fault in ("never comes", "port taken")
        if fault == "never comes":
            (folder / f"{fault}.{rank}").touch()

    def run(self) -> None:
        """Until `end`."""
        at: float | None = None
        while not self._ended.wait(0.02):
            pids = self._pids()
            self.started |= set(pids.values())
            if at is None and str(self.rank) in pids:
                at = time.monotonic() + self.delay
            if at is not None and time.monotonic() > at and not self.happened:
                self._strike(pids)
                self.happened = True

    def end(self) -> set[int]:
        """The processes of the check."""
        self._ended.set()
        self.join()
        return self.started

    def _pids(self) -> dict[str, int]:
        pids = {}
        for path in self.folder.glob("temporary/pplan-check-*/*.pid"):
            with contextlib.suppress(OSError, ValueError):
                pids[path.stem] = int(path.read_text())
        return pids

    def _strike(self, pids: Mapping[str, int]) -> None:
        numbers = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
        if self.fault in numbers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[str(self.rank)], numbers[self.fault])
        else:
            (self.folder / f"{self.fault}.{self.rank}").touch()


@contextlib.contextmanager
def working_folder(folder: Path) -> Iterator[None]:
    """With the model, and a temporary folder of its own."""
    (folder / "faulty.py").write_text(dedent(MODEL))
    (folder / "temporary").mkdir(exist_ok=True)
    before, temporary = Path.cwd(), tempfile.tempdir
    os.chdir(folder)
    tempfile.tempdir = str(folder / "temporary")
    os.environ["TMPDIR"] = tempfile.tempdir
    try:
        yield
    finally:
        os.chdir(before)
        tempfile.tempdir = temporary
        del os.environ["TMPDIR"]


@contextlib.contextmanager
def taken_port() -> Iterator[None]:
    """A port that is in use stands in the environment, as an earlier torchrun may have left it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(bound.getsockname()[1])
        try:
            yield
        finally:
            del os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]


def run_with_fault(folder: Path, fault: str, rank: int, delay: float, job: Job) -> tuple[Verdict, bool]:
    """The verdict, and whether the fault happened before the check was done."""
    shared = Path("/dev/shm")
    before = {path.name for path in shared.iterdir()} if shared.is_dir() else set()
    with working_folder(folder):
        thread = Fault(fault, rank, folder, delay)
        thread.start()
        message = hint = ""
        try:
            with taken_port() if fault == "port taken" else contextlib.nullcontext():
                run_in_processes(job)
        except MachineError as error:
            message, hint = error.what, error.hint
        began = time.monotonic()
        started = thread.end()
        left = sorted(pid for pid in started if not _is_gone(pid, began + GONE_SECONDS))
        gone = time.monotonic() - began
        # PyTorch makes its compiler's cache where it is imported.
        files = [path.name for path in (folder / "temporary").iterdir() if "torchinductor" not in path.name]
    if shared.is_dir():
        own = {str(pid) for pid in started}
        names = {path.name for path in shared.iterdir()} - before
        files += [name for name in names if any(pid in name for pid in own)]
    for path in folder.glob("*.[0-9]"):
        path.unlink()
    return Verdict(message, hint, gone, left, files), thread.happened


def _is_gone(pid: int, until: float) -> bool:
    """Waits until a process is no more, or a zombie that nobody has collected yet."""
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def main() -> int:
    """Prints a table of the faults."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=1, help="a fault and rank (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=15.0, help="after which a rank hangs")
    arguments = parser.parse_args()
    rng, bad = random.Random(arguments.seed), 0
    print(f"{'fault':20} {'rank':>4} {'at':>6} {'gone':>7}  said", flush=True)
    for _ in range(arguments.times):
        for fault, rank in ((fault, rank) for fault in FAULTS for rank in range(arguments.processes)):
            bad += not report(fault, rank, rng.uniform(0.0, 6.0), arguments)
    print(f"\n{bad} wrong")
    return 1 if bad else 0


def report(fault: str, rank: int, delay: float, arguments: argparse.Namespace) -> bool:
    """Prints a line; whether all was as it must be."""
    steps = 10_000 if FAULTS[fault] else 20
    job = make_job(arguments.processes, steps, arguments.timeout)
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        verdict, happened = run_with_fault(Path(name), fault, rank, delay, job)
    print(
        f"{fault:20} {rank:4} {delay:5.1f}s {verdict.gone_seconds:6.2f}s  {verdict.message or 'went on'}"
        + ("" if happened else " (the check was done before)"),
        flush=True,
    )
    problems = find_problems(verdict, fault, rank, happened)
    for problem in problems:
        print(f"    WRONG: {problem}")
    return not problems


def find_problems(verdict: Verdict, fault: str, rank: int, happened: bool) -> list[str]:
    """What is not as it must be."""
    wanted = FAULTS[fault].format(rank=rank)
    problems = []
    if verdict.processes:
        problems.append(f"processes are left: {verdict.processes}")
    if verdict.files:
        problems.append(f"files are left: {verdict.files}")
    if bool(wanted) and happened and not re.search(wanted, verdict.message):
        problems.append(f"should say {wanted!r}; hint: {verdict.hint}")
    if not wanted and verdict.message:
        problems.append(f"should have gone on; hint: {verdict.hint}")
    if "\n" in verdict.message + verdict.hint:
        problems.append("more than a line")
    return problems


if __name__ == "__main__":
    sys.exit(main())
