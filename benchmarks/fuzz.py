"""Mutates the files that pplan reads, and command lines: python benchmarks/fuzz.py [--cases N] [--kind KIND]

With --read small files, of the same structure, go through their readers alone, from memory and
with neither verbs nor a command line: about five thousand a second of processor time. Of those that are read
only one that holds what none before held goes on: its edits, of the larger file, through verbs, in a tenth of
the time at the most. Without --read every file that is read goes through verbs.

A reader returns what it read, or raises an error that is documented. A command may end with a status that is
documented; both within 10 s of processor time and 1 GiB of memory, without a traceback, a warning of numpy,
nan or inf in what is printed, a message that repeats its input, or a change to a file that was not to be
written. Prints each kind of finding with the smallest case that shows it, and a table; ends with status 1
where there is one.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

from fuzzing.cases import KINDS, Case, Workspace, case_of
from fuzzing.channel import KILLED_AFTER, Channel, Tallies, findings
from fuzzing.reading import KINDS as READ
from fuzzing.reading import Inputs, reads
from fuzzing.seeds import make_seeds
from fuzzing.small_seeds import MORE_KINDS, small_seeds

CASES = 10_000
COMMAND_LINE = "command line"
VERBS = 0.1
"""Of the time of --read, at the most."""


def work(
    seeds: dict[str, bytes], kinds: list[str], seed: int, until: float, numbers: range, channel: Channel
) -> None:
    """Runs the cases of these numbers, as many as begin before `until`, and tells of each."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        workspace, known = Workspace(Path(folder).resolve(), seeds), set[str]()
        for number in numbers:
            if time.monotonic() > until:
                break
            rng = random.Random(f"{seed} {number}")
            kind = kinds[number % len(kinds)]
            channel.begin(number)
            case = workspace.random_case(rng, kind)
            ran, fine, found, command = workspace.run(case)
            told = None
            if found is not None and found.kind not in known:
                known.add(found.kind)
                channel.watch(10 * KILLED_AFTER)
                told = (found.kind, found.text, workspace.smaller(case, found.kind, command).as_json())
            elif found is not None:
                told = (found.kind, "", case.as_json())
            channel.end(number, ran, fine, told)
    channel.close()


def read(
    seeds: dict[str, bytes], kinds: list[str], seed: int, until: float, numbers: range, channel: Channel
) -> None:
    """The same with readers alone; `numbers` of each kind in turn."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        workspace = Workspace(Path(folder).resolve(), seeds)
        workspace.write(Case("", [], []))
        inputs, known, began, verbs = small_inputs(workspace), set[str](), time.monotonic(), 0.0
        for number in numbers:
            if time.monotonic() > until:
                break
            rng = random.Random(f"{seed} {number}")
            kind = kinds[number % len(kinds)]
            channel.begin(number)
            file, edits = inputs.edits(number // len(kinds), kind, rng)
            fine, is_new, found = inputs.read(file, edits)
            ran, told = 0, None
            if found is not None:
                small = edits if found.kind in known else inputs.smaller(file, edits, found.kind)
                told = (found.kind, found.text, Case(file, small, []).as_json())
            elif is_new and file in seeds and verbs < VERBS * (time.monotonic() - began):
                start = time.monotonic()
                case = workspace.case_behind(rng, file, edits)
                ran, _, found, _ = workspace.run(case)
                verbs += time.monotonic() - start
                told = None if found is None else (found.kind, found.text, case.as_json())
            if found is not None:
                known.add(found.kind)
            channel.end(number, ran, fine, told)
        os.chdir(tempfile.gettempdir())
    channel.close()


def small_inputs(workspace: Workspace) -> Inputs:
    """Of the small files, in the folder of the large ones."""
    return Inputs(workspace.folder, small_seeds(workspace.seeds, partial(reads, workspace.folder)))


def report(found: Counter[str], wrong: Counter[str], tallies: Tallies) -> str:
    """Cases, commands and findings by kind of file."""
    lines = [f"{'mutated':14} {'cases':>8} {'commands':>9} {'accepted':>9} {'findings':>9}"]
    rows = tallies.by_kind.items()
    lines += [f"{kind:14} {row[0]:8,} {row[1]:9,} {row[2]:9,} {wrong[kind]:9,}" for kind, row in rows]
    lines += ["", *(f"{count:6,}  {kind}" for kind, count in found.most_common())]
    return "\n".join(lines)


def main() -> int:
    """Prints what is found as it is found, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*KINDS, COMMAND_LINE, *MORE_KINDS]
    parser.add_argument("--cases", type=int, default=CASES, help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no case is begun")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=every, action="append", help="of these alone; repeatable")
    parser.add_argument("--corpus", type=Path, help="append the smallest case of each kind of finding")
    parser.add_argument("--read", action="store_true", help="readers alone")
    parser.add_argument("--again", type=Path, help="run the cases of this corpus instead")
    arguments = parser.parse_args()
    begin, chosen = (read, [*READ]) if arguments.read else (work, [*KINDS, COMMAND_LINE])
    if not {*(arguments.kind or ())} <= {*chosen}:
        parser.error("--read is of files, and some kinds of files are of --read alone")
    with tempfile.TemporaryDirectory(prefix="seeds-") as folder:
        make_seeds(Path(folder))
        seeds = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    if arguments.again is not None:
        return run_again(seeds, arguments.again.resolve())
    tallies, found, wrong = Tallies(arguments.kind or chosen), Counter[str](), Counter[str]()
    began = time.monotonic()
    until = began + 60 * arguments.minutes
    numbers = range(arguments.first, arguments.first + arguments.cases)
    run = partial(begin, seeds, tallies.kinds, arguments.seed, until)
    with contextlib.suppress(KeyboardInterrupt):  # the table of what was done is printed
        for number, (name, text, case) in findings(run, numbers, tallies, arguments.seed):
            wrong[tallies.kinds[number % len(tallies.kinds)]] += 1
            found[name] += 1
            if found[name] == 1:
                print(f"--- {name} (case {number})\n{case}\n{text}\n", flush=True)
                if arguments.corpus is not None and case:
                    with arguments.corpus.open("a") as corpus:
                        corpus.write(f"{case}\n")
    cases = sum(row[0] for row in tallies.by_kind.values())
    print(f"\n{report(found, wrong, tallies)}\n\n{cases:,} cases, {time.monotonic() - began:,.0f} s")
    return 1 if found else 0


def run_again(seeds: dict[str, bytes], corpus: Path) -> int:
    """The cases of a corpus; those without commands are of readers alone."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        os.chdir(folder)
        workspace, wrong = Workspace(Path(folder).resolve(), seeds), 0
        workspace.write(Case("", [], []))
        inputs = small_inputs(workspace)
        for line in corpus.read_text().splitlines():
            case: Case = case_of(line)
            alone = inputs.read(case.file, [*case.edits])[2] if not case.commands else None
            found = alone or workspace.run(case)[2]
            if found is not None:
                wrong += 1
                print(f"--- {found.kind}\n{case.as_json()[:1000]}\n{found.text[-1500:]}\n", flush=True)
        os.chdir(tempfile.gettempdir())
    print(f"{wrong} findings")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
