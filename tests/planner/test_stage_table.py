"""The tables of all stages against each stage counted from its layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from math import ceil

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import LedgerOptions, ledger, total
from pplan.cost_models.optimizers import MIXED
from pplan.planner.stage_table import StageTable
from tests.stage_bytes import stage_bytes, stage_workspace

MakeChain = Callable[..., Chain]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("scale", [0.0, 1.0, 40.0])
def test_workspace_of_every_stage(seed: int, scale: float, make_chain: MakeChain) -> None:
    chain = make_chain(seed, 12)
    chain = replace(chain, workspace_bytes=scale * chain.workspace_bytes)
    table = StageTable.of(chain, 2)
    costs = chain.at(2)
    for i, j in combinations(range(table.blocks + 1), 2):
        layers = slice(table.cut_points[i], table.cut_points[j])
        expected = stage_workspace(costs.saved_bytes[layers].tolist(), costs.workspace_bytes[layers].tolist())
        assert np.broadcast_to(table.stage_bytes.workspace, table.valid.shape)[i, j] == pytest.approx(
            expected, abs=1e-9
        )
        terms = table.stage_ledger(i, j, 1, "never", "sgd")
        assert abs(terms["workspace"] - expected) < 1
        assert sum(terms.values()) == ceil(table.memory(1, "never", "sgd")[i, j])


def test_early_workspace_is_not_added_to_all_that_is_saved(make_chain: MakeChain) -> None:
    """Where every layer saves 100, a stage of three needs 300, and the first's 150 are within that."""
    flat = np.full((3, 3), 100.0)
    workspace = np.array([150.0, 20.0, 30.0])[:, None] * np.ones(3)
    chain = replace(make_chain(0, 3, cuts=1.0), saved_bytes=flat, workspace_bytes=workspace)
    found = StageTable.of(chain, 1).stage_bytes.workspace
    assert isinstance(found, np.ndarray)
    assert [found[0, 1], found[0, 2], found[0, 3], found[1, 2], found[1, 3], found[2, 3]] == [
        150,  # 250 - 100
        50,  # max(250, 220) - 200
        30,  # max(250, 220, 330) - 300
        20,
        30,
        30,
    ]


def test_memory_grows_with_the_stage(make_chain: MakeChain) -> None:
    """Another layer at either end never needs less, but for what crosses the cuts."""
    chain = make_chain(3, 9, traffic=0.0, cuts=1.0)
    chain = replace(
        chain,
        workspace_bytes=30 * chain.workspace_bytes,
        saved_input_bytes=0 * chain.saved_input_bytes,
        input_bytes_per_sample=0.0,
    )
    for recompute in ("never", "always"):
        for in_flight in (1, 3):
            needs = StageTable.of(chain, 2).memory(in_flight, recompute, "sgd")
            for i, j in combinations(range(len(chain) + 1), 2):
                assert j == len(chain) or needs[i, j + 1] >= needs[i, j] - 1e-9
                assert i == 0 or needs[i - 1, j] >= needs[i, j] - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_the_bytes_of_every_stage_are_those_of_its_layers(seed: int, make_chain: MakeChain) -> None:
    chain = make_chain(seed, 10, cuts=[1.0, 0.5][seed % 2])
    table = StageTable.of(chain, 2)
    for i, j in combinations(range(table.blocks + 1), 2):
        expected = stage_bytes(chain.at(2), table.cut_points[i], table.cut_points[j] - 1)
        found = table.bytes_between(i, j, zero=3)
        for name, amount in vars(expected).items():
            assert vars(found)[name] == (None if amount is None else pytest.approx(amount)), name


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_memory_of_every_stage_is_its_ledger(zero: int, make_chain: MakeChain) -> None:
    """A device's share of a replicated stage, with all that the ledger knows."""
    table = StageTable.of(make_chain(zero, 8), 2)
    options: LedgerOptions = {
        "weight_versions": 1.5,
        "zero": zero,
        "precision": MIXED,
        "context_bytes": 512.0,
    }
    needs = table.memory(3, "always", "adamw-8bit", 4, **options)
    for i, j in combinations(range(table.blocks + 1), 2):
        layers = stage_bytes(table.costs, table.cut_points[i], table.cut_points[j] - 1)
        terms = ledger(layers, in_flight=3, recompute="always", optimizer="adamw-8bit", replicas=4, **options)
        assert needs[i, j] == pytest.approx(total(terms))
        found = table.stage_ledger(i, j, 3, "always", "adamw-8bit", 4, **options)
        assert found == {name: pytest.approx(amount, abs=1) for name, amount in terms.items()}
