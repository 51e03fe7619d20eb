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
from pathlib import Path
from types import TracebackType
from typing import Any

from ....cost_models.errors import PplanError
from ....cost_models.text_files import escape_text
from ....profiler.user_model.failures import at_user_line, first_line, is_out_of_memory
from ..deaths import LOST, PARENT, end_with
from ..launching import STARTING_SECONDS
from ..records import CasePrediction


class RankJournal:
    """Files of one rank in the folder of a check: what it does, why it failed, where it stands."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.doing, self.since = "", time.monotonic()
        self._predictions = 0
        self._steps = 0

    @property
    def while_doing(self) -> str:
        """The last action, as messages name it."""
        return f"while {self.doing}" if self.doing else "before it began"

    def listen(self) -> None:
        """End this process with the one that started it."""
        if self.folder is not None:
            end_with(json.loads((self.folder / PARENT).read_text()))

    def begin(self, doing: str) -> None:
        """Says what is being done."""
        self.doing, self.since = doing, time.monotonic()
        self.write(f"{self.rank}.doing", {"doing": doing, "steps_done": self._steps})

    def add_steps(self, count: int = 1) -> None:
        """So many steps are done, by all processes."""
        self.since = time.monotonic()
        self._steps += count

    def write_prediction(self, name: str, prediction: CasePrediction) -> None:
        """Written down before the case runs."""
        content = {"name": name, "predicted": prediction.model_dump(mode="json")}
        self.write(f"{self._predictions}.predicted", content)
        self._predictions += 1

    def write_failure(self, error: BaseException) -> None:
        """Why this process ends."""
        self.write(f"{self.rank}.failed", describe_failure(error) | {"time": time.time()})

    def write(self, name: str, content: Any) -> None:
        """Writes a file whole, or not at all."""
        if self.folder is None:
            return
        temporary = self.folder / f".{name}.{self.rank}"
        temporary.write_text(json.dumps(content))
        temporary.replace(self.folder / name)


def describe_failure(error: BaseException) -> dict[str, Any]:
    """An error in words. `lost`: its cause is another process."""
    while error.__cause__ is not None and re.match(r"\s*\[Stage \d+\] failed to run", str(error)):
        error = error.__cause__  # torch.distributed.pipelining says it in a page
    if isinstance(error, PplanError):
        return {"what": error.what, "hint": error.hint, "lost": False}
    if is_out_of_memory(error):
        return {
            "what": f"does not fit in memory: {first_line(error)}",
            "hint": "Plan with less `memory_bytes` a device, or with recompute='always'.",
            "lost": False,
        }
    message = first_line(error)
    is_lost = isinstance(error, RuntimeError) and any(word in str(error) for word in LOST)
    return {"what": f"{message}{at_user_line(error)}", "hint": "", "lost": is_lost}


STATUS = 2
"""Of what the user or the machine must change."""
POLL_SECONDS = 0.5


class HangWatch:
    """While it is entered, a thread that ends the process as soon as it has begun nothing anew for `seconds`
    and does not wait for another process.

    A process that waits for its GPU is left alone: what that waits for may be another process.
    """

    def __init__(self, journal: RankJournal, seconds: float) -> None:
        self._journal, self._seconds = journal, seconds
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self.watch, daemon=True).start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()

    def watch(self) -> None:
        """Runs in a thread of its own, beside the one that computes."""
        while not self._over.wait(min(POLL_SECONDS, self._seconds / 4)):
            least = 0.0 if self._journal.doing else STARTING_SECONDS
            if time.monotonic() - self._journal.since <= max(self._seconds, least):
                continue
            frames = _frames()
            if frames and not _waits_for_others(frames):
                self._end(f"It stands at {frames[0]}.")

    def _end(self, hint: str) -> None:
        """Ends the process, whatever its main thread is in, with two lines as of any other error."""
        journal = self._journal
        what = (
            f"check: rank {journal.rank} hangs {journal.while_doing}: nothing went on for {self._seconds:g} s"
        )
        failure = {"what": what, "hint": hint, "lost": False, "time": time.time()}
        journal.write(f"{journal.rank}.failed", failure)
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
