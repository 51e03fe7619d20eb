"""Degrees by stage, against every pipeline of small models, with a step simulated by other code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, combinations_with_replacement, pairwise, product
from random import Random
from typing import NamedTuple

import numpy as np
import pytest

from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.resharding import StageDevices, resharding_seconds
from pplan.cost_models.transformer.training_setting import Recomputation, TrainingSetting
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.degree_search import search_degrees
from pplan.planner.degrees.stage_degree_bound import stage_bound
from pplan.planner.degrees.stage_degree_search import StageAnswer, search_stage_degrees
from pplan.planner.degrees.stage_degree_table import (
    FIRST,
    LAST,
    MIDDLE,
    BlockRuns,
    Recompute,
    StageDegreeTable,
)

NO_LIMIT = float("inf")
SEQUENCE, BATCH = 64, 8
SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 6, 64)]


class Case(NamedTuple):
    shape: TransformerShape
    topology: Topology
    costs: RankCosts
    options: DegreeOptions


class Pipeline(NamedTuple):
    step: float
    bytes: float


def random_case(seed: int) -> Case:
    random = Random(seed)
    experts = ExpertShape(4, 2, random.choice((32, 256))) if seed % 3 == 0 else None
    blocks = random.choice((3, 4))
    shape = TransformerShape(
        "random",
        64 * random.choice((1, 8)),
        random.choice((256, 32000)),
        random.choice((256, 2048)),
        AttentionShape(4, 4, 16, 16),
        tuple(experts is not None and random.random() < 0.7 for _ in range(blocks)),
        experts,
        tied=random.random() < 0.3,
    )
    inside, between = Link(10 ** random.uniform(8, 11), 1e-5), Link(10 ** random.uniform(8, 10), 2e-5)
    topology = two_level_topology(Device("GPU", None), 4, random.choice((2, 4)), inside, between)
    limits = DeviceLimits(10 ** random.uniform(11, 13), 10 ** random.uniform(10, 12))
    costs = RankCosts(limits, TopologyLinks(topology), overheads=Overheads(10 ** random.uniform(-7, -4)))
    options = DegreeOptions(
        mini_batch=BATCH,
        sequence=SEQUENCE,
        cp=random.choice(((1,), (1, 2))),
        context_exchange="ring",
        zero=random.choice(((1,), (0,))),
        predictors=int(seed % 5 == 4),
        micro_batch_size=(1, 2) if experts is None else (2,),
        recompute=random.choice(("none", "selective", "partial", "full", "auto")),
    )
    return Case(shape, topology, costs, options)


def step_of_1f1b(forward: list[float], backward: list[float], cuts: list[float], many: int) -> float:
    """Each stage runs its list; a transfer begins when the sender's action and the action before the one
    that receives have ended, and both wait for its end."""
    stages = len(forward)
    lists = []
    for stage in range(stages):
        ahead = min(stages - stage, many)
        order = [("F", number) for number in range(ahead)]
        for number in range(many - ahead):
            order += [("B", number), ("F", number + ahead)]
        lists.append(order + [("B", number) for number in range(many - ahead, many)])
    at = [{action: place for place, action in enumerate(order)} for order in lists]

    def other(stage: int, place: int, way: int) -> tuple[int, int] | None:
        """Where an action sends to (1), or receives from (-1)."""
        kind, _ = lists[stage][place]
        neighbour = stage + (way if kind == "F" else -way)
        if 0 <= neighbour < stages:
            return neighbour, at[neighbour][lists[stage][place]]
        return None

    @cache
    def end(stage: int, place: int) -> float:
        if place < 0:
            return 0.0
        begin = end(stage, place - 1)
        if place and (to := other(stage, place - 1, 1)):
            begin = max(begin, arrival(stage, place - 1, *to))
        if source := other(stage, place, -1):
            begin = max(begin, arrival(*source, stage, place))
        return begin + (forward if lists[stage][place][0] == "F" else backward)[stage]

    @cache
    def arrival(stage: int, place: int, to: int, receives: int) -> float:
        return max(end(stage, place), end(to, receives - 1)) + cuts[min(stage, to)]

    return max(end(stage, 2 * many - 1) for stage in range(stages))


@pytest.mark.parametrize("seed", range(150))
def test_no_stage_tells_of_more_than_the_step(seed: int) -> None:
    random = Random(seed)
    stages, many = random.randint(2, 5), random.randint(1, 9)
    forward, backward = ([random.choice((1, 2, 3, 9)) * 1.0 for _ in range(stages)] for _ in "FB")
    cuts = [random.choice((0.0, 0.5, 2.0)) for _ in range(stages - 1)]
    step, before = step_of_1f1b(forward, backward, cuts, many), 0.0
    sums = [f + b for f, b in zip(forward, backward, strict=True)]
    for stage in range(stages):
        enter, leave = ([0.0, *cuts, 0.0][place] for place in (stage, stage + 1))
        behind = sum(sums[stage + 1 :]) + 2 * sum(cuts[stage:])
        own = stage_bound(forward[stage], backward[stage], enter, leave, behind, stages - stage - 1, many)
        assert before + own <= step * (1 + 1e-12)
        before += sums[stage] + 2 * leave


def test_equal_stages_take_as_long_as_their_bound() -> None:
    step = step_of_1f1b([1.0] * 4, [2.0] * 4, [0.0] * 3, 8)
    assert step == (8 + 3) * 3.0
    assert stage_bound(1.0, 2.0, 0.0, 0.0, 9.0, 3, 8) == step


def degrees_on(case: Case, devices: int, samples: int) -> Iterator[ParallelDegrees]:
    shape, options = case.shape, case.options
    (zero,) = options.zero or (1,)
    for tensor, context, data, expert in product(range(1, devices + 1), options.cp or (), *[range(1, 5)] * 2):
        fits = tensor * context * data == devices and samples % data == 0
        if fits and samples // data in (options.micro_batch_size or ()):
            own = ParallelDegrees(tensor, context, expert, 1, data, zero, "ring")
            own = own if context > 1 else replace(own, exchange="all-to-all")
            if not own.problem_with(shape, SEQUENCE):
                yield own


def recomputations(option: str, blocks: int) -> list[tuple[Recomputation, int | None]]:
    some: list[tuple[Recomputation, int | None]] = [("full", number) for number in range(1, blocks + 1)]
    words: dict[str, list[tuple[Recomputation, int | None]]] = {
        "none": [("none", None)],
        "selective": [("selective", None)],
        "full": [("full", None)],
        "partial": some or [("none", None)],
    }
    return words[option] if option in words else [*words["none"], *words["selective"], *words["full"], *some]


def device_runs(case: Case, stages: int) -> Iterator[list[range]]:
    """Consecutive devices, of one node or of whole nodes."""
    size = case.topology.gpus_per_node
    for ends in combinations(range(1, 4), stages - 1):
        runs = [range(a, b) for a, b in pairwise((0, *ends, 4))]
        if all(
            run.start // size == (run.stop - 1) // size or run.start % size == run.stop % size == 0
            for run in runs
        ):
            yield runs


def every_pipeline(case: Case, limit: Callable[[float], bool]) -> Iterator[Pipeline]:
    """All pipelines whose stages' bytes are within the limit; of the recomputations of one stage all."""
    shape, options = case.shape, case.options
    blocks = shape.blocks
    sizes = sorted({size * data for size in options.micro_batch_size or () for data in (1, 2, 4)})
    for samples, stages in product(sizes, (2, 3, 4)):
        many = BATCH // samples
        if stages > blocks:
            continue

        @cache
        def stage_costs(
            degrees: ParallelDegrees, own: range, place: int, samples: int = samples, stages: int = stages
        ) -> list[tuple[float, float, float, float]]:
            rows = []
            for kind, number in recomputations(options.recompute, len(own)):
                tokens = Tokens(SEQUENCE, samples // degrees.data)
                setting = TrainingSetting(
                    BATCH // samples,
                    tokens,
                    kind,
                    1,
                    number,
                    options.predictors,
                )
                layers = LayerTable(shape, replace(degrees, pipeline=stages), setting, case.costs)
                stage = layers.stage((own,), place)
                if limit(stage.bytes):
                    rows.append(
                        (stage.forward_seconds, stage.backward_seconds, stage.update_seconds, stage.bytes)
                    )
            # One that is slower and no faster in any way is no better.
            return sorted(rows)[:1] if stages > 2 else rows

        for runs in device_runs(case, stages):
            choices = [list(degrees_on(case, len(run), samples)) for run in runs]
            for all_degrees in product(*choices):
                devices = [StageDevices(own, run.start) for own, run in zip(all_degrees, runs, strict=True)]
                cuts = [
                    resharding_seconds(case.topology, a, b, SEQUENCE, samples, shape.hidden)
                    for a, b in pairwise(devices)
                ]
                for ends in combinations_with_replacement(range(blocks + 1), stages - 1):
                    parts = [range(a, b) for a, b in pairwise((0, *ends, blocks))]
                    if not all(parts[1:-1]):
                        continue
                    rows = [stage_costs(*own) for own in zip(all_degrees, parts, range(stages), strict=True)]
                    for chosen in product(*rows):
                        forward, backward, update, bytes = (list(own) for own in zip(*chosen, strict=True))
                        step = step_of_1f1b(forward, backward, cuts, many) + max(update)
                        yield Pipeline(step, max(bytes))


def search(case: Case, limit: float, most: float = NO_LIMIT, **more: tuple[int, ...]) -> StageAnswer:
    return search_stage_degrees(case.shape, case.topology, case.costs, case.options, limit, most, **more)


def test_equal_degrees_are_among_them() -> None:
    """Of plans with the same degrees on all stages none is faster than the fastest with degrees by stage."""
    for seed in (1, 2, 5, 7):
        case = random_case(seed)
        options = replace(case.options, virtual_stages=(1,), pp=(2, 4))
        same = search_degrees(case.shape, 4, case.costs, options, NO_LIMIT)
        own = search(case._replace(options=options), NO_LIMIT)
        assert own.plan is not None
        assert own.plan.estimate.step_seconds <= same.plans[0].estimate.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", [1, 2, 5, 14, 29, *SLOW_SEEDS])
def test_an_answer_against_every_pipeline(seed: int) -> None:
    case = random_case(seed)
    every = sorted(every_pipeline(case, lambda _: True))
    needs = sorted(own.bytes for own in every)
    for limit in (NO_LIMIT, needs[len(needs) // 4]):
        fitting = every if limit == NO_LIMIT else sorted(every_pipeline(case, lambda own: own <= limit))  # noqa: B023
        best = fitting[0].step
        answer = search(case, limit)
        assert answer.plan is not None
        assert answer.plan.estimate.step_seconds == pytest.approx(best, rel=1e-9)
        assert answer.bound_seconds == pytest.approx(best, rel=1e-9)
        assert answer.plan.estimate.peak_bytes <= limit * (1 + 1e-12)
        narrow = search(case, limit, widths=(1,))
        assert narrow.bound_seconds <= best * (1 + 1e-9)
        assert narrow.plan is None or narrow.plan.estimate.step_seconds >= best * (1 - 1e-9)
        assert search(case, limit, most=best * (1 - 1e-6)).plan is None


@pytest.mark.parametrize("seed", [3, 4, 9, 14, 24, 29])
def test_the_shortest_backward_that_fits(seed: int) -> None:
    """Of every stage there can be, by the ledger of each recomputation, at each limit that changes it."""
    case, random = random_case(seed), Random(seed)
    options = replace(case.options, recompute=random.choice(("partial", "full", "auto")))
    degrees, runs = ParallelDegrees(tensor=random.choice((1, 2))), BlockRuns(case.shape.routed)
    for role in (FIRST, MIDDLE, LAST):
        run = runs.runs[random.choice(runs.places(role))]
        after = 0 if role == LAST else random.randint(1, 2)
        place, stages = {FIRST: (0, after + 1), MIDDLE: (1, after + 2), LAST: (2, 3)}[role]
        own, by_mode = [], dict[Recompute, tuple[float, float]]()
        for kind, number in recomputations(options.recompute, len(run)):
            setting = TrainingSetting(2, Tokens(SEQUENCE, 2), kind, 1, number, options.predictors)
            layers = LayerTable(case.shape, replace(degrees, pipeline=stages), setting, case.costs)
            stage = layers.stage((run,), place)
            own.append((stage.bytes, stage.backward_seconds))
            by_mode[Recompute(kind, number)] = own[-1]
        for limit in {bytes * share for bytes, _ in own for share in (1 - 1e-9, 1 + 1e-9)}:
            setting = TrainingSetting(2, Tokens(SEQUENCE, 2), predictors=options.predictors)
            table = StageDegreeTable(
                case.shape, degrees, setting, case.costs, options.recompute, limit, runs, 3, NO_LIMIT
            )
            fitting = [seconds for bytes, seconds in own if bytes <= limit]
            found = table.backward[role, after, runs.runs.index(run)]
            assert found == pytest.approx(min(fitting, default=NO_LIMIT), rel=1e-12)
            if fitting:
                needed, seconds = by_mode[table.recompute(role, run, after)]
                assert needed <= limit
                assert seconds == pytest.approx(min(fitting), rel=1e-12)
        plain = LayerTable(case.shape, replace(degrees, pipeline=3), setting, case.costs)
        alone = 2 * plain.seconds(run, role).both
        for most, there in ((alone * (1 - 1e-9), False), (alone * (1 + 1e-9), True)):
            table = StageDegreeTable(
                case.shape, degrees, setting, case.costs, options.recompute, NO_LIMIT, runs, 3, most
            )
            number = runs.runs.index(run)
            for values in (table.backward[role, after], table.forward[role], table.update[role]):
                assert np.isfinite(values[number]) == there
