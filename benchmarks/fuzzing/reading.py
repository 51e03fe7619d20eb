"""Mutated files through their readers alone, without a command line: thousands a second, from memory.

A reader returns what it read, or raises an error that is documented. What pplan writes itself is written
again where it was read, and must then be read as the same.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pplan.cli.config_command import default_map
from pplan.cli.verbs import root
from pplan.cost_models import text_files
from pplan.cost_models.document import Document
from pplan.cost_models.errors import LONGEST, PplanError
from pplan.cost_models.roofline_file import load_roofline
from pplan.cost_models.schedule_text import read_schedule
from pplan.cost_models.text_files import read_text
from pplan.cost_models.topology_file import load_topology
from pplan.cost_models.transformer.configuration import load_transformer_shape
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table
from pplan.planner.objectives.frontier import Frontier
from pplan.planner.plan_file import Plan
from pplan.profiler import journal
from pplan.profiler.imports import import_profile
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileImportOptions
from pplan.runtimes.checking.prediction import Calibration
from pplan.runtimes.checking.records import Check
from pplan.runtimes.imports import read_partition

from .cases import KINDS as OF_VERBS
from .cases import TABLES
from .documents import STRUCTURAL, Edit, changed, source_of
from .mutation import edited, random_edits
from .running import LARGEST, Finding, TooLong, last_frame, limited_time, peak_memory
from .seeds import CHECK, CONFIGS, DEFAULTS_FILE, EXPORTS, PARTITIONS, PLANS, PROFILES, profile
from .small_seeds import MORE_KINDS

NAMES = tuple(layer["name"] for layer in profile()["layers"])
DECADES = 10
"""In which numbers are alike."""
WORD = 24
"""Characters of a text that is told from others."""


def _read_profile(path: Path) -> object:
    content = Profile.load(path)
    content.chain()
    return content


def _read_schedule(path: Path) -> object:
    return read_schedule(read_text(path, "schedule")).program(4, 8)


def _read_defaults(_: Path) -> object:
    """Of the working directory."""
    return default_map(root)


def _read_partition(path: Path) -> object:
    return read_partition(read_text(path, "partition"), NAMES, str(path))


KINDS = OF_VERBS | MORE_KINDS
"""Files by kind."""
READERS: dict[str, Callable[[Path], object]] = {
    **dict.fromkeys(PROFILES, _read_profile),
    **dict.fromkeys(PLANS, Plan.load),
    **dict.fromkeys(TABLES, lambda path: import_profile(path, ProfileImportOptions())),
    **dict.fromkeys(KINDS["topology"], load_topology),
    **dict.fromkeys(CONFIGS, load_transformer_shape),
    "kernels.csv": load_kernel_table,
    "degrees.json": Plan.load,
    **dict.fromkeys((*EXPORTS, *PARTITIONS), _read_partition),
    **dict.fromkeys(KINDS["schedule"], _read_schedule),
    DEFAULTS_FILE: _read_defaults,
    CHECK: Check.load,
    **dict.fromkeys([name for name in KINDS["report"] if name != CHECK], Frontier.load),
    "gpu.toml": load_roofline,
    "machine.calibration.json": Calibration.load,
    "profile.journal": lambda path: journal.read(text_files.read_bytes(path, "journal"), "key", 2),
}
"""By file of the seeds."""


@contextlib.contextmanager
def in_memory(contents: Mapping[str, bytes]) -> Iterator[None]:
    """Files of these names are read from here: to write and open one takes as long as to read it."""
    read_bytes = text_files.read_bytes

    def read_from_memory(path: Path, kind: str) -> bytes:
        return contents[path.name] if path.name in contents else read_bytes(path, kind)

    text_files.read_bytes = read_from_memory
    try:
        yield
    finally:
        text_files.read_bytes = read_bytes


def reads(folder: Path, file: str, content: bytes) -> bool:
    """Whether the file is read with this content."""
    try:
        with in_memory({file: content}):
            READERS[file](folder / file)
    except PplanError:
        return False
    return True


@dataclass(frozen=True)
class Inputs:
    """Mutated files of the seeds, in a folder that is the working directory."""

    folder: Path
    seeds: dict[str, bytes]
    known: set[object] = field(default_factory=set)
    """What stood in files that were read: see `structure`."""
    _whole: set[str] = field(default_factory=set)
    """Files of which all that stands in the seed is among it."""

    @cached_property
    def texts(self) -> dict[str, str]:
        return {name: content.decode() for name, content in self.seeds.items()}

    def edits(self, number: int, kind: str, rng: random.Random) -> tuple[str, list[Edit]]:
        """Those of the `number`-th input of a kind: one in four is a file cut, at each place in turn."""
        place, turn = divmod(number, 4)
        for file in KINDS[kind] if not turn else ():
            length = len(self.texts[file])
            if place < length:
                return file, [["cut", place]]
            place -= length
        file = rng.choice(KINDS[kind])
        return file, random_edits(self.texts[file], rng)

    def read(self, file: str, edits: list[Edit]) -> tuple[bool, bool, Finding | None]:
        """Whether the file was read, whether something in it was in none before, and what is wrong."""
        content = edited(self.texts[file], edits)
        memory = peak_memory()
        try:
            with limited_time(), warnings.catch_warnings(), in_memory({file: content}):
                warnings.simplefilter("error", RuntimeWarning)
                value = READERS[file](self.folder / file)
                new = self._new(file, content, edits)
                if new:
                    _check_written(value)
        except TooLong as error:
            return False, False, _finding(f"time: {file}", error)
        except PplanError as error:
            if max(map(len, str(error).splitlines()), default=0) > LONGEST + 1:
                return False, False, _finding("long message", error)
            return False, False, None
        except Exception as error:
            return False, False, _finding(f"{type(error).__name__}", error)
        if peak_memory() - memory > LARGEST:
            return True, False, Finding(f"memory: {file}", f"{(peak_memory() - memory) / 2**30:.1f} GiB more")
        self.known.update(new)
        if file not in self._whole:
            self._whole.add(file)
            self.known.update(structure(file, self.seeds[file]))
        return True, bool(new), None

    def _new(self, file: str, content: bytes, edits: list[Edit]) -> set[object]:
        """Of its structure what no file before held; what it shares with the seed is not looked at again."""
        source = source_of(self.texts[file])
        if source.content is None or any(edit[0] not in STRUCTURAL for edit in edits):
            return structure(file, content) - self.known
        shared = source.texts if file in self._whole else {}
        return set(_fields(changed(source, edits), (file,), shared)) - self.known

    def smaller(self, file: str, edits: list[Edit], kind: str) -> list[Edit]:
        """The edits without which it is no longer found left away."""
        for edit in list(edits):
            fewer = [each for each in edits if each is not edit]
            found = self.read(file, fewer)[2]
            if found is not None and found.kind == kind:
                edits = fewer
        return edits


def _check_written(value: object) -> None:
    """Of a document: written and read again it is the same."""
    if isinstance(value, Document) and type(value).parse(value.to_json(), "written again") != value:
        raise AssertionError("what is written of it is not read as the same")


def _finding(kind: str, error: BaseException) -> Finding:
    text = "".join(traceback.format_exception(error))
    return Finding(f"{kind}: {last_frame(text)}", text[-3000:])


def structure(file: str, content: bytes) -> set[object]:
    """What stands in a file that was read: of a JSON document its fields with the types, short texts and
    magnitudes of their values; of another text its words, numbers by their magnitude."""
    text = content.decode(errors="replace")
    try:
        return set(_fields(json.loads(text), (file,), {}))
    except (ValueError, RecursionError):
        return {(file, *_alike(word)) for word in re.findall(r"[\w.+-]+|[^\w\s]", text)}


def _fields(content: Any, path: tuple[object, ...], shared: dict[int, str]) -> Iterator[object]:
    if id(content) in shared:
        return
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _fields(value, (*path, _plain(str(key))), shared)
    elif isinstance(content, list):
        yield (*path, min(len(content), 3))
        for value in content:
            yield from _fields(value, (*path, "*"), shared)
    elif isinstance(content, str):
        yield (*path, _plain(content))
    else:
        yield (*path, type(content), _magnitude(content))


@lru_cache(10_000)
def _alike(word: str) -> tuple[str, object]:
    """What words have in common that are alike."""
    return _plain(word), _magnitude(word)


@lru_cache(10_000)
def _plain(text: str) -> str:
    """Without its digits."""
    return re.sub(r"\d+", "0", text[:WORD])


def _magnitude(value: Any) -> object:
    """Sign and tens of decades of a number; None of what is none."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(number) or not number:
        return str(number)
    return math.copysign(1, number), round(math.log10(abs(number)) / DECADES)
