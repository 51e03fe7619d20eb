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
    """Costs of any program in seconds.

    For many candidates every array except `links` has one more axis at the end.

    By (device, chunk, micro-batch), where a constant axis may have length 1:

    - `forward`, `backward`, and `weight` if the gradient of the weights is computed separately. Then
      `backward` is the gradient of the input, and a B that is not split takes both.
    - `accumulation`: part of `backward` (or of `weight`, if given) that the first backward of a chunk saves,
      because there are no gradients to add to.
    - `recompute`: share (0 to 1) of the forward that is recomputed at the beginning of B.
    - `forward_launch`, `backward_launch`, `weight_launch`: host seconds. None if the host is never late.
    - `recompute_launch`: first part of `backward_launch`, which launches the recomputed forward. None for no
      such part.

    By (pipe, cut), with a cut after each place but the last, where the axis of the pipe may have length 1:

    - `forward_occupancy` (bytes / bandwidth) and `forward_latency` of activations, `backward_...` of their
      gradients. A transfer between chunks of one device is free.

    By (device, chunk):

    - `all_reduce` of the gradients.
    - `unshard`: gathering the chunk's weights from replicas, with at most `unsharded_chunks` gathered at a
      time (`list_unshards`). None for no gathers. A device's gathers follow one another while its actions
      run, each from the end of the previous action. An action waits for the gather of its chunk.

    By device:

    - `overhead` of each action, `optimizer` of an update.

    Other fields:

    - `links` (devices, devices): link from one device to another, -1 for one that carries any number of
      transfers at a time. None if each ordered pair has a separate link. A link carries one transfer at a
      time, in the order in which they are ready, for its occupancy. The latency follows and occupies nothing.
    - `reduce_loads`: seconds of each shared port by part of the layers, for all-reduces that share ports with
      other traffic (see `PortSharing`).
    - `port_seconds`: seconds of the most loaded port. No step is shorter.
    - `transfers`: activity of a device during a transfer.
        "overlapped": it continues computing.
        "blocking": a device starts nothing until the result of its last action has arrived. The receiver
        computes meanwhile.
        "blocking-receive": a transfer begins when the action before its receiving one has also ended on the
        receiving device, which waits. The sender computes meanwhile.
        "rendezvous": both. A device posts the send of one action and the receive for the next together when
        the former ends (as torch.distributed.batch_isend_irecv). A transfer begins when both sides have
        posted it, and the next action when both have arrived. Some schedules deadlock and are refused.
    - `hosts`: who launches actions ahead of the devices. "one" process drives all devices, forwards one after
      another and backwards from a thread per device. With "each", the host of each device launches in the
      order of its list (see the module). An action neither starts before its launch starts nor ends before
      its launch ends.
    - `buckets`: a chunk's gradients are ready when its last backward ends, or in `buckets` equal parts while
      it runs. All-reduces run at the same time as everything else, one at a time on each device. If several
      places compute the same part of the layers (replicas, Chimera's directions), all of them take part.
    - `tied`: sums of the gradients of weights that several parts use, one after another. Each begins when all
      its devices have run their lists and ended their all-reduces and earlier sums.
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
        """Number of candidates. None for costs of one candidate without that axis."""
        return self.forward.shape[3] if self.forward.ndim == 4 else None

    def arrays(self) -> dict[str, Array]:
        """Return all given seconds and shares by name."""
        arrays = ((name, getattr(self, name)) for name in _ARRAYS)
        return {name: values for name, values in arrays if values is not None}

    def candidate(self, index: int) -> Costs:
        """Return the costs of candidate number `index`."""
        arrays: dict[str, Any] = {name: values[..., index] for name, values in self.arrays().items()}
        return replace(self, **arrays)

    def check(self, program: Program) -> None:
        """Check the values and the kind of transfers.

        Raises:
            UsageError: A value is invalid, or the kind of transfers is unknown.
        """
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
    """Return the (devices, 1, micro-batches) share of the forward that every B recomputes.

    Args:
        mode: One word, or one per device: "never", "always", or "except_last" for all micro-batches but the
            last (torchgpipe).
        program: Program of the pipeline.
    """
    shares = np.zeros((program.devices, 1, program.micro_batches))
    for device_shares, word in zip(
        shares, [mode] * program.devices if isinstance(mode, str) else mode, strict=True
    ):
        device_shares[:] = 0.0 if word == "never" else 1.0
        if word == "except_last":
            device_shares[:, -1] = 0.0
    return shares


def check_finite(name: str, values: Any) -> None:
    """Check that all values are finite and none is negative.

    Raises:
        UsageError: A value is not finite or is negative.
    """
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
        name: value[:, None] if isinstance(value, np.ndarray) else value for name, value in launches.items()
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
    """Return the costs of a program from the seconds of its stages, with transfers that take only latency.

    Stages are counted along each pipe (Chimera: both directions have the same first stage). If a device has
    several places of a pipe, each takes an equal part of the stage's seconds.

    Args:
        program: Program of the pipeline.
        forward: Seconds of a forward, one value or one per stage.
        backward: Seconds of a backward, or of the gradient of the input if `weight` is given.
        weight: Seconds of the gradient of the weights. None for a backward in one part.
        transfer_latency: Latency of every transfer in seconds.
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
    """Launch times of each action in seconds.

    Attributes:
        start: (actions,) or (actions, candidates) starts.
        end: Ends, shaped as `start`.
        repeat: First part of the launch, which launches the recomputed forward. None if each device has a
            host.
    """

    start: Array
    end: Array
    repeat: Array | None


