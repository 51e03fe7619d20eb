"""How many devices share every layer: the answer against all plans of every number of sharers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attack.enumeration import Enumeration

import pplan
from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.planner.joint_search import find_best_plan, without_plan
from pplan.planner.plan_file import ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.shared_layers import DegreeProblem, solve_degrees

TOLERANCE = 1e-8
MIB = 2**20
REFERENCE = ProfileReference(file="table.profile.json", sha256="0" * 64)


@dataclass
class Layer:
    """Costs of one layer by how many devices share it."""

    forward: dict[int, float]
    backward: dict[int, float]
    output: int
    parameters: dict[int, int]


def drawn(seed: int) -> tuple[list[Layer], dict[str, Any]]:
    """Three or four layers that 1, 2 or 4 devices share, each the worse shared the more; and a machine."""
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(int(rng.integers(3, 5))):
        forward, backward = rng.uniform(5e-3, 2e-2, 2)
        shares = {1: 1.0, 2: rng.uniform(0.5, 0.9), 4: rng.uniform(0.3, 0.8)}
        weights = int(rng.integers(50, 200)) * MIB
        layers.append(
            Layer(
                {n: forward * share for n, share in shares.items()},
                {n: backward * share for n, share in shares.items()},
                int(rng.integers(1, 40)) * MIB,
                {n: weights // n for n in shares},
            )
        )
    machine = {
        "gpus": 4,
        "memory_bytes": int(rng.choice([400, 800, 3000])) * MIB,
        "bandwidth": float(rng.choice([2e9, 2e10])),
        "latency": 1e-5,
    }
    return layers, machine


def table(layers: list[Layer]) -> list[dict[str, Any]]:
    """The rows of an imported table, in other units than seconds."""
    rows = []
    for number, layer in enumerate(layers):
        row: dict[str, Any] = {"name": f"layer{number}"}
        for n in layer.forward:
            prefix = f"tp{n}_" if n > 1 else ""
            row |= {
                f"{prefix}forward_us": layer.forward[n] * 1e6,
                f"{prefix}backward_ms": layer.backward[n] * 1e3,
                f"{prefix}activation_bytes": layer.output,
                f"{prefix}parameter_bytes": layer.parameters[n],
            }
        rows.append(row)
    return rows


def chain(layers: list[Layer], sharers: int) -> Chain:
    """The layers as one of so many devices computes them, written down once more."""

    def column(values: list[float]) -> Any:
        return np.array(values, dtype=np.float64)[:, None]

    parameters = np.array([layer.parameters[sharers] for layer in layers], dtype=np.float64)
    nothing = column([0.0] * len(layers))
    outputs = [float(layer.output) for layer in layers]
    return Chain(
        names=tuple(f"layer{number}" for number in range(len(layers))),
        sizes=(1,),
        parameter_bytes=parameters,
        trainable_bytes=parameters,
        buffer_bytes=0 * parameters,
        cut_after=np.array([True] * (len(layers) - 1) + [False]),
        input_bytes_per_sample=0.0,
        forward_seconds=column([layer.forward[sharers] for layer in layers]),
        backward_seconds=column([layer.backward[sharers] for layer in layers]),
        output_bytes=column(outputs),
        saved_bytes=column(outputs),
        saved_input_bytes=column([0.0, *outputs[:-1]]),
        workspace_bytes=nothing,
        forward_host_seconds=nothing,
        backward_host_seconds=nothing,
        scales_with_samples=True,
    )


def problem(layers: list[Layer], machine: dict[str, Any], sharers: int, **options: Any) -> Problem:
    link = Link(machine["bandwidth"], machine["latency"])
    device, gpus = Device("toy", machine["memory_bytes"]), machine["gpus"] // sharers
    topology = two_level_topology(device, gpus, gpus, link, link)
    own = PlanOptions(mini_batch=8, optimizer="adam", **options)
    return Problem(chain(layers, sharers), topology, own)


def every_step(layers: list[Layer], machine: dict[str, Any], degrees: tuple[int, ...]) -> dict[int, float]:
    """The shortest step of all plans of each number of sharers; inf where none fits."""
    steps = {}
    for sharers in degrees:
        own = Enumeration(problem(layers, machine, sharers), ("1f1b", "gpipe")).best()
        steps[sharers] = inf if own is None else own.step_seconds
    return steps


@pytest.mark.parametrize(("seed", "tp"), [(1, (1, 2)), (5, None)])
def test_no_plan_of_any_number_of_sharers_is_faster(
    seed: int, tp: tuple[int, ...] | None, tmp_path: Path
) -> None:
    layers, machine = drawn(seed)
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table(layers)))
    profile = pplan.import_profile(file)
    assert profile.degrees == [1, 2, 4]
    steps = every_step(layers, machine, tp or (1, 2, 4))
    least = min(steps.values())
    plan = pplan.solve(profile, tp=tp, mini_batch=8, optimizer="adam", **machine)
    assert plan.prediction.exact
    assert plan.prediction.step_seconds == pytest.approx(least, rel=TOLERANCE)
    assert steps[plan.profile.tensor_parallel] == pytest.approx(least, rel=TOLERANCE)
    for row in plan.sharing:
        assert (row.step_seconds or inf) == pytest.approx(steps[row.tensor_parallel], rel=TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [1e-4, 30.0])
def test_the_bound_holds_also_where_the_search_ends_early(seed: int, limit: float) -> None:
    layers, machine = drawn(seed)
    steps = every_step(layers, machine, (1, 2, 4))
    least = min(steps.values())
    problems = {n: problem(layers, machine, n, time_limit=limit) for n in steps}
    for sharers, own in problems.items():
        result = find_best_plan(own.with_time_limit()).result
        if result.best is None:
            assert without_plan(own, result).bound_seconds <= steps[sharers] * (1 + TOLERANCE)
    cases = [DegreeProblem(n, own, REFERENCE) for n, own in problems.items()]
    try:
        plan = solve_degrees(cases, model="table", compared=False)
    except InfeasibleError:
        assert least == inf or limit < 1
        return
    bounds = [row.lower_bound_seconds for row in plan.sharing if row.lower_bound_seconds is not None]
    assert plan.prediction.lower_bound_seconds <= min(least, *bounds) * (1 + TOLERANCE)
    assert plan.prediction.step_seconds >= least * (1 - TOLERANCE)
    if plan.prediction.exact:
        assert plan.prediction.step_seconds == pytest.approx(least, rel=TOLERANCE)
    assert plan.prediction.exact or limit < 1


def test_without_a_plan_the_bound_is_of_all_schedules() -> None:
    """A search that was given no plan keeps a bound below every plan of other schedules, too."""
    layers, machine = drawn(1)
    own = problem(layers, machine | {"memory_bytes": 10**12}, 1, schedule="any")
    result = find_best_plan(own).result
    assert result.best is not None
    left = without_plan(own, result)
    assert left.best is None
    assert left.bound_seconds <= result.best.step_seconds
    tight = problem(layers, machine | {"memory_bytes": MIB}, 1)
    assert without_plan(tight, find_best_plan(tight).result).bound_seconds == inf


def test_the_plan_goes_on_through_every_verb(tmp_path: Path) -> None:
    """It says how many share the layers, and what reads it takes the costs for so many."""
    layers, machine = drawn(2)
    for layer in layers:  # four devices are four times as fast
        layer.forward = {n: 0.01 / n for n in layer.forward}
        layer.backward = {n: 0.02 / n for n in layer.backward}
        layer.output = MIB
    costs, profile, file = (tmp_path / name for name in ("table.json", "table.profile.json", "plan.json"))
    costs.write_text(json.dumps(table(layers)))
    pplan.import_profile(costs).save(profile, force=False)
    plan = pplan.solve(profile, tp=(1, 2, 4), **(machine | {"memory_bytes": 600 * MIB, "mini_batch": 8}))
    assert (plan.profile.tensor_parallel, plan.gpus) == (4, 1)
    assert [row.tensor_parallel for row in plan.sharing] == [1, 2, 4]
    assert plan.options.tp == (1, 2, 4)
    assert sum("every layer" in note for note in plan.notes) == 2
    plan.save(file, force=False)
    simulated = pplan.simulate(file, profile)
    assert simulated.step_seconds == pytest.approx(plan.prediction.step_seconds)
    assert pplan.lint(file).agrees
    assert pplan.explain(file, profile).limits
    wrong = json.loads(file.read_text())
    wrong["sharing"][0]["step_seconds"] = plan.prediction.step_seconds / 2
    file.write_text(json.dumps(wrong))
    differing = [line for line in pplan.lint(file).lines if line.state == "differs"]
    assert [line.name for line in differing] == ["sharing of layers", "file"]


def test_what_cannot_be_chosen_so(tmp_path: Path) -> None:
    layers, machine = drawn(3)
    costs = tmp_path / "table.json"
    costs.write_text(json.dumps(table(layers)))
    profile = pplan.import_profile(costs)
    asked = machine | {"mini_batch": 8}
    with pytest.raises(UsageError, match="tp=8: the profile has no costs of layers that 8 devices share"):
        pplan.solve(profile, tp=8, **asked)
    with pytest.raises(UsageError, match="objective='memory'"):
        pplan.solve(profile, objective="memory", **asked)
    with pytest.raises(UsageError, match="frontier: the profile has costs of layers that 1, 2 or 4"):
        pplan.frontier(profile, **asked)
    assert pplan.solve(profile, tp=2, objective="memory", **asked).profile.tensor_parallel == 2
    with pytest.raises(UsageError, match="does not let 2 devices share a layer"):
        pplan.solve(profile, tp=(2, 4), runtime="deepspeed", **asked)
    alone = pplan.solve(profile, runtime="deepspeed", **(asked | {"memory_bytes": 10**12}))
    assert alone.profile.tensor_parallel == 1
    assert [row.step_seconds is None for row in alone.sharing] == [False, True, True]
    three = pplan.solve(profile, **(asked | {"gpus": 6, "memory_bytes": 10**12}))
    assert "cannot be grouped by 4" in three.sharing[2].reason


def test_several_profiles_one_for_each_number(tmp_path: Path) -> None:
    layers, machine = drawn(4)
    files = []
    for sharers in (2, 1):
        rows = [
            {"name": f"layer{i}"}
            | {
                "forward_seconds": layer.forward[sharers],
                "backward_seconds": layer.backward[sharers],
                "activation_bytes": layer.output,
                "parameter_bytes": layer.parameters[sharers],
            }
            for i, layer in enumerate(layers)
        ]
        costs = tmp_path / f"tp{sharers}.json"
        costs.write_text(json.dumps(rows))
        own = pplan.import_profile(costs, tensor_parallel=sharers, model="table")
        files.append(tmp_path / f"tp{sharers}.profile.json")
        own.save(files[-1], force=False)
    asked = machine | {"memory_bytes": 10**12, "mini_batch": 8, "optimizer": "adam"}
    steps = every_step(layers, machine | {"memory_bytes": 10**12}, (1, 2))
    plan = pplan.solve(files, **asked)
    assert plan.prediction.step_seconds == pytest.approx(min(steps.values()), rel=TOLERANCE)
    assert plan.profile.file == f"tp{plan.profile.tensor_parallel}.profile.json"
    with pytest.raises(UsageError, match="two profiles for tp=2"):
        pplan.solve([files[0], files[0]], **asked)
    other = pplan.load_profile(files[1]).model_copy(update={"dtype": "bfloat16"})
    with pytest.raises(UsageError, match="have dtype bfloat16 and float32"):
        pplan.solve([other, files[0]], **asked)
