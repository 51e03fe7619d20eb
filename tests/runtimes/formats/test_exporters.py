"""The choice of what a runtime is given, the files' content, and the refusals. No torch is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.document import MadeBy
from pplan.cost_models.errors import ExportError, FileError, UsageError
from pplan.cost_models.runtime import RUNTIMES, find_runtime
from pplan.cost_models.text_files import sha256
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes import documents, exports, imports
from pplan.runtimes.documents import (
    DeepspeedExport,
    ExportDocument,
    FairscaleExport,
    PipeExport,
    TorchgpipeExport,
)
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
MakeAlternative = Callable[..., dict[str, Any]]


def content(document: ExportDocument) -> dict[str, Any]:
    """The keys of the file."""
    parsed = json.loads(document.to_json())
    assert isinstance(parsed, dict)
    return parsed


def test_every_runtime_has_a_document_an_export_and_an_import() -> None:
    for row in RUNTIMES.values():
        assert getattr(documents, row.document).kind == row.name
        assert callable(getattr(exports, row.exporter))
        assert callable(getattr(imports, row.reader))


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale"])
def test_batch_norms_are_deferred(make_plan: MakePlan, runtime: str) -> None:
    profile = {"file": "p.json", "sha256": "0", "has_batch_norms": True}
    document, _ = export(runtime, make_plan([3, 5], schedule="gpipe", profile=profile))
    assert isinstance(document, PipeExport)
    assert document.deferred_batch_norm
    assert document.arguments()["deferred_batch_norm"] is True


def test_unknown_runtime_names_the_known_ones(make_plan: MakePlan) -> None:
    with pytest.raises(UsageError, match="torchpipe") as caught:
        export("torchpipe", make_plan([4, 6]))
    assert all(name in caught.value.hint for name in RUNTIMES)


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale"])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_a_gpipe_plan_is_exported_as_it_is(make_plan: MakePlan, runtime: str, recompute: str) -> None:
    plan = make_plan([3, 5, 2], micro_batches=8, micro_batch_size=4, recompute=recompute)
    document, remark = export(runtime, plan, made_by=MadeBy(pplan="1.2.3"))
    assert remark is None
    assert content(document) == {
        "schema": 1,
        "runtime": runtime,
        "model": "small",
        "layers_sha256": "",
        "mini_batch": 32,
        "micro_batch_size": 4,
        "step_seconds": 0.5,
        "estimated": False,
        "balance": [3, 5, 2],
        "devices": ["cuda:0", "cuda:1", "cuda:2"],
        "chunks": 8,
        "checkpoint": recompute,
        "deferred_batch_norm": False,
        "granularity": "block",
        "made_by": content(document)["made_by"],
    }
    assert content(document)["made_by"]["pplan"] == "1.2.3"


def test_a_1f1b_plan_for_deepspeed(make_plan: MakePlan) -> None:
    plan = make_plan([3, 5, 2], micro_batches=8, micro_batch_size=4, schedule="1f1b", recompute="always")
    document, remark = export("deepspeed", plan)
    assert remark is None
    assert content(document) == {
        "schema": 1,
        "runtime": "deepspeed",
        "model": "small",
        "layers_sha256": "",
        "mini_batch": 32,
        "micro_batch_size": 4,
        "step_seconds": 0.5,
        "estimated": False,
        "num_stages": 3,
        "replicas": 1,
        "parts": [0, 3, 8, 10],
        "devices": [0, 1, 2],
        "config": {
            "train_batch_size": 32,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 8,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
            "pipeline": {"use_reentrant": False, "activation_checkpoint_interval": 5},
        },
        "granularity": "block",
        "made_by": content(document)["made_by"],
    }


@pytest.mark.parametrize(
    ("replicas", "size", "batches"), [([1, 1], 4, 1), ([2, 2], 4, 3), ([4, 4], 4, 8), ([3], 6, 5)]
)
def test_deepspeeds_batch_identity(make_plan: MakePlan, replicas: list[int], size: int, batches: int) -> None:
    plan = make_plan(
        [10 // len(replicas)] * len(replicas),
        replicas=replicas,
        micro_batches=batches,
        micro_batch_size=size,
        schedule="1f1b",
    )
    document, remark = export("deepspeed", plan)
    assert remark is None
    assert isinstance(document, DeepspeedExport)
    config = document.config
    share, steps = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert document.replicas == replicas[0]
    assert share * replicas[0] == size
    assert config["train_batch_size"] == share * steps * replicas[0] == plan.mini_batch
    assert document.devices == list(range(sum(replicas)))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sgd", {"type": "SGD", "params": {"lr": 0.01}}),
        ("momentum", {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}}),
        ("adam", {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True, "adam_w_mode": False}}),
        ("adamw", {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}),
    ],
)
def test_deepspeeds_optimizer(make_plan: MakePlan, optimizer: str, expected: dict[str, Any]) -> None:
    document, _ = export("deepspeed", make_plan([4, 6], schedule="1f1b", optimizer=optimizer))
    assert content(document)["config"]["optimizer"] == expected


def test_an_optimizer_deepspeed_has_no_configuration_for(make_plan: MakePlan) -> None:
    with pytest.raises(ExportError, match="adamw-8bit: DeepSpeed's configuration names no") as caught:
        export("deepspeed", make_plan([4, 6], schedule="1f1b", optimizer="adamw-8bit"))
    assert "pplan.solve(optimizer='adamw')." in caught.value.hint
    with pytest.raises(ExportError, match="'lion'"):
        export("deepspeed", make_plan([4, 6], schedule="1f1b", optimizer="lion"))


@pytest.mark.parametrize(("dtype", "key"), [("float16", "fp16"), ("bfloat16", "bf16")])
def test_deepspeeds_precision(make_plan: MakePlan, dtype: str, key: str) -> None:
    document, _ = export("deepspeed", make_plan([4, 6], schedule="1f1b", dtype=dtype))
    assert content(document)["config"][key] == {"enabled": True}


def test_devices_are_the_plans(make_plan: MakePlan) -> None:
    plan = make_plan([4, 6])
    stages = [
        stage.model_copy(update={"devices": [device]})
        for stage, device in zip(plan.stages, [3, 1], strict=True)
    ]
    moved = plan.model_copy(update={"stages": stages})
    assert content(export("torchgpipe", moved)[0])["devices"] == ["cuda:3", "cuda:1"]
    assert content(export("torchgpipe", moved, device="cpu")[0])["devices"] == ["cpu", "cpu"]


@pytest.mark.parametrize("device", ["tpu", "cuda:0", ""])
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_an_unknown_device(make_plan: MakePlan, runtime: str, device: str) -> None:
    with pytest.raises(UsageError, match=f"device='{device}': cannot be exported for"):
        export(runtime, make_plan([4, 6], micro_batches=1), device=device)


def test_the_best_usable_alternative_is_taken(make_plan: MakePlan, alternative: MakeAlternative) -> None:
    plan = make_plan(
        [5, 5],
        schedule="1f1b",
        step_seconds=0.5,
        alternatives=[
            alternative(step_seconds=0.51, runtimes=["deepspeed"]),
            alternative(step_seconds=0.52, schedule="1f1b"),
            alternative(step_seconds=0.53, recompute="by_stage"),
            alternative(step_seconds=0.7, balance=[3, 7]),
            alternative(
                step_seconds=0.6, balance=[2, 8], micro_batches=2, micro_batch_size=2, recompute="always"
            ),
        ],
    )
    document, remark = export("torchgpipe", plan)
    written = content(document)
    assert written["balance"] == [2, 8]
    assert (written["chunks"], written["checkpoint"], written["step_seconds"]) == (2, "always", 0.6)
    assert written["mini_batch"] == written["chunks"] * written["micro_batch_size"] == 4
    assert written["devices"] == ["cuda:0", "cuda:1"]
    assert remark is not None
    for part in ["its schedule is 1f1b", "balance 2,8", "gpipe", "2 micro-batches x 2", "0.6 s", "0.5 s"]:
        assert part in remark


@pytest.mark.parametrize(
    ("runtime", "keys", "reason"),
    [
        ("torchgpipe", {"schedule": "1f1b"}, "its schedule is 1f1b, torchgpipe runs gpipe"),
        ("fairscale", {"schedule": "zb-h1"}, "its schedule is zb-h1, fairscale runs gpipe"),
        ("torchgpipe", {"replicas": [1, 2]}, "its stages have 1-2 replicas, torchgpipe runs no replicas"),
        ("fairscale", {"replicas": [2, 2]}, "its stages have 2-2 replicas, fairscale runs no replicas"),
        ("torchgpipe", {"recompute": "by_stage"}, "it recomputes by_stage"),
        ("deepspeed", {"schedule": "gpipe"}, "its schedule is gpipe, deepspeed runs 1f1b"),
        ("deepspeed", {"schedule": "1f1b", "replicas": [3, 1]}, "the same number of them on every stage"),
        ("deepspeed", {"schedule": "1f1b", "recompute": "except_last"}, "it recomputes except_last"),
        (
            "deepspeed",
            {"schedule": "1f1b", "replicas": [4, 4]},
            "its 4 replicas cannot share 2 samples evenly",
        ),
        ("deepspeed", {"schedule": "1f1b", "virtual_stages": 2}, "it has 2 virtual stages a device"),
    ],
)
def test_why_a_plan_is_not_for_a_runtime(
    make_plan: MakePlan, runtime: str, keys: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ExportError) as caught:
        export(runtime, make_plan([5, 5], **keys))
    assert reason in caught.value.what
    assert caught.value.what.endswith("; and it has no alternatives")
    assert f"pplan.solve(runtime={runtime!r})" in caught.value.hint


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (1, "; and none of its 1 alternative is for deepspeed"),
        (2, "; and none of its 2 alternatives is for deepspeed"),
    ],
)
def test_how_many_alternatives_are_not_for_a_runtime(
    make_plan: MakePlan, alternative: MakeAlternative, others: int, words: str
) -> None:
    plan = make_plan(
        [5, 5], schedule="gpipe", alternatives=[alternative(schedule="zb-h1", runtimes=["torch"])] * others
    )
    with pytest.raises(ExportError) as caught:
        export("deepspeed", plan)
    assert caught.value.what.endswith(words)


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "dapple"])
@pytest.mark.parametrize("runtime", [name for name in RUNTIMES if name != "nemo-automodel"])
def test_one_micro_batch_has_one_order(
    make_plan: MakePlan, decoder: Callable[[int], list[str]], runtime: str, schedule: str
) -> None:
    """NeMo takes no fewer micro-batches than devices."""
    plan = make_plan([5, 5], micro_batches=1, micro_batch_size=4, schedule=schedule, layer_names=decoder(7))
    assert export(runtime, plan)[1] is None


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_one_stage_runs_everywhere(
    make_plan: MakePlan, decoder: Callable[[int], list[str]], runtime: str, schedule: str
) -> None:
    document, remark = export(runtime, make_plan([10], schedule=schedule, layer_names=decoder(7)))
    assert remark is None
    assert content(document)["mini_batch"] == 4


def test_one_stage_that_counts_on_little_memory(make_plan: MakePlan) -> None:
    """GPipe keeps all micro-batches where 1F1B keeps one: a limit that was met may not be."""
    with pytest.raises(ExportError, match="its schedule is 1f1b"):
        export("torchgpipe", make_plan([10], schedule="1f1b", limit=200))
    assert export("deepspeed", make_plan([10], schedule="gpipe", limit=200))[1] is None


def test_the_hash_of_the_layer_names(make_plan: MakePlan) -> None:
    names = ["a", "b", "c"]
    document, _ = export("torchgpipe", make_plan([1, 2], layer_names=names))
    assert document.layers_sha256 == sha256("a\nb\nc")
    told = {"file": "f", "sha256": "0", "layers_sha256": "abc"}
    assert export("torchgpipe", make_plan([1, 2], profile=told))[0].layers_sha256 == "abc"


@pytest.mark.parametrize("runtime", list(RUNTIMES))
def test_round_trip(
    make_plan: MakePlan, decoder: Callable[[int], list[str]], runtime: str, tmp_path: Path
) -> None:
    schedule = "naive" if runtime == "huggingface" else "1f1b"
    plan = make_plan([10], micro_batches=2, schedule=schedule, layer_names=decoder(7))
    document, _ = export(runtime, plan)
    path = tmp_path / f"small.{runtime}.json"
    document.save(path, force=False)
    assert type(document).load(path) == document


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema": 1, "runtime": "torch', "not a whole JSON file (line 1"),
        ("[]", "not a torchgpipe file of pplan"),
        ("{}", "not a torchgpipe file of pplan (it has no key 'schema')"),
        ('{"schema": 1}', "runtime: Field required (and "),
        ('{"schema": 2, "runtime": "torchgpipe"}', "schema is 2, this pplan reads torchgpipe files up to 1"),
        ('{"schema": 1, "layers": []}', "this is a profile, a torchgpipe file is needed here"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FileError) as caught:
        TorchgpipeExport.load(path)
    assert caught.value.what.startswith(f"{path}: {reason}")
    assert ("install" if '"schema": 2' in text else "`pplan export torchgpipe`") in caught.value.hint


def test_another_runtimes_file_is_refused(make_plan: MakePlan, tmp_path: Path) -> None:
    path = tmp_path / "small.fairscale.json"
    export("fairscale", make_plan([4, 6]))[0].save(path, force=False)
    with pytest.raises(FileError) as caught:
        TorchgpipeExport.load(path)
    assert caught.value.what == f"{path}: runtime: Input should be 'torchgpipe', the value is 'fairscale'"


@pytest.mark.parametrize("parts", [[0, 10], [0, 0, 10], [0, 10, 10], [0, 12, 10], [1, 4, 10], [0, 4, 8, 10]])
def test_parts_that_are_no_bounds_are_refused(make_plan: MakePlan, parts: list[int]) -> None:
    known = content(export("deepspeed", make_plan([4, 6], schedule="1f1b"))[0])
    with pytest.raises(FileError) as caught:
        DeepspeedExport.parse(json.dumps(known | {"parts": parts}), "x.json")
    assert caught.value.what == f"x.json: parts {parts} are not the bounds of 2 stages"
    assert "`pplan export deepspeed`" in caught.value.hint


def test_ranks_without_a_device_are_refused(make_plan: MakePlan) -> None:
    known = content(export("deepspeed", make_plan([4, 6], replicas=[2, 2], schedule="1f1b"))[0])
    assert known["devices"] == [0, 1, 2, 3]
    with pytest.raises(FileError) as caught:
        DeepspeedExport.parse(json.dumps(known | {"devices": [0, 1]}), "x.json")
    assert caught.value.what == ("x.json: devices are 2, num_stages 2 times replicas 2 must be as many")


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        ({"devices": ["cuda:0"]}, "devices are 1, balance has 2 stages"),
        ({"devices": ["cpu", "cuda"]}, "devices.1: must be 'cpu' or 'cuda:N', the value is 'cuda'"),
        ({"devices": ["cuda:0\n", "cpu"]}, r"devices.0: must be 'cpu' or 'cuda:N', the value is 'cuda:0\n'"),
        ({"devices": [0, 1]}, "devices.0: Input should be a valid string, the value is 0 (and 1 more)"),
        ({"chunks": 4}, "chunks 4 times micro_batch_size 2 do not make a mini_batch of 4"),
        ({"chunks": "2"}, "chunks: Input should be a valid integer, the value is '2'"),
        ({"chunks": 2.0}, "chunks: Input should be a valid integer, the value is 2.0"),
        ({"balance": [4, 0]}, "balance.1: Input should be greater than or equal to 1, the value is 0"),
        ({"step_seconds": "0.5"}, "step_seconds: Input should be a valid number, the value is '0.5'"),
        ({"step_seconds": 0}, "step_seconds: Input should be greater than 0, the value is 0"),
    ],
)
@pytest.mark.parametrize("kind", [TorchgpipeExport, FairscaleExport])
def test_a_file_that_contradicts_itself(
    make_plan: MakePlan, kind: type[PipeExport], keys: dict[str, Any], what: str
) -> None:
    known = content(export(kind.kind, make_plan([4, 6]))[0])
    assert kind.parse(json.dumps(known | {"devices": ["cpu", "cuda:12"]}), "x.json").chunks == 2
    with pytest.raises(FileError) as caught:
        kind.parse(json.dumps(known | keys), "x.json")
    assert caught.value.what == f"x.json: {what}"
    assert f"`pplan export {kind.kind}`" in caught.value.hint


def test_runtime_facts() -> None:
    assert find_runtime("deepspeed").runs_replicas([2, 2])
    assert not find_runtime("deepspeed").runs_replicas([2, 1])
    assert not find_runtime("torchgpipe").runs_replicas([2, 2])
    assert [name for name, runtime in RUNTIMES.items() if runtime.one_process] == [
        "torchgpipe",
        "fairscale",
        "huggingface",
    ]


WITHOUT_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchvision", "torchgpipe", "fairscale", "deepspeed"}:
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refuse())
from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export

plan = Plan.parse(sys.stdin.read(), "stdin")
for runtime in ("torchgpipe", "fairscale", "deepspeed"):
    print(export(runtime, plan)[0].runtime)
"""


