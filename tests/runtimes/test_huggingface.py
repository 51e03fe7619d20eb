"""device_map: transformers' own reading of it, on models on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import HuggingfaceExport
from pplan.runtimes.exports import export
from pplan.runtimes.huggingface import device_map

MakePlan = Callable[..., Plan]


def huggingface(plan: Plan, device: str = "cuda") -> HuggingfaceExport:
    document, remark = export("huggingface", plan, device=device)
    assert isinstance(document, HuggingfaceExport)
    assert remark is None
    return document


@pytest.fixture
def plan_of(make_decoder_plan: MakePlan) -> Callable[..., Plan]:
    def make(balance: list[int], **keys: Any) -> Plan:
        return make_decoder_plan(balance, schedule="naive", **keys)

    return make


def test_each_block_on_the_device_of_its_stage(plan_of: Callable[..., Plan], tmp_path: Path) -> None:
    document = huggingface(plan_of([2, 2, 1]))
    assert document.device_map == {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.norm": 1,
        "lm_head": 2,
    }
    assert (document.micro_batches, document.micro_batch_size) == (8, 4)
    document.save(tmp_path / "x.json", force=False)
    assert HuggingfaceExport.load(tmp_path / "x.json") == document


def test_on_the_cpu(plan_of: Callable[..., Plan]) -> None:
    assert set(huggingface(plan_of([2, 2, 1]), "cpu").device_map.values()) == {"cpu"}


def test_any_model_whose_layers_are_modules(plan_of: Callable[..., Plan]) -> None:
    names = ["features.0", "features.1", "classifier"]
    assert huggingface(plan_of([1, 2], names=names)).device_map == dict(zip(names, [0, 1, 1], strict=True))


def test_a_cut_inside_a_block(plan_of: Callable[..., Plan]) -> None:
    names = ["wte", "h.0.a", "h.0.b", "head"]
    with pytest.raises(ExportError, match=r"h\.0 is on devices 0 and 1: huggingface places blocks") as caught:
        huggingface(plan_of([2, 2], names=names))
    assert "granularity='module:h.*'" in caught.value.hint
    assert huggingface(plan_of([1, 3], names=names)).device_map == {"wte": 0, "h.0": 1, "head": 1}


def test_other_schedules_have_no_words(make_decoder_plan: MakePlan) -> None:
    with pytest.raises(ExportError, match="its schedule is 1f1b, huggingface runs naive"):
        export("huggingface", make_decoder_plan([3, 2]))
    with pytest.raises(ExportError, match="2-2 replicas, huggingface runs no replicas"):
        export("huggingface", make_decoder_plan([3, 2], schedule="naive", replicas=2))
    one = make_decoder_plan([3, 2], micro_batches=1)
    assert huggingface(one).micro_batches == 1


def meta_model(kind: str) -> torch.nn.Module:
    """With two blocks."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 11}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert isinstance(model, torch.nn.Module)
    return model


@pytest.mark.parametrize(
    ("kind", "names", "others"),
    [
        ("llama", [], {"model.rotary_emb": 0}),
        (
            "gpt2",
            ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"],
            {"transformer.wpe": 0, "transformer.drop": 0},
        ),
    ],
)
def test_completed_for_a_model_it_places_every_weight(
    plan_of: Callable[..., Plan], kind: str, names: list[str], others: dict[str, int]
) -> None:
    """By transformers' own reading of a device_map."""
    model = meta_model(kind)
    plan = plan_of([2, 3], **({"names": names} if names else {}))
    document = huggingface(plan)
    completed = device_map(document, model)
    assert completed == device_map(plan, model) == document.device_map | others
    expand = pytest.importorskip("transformers.integrations.accelerate").expand_device_map
    placed = expand(completed, [name for name, _ in model.named_parameters()])
    for name, device in placed.items():
        owner = max((module for module in completed if name.startswith(f"{module}.")), key=len)
        assert device == completed[owner]
    assert set(placed.values()) == {0, 1}


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_accelerate_finds_every_weight_placed(plan_of: Callable[..., Plan], kind: str) -> None:
    check = pytest.importorskip("accelerate.utils.modeling").check_device_map
    names = ["transformer.wte", "transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"]
    document = huggingface(plan_of([2, 3], **({"names": names} if kind == "gpt2" else {})))
    check(meta_model(kind), device_map(document, meta_model(kind)))


def test_completed_for_another_model(plan_of: Callable[..., Plan]) -> None:
    with pytest.raises(ExportError, match=r"the model \(Linear\) has no module model.embed_tokens"):
        device_map(huggingface(plan_of([2, 3])), torch.nn.Linear(2, 2))
