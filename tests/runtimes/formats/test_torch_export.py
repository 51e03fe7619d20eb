"""What the file for torch.distributed.pipelining says, and which plans it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pplan.cost_models.errors import ExportError, FileError, PplanError, UsageError
from pplan.cost_models.schedules import find_schedule
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.exports import export
from pplan.runtimes.torch_actions import action_rows, build_program, device_stages

MakePlan = Callable[..., Plan]


def exported(plan: Plan) -> TorchExport:
    document, _ = export("torch", plan)
    assert isinstance(document, TorchExport)
    return document


def on_devices(plan: Plan, *devices: list[int]) -> Plan:
    stages = [
        stage.model_copy(update={"devices": own, "replicas": len(own)})
        for stage, own in zip(plan.stages, devices, strict=True)
    ]
    return plan.model_copy(update={"stages": stages})


def test_a_1f1b_plan(make_plan: MakePlan) -> None:
    plan = make_plan(
        [3, 5, 2],
        replicas=[2, 2, 2],
        micro_batches=8,
        micro_batch_size=4,
        schedule="1f1b",
        recompute="always",
        gpus_per_node=4,
    )
    document, remark = export("torch", plan)
    assert remark is None
    content = json.loads(document.to_json())
    assert content.pop("actions")[2].startswith("2F0,2B0,2F1,2B1,")
    assert content.pop("made_by")
    assert content == {
        "schema": 1,
        "runtime": "torch",
        "model": "small",
        "layers_sha256": "",
        "mini_batch": 32,
        "micro_batch_size": 4,
        "step_seconds": 0.5,
        "estimated": False,
        "micro_batches": 8,
        "order": "1f1b",
        "schedule": "Schedule1F1B",
        "parts": [0, 3, 8, 10],
        "stages": [[0], [1], [2]],
        "replicas": 2,
        "devices": [0, 1, 2, 3, 4, 5],
        "gpus_per_node": 4,
        "recompute": ["always"] * 3,
        "granularity": "block",
        "zero": 0,
    }


@pytest.mark.parametrize(
    ("schedule", "kind", "stages"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", [[0, 2], [1, 3]]),
        ("looped-bfs", "ScheduleLoopedBFS", [[0, 2], [1, 3]]),
        ("zb-v", "ScheduleZBVZeroBubble", [[0, 3], [1, 2]]),
        ("dualpipe-v", "ScheduleDualPipeV", [[0, 3], [1, 2]]),
    ],
)
def test_two_stages_a_device(make_plan: MakePlan, schedule: str, kind: str, stages: list[list[int]]) -> None:
    """In a loop over the devices, or down and up again; devices are named once each."""
    plan = make_plan([1, 2, 3, 4], micro_batches=4, schedule=schedule, virtual_stages=2)
    of_stage = [7 if stage in stages[0] else 6 for stage in range(4)]
    document = exported(on_devices(plan, *([device] for device in of_stage)))
    assert (document.schedule, document.stages, document.devices) == (kind, stages, [7, 6])
    assert document.parts == [0, 1, 3, 6, 10]
    wrong = on_devices(plan, [7], [6], [7], [6] if stages[0] == [0, 3] else [7])
    with pytest.raises(ExportError, match="of the plan is on devices"):
        export("torch", wrong)


def test_stages_that_no_schedule_has(make_plan: MakePlan) -> None:
    with pytest.raises(ValidationError, match="virtual_stages is 2, which does not divide the 3 parts"):
        make_plan([1, 2, 3], micro_batches=4, schedule="interleaved", virtual_stages=2)
    plan = make_plan([1, 2, 3, 4], micro_batches=4, schedule="zb-v", virtual_stages=4)
    with pytest.raises(PplanError, match="zb-v"):
        export("torch", plan)


def test_an_order_without_a_class_is_told_action_by_action(make_plan: MakePlan) -> None:
    document = exported(make_plan([4, 6], micro_batches=2, schedule="zb-h1"))
    assert document.schedule == "_PipelineScheduleRuntime"
    # Stage 0 runs two forwards ahead; the last one keeps each weight gradient back by one micro-batch.
    assert document.csv == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"


def test_1f1b_with_few_micro_batches_is_told_action_by_action(make_plan: MakePlan) -> None:
    """PyTorch's class refuses fewer micro-batches than stages."""
    document = exported(make_plan([3, 3, 4], micro_batches=2, schedule="1f1b"))
    assert document.schedule == "_PipelineScheduleRuntime"
    assert document.actions[2] == "2F0,2B0,2F1,2B1"


@pytest.mark.parametrize("schedule", ["chimera", "autopipe", "pipedream"])
def test_what_no_list_of_actions_says_is_refused(schedule: str) -> None:
    with pytest.raises(ExportError, match=f"its schedule is {schedule}") as caught:
        build_program(schedule, 2, 4, find_schedule(schedule).default_virtual_stages)
    assert "pplan.solve(runtime='torch')" in caught.value.hint


