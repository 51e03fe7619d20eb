"""Which devices the stages of a pipeline may have: runs of an order of the devices, or any.

`in_orders` is what an answer is searched over: the ranks in order, where a stage may also begin with the next
node (or kind of device); the ranks across the nodes; the runs of equal devices in every order. `in_any` is
every choice of different devices for every stage, but for those that the same machine, renumbered, has, too;
of more than 16 devices that are not all alike, of which there are too many choices, it is the orders' runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, permutations

from pplan.cost_models.topology import Topology

Ranks = tuple[int, ...]
Shape = tuple[Ranks, ...]
FEW = 16
MOST_RUNS = 4


def in_orders(topology: Topology, stages: int, counts: range, *, numbered: bool) -> list[Shape]:
    """Consecutive runs of the orders that are searched; `numbered`: of the ranks as they are alone."""
    made: dict[Shape, None] = {}
    for order, skips in _orders(topology)[: 1 if numbered else None]:
        made |= dict.fromkeys(_runs(topology, order, skips, stages, counts))
    return list(made)


def _orders(topology: Topology) -> list[tuple[Ranks, str]]:
    """Orders of the ranks, and what a stage may skip: the rest of a `group`, any `groups`, or `nothing`."""
    ranks, each = tuple(range(topology.gpus)), topology.gpus_per_node
    if len(topology.kinds) > 1:
        runs = [tuple(own) for _, own in groupby(ranks, key=topology.device)]
        orders = list(permutations(runs)) if len(runs) <= MOST_RUNS else [tuple(runs), tuple(runs[::-1])]
        return [(tuple(rank for run in order for rank in run), "groups") for order in orders]
    made = [(ranks, "group")]
    nodes = topology.gpus // each
    wanted = range(2, nodes + 1) if topology.gpus <= FEW else range(nodes, nodes + 1)
    if each > 1:
        for count in wanted:
            if count > 1:
                taken = tuple(node * each + slot for slot in range(each) for node in range(count))
                made.append(((*taken, *ranks[count * each :]), "nothing"))
    return made


def _runs(topology: Topology, order: Ranks, skips: str, stages: int, counts: range) -> Iterator[Shape]:
    group_of = [(rank // topology.gpus_per_node, topology.device(rank)) for rank in order]
    size = len(order)
    first = [i == 0 or group_of[i] != group_of[i - 1] for i in range(size)]

    def begins(position: int) -> Iterator[int]:
        yield position
        if skips == "groups" or (skips == "group" and position < size and not first[position]):
            for later in range(position + 1, size):
                if first[later]:
                    yield later
                    if skips == "group":
                        return

    def further(position: int, left: int) -> Iterator[Shape]:
        if not left:
            yield ()
            return
        for begin in begins(position):
            for count in counts:
                if begin + count + left - 1 > size:
                    break
                for others in further(begin + count, left - 1):
                    yield (order[begin : begin + count], *others)

    return further(0, stages)


def all_alike(topology: Topology) -> bool:
    """Whether no renumbering of the devices makes a difference."""
    joined = topology.gpus <= topology.gpus_per_node or len(topology.levels) == 1
    return len(topology.kinds) == 1 and joined and topology.levels[0].devices_per_port == 1


def in_any(topology: Topology, stages: int, counts: range) -> list[Shape]:
    """Every choice of devices, one for each of the same up to renumbering."""
    if all_alike(topology):
        return list(_runs(topology, tuple(range(topology.gpus)), "nothing", stages, counts))
    if topology.gpus > FEW:
        return in_orders(topology, stages, counts, numbered=False)
    made: list[Shape] = []

    def further(done: Shape, used: Ranks, same: list[Ranks]) -> None:
        if len(done) == stages:
            made.append(done)
            return
        for count in counts:
            if len(used) + count + stages - len(done) - 1 > topology.gpus:
                break
            for own, left in _choices(topology.gpus, used, count, same):
                further((*done, own), (*used, *own), left)

    further((), (), renumberings(topology))
    return made


def _choices(
    gpus: int, used: Ranks, count: int, same: list[Ranks], own: Ranks = ()
) -> Iterator[tuple[Ranks, list[Ranks]]]:
    """So many further devices in every order, and the renumberings that change none of all."""
    if not count:
        yield own, same
        return
    seen: set[int] = set()
    for rank in range(gpus):
        if rank in used or rank in own or rank in seen:
            continue
        seen |= {other[rank] for other in same}
        fixed = [other for other in same if other[rank] == rank]
        yield from _choices(gpus, used, count - 1, fixed, (*own, rank))


def renumberings(topology: Topology) -> list[Ranks]:
    """Permutations of the ranks that keep kinds, levels and who shares a port with whom."""
    gpus = topology.gpus
    kinds = [topology.device(rank) for rank in range(gpus)]
    pairs = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
    level = {(a, b): topology.shared_level(a, b) for a, b in pairs}
    ports = {
        (a, b): tuple(a // one.devices_per_port == b // one.devices_per_port for one in topology.levels)
        for a, b in pairs
    }
    made: list[Ranks] = []

    def further(done: Ranks) -> None:
        new = len(done)
        if new == gpus:
            made.append(done)
            return
        for rank in range(gpus):
            if rank in done or kinds[rank] != kinds[new]:
                continue
            if all(
                level[new, old] == level[rank, done[old]] and ports[new, old] == ports[rank, done[old]]
                for old in range(new)
            ):
                further((*done, rank))

    further(())
    return made
