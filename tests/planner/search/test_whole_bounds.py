"""The bounds of whole plans against their formulas, written down once more with loops over the stages.

That no plan is below them is shown elsewhere; a term that got lost would only make them weaker, and show
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, inf
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.step_costs import Hosts
from pplan.planner.candidate import Mode, PipelineConfig
from pplan.planner.search.bounds_1f1b import whole_bound_1f1b
from pplan.planner.search.bounds_gpipe import whole_bound_gpipe
from pplan.planner.search.pipelines import Pipelines

Row = dict[str, list[float]]


def random_plans(seed: int, schedule: str, mode: Mode, micro_batches: int) -> Pipelines:
    """Of four stages, in which any of the costs may be what a step waits for."""
    rng, plans, stages = np.random.default_rng(seed), 12, 4
    names = ("forward", "backward", "exposed_allreduce", "forward_launch", "backward_launch")
    own: dict[str, Any] = {
        name: rng.random((plans, stages)) * 10.0 ** rng.integers(-1, 2, (plans, 1)) for name in names
    }
    cuts = rng.random((2, plans, stages - 1)) * 10.0 ** rng.integers(-2, 2, (2, plans, 1))
    return Pipelines(
        config=PipelineConfig(schedule, mode, micro_batches, 1),
        plain=own["backward"] * rng.uniform(0.5, 1.0, (plans, stages)),
        plain_launch=own["backward_launch"] * rng.uniform(0.5, 1.0, (plans, stages)),
        accumulation=0.3 * own["backward"] * rng.random((plans, stages)),
        occupancy=cuts[0],
        latency=cuts[1],
        **own,
    )


def rows(plans: Pipelines) -> Iterator[Row]:
    """By plan, by stage: `cut` and `occupancy` of the cut after it, 0 after the last."""
    arrays = {name: own for name, own in vars(plans).items() if isinstance(own, np.ndarray)}
    for index in range(len(plans)):
        row = {name: own[index].tolist() for name, own in arrays.items()}
        cut = [o + late for o, late in zip(row["occupancy"], row["latency"], strict=True)]
        yield row | {"cut": [*cut, 0.0], "occupancy": [*row["occupancy"], 0.0]}


def round_trips(plans: Pipelines, row: Row) -> float:
    """The terms of 1F1B's module, the largest over the stages."""
    f, b, a, e, c, o = (
        row[name] for name in ("forward", "backward", "accumulation", "exposed_allreduce", "cut", "occupancy")
    )
    count, stages, bounds = plans.config.micro_batches, plans.stages, []
    for s in range(stages):
        later = range(s + 1, stages)
        trip = 2 * c[s] + sum(f[t] + b[t] + 2 * c[t] for t in later)
        first_trip = trip - sum(a[t] for t in later)
        held = min(count, stages - s)
        terms = [
            (ceil(count / held) - 1) * (f[s] + b[s] + trip) + f[s] + b[s] - a[s] + first_trip,
            f[s] + trip + (count - 1) * o[s] + b[s],
        ]
        if count > held:
            middle = (count - held) * (f[s] + b[s]) - a[s]
            terms.append(max(held * f[s], f[s] + first_trip) + middle + max(held * b[s], b[s] + trip))
        else:
            terms.append(count * (f[s] + b[s]) - a[s])
            terms.append(count * f[s] + trip + b[s])
            terms.append(f[s] + first_trip + count * b[s] - a[s])
        lag = sum(f[t] + c[t] for t in range(s))
        ways = [sum(b[t] + c[t] for t in range(to, s)) + e[to] for to in range(s + 1)]
        through = sum(b[t] + c[t] for t in range(s))
        bounds.append(lag + max(terms) + max(*ways, through))
    return max(bounds)


def flow_shops(plans: Pipelines, row: Row) -> float:
    """The terms of GPipe's module."""
    f, b, a, e, c, o = (
        row[name] for name in ("forward", "backward", "accumulation", "exposed_allreduce", "cut", "occupancy")
    )
    first = row["plain"] if plans.config.recompute == "except_last" else b
    first = [own - less for own, less in zip(first, a, strict=True)]
    more, stages = plans.config.micro_batches - 1, range(plans.stages)
    most_f, most_b = max(*f, *o), max(*b, *o)
    most_both = max(*(f[s] + b[s] for s in stages), *(2 * own for own in o))
    forwards = max(sum(f) + sum(c) + more * most_f, (more + 1) * max(row["forward_launch"]))
    if plans.hosts == "one":
        forwards = max(sum(f) + sum(c) + more * most_f, (more + 1) * sum(row["forward_launch"]))
    gradients = [sum(first[t] + c[t] for t in stages[s:]) + more * max(*b[s:], *o[s:]) + e[s] for s in stages]
    bounds = [forwards + max(gradients)]
    span = sum(f) + 2 * sum(c)
    bounds += [span + sum(first) + more * (most_f + most_b), span + sum(first) + more * most_both]
    if more:
        span += sum(b) + first[-1]
        bounds.append(span + more * most_f + (more - 1) * most_b)
        bounds.append(span + (more - 1) * most_both + most_f)
    return max(bounds)


MODES: tuple[Mode, ...] = ("never", "except_last")


@pytest.mark.parametrize("hosts", ["each", "one"])
@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_the_largest_of_their_terms(count: int, hosts: Hosts) -> None:
    for seed, mode in enumerate(MODES):
        for schedule, bound, formula in (
            ("1f1b", whole_bound_1f1b, round_trips),
            ("gpipe", whole_bound_gpipe, flow_shops),
        ):
            plans = replace(random_plans(seed, schedule, mode, count), hosts=hosts)
            if schedule == "1f1b" and mode == "except_last":
                continue
            expected = [formula(plans, row) for row in rows(plans)]
            assert bound(plans) == pytest.approx(np.array(expected), rel=1e-12)
            assert inf not in expected
