"""The plan's file: the keys of its minimal form, and every contradiction that is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import FileError
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.plan_file import Plan

MINIMAL: dict[str, Any] = {
    "schema": 1,
    "model": "vgg19",
    "balance": [12, 34],
    "mini_batch": 256,
    "micro_batches": 16,
    "micro_batch_size": 16,
    "schedule": "1f1b",
    "virtual_stages": 1,
    "optimizer": "sgd",
    "recompute": "never",
    "runtime": None,
    "stages": [
        {
            "first_layer": first,
            "last_layer": last,
            "replicas": 1,
            "devices": [device],
            "forward_seconds": 0.01,
            "backward_seconds": 0.02,
            "memory_bytes": 123,
            "memory_limit_bytes": 456,
            "memory": {"weights": 1},
        }
        for device, (first, last) in enumerate([(0, 11), (12, 45)])
    ],
    "prediction": {
        "step_seconds": 0.5,
        "samples_per_second": 512.0,
        "bubble": 0.06,
        "lower_bound_seconds": 0.49,
        "gap": 0.02,
        "exact": True,
    },
    "baselines": [
        {"name": "even", "step_seconds": 0.7},
        {"name": "one-gpu", "step_seconds": None, "reason": "does not fit"},
    ],
    "alternatives": [
        {
            "runtimes": ["torchgpipe", "fairscale"],
            "balance": [11, 35],
            "schedule": "gpipe",
            "step_seconds": 0.55,
        }
    ],
    "profile": {"file": "vgg19.profile.json", "sha256": "..."},
    "made_by": {"pplan": "0.1.0"},
}
"""The keys that others read and rely on, and no more."""


def load(content: dict[str, Any]) -> Plan:
    return Plan.parse(json.dumps(content), "a.plan.json")


def test_the_keys_that_others_rely_on_are_enough() -> None:
    plan = load(MINIMAL)
    (other,) = plan.alternatives
    assert (other.micro_batches, other.micro_batch_size, other.recompute) == (16, 16, "never")
    assert plan.balance == [12, 34]
    assert load(json.loads(plan.to_json())) == plan
    assert Plan.model_validate(copy.deepcopy(MINIMAL)) == plan


def test_an_alternative_takes_what_it_lacks_from_the_plan_and_keeps_what_it_has() -> None:
    content = copy.deepcopy(MINIMAL) | {"recompute": "always", "micro_batches": 32, "micro_batch_size": 8}
    content["alternatives"].append(
        content["alternatives"][0] | {"micro_batches": 64, "micro_batch_size": 4, "recompute": "except_last"}
    )
    first, second = load(content).alternatives
    assert (first.micro_batches, first.micro_batch_size, first.recompute) == (32, 8, "always")
    assert (second.micro_batches, second.micro_batch_size, second.recompute) == (64, 4, "except_last")
    del content["recompute"]
    assert load(content).alternatives[0].recompute == "never"


def test_the_given_content_stays_as_it_is() -> None:
    content = copy.deepcopy(MINIMAL)
    Plan.model_validate(content)
    assert content == MINIMAL


def test_the_old_name_of_the_options_is_read() -> None:
    """What is written has the new one."""
    text = json.dumps(MINIMAL | {"wishes": {"max_stages": 3}})
    with pytest.warns(DeprecationWarning, match="`wishes` are called `options`"):
        plan = Plan.parse(text, "old.plan.json")
    assert plan.options.max_stages == 3
    content = json.loads(plan.to_json())
    assert content["options"]["max_stages"] == 3
    assert "wishes" not in content


def test_the_old_name_of_the_sharing_of_layers_is_read() -> None:
    """`degrees` are now those of a plan from a configuration, which no other plan's file has."""
    rows = [{"tensor_parallel": 1, "step_seconds": 2.0}, {"tensor_parallel": 2, "reason": "none fits"}]
    plan = load(MINIMAL | {"degrees": rows})
    assert [row.tensor_parallel for row in plan.sharing] == [1, 2]
    content = json.loads(plan.to_json())
    assert len(content["sharing"]) == 2
    for part in (content, *content["stages"], *content["alternatives"]):
        assert not {"degrees", "training", "update_seconds", "transfer_seconds"} & part.keys()
    assert load(content) == plan


