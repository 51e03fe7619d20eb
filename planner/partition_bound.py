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

and a cut is in none over which M micro-batches cannot be sent in time, or after which the last one does not
come back, unless both sides are on the same devices. The least of the left side over all partitions is a
shortest way through the cuts, also of mixtures of two of them (Everett, Operations Research 11(3), 1963). Of
one part a device there is a closer question, which takes longer: a dynamic programme on (devices used, layers
done) that keeps the least lead, and the least lead and trail, of the parts before, transfers between them
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from .plan_settings import PlanSettings
from .search.least_collectives import fastest_transfer
from .search.least_exchange import LeastExchanges
from .search.space import divide_batch
from .stage_table import Floats, StageTable

Mask = npt.NDArray[np.bool_]
SHARES = (0.75, 0.5, 0.25, 0.0)
"""Of the devices' time, the rest of their network's or memory, in sums of both."""


@dataclass(frozen=True, eq=False)
class _Parts:
    """On so many replicas, (cut points, cut points) each: f, f + b, w (inf where no part may be), e, the
    host seconds of a micro-batch, and the share of a device's memory that is held for long; (cut points,):
    bytes that a replica sends; and w of all layers."""

    replicas: int
    forward: Floats
    around: Floats
    work: Floats
    after: Floats
    launches: Floats
    memory: Floats
    crossing: Floats
    whole: float

    def ends_by(self, seconds: float, lead: Floats, micro_batches: float) -> Mask:
        """(cut points, cut points): whether the work of so many micro-batches, which begins after `lead`, and
        its launches, and then the exchange, may be done by these seconds."""
        with np.errstate(invalid="ignore"):  # no micro-batch on a part that may not be
            in_time: Mask = lead + micro_batches * self.work + self.after <= seconds
        return in_time & (micro_batches * self.launches + self.after <= seconds)


