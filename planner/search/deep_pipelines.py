"""Plans of many stages with as many devices each, whose layers are divided evenly: where there are too many
devices and layers for a search.

All stages have r devices of the order (of slower kinds also more, so that a stage's layers take as long),
and as many stages as that makes. The layers are divided so that the longest stage is the shortest that may
be: for any number of seconds every stage takes what it can, from the first on, and the least that suffices is
found by halving. Which stages have to recompute is known once a plan is made ready; then it is divided again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...cost_models.memory import Recompute
from ..candidate import Proposal
from ..stage_table import Floats, Indices
from .space import Space, divide_batch, narrow_space
from .stage_recompute import choose_modes, stage_modes
from .subproblem import Family

MOST_TRIED, MOST_FITTING = 60, 4
"""Plans that are made ready, those with the shortest estimates; and those that fit."""
ROUNDS = 3
"""Times that the layers are divided for the recomputation that the last division needs."""
HALVINGS = 16
MOST_STAGES = 512


@dataclass(frozen=True, eq=False)
class _EvenStages:
    """Stages on consecutive devices of a family's order: by stage, the devices and what its seconds are
    multiplied by."""

    space: Space
    family: Family
    replicas: tuple[int, ...]
    scales: tuple[float, ...]

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """By stage."""
        ends = np.cumsum(self.replicas).tolist()
        ranks = self.family.placement.ranks
        return tuple(ranks[end - count : end] for end, count in zip(ends, self.replicas, strict=True))

    @cached_property
    def cut_points(self) -> Indices:
        """Layers before each place where a stage may end, the last behind all layers."""
        inner = np.flatnonzero(self.space.chain.cut_after[:-1]) + 1
        return np.append(inner, len(self.space.chain))

    def _before(self, replicas: int, mode: Recompute) -> Floats:
        """By cut point, 0 in front, the seconds of a micro-batch of all layers before it."""
        costs = self.space.table(divide_batch(self.family.config.micro_batch_size, replicas)).costs
        each = costs.forward_seconds * (1 if mode == "never" else 2) + costs.backward_seconds
        before: Floats = np.append(0.0, np.append(0.0, np.cumsum(each))[self.cut_points])
        return before

    @property
    def least_seconds(self) -> float:
        """Of a micro-batch on the longest stage, if layers could be parted anywhere."""
        whole = {count: float(self._before(count, "never")[-1]) for count in set(self.replicas)}
        rates = [1 / (whole[count] * scale) for count, scale in zip(self.replicas, self.scales, strict=True)]
        return 1 / sum(rates)

    def divide(self, modes: Sequence[Recompute]) -> tuple[int, ...] | None:
        """The ends of the stages; None where stages are left without layers."""
        tables = {key: self._before(*key) for key in set(zip(self.replicas, modes, strict=True))}
        own = [tables[key] for key in zip(self.replicas, modes, strict=True)]
        low, high = 0.0, self.least_seconds
        while (ends := self._pack(own, high)) is None:
            if high > max(float(table[-1]) for table in own) * max(self.scales):
                return None
            low, high = high, 2 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            packed = self._pack(own, middle)
            low, high, ends = (middle, high, ends) if packed is None else (low, middle, packed)
        return tuple(self.cut_points[ends].tolist())

    def _pack(self, tables: Sequence[Floats], longest: float) -> Indices | None:
        """The cut point at which each stage ends, as late as so many seconds allow, but that each stage after
        it has a layer; None where layers are left."""
        last, at, ends = len(self.cut_points) - 1, 0, []
        for number, (table, scale) in enumerate(zip(tables, self.scales, strict=True)):
            end = int(np.searchsorted(table, table[at] + longest / scale, side="right")) - 1
            end = min(end, last + 1 - (len(tables) - 1 - number))
            if end <= at:
                return None
            ends.append(end - 1)
            at = end
        return np.array(ends) if at == last + 1 else None


def propose_deep(space: Space, families: Iterable[Family], limit: Callable[[], float]) -> Iterator[Proposal]:
    """The plans, those with the shortest estimates first; of those that may take less than `limit`."""
    estimates = list[tuple[float, int, _EvenStages]]()
    for family in families:
        space.budget.check()
        for shape in _shapes(space, family):
            steps = family.config.micro_batches + len(shape.replicas) - 1
            estimates.append((shape.least_seconds * steps, len(estimates), shape))
    fitting = 0
    for seconds, _, shape in sorted(estimates, key=lambda row: row[:2])[:MOST_TRIED]:
        if seconds >= limit() or fitting == MOST_FITTING:
            return
        fits = False
        for proposal in _as_recomputed(shape):
            fits = True
            yield proposal
        fitting += fits


def _as_recomputed(shape: _EvenStages) -> Iterator[Proposal]:
    """The plan, and others divided for what its stages recompute."""
    config, devices = shape.family.config, shape.devices
    assumed: tuple[Recompute, ...] = (stage_modes(config)[0],) * len(devices)
    for number in range(ROUNDS):
        shape.space.budget.check()
        shape.space.budget.spend(2e6 + 2e4 * len(shape.cut_points) + 6e4 * len(devices))
        ends = shape.divide(assumed)
        if ends is None:
            return
        proposal = Proposal(config, ends, devices)
        modes = choose_modes(narrow_space(shape.space, ends), proposal)
        if modes is not None:
            yield proposal
        elif number == 0 and len(stage_modes(config)) > 1:
            always: Recompute = "always"
            modes = (always,) * len(ends)
        if modes is None or modes == assumed:
            return
        assumed = modes


def _shapes(space: Space, family: Family) -> Iterator[_EvenStages]:
    """With as many replicas on all kinds; and of a slower kind more, in proportion to its speed."""
    size, ranks = family.config.micro_batch_size, family.placement.ranks
    scales = np.array([kind.seconds_scale for kind in space.topology.kinds])
    each = scales[space.topology.kind_numbers(ranks)]
    most = min(MOST_STAGES, len(space.chain))
    counts = [count for count in family.replicas if count <= size and space.fits_someone(size, count)]
    shapes = set[tuple[int, ...]]()
    for count in (own for own in counts if len(ranks) <= own * most):
        for proportional in (False, True) if len(set(each.tolist())) > 1 else (False,):
            replicas, at = list[int](), 0
            while at < len(ranks):
                target = count * each[at] / each.min() if proportional else count
                own = max((n for n in counts if n <= target), default=counts[0])
                if at + own > len(ranks):
                    break
                replicas.append(own)
                at += own
            if replicas and tuple(replicas) not in shapes:
                shapes.add(tuple(replicas))
                ends = np.cumsum(replicas)
                slowest = [
                    float(each[end - own : end].max()) for end, own in zip(ends, replicas, strict=True)
                ]
                yield _EvenStages(space, family, tuple(replicas), tuple(slowest))
