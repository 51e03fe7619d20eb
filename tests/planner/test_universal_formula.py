"""The bound on all plans against its formulas, written down once more with loops over layers and stages.

`test_universal_bound.py` shows that no plan is below it; a term that got lost would make it weaker alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.universal_bound import universal_bound

MakeChain = Callable[..., Chain]
SPEEDS = (1.0, 2.0, 1.0)
NEAR, FAR = Link(40.0, 0.2), Link(15.0, 0.1)
CHECKED = ("1f1b", "gpipe", "naive", "zb-h1", "zb-v", "autopipe", "chimera", "interleaved")


@dataclass(frozen=True)
class Case:
    """Three devices, one of them twice as fast, micro-batches of `size` samples, any replicas."""

    chain: Chain
    schedule: str
    micro_batches: int
    size: int
    recompute: bool

    @property
    def splits(self) -> bool:
        return self.schedule not in ("naive", "gpipe", "1f1b", "dapple")

    @property
    def straight(self) -> bool:
        return self.schedule in ("gpipe", "1f1b", "zb-h1")

    @property
    def counts(self) -> list[int]:
        most = min(len(SPEEDS), self.size)
        return [n for n in range(1, most + 1) if self.chain.reaches(-(-self.size // n))]

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
        """Whether a straight pipeline may take so long: by devices and layers done, the least seconds of the
        first micro-batch until there, and until there and back."""
        if seconds < self.simple():
            return False
        if not self.straight:
            return True
        layers, gpus, count = len(self.chain), len(SPEEDS), self.micro_batches
        lead, both = np.full((2, gpus + 1, layers + 1), inf)
        lead[0, 0] = both[0, 0] = 0.0
        for used in range(1, gpus + 1):
            for r in self.counts:
                for start in range(layers):
                    for end in range(start + 1, layers + 1):
                        if r > used or lead[used - r, start] == inf:
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

    def exposed(self, replicas: int, start: int, end: int) -> float:
        """Of the all-reduce over the fastest link, what cannot run beside the backward on the slowest."""
        if self.splits:
            return 0.0
        own = self.chain.at(-(-self.size // replicas))
        gradients, backward = own.trainable_bytes[start:end].sum(), own.backward_seconds[start:end].sum()
        reduce = 2 * (replicas - 1) / replicas * gradients / NEAR.bandwidth_bytes_per_second
        return float(max(reduce - backward / min(SPEEDS), 0.0)) if replicas > 1 else 0.0

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
    count, size = [(4, 1), (1, 4), (3, 2), (6, 2)][seed % 4]
    recompute = seed % 3 == 1
    options = PlanOptions(
        mini_batch=count * size,
        micro_batches=count,
        schedule=schedule,
        recompute="always" if recompute else "never",
    )
    groups = tuple(Group(Device(f"{speed}", None, speed), 1) for speed in SPEEDS)
    topology = Topology(groups, (Level("node", 2, NEAR), Level("network", None, FAR)))
    return Problem(chain, topology, options), Case(chain, schedule, count, size, recompute)


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
    assert (refined > 0) == (schedule in ("gpipe", "1f1b", "zb-h1"))
