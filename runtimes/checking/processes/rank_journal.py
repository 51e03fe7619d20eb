"""What the processes of a check write down of themselves, so that their parent can tell which one failed."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from ....cost_models.errors import PplanError
from ....profiler.user_model.failures import at_user_line, first_line, is_out_of_memory
from ..deaths import LAUNCHER, LOST, end_with
from ..job import CasePrediction


class RankJournal:
    """Files of one rank in the folder of a check: what it does, why it failed, where it stands."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.doing, self.since = "", time.monotonic()
        self._predictions = 0
        self._steps = 0

    def listen(self, *, all_threads: bool = False) -> None:
        """Lets the parent ask where this process stands, and ends this process with the launcher.

        `all_threads`: not the main one only, which may wait for others.
        """
        if self.folder is None:
            return
        self.write(f"{self.rank}.pid", os.getpid())
        if hasattr(signal, "SIGUSR1"):
            file = (self.folder / f"{self.rank}.stack").open("w")
            faulthandler.register(signal.SIGUSR1, file=file, all_threads=all_threads)
        end_with(json.loads((self.folder / LAUNCHER).read_text()))

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
