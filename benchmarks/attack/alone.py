"""Seconds that ports need, worked out apart from the simulator."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from pplan.planner.plan_file import Plan
from pplan.planner.problem import Problem


def port_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds for which the most loaded port sends, or receives, what crosses the plan's cuts in a step:
    every micro-batch forward, and its gradient back."""
    loads = defaultdict[object, Fraction](Fraction)
    topology = problem.topology
    for here, there in zip(plan.stages, plan.stages[1:], strict=False):
        both_ways = plan.schedule == "chimera"
        if plan.virtual_stages > 1 or both_ways or here.devices == there.devices:
            return 0.0
        sent = min(_bytes(problem, plan, here.last_layer, own.replicas) for own in (here, there))
        for i, a in enumerate(here.devices):
            for j, b in enumerate(there.devices):
                share = _common(i, len(here.devices), j, len(there.devices))
                pace = Fraction(sent) * share / Fraction(_bandwidth(problem, a, b))
                for one, other in ((a, b), (b, a)) if share else ():
                    for port in topology.ports(one, other):
                        loads[port] += pace * plan.micro_batches
    return float(max(loads.values(), default=Fraction()))


def _bytes(problem: Problem, plan: Plan, layer: int, replicas: int) -> float:
    """Of a whole micro-batch, as many times a replica's share as there are replicas, at the most the
    samples."""
    share = -(-plan.micro_batch_size // replicas)
    costs = problem.chain.at(share, past_largest=True)
    return float(costs.output_bytes[layer]) * min(replicas, plan.micro_batch_size / share)


def _bandwidth(problem: Problem, a: int, b: int) -> float:
    return min(problem.topology.link(a, b).bandwidth_bytes_per_second, 1e300)


def _common(i: int, parts: int, j: int, others: int) -> Fraction:
    """What the i-th of some equal parts of the samples has in common with the j-th of others."""
    start = max(Fraction(i, parts), Fraction(j, others))
    return max(min(Fraction(i + 1, parts), Fraction(j + 1, others)) - start, Fraction(0))