def time_launches(order: Order, costs: Costs, seconds: Array, repeat: Array | None) -> Launches:
    """Return the launch times of all actions.

    Args:
        order: Actions in the order of the clock.
        costs: Costs of the program.
        seconds: (actions,) or (actions, candidates) seconds of each launch, including recomputation.
        repeat: Part of `seconds` that launches the recomputed forward. None without recomputation.
    """
    if costs.hosts == "one":
        return _of_process(order, seconds, repeat)
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    for device in range(order.program.devices):
        on_device = np.flatnonzero(order.device == device)
        end[on_device] = np.cumsum(seconds[on_device], axis=0)
        start[on_device] = np.concatenate([np.zeros_like(end[on_device[:1]]), end[on_device[:-1]]])
    return Launches(start, end, None)


def _of_process(order: Order, seconds: Array, repeat: Array | None) -> Launches:
    """Return the launch times if one process drives all devices.

    `called` is the launch end of the last forward, `done` that of the last backward, and `python` that of the
    last forward or recomputation.
    """
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
    for kind, device, source, launch_seconds, again in zip(*columns, strict=True):
        if kind == 0:
            begins = later(called, done)
            finishes = called = python = begins + launch_seconds
        else:
            begins = later(threads[device], called)
            if source != NONE:
                begins = later(begins, ends[source])
            if again is not None:
                begins = later(begins, python * (again > 0))
                python = later(python, (begins + again) * (again > 0))
            finishes = threads[device] = begins + launch_seconds
            done = later(done, finishes)
        starts.append(begins)
        ends.append(finishes)
    return Launches(np.array(starts), np.array(ends), repeat)


def preceding_launches(order: Order, costs: Costs, launches: Launches) -> Indices:
    """Return the (actions,) action whose launch or recomputation launch must end before each launch starts.

    -1 stands for the beginning of the step.
    """
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
    """Return the earlier action that ends last among those that count, for every action.

    -1 if there is none.
    """
    values = np.where(counts, until, -1.0)
    longest = np.append(-1.0, np.maximum.accumulate(values))[:-1]
    records = np.where(values > longest, np.arange(len(values)), NONE)
    return np.append(NONE, np.maximum.accumulate(records))[:-1]


