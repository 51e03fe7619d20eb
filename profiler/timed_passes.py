"""The timed passes at one micro-batch size, and backward in two parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from .clocks import Clock, DirectionTimes, LeadTuner, Vector
from .layer import tensors_used
from .memory import storages
from .passes import (
    CompositeWatcher,
    Context,
    CountedBytes,
    LayerTimes,
    OutputGradients,
    PassTimes,
    backward_failures,
    forward_layers,
    timeline,
)
from .torch_private import alias, backward_parts, storage_key, tree_flatten, tree_unflatten

if TYPE_CHECKING:
    from .layer import Layer
    from .operations import LayerOperations


# Backward in two parts, as zero-bubble schedules run it: the inputs' gradients, then the weights'.
#
# (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024.)
#
# Every layer runs as a stage of its own, on detached inputs, and PyTorch's pipelining runs its two parts
# (`stage_backward_input`, `stage_backward_weight`). Autograd never walks the graph of other layers, and equal
# layers take equal seconds wherever they stand. The order is that of a stage: all forwards, then the input
# gradients of all layers from the last to the first, then the weight gradients. An operation that computes
# both
# gradients at once (an autograd.Function of the user's) runs in both parts.

_Part = Callable[..., Any]
_EMPTY_CALLS = 5


@dataclass(frozen=True)
class PartTimes:
    """Seconds of one backward in two parts, an entry for each layer; the host's where the clock has its own.

    `input`: the gradient of what the layer was given; 0 for layers whose input needs none. `weight`: the
    gradients of its parameters, their accumulation included; 0 without parameters that need one.
    `pending_bytes`: of the gradients that the first part leaves for the second, each storage once, with the
    last layer that needs it. None: not counted, in journals of earlier versions.
    """

    input: Vector
    weight: Vector
    input_host: Vector | None = None
    weight_host: Vector | None = None
    pending_bytes: Vector | None = None


def run_parts(
    layers: Sequence[Layer],
    model_inputs: Any,
    gradients: OutputGradients,
    clock: Clock,
    *,
    leads: LeadTuner | None = None,
    context: Context = nullcontext,
) -> PartTimes:
    """Run one pass: forward, input gradients, weight gradients, which accumulate as in any backward.

    Every parameter ends with the same gradient as after a backward in one. Layers that share a parameter
    each compute their share of its gradient. `leads`: how long a device is held back; the pass reports to it.
    Raises as `run_layers` does.
    """
    leads = leads or LeadTuner()
    run_input, run_weight = backward_parts()
    stages = [_LayerStage(layer.module, run_input, run_weight) for layer in layers]
    chain = [replace(layer, module=stage) for layer, stage in zip(layers, stages, strict=True)]
    with context():
        output = forward_layers(chain, model_inputs, CompositeWatcher(), lambda _index, _tensors: None)
    arriving = list(zip(*gradients.of(output), strict=True))
    del output, model_inputs
    device = arriving[0][0].device
    with backward_failures():
        calls = _Calls(run_input, run_weight, device)
        call = calls.empty_seconds(clock)
        inputs = _timed(_input_parts(stages, arriving), calls, clock, leads.inputs.holds, len(layers))
        pending = np.array(_pending_bytes(stages), dtype=np.float64)
        weights = _timed(_weight_parts(stages), calls, clock, leads.weights.holds, len(layers))
    if not clock.has_host:
        return PartTimes(np.maximum(inputs.device - call, 0.0), weights.device, pending_bytes=pending)
    leads.observe_parts(inputs.timeline, weights.timeline)
    host = np.maximum(inputs.host - call, 0.0)
    return PartTimes(inputs.device, weights.device, host, weights.host, pending)


class _LayerStage(nn.Module):
    """A layer that runs as a stage of its own: its graph begins at detached inputs."""

    def __init__(self, module: nn.Module, run_input: _Part, run_weight: _Part) -> None:
        super().__init__()
        self._module, self._run_input, self._run_weight = module, run_input, run_weight
        registered = set(module.parameters())
        used = (tensor for tensor in tensors_used(module) if isinstance(tensor, nn.Parameter))
        self._borrowed = [parameter for parameter in dict.fromkeys(used) if parameter not in registered]
        self._sources: list[tuple[Tensor, Tensor]] = []
        self._groups: list[dict[str, Any]] = []

    def forward(self, value: Any) -> Any:
        leaves, form = tree_flatten(value)
        self._entering = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._inputs = [tensor.detach().requires_grad_() for tensor in self._entering]
        # The layer may overwrite an alias, but no leaf.
        fed = iter([alias(tensor) for tensor in self._inputs])
        is_fed = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        leaves = [next(fed) if fresh else leaf for leaf, fresh in zip(leaves, is_fed, strict=True)]
        return self._module(tree_unflatten(leaves, form))

    def receive(self, arriving: list[tuple[Tensor, Tensor]]) -> bool:
        """Take outputs with their gradients, out of the list. Return whether any leads to an input."""
        ends = {get_gradient_edge(tensor).node for tensor in self._inputs}
        onward = [_leads_to(get_gradient_edge(tensor).node, ends) for tensor, _ in arriving]
        pairs = list(zip(arriving, onward, strict=True))
        self._sources = [pair for pair, leads in pairs if not leads]
        # The part detaches what it is given, which no view can be.
        self._outputs = [(alias(tensor), gradient) for (tensor, gradient), leads in pairs if leads]
        arriving.clear()
        return bool(self._outputs)

    def input_part(self) -> None:
        outputs, starts = map(list, zip(*self._outputs, strict=True))
        self._outputs.clear()
        _, self._groups = self._run_input(outputs, starts, self._inputs, self._parameters_used())

    def leave(self) -> list[tuple[Tensor, Tensor]]:
        """The tensors that entered, with their gradients; they are forgotten here."""
        pairs = zip(self._entering, self._inputs, strict=True)
        left = [(tensor, leaf.grad) for tensor, leaf in pairs if leaf.grad is not None]
        del self._entering, self._inputs
        return left

    @property
    def pending(self) -> list[Tensor]:
        """The gradients that the second part starts from."""
        gradients = (gradient for group in self._groups for of_node in group["grads"] for gradient in of_node)
        return [*(one for one in gradients if one is not None), *(start for _, start in self._sources)]

    def weight_part(self) -> None:
        if self._groups:
            # Retained: operations may be common to several groups, and to `_sources`.
            self._run_weight(self._parameters_used(), self._groups, retain_graph=True)
        if self._sources:
            # No gradient of an input goes through: the weights have this backward to themselves.
            outputs, starts = zip(*self._sources, strict=True)
            torch.autograd.backward(outputs, starts)
        self._groups, self._sources = [], []

    def _parameters_used(self) -> Iterator[nn.Parameter]:
        yield from self._module.parameters()
        yield from self._borrowed


def _leads_to(root: Node, ends: set[Node]) -> bool:
    """Return whether autograd reaches one of `ends` from `root`."""
    visited, pending = {root}, [root]
    while pending and ends:
        node = pending.pop()
        if node in ends:
            return True
        following = {after for after, _ in node.next_functions if after is not None} - visited
        visited |= following
        pending += following
    return False


class _Calls:
    """Measure the two parts without a layer, called as a stage calls them."""

    def __init__(self, run_input: _Part, run_weight: _Part, device: torch.device) -> None:
        self._example = torch.ones(1, device=device, requires_grad=True)
        self._empty = _LayerStage(nn.Identity(), run_input, run_weight)
        self._small = _LayerStage(nn.LayerNorm(1, device=device), run_input, run_weight)

    def warm_up(self) -> None:
        """Run both parts of a small layer. In a stage they have just run for another layer."""
        self._prepare(self._small)
        self._small.input_part()
        self._small.weight_part()

    def empty_seconds(self, clock: Clock) -> float:
        """Host seconds of a first part without operations. A stage spends them once, not once a layer."""
        spent = []
        for _ in range(_EMPTY_CALLS):
            self.warm_up()
            self._prepare(self._empty)
            start = clock.stamp()
            self._empty.input_part()
            spent.append(clock.host_seconds(start, clock.stamp()))
        return median(spent)

    def _prepare(self, stage: _LayerStage) -> None:
        stage.receive([(stage(self._example), self._example.detach())])


_Parts = Iterator[tuple[int, Callable[[], None]]]


def _input_parts(stages: Sequence[_LayerStage], arriving: list[tuple[Tensor, Tensor]]) -> _Parts:
    """By layer, in the order they run; each prepares the next when it has run."""
    for index in reversed(range(len(stages))):
        stage = stages[index]
        if stage.receive(arriving):
            yield index, stage.input_part
        arriving = stage.leave()


def _weight_parts(stages: Sequence[_LayerStage]) -> _Parts:
    for index in reversed(range(len(stages))):
        if stages[index].pending:
            yield index, stages[index].weight_part


@dataclass(frozen=True)
class _Timed:
    device: Vector
    host: Vector
    timeline: DirectionTimes


def _timed(parts: _Parts, calls: _Calls, clock: Clock, holds: Vector | None, layers: int) -> _Timed:
    """Run the parts between stamps, and hold the device back before each."""
    clock.settle()
    both_idle = clock.stamp()
    marks: dict[int, tuple[Any, Any]] = {}
    for layer, part in parts:
        calls.warm_up()
        if holds is not None:
            clock.hold_back(float(holds[len(marks)]))
        start = clock.stamp()
        part()
        marks[layer] = start, clock.stamp()
    # Read before another stamp is set: the clock uses what it settled again.
    clock.settle()
    device, host = np.zeros(layers), np.zeros(layers)
    for layer, (start, end) in marks.items():
        device[layer], host[layer] = max(clock.seconds(start, end), 0.0), clock.host_seconds(start, end)
    return _Timed(device, host, timeline(clock, both_idle, list(marks.values())))


def _pending_bytes(stages: Sequence[_LayerStage]) -> list[int]:
    """By layer; each storage counts with the last layer that needs it."""
    counted: set[int] = set()
    rows = []
    for stage in reversed(stages):
        pending = storages(stage.pending)
        rows.append(sum(storage.nbytes() for storage in pending if storage_key(storage) not in counted))
        counted.update(map(storage_key, pending))
    return rows[::-1]


# The timed passes at one micro-batch size, and what they come to.

_DIRECTIONS: tuple[Literal["forward"], Literal["backward"]] = ("forward", "backward")


@dataclass
class TimedPasses:
    """All timed passes at one micro-batch size."""

    layers: list[LayerTimes] = field(default_factory=list)
    whole: list[PassTimes] = field(default_factory=list)
    parts: list[PartTimes] = field(default_factory=list)
    """Backward in two parts; empty where it was not measured."""
    first: list[PassTimes] = field(default_factory=list)
    """Passes of the whole where there are no gradients to add to; empty where it was not measured."""
    smaller: TimedPasses | None = field(default=None, repr=False)
    """The passes at the next smaller size (see `host_medians`)."""

    def __len__(self) -> int:
        return len(self.whole)

    def cut_to(self, rounds: int) -> None:
        """Forgets the passes of a round that was not finished."""
        for passes in (self.layers, self.whole, self.parts):
            del passes[rounds:]

    @property
    def device_share(self) -> float:
        """Of the seconds of a pass of the layers, the share in which the device computes."""
        bound = self.host_bound()
        return 1.0 if bound is None else bound[1] / bound[0]

    def medians(self, direction: Literal["forward", "backward"]) -> Vector:
        """Seconds of the layers, shape (layers,)."""
        return _median([getattr(times, direction) for times in self.layers])

    def host_medians(self, direction: Literal["forward", "backward"]) -> list[float] | list[None]:
        """The host's seconds for each layer; None where they are the device's.

        A launch takes as long whatever the micro-batch size; but a stream takes about a thousand ahead, and a
        host that launches more than that waits for the device. So where the device takes longer than the
        host, the host's seconds are at most those at the next smaller size. At the smallest they stay as
        they were seen.
        """
        rows = [getattr(times, f"{direction}_host") for times in self.layers]
        if rows[0] is None:
            return [None] * len(self.layers[0].forward)
        own = _median(rows)
        if self.smaller is None or not self._may_have_waited(direction):
            return list(map(float, own))
        return list(map(float, np.minimum(own, np.array(self.smaller.host_medians(direction)))))

    def _may_have_waited(self, direction: str) -> bool:
        """Whether the device took longer than the host."""
        rows = [
            [getattr(times, f"{direction}{kind}").sum() for kind in ("", "_host")] for times in self.layers
        ]
        device, host = _median(np.array(rows))
        return bool(device > host)

    def loss_medians(self) -> PassTimes | None:
        """Of the loss; None without one."""
        losses = [times.loss for times in self.layers if times.loss is not None]
        if not losses:
            return None
        rows = [astuple(loss) for loss in losses]
        columns = [
            None if column[0] is None else float(np.median(column)) for column in zip(*rows, strict=True)
        ]
        return self._launched_as_before(PassTimes(*columns))  # type: ignore[arg-type]

    def _launched_as_before(self, loss: PassTimes) -> PassTimes:
        """As `host_medians`."""
        before = self.smaller.loss_medians() if self.smaller is not None else None
        changed = {}
        for direction in _DIRECTIONS:
            host = getattr(loss, f"{direction}_host")
            if before is not None and host is not None and self._may_have_waited(direction):
                changed[f"{direction}_host"] = min(host, getattr(before, f"{direction}_host"))
        return replace(loss, **changed)

    def part_medians(self, part: Literal["input", "weight"]) -> list[float] | list[None]:
        """Seconds of each layer's input gradients, or weight gradients; None where they were not measured."""
        if not self.parts:
            return [None] * len(self.layers[0].forward)
        return list(map(float, _median([getattr(times, part) for times in self.parts])))

    def pending_bytes(self) -> list[int] | None:
        """By layer; None where it was not counted. Every pass counts the same."""
        counted = [times.pending_bytes for times in self.parts if times.pending_bytes is not None]
        return list(map(int, counted[0])) if counted else None

    def backward_parts_ratio(self) -> float | None:
        """Both parts of all layers over the whole model's backward; None where either was not measured."""
        _, backward = self.whole_medians()
        if not self.parts or backward <= 0:
            return None
        both = _median([times.input for times in self.parts]), _median([times.weight for times in self.parts])
        return float(both[0].sum() + both[1].sum()) / backward

    def host_bound(self) -> tuple[float, float] | None:
        """Host seconds to launch a pass of the layers, and the device's, where the host's are more."""
        host = device = 0.0
        for direction in _DIRECTIONS:
            launched = [seconds for seconds in self.host_medians(direction) if seconds is not None]
            if not launched:
                return None
            host += sum(launched)
            device += float(self.medians(direction).sum())
        return (host, device) if host > device else None

    def spreads(self) -> list[float] | list[None]:
        """Interquartile range of forward + backward over its median, by layer; None: not timed twice."""
        if len(self.layers) < 2:
            return [None] * len(self.layers[0].forward)
        return list(map(float, spread(np.array([times.forward + times.backward for times in self.layers]))))

    def whole_medians(self) -> tuple[float, float]:
        """Of forward and of backward."""
        return (
            float(np.median([times.forward for times in self.whole])),
            float(np.median([times.backward for times in self.whole])),
        )

    def first_backward(self) -> float | None:
        """Median of the whole's backward that adds to no gradients; None where it was not measured."""
        return float(np.median([times.backward for times in self.first])) if self.first else None

    def whole_spread(self) -> float | None:
        """Return the spread of the whole model's passes. None if there are fewer than two."""
        if len(self.whole) < 2:
            return None
        return float(spread(np.array([[times.forward + times.backward] for times in self.whole]))[0])

    def uncertainty(self) -> float:
        """Relative standard error of the median of a pass' seconds, of the layers' or the whole's passes.

        The larger of both. 1.2533 / sqrt(n) standard deviations (the asymptotic one of a normal's median),
        and the standard deviation from the interquartile range, which is 1.349 of it.
        """
        sums = np.array([[times.forward.sum() + times.backward.sum()] for times in self.layers])
        widest = max(float(spread(sums)[0]), self.whole_spread() or 0.0)
        return float(1.2533 * widest / 1.349 / np.sqrt(len(self)))


