"""Attacks what pplan proves: python benchmarks/proofs.py [--problems N] [--seed N] [--jobs N] [--kind KIND]

Random small problems, of each of which every plan is enumerated and simulated (see the package attack beside
this file). Prints a table by kind of problem and one by check, and each violation with what shows it again;
ends with status 1 where there is one.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from attack.attack import attacked
from attack.problems import KINDS, case_of
from attack.results import Result

PROBLEMS = 5_000
CHUNK = 4
MOST_SECONDS = 120.0
"""For one problem; one that takes longer is left out, which the table counts."""


class OutOfTimeError(BaseException):
    """A problem takes too long; not an Exception, which pplan might take for its own."""


def attack(seed: int, kind: str | None = None) -> Result:
    """The problem of a seed. Whatever goes wrong in it is a violation, too."""
    case = case_of(seed, kind)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_REAL, MOST_SECONDS)
    try:
        return attacked(case)
    except OutOfTimeError:
        return Result(seed, case.kind, left_out=f"takes longer than {MOST_SECONDS:g} s")
    except Exception as error:
        result = Result(seed, case.kind)
        result.check("runs", f"{type(error).__name__}: {error}")
        return result
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError


def results(seeds: range, kind: str | None, jobs: int) -> Iterator[Result]:
    """Of every seed, in order."""
    kinds = [kind] * len(seeds)
    if jobs == 1:
        yield from map(attack, seeds, kinds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(attack, seeds, kinds, chunksize=CHUNK)


def table(found: Iterable[Result]) -> str:
    """By kind of problem, and by check."""
    known = list(found)
    lines = [
        f"{'problems of kind':18} {'number':>7} {'refused':>8} {'left out':>9} {'plans':>12} "
        f"{'simulated':>10} {'violations':>11}"
    ]
    for kind in KINDS:
        own = [result for result in known if result.kind == kind]
        if own:
            lines.append(_row(kind, own))
    lines.append(_row("all", known))
    made, broken = Counter[str](), Counter[str]()
    for result in known:
        made.update(result.checks)
        broken.update(violation.check for violation in result.violations)
    lines += ["", f"{'check':18} {'made':>7} {'violations':>11}"]
    lines += [f"{name:18} {count:7,} {broken[name]:11,}" for name, count in sorted(made.items())]
    return "\n".join(lines)


def _row(name: str, own: list[Result]) -> str:
    refused = sum(bool(result.refused) for result in own)
    left_out = sum(bool(result.left_out) for result in own)
    plans, simulated = sum(result.plans for result in own), sum(result.simulated for result in own)
    broken = sum(len(result.violations) for result in own)
    return f"{name:18} {len(own):7,} {refused:8,} {left_out:9,} {plans:12,} {simulated:10,} {broken:11,}"


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; each has the next")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--kind", choices=list(KINDS), help="all of one kind")
    arguments = parser.parse_args()
    start, known = time.perf_counter(), list[Result]()
    seeds = range(arguments.seed, arguments.seed + arguments.problems)
    for result in results(seeds, arguments.kind, arguments.jobs):
        known.append(result)
        if len(known) % 100 == 0:
            print(f"{len(known):,} of {len(seeds):,}, {time.perf_counter() - start:,.0f} s", file=sys.stderr)
        for violation in result.violations:
            print(
                f"{violation.kind}, {violation.check}: {violation.text}\n    {violation.command}", flush=True
            )
    print(f"\n{table(known)}\n")
    violations = sum(len(result.violations) for result in known)
    seconds = time.perf_counter() - start
    print(
        f"{violations:,} violations in {len(known):,} problems, seeds {seeds[0]} to {seeds[-1]}, "
        f"{seconds:,.0f} s"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
