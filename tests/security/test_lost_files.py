"""No file is lost: to a kill, a second writer, a full disk, a stream that is closed.

`python benchmarks/kills.py` kills verbs at random instants.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

import pytest

from pplan.cost_models.errors import FileError
from pplan.cost_models.text_files import write_whole
from pplan.profiler.profile_file import Profile

TEXTS = ("a\n" * 1_000_000, "b\n" * 1_000_000)
PROCESSES = multiprocessing.get_context("fork")
RUN = [sys.executable, "-c", "import sys; from pplan.cli.app import main; sys.exit(main())"]


def write_for_ever(path: Path) -> None:
    for text in cycle(TEXTS):
        write_whole(path, text, force=True)


def writers(path: Path, count: int) -> list[multiprocessing.process.BaseProcess]:
    processes = [PROCESSES.Process(target=write_for_ever, args=(path,)) for _ in range(count)]
    for process in processes:
        process.start()
    return list(processes)


def kill(process: multiprocessing.process.BaseProcess) -> None:
    assert process.is_alive()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()


def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path, rng, halves, tries = tmp_path / "a.txt", random.Random(0), 0, 0
    write_whole(path, TEXTS[0], force=True)
    while halves == 0 or tries < 15:
        (process,) = writers(path, 1)
        time.sleep(rng.uniform(0.01, 0.05))
        kill(process)
        halves += len(list(tmp_path.iterdir())) - 1
        tries += 1
        assert path.read_text() in TEXTS
        assert tries < 1000, "no kill was in the middle of writing"
    write_whole(path, TEXTS[0], force=True)
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Neither takes the other's file for a leftover."""
    path = tmp_path / "a.txt"
    write_whole(path, TEXTS[0], force=True)
    processes = writers(path, 2)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        assert path.read_text() in TEXTS
    for process in processes:
        kill(process)
    write_whole(path, TEXTS[1], force=True)
    assert (list(tmp_path.iterdir()), path.read_text()) == ([path], TEXTS[1])


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_whole(path, "old\n", force=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FileError, match="cannot be written: File too large"):
            write_whole(path, TEXTS[0], force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old\n"]


@pytest.mark.parametrize("redirection", [">&- 2>&-", "| true"])
def test_standard_output_that_takes_nothing(redirection: str, tmp_path: Path, profile: Profile) -> None:
    """The file is written, and there is no traceback."""
    profile.save(tmp_path / "toy.profile.json", force=False)
    verb = [*RUN, "solve", "toy.profile.json", "--gpus", "2", "--mini-batch", "16"]
    ran = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash", *verb],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr
    assert "internal error" not in ran.stderr
    assert (tmp_path / "toy.plan.json").is_file()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_that_vanishes(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = ["bash", "-c", 'rmdir "$PWD"; "$@"', "bash", *RUN, "show"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("pplan: the working directory does not exist any more"), ran.stderr
