"""Of few cuts all are tried with orders of their own: against every order of every cut, timed here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from math import inf
from pathlib import Path

import pytest

import pplan

Kinds = tuple[str, ...]
LAYERS = [(9, 4, 1, 1), (5, 0, 7, 3), (3, 1, 8, 1), (9, 3, 1, 1), (3, 9, 9, 3)]
"""Milliseconds of F, B and W; units of memory that a micro-batch keeps."""
UNIT, ROOM, COUNT = 10_000_000, 7.49, 4
"""Bytes of a unit; units that a device has room for; micro-batches."""


def rows(split: bool, done: tuple[int, int, int] = (0, 0, 0)) -> Iterator[Kinds]:
    """Every order of one device in which no B comes before its F and no W before its B."""
    if done == (COUNT, COUNT, COUNT if split else 0):
        yield ()
    for kind, number in zip("FBW" if split else "FB", done, strict=False):
        at = "FBW".index(kind)
        if number < COUNT and (at == 0 or number < done[at - 1]):
            f, b, w = (own + (place == at) for place, own in enumerate(done))
            yield from ((kind, *rest) for rest in rows(split, (f, b, w)))


def fits(row: Kinds, own: float, pending: float, split: bool) -> bool:
    level = 0.0
    for kind in row:
        level += {"F": own, "B": pending if split else 0.0, "W": 0.0}[kind]
        if level > ROOM:
            return False
        level -= own + pending if kind == "W" else own if kind == "B" and not split else 0.0
    return True


def seconds(lists: tuple[Kinds, Kinds], each: list[dict[str, float]]) -> float:
    """Of two stages without transfers."""
    at, free, ends = [0, 0], [0.0, 0.0], dict[tuple[str, int, int], float]()
    number = [dict.fromkeys("FBW", 0) for _ in range(2)]
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(lists):
            while at[stage] < len(row):
                kind = row[at[stage]]
                m = number[stage][kind]
                needs = {"F": [("F", m, stage - 1)], "B": [("F", m, stage), ("B", m, stage + 1)]}
                needs["W"] = [("B", m, stage)]
                waits = [need for need in needs[kind] if 0 <= need[2] < 2]
                if any(need not in ends for need in waits):
                    break
                begin = max([free[stage], *(ends[need] for need in waits)])
                free[stage] = ends[kind, m, stage] = begin + each[stage][kind]
                number[stage][kind] += 1
                at[stage] += 1
                moved = True
    return max(free) if at == [len(row) for row in lists] else inf


def best_of_all() -> float:
    """With one stage, or two of any cut, the backward whole or in two parts."""
    best = float(COUNT * sum(f + b + w for f, b, w, _ in LAYERS)) if total_fits() else inf
    for (cut,), split in product(combinations(range(1, len(LAYERS)), 1), (True, False)):
        stages, each, choices = (LAYERS[:cut], LAYERS[cut:]), [], []
        for number, layers in enumerate(stages):
            f, b, w, own = (sum(values) for values in zip(*layers, strict=True))
            each.append({"F": float(f), "B": float(b if split else b + w), "W": float(w)})
            # The first stage's B leaves nothing for its W.
            choices.append([row for row in rows(split) if fits(row, own, own if number else 0, split)])
        best = min([best, *(seconds((one, two), each) for one, two in product(*choices))])
    return best


def total_fits() -> bool:
    return sum(own for *_, own in LAYERS) <= ROOM


def test_a_cut_that_no_known_schedule_fits_on(tmp_path: Path) -> None:
    """The fastest order has its backward in two parts, on cuts where no known schedule of these fits."""
    lines = ["name,forward_ms,backward_ms,backward_input_ms,activation_bytes,parameter_bytes,saved_bytes"]
    lines += [f"l{i},{f},{b + w},{b},0,10,{own * UNIT}" for i, (f, b, w, own) in enumerate(LAYERS)]
    (tmp_path / "own.csv").write_text("\n".join(lines), encoding="utf-8")
    profile = pplan.import_profile(tmp_path / "own.csv")
    plan = pplan.solve(
        profile,
        gpus=2,
        memory_bytes=int(ROOM * UNIT * 1.05),
        mini_batch=COUNT,
        micro_batches=COUNT,
        schedule="synthesized",
        recompute="never",
        latency=0.0,
        time_limit=1.0,
    )
    best = best_of_all()
    assert plan.prediction.step_seconds == pytest.approx(best / 1000)
    assert plan.prediction.lower_bound_seconds <= best / 1000 * (1 + 1e-9)
