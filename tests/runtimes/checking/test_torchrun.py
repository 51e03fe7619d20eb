"""Checks of two processes that train, and of two that the user's own torchrun started, of which one hangs:
what is said and left. The first run while the others wait.

Without torchrun the parent of the processes says it (`benchmarks/faults.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

import pplan
from pplan.runtimes.checking.launching import run_in_processes
from pplan.runtimes.checking.records import (
    Case,
    CheckMeasurements,
    Job,
    ModelSpec,
    StageSeconds,
)

MakeCase = Callable[..., Case]
MODEL = """
    import os
    import time
    from pathlib import Path

    import torch
    from torch import nn

    RANK = os.environ.get("RANK", "none")
    Path(f"{RANK}.pid").write_text(str(os.getpid()))
    CALLS = [0]
    AFTER = 1000


    def blocks():
        time.sleep(3600)


    class Layer(nn.Linear):
        def forward(self, value):
            CALLS[0] += 1
            if CALLS[0] > AFTER and Path(f"blocks.{RANK}").exists():
                blocks()
            return super().forward(value)


    def make():
        return nn.Sequential(*(Layer(4, 4) for _ in range(4))), torch.randn(4, 4)
"""
TRAINED = """
    import atexit
    import os
    from pathlib import Path

    import torch
    from torch import nn

    @atexit.register
    def threads():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        Path(f"threads.{os.environ['RANK']}").write_text(" ".join(names))

    def small():
        layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.5)]
        return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 6)
"""
STEPS = 50_000
"""More than the forwards after which a rank hangs."""
TIMEOUT_SECONDS = 20
"""After which a rank hangs: of processes that share two cores with others' a step takes no second."""
GENEROUS_SECONDS = 400
"""Importing torch twice, the time limit, and the time that torchrun takes to end the other process."""


def make_plan(folder: Path) -> None:
    """A model whose layers hang where a file asks for it, and a plan of two stages."""
    folder.mkdir()
    (folder / "hanging.py").write_text(dedent(MODEL))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        profile = pplan.profile("hanging:make", micro_batch_sizes=[4], device="cpu", budget_seconds=1.0)
    profile.save(folder / "hanging.profile.json", force=False)
    plan = pplan.import_plan(
        "2,2", folder / "hanging.profile.json", schedule="1f1b", mini_batch=16, micro_batches=4
    )
    plan.save(folder / "hanging.plan.json", force=False)


class Torchrun:
    """torchrun, in a copy of the folder, with two processes of a check of which one hangs."""

    def __init__(self, plan_folder: Path, folder: Path, fault: str, rank: int) -> None:
        self.folder, self.rank = folder, rank
        shutil.copytree(plan_folder, folder)
        (folder / f"{fault}.{rank}").touch()
        waits = "--shutdown-timeout"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *((waits, "2") if waits in get_args_parser().format_help() else ()),
            *("--no-python", str(Path(sys.executable).with_name("pplan")), "check", "hanging.plan.json"),
            *("--model", "hanging:make", "--device", "cpu"),
            *("--steps", str(STEPS), "--timeout", f"{TIMEOUT_SECONDS}s"),
        ]
        kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait(self) -> list[list[str]]:
        """The errors of pplan, two lines each. No process is left."""
        out, errors = self._process.communicate(timeout=GENEROUS_SECONDS)
        assert (self._process.returncode, out) == (1, ""), errors
        pids = self._pids()
        assert len(pids) == 2
        assert all(map(_is_gone, pids)), errors
        lines = errors.splitlines()
        return [lines[i : i + 2] for i, line in enumerate(lines) if line.startswith("pplan: ")]

    def end(self) -> None:
        """Kills what is left: of processes that ended the ids may be anyone's by now."""
        for pid in self._pids():
            with contextlib.suppress(OSError):
                if b"hanging.plan.json" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.communicate()

    def _pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.folder.glob("[01].pid")]


def _is_gone(pid: int) -> bool:
    until = time.monotonic() + GENEROUS_SECONDS
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchrun]:
    """One that waits most of the time, beside the cases that train."""
    folder = tmp_path_factory.mktemp("torchrun")
    make_plan(folder / "plan")
    blocks = Torchrun(folder / "plan", folder / "blocks", "blocks", 1)
    yield blocks
    blocks.end()


