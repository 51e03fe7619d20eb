"""Costs of a program: seconds of its actions and transfers, how they overlap, and when hosts launch them.

`Costs` holds seconds by device, chunk and micro-batch; `lower_costs` turns them into one value for each
action of a program, in the order of the clock, as the simulator takes them.

Hosts launch actions ahead of the devices, for which they never wait.
Where each device has its own host, a process a device, its launches follow one another in the order of its
list. Where one process drives all devices, it launches from several threads:

  forwards one after another, in the order of the clock. torchgpipe and FairScale have a worker thread a
    device for them, but what launches is Python, and threads take turns with Python's lock. PyTorch lets go
    of the lock inside each operation, so that some of it may overlap: one after another is the most it takes;
  backwards from a thread a device: PyTorch's autograd engine has one for each CUDA device (engine.cpp, "Note
    [Allocating GPUs to autograd threads]"), and its operations are launched without Python. A backward's
    launch begins when that of the place its gradients come from has ended, on the host, whatever the devices
    have done by then;
  what a backward runs again of its forward first, one after another, too. It is Python, launched until
    PyTorch 2.5 by the thread that called backward, as its node receives no gradient (a queue was chosen by
    the device of the gradients), and since by that of its device (pull request 135633).

The process goes from forwards to backwards and back as the clock does: backward() is called after the
forwards before it, and returns when all backwards up to the next forward are launched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from .collectives import Loads, TiedSum
from .errors import UsageError
from .program import Program
from .program_order import NONE, Indices, Order

Array = npt.NDArray[np.float64]
TRANSFERS = ("overlapped", "blocking", "blocking-receive", "rendezvous")
Hosts = Literal["one", "each"]


_BY_ACTION = (
    "forward",
    "backward",
    "weight",
    "accumulation",
    "recompute",
    "forward_launch",
    "backward_launch",
    "weight_launch",
    "recompute_launch",
)
_BY_CUT = ("forward_occupancy", "forward_latency", "backward_occupancy", "backward_latency")


@dataclass(frozen=True, eq=False, kw_only=True)
class Costs:
    """Seconds of any program; for many candidates side by side, one more axis at the end of every array but
    `links`.

    By (device, chunk, micro-batch), an axis along which nothing changes may be 1 long:
      `forward`, `backward`, and `weight` where the gradient of the weights is computed apart: then `backward`
      is that of the input, and a B that is not split takes both. `accumulation`: what of it (of `weight`,
      where there is one) the first backward of a chunk does not take, as there are no gradients to add to.
      `recompute`: the share of the forward that is run again at the beginning of B (0 to 1).
      `forward_launch`, `backward_launch`, `weight_launch`: host seconds; None: the host is never late.
      `recompute_launch`: what of `backward_launch`, at its beginning, launches the forward again; None:
      nothing.
    By (pipe, cut), the cut after each place but the last; the pipe's axis may be 1 long:
      `forward_occupancy` (bytes / bandwidth) and `forward_latency` of activations, `backward_...` of their
      gradients. A transfer between chunks of one device is free.
    By (device, chunk): `unshard`, seconds of gathering the chunk's weights from replicas, with at most
      `unsharded_chunks` gathered at a time (`list_unshards`); None: nothing is gathered. A device's gathers
      follow one another beside its actions, each from the end of the action before; an action waits for that
      of its chunk.
    By device: `overhead` of each action, `optimizer` of an update. By (device, chunk): `all_reduce` of the
      gradients.

    `links` (devices, devices): the link from one device to another, -1 for one that carries any number of
    transfers at a time; None: each ordered pair has its own. A link carries one transfer at a time, in the
    order in which they are ready, for its occupancy; the latency follows and occupies nothing.

    `reduce_loads`: by part of the layers whose all-reduce goes through ports that others go through as well,
    the seconds for which it takes each of them (see `PortSharing`). `port_seconds`: for how long the most
    loaded port is taken: no step is shorter.

    `transfers`, by what a device does meanwhile:
      "overlapped": it computes on.
      "blocking": a device starts nothing until what its last action sent has arrived. The receiver takes it
        beside its computing.
      "blocking-receive": a transfer begins when, besides, the action before the one it is for has ended on
        the receiving device, which waits; the sender computes on.
      "rendezvous": both. What a device sends of one action and receives for the next is posted together when
        the former ends (as by torch.distributed.batch_isend_irecv); a transfer begins when both sides have
        posted it, and the next action when both have arrived. Some schedules hang so, and are refused.

    `hosts`: actions are launched ahead of the devices, by "one" process that drives all of them, forwards one
    after another and backwards from a thread a device, or by the host of "each" device in the order of its
    list; see above. An action neither starts before its launch starts nor ends before its launch ends.

    All-reduces go on beside all else. A chunk's gradients are ready when its last backward ends, or in
    `buckets` equal parts while it runs; each device has one all-reduce under way at a time. Where several
    places compute the same part of the layers (replicas, Chimera's directions), all of them take part.
    `tied`: sums of the gradients of weights that several parts use, one after another; each begins when all
    its devices have run their lists and ended their own all-reduces and earlier sums.
    """

    forward: Array
    backward: Array
    weight: Array | None = None
    accumulation: Array | None = None
    recompute: Array | None = None
    forward_launch: Array | None = None
    backward_launch: Array | None = None
    weight_launch: Array | None = None
    recompute_launch: Array | None = None
    forward_occupancy: Array | None = None
    forward_latency: Array | None = None
    backward_occupancy: Array | None = None
    backward_latency: Array | None = None
    overhead: Array | None = None
    optimizer: Array | None = None
    all_reduce: Array | None = None
    unshard: Array | None = None
    unsharded_chunks: int = 1
    links: npt.NDArray[np.int64] | None = None
    reduce_loads: Mapping[int, Loads] = field(default_factory=dict)
    port_seconds: float = 0.0
    tied: tuple[TiedSum, ...] = ()
    transfers: str = "overlapped"
    hosts: Hosts = "one"
    buckets: int = 1

    @property
    def candidates(self) -> int | None:
        """Candidates side by side; None where the costs are of one, without that axis."""
        return self.forward.shape[3] if self.forward.ndim == 4 else None

    def arrays(self) -> dict[str, Array]:
        """All seconds and shares that are given, by name."""
        arrays = ((name, getattr(self, name)) for name in _ARRAYS)
        return {name: values for name, values in arrays if values is not None}

    def candidate(self, index: int) -> Costs:
        """The costs of one of many candidates."""
        arrays: dict[str, Any] = {name: values[..., index] for name, values in self.arrays().items()}
        return replace(self, **arrays)

    def check(self, program: Program) -> None:
        """Raises UsageError for values that cannot be, and for transfers that are not known."""
        for name, values in self.arrays().items():
            check_finite(name, values)
        if self.tied and program.update_every is not None:
            raise UsageError(
                f"{self.tied[0].name} is on several stages, and each updates its weights by itself",
                "Keep the layers that use it on one stage.",
            )
        if self.transfers not in TRANSFERS:
            raise UsageError(
                f"transfers {self.transfers!r}: not known", f"Use one of: {', '.join(TRANSFERS)}."
            )


_ARRAYS = (*_BY_ACTION, *_BY_CUT, "overhead", "optimizer", "all_reduce", "unshard")


def recompute_shares(mode: str | Sequence[str], program: Program) -> Array:
    """The share of the forward that every B runs again, shape (devices, 1, micro-batches).

    `mode`, one word or one a device: "never"; "always"; "except_last", all micro-batches but the last
    (torchgpipe).
    """
    shares = np.zeros((program.devices, 1, program.micro_batches))
    for own, word in zip(shares, [mode] * program.devices if isinstance(mode, str) else mode, strict=True):
        own[:] = 0.0 if word == "never" else 1.0
        if word == "except_last":
            own[:, -1] = 0.0
    return shares


def check_finite(name: str, values: Any) -> None:
    """Raises UsageError unless all are finite and none is negative."""
    array = np.asarray(values)
    if array.size and not (array.min() >= 0 and array.max() < np.inf):
        bad = array[~(np.isfinite(array) & (array >= 0))]
        raise UsageError(f"{name} holds {bad.flat[0]}", "Costs must be finite and not negative.")


def linear_costs(
    forward: Array,
    backward: Array,
    occupancy: Array,
    latency: Array,
    *,
    accumulation: Array | None = None,
    **launches: Any,
) -> Costs:
    """Costs of stages of one chunk each, with the same transfers both ways.

    Args:
        forward: Seconds by (stage, micro-batch); a further last axis of every array holds candidates.
        backward: Seconds by (stage, micro-batch).
        occupancy: Seconds by cut, one less than stages.
        latency: Seconds by cut.
        accumulation: Seconds by stage that its first backward does not take.
        launches: `forward_launch`, `backward_launch` and `recompute_launch` by (stage, micro-batch),
            `all_reduce` by stage, and fields of `Costs` that are no arrays.

    Returns:
        The costs, whose shapes the simulator checks.
    """
    others: dict[str, Any] = {
        name: own[:, None] if isinstance(own, np.ndarray) else own for name, own in launches.items()
    }
    return Costs(
        forward=forward[:, None],
        backward=backward[:, None],
        forward_occupancy=occupancy[None],
        forward_latency=latency[None],
        backward_occupancy=occupancy[None],
        backward_latency=latency[None],
        accumulation=None if accumulation is None else accumulation[:, None, None],
        **others,
    )


def stage_costs(
    program: Program,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float] | None = None,
    transfer_latency: float = 0.0,
) -> Costs:
    """Costs of a program from the seconds of its stages: one value, or one a stage. Transfers: latency only.

    Stages are counted along each pipe (Chimera: both directions have the same first stage); where a device
    holds several places of a pipe, each takes an equal part of the stage's seconds. With `weight`, `backward`
    is the gradient of the input.
    """
    stages = len({place.device for place in program.pipes[0]})
    latency = np.full((1, program.slots - 1), float(transfer_latency))
    return Costs(
        forward=_by_chunk(program, forward, stages),
        backward=_by_chunk(program, backward, stages),
        weight=None if weight is None else _by_chunk(program, weight, stages),
        forward_latency=latency,
        backward_latency=latency,
    )


def _by_chunk(program: Program, seconds: float | Sequence[float], stages: int) -> Array:
    values = np.broadcast_to(np.asarray(seconds, dtype=np.float64), stages)
    table = np.zeros((program.devices, program.chunks, 1))
    for pipe in program.pipes:
        along = list(dict.fromkeys(place.device for place in pipe))
        for device, chunk in pipe:
            table[device, chunk] = values[along.index(device)] / program.parts
    return table


class Launches(NamedTuple):
    """Seconds of each action's launch: when it starts and ends; `repeat`: what of it, at its beginning,
    launches a forward again, where one process drives all devices."""

    start: Array
    end: Array
    repeat: Array | None


def time_launches(order: Order, costs: Costs, seconds: Array, repeat: Array | None) -> Launches:
    """Of launches that take so many seconds, (actions,) or (actions, candidates), what is launched again
    included."""
    if costs.hosts == "one":
        return _of_process(order, seconds, repeat)
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    for device in range(order.program.devices):
        own = np.flatnonzero(order.device == device)
        end[own] = np.cumsum(seconds[own], axis=0)
        start[own] = np.concatenate([np.zeros_like(end[own[:1]]), end[own[:-1]]])
    return Launches(start, end, None)


def _of_process(order: Order, seconds: Array, repeat: Array | None) -> Launches:
    """`called`: when the last forward was launched; `done`: the last of the backwards; `python`: what a
    backward runs again."""
    many = seconds.ndim > 1
    later: Any = np.maximum if many else max
    rows = list(seconds) if many else seconds.tolist()
    repeats: list[Any] = [None] * len(order)
    if repeat is not None:
        repeats = list(repeat) if many else [again or None for again in repeat.tolist()]
    called = done = python = 0 * rows[0]
    threads = [called] * order.program.devices
    starts, ends = [], list[Any]()
    columns = (order.kind.tolist(), order.lists["device"], order.lists["source"], rows, repeats)
    for kind, device, source, own, again in zip(*columns, strict=True):
        if kind == 0:
            begins = later(called, done)
            finishes = called = python = begins + own
        else:
            begins = later(threads[device], called)
            if source != NONE:
                begins = later(begins, ends[source])
            if again is not None:
                begins = later(begins, python * (again > 0))
                python = later(python, (begins + again) * (again > 0))
            finishes = threads[device] = begins + own
            done = later(done, finishes)
        starts.append(begins)
        ends.append(finishes)
    return Launches(np.array(starts), np.array(ends), repeat)


def preceding_launches(order: Order, costs: Costs, launches: Launches) -> Indices:
    """By action, another one, when whose launch, or what that launches again, ends, its own launch starts;
    -1: at the beginning of the step."""
    start, end, none = launches.start, launches.end, np.full(len(order), NONE)
    waits = [(order.previous, end)]
    if costs.hosts == "one":
        forward = order.kind == 0
        repeat = np.zeros(len(order)) if launches.repeat is None else launches.repeat
        python = np.where(forward, end, start + repeat)
        called, done = _latest(end, forward), _latest(end, ~forward)
        waits = [
            (np.where(forward, called, order.previous), end),
            (np.where(forward, done, order.source), end),
            (np.where(forward, none, called), end),
            (np.where(repeat > 0, _latest(python, forward | (repeat > 0)), none), python),
        ]
    begins = [(start > 0) & (np.append(until, -1.0)[before] == start) for before, until in waits]
    return np.select(begins, [before for before, _ in waits], NONE)


def _latest(until: Array, counts: npt.NDArray[np.bool_]) -> Indices:
    """By action, the one of those that count among the actions before it that lasts longest."""
    values = np.where(counts, until, -1.0)
    longest = np.append(-1.0, np.maximum.accumulate(values))[:-1]
    records = np.where(values > longest, np.arange(len(values)), NONE)
    return np.append(NONE, np.maximum.accumulate(records))[:-1]


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
        links=int(link.max(initial=NONE)) + 1,
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


def _shares(order: Order, like: Array) -> Array:
    """The part of a micro-batch that each action works on."""
    shares = np.asarray(order.program.shares, dtype=np.float64)[order.micro_batch]
    return shares.reshape(-1, *(1,) * (like.ndim - 1))


def _by_kind(order: Order, costs: Costs, forward: Array, backward: Array, weight: Array | None) -> Array:
    """Values of three tables by action. Without a split, a backward has the weight's value, too."""
    values = _empty(order, costs)
    forwards, backwards, weights = order.of_kind
    values[forwards] = _at(order, forward, forwards)
    values[backwards] = _at(order, backward, backwards)
    if weight is not None:
        whole = backwards[~order.splits[backwards]]
        values[whole] += _at(order, weight, whole)
        values[weights] = _at(order, weight, weights)
    return values


def _durations(order: Order, costs: Costs) -> Array:
    durations = _by_kind(order, costs, costs.forward, costs.backward, costs.weight)
    if costs.accumulation is not None:
        durations[order.first_backwards] -= _at(order, costs.accumulation, order.first_backwards)
    durations += recompute_seconds(order, costs)
    if order.program.shares is not None:
        durations *= _shares(order, durations)
    if costs.overhead is not None:
        durations += costs.overhead[order.device if len(costs.overhead) > 1 else 0]
    updates = update_actions(order)
    if costs.optimizer is not None and len(updates):
        seconds = costs.optimizer[order.device[updates] if len(costs.optimizer) > 1 else 0]
        durations[updates] += seconds / order.program.parts
    return durations


def recompute_seconds(order: Order, costs: Costs) -> Array:
    """Seconds of each action for the forward that it runs again (of a whole micro-batch)."""
    seconds, (_, backwards, _) = _empty(order, costs), order.of_kind
    if costs.recompute is not None:
        seconds[backwards] = _at(order, costs.recompute, backwards) * _at(order, costs.forward, backwards)
    return seconds


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
    occupancy = occupancy[order.cut]
    return np.arange(len(order)), occupancy * _shares(order, occupancy), latency[order.cut]


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
        return np.full(len(order), NONE)
    if costs.links is None:
        return order.pair_link
    link = np.full(len(order), NONE)
    sends = order.sends
    link[sends] = costs.links[order.device[sends], order.device[order.target[sends]]]
    occupied = np.any(occupancy.reshape(len(occupancy), -1), axis=1)[cut]
    used = np.flatnonzero(np.bincount(link[occupied & (link >= 0)]))
    numbers = np.searchsorted(used, link)
    matches = np.append(used, NONE)[numbers] == link
    return np.where(matches & (link >= 0), numbers, NONE)


def _launches(order: Order, costs: Costs) -> Launches | None:
    if costs.forward_launch is None or costs.backward_launch is None:
        return None
    seconds = _by_kind(order, costs, costs.forward_launch, costs.backward_launch, costs.weight_launch)
    repeat = None
    if costs.recompute_launch is not None:
        _, backwards, _ = order.of_kind
        repeat = _empty(order, costs)
        repeat[backwards] = _at(order, costs.recompute_launch, backwards)
    return time_launches(order, costs, seconds, repeat)


def has_static_link_order(values: ActionCosts) -> bool:
    """Whether the order in which each link serves is known beforehand: that of the clock.

    So it is where all that a link carries comes from one device, whose actions end one after another. Not
    where a transfer waits for its receiver; and gathers of weights are left to the event loop.
    """
    if values.costs.transfers in ("rendezvous", "blocking-receive") or values.costs.unshard is not None:
        return False
    if values.costs.links is None:
        return True
    on_link = values.link != NONE
    pairs = set(zip(values.link[on_link].tolist(), values.order.device[on_link].tolist(), strict=True))
    return len(pairs) == values.links
