"""Layers of a transformer by its configuration: those of its profile, by name and by parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cost_models.transformer.configuration import load_transformer_shape, transformer_shape
from pplan.runtimes.documents import TorchExport

pytest.importorskip("transformers")
SMALL = {"vocab_size": 320, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
WIDE = {**SMALL, "intermediate_size": 96}
CASES: dict[str, dict[str, Any]] = {
    "llama": WIDE | {"num_key_value_heads": 2},
    "qwen3": WIDE | {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 320, "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128},
    "gpt_neox": WIDE,
    "granite": WIDE | {"num_key_value_heads": 2},
    "opt": {
        "vocab_size": 320, "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_dim": 96,
        "word_embed_proj_dim": 64, "max_position_embeddings": 128,
    },
    "mixtral": WIDE | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def write(folder: Path, kind: str) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({"model_type": kind, **CASES[kind]}))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_layers_are_those_of_a_profile(kind: str, tmp_path: Path) -> None:
    """Positions of GPT-2 and OPT are a module beside the embedding; the configuration counts them with it."""
    file = write(tmp_path, kind)
    profile = pplan.profile(str(file), device="meta", micro_batch_sizes=(1,))
    layers = load_transformer_shape(file).layers()
    assert [(own.name, own.parameter_bytes) for own in profile.layers] == [
        (name, 4 * count) for name, count in layers
    ]


def test_parameters_add_up() -> None:
    for kind, keys in CASES.items():
        shape = transformer_shape({"model_type": kind, **keys})
        assert sum(count for _, count in shape.layers()) == shape.parameters()
    llama = transformer_shape({"model_type": "llama", **CASES["llama"]})
    names = [name for name, _ in llama.layers(predictors=1)]
    assert names == [
        "model.embed_tokens",
        *(f"model.layers.{number}" for number in range(3)),
        "model.mtp.0",
        "model.norm",
        "lm_head",
    ]


def options(**others: Any) -> dict[str, Any]:
    few = {"tp": (1,), "cp": (1,), "virtual_stages": (1,), "pp": (2,), "implementation": "transformers"}
    return {"gpus": 2, "gpu": "h100", "mini_batch": 4, "sequence": 512, **few, **others}


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_plan_is_compared_and_exported_as_one_of_a_profile(recompute: str, tmp_path: Path) -> None:
    """The layers, the cuts and what runs again; the file for PyTorch builds the model."""
    file = write(tmp_path, "llama")
    profile = pplan.profile(str(file), device="analytic:h100", micro_batch_sizes=(1, 2))
    plan = pplan.solve(str(file), **options(recompute=recompute))
    measured = pplan.solve(profile, gpus=2, max_stages=2, mini_batch=4)
    assert plan.layer_names == measured.layer_names
    assert plan.profile.layers_sha256 == measured.profile.layers_sha256
    assert plan.profile.granularity == measured.profile.granularity
    own, other = pplan.export("torch", plan, device="cpu"), pplan.export("torch", measured, device="cpu")
    assert isinstance(own, TorchExport)
    assert isinstance(other, TorchExport)
    assert (own.layers_sha256, own.granularity) == (other.layers_sha256, other.granularity)
    assert own.recompute == [recompute] * 2
    assert own.parts == [0, plan.balance[0], 6]


def test_what_no_plan_of_layers_can_say(tmp_path: Path) -> None:
    file = write(tmp_path, "llama")
    shared = pplan.solve(str(file), **options(tp=(2,), pp=(1,), recompute="never"))
    with pytest.raises(pplan.ExportError, match=r"degrees of parallelism \(TP 2\)"):
        pplan.export("torch", shared)
    selective = pplan.solve(str(file), **options(implementation="megatron", recompute="selective"))
    with pytest.raises(pplan.ExportError, match="inside layers"):
        pplan.export("torch", selective)
    megatron = pplan.solve(str(file), **options(implementation="megatron", recompute="first_layers"))
    with pytest.warns(UserWarning, match="those of megatron's code with Transformer Engine, not of torch's"):
        document = pplan.export("torch", megatron, device="cpu")
    assert isinstance(document, TorchExport)
    assert {word.rstrip("0123456789") for word in document.recompute} <= {"first_", "never", "always"}
