"""The asynchronous search against the simulator's steady state of every plan of small spaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from math import inf
from typing import Literal

import pytest

from pplan.cost_models.memory import Recompute
from pplan.cost_models.timeline import steady_state
from pplan.planner.asynchronous import assemble_endless, asynchronous_notes, pace, steady_seconds
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.objectives import throughput as throughput_module
from pplan.planner.objectives.throughput import (
    asynchronous_configs,
    fastest_asynchronous,
    plan_asynchronous,
    throughput,
)
from pplan.planner.problem import Problem

MakeProblem = Callable[..., Problem]
Shapes = Callable[[Problem, int], list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]]
MODES: tuple[Recompute, Recompute] = ("never", "always")


@pytest.fixture(autouse=True)
def lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without WPipe, whose search has tests of its own."""
    monkeypatch.setattr(throughput_module, "wpipe_shapes", lambda problem: [])  # noqa: ARG005 - called with it


def asynchronous(problem: Problem, shapes: Shapes) -> Iterator[tuple[Proposal, tuple[Recompute, ...]]]:
    """Every asynchronous plan that fits."""
    for size in (1, 2, 4):
        for ends, devices in shapes(problem, size):
            count = 4 // size
            names = ["xpipe"] if problem.options.optimizer == "adam" else []
            names += ["pipedream"] if count == 1 else ["pipedream-2bw"] if count >= len(ends) else []
            for schedule in names if len(ends) > 1 else ():
                proposal = Proposal(PipelineConfig(schedule, "by_stage", count, size), ends, devices)
                for modes in product(MODES, repeat=len(ends)):
                    made = assemble_endless(problem.space, proposal, modes)
                    in_flight = [sum(made.ledger(device).values()) for device in range(len(ends))]
                    if max(in_flight) <= problem.space.limit(range(problem.gpus)):
                        yield proposal, modes


LONG = (1, 2, 7, 11)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed in LONG)) for seed in range(15)]
)
def test_best_of_all_asynchronous_plans(seed: int, make_problem: MakeProblem, every_shape: Shapes) -> None:
    problem = make_problem(
        seed,
        2 + seed % 4,
        2 + seed % 3,
        memory=[None, 1500, 900, 600][seed % 4],
        optimizer=["momentum", "adam"][seed % 2],
    )
    paces = [
        (pace(problem.space, proposal, modes) * proposal.config.micro_batches, proposal, modes)
        for proposal, modes in asynchronous(problem, every_shape)
    ]
    best, bound = fastest_asynchronous(problem, inf)
    if not paces:
        assert best is None
        assert bound == inf
        return
    least, proposal, modes = min(paces, key=lambda row: row[0])
    assert best is not None
    assert bound <= least * (1 + 1e-12)
    assert bound == pytest.approx(least, rel=1e-8)
    # What waits for a port is not in the formula, and only makes a plan slower: the bound holds.
    simulated = steady_seconds(problem.space, proposal, modes)
    assert bound * (1 - 1e-9) <= best.step_seconds <= simulated * (1 + 1e-6)
    if simulated == pytest.approx(least, rel=1e-6):
        assert best.step_seconds == pytest.approx(least, rel=1e-6)


@pytest.mark.slow
def test_most_of_these_plans_wait_for_no_port(make_problem: MakeProblem) -> None:
    """So that the test above compares steps, and not bounds alone."""
    reached = 0
    for seed in range(15):
        problem = make_problem(seed, 2 + seed % 4, 2 + seed % 3, memory=[None, 1500, 900, 600][seed % 4])
        best, bound = fastest_asynchronous(problem, inf)
        reached += best is not None and best.step_seconds <= bound * (1 + 1e-6)
    assert reached >= 8


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] * (s != 0)) for s in range(4)])
def test_the_formula_is_the_simulators_steady_state(
    seed: int, make_problem: MakeProblem, every_shape: Shapes
) -> None:
    problem = make_problem(seed, 4, 4)
    rows = list(asynchronous(problem, every_shape))[:: 12 + seed]
    assert len(rows) > 5
    for proposal, modes in rows:
        count = proposal.config.micro_batches
        simulated = steady_seconds(problem.space, proposal, modes)
        formula = pace(problem.space, proposal, modes) * count
        assert simulated >= formula * (1 - 1e-5), proposal
        made = assemble_endless(problem.space, proposal, modes, 48)
        own_ports = replace(made.costs(), links=None, port_seconds=0.0)
        alone = steady_state(made.program, own_ports).seconds_per_micro_batch * count
        assert alone == pytest.approx(formula, rel=1e-5), proposal


