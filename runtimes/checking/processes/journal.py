"""Journal of a process of a check, and the watch by which it notices that it hangs.

A process that waits for the others ends with the timeout of torch.distributed, and cannot tell which of them
hangs. The one that hangs in the model, or in its data, can: it reports what it was doing and where it stands,
and ends. Then `pplan check`, or torchrun, ends the others.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ....cost_models.errors import PplanError
from ....cost_models.text_files import escape_text
from ....profiler.user_model import at_user_line, first_line, is_out_of_memory
from ..launching import LOST, STARTING_SECONDS


class RankJournal:
    """Files of one rank in the folder of a check: what it does, why it failed, where it stands."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.doing, self.since = "", time.monotonic()
        self._steps = 0

    @property
    def while_doing(self) -> str:
        """The last action, as messages name it."""
        return f"while {self.doing}" if self.doing else "before it began"

    def begin(self, doing: str) -> None:
        """Says what is being done."""
        self.doing, self.since = doing, time.monotonic()
        self.write(f"{self.rank}.doing", {"doing": doing, "steps_done": self._steps})

    def add_steps(self, count: int = 1) -> None:
        """So many steps are done, by all processes."""
        self.since = time.monotonic()
        self._steps += count

    def write_failure(self, failure: Failure) -> None:
        """Why this process ends."""
        self.write(f"{self.rank}.failed", failure | {"time": time.time()})

    def write(self, name: str, content: Any) -> None:
        """Writes a file whole, or not at all."""
        if self.folder is None:
            return
        temporary = self.folder / f".{name}.{self.rank}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)


Failure = dict[str, Any]
"""An error in words: `what`, `hint`, and `lost`, where its cause is another process."""


def describe_failure(error: BaseException) -> Failure:
    """An error in words."""
    while error.__cause__ is not None and re.match(r"\s*\[Stage \d+\] failed to run", str(error)):
        error = error.__cause__  # torch.distributed.pipelining says it in a page
    if isinstance(error, PplanError):
        return {"what": error.what, "hint": error.hint, "lost": False}
    what, hint = first_line(error), ""
    if is_out_of_memory(error):
        what = f"does not fit in memory: {what}"
        hint = "Plan with less `memory_bytes` a device, or with recompute='always'."
        return {"what": what, "hint": hint, "lost": False}
    is_lost = isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
    return {"what": f"{what}{at_user_line(error)}", "hint": hint, "lost": is_lost}


STATUS = 2
"""Of what the user or the machine must change."""
POLL_SECONDS = 0.5


@contextmanager
def hang_watch(journal: RankJournal, seconds: float) -> Iterator[None]:
    """Inside, a thread ends the process as soon as it has begun nothing anew for `seconds` and does not wait
    for another process.

    A process that waits for its GPU is left alone: what that waits for may be another process.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(min(POLL_SECONDS, seconds / 4)):
            least = 0.0 if journal.doing else STARTING_SECONDS
            frames = _frames() if time.monotonic() - journal.since > max(seconds, least) else []
            if frames and not _waits_for_others(frames):
                _end(journal, seconds, f"It stands at {frames[0]}.")

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _end(journal: RankJournal, seconds: float, hint: str) -> None:
    """Ends the process, whatever its main thread is in, with two lines as of any other error."""
    what = f"check: rank {journal.rank} hangs {journal.while_doing}: nothing went on for {seconds:g} s"
    journal.write_failure({"what": what, "hint": hint, "lost": False})
    for line in (f"pplan: {what}", f"  {hint}"):
        print(escape_text(line.replace("\n", " ")), file=sys.stderr, flush=True)
    os._exit(STATUS)


IDLE = r"in watch$|/(threading|queue)\.py:\d+, in (wait|get)$"
"""Frames of a thread that looks after its parent or for a hang, or waits for another thread."""


def busy_frames(dump: str) -> list[str]:
    """The frames, innermost first, of the thread that computes, from what faulthandler writes."""
    threads = []
    for thread in re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE):
        frames = re.findall(r'File "(.+)", line (\d+) in (.+)', thread)
        threads.append([f"{file}:{line}, in {function}" for file, line, function in frames])
    threads = [frames for frames in threads if frames]
    busy = [frames for frames in threads if not any(re.search(IDLE, frame) for frame in frames[:2])]
    return (busy or threads or [[]])[0]


def _frames() -> list[str]:
    """Of the thread that computes (torchgpipe's main thread waits for one of its own), innermost first."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return busy_frames(file.read())


def _waits_for_others(frames: list[str]) -> bool:
    return (
        "/torch/cuda/" in frames[0]
        or any("/torch/distributed/" in frame and "pipelining" not in frame for frame in frames[:3])
        or any(re.search(r"in (wait|_wait_batch_p2p|barrier)$", frame) for frame in frames[:3])
    )
