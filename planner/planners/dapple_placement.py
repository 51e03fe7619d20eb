"""DAPPLE's three ways to give the next stage its devices, on real machine boundaries.

Fan et al., "DAPPLE", PPoPP 2021, section 4.2. What is left of a machine is told by how many of its devices
are taken: they are taken in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Counts = tuple[int, ...]
"""By machine, a number of its devices."""
Policy = Callable[[Counts, Counts, int], Counts]


def fresh_first(machines: Counts, used: Counts, count: int) -> Counts:
    """Devices of unused machines first: keeps the replicas of a stage on the fast links of one machine."""
    fresh = [machine for machine, taken in enumerate(used) if taken == 0]
    return _in_order(machines, used, count, [*fresh, *_begun(used)])


def append_first(machines: Counts, used: Counts, count: int) -> Counts:
    """What is left of used machines first: leaves no machine half empty."""
    fresh = [machine for machine, taken in enumerate(used) if taken == 0]
    return _in_order(machines, used, count, [*_begun(used), *fresh])


def scatter_first(machines: Counts, used: Counts, count: int) -> Counts:
    """One device in turn of each used machine, where there are several with enough left, else of each machine
    that has any left: transfers from stage to stage then stay inside the machines."""
    free = [room - taken for room, taken in zip(machines, used, strict=True)]
    begun = [machine for machine in _begun(used) if free[machine]]
    enough = len(begun) > 1 and sum(free[machine] for machine in begun) >= count
    pool = begun if enough else range(len(machines))
    given = [0] * len(machines)
    while count:
        for machine in pool:
            if count and given[machine] < free[machine]:
                given[machine] += 1
                count -= 1
    return tuple(given)


POLICIES: tuple[Policy, ...] = (fresh_first, append_first, scatter_first)


def ranks_of(starts: Sequence[int], used: Counts, given: Counts) -> tuple[int, ...]:
    """The ranks of `given` devices after the `used` ones of machines whose first ranks are `starts`."""
    return tuple(
        start + taken + index
        for start, taken, number in zip(starts, used, given, strict=True)
        for index in range(number)
    )


def _begun(used: Counts) -> list[int]:
    return [machine for machine, taken in enumerate(used) if taken]


def _in_order(machines: Counts, used: Counts, count: int, order: Sequence[int]) -> Counts:
    given = [0] * len(machines)
    for machine in order:
        given[machine] = min(count, machines[machine] - used[machine])
        count -= given[machine]
    return tuple(given)