def test_exporting_imports_no_torch(make_plan: MakePlan) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=make_plan([4, 6], micro_batches=1).to_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["torchgpipe", "fairscale", "deepspeed"], done.stderr


@pytest.mark.parametrize("balance", [[3, 1], [2, 2]])
def test_one_process_takes_the_alternative_that_counts_its_launches(
    make_plan: MakePlan, alternative: MakeAlternative, balance: list[int]
) -> None:
    """A GPipe plan for any runtime gives way to torchgpipe's own; one with the same cuts takes its step."""
    own = alternative(runtimes=["torchgpipe"], balance=[2, 2], micro_batch_size=2, step_seconds=0.75)
    plan = make_plan(balance, micro_batches=4, micro_batch_size=2, schedule="gpipe", alternatives=[own])
    document, remark = export("torchgpipe", plan)
    assert document.step_seconds == 0.75
    assert document.model_dump()["balance"] == [2, 2]
    assert (remark is None) == (balance == [2, 2])
    assert remark is None or "launches all stages from one process" in remark
    made_for_it = plan.model_copy(update={"runtime": "torchgpipe"})
    assert export("torchgpipe", made_for_it)[0].model_dump()["balance"] == balance


def test_a_stage_without_parameters_is_not_for_deepspeed(
    make_plan: MakePlan, alternative: MakeAlternative
) -> None:
    plan = make_plan([4, 6], schedule="1f1b")
    bare = plan.stages[1].model_copy(update={"memory": {"weights": 0, "gradients": 0}})
    plan = plan.model_copy(update={"stages": [plan.stages[0], bare]})
    with pytest.raises(ExportError, match="nothing in stage 1 is trained, deepspeed trains every stage"):
        export("deepspeed", plan)
    own = alternative(runtimes=["deepspeed"], schedule="1f1b", micro_batches=2, micro_batch_size=2)
    document, remark = export("deepspeed", make_plan([4, 6], schedule="gpipe", alternatives=[own]))
    assert remark is not None
    assert content(document)["parts"] == [0, 4, 10]


def test_one_process_does_not_reach_another_node(make_plan: MakePlan) -> None:
    plan = make_plan([4, 6], schedule="gpipe", gpus_per_node=1)
    with pytest.raises(ExportError, match="it takes 2 nodes, torchgpipe is one process on one node"):
        export("torchgpipe", plan)
    assert export("torchgpipe", make_plan([4, 6], schedule="gpipe", gpus_per_node=2))[1] is None


@pytest.mark.parametrize("is_transformer", [False, True])
def test_alternatives_are_for_runtimes_that_take_the_model(
    profile: Profile, decoder: Callable[[int], list[str]], is_transformer: bool
) -> None:
    """Trainers with layers of their own run transformers only."""
    if is_transformer:
        names = decoder(len(profile.layers) - 3)
        layers = [
            layer.model_copy(update={"name": name, "cut_after": True, "cut_reason": None})
            for layer, name in zip(profile.layers, names, strict=True)
        ]
        profile = profile.model_copy(update={"layers": layers})
    plan = pplan.solve(profile, gpus=2, mini_batch=16)
    runtimes = {name for row in plan.alternatives for name in row.runtimes}
    assert "torch" in runtimes
    assert ("megatron" in runtimes) == ("torchtitan" in runtimes) == is_transformer
