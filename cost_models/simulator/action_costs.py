"""Costs as the engine takes them: one value for each action of a program, in the order of the clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .costs import Array, Costs
from .dependencies import Indices, Order
from .launches import Launches, time_launches

FREE = -1


@dataclass(frozen=True, eq=False)
class ActionCosts:
    """Arrays of one entry an action; for many candidates, a second axis.

    `link`: what the action's transfer occupies, -1 nothing; `cut`: the row of its `occupancy` and `latency`.
    `launches`: when its launch starts and ends; None where the host is never late.
    """

    order: Order
    costs: Costs
    duration: Array
    cut: Indices
    occupancy: Array
    latency: Array
    link: Indices
    links: int
    launches: Launches | None


def lower_costs(order: Order, costs: Costs) -> ActionCosts:
    """The costs of a program. Raises UsageError for costs that cannot be."""
    costs.check(order.program)
    cut, occupancy, latency = _transfers(order, costs)
    link = _links(order, costs, cut, occupancy)
    return ActionCosts(
        order=order,
        costs=costs,
        duration=_durations(order, costs),
        cut=cut,
        occupancy=occupancy,
        latency=latency,
        link=link,
        links=int(link.max(initial=FREE)) + 1,
        launches=_launches(order, costs),
    )


def _empty(order: Order, costs: Costs) -> Array:
    return np.zeros((len(order),) if costs.candidates is None else (len(order), costs.candidates))


def _at(order: Order, table: Array, actions: Indices) -> Array:
    """Values of a table by (device, chunk, micro-batch), for these actions."""
    columns = (order.device, order.chunk, order.micro_batch)
    index = tuple(
        column[actions] if length > 1 else 0 for column, length in zip(columns, table.shape[:3], strict=True)
    )
    values: Array = table[index]
    return values


def _shares(order: Order, actions: Indices, like: Array) -> Array | float:
    """The part of a micro-batch that each action works on."""
    if order.program.shares is None:
        return 1.0
    shares = np.asarray(order.program.shares, dtype=np.float64)[order.micro_batch[actions]]
    return shares.reshape(-1, *(1,) * (like.ndim - 1))


def _durations(order: Order, costs: Costs) -> Array:
    durations = _empty(order, costs)
    forwards, backwards, weights = order.of_kind
    durations[forwards] = _at(order, costs.forward, forwards)
    durations[backwards] = _at(order, costs.backward, backwards)
    if costs.weight is not None:
        whole = backwards[~order.splits[backwards]]
        durations[whole] += _at(order, costs.weight, whole)
        durations[weights] = _at(order, costs.weight, weights)
    if costs.accumulation is not None:
        durations[order.first_backwards] -= _at(order, costs.accumulation, order.first_backwards)
    if costs.recompute is not None:
        durations[backwards] += recompute_seconds(order, costs, backwards)
    if order.program.shares is not None:
        everything = np.arange(len(order))
        durations *= _shares(order, everything, durations)
    if costs.overhead is not None:
        durations += costs.overhead[order.device if len(costs.overhead) > 1 else 0]
    updates = update_actions(order)
    if costs.optimizer is not None and len(updates):
        seconds = costs.optimizer[order.device[updates] if len(costs.optimizer) > 1 else 0]
        durations[updates] += seconds / order.program.parts
    return durations


def recompute_seconds(order: Order, costs: Costs, backwards: Indices) -> Array:
    """Seconds of the forward that these backwards run again (of a whole micro-batch)."""
    assert costs.recompute is not None
    return _at(order, costs.recompute, backwards) * _at(order, costs.forward, backwards)


def update_actions(order: Order) -> Indices:
    """Actions after which a chunk's weights are updated at once (asynchronous schedules)."""
    every = order.program.update_every
    if every is None:
        return np.zeros(0, dtype=np.int64)
    finishing = np.flatnonzero(order.finishing)
    chunk = order.device[finishing] * order.program.chunks + order.chunk[finishing]
    sorted_by_chunk = finishing[np.argsort(chunk, kind="stable")]
    ordered = np.sort(chunk)
    first = np.searchsorted(ordered, ordered)
    nth = np.arange(len(ordered)) - first + 1
    return np.sort(sorted_by_chunk[nth % every == 0])


