"""Processes of a check that fail, die and hang; those that train are in test_torchrun.py."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from pplan.cost_models.errors import MachineError
from pplan.runtimes.checking import launching
from pplan.runtimes.checking.launching import (
    Death,
    describe_death,
    run_in_processes,
)
from pplan.runtimes.checking.records import Case, Job, ModelSpec, StageSeconds

MakeCase = Callable[..., Case]
MODEL = """
    import os
    import time
    import traceback

    import torch
    from torch import nn

    class Dies(nn.Module):
        def forward(self, given):
            # Where it is a stage of its own: before, it is traced and compared in every process.
            in_stage = any(frame.name == "_run" for frame in traceback.extract_stack())
            if os.environ["RANK"] == "1" and given.requires_grad and in_stage:
                print("last words", flush=True, file=__import__("sys").stderr)
                os._exit(7)
            return given

    class Hangs(nn.Module):
        def forward(self, given):
            in_stage = any(frame.name == "_run" for frame in traceback.extract_stack())
            if os.environ["RANK"] == "1" and given.requires_grad and in_stage:
                stuck_in_the_model()
            return given

    def stuck_in_the_model():
        time.sleep(3600)

    def hanging():
        return nn.Sequential(nn.Linear(6, 6), Hangs(), nn.Linear(6, 4)), torch.randn(3, 6)

    def dying():
        return nn.Sequential(nn.Linear(6, 6), Dies(), nn.Linear(6, 4)), torch.randn(3, 6)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the model."""
    (tmp_path / "checked_models.py").write_text(dedent(MODEL))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ids of the processes of a check, as they were when it ended."""
    found: list[int] = []
    end = launching._end

    def noting(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
        found.extend(worker.pid for worker in workers.values())
        end(workers)

    monkeypatch.setattr(launching, "_end", noting)
    return found


def gone(process: int) -> bool:
    """Waits until a process that was killed is no more, or a zombie that init has not yet collected."""
    for _ in range(300):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_process_that_dies(make_case: MakeCase, started: list[int]) -> None:
    case = make_case("1f1b", parts=[0, 1, 3], model="checked_models:dying")
    job = Job(
        model=ModelSpec(name="checked_models:dying", by_user=("checked_models:dying",)),
        cases=[case],
        compared_steps=0,
    )
    with pytest.raises(MachineError) as caught:
        run_in_processes(job)
    assert caught.value.what == ("check: rank 1 died while building the model (1f1b x 4): exit status 7")
    assert caught.value.hint.endswith("last words")
    assert len(started) == 2
    assert all(map(gone, started))


PRETENDING = """
    import json, os, signal, sys, time
    from pathlib import Path

    from pplan.runtimes.checking.launching import end_with_parent

    folder, how, number = Path(sys.argv[1]), {how!r}, int(os.environ["RANK"])

    def write(name, content):
        (folder / f".{{number}}").write_text(json.dumps(content))
        (folder / f".{{number}}").replace(folder / name)

    end_with_parent(folder)
    write(f"{{number}}.doing", {{"doing": "step 1 (plan)", "steps_done": 2}})
    while how == "fails" and number == 1 and not (folder / "0.failed").exists():
        time.sleep(0.01)  # the one that lost it is the first to say so
    if how == "fails" and number == 1:
        write("1.failed", {{"what": "it is wrong", "hint": "", "lost": False, "time": 2.0}})
    if how == "fails" and number == 0:
        write("0.failed", {{"what": "gone", "hint": "", "lost": True, "time": 1.0}})
    if how == "fails":
        sys.exit(1)
    if how == "stops" and number == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)
"""


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Instead of the processes of a check a script that hangs or fails."""

    def make(how: str) -> None:
        script = tmp_path / "pretending.py"
        script.write_text(dedent(PRETENDING.format(how=how)))
        monkeypatch.setattr(
            launching, "_command", lambda folder, *_: [sys.executable, str(script), str(folder)]
        )

    return make


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_process_that_hangs(make_case: MakeCase, started: list[int]) -> None:
    job = Job(
        model=ModelSpec(name="checked_models:hanging", by_user=("checked_models:hanging",)),
        cases=[make_case("1f1b", parts=[0, 1, 3], model="checked_models:hanging")],
        compared_steps=0,
        timeout_seconds=8,
    )
    with pytest.raises(MachineError) as caught:
        run_in_processes(job)
    doing = "building the model (1f1b x 4)"
    assert caught.value.what == f"check: rank 1 hangs while {doing}: nothing went on for 8 s"
    assert "in stuck_in_the_model" in caught.value.hint
    assert len(started) == 2
    assert all(map(gone, started))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_process_that_is_stopped(
    make_case: MakeCase, pretend: Callable[[str], None], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.5)
    pretend("stops")
    with pytest.raises(
        MachineError, match=r"^check: rank 1 is stopped, rank 0 waits while step 1 \(plan\): "
    ):
        run_in_processes(Job(model=None, cases=[make_case("1f1b")], timeout_seconds=1))
    assert all(map(gone, started))


@pytest.mark.slow
def test_processes_that_all_wait(
    make_case: MakeCase, pretend: Callable[[str], None], started: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.5)
    pretend("hangs")
    with pytest.raises(MachineError, match=r"^check: rank 0 waits while step 1 \(plan\): nothing went on"):
        run_in_processes(Job(model=None, cases=[make_case("1f1b")], timeout_seconds=1))
    assert len(started) == 2
    assert all(map(gone, started))


def test_the_one_that_fails_speaks_and_not_those_that_lost_it(
    make_case: MakeCase, pretend: Callable[[str], None], started: list[int]
) -> None:
    pretend("fails")
    with pytest.raises(MachineError, match=r"^check: rank 1 while step 1 \(plan\): it is wrong"):
        run_in_processes(Job(model=None, cases=[make_case("1f1b")]))
    assert all(map(gone, started))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_a_check_that_is_killed_leaves_no_process_and_no_file(
    make_case: MakeCase, tmp_path: Path, forked_python: Callable[..., Any]
) -> None:
    (tmp_path / "pretending.py").write_text(dedent(PRETENDING.format(how="hangs")))
    (tmp_path / "job.json").write_text(
        Job(model=None, cases=[make_case("1f1b")]).model_dump_json(by_alias=True)
    )
    check = """
        import json, os, signal, sys
        from pathlib import Path
        from pplan.runtimes.checking import launching
        from pplan.runtimes.checking.records import Job

        def kill(*_):
            os.kill(os.getpid(), signal.SIGKILL)

        def note(workers, *_):
            Path("pids.json").write_text(json.dumps([worker.pid for worker in workers.values()]))
            Path("folder.txt").write_text(str(_[0]))
            return watch(workers, *_)

        watch, launching._watch = launching._watch, note
        launching._command = lambda folder, *_: [sys.executable, "pretending.py", str(folder)]
        job = Job.model_validate_json(Path("job.json").read_text())
        launching.run_in_processes(job, kill)
    """
    (tmp_path / "checks.py").write_text(dedent(check))
    ended = forked_python(tmp_path / "output", tmp_path, "checks.py").wait(60)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = json.loads((tmp_path / "pids.json").read_text())
    assert len(pids) == 2
    assert all(map(gone, pids))
    assert not Path((tmp_path / "folder.txt").read_text()).exists()


def test_an_interruption_leaves_nothing_behind(
    make_case: MakeCase, pretend: Callable[[str], None], started: list[int]
) -> None:
    def interrupt(doing: str, seconds: float) -> None:
        raise KeyboardInterrupt(f"{doing}: {seconds:g} s left")

    pretend("hangs")
    job = Job(model=None, cases=[make_case("1f1b")], step_seconds=10)
    # Two steps warm up, five are timed, and two of these seven are done; no model, so none is compared.
    with pytest.raises(KeyboardInterrupt, match=r"step 1 \(plan\): 50 s left"):
        run_in_processes(job.model_copy(update={"compared_steps": 0}), interrupt)
    assert started
    assert all(map(gone, started))


@pytest.mark.slow
def test_checks_that_start_at_once_take_no_port_from_each_other(
    make_case: MakeCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where both would be told the same free port."""
    monkeypatch.setattr(socket.socket, "getsockname", lambda _: ("127.0.0.1", 29391))
    seconds = StageSeconds(forward=0.01, backward=0.01)
    job = Job(model=None, cases=[make_case("1f1b", seconds=seconds)], steps=2, warm_ups=1)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(run_in_processes, job) for _ in range(2)]
        assert [len(result.result().cases[0].ran.step_seconds) for result in results] == [2, 2]