def test_every_schedule_has_a_name_in_the_file() -> None:
    assert len(SCHEDULES) == 17


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(content: dict[str, Any]) -> None:
        *route, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place: Any = content
        for part in route:
            place = place[part]
        place[last] = value

    return apply


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"micro_batches": 8}, "micro_batches 8 times micro_batch_size 16 do not make a mini_batch of 256"),
        (
            {"stages.0.first_layer": 1, "stages.0.last_layer": 12},
            "stages.0: first_layer is 1, it must be 0: the stages hold all layers",
        ),
        ({"stages.1.first_layer": 13}, "stages.1: first_layer is 13, it must be 12"),
        ({"stages.1.first_layer": 5}, "stages.1: first_layer is 5, it must be 12"),
        ({"stages.1.last_layer": 3}, "stages.1: last_layer 3 is before first_layer 12"),
        ({"stages.1.last_layer": 50}, "balance is [12, 34], the stages hold [12, 39] layers"),
        ({"balance": [13, 33]}, "balance is [13, 33], the stages hold [12, 34] layers"),
        ({"layer_names": ["a", "b"]}, "layer_names has 2 names, the stages hold 46 layers"),
        ({"stages.0.replicas": 2}, "stages.0: replicas is 2, the devices are [0]"),
        ({"stages.0.devices": []}, "stages.0: replicas is 1, the devices are []"),
        ({"stages.1.devices": [-1]}, "stages.1.devices.0: Input should be greater than or equal to 0"),
        ({"stages.1.devices": [0]}, "stages: device 0 is used 2 times"),
        (
            {"stages.1.devices": [3, 3], "stages.1.replicas": 2},
            "stages: device 3 is used 2 times",
        ),
        (
            {"alternatives.0.balance": [11, 34]},
            "alternatives.0: balance [11, 34] adds up to 45, the plan has 46 layers",
        ),
        (
            {"alternatives.0.micro_batches": 8},
            "alternatives.0: micro_batches 8 times micro_batch_size 16 do not make a mini_batch of 256",
        ),
        ({"prediction.step_seconds": 0}, "prediction.step_seconds: Input should be greater"),
        ({"prediction.step_seconds": -0.5}, "prediction.step_seconds: Input should be greater"),
        (
            {"prediction.lower_bound_seconds": 0.51},
            "prediction: lower_bound_seconds 0.51 is above step_seconds 0.5",
        ),
        ({"prediction.lower_bound_seconds": -1}, "prediction.lower_bound_seconds: Input should be"),
        ({"baselines.0.step_seconds": 0}, "baselines.0.step_seconds: Input should be greater"),
        ({"alternatives.0.step_seconds": -1}, "alternatives.0.step_seconds: Input should be greater"),
        ({"stages.0.forward_seconds": -1}, "stages.0.forward_seconds: Input should be greater"),
        ({"stages.0.backward_seconds": -1}, "stages.0.backward_seconds: Input should be greater"),
        ({"stages.0.memory_bytes": -1}, "stages.0.memory_bytes: Input should be greater"),
        ({"stages.0.memory_limit_bytes": -1}, "stages.0.memory_limit_bytes: Input should be greater"),
        ({"stages.0.memory.weights": -1}, "stages.0.memory.weights: Input should be greater"),
        ({"alternatives.0.memory_bytes": [-1]}, "alternatives.0.memory_bytes.0: Input should be greater"),
        (
            {"runtime": "gpipe"},
            f"runtime: must be one of {', '.join(RUNTIMES)}, the value is 'gpipe'",
        ),
        ({"alternatives.0.runtimes": ["pipe"]}, "alternatives.0.runtimes.0: must be one of torchgpipe"),
        ({"schedule": "1f2b"}, "schedule: must be one of naive, gpipe, 1f1b"),
        ({"alternatives.0.schedule": "x"}, "alternatives.0.schedule: must be one of naive, gpipe, 1f1b"),
        ({"alternatives": [7]}, "alternatives.0: Input should be"),
        ({"alternatives": 7}, "alternatives: Input should be a valid array, the value is 7"),
        ({"alternatives.0.micro_batches": "16"}, "alternatives.0.micro_batches: Input should be a valid int"),
        (
            {"alternatives.0.virtual_stages": 3},
            "alternatives.0: virtual_stages is 3, which does not divide the",
        ),
        ({"alternatives.0.memory_bytes": [1, 2, 3]}, "alternatives.0: memory_bytes has 3 entries for"),
        ({"alternatives.0.stage_recompute": ["never"]}, "alternatives.0: stage_recompute has 1 entries for"),
        ({"precision": "bf16"}, "precision='bf16': the profile was measured in float32"),
        ({"gpus": 1}, "stages: device 1 is used, of 1 gpus from 0 on"),
        ({"order": ["schedule own"]}, "order: line 1: 'schedule own' is no line of a schedule"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], what: str) -> None:
    content = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        change(path, value)(content)
    with pytest.raises(FileError) as caught:
        load(content)
    assert caught.value.what.startswith(f"a.plan.json: {what}")
    assert "Value error" not in caught.value.what
    assert "{'" not in caught.value.what


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_that_are_not_solved_yet_may_be_named(schedule: str) -> None:
    assert load(MINIMAL | {"schedule": schedule}).schedule == schedule


