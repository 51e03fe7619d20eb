"""A case: a file of the seeds with edits, or none, and command lines: made at random, run, made smaller."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pplan.cost_models.text_files import sha256

from .commands import Command, after, random_command, readers
from .documents import Edit
from .mutation import edited, random_edits
from .running import Finding, judge
from .seeds import (
    CHECK,
    CONFIGS,
    DEFAULTS_FILE,
    EXPORTS,
    FRONTIER,
    PARTITIONS,
    PLAIN,
    PLANS,
    PROFILES,
    SCHEDULE,
    TIED,
)

TABLES = ("table.csv", "table.json", "graph.txt")


@dataclass(frozen=True)
class Case:
    """The edits of `file` (empty: none is edited), and what is run on it in turn."""

    file: str
    edits: Sequence[Edit]
    commands: Sequence[Command]

    def as_json(self) -> str:
        """One line of a corpus."""
        return json.dumps({"file": self.file, "edits": list(self.edits), "commands": list(self.commands)})


def case_of(line: str) -> Case:
    """From a line of a corpus."""
    content = json.loads(line)
    return Case(content["file"], content["edits"], content["commands"])


@dataclass(frozen=True)
class Workspace:
    """The folder of a worker and the seeds in it, which every case leaves as they were."""

    folder: Path
    seeds: dict[str, bytes]

    def run(self, case: Case) -> tuple[int, int, Finding | None, Command]:
        """How many commands ran and how many found nothing to refuse, and the first that went wrong."""
        self.write(case)
        ran = fine = 0
        for command in case.commands:
            status, found = judge(command, self.folder, self.seeds)
            ran, fine = ran + 1, fine + (status in (0, 4))
            if found is not None:
                return ran, fine, found, command
        return ran, fine, None, []

    def write(self, case: Case) -> None:
        """The seeds with the case's own file, and nothing else."""
        for path in self.folder.iterdir():
            if path.name not in self.seeds:
                path.unlink()
        for name, content in self.seeds.items():
            path = self.folder / name
            if name == DEFAULTS_FILE and case.file != name:
                content = b""
            if not path.is_file() or path.read_bytes() != content:
                path.unlink(missing_ok=True)
                path.write_bytes(content)
        if not case.file:
            return
        content = edited(self.seeds[case.file].decode(), case.edits)
        (self.folder / case.file).write_bytes(content)
        if case.file in PROFILES:
            self._rename_profile(case.file, sha256(content))

    def _rename_profile(self, profile: str, sha: str) -> None:
        """The plans that are made from it are made from it as it is now."""
        for name, of in PLANS.items():
            if of == profile:
                plan = json.loads(self.seeds[name])
                plan["profile"] |= {"sha256": sha, "layers_sha256": ""}
                (self.folder / name).write_text(json.dumps(plan))

    def random_case(self, rng: random.Random, kind: str) -> Case:
        """Of a kind of file, or `command line`; the commands after the first only where that one reads it."""
        if kind == "command line":
            return Case("", [], [random_command(rng) for _ in range(3)])
        file = rng.choice(KINDS[kind])
        return self.case_behind(rng, file, random_edits(self.seeds[file].decode(), rng))

    def case_behind(self, rng: random.Random, file: str, edits: Sequence[Edit]) -> Case:
        """Verbs that read the file, and what they make of it."""
        first, *others = [command for command in readers(file) if _goes_with(command, file)]
        case = Case(file, edits, [first])
        self.write(case)
        status, found = judge(first, self.folder, self.seeds)
        if status != 0 or found is not None:
            return case
        behind = after(file)
        made = rng.sample(behind, min(2, len(behind)))
        return replace(case, commands=[first, *rng.sample(others, min(4, len(others))), *made])

    def smaller(self, case: Case, kind: str, command: Command) -> Case:
        """The same with the edits and commands without which it is no longer found left away."""
        at = list(case.commands).index(command)
        commands = [*case.commands[:at], command]
        for tried in ([command], commands):
            small = replace(case, commands=tried)
            if self._finds(small, kind):
                break
        edits = list(small.edits)
        for edit in list(edits):
            fewer = replace(small, edits=[each for each in edits if each is not edit])
            if self._finds(fewer, kind):
                small, edits = fewer, list(fewer.edits)
        return small if edits else replace(small, file="")

    def _finds(self, case: Case, kind: str) -> bool:
        found = self.run(case)[2]
        return found is not None and found.kind == kind


def _goes_with(command: Command, file: str) -> bool:
    """A plan of the same profile stands beside."""
    plans = [word for word in command if word in PLANS]
    return file not in PROFILES or not plans or PLANS[plans[0]] == file


KINDS: dict[str, tuple[str, ...]] = {
    "profile": (TIED, PLAIN),
    "plan": tuple(PLANS),
    "costs": TABLES,
    "topology": ("machine.toml", "short.toml"),
    "configuration": tuple(CONFIGS),
    "kernels": ("kernels.csv",),
    "degrees": ("degrees.json",),
    "export": EXPORTS,
    "partition": tuple(PARTITIONS),
    "schedule": (SCHEDULE,),
    "defaults": (DEFAULTS_FILE,),
    "report": (CHECK, FRONTIER),
}
"""Files that are mutated, by kind."""
