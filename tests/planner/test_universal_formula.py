"""The bound on all plans against its formulas, written down once more with loops over layers.

`test_universal_bound.py` shows that no plan is below it; a term that got lost would make it weaker alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

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

    @property
    def splits(self) -> bool:
        return self.schedule not in ("naive", "gpipe", "1f1b", "dapple")

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
    return Problem(chain, TOPOLOGY, options), case


@pytest.mark.parametrize("schedule", CHECKED)
def test_the_largest_of_its_terms(schedule: str, make_chain: MakeChain) -> None:
    for seed in range(8):
        problem, case = problem_and_case(seed, schedule, make_chain)
        assert universal_bound(problem, [schedule]) == pytest.approx(case.simple(), rel=1e-12)