def test_virtual_stages_share_devices() -> None:
    content = copy.deepcopy(MINIMAL) | {"schedule": "interleaved", "virtual_stages": 2}
    change("stages.1.devices", [0])(content)
    assert load(content).virtual_stages == 2


def test_a_bound_may_be_above_the_step_by_rounding() -> None:
    content = copy.deepcopy(MINIMAL)
    change("prediction.lower_bound_seconds", 0.5 * (1 + 1e-12))(content)
    assert load(content).prediction.lower_bound_seconds > 0.5


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({"low_seconds": 0.6, "high_seconds": 0.5}, "low_seconds 0.6 is above high_seconds 0.5"),
        ({"low_seconds": 0.6}, "low_seconds is 0.6 and high_seconds None: there are both or neither"),
    ],
)
def test_an_interval_has_two_ends_in_order(ends: dict[str, float], message: str) -> None:
    plan = copy.deepcopy(MINIMAL)
    plan["prediction"] |= ends
    with pytest.raises(FileError, match=message):
        Plan.parse(json.dumps(plan), "x.plan.json")
    plan["prediction"] |= {"low_seconds": 0.51, "high_seconds": 0.6}
    assert Plan.parse(json.dumps(plan), "x.plan.json").prediction.low_seconds == 0.51


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a.plan.json: not a whole JSON file (line 1: Expecting value)"),
        ('{"schema": 1,', "a.plan.json: not a whole JSON file (line 1: Expecting property name"),
        ("[]", "a.plan.json: not a plan of pplan (it has no key 'schema')"),
        ("{}", "a.plan.json: not a plan of pplan (it has no key 'schema')"),
        ("[" * 100_000, "a.plan.json: not a plan of pplan: nested too deep"),
        (f'{{"schema": {"9" * 5_000}}}', "a.plan.json: not a plan of pplan: a number is too long"),
    ],
    ids=["empty", "cut off", "list", "no schema", "deep", "long number"],
)
def test_what_is_no_plan_file_at_all(text: str, words: str) -> None:
    with pytest.raises(FileError) as caught:
        Plan.parse(text, "a.plan.json")
    assert caught.value.what.startswith(words)
    assert caught.value.hint == "Make it again with `pplan solve`, or name another file."


def test_the_word_for_stages_that_recompute_differently_is_read_by_its_old_name() -> None:
    content = copy.deepcopy(MINIMAL) | {"recompute": "selective"}
    content["alternatives"][0]["recompute"] = "selective"
    plan = Plan.model_validate(content)
    assert (plan.recompute, plan.alternatives[0].recompute) == ("by_stage", "by_stage")
