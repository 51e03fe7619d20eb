"""Whether there is a way to cut the layers into parts with which a step takes no more than so many seconds.

A part lies between two cuts and runs on r devices, its replicas; a plan of any synchronous schedule has some
parts, each on devices of its own or, where a schedule has several a device, beside others. With the letters
of `universal_bound`, e for what follows a part's last backward on its devices (of the all-reduce over its
replicas what cannot run beside that backward), and T for the seconds asked of, a part is on no plan unless

    lead + M w + e <= T            its first action is an F that came through the layers before it
    lead + M (f + b) + trail <= T  its last B goes back through them
    M launches + e <= T            what its host launches
    its least bytes fit            weights, gradients, states and the activations of one micro-batch

with M shared by the copies of a layer. The parts of a plan share its devices, each as fast as it is:

    sum of r M w <= T capacity                               of any schedule
    sum of r (M w + lead + max(e, trail)) <= T capacity      one part a device, which waits meanwhile (where
                                                             weights' gradients may follow the last B, without
                                                             the trail)

    sum of r e <= T D                                        as each device has one all-reduce at a time
    sum of r (share of a device's memory) <= D               of states, and a micro-batch that waits

The least of the left side over all partitions is a shortest way through the cuts, also of mixtures of two
of them (Everett, Operations Research 11(3), 1963). Of one part a device there
is a closer question, which takes longer: a dynamic programme on (devices used, layers done) that keeps the
least lead, and the least lead and trail, of the parts before, transfers between them included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from ..cost_models.memory import Amount, StageBytes, Training, total, with_reserve
from .pipeline_config import FIRST_LAYERS
from .search.relaxed_stages import exposed_exchange
from .search.space import Space, divide_batch
from .stage_table import Floats, StageTable, ledger_options

SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
"""Of the devices' time, the rest of their network's or memory, in sums of both."""


@dataclass(frozen=True, eq=False)
class PlanSettings:
    """What the plans have in common.

    Up to `gpus` devices, which together do `capacity` times the least work in a second, the slowest `slowest`
    times; `counts` of replicas; `micro_batches` of `size` samples; parts in `copies`, which hold `one_model`
    or several; whether a backward `splits`; `modes` of recomputation: always, never, first_layers or any.
    `straight`: one part a device. `first`: the share of a micro-batch that is first on its way. `layers`: by
    number of replicas, seconds of a micro-batch, (layers,) each: f, b and w.
    """

    space: Space
    gpus: int
    capacity: float
    slowest: float
    counts: tuple[int, ...]
    size: int
    micro_batches: int
    copies: int
    one_model: bool
    splits: bool
    modes: str
    straight: bool
    first: float
    layers: Sequence[tuple[Floats, Floats, Floats]]


@dataclass(frozen=True, eq=False)
class _Parts:
    """On so many replicas, (cut points, cut points) each: f, f + b, w (inf where no part may be), e, the
    host seconds of a micro-batch, and the share of a device's memory that is held for long."""

    replicas: int
    forward: Floats
    around: Floats
    work: Floats
    after: Floats
    launches: Floats
    memory: Floats