def link_sizes(ascending: Sequence[TimedPasses]) -> None:
    """Tells each size of the next smaller one."""
    for smaller, rounds in pairwise(ascending):
        rounds.smaller = smaller


def _median(rows: list[Vector] | Vector) -> Vector:
    return np.asarray(np.median(np.array(rows), axis=0), dtype=np.float64)


def spread(samples: Vector) -> Vector:
    """Interquartile range over the median along axis 0; 0 where the median is 0."""
    low, middle, high = np.percentile(samples, (25, 50, 75), axis=0)
    wide = np.zeros_like(middle)
    np.divide(high - low, middle, out=wide, where=middle > 0)
    return np.asarray(wide, dtype=np.float64)


@dataclass
class SizeResult:
    """All that was found at one micro-batch size.

    `rounds` has no passes on the meta device, and none of the whole model where that is measured in segments.
    """

    size: int
    counted: CountedBytes
    rounds: TimedPasses = field(default_factory=TimedPasses)
    round_seconds: list[float] = field(default_factory=list)
    """Host seconds of each round, everything included."""
    parts_left_out: str = ""
    """Reason for no backward in two parts, where one was to be measured."""
    reserved_bytes: int | None = None
    """Most that CUDA's caching allocator took of the device; None for other devices."""
    pending_gradient_bytes: list[int] | None = None
    """By layer, where the timed passes did not count them. None: not counted."""
    operations: Sequence[LayerOperations] | None = None
    """Operations of an estimate, by layer, and last those of the loss, if there is one."""