def test_each_stage_recomputes_for_itself(make_plan: MakePlan) -> None:
    plan = make_plan([4, 3, 3], schedule="1f1b", micro_batches=4)
    words = ("always", None, "never")
    stages = [
        stage.model_copy(update={"recompute": word}) for stage, word in zip(plan.stages, words, strict=True)
    ]
    own = plan.model_copy(update={"stages": stages, "recompute": "always"})
    assert exported(own).recompute == ["always", "always", "never"]
    with pytest.raises(ExportError, match="its stages recompute always and never, in deepspeed all do"):
        export("deepspeed", own)


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"schedule": "pipedream"}, "its schedule is pipedream, torch runs 1f1b, dapple, dualpipe-v"),
        ({"replicas": [2, 1]}, "its stages have 2-1 replicas, torch runs the same number of them"),
        ({"replicas": [4, 4]}, "its 4 replicas cannot share 2 samples evenly"),
        ({"recompute": "by_stage"}, "it recomputes by_stage, torch knows always, first_layers, never"),
        ({"recompute": "except_last"}, "it recomputes except_last"),
    ],
)
def test_refusals(make_plan: MakePlan, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ExportError) as caught:
        export("torch", make_plan([5, 5], **keys))
    assert reason in caught.value.what
    assert "pplan.solve(runtime='torch')" in caught.value.hint


def test_stages_that_go_back_and_forth_between_nodes(make_plan: MakePlan) -> None:
    """Ranks are numbered stage by stage, and launchers fill node after node."""
    plan = make_plan([3, 3, 4], schedule="1f1b", micro_batches=4, gpus_per_node=2)
    assert exported(on_devices(plan, [1], [0], [2])).devices == [1, 0, 2]
    with pytest.raises(ExportError, match="go back and forth between nodes"):
        export("torch", on_devices(plan, [0], [2], [1]))


def test_micro_batches_that_a_schedule_does_not_run(make_plan: MakePlan) -> None:
    with pytest.raises(UsageError, match="dualpipe-v needs at least 4"):
        export("torch", make_plan([1, 2, 3, 4], micro_batches=2, schedule="dualpipe-v", virtual_stages=2))


def test_an_alternative_is_taken(make_plan: MakePlan, alternative: Callable[..., dict[str, Any]]) -> None:
    words = {"recompute": "by_stage", "stage_recompute": ["always", "never"]}
    own = alternative(runtimes=["torch"], schedule="1f1b", balance=[7, 3], micro_batch_size=1, **words)
    plan = make_plan([4, 6], replicas=[2, 1], schedule="1f1b", alternatives=[own])
    document, remark = export("torch", plan)
    assert remark is not None
    assert isinstance(document, TorchExport)
    assert (document.parts, document.replicas, document.devices) == ([0, 7, 10], 1, [0, 1])
    assert document.recompute == ["always", "never"]


def test_an_alternative_of_several_stages_a_device(
    make_plan: MakePlan, alternative: Callable[..., dict[str, Any]]
) -> None:
    counts = {"micro_batches": 2, "micro_batch_size": 2, "virtual_stages": 2, "replicas": 2}
    own = alternative(runtimes=["torch"], schedule="zb-v", balance=[1, 2, 3, 4], **counts)
    document, _ = export("torch", make_plan([4, 6], replicas=[2, 1], alternatives=[own]))
    assert isinstance(document, TorchExport)
    assert (document.stages, document.replicas, document.devices) == ([[0, 3], [1, 2]], 2, [0, 1, 2, 3])
    assert document.order == "zb-v"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"parts": [0, 10]}, "stages [[0], [1]] are not stages 0 to 0, once each"),
        ({"parts": [0, 0, 10]}, "parts [0, 0, 10] are not the bounds of 2 stages"),
        ({"stages": [[0], [0]]}, "stages [[0], [0]] are not stages 0 to 1, once each"),
        ({"devices": [0]}, "devices are 1, 2 of the pipeline times replicas 1 must be as many"),
        ({"recompute": ["never"]}, "recompute has 1 entries, there must be 2"),
        ({"actions": []}, "actions has 0 entries, there must be 2"),
        ({"micro_batches": 3}, "micro_batches 3 times micro_batch_size 2 do not make a mini_batch of 4"),
        (
            {"replicas": 3, "devices": [0] * 6},
            "micro_batch_size 2 is not shared evenly by 3 replicas",
        ),
    ],
)
def test_a_file_that_contradicts_itself(make_plan: MakePlan, keys: dict[str, Any], what: str) -> None:
    known = json.loads(exported(make_plan([4, 6])).to_json())
    with pytest.raises(FileError) as caught:
        TorchExport.parse(json.dumps(known | keys), "x.json")
    assert caught.value.what == f"x.json: {what}"


@pytest.mark.parametrize(
    ("name", "kind", "virtual_stages", "micro_batches"),
    [
        ("interleaved", "Interleaved1F1B", 2, 8),
        ("looped-bfs", "LoopedBFS", 2, 4),
        ("zb-v", "ZBVZeroBubble", 2, 6),
        ("dualpipe-v", "DualPipeV", 2, 8),
    ],
)
def test_pytorchs_classes_run_the_plans_order(
    name: str, kind: str, virtual_stages: int, micro_batches: int
) -> None:
    """What was simulated is what is run. 1F1B's table is wrong in PyTorch, its class is not."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    program = find_schedule(name).program(4, micro_batches, virtual_stages)
    ours = [row.split(",") for row in action_rows(program)]
    tables = get_schedule_ops(kind, 4, micro_batches, virtual_stages)
    theirs = [
        [str(part) for action in row if action is not None for part in action.sub_actions or (action,)]
        for row in tables
    ]
    assert ours == theirs
    assert [sorted({int(action[0]) for action in row}) for row in theirs] == device_stages(program)


def test_round_trip_of_a_file(make_plan: MakePlan, tmp_path: Path) -> None:
    document = exported(make_plan([4, 6], schedule="zb-h1", micro_batches=3))
    document.save(tmp_path / "small.torch.json", force=False)
    assert TorchExport.load(tmp_path / "small.torch.json") == document