@pytest.fixture(scope="module")
def trained(
    make_case: MakeCase, torchrun: object, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CheckMeasurements]:
    """Cases of one model, and one whose stages wait, in the same two processes."""
    del torchrun  # they go on meanwhile
    folder = tmp_path_factory.mktemp("trained")
    (folder / "checked_models.py").write_text(dedent(TRAINED))
    own: dict[str, Any] = {"model": "checked_models:small", "size": 3}
    waits = StageSeconds(forward=0.004, backward=0.008, input=0.004, weight=0.004)
    job = Job(
        model=ModelSpec(name="checked_models:small", loss="mse", by_user=("checked_models:small",)),
        cases=[
            make_case("1f1b", parts=[0, 2, 7], **own),
            make_case("zb-h1", parts=[0, 3, 7], **own),
            make_case("interleaved", parts=[0, 1, 3, 5, 7], virtual_stages=2, **own),
            make_case("1f1b", devices=1, parts=[0, 7], replicas=2, **own),
            make_case("zb-h1", seconds=waits),
        ],
        calibration=[make_case("gpipe", micro_batches=6, seconds=waits)],
        link_sizes=[1024, 65536],
        steps=2,
        warm_ups=1,
    )
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield run_in_processes(job)
        if sys.platform.startswith("linux"):
            # Python ends; what gloo still does then with a tensor aborts the process.
            assert not any("gloo" in (folder / f"threads.{rank}").read_text() for rank in range(2))
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_every_case_trains_as_the_plain_model(trained: CheckMeasurements) -> None:
    found = trained
    assert (found.backend, len(found.cases), len(found.calibration)) == ("gloo", 5, 1)
    plain = {tuple(case.losses.plain or ()) for case in found.cases[:3] if case.losses is not None}
    assert len(plain) == 1
    for case in found.cases[:4]:
        assert case.losses is not None
        assert case.losses.plain is not None
        assert len(set(case.losses.plain)) == 2
        assert case.losses.pipeline == pytest.approx(case.losses.plain, rel=1e-4)
    assert found.cases[4].losses is None


@pytest.mark.slow
def test_links_and_memory_are_measured(trained: CheckMeasurements) -> None:
    """Each process holds its weights at least. Nothing is measured of stages that wait."""
    assert trained.links is not None
    assert trained.links.sizes == [1024, 65536]
    *peaks, waiting = [case.ran.peak_bytes for case in trained.cases]
    assert [len(own) for own in peaks] == [2, 2, 2, 1]
    assert all(peak is not None and peak > 4 * 100 for own in peaks for peak in own)
    assert waiting == [None] * 2


@pytest.mark.slow
def test_every_stage_is_measured(trained: CheckMeasurements) -> None:
    """Stages that wait take at least as long as they wait: the input's gradient apart from the weights',
    which on the first stage PyTorch computes together."""
    found = trained
    for case, stages in zip(found.cases, (2, 2, 4, 1, 2), strict=True):
        assert len(case.ran.stages) == stages
        assert len(case.ran.step_seconds) == 2
        for own in case.ran.stages:
            assert own.forward > 0
            assert own.backward > 0
    first, last = found.cases[4].ran.stages
    assert first.weight >= 0.008
    assert first.input < first.weight
    assert min(last.forward, last.input, last.weight) >= 0.004
    assert min(found.cases[4].ran.step_seconds) >= 4 * 0.012


@pytest.mark.slow
def test_one_that_blocks_says_where_it_stands(torchrun: Torchrun) -> None:
    """The other, if it has time to, says that it lost it."""
    (what, hint), *others = torchrun.wait()
    assert re.fullmatch(r"pplan: check: rank 1 hangs while step \d+ \(plan\): nothing went on for 20 s", what)
    assert re.fullmatch(r"  It stands at .*/hanging\.py:\d+, in blocks\.", hint)
    lost = r"pplan: check: rank (1 died, rank 0 lost it|0 lost another) while step \d+ \(plan\): "
    assert all(re.match(lost, own) for own, _ in others)