@dataclass(frozen=True, eq=False)
class ActionCosts:
    """Costs of every action in the order of the clock.

    Arrays have shape (actions,) or (actions, candidates).

    Attributes:
        order: Actions in the order of the clock.
        costs: Costs of the program.
        duration: Seconds of each action.
        cut: (actions,) row of the transfer in `occupancy` and `latency`.
        occupancy: Seconds for which a transfer occupies its link, by row.
        latency: Latency of a transfer in seconds, by row.
        link: (actions,) link of the transfer, -1 for none.
        links: Number of links.
        launches: Launch times. None if the host is never late.
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
    """Return the costs of every action of a program.

    Raises:
        UsageError: The costs are invalid.
    """
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
    """Return the values of a table by (device, chunk, micro-batch) for these actions."""
    columns = (order.device, order.chunk, order.micro_batch)
    index = tuple(
        column[actions] if length > 1 else 0 for column, length in zip(columns, table.shape[:3], strict=True)
    )
    values: Array = table[index]
    return values


def _shares(order: Order, like: Array) -> Array:
    """Return the size of each action's micro-batch relative to a whole one, to broadcast with `like`."""
    shares = np.asarray(order.program.shares, dtype=np.float64)[order.micro_batch]
    return shares.reshape(-1, *(1,) * (like.ndim - 1))


def _by_kind(order: Order, costs: Costs, forward: Array, backward: Array, weight: Array | None) -> Array:
    """Return the values of three tables by action.

    A backward that is not split also gets the weight's value.
    """
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
    """Return the (actions,) seconds of the forward that each action recomputes, for a whole micro-batch."""
    seconds, (_, backwards, _) = _empty(order, costs), order.of_kind
    if costs.recompute is not None:
        seconds[backwards] = _at(order, costs.recompute, backwards) * _at(order, costs.forward, backwards)
    return seconds


def update_actions(order: Order) -> Indices:
    """Return the actions after which a chunk's weights are updated at once (asynchronous schedules)."""
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
    """Return the row of each action's transfer, and the occupancy and latency by row."""
    occupancy = _by_cut(order, costs, costs.forward_occupancy, costs.backward_occupancy)
    latency = _by_cut(order, costs, costs.forward_latency, costs.backward_latency)
    if order.program.shares is None:
        return order.cut, occupancy, latency
    occupancy = occupancy[order.cut]
    return np.arange(len(order)), occupancy * _shares(order, occupancy), latency[order.cut]


def _by_cut(order: Order, costs: Costs, forward: Array | None, backward: Array | None) -> Array:
    """Return both directions in one table, with a row of zeros at the end for actions that send nothing."""
    pipes, cuts = len(order.program.pipes), order.program.slots - 1
    candidates = () if costs.candidates is None else (costs.candidates,)
    table = np.zeros((2 * pipes * cuts + 1, *candidates))
    for direction, amounts in enumerate((forward, backward)):
        if amounts is not None:
            rows = np.broadcast_to(amounts, (pipes, cuts, *candidates)).reshape(pipes * cuts, *candidates)
            table[direction * pipes * cuts : (direction + 1) * pipes * cuts] = rows
    return table


def _links(order: Order, costs: Costs, cut: Indices, occupancy: Array) -> Indices:
    """Return the link of each action's transfer, numbered from 0, or -1 if no transfer ever occupies it."""
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
    """Return whether every link serves in an order that is known beforehand: that of the clock.

    That is so if all transfers of a link come from one device, whose actions end one after another. It is not
    so if a transfer waits for its receiver. Gathers of weights need the event loop.
    """
    if values.costs.transfers in ("rendezvous", "blocking-receive") or values.costs.unshard is not None:
        return False
    if values.costs.links is None:
        return True
    on_link = values.link != NONE
    pairs = set(zip(values.link[on_link].tolist(), values.order.device[on_link].tolist(), strict=True))
    return len(pairs) == values.links
