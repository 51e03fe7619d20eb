"""The bound on all plans against its formulas, written down once more with loops over layers and stages.

`test_universal_bound.py` shows that no plan is below it; a term that got lost would make it weaker alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, product
from math import inf

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.stage_bytes import stage_bytes
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.least_collectives import least_all_reduce_seconds
from pplan.planner.search.least_exchange import LeastExchanges
from pplan.planner.universal_bound import make_partitions, universal_bound

MakeChain = Callable[..., Chain]
SPEEDS = (1.0, 2.0, 1.0)
NEAR, FAR = Link(40.0, 0.2), Link(15.0, 0.1)
TOPOLOGY = Topology(
    tuple(Group(Device(f"{speed}", None, speed), 1) for speed in SPEEDS),
    (Level("node", 2, NEAR), Level("network", None, FAR)),
)
CHECKED = ("1f1b", "gpipe", "naive", "zb-h1", "zb-v", "autopipe", "chimera", "interleaved")


@dataclass(frozen=True, eq=False)
class Case:
    """Three devices, one of them twice as fast, micro-batches of `size` samples, any replicas."""

    chain: Chain
    schedule: str
    micro_batches: int
    size: int
    recompute: bool
    limit: float | None = None

    @property
    def splits(self) -> bool:
        return self.schedule not in ("naive", "gpipe", "1f1b", "dapple")

    @property
    def straight(self) -> bool:
        return self.schedule in ("gpipe", "1f1b", "zb-h1")

    @property
    def first(self) -> float:
        return 0.5 if self.schedule == "autopipe" else 1.0

    @property
    def counts(self) -> list[int]:
        most = min(len(SPEEDS), self.size)
        return [n for n in range(1, most + 1) if self.chain.reaches(-(-self.size // n))]

    @cache  # noqa: B019
    def costs(self, replicas: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
        """f, b, w of every layer on the fastest device, and its host's seconds."""
        own = self.chain.at(-(-self.size // replicas))
        again, firsts = 1.0 * self.recompute, min(1.0, SCHEDULES[self.schedule].copies / self.micro_batches)
        f, whole, a = own.forward_seconds, own.backward_seconds, own.accumulation
        if self.splits:
            weight = np.where(own.trainable_bytes > 0, 0.5 * whole, 0.0)
            back = whole - weight
            if own.backward_input_seconds is not None and own.backward_weight_seconds is not None:
                back, weight = own.backward_input_seconds, own.backward_weight_seconds
            b = np.minimum(back, np.maximum(whole - a, 0.0)) + again * f
            parts = back + weight - firsts * np.minimum(a, weight)
            w = (1 + again) * f + np.minimum(whole - firsts * a, parts)
        else:
            # A path follows any micro-batch, the first of a step where there is one; naive all of them.
            share = firsts if self.schedule == "naive" else float(self.micro_batches == 1)
            b, w = again * f + whole - share * a, (1 + again) * f + whole - firsts * a
        host = (1 + again) * own.forward_host_seconds + own.backward_host_seconds
        return f / max(SPEEDS), b / max(SPEEDS), w / max(SPEEDS), host

    def simple(self) -> float:
        """Work, way of a micro-batch, launches, and the longest layer with what is before and behind it."""
        count, copies = self.micro_batches, SCHEDULES[self.schedule].copies
        each = {r: self.costs(r) for r in self.counts}
        f, b, w, host = (np.min([own[i] for own in each.values()], axis=0) for i in range(4))
        shared = np.min([r * own[2] for r, own in each.items()], axis=0).sum()
        path = np.min([own[0] + own[1] for own in each.values()], axis=0).sum()
        first = 0.5 if self.schedule == "autopipe" else 1.0
        times = count if self.schedule == "naive" else first
        bounds = [count * shared / (sum(SPEEDS) / max(SPEEDS)), times * path]
        bounds += [count * host.sum() / len(SPEEDS), count * host.max() / copies]
        for layer in range(len(f)):
            ahead, behind = first * f[:layer].sum(), first * b[:layer].sum()
            bounds.append(ahead + count / copies * w[layer])
            bounds.append(ahead + count / copies * min(w[layer], f[layer] + b[layer]) + behind)
        return float(max(bounds))

    def allows(self, seconds: float) -> bool:
        """Whether a plan may take so long: of all ways to part the layers, with any replicas, some that has
        time on the devices, on their network, and memory, and one that follows, of straight pipelines."""
        if seconds < self.simple():
            return False
        if self.is_together(seconds):
            return True
        parted = [list(own) for own in self.partitions(seconds)]
        mixed = [(which, share / 4) for which in (1, 2) for share in range(5)]
        gpus, work = len(SPEEDS), sum(SPEEDS) / max(SPEEDS)
        for which, share in mixed:
            sums = [sum(share * one[0] + (1 - share) * one[which] for one in own) for own in parted]
            if min(sums, default=inf) > (share * work + (1 - share) * gpus) * seconds:
                return False
        return not self.straight or self.follows(seconds)

    def is_together(self, seconds: float) -> bool:
        """Whether all parts of an interleaved pipeline may be on the same devices."""
        if self.schedule not in ("interleaved", "zb-v"):
            return False
        for r in self.counts:
            own = [
                sum(self.exposed(r, *place) for place in places)
                for places in self.parted()
                if all(self.memory(r, *place)[0] <= 1 for place in places)
            ]
            if self.micro_batches * self.costs(r)[2].sum() <= seconds and min(own, default=inf) <= seconds:
                return True
        return False

    def parted(self) -> Iterator[list[tuple[int, int]]]:
        """All ways to part the layers: first and last of each part."""
        layers = len(self.chain)
        for cuts in product((False, True), repeat=layers - 1):
            yield list(pairwise([0, *(i + 1 for i, cut in enumerate(cuts) if cut), layers]))

    def may_be_sent(self, cut: int, seconds: float) -> bool:
        """Whether all micro-batches may go over a cut to others, through all behind it, and back."""
        near = min((-(-self.size // r) for r in self.counts if 2 * r <= len(SPEEDS)), default=self.size)
        each = self.chain.at(near).output_bytes[cut - 1]
        sent = each / (NEAR.bandwidth_bytes_per_second + FAR.bandwidth_bytes_per_second)
        count, first = self.micro_batches // SCHEDULES[self.schedule].copies, self.ways(0, len(self.chain))
        return bool(count * sent + self.first * sent + sum(first) <= seconds)

    def partitions(self, seconds: float) -> Iterator[Iterator[tuple[float, float, float]]]:
        """Of the parts of each the seconds that they take of the devices, of their network, and the share of
        their memory times the step; without those of which a part alone is too slow or fits nowhere."""
        turns = int(self.schedule == "zb-v")
        for places in self.parted():
            if sum(not self.may_be_sent(end, seconds) for _, end in places[:-1]) > turns:
                continue
            for counts in product(self.counts, repeat=len(places)):
                each = list(zip(counts, places, strict=True))
                if all(self.is_possible(r, *place, seconds) for r, place in each):
                    yield (self.needs(r, *place, seconds) for r, place in each)

    def is_possible(self, r: int, start: int, end: int, seconds: float) -> bool:
        f, b, w, host = (own[start:end].sum() for own in self.costs(r))
        count, e = self.micro_batches / SCHEDULES[self.schedule].copies, self.exposed(r, start, end)
        lead, trail = self.ways(0, start)
        ends = (lead + count * w + e, lead + count * min(w, f + b) + trail, count * host + e)
        return bool(max(ends) <= seconds and self.memory(r, start, end)[0] <= 1)

    def needs(self, r: int, start: int, end: int, seconds: float) -> tuple[float, float, float]:
        e, busy = self.exposed(r, start, end), self.micro_batches * self.costs(r)[2][start:end].sum()
        if self.straight:
            lead, trail = self.ways(0, start)
            busy += min(SPEEDS) / max(SPEEDS) * (lead + max(e, 0.0 if self.splits else trail))
        shared, copies = self.memory(r, start, end)[1] * seconds, SCHEDULES[self.schedule].copies
        others = [n for n in self.counts if self.memory(n, start, end)[0] <= 1]
        works = [n * self.costs(n)[2][start:end].sum() for n in others]
        busy = r * busy if copies == 1 else max(r * busy / copies, self.micro_batches * min(works))
        return busy, (r + copies - 1) * e, r * shared

    @cache  # noqa: B019
    def ways(self, start: int, end: int) -> tuple[float, float]:
        """Through layers and back, of the first micro-batch, or its half, and of the last."""
        f, b = (np.min([self.costs(r)[i] for r in self.counts], axis=0) for i in (0, 1))
        return self.first * f[start:end].sum(), self.first * b[start:end].sum()

    @cache  # noqa: B019
    def memory(self, r: int, start: int, end: int) -> tuple[float, float]:
        """Shares of a device's that a part needs, and that it keeps while a micro-batch waits."""
        if self.limit is None:
            return 0.0, 0.0
        own, copies = self.chain.at(-(-self.size // r)), SCHEDULES[self.schedule].copies
        stage, first = stage_bytes(own, start, end - 1), 0.5 if self.schedule == "autopipe" else 1.0
        states = stage.parameters + stage.buffers + stage.trainable * (2 if r * copies > 1 else 1)
        whole = stage.saved + stage.saved_input
        work = stage.input + (0.0 if self.splits else whole) if self.recompute else whole
        waits = min(whole, stage.input) if self.recompute else whole
        at_work = states + first * work + stage.workspace
        each = (at_work, states + (first * waits if copies == 1 else 0.0))
        return 1.05 * float(each[0]) / self.limit, 1.05 * float(each[1]) / self.limit

    def follows(self, seconds: float) -> bool:
        """By devices and layers done, the least seconds of the first micro-batch until there, and until there
        and back."""
        layers, gpus, count = len(self.chain), len(SPEEDS), self.micro_batches
        lead, both = np.full((2, gpus + 1, layers + 1), inf)
        lead[0, 0] = both[0, 0] = 0.0
        for used in range(1, gpus + 1):
            for r in self.counts:
                for start in range(layers):
                    for end in range(start + 1, layers + 1):
                        if r > used or lead[used - r, start] == inf or self.memory(r, start, end)[0] > 1:
                            continue
                        f, b, w, host = (own[start:end].sum() for own in self.costs(r))
                        e = self.exposed(r, start, end)
                        before, around = lead[used - r, start], both[used - r, start]
                        ends = (before + count * w + e, around + count * min(w, f + b), count * host + e)
                        if max(ends) <= seconds:
                            cut = self.cut(end)
                            lead[used, end] = min(lead[used, end], before + f + cut)
                            both[used, end] = min(both[used, end], around + f + b + 2 * cut)
        return bool((lead[:, layers] < inf).any())

    @cache  # noqa: B019
    def exposed(self, replicas: int, start: int, end: int) -> float:
        """Of the least all-reduce of all gradients, which are one bucket, what cannot run beside the slowest
        backward of the layers before the first that has some; of two copies all of it."""
        own, copies = self.chain.at(-(-self.size // replicas)), SCHEDULES[self.schedule].copies
        sizes = own.trainable_bytes[start:end]
        if not sizes.any():
            return 0.0
        seconds = least_all_reduce_seconds(TOPOLOGY, replicas + copies - 1, np.array([sizes.sum()]))[0]
        before = own.backward_seconds[start : start + int(np.argmax(sizes > 0))].sum() / min(SPEEDS)
        return float(max(seconds - (before if copies == 1 else 0.0), 0.0))

    def cut(self, end: int) -> float:
        """The least share of a micro-batch over a port of both levels."""
        if end == len(self.chain):
            return 0.0
        sent = min(self.chain.at(-(-self.size // r)).output_bytes[end - 1] for r in self.counts)
        both = NEAR.bandwidth_bytes_per_second + FAR.bandwidth_bytes_per_second
        return float(sent / both + min(NEAR.latency_seconds, FAR.latency_seconds))


def problem_and_case(seed: int, schedule: str, make_chain: MakeChain) -> tuple[Problem, Case]:
    chain = make_chain(seed, 4, cuts=1.1, adding=0.6, traffic=[0.1, 1.0][seed % 2])
    if seed > 3:  # halves of the backward were measured, together less than the whole, and their first less
        chain = replace(
            chain,
            backward_input_seconds=0.4 * chain.backward_seconds,
            backward_weight_seconds=0.5 * chain.backward_seconds,
        )
    if seed % 2:
        chain = replace(chain, trainable_bytes=(heavy := 6 * chain.parameter_bytes), parameter_bytes=heavy)
    count, size = [(4, 1), (1, 4), (3, 2), (6, 2)][seed % 4]
    recompute = seed % 3 == 1
    options = PlanOptions(
        mini_batch=count * size,
        micro_batches=count,
        schedule=schedule,
        recompute="always" if recompute else "never",
    )
    case = Case(chain, schedule, count, size, recompute)
    if seed > 4:  # nearly as much as the part of all layers needs
        whole = replace(case, limit=1.0).memory(max(case.counts), 0, len(chain))[0]
        case, options = replace(case, limit=0.7 * whole), replace(options, memory_limit=0.7 * whole)
    return Problem(chain, TOPOLOGY, options), case


@pytest.mark.parametrize("schedule", CHECKED)
def test_the_largest_of_its_terms(schedule: str, make_chain: MakeChain) -> None:
    refined = 0
    for seed in range(8):
        problem, case = problem_and_case(seed, schedule, make_chain)
        simple = case.simple()
        assert universal_bound(problem, [schedule]) == pytest.approx(simple, rel=1e-12)
        step = 1.6 * simple
        bound, width = universal_bound(problem, [schedule], step), (step - simple) / 2**12
        assert not case.allows(bound * (1 - 1e-9))
        assert bound == pytest.approx(step) or case.allows(bound + 1.01 * width)
        refined += bound > simple + 2 * width
    assert refined > 0


@pytest.mark.parametrize("schedule", CHECKED)
def test_the_share_of_the_memory_that_parts_need(schedule: str, make_chain: MakeChain) -> None:
    """Of every part on every number of replicas: by itself, and while others of its device are at work."""
    for seed in range(5, 11):
        problem, case = problem_and_case(seed, schedule, make_chain)
        partitions = make_partitions(problem, problem.configs[0], LeastExchanges(problem.space))
        for count in case.counts:
            table = problem.space.table(-(-case.size // count))
            need, share = partitions.settings.memory(count, table)
            for start, end in combinations(range(len(case.chain) + 1), 2):
                expected = case.memory(count, start, end)
                assert (need[start, end], share[start, end]) == pytest.approx(expected, rel=1e-9)