@dataclass(frozen=True, eq=False)
class Partitions:
    """The partitions of the layers under some settings; `exchanges`: e of any part."""

    settings: PlanSettings
    exchanges: LeastExchanges

    @property
    def entries(self) -> float:
        """Of the tables of one question."""
        return 4 * len(self.settings.counts) * self.part_entries

    @property
    def part_entries(self) -> float:
        """Of that of a part."""
        return len(self._cut_points) ** 2 + 3_000.0

    @property
    def close_entries(self) -> float:
        """Of those of the closer question."""
        own = self.settings
        rows = sum(own.gpus - count + 1 for count in own.counts)
        return rows * self.part_entries

    def may_share(self, seconds: float) -> bool:
        """Whether there may be one whose parts together have room in the devices' time, on their network, and
        in their memory."""
        if self._least_together <= seconds:
            return True
        own, count = self.settings, self.settings.micro_batches / self.settings.copies
        lead, trail = self._lead[:, None], self._trail[:, None]
        each = []
        for parts in self._parts:
            passes = count * np.minimum(parts.work, parts.around)
            fits = parts.ends_by(seconds, lead, count) & (lead + passes + trail <= seconds)
            needs = own.micro_batches * np.where(fits, parts.work, 0.0)
            if own.straight:
                behind = parts.after if own.splits else np.maximum(parts.after, trail)
                needs = needs + own.slowest * (lead + behind)
            busy = parts.replicas * needs
            if own.copies > 1:  # with replicas of their own, of which these do their share
                busy = np.maximum(busy / own.copies, np.where(fits, self._cheapest, 0.0))
            sent = (parts.replicas + own.copies - 1) * parts.after
            each.append((fits, busy, sent, parts.replicas * seconds * parts.memory))

        may_be_sent = lead[:, 0] + self._over_cuts <= seconds

        def has_room(which: int, share: float) -> bool:
            costs = [share * busy + (1 - share) * others[which] for _, busy, *others in each]
            usable = [np.where(one[0], cost, inf) for one, cost in zip(each, costs, strict=True)]
            room = (share * own.capacity + (1 - share) * own.gpus) * seconds * (1 + 1e-9)
            return _least_sum(usable, may_be_sent, own.turns) <= room

        # Of the devices' time alone once, and with each of the others.
        return has_room(0, 1.0) and all(has_room(i, share) for i in (0, 1) for share in SHARES)

    @cached_property
    def _least_together(self) -> float:
        """Seconds of one into several parts on the same devices, with one all-reduce after the other."""
        own, anywhere, least = self.settings, np.ones(self._shape[0], dtype=np.bool_), inf
        for parts in self._parts if own.together else ():
            reduced = _least_sum([np.where(np.isfinite(parts.work), parts.after, inf)], anywhere, None)
            least = min(least, max(own.micro_batches * parts.whole, reduced))
        return least

    @cached_property
    def _over_cuts(self) -> Floats:
        """(cut points,): seconds from a cut on, where all micro-batches are sent over it to other devices,
        one after another: until the last one was there, went through the layers behind, and back."""
        own, each = self.settings, self.settings.micro_batches // self.settings.copies
        # The smaller side, of half of the devices at the most, sends more bytes a replica.
        counts = [count for count in own.counts if 2 * count <= own.gpus] or [min(own.counts)]
        each_sent = [own.space.table(divide_batch(own.size, count)).crossing for count in counts]
        sent = np.min(each_sent, axis=0) / self._fastest[0]
        behind = (self._lead[-1] - self._lead) + (self._trail[-1] - self._trail)
        seconds: Floats = each * sent + own.first * sent + behind + self._trail
        return seconds

    def may_take(self, replicas: Sequence[int], is_sent: Sequence[bool], seconds: float) -> bool:
        """Whether there may be one into parts with these numbers of replicas, in their order; by cut, whether
        what crosses it `is_sent` to other devices."""
        count = self.settings.micro_batches // self.settings.copies
        lead = np.full(self._shape[0], inf)
        lead[0] = 0.0
        for index, own in enumerate(replicas):
            parts = self._by_count.get(own)
            if parts is None:
                return False
            before = lead[:, None]
            fits = parts.ends_by(seconds, before, count)
            lead = np.where(fits, before + self.settings.first * parts.forward, inf).min(axis=0)
            if index < len(is_sent) and is_sent[index]:
                following = self._by_count.get(replicas[index + 1], parts)
                sent = np.minimum(parts.crossing, following.crossing) / self._fastest[0]
                # A link carries one transfer at a time.
                in_time = lead + count * sent <= seconds
                lead = np.where(in_time, lead + self.settings.first * sent, inf)
        return bool(np.isfinite(lead[-1]))

    @cached_property
    def _by_count(self) -> dict[int, _Parts]:
        return {parts.replicas: parts for parts in self._parts}

    @cached_property
    def _cheapest(self) -> Floats:
        """(cut points, cut points): the least devices times seconds of all micro-batches."""
        least: Floats = np.minimum.reduce([own.replicas * own.work for own in self._parts])
        return self.settings.micro_batches * least

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
                passes = own.micro_batches * np.minimum(parts.work, parts.around)
                fits = parts.ends_by(seconds, before, own.micro_batches) & (both_before + passes <= seconds)
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
        # Copies wait for each other.
        others = own.copies - 1 if own.one_model and not space.zero else 0
        after = self.exchanges.after(count + others, divide_batch(own.size, count), hides=not others)
        if own.straight:
            after = after + space.least_tied(table, count)
        need, memory = own.memory(count, per_replica)
        again = 1 + (own.modes == "always")
        return _Parts(
            count,
            table.stage_sums(forward),
            table.stage_sums(forward + back),
            np.where(space.usable & (need <= 1 + 1e-12), table.stage_sums(work), inf),
            after,
            again * per_replica.forward_launch + per_replica.backward_launch,
            memory,
            per_replica.crossing,
            float(work.sum()),
        )

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        """Bytes a second, and latency, of a transfer."""
        return fastest_transfer(self.settings.space.topology)

    @cached_property
    def _cuts(self) -> Floats:
        """(cut points,): seconds of a transfer: a replica of the smaller side sends its share."""
        own, (bandwidth, latency) = self.settings, self._fastest
        per_replica_batches = {divide_batch(own.size, count) for count in own.counts}
        sent = np.min([own.space.table(batch).crossing for batch in per_replica_batches], axis=0)
        cuts: Floats = sent / bandwidth + latency
        cuts[-1] = 0.0
        return cuts


def _least_sum(costs: Sequence[Floats], may_be_sent: Mask, turns: int | None) -> float:
    """Over all partitions, of each part the least of its costs, (cut points, cut points) each; inf where
    there are none. Of the cuts all but `turns` are where something may be sent to other devices."""
    if not costs:
        return inf
    least, last = np.minimum.reduce(costs), len(may_be_sent) - 1
    sums = np.full((1 if turns is None else 1 + turns, last + 1), inf)  # by turns so far
    sums[0, 0] = 0.0
    for end in range(1, last + 1):
        own = (sums[:, :end] + least[None, :end, end]).min(axis=1)
        is_free = end == last or may_be_sent[end] or turns is None
        sums[:, end] = own if is_free else np.append(inf, own[:-1])
    return float(sums[:, -1].min())