def _transfers(order: Order, costs: Costs) -> tuple[Indices, Array, Array]:
    """For each action a row, and by row the occupancy and the latency of its transfer."""
    occupancy = _by_cut(order, costs, costs.forward_occupancy, costs.backward_occupancy)
    latency = _by_cut(order, costs, costs.forward_latency, costs.backward_latency)
    if order.program.shares is None:
        return order.cut, occupancy, latency
    everything = np.arange(len(order))
    occupancy = occupancy[order.cut]
    return everything, occupancy * _shares(order, everything, occupancy), latency[order.cut]


def _by_cut(order: Order, costs: Costs, forward: Array | None, backward: Array | None) -> Array:
    """Both directions in one table, and a row of zeros at the end for actions that send nothing."""
    pipes, cuts = len(order.program.pipes), order.program.slots - 1
    candidates = () if costs.candidates is None else (costs.candidates,)
    table = np.zeros((2 * pipes * cuts + 1, *candidates))
    for direction, amounts in enumerate((forward, backward)):
        if amounts is not None:
            rows = np.broadcast_to(amounts, (pipes, cuts, *candidates)).reshape(pipes * cuts, *candidates)
            table[direction * pipes * cuts : (direction + 1) * pipes * cuts] = rows
    return table


def _links(order: Order, costs: Costs, cut: Indices, occupancy: Array) -> Indices:
    """The link of each action's transfer, numbered from 0; none where nothing ever occupies it."""
    if not occupancy.any():
        return np.full(len(order), FREE)
    if costs.links is None:
        return order.pair_link
    link = np.full(len(order), FREE)
    sends = order.sends
    link[sends] = costs.links[order.device[sends], order.device[order.target[sends]]]
    occupied = np.any(occupancy.reshape(len(occupancy), -1), axis=1)[cut]
    used = np.flatnonzero(np.bincount(link[occupied & (link >= 0)]))
    numbers = np.searchsorted(used, link)
    matches = np.append(used, FREE)[numbers] == link
    return np.where(matches & (link >= 0), numbers, FREE)


def _launches(order: Order, costs: Costs) -> Launches | None:
    if costs.forward_launch is None or costs.backward_launch is None or _is_never_late(order, costs):
        return None
    seconds = _empty(order, costs)
    forwards, backwards, weights = order.of_kind
    seconds[forwards] = _at(order, costs.forward_launch, forwards)
    seconds[backwards] = _at(order, costs.backward_launch, backwards)
    if costs.weight_launch is not None:
        whole = backwards[~order.splits[backwards]]
        seconds[whole] += _at(order, costs.weight_launch, whole)
        seconds[weights] = _at(order, costs.weight_launch, weights)
    repeat = None
    if costs.recompute_launch is not None:
        repeat = _empty(order, costs)
        repeat[backwards] = _at(order, costs.recompute_launch, backwards)
    return time_launches(order, costs, seconds, repeat)


def _is_never_late(order: Order, costs: Costs) -> bool:
    """Whether no device waits for its own host: no action takes longer to launch than to run. An action then
    starts no earlier than its launch, which begins when all launches before it, as short, have ended."""
    launches = [costs.forward_launch, costs.backward_launch, costs.weight_launch]
    if not any(own is not None and own.any() for own in launches):
        return True
    if costs.hosts == "one" or order.program.splits_backward or order.program.shares is not None:
        return False
    assert costs.forward_launch is not None
    assert costs.backward_launch is not None
    backward = costs.backward if costs.accumulation is None else costs.backward - costs.accumulation
    if costs.recompute is not None:
        backward = backward + costs.recompute * costs.forward
    is_short = (costs.forward_launch <= costs.forward).all() and (costs.backward_launch <= backward).all()
    return bool(is_short) and costs.weight is None


def has_static_link_order(values: ActionCosts) -> bool:
    """Whether the order in which each link serves is known beforehand: that of the clock.

    So it is where all that a link carries comes from one device, whose actions end one after another. Not
    where a transfer waits for its receiver.
    """
    if values.costs.transfers in ("rendezvous", "blocking-receive"):
        return False
    if values.costs.links is None:
        return True
    on_link = values.link != FREE
    pairs = set(zip(values.link[on_link].tolist(), values.order.device[on_link].tolist(), strict=True))
    return len(pairs) == values.links
