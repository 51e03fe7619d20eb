"""What memory orders need that repeat and never wait: python benchmarks/cyclic_orders.py [--stages N]
[--micro-batches N ...] [--pending SHARE]

Equal stages with Zero Bubble's costs, of which each is always busy and does the same again every few
micro-batches. A stage's actions in such a cycle are one of few strings of F, B and W; between neighbours all
offsets in time are tried at which an action arrives just as the next one begins. What counts of a pair is how
many more micro-batches wait for their B on the first of the two, so that the least for a whole pipeline is a
shortest path through the strings of its stages, the last one first. Printed is the least memory of a device,
in micro-batches; `--pending`: what B adds until W, as a share of what F keeps.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

SECONDS = {"F": 11.347, "B": 11.248, "W": 8.132}
TRANSFER = 0.377
Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


def strings(left: dict[str, int], own: str = "") -> Iterator[str]:
    """The cycles of so many actions of each kind, each begun where it comes first in the alphabet."""
    if not any(left.values()):
        if own == min(own[place:] + own[:place] for place in range(len(own))):
            yield own
        return
    for kind, count in left.items():
        if count:
            yield from strings({**left, kind: count - 1}, own + kind)


def starts(cycles: list[str], kind: str, count: int) -> Floats:
    """(cycles, count): when the actions of a kind begin."""
    rows = []
    for own in cycles:
        ends = np.cumsum([SECONDS[action] for action in own])
        rows.append([ends[place] - SECONDS[kind] for place, action in enumerate(own) if action == kind])
    return np.array(rows).reshape(len(cycles), count)


def later(arrivals: Floats, sent: Floats, period: float) -> Counts:
    """By how many places, at the least, actions at `arrivals` (..., count) follow those `sent` (..., count):
    the i-th receives what the one so many places before sends."""
    passed = np.floor((arrivals[..., :, None] - sent[..., None, :] + 1e-9) / period).astype(int) + 1
    number = np.arange(arrivals.shape[-1])
    result: Counts = (number - (passed.sum(axis=-1) - 1)).max(axis=-1)
    return result


def more_waiting(forward: Floats, backward: Floats, period: float) -> Counts:
    """(cycles, cycles): how many more wait for their B on a stage with the first than on the next, with the
    second, at the least."""
    count = forward.shape[1]
    rows = []
    for first_forward, first_backward in zip(forward, backward, strict=True):
        offsets = first_forward[None, :, None] + SECONDS["F"] + TRANSFER - forward[:, None, :]
        offsets = offsets.reshape(len(forward), count * count, 1) % period
        down = later(forward[:, None, :] + offsets - SECONDS["F"] - TRANSFER, first_forward, period)
        up = later(first_backward - offsets - SECONDS["B"] - TRANSFER, backward[:, None, :], period)
        rows.append((down + up).min(axis=1))
    return np.array(rows)


def held(own: str, waiting: int, pending: float) -> float:
    """The most that a stage with this cycle holds, as it begins with so many that wait for their B, and as
    few for their W as can be."""
    behind = max(own[:place].count("W") - own[:place].count("B") for place in range(len(own) + 1))
    level = top = waiting + behind * (1 + pending)
    for kind in own:
        level += {"F": 1.0, "B": pending, "W": -1 - pending}[kind]
        top = max(top, level)
    return top


def least_memory(stages: int, count: int, pending: float) -> tuple[int, float]:
    """How many cycles there are; micro-batches that a device holds at the least."""
    cycles = list(strings({"F": count, "B": count, "W": count}))
    period = count * sum(SECONDS.values())
    more = more_waiting(starts(cycles, "F", count), starts(cycles, "B", count), period)
    last = np.array([max(own[:n].count("B") - own[:n].count("F") for n in range(len(own))) for own in cycles])
    tops = np.array([held(own, 0, pending) for own in cycles])

    def fits(room: float) -> bool:
        """Whether there are cycles of all stages; more room never hurts."""
        waiting = np.where(tops + last <= room + 1e-9, last, np.inf)
        for _ in range(stages - 1):
            waiting = (more + waiting[None, :]).min(axis=1)
            waiting[tops + waiting > room + 1e-9] = np.inf
        return bool(np.isfinite(waiting).any())

    rooms = np.arange(1, 4 * stages, 1 if pending == 0 else 0.01)
    place = bisect_left(rooms, True, key=fits)
    return len(cycles), float(rooms[place]) if place < len(rooms) else float("inf")


def main() -> None:
    """Prints a line for each length of the cycle."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=16, metavar="N")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--pending", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()
    print(f"{'micro-batches a cycle':<24}{'cycles of a stage':>18}{'room for':>10}")
    for count in options.micro_batches:
        cycles, room = least_memory(options.stages, count, options.pending)
        print(f"{count:<24}{cycles:>18,}{room:>10g}", flush=True)


if __name__ == "__main__":
    main()