def test_processes_that_end_at_once(make_case: MakeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no torch')"]
    monkeypatch.setattr(launching, "_command", lambda *_: command)
    with pytest.raises(MachineError, match="died before it began: exit status 1") as caught:
        run_in_processes(Job(model=None, cases=[make_case("1f1b")]))
    assert caught.value.hint.endswith("It printed: no torch")


DYING = """
    import json, os, signal, sys, time
    from pathlib import Path

    folder, how = Path(sys.argv[1]), json.loads({how!r})
    rank = os.environ["RANK"]
    mine = how.get(rank, "loses it")

    def write(name, content):
        (folder / f".{{rank}}").write_text(json.dumps(content))
        (folder / f".{{rank}}").replace(folder / name)

    def fail(what, lost):
        write(f"{{rank}}.failed", {{"what": what, "hint": "", "lost": lost, "time": time.time()}})
        os._exit(1)

    write(f"{{rank}}.pid", os.getpid())
    write(f"{{rank}}.doing", {{"doing": "step 3 (plan)", "steps_done": 2}})
    if mine == "waits":
        time.sleep(3600)
    if mine == "loses it":
        fail("RuntimeError: Connection reset by peer", True)
    if mine == "aborts":
        print("terminate called: Connection closed by peer", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGABRT)
    if mine == "raises":
        fail("it is wrong", False)
    while not all((folder / f"{{other}}.failed").exists() for other in how.get("after", [])):
        time.sleep(0.01)
    print("last words", file=sys.stderr, flush=True)
    if isinstance(mine, int):
        os._exit(mine)
    os.kill(os.getpid(), getattr(signal, mine))
"""


@pytest.fixture
def dying(
    make_case: MakeCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[int]
) -> Callable[..., MachineError]:
    """The error of a check of three processes of which some die, each as `how` says by its rank."""

    def run(how: dict[str, object]) -> MachineError:
        script = tmp_path / "dying.py"
        script.write_text(dedent(DYING.format(how=json.dumps(how))))
        monkeypatch.setattr(
            launching, "_command", lambda folder, *_: [sys.executable, str(script), str(folder)]
        )
        with pytest.raises(MachineError) as caught:
            run_in_processes(Job(model=None, cases=[make_case("1f1b", 3)]))
        assert all(map(gone, started))
        return caught.value

    return run


@pytest.mark.parametrize(
    ("death", "words"),
    [
        ("SIGKILL", "killed by SIGKILL (signal 9)"),
        ("SIGSEGV", "killed by SIGSEGV (signal 11)"),
        ("SIGABRT", "killed by SIGABRT (signal 6)"),
        ("SIGTERM", "killed by SIGTERM (signal 15)"),
        (7, "exit status 7"),
    ],
)
def test_the_one_that_dies_is_named_and_not_those_that_lost_it(
    dying: Callable[..., MachineError], death: str | int, words: str
) -> None:
    """The others fail before the death is noticed."""
    error = dying({"1": death, "after": [0, 2]})
    assert error.what == f"check: rank 1 died while step 3 (plan): {words}"
    assert error.hint.endswith("It printed: last words")
    assert ("out of memory" in error.hint) == (death == "SIGKILL")
    assert ("dmesg" in error.hint) == (death == "SIGKILL")


def test_processes_that_would_wait_for_ever_are_ended(dying: Callable[..., MachineError]) -> None:
    error = dying({"0": "waits", "1": "waits", "2": "SIGKILL"})
    assert error.what == "check: rank 2 died while step 3 (plan): killed by SIGKILL (signal 9)"


def test_one_that_aborts_because_it_lost_another_is_not_the_cause(
    dying: Callable[..., MachineError],
) -> None:
    error = dying({"0": "aborts", "1": "waits", "2": "raises"})
    assert error.what == "check: rank 2 while step 3 (plan): it is wrong"
    error = dying({"0": "aborts", "1": 3, "2": "waits"})
    assert error.what == "check: rank 1 died while step 3 (plan): exit status 3"


def test_a_cause_that_nobody_knows(dying: Callable[..., MachineError]) -> None:
    """All lost another: the first to say so, as what it is."""
    error = dying({})
    assert re.match(
        r"check: rank \d lost another process while step 3 \(plan\): RuntimeError: Conn", error.what
    )


@pytest.mark.parametrize(
    ("deaths", "what", "hint"),
    [
        (
            [Death(2, -9, 1.0), Death(0, -9, 1.0), Death(1, -6, 1.1)],
            "rank 2 died before it began: killed by SIGKILL (signal 9)",
            "Rank 0 died, too: killed by SIGKILL (signal 9).",
        ),
        (
            [Death(0, -6, 1.0), Death(1, -11, 1.0)],
            "rank 1 died before it began: killed by SIGSEGV (signal 11)",
            "It printed nothing.",
        ),
        ([Death(0, -50, 1.0)], "rank 0 died before it began: killed by signal 50", "It printed nothing."),
    ],
)
def test_several_that_died(tmp_path: Path, deaths: list[Death], what: str, hint: str) -> None:
    """A process aborts because of another; the kernel kills it of its own accord."""
    error = describe_death(tmp_path, deaths)
    assert error.what == f"check: {what}"
    assert error.hint.endswith(hint)


def test_an_error_in_unknown_words_does_not_hide_a_death(tmp_path: Path) -> None:
    failure = {"what": "RuntimeError: the peer left", "hint": "", "lost": False, "time": 1.0}
    (tmp_path / "0.failed").write_text(json.dumps(failure))
    error = describe_death(tmp_path, [Death(0, 1, 1.1), Death(1, -9, 1.2)])
    assert error.what == "check: rank 1 died before it began: killed by SIGKILL (signal 9)"
