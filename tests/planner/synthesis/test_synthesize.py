"""`schedule="synthesized"`: an order that is no slower than those it starts from, in the file, verified."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.plan_file import Plan
from pplan.planner.search.budget import WORK_A_SECOND, SearchBudget
from pplan.profiler.profile_file import Profile
from pplan.runtimes.torch_actions import action_rows
from tests.oracle import attack

KNOWN = ("1f1b", "gpipe", "zb-h1", "zb-h2", "zb-v", "interleaved")
GIB = 2**30
OPTIONS: dict[str, Any] = {
    "gpus": 4,
    "mini_batch": 8,
    "micro_batches": 8,
    "memory_limit": 3 * GIB,
    "time_limit": 2.0,
}
Solve = Callable[..., Plan]


@pytest.fixture(autouse=True)
def counted_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a time limit allows is counted work: on a busy machine its seconds would end it first."""
    monkeypatch.setattr(SearchBudget, "of_seconds", lambda seconds: SearchBudget(seconds * WORK_A_SECOND))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Sixteen layers whose backward in two parts takes as long as a whole one, with many parameters: data
    parallelism fits on no device."""
    lines = [
        "name,forward_ms,backward_ms,backward_input_ms,activation_bytes,parameter_bytes,saved_bytes,"
        "micro_batch_size"
    ]
    for layer in range(16):
        for size in (1, 2, 4):
            forward = (8 + 5 * (layer * 7 % 4)) * size
            lines.append(
                f"l{layer},{forward},{2.1 * forward},{forward},{size << 20},{1 << 28},{size << 26},{size}"
            )
    file = tmp_path_factory.mktemp("costs") / "costs.csv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return pplan.import_profile(file)


@pytest.fixture
def solve(solve_once: Solve) -> Solve:
    """Solves the problem of these tests, once for all that change nothing."""

    def own(profile: Profile, schedule: str, **options: object) -> Plan:
        return solve_once(profile, schedule=schedule, **(OPTIONS | options))

    return own


def step(solve: Solve, profile: Profile, schedule: str) -> float:
    try:
        return solve(profile, schedule).prediction.step_seconds
    except pplan.InfeasibleError:
        return float("inf")


@pytest.mark.slow
def test_it_is_faster_than_every_known_order_here(solve: Solve, measured: Profile) -> None:
    known = {name: step(solve, measured, name) for name in KNOWN}
    plan = solve(measured, "synthesized")
    own = plan.prediction
    assert own.step_seconds < 0.99 * min(known.values()), known
    assert own.lower_bound_seconds <= own.step_seconds
    assert plan.schedule.startswith("synthesized-")
    assert plan.options.schedule == "synthesized"
    assert max(stage.memory_bytes for stage in plan.stages) <= 3 * GIB
    assert "any synchronous order" in own.bound_covers


@pytest.mark.slow
def test_the_same_order_is_found_again(solve: Solve, measured: Profile) -> None:
    plan = solve(measured, "synthesized")
    again = pplan.solve(measured, schedule="synthesized", **OPTIONS)
    assert (again.schedule, again.order) == (plan.schedule, plan.order)


def test_alternatives_recompute_as_their_runtime_does(solve: Solve, measured: Profile) -> None:
    """GPipe with `except_last` is no plan for torch.distributed.pipelining."""
    plan = solve(measured, "gpipe")
    assert plan.recompute == "except_last"
    for other in plan.alternatives:
        for name in other.runtimes:
            modes = set(other.stage_recompute) or {other.recompute}
            assert modes <= RUNTIMES[name].recompute, (name, modes)


def test_where_nothing_is_gained_the_known_plan_stays(solve: Solve, measured: Profile) -> None:
    plan = solve(measured, "synthesized", gpus=1, memory_limit=None)
    assert (plan.schedule, plan.order) == ("1f1b", None)


def test_a_runtime_without_lists_of_actions_gets_its_own_schedules(solve: Solve, measured: Profile) -> None:
    plan = solve(measured, "synthesized", runtime="deepspeed")
    assert plan.schedule in RUNTIMES["deepspeed"].schedules
    assert any("synthesized" in warning and "deepspeed" in warning for warning in plan.warnings)


@pytest.mark.slow
def test_runtimes_with_lists_of_actions_run_it(solve: Solve, measured: Profile) -> None:
    assert solve(measured, "synthesized", runtime="torch").schedule.startswith("synthesized-")
    nemo = solve(measured, "synthesized", runtime="nemo-automodel").schedule
    assert nemo.startswith("synthesized-") or nemo in RUNTIMES["nemo-automodel"].schedules


@pytest.mark.slow
def test_the_order_is_in_the_file(solve: Solve, measured: Profile, tmp_path: Path) -> None:
    plan = solve(measured, "synthesized")
    file = tmp_path / "own.plan.json"
    plan.save(file, force=False)
    SCHEDULES.pop(plan.schedule, None)  # as another process finds it
    again = pplan.load_plan(file)
    assert again.order == plan.order
    devices = len(plan.stages) // plan.virtual_stages
    program = SCHEDULES[plan.schedule].program(devices, 8, plan.virtual_stages)
    export = json.loads(pplan.export("torch", again).to_json())
    assert export["actions"] == action_rows(program)
    assert export["schedule"] == "_PipelineScheduleRuntime"
    simulated = pplan.simulate(again, profile=measured)
    assert simulated.step_seconds == pytest.approx(plan.prediction.step_seconds, rel=1e-9)
    with pytest.raises(UsageError, match="known of a plan alone"):
        pplan.simulate(again, profile=measured, micro_batches=4)


def drop_first(rows: list[str]) -> list[str]:
    return [*rows[:-1], rows[-1].replace(" F0", "", 1)]


def exchange_first_and_last(rows: list[str]) -> list[str]:
    key, content = rows[-1].split(": ")
    words = content.split()
    return [*rows[:-1], f"{key}: {' '.join([words[-1], *words[1:-1], words[0]])}"]


def twice(rows: list[str]) -> list[str]:
    return [*rows[:-1], f"{rows[-1]} F0"]


def other_name(rows: list[str]) -> list[str]:
    return ["name: other", *rows[1:]]


@pytest.mark.parametrize("change", [drop_first, exchange_first_and_last, twice, other_name])
def test_a_file_with_another_order_is_refused(
    solve: Solve, measured: Profile, tmp_path: Path, change: Callable[[list[str]], list[str]]
) -> None:
    plan = solve(measured, "synthesized")
    assert plan.order is not None
    name = plan.schedule
    changed = plan.model_copy(update={"order": change(plan.order)}).to_json()
    SCHEDULES.pop(name, None)
    (tmp_path / "own.plan.json").write_text(changed, encoding="utf-8")
    with pytest.raises(FileError, match="order"):
        pplan.load_plan(tmp_path / "own.plan.json")


def test_the_oracle_reads_the_order_itself(solve: Solve, measured: Profile) -> None:
    """A plan whose forwards all come first holds more than it says, and takes another time."""
    plan = solve(measured, "synthesized")
    assert plan.order is not None
    rows = []
    for row in plan.order:
        key, _, content = row.partition(": ")
        if key.startswith("device"):
            words = content.split()
            content = " ".join(sorted(words, key=lambda word: "FBW".index(word[0])))
        rows.append(f"{key}: {content}")
    changed = plan.model_copy(update={"order": rows})
    for own, agrees in ((plan, True), (changed, False)):
        found = attack(own.to_json(), measured.to_json())
        assert (not found) == agrees
        assert agrees or {"check_memory", "check_step"} & {finding.check for finding in found}


@pytest.mark.parametrize("schedule", ["/etc/passwd.schedule", "none.schedule"])
def test_a_plan_opens_no_other_file(solve: Solve, measured: Profile, tmp_path: Path, schedule: str) -> None:
    plan = solve(measured, "1f1b")
    text = plan.to_json().replace('"schedule": "1f1b",\n  "recompute": "auto"', f'"schedule": "{schedule}"')
    text = text.replace('"options": {', f'"options": {{"schedule": "{schedule}", ', 1)
    (tmp_path / "own.plan.json").write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match="opens no other file"):
        pplan.load_plan(tmp_path / "own.plan.json")
