"""Cheapest training: dollars per sample, where every device that is used costs by the hour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from ...cost_models.errors import DefectError, UsageError
from ...cost_models.quantities import format_count
from ...cost_models.schedules import MOST_COPIES
from ...cost_models.topology import Group, Topology
from ..candidate import Proposal, ScoredPlan
from ..coverage import describe_coverage
from ..joint_search import JointSearchResult, find_best_plan, with_bound
from ..plan_file import TIE, Aim
from ..problem import Problem
from ..scoring import fastest, least_in_parts
from ..search.placements import EVERY_COUNT
from ..search.space import Space
from ..universal_bound import universal_bound
from .objective import price_by_kind
from .objective_result import ObjectiveResult, search_again

HOUR = 3600.0


def least_cost(problem: Problem, prices: Mapping[str, float]) -> ObjectiveResult:
    """Find the plan with the fewest dollars per sample.

    For every number of devices, from rank 0 on, the fastest plan on them is searched, unless a bound on its
    step excludes a cheaper plan. The proof covers plans that use exactly the first n devices, for any n. If
    links differ, other devices, such as one of each node, may be cheaper. With several kinds of devices,
    plans on those of one kind and the named planners' are tried, too, and the bound covers plans on any
    devices.

    Args:
        problem: What is asked.
        prices: Dollars per device hour, see `Objective`.

    Raises:
        UsageError: The prices do not match the devices.
    """
    by_kind = price_by_kind(prices, problem.topology)
    hourly = [problem.sharers * by_kind[problem.topology.device(rank).name] for rank in range(problem.gpus)]
    answer = find_best_plan(problem)
    if answer.result.bound_seconds == inf:
        return ObjectiveResult(answer.result, answer)
    search = _CostSearch(problem, hourly, answer)
    search.run()
    if search.best is None:
        return ObjectiveResult(answer.result, answer)
    used = search.best.proposal.device_count
    aim = Aim(
        name="cost",
        value=search.cost,
        unit="$/sample",
        lower_bound=min(search.bound, search.cost),
        exact=search.bound >= search.cost * (1 - TIE),
        detail=f"{format_count(used, 'device')} at {search.dollars(search.best):g} dollars an hour in total",
        covers=f"{describe_coverage(problem, answer.result)}; each on the first devices by rank",
    )
    notes = [f"a million samples cost {1e6 * search.cost:.4g} dollars"]
    if used < problem.gpus:
        notes.append(f"the cheapest plan uses {used} of the {problem.gpus} devices; the others cost nothing")
    return ObjectiveResult(with_bound(problem, search.best, answer.result), answer, aim, tuple(notes))


@dataclass
class _CostSearch:
    """Cheapest plan so far in dollars per sample, and a bound on the cost of the plans searched so far."""

    problem: Problem
    hourly: list[float]
    answer: JointSearchResult
    best: ScoredPlan | None = None
    cost: float = inf
    bound: float = inf

    def run(self) -> None:
        """Search every number of devices. All devices come first, because that plan is known."""
        for count in self._counts():
            if self.best is not None and self.problem.budget.over:
                self.bound = min(self.bound, self._work_cost())
                break
            self._look(count)
        if len(self.problem.topology.kinds) > 1 and not self.problem.options.use_all:
            self._look_at_kinds()
        if self.bound > self.cost * (1 + TIE):
            # The plan does not use the first devices, so the bound must hold for any devices.
            self.bound = self._work_cost()
        if self.bound > self.cost * (1 + TIE):
            raise DefectError(
                f"a plan of {self.cost!r} dollars a sample is below its bound of {self.bound!r}"
            )

    def _look_at_kinds(self) -> None:
        """Search plans on devices other than the first ones."""
        for plan in self.answer.by_planner.values():
            if isinstance(plan, ScoredPlan):
                self._take(plan)
        start = 0
        for device, number in self.problem.topology.groups:
            for count in range(1, number + 1):
                if count <= EVERY_COUNT or count & (count - 1) == 0:
                    self._look_at_group(Group(device, count), start)
            start += number
        self.bound = min(self.bound, self._work_cost())

    def _look_at_group(self, group: Group, start: int) -> None:
        """Search plans on these devices, the first of which has rank `start`."""
        alone = self._on(replace(self.problem.topology, groups=(group,)))
        least = self._cost(group.number * self.hourly[start], self._least_step(alone))
        if alone is None or least >= self.cost * (1 - TIE):
            return
        plan = search_again(alone, []).best
        if plan is not None:
            # If the group does not begin at a node, transfers cross other links, so the plan is scored anew.
            moved = _shift_devices(plan.proposal, start)
            scored = fastest(self.problem.space, [moved] if self.problem.allows(moved) else [])
            if scored is not None:
                self._take(scored)

    def _work_cost(self) -> float:
        """Return a bound on the cost of plans on any devices: each layer's work where it is cheapest."""
        problem, space, kinds, start = self.problem, self.problem.space, list[tuple[float, Space]](), 0
        for device, number in problem.topology.groups:
            alone = replace(problem.topology, groups=(Group(device, 1),))
            kinds.append((self.hourly[start], replace(space, topology=alone)))
            start += number
        bounds = []
        for config in problem.configs:
            counts = range(1, problem.usable_gpus + 1)
            share = min(1.0, MOST_COPIES / config.micro_batches)
            works = [
                hourly * work
                for hourly, kind_space in kinds
                if (work := kind_space.cheapest_work(config.micro_batch_size, counts, first_share=share))
                is not None
            ]
            if works:
                bounds.append(config.micro_batches * float(np.minimum.reduce(works).sum()))
        return min(bounds, default=inf) * least_in_parts(space) / HOUR / problem.mini_batch

    def _counts(self) -> Iterator[int]:
        gpus, per_node = self.problem.gpus, self.problem.topology.gpus_per_node
        yield gpus
        if self.problem.options.use_all:
            return
        for count in range(1, gpus):
            is_searched = count <= EVERY_COUNT or count & (count - 1) == 0 or count % per_node == 0
            if is_searched or self.problem.budget.over:
                yield count
            else:
                self._bound(count, self._least_step(self._with(count)))

    def _look(self, count: int) -> None:
        problem = self._with(count)
        if problem is None:
            return
        least = self._least_step(problem)
        if self._cost(sum(self.hourly[:count]), least) >= self.cost * (1 - TIE):
            self._bound(count, least)
            return
        seeds = [] if self.best is None else [self.best]
        whole = count == self.problem.gpus
        result = self.answer.result if whole else search_again(problem, _inside(seeds, count))
        self._bound(count, result.bound_seconds)
        if result.best is not None:
            self._take(result.best)

    def _take(self, plan: ScoredPlan) -> None:
        """Keep the plan if it is cheaper."""
        cost = self._cost(self.dollars(plan), plan.step_seconds)
        if cost < self.cost * (1 - TIE):
            self.best, self.cost = plan, cost

    def _with(self, count: int) -> Problem | None:
        """Return the problem on the first `count` devices."""
        return self._on(self.problem.topology.with_gpus(count))

    def _on(self, topology: Topology) -> Problem | None:
        """Return the problem on these devices.

        None if none exists, for example because of its global batch.
        """
        options = replace(self.problem.options, mini_batch=self.problem.mini_batch)
        try:
            return replace(self.problem, topology=topology, options=options)
        except UsageError:
            return None

    def _least_step(self, problem: Problem | None) -> float:
        return inf if problem is None else universal_bound(problem, problem.allowed_schedules)

    def _bound(self, count: int, step: float) -> None:
        self.bound = min(self.bound, self._cost(sum(self.hourly[:count]), step))

    def dollars(self, plan: ScoredPlan) -> float:
        """Return the dollars per hour of the devices of a plan."""
        return sum(
            self.hourly[rank]
            for rank in {rank for stage_ranks in plan.proposal.devices for rank in stage_ranks}
        )

    def _cost(self, hourly: float, step: float) -> float:
        return hourly / HOUR * step / self.problem.mini_batch


def _shift_devices(proposal: Proposal, start: int) -> Proposal:
    """Return the same plan on devices of later ranks."""
    devices = tuple(tuple(rank + start for rank in stage_ranks) for stage_ranks in proposal.devices)
    return replace(proposal, devices=devices)


def _inside(plans: list[ScoredPlan], count: int) -> list[ScoredPlan]:
    """Return the plans that only use the first `count` devices."""
    return [
        plan
        for plan in plans
        if all(rank < count for stage_ranks in plan.proposal.devices for rank in stage_ranks)
    ]
