"""NeMo Automodel's sections of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import NemoExport
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]


def recipe(plan: Plan, path: Path) -> dict[str, Any]:
    """What a YAML reader makes of the file."""
    document, _ = export("nemo-automodel", plan)
    assert isinstance(document, NemoExport)
    document.save(path, force=False)
    read = pytest.importorskip("yaml").safe_load(path.read_text())
    assert isinstance(read, dict)
    return read


def test_the_sections(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    """NeMo keeps of each stage the modules that are named, the rotary embedding with the blocks."""
    plan = make_decoder_plan([3, 2], replicas=2, recompute="always", model="m\nstep_scheduler: {}")
    assert recipe(plan, tmp_path / "x.yaml") == {
        "step_scheduler": {"global_batch_size": 32, "local_batch_size": 16},
        "distributed": {
            "strategy": "fsdp2",
            "pp_size": 2,
            "dp_size": 2,
            "dp_replicate_size": 2,
            "activation_checkpointing": True,
            "pipeline": {
                "pp_schedule": "1F1B",
                "pp_microbatch_size": 2,
                "module_fqns_per_model_part": [
                    ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.rotary_emb"],
                    ["model.norm", "lm_head"],
                ],
            },
        },
    }


def test_other_orders_go_in_a_csv(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    read = recipe(make_decoder_plan([3, 2], schedule="zb-h1"), tmp_path / "x.yaml")
    assert read["distributed"]["pipeline"]["pp_schedule_csv"] == "x.csv"
    assert [row[:3] for row in (tmp_path / "x.csv").read_text().splitlines()] == ["0F0", "1F0"]


def test_a_head_that_is_one_layer_has_both_modules(make_decoder_plan: MakePlan, tmp_path: Path) -> None:
    """As `--granularity 'module:model.layers.*'` measures it, under the name of its first module."""
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    read = recipe(make_decoder_plan([2, 2], names=names), tmp_path / "x.yaml")
    last = read["distributed"]["pipeline"]["module_fqns_per_model_part"][-1]
    assert last == ["model.layers.1", "model.norm", "lm_head", "model.rotary_emb"]


def test_fewer_micro_batches_than_devices(make_decoder_plan: MakePlan) -> None:
    plan = make_decoder_plan([3, 3, 3], micro_batches=2)
    with pytest.raises(ExportError, match="it has 2 micro-batches for 3 devices") as caught:
        export("nemo-automodel", plan)
    assert "pplan.solve(micro_batches=3)" in caught.value.hint


def test_it_has_no_dualpipe(make_decoder_plan: MakePlan) -> None:
    with pytest.raises(ExportError, match="its schedule is dualpipe-v"):
        export("nemo-automodel", make_decoder_plan([3, 3], schedule="dualpipe-v", virtual=2))


def test_modules_that_a_plan_does_not_know_are_told(make_decoder_plan: MakePlan) -> None:
    """GPT-2's position embedding lies in the first layer, which has the name of the token embedding."""
    _, remark = export("nemo-automodel", make_decoder_plan([3, 2]))
    assert remark is None
    blocks = [f"transformer.h.{index}" for index in range(2)]
    names = ["transformer.wte", *blocks, "transformer.ln_f", "lm_head"]
    plan = make_decoder_plan([3, 2]).model_copy(update={"layer_names": names})
    _, remark = export("nemo-automodel", plan)
    assert remark is not None
    assert "beside transformer.wte before the blocks" in remark


@pytest.mark.parametrize("runtime", ["megatron", "megatron-bridge", "torchtitan", "nemo-automodel"])
def test_layers_without_the_ends_of_a_model_say_so(make_decoder_plan: MakePlan, runtime: str) -> None:
    """A table of costs may hold the blocks alone: the trainer's model has an embedding and a head besides."""
    names = [f"layers.{number}" for number in range(4)]
    for layers, missing in ((names, "no embedding and no head"), (["embed_tokens", *names[:3]], "no head")):
        plan = make_decoder_plan([2, 2], names=layers)
        _, remark = export(runtime, plan)
        assert remark is not None
        assert f"The plan's layers have {missing}: those of {runtime}'s model are not in" in remark
    _, remark = export(runtime, make_decoder_plan([3, 2]))
    assert remark is None or "The plan's layers have" not in remark
