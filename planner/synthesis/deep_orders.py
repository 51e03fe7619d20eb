"""Orders between ZB-H1 and ZB-H2: as many forwards ahead, and weight gradients kept back, as memory lets.

ZB-H1 runs p - i forwards ahead on stage i of p and keeps the W of i micro-batches back; ZB-H2 2 (p - i) - 1
and 2 i, and so holds p - 1 micro-batches more, which many a device has no room for. With room for E of these,
stage i runs min(E, p - 1 - i) forwards more ahead, and keeps back the W of as many more micro-batches as are
left of E. A stage with less room keeps fewer back, and runs fewer ahead where that is not enough.
Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2, has the two ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from .order_problem import B, F, Lists, OrderProblem, Step, W

MOST_DEPTHS = 16
"""Values of E that are tried."""


def deep_orders(problem: OrderProblem) -> Iterator[Lists]:
    """The orders that fit, of parts on devices of their own, with the backward in two parts."""
    if not problem.is_line or not problem.split:
        return
    deepest = problem.parts - 1
    count = min(deepest, MOST_DEPTHS) or 1
    orders = set()
    for extra in sorted({deepest * step // count for step in range(count + 1)}):
        lists = _lists(problem, extra)
        if lists and lists not in orders:
            orders.add(lists)
            yield lists


def _lists(problem: OrderProblem, extra: int) -> Lists:
    """The order of a depth; nothing where a device has no room for one micro-batch."""
    lists, ahead = list[tuple[Step, ...]](), problem.micro_batches
    for part in range(problem.parts):
        more = min(extra, problem.parts - 1 - part)
        # A stage that waited for more forwards than the one before makes would wait for ever.
        ahead = min(ahead, problem.parts - part + more)
        ahead, own = _fitting_list(problem, part, ahead, part + extra - more)
        lists.append(own)
    return tuple(lists) if ahead else ()


def _fitting_list(problem: OrderProblem, part: int, ahead: int, behind: int) -> tuple[int, tuple[Step, ...]]:
    """With as much ahead, and then kept back, as there is room for; how much that is ahead."""
    device, count = problem.device[part], problem.micro_batches
    for forwards in range(ahead, 0, -1):
        low, high = -1, behind
        # More kept back mostly holds more: the most that fits is sought by halves, and all tried is checked.
        while low < high:
            middle = (low + high + 1) // 2
            fits = problem.fits_device(device, _list(forwards, middle, count, part))
            low, high = (middle, high) if fits else (low, middle - 1)
        if low >= 0:
            return forwards, _list(forwards, low, count, part)
    return 0, ()


def _list(ahead: int, behind: int, micro_batches: int, part: int) -> tuple[Step, ...]:
    """F's while fewer than `ahead` wait for their B, else a B; a W as soon as more than `behind` wait."""
    own = list[Step]()
    done = [0, 0, 0]
    while done[W] < micro_batches:
        if done[B] == micro_batches or done[B] - done[W] > behind:
            kind = W
        elif done[F] < micro_batches and done[F] - done[B] < ahead:
            kind = F
        else:
            kind = B
        done[kind] += 1
        own.append((kind, part))
    return tuple(own)
