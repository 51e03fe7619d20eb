"""The programme of blocks with degrees of their own: against every choice, counted in parts of the memory."""

from __future__ import annotations

from itertools import pairwise, product
from math import ceil
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.transformer.layer_table import LIBRARIES
from pplan.cost_models.transformer.rank_costs import PassSeconds
from pplan.cost_models.transformer.training_setting import block_ranges, even_blocks
from pplan.cost_models.transformer.training_step import pipeline_seconds
from pplan.cost_models.transformer.weight_update import ParameterCounts, update_seconds
from pplan.planner.degrees import layer_degrees
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.layer_degrees import PARTS, _later, _Pipeline, plan_layer_degrees

from .test_layer_degrees import random_case

Patch = pytest.MonkeyPatch
NO_LIMIT = float("inf")


def fewest_parts(whole: _Pipeline, choices: list[Any], stage: int, blocks: range, space: float) -> float:
    """Of every way to choose whose blocks need no more parts of the memory than there are, the least."""
    room, parts = whole.memory_bytes - LIBRARIES - space, PARTS * len(blocks)
    least = NO_LIMIT
    for picks in product(choices, repeat=len(blocks)) if room > 0 else ():
        seconds, used = 0.0, 0
        for place, (own, block) in enumerate(zip(picks, blocks, strict=True)):
            roles = [0] * (stage == 0 and place == 0)
            roles += [2] * (stage == whole.stages - 1 and place == len(blocks) - 1)
            both, bytes = whole._block_costs(own, whole.shape.routed[block], roles, stage)
            seconds += both
            used += ceil(bytes / room * parts - 1e-9)
        changes = sum(whole._change(a, b) for a, b in pairwise(picks))
        if used <= parts:
            least = min(least, seconds + 2 * whole.micro_batches * changes)
    return least