def test_xpipe_is_the_answer_where_micro_batches_are_fewer_than_stages(make_problem: MakeProblem) -> None:
    """Of two micro-batches 2BW has two stages at the most, and XPipe, with Adam's moments, three."""
    options = {"mini_batch": 2, "micro_batches": 2}
    best, bound = fastest_asynchronous(make_problem(1, 5, 3, optimizer="adam", **options), inf)
    assert best is not None
    assert (best.config.schedule, len(best.proposal.ends)) == ("xpipe", 3)
    notes = asynchronous_notes(best)
    assert "3 weight versions, two of them predicted, and gradients are 1-1-0 updates late" in notes[0]
    without, _ = fastest_asynchronous(make_problem(1, 5, 3, optimizer="momentum", **options), inf)
    assert without is not None
    assert (without.config.schedule, len(without.proposal.ends)) == ("pipedream-2bw", 2)
    assert without.step_seconds > bound


def test_memory_counts_weight_versions(make_problem: MakeProblem) -> None:
    """Three equal stages: PipeDream keeps 3, 2 and 1 versions; what is held falls from stage to stage."""
    problem = make_problem(1, 3, 3)
    proposal = Proposal(PipelineConfig("pipedream", "never", 1, 4), (1, 2, 3), ((0,), (1,), (2,)))
    made = assemble_endless(problem.space, proposal, ("never",) * 3)
    ledgers = [made.ledger(device) for device in range(3)]
    for stage, ledger in enumerate(ledgers):
        weights = float(problem.chain.parameter_bytes[stage])
        assert ledger["weight_versions"] == pytest.approx((2 - stage) * weights)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 3))])
def test_throughput_is_the_best_of_both_kinds(
    seed: int,
    make_problem: MakeProblem,
    every_shape: Shapes,
    every_plan: Callable[[Problem], list[tuple[Proposal, float, float]]],
) -> None:
    problem = make_problem(seed, 3, 3)
    outcome = throughput(problem)
    flushed = min(step for _, step, _ in every_plan(problem))
    late = min(
        pace(problem.space, proposal, modes) * proposal.config.micro_batches
        for proposal, modes in asynchronous(problem, every_shape)
    )
    assert outcome.best is not None
    assert outcome.best.step_seconds == pytest.approx(min(flushed, late), rel=1e-6)
    assert outcome.result.exact
    assert outcome.result.bound_seconds <= min(flushed, late) * (1 + 1e-6)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"schedule": "gpipe"}, "schedule='gpipe'"),
        ({"planner": "even"}, "planner even"),
        ({"runtime": "torchgpipe"}, "torchgpipe runs no"),
    ],
)
def test_wishes_that_leave_no_asynchronous_plan_are_said(
    options: dict[str, str], word: str, make_problem: MakeProblem
) -> None:
    outcome = throughput(make_problem(0, 4, 2, **options))
    assert word in outcome.notes[0]
    assert outcome.best == outcome.answer.best


def test_pins_and_cuts_hold(make_problem: MakeProblem, every_shape: Shapes) -> None:
    free = make_problem(9, 5, 3)
    names = free.chain.names
    cut = next(name for name, allowed in zip(names, free.chain.cut_after, strict=True) if allowed)
    problem = make_problem(9, 5, 3, cut_after=(cut,), pins=((names[-1], 1),))
    best, _ = fastest_asynchronous(problem, inf)
    assert best is not None
    assert best.proposal.bounds[0][1] == names.index(cut) + 1
    assert len(best.proposal.ends) == 2
    allowed = [
        pace(problem.space, proposal, modes) * proposal.config.micro_batches
        for proposal, modes in asynchronous(free, every_shape)
        if len(proposal.ends) == 2 and proposal.ends[0] == names.index(cut) + 1
    ]
    assert best.step_seconds == pytest.approx(min(allowed), rel=1e-6)


@pytest.mark.parametrize(("seed", "recompute"), [(3, "auto"), (3, "always")])
def test_plans_of_pipedreams_programme(seed: int, recompute: str, make_problem: MakeProblem) -> None:
    problem = make_problem(seed, 5, 3, planner="pipedream", recompute=recompute)
    found, bound = fastest_asynchronous(problem, inf)
    steps = []
    for config in asynchronous_configs(problem):
        mode: Literal["never", "always"] = "always" if config.recompute == "always" else "never"
        made = plan_asynchronous(
            problem.space, config.micro_batch_size, schedule=config.schedule, recompute=mode
        )
        most = config.micro_batches if config.schedule == "pipedream-2bw" else 5
        if made is not None and 1 < len(made.ends) <= most:
            proposal = Proposal(config, made.ends, made.devices)
            steps.append(steady_seconds(problem.space, proposal, (mode,) * len(made.ends)))
    assert found is not None
    assert found.step_seconds == min(steps)
    assert set(found.recompute) == {"always" if recompute == "always" else "never"}
    assert bound <= found.step_seconds
    assert fastest_asynchronous(problem, min(steps)) == (None, bound)
    whole, _ = fastest_asynchronous(make_problem(seed, 5, 3, recompute=recompute), inf)
    assert whole is not None
    assert bound <= whole.step_seconds <= found.step_seconds * (1 + 1e-9)
