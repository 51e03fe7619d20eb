"""The journal of a profile that is being measured: every pass is written to a file as soon as it is done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import MISSING, asdict, fields
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO, Literal, Self

import numpy as np
from filelock import FileLock
from pydantic import TypeAdapter

from .passes import CountedBytes, LayerTimes, PassTimes
from .timed_passes import PartTimes, SizeResult

_SYNC_SECONDS = 1.0
_BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)
"""What a line that is none of ours raises when it is read."""

PassKind = Literal["layers", "whole", "parts", "first"]
Times = LayerTimes | PassTimes | PartTimes
_TIMES: dict[str, type[Any]] = {
    "layers": LayerTimes,
    "whole": PassTimes,
    "parts": PartTimes,
    "first": PassTimes,
}


_COUNTED = TypeAdapter(CountedBytes)


class Journal:
    """An open journal: `sizes` is what it held when it was opened, by micro-batch size."""

    def __init__(
        self,
        file: BinaryIO,
        path: Path,
        sizes: Mapping[int, SizeResult],
        passes_in_file: int,
        resources: ExitStack,
    ) -> None:
        self._file, self.path, self.sizes = file, path, dict(sizes)
        self._resources = resources
        self.passes_in_file = passes_in_file
        """In the file, whether or not they are kept."""
        self._written = 0
        self._synced = monotonic()

    @classmethod
    def open(cls, path: Path, key: str, layers: int, *, resume: bool) -> Self:
        """The one in this file, which is made; without `resume`, or where it is another key's, begun anew.

        Raises OSError; of these filelock.Timeout where another process writes it.
        """
        with ExitStack() as resources:
            resources.enter_context(FileLock(_lock_path(path), thread_local=False).acquire(timeout=0))
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            file = resources.enter_context(os.fdopen(descriptor, "r+b"))
            sizes, end = read(file.read(), key, layers)
            passes = _passes(sizes)
            if not resume:
                sizes, end = {}, 0
            file.seek(end)
            file.truncate()
            journal = cls(file, path, sizes, passes, resources.pop_all())
        if not end:
            journal._write({"journal": 1, "key": key})
        return journal

    @property
    def passes(self) -> int:
        """How many passes are kept."""
        return _passes(self.sizes)

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it holds a pass by now."""
        return self._written > 0 or self.passes > 0

    @property
    def seconds(self) -> float:
        """Host seconds of the rounds that are kept."""
        return sum(sum(size.round_seconds) for size in self.sizes.values())

    def write_counts(self, size: int, counted: CountedBytes) -> None:
        """The bytes of a size; before its passes."""
        self._write({"size": size, "counted": _COUNTED.dump_python(counted, mode="json")})

    def write_pass(self, size: int, kind: PassKind, times: Times) -> None:
        """One pass is done."""
        self._write({"size": size, "pass": kind, "seconds": _plain(times)})
        self._written += 1

    def write_round(self, size: int, seconds: float) -> None:
        """All passes of a round are done, in so many host seconds."""
        self._write({"size": size, "round": seconds})

    def write_parts_left_out(self, size: int, why: str) -> None:
        """The size has no backward in two parts."""
        self._write({"size": size, "without_parts": why})

    def close(self) -> None:
        """It stays where it is."""
        with suppress(OSError):  # Windows keeps a file that is locked; filelock removes it there
            _lock_path(self.path).unlink(missing_ok=True)
        with suppress(OSError):
            self._resources.close()

    def remove(self) -> None:
        """It is not needed any more."""
        with suppress(OSError):
            self._file.close()
            self.path.unlink(missing_ok=True)
        self.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        """Measuring goes on where the disk refuses: what was written before still counts."""
        with suppress(OSError):
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            if monotonic() - self._synced >= _SYNC_SECONDS:
                os.fsync(self._file.fileno())
                self._synced = monotonic()


def read(content: bytes, key: str, layers: int) -> tuple[dict[int, SizeResult], int]:
    """What a journal of this key holds, and the bytes of its whole lines; nothing and 0 for another key."""
    sizes: dict[int, SizeResult] = {}
    end = 0
    for line in _whole_lines(content):
        try:
            record = json.loads(line)
            if not end and (record["journal"], record["key"]) != (1, key):
                return {}, 0
            if end:
                _take(record, sizes, layers)
        except _BROKEN:
            break
        end += len(line)
    return sizes, end


def _lock_path(journal: Path) -> Path:
    return journal.with_name(f"{journal.name}.lock")


def _passes(sizes: Mapping[int, SizeResult]) -> int:
    of_sizes = (of_size.rounds for of_size in sizes.values())
    return sum(len(rounds.layers) + len(rounds.whole) + len(rounds.parts) for rounds in of_sizes)


def _whole_lines(content: bytes) -> Iterator[bytes]:
    return (line for line in content.splitlines(keepends=True) if line.endswith(b"\n"))


def _take(record: Mapping[str, Any], sizes: dict[int, SizeResult], layers: int) -> None:
    """Raises one of `_BROKEN`."""
    size = record["size"]
    if "counted" in record:
        sizes[size] = SizeResult(size, _counted(record["counted"], layers))
        return
    of_size = sizes[size]
    if "pass" in record:
        kind = record["pass"]
        getattr(of_size.rounds, kind).append(_times(_TIMES[kind], record["seconds"], layers))
    elif "round" in record:
        of_size.round_seconds.append(_number(record["round"]))
    else:
        of_size.parts_left_out = str(record["without_parts"])
        of_size.rounds.parts.clear()


def _plain(times: Times) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return value.tolist() if isinstance(value, np.ndarray) else value

    return {name: plain(value) for name, value in asdict(times).items()}


def _counted(record: Any, layers: int) -> CountedBytes:
    counted = _COUNTED.validate_python(record)
    memory = counted.memory
    entries = [counted.saved_bytes, counted.saved_input_bytes, counted.output_bytes]
    entries += [] if memory is None else [[*memory.saved], [*memory.forward], [*memory.backward]]
    if any(len(own) != layers for own in entries):
        raise ValueError("other layers")
    for amount in (amount for own in entries for amount in own):
        _number(amount)
    return counted


def _number(value: Any) -> float:
    """Of seconds or bytes."""
    if isinstance(value, str) or not 0 <= float(value) < inf:
        raise ValueError("no amount")
    return float(value)


def _times(kind: type[Any], seconds: Mapping[str, Any], layers: int) -> Any:
    required = {own.name for own in fields(kind) if own.default is MISSING}

    def entries(values: Any) -> Any:
        if len(values) != layers:
            raise ValueError("other layers")
        return np.array([*map(_number, values)], dtype=np.float64)

    def value(name: str, entry: Any) -> Any:
        if entry is None and name not in required:
            return None
        if name == "loss":
            return _times(PassTimes, entry, layers)
        return _number(entry) if kind is PassTimes else entries(entry)

    return kind(**{name: value(name, entry) for name, entry in seconds.items()})