@pytest.mark.parametrize("seed", range(8))
def test_the_programme_counts_in_parts_of_the_memory(seed: int) -> None:
    """In memories that are short, what it finds is the least of all that fits when rounded up."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    shape = shape.with_blocks(min(shape.blocks, 3))
    stages = 1 + seed % 2
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, random.choice((4, 8)))
    choices = random.sample(whole.choices, min(4, len(whole.choices)))
    found = set()
    for stage, blocks in enumerate(block_ranges(even_blocks(shape.blocks, stages))):
        needs = sorted(
            sum(whole._block_costs(own, shape.routed[block], [], stage)[1] for block in blocks)
            for own in choices
        )
        for room in (needs[0] * 0.7, needs[0] * 1.1, needs[-1], needs[-1] * 1.4, needs[-1] * 3, 1e13):
            space = 1e5
            whole.memory_bytes = LIBRARIES + space + room
            seconds, picks = whole._programme(choices, stage, blocks, space)
            assert seconds == pytest.approx(fewest_parts(whole, choices, stage, blocks, space), rel=1e-12)
            if seconds < NO_LIMIT:
                assert len(picks) == len(blocks)
            found.add(seconds == NO_LIMIT)
        whole.memory_bytes = LIBRARIES + 1e5
        assert whole._programme(choices, stage, blocks, 1e5) == (NO_LIMIT, [])
    assert found == {False, True}
    assert _later(np.arange(4.0), 0).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert _later(np.arange(4.0), 3).tolist() == [NO_LIMIT] * 3 + [0.0]
    assert _later(np.arange(4.0), 4).tolist() == [NO_LIMIT] * 4


@pytest.mark.parametrize("seed", range(8))
def test_a_stage_whose_blocks_differ(seed: int) -> None:
    """Its seconds, its update and its bytes, from what each block has, and the embedding and head with the
    degrees of the block beside them."""
    random = Random(seed)
    shape, topology, costs, options = random_case(random)
    stages = 1 + seed % 2
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, stages, 8)
    for stage, blocks in enumerate(block_ranges(even_blocks(shape.blocks, stages))):
        picks = [random.choice(whole.choices) for _ in blocks]
        kinds = [shape.routed[block] for block in blocks]
        parts = [own.seconds[kind] for own, kind in zip(picks, kinds, strict=True)]
        updates: dict[Any, list[ParameterCounts]] = {}
        for own, kind in zip(picks, kinds, strict=True):
            updates.setdefault(own.own.degrees, []).append(own.parameters[kind])
        alive = min(whole.micro_batches, stages - stage)
        bytes = LIBRARIES + sum(o.states[k] + alive * o.saved[k] for o, k in zip(picks, kinds, strict=True))
        space = max(own.workspace for own in picks)
        for role, own in [(0, picks[0])] * (stage == 0) + [(2, picks[-1])] * (stage == stages - 1):
            parts.append(own.ends[role])
            updates[own.own.degrees].append(own.layers.parameters(range(0), role))
            bytes += own.end_states[role]
            if role == 2:
                bytes += alive * own.end_saved + own.end_placeholders
                space = max(space, own.end_workspace)
        changes = sum(whole._change(a, b) for a, b in pairwise(picks))
        found = whole._stage_seconds(stage, picks, blocks)
        assert found.forward == pytest.approx(changes + sum(part.forward for part in parts))
        assert found.backward == pytest.approx(changes + sum(part.backward for part in parts))
        expected = 0.0
        for degrees, counts in updates.items():
            total = ParameterCounts(sum(own.dense for own in counts), sum(own.routed for own in counts))
            expected += update_seconds(total, degrees, costs)
        assert whole._update_seconds(stage, picks, blocks) == pytest.approx(expected)
        for degrees in updates:
            alike = [n for n, own in enumerate(picks) if own.own.degrees == degrees]
            bytes += picks[alike[-1]].placeholders[frozenset(kinds[n] for n in alike)]
        assert whole._stage_bytes(stage, picks, blocks) == pytest.approx(bytes + space)


def test_a_plan_of_its_stages(monkeypatch: Patch) -> None:
    """The step of what each stage takes, cuts between degrees, the longest update and the most bytes."""
    random = Random(3)
    shape, topology, costs, options = random_case(random)
    shape = shape.with_blocks(2)
    whole = _Pipeline(shape, topology, costs, options, NO_LIMIT, 2, 8)
    first, last = whole.choices[0], whole.choices[-1]
    picks: dict[int, Any] = {0: [first], 1: [last]}
    monkeypatch.setattr(_Pipeline, "_choose", lambda _, stage, __: picks[stage])
    monkeypatch.setattr(_Pipeline, "_stage_seconds", lambda _, stage, __, ___: PassSeconds(1.0 + stage, 2.0))
    monkeypatch.setattr(_Pipeline, "_update_seconds", lambda _, stage, *__: (0.5, 0.25)[stage])
    monkeypatch.setattr(_Pipeline, "_stage_bytes", lambda _, stage, *__: (3.0, 4.0)[stage])
    plan = whole.plan()
    assert plan is not None
    cut = whole._cut(first.stage_devices(0), last.stage_devices(whole.size))
    step = pipeline_seconds([PassSeconds(1.0, 2.0), PassSeconds(2.0, 2.0)], [cut], whole.micro_batches)
    assert (plan.step_seconds, plan.peak_bytes) == (step + 0.5, 4.0)
    assert plan.stages == ((first.own,), (last.own,))
    assert (plan.samples, plan.micro_batches) == (8, whole.micro_batches)
    picks[1] = None
    assert whole.plan() is None


def test_which_pipelines_of_blocks_are_planned(monkeypatch: Patch) -> None:
    """Stages that divide the devices, sizes that divide the batch; those that may be faster than the best,
    which of several is the first."""
    made, asked = list[tuple[int, int]](), list[tuple[int, int]]()

    class Own:
        def __init__(self, *given: Any) -> None:
            self.key = given[-2:]
            made.append(self.key)

        def least_seconds(self) -> float:
            return {4: 4.0, 2: 1.0, 1: 2.0}.get(self.key[0], 1.0)

        def plan(self) -> Any:
            asked.append(self.key)
            seconds = {(1, 4): 5.0, (1, 8): 3.0, (2, 8): 3.0}.get(self.key)
            return None if seconds is None else SimpleNamespace(step_seconds=seconds, key=self.key)

    monkeypatch.setattr(layer_degrees, "_Pipeline", Own)
    shape, topology = SimpleNamespace(blocks=6), SimpleNamespace(gpus=12)
    options = DegreeOptions(mini_batch=8, sequence=64)
    plan: Any = plan_layer_degrees(shape, topology, None, options, 1.0)  # type: ignore[arg-type]
    assert plan.key == (2, 8)
    assert made == [(s, n) for s in (1, 2, 4) for n in (1, 2, 4, 8)]
    assert asked == [(s, n) for s in (2, 1) for n in (1, 2, 4, 8)]
    options = DegreeOptions(mini_batch=12, sequence=64)
    made.clear()
    plan_layer_degrees(shape, SimpleNamespace(gpus=3), None, options, 1.0)  # type: ignore[arg-type]
    assert [n for _, n in made] == [1, 2, 3, 4, 6, 12]