Exchanges = dict[tuple[int, int, bool], Floats]
"""Seconds of e, (cut points, cut points): by replicas, samples of one, and whether a backward hides some."""


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of the layers under some settings; `exchanges`: those that were worked out before."""

    settings: PlanSettings
    exchanges: Exchanges

    @property
    def entries(self) -> float:
        """Of the tables of one question."""
        return 4 * len(self.settings.counts) * (len(self._cut_points) ** 2 + 3_000.0)

    @property
    def close_entries(self) -> float:
        """Of those of the closer question."""
        own = self.settings
        rows = sum(own.gpus - count + 1 for count in own.counts)
        return rows * (len(self._cut_points) ** 2 + 3_000.0)

    def may_share(self, seconds: float) -> bool:
        """Whether there may be one whose parts together have time on the devices, and on their network."""
        own, count = self.settings, self.settings.micro_batches / self.settings.copies
        lead, trail = self._lead[:, None], self._trail[:, None]
        each = []
        for parts in self._parts:
            passes = count * np.minimum(parts.work, parts.around)
            fits = lead + count * parts.work + parts.after <= seconds
            fits &= (lead + passes + trail <= seconds) & (count * parts.launches + parts.after <= seconds)
            needs = own.micro_batches * np.where(fits, parts.work, 0.0)
            if own.straight:
                behind = parts.after if own.splits else np.maximum(parts.after, trail)
                needs = needs + own.slowest * (lead + behind)
            sent = own.copies * parts.replicas * parts.after
            each.append((fits, parts.replicas * needs, sent, parts.replicas * seconds * parts.memory))

        def has_room(which: int, share: float) -> bool:
            costs = [share * own[1] + (1 - share) * own[which] for own in each]
            least = _least_sum([np.where(own[0], cost, inf) for own, cost in zip(each, costs, strict=True)])
            return least <= (share * own.capacity + (1 - share) * own.gpus) * seconds * (1 + 1e-9)

        return all(has_room(which, share) for which in (2, 3) for share in SHARES)

    def may_follow(self, seconds: float) -> bool:
        """Whether there may be one of straight pipelines whose parts have devices of their own."""
        own = self.settings
        last = len(self._cut_points) - 1
        lead, both = (np.full((own.gpus + 1, last + 1), inf) for _ in range(2))
        lead[0, 0] = both[0, 0] = 0.0
        for used in range(1, own.gpus + 1):
            for parts in self._parts:
                count = parts.replicas
                if count > used or not np.isfinite(lead[used - count]).any():
                    continue
                before, both_before = lead[used - count][:, None], both[used - count][:, None]
                fits = (before + own.micro_batches * parts.work + parts.after <= seconds) & (
                    both_before + own.micro_batches * np.minimum(parts.work, parts.around) <= seconds
                )
                fits &= own.micro_batches * parts.launches + parts.after <= seconds
                ahead = np.where(fits, before + parts.forward, inf).min(axis=0) + self._cuts
                there_and_back = np.where(fits, both_before + parts.around, inf).min(axis=0) + 2 * self._cuts
                lead[used] = np.minimum(lead[used], ahead)
                both[used] = np.minimum(both[used], there_and_back)
            if np.isfinite(lead[used, last]):
                return True
        return False

    @cached_property
    def _table(self) -> StageTable:
        return self.settings.space.table(self.settings.space.chain.sizes[0])

    @property
    def _cut_points(self) -> tuple[int, ...]:
        return self._table.cut_points

    @property
    def _shape(self) -> tuple[int, int]:
        return self._table.valid.shape

    @cached_property
    def _lead(self) -> Floats:
        """(cut points,): the least seconds of the first micro-batch, or its first share, up to there."""
        return self._before(0)

    @cached_property
    def _trail(self) -> Floats:
        """(cut points,): the same of a last one, from there back."""
        return self._before(1)

    def _before(self, which: int) -> Floats:
        own = np.min([figures[which] for figures in self.settings.layers], axis=0)
        sums: Floats = self.settings.first * np.append(0.0, np.cumsum(own))[list(self._cut_points)]
        return sums

    @cached_property
    def _parts(self) -> list[_Parts]:
        """By number of replicas; without those on which no part fits."""
        each = zip(self.settings.counts, self.settings.layers, strict=True)
        parts = [self._of_count(count, *figures) for count, figures in each]
        return [own for own in parts if np.isfinite(own.work).any()]

    def _of_count(self, count: int, forward: Floats, back: Floats, work: Floats) -> _Parts:
        own, table = self.settings, self._table
        space = own.space
        per_replica = space.table(divide_batch(own.size, count))
        after = self._after(count)
        if own.straight:
            after = after + space.least_tied(table, count)
        need, memory = self._memory(count, per_replica)
        again = 1 + (own.modes == "always")
        return _Parts(
            count,
            table.stage_sums(forward),
            table.stage_sums(forward + back),
            np.where(space.usable & (need <= 1 + 1e-12), table.stage_sums(work), inf),
            after,
            again * per_replica.forward_launch + per_replica.backward_launch,
            memory,
        )

    def _after(self, count: int) -> Floats:
        """e of parts on so many replicas."""
        own, space = self.settings, self.settings.space
        batch = divide_batch(own.size, count)
        # Nothing hides an all-reduce that waits for other devices' backwards.
        is_joint = own.copies > 1 and own.one_model and not space.zero
        key = (count * (own.copies if is_joint else 1), batch, not is_joint)
        if key not in self.exchanges:
            kinds, table = space.topology.kinds, space.table(batch)
            each = [space.on(kind, batch, lambda costs: costs.backward_seconds) for kind in kinds]
            longest = 0.0 * each[0] if is_joint else np.maximum.reduce(each)
            self.exchanges[key] = exposed_exchange(space, key[0], table, longest, exact=True)
        return self.exchanges[key]

    def _memory(self, count: int, table: StageTable) -> tuple[Floats, Floats]:
        """The shares of a device's memory that parts need by themselves, with one micro-batch; and without
        what comes and goes, which the parts of a device need together: when a micro-batch has passed the
        last of them, all hold it."""
        own, stage = self.settings, table.stage_bytes
        space, nothing = own.space, np.zeros(self._shape)
        limits = [inf if kind.memory_bytes is None else kind.memory_bytes for kind in space.topology.kinds]
        limit = min(max(limits), inf if space.memory_limit is None else space.memory_limit)
        if limit == inf:
            return nothing, nothing
        contexts = [ledger_options(kind, space.dtype)["context_bytes"] for kind in space.topology.kinds]
        training = Training(space.optimizer, space.number_bytes, count * own.copies, space.zero)
        temporaries = training.step_temporaries(stage)
        states = total(training.states(stage))
        if not space.zero:
            states = states + training.exchange_bytes(stage)
        at_work = np.maximum(self._at_work(stage), 0.0 if temporaries is None else temporaries)
        waits = states + (self._waiting(stage) if own.copies == 1 else 0.0)
        room = max(limit - min(contexts), 0.0)
        with np.errstate(divide="ignore"):
            each = [total(with_reserve({"bytes": amount}, 0)) / room for amount in (states + at_work, waits)]
        need, share = (nothing + amount for amount in each)
        return need, share

    def _at_work(self, stage: StageBytes) -> Amount:
        """Bytes of one micro-batch, or its first share, and the workspace of its forward, or of its whole
        backward: all that its forward saves or, where it runs again, what is kept for that and, of a whole
        backward, what it saves then."""
        own = self.settings
        if own.modes == FIRST_LAYERS:
            return own.first * stage.input
        whole = stage.saved + stage.saved_input
        again = stage.input if own.splits else stage.input + whole
        activations = {"never": whole, "always": again}.get(own.modes, np.minimum(whole, again))
        return own.first * activations + stage.workspace

    def _waiting(self, stage: StageBytes) -> Amount:
        """Bytes of a micro-batch, or its first share, between its forward and its backward."""
        own, whole = self.settings, stage.saved + stage.saved_input
        return own.first * (whole if own.modes == "never" else np.minimum(whole, stage.input))

    @cached_property
    def _cuts(self) -> Floats:
        """(cut points,): seconds of a transfer: a replica of the smaller side sends its share, through no
        more than a port of every level."""
        own = self.settings
        levels = own.space.topology.levels
        together = sum(level.link.bandwidth_bytes_per_second for level in levels)
        latency = min(level.link.latency_seconds for level in levels)
        per_replica_batches = {divide_batch(own.size, count) for count in own.counts}
        sent = np.min([own.space.table(batch).crossing for batch in per_replica_batches], axis=0)
        cuts: Floats = sent / together + latency
        cuts[-1] = 0.0
        return cuts


def _least_sum(costs: Sequence[Floats]) -> float:
    """Over all partitions, of each part the least of its costs, (cut points, cut points) each; inf where
    there are none."""
    if not costs:
        return inf
    least = np.minimum.reduce(costs)
    sums = np.full(len(least), inf)
    sums[0] = 0.0
    for end in range(1, len(sums)):
        sums[end] = (sums[:end] + least[:end, end]).min()
    return float(sums[-1])
