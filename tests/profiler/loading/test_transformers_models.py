"""Models of transformers: what is built, from which sizes, on which input, and what a wrong one is told."""

from __future__ import annotations

import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pplan.cost_models.errors import FileError, MachineError, ModelError, PplanError, UsageError
from pplan.profiler import transformers_models
from pplan.profiler.transformers_models import load_transformers
from pplan.profiler.user_model import LoadedModel

transformers: Any = pytest.importorskip("transformers")

_IMAGE = {"layers": 2, "hidden": 32, "heads": 4, "image_size": 32}
_TEXT = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 100, "sequence": 12}


def _load(name: str, settings: dict[str, Any] | None = None, seed: int = 0) -> LoadedModel:
    return load_transformers(name, _TEXT if settings is None else settings, seed=seed)


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every attempt to reach a network, none of which succeeds."""
    attempts: list[object] = []

    def refuse(*args: object, **_: object) -> None:
        attempts.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return attempts


FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", "transformer.h.*,transformer.ln_f,lm_head"),
    "bert": ("BertForMaskedLM", "bert.encoder.layer.*,cls"),
    "llama": ("LlamaForCausalLM", "model.layers.*,model.norm,lm_head"),
    "t5": (
        "T5ForConditionalGeneration",
        "encoder.block.*,encoder.final_layer_norm,decoder.block.*,decoder.final_layer_norm,lm_head",
    ),
    "bart": ("BartForConditionalGeneration", "model.encoder.layers.*,model.decoder.layers.*,lm_head"),
    "distilbert": (
        "DistilBertForMaskedLM",
        "distilbert.transformer.layer.*,vocab_transform,vocab_layer_norm,vocab_projector",
    ),
    "opt": ("OPTForCausalLM", "model.decoder.layers.*,model.decoder.final_layer_norm,lm_head"),
    "mixtral": ("MixtralForCausalLM", "model.layers.*,model.norm,lm_head"),
    "vit": ("ViTForImageClassification", "vit.layers.*,vit.layernorm,classifier"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_on_its_example(
    name: str, dialled: list[object], capfd: pytest.CaptureFixture[str]
) -> None:
    made = _load(name, _IMAGE if name == "vit" else _TEXT)
    kind, patterns = FAMILIES[name]
    assert type(made.module).__name__ == kind
    if hasattr(made.module, "vit") and hasattr(made.module.vit, "encoder"):  # transformers before 5.9
        patterns = patterns.replace("vit.layers", "vit.encoder.layer")
    assert made.granularity == f"module:{patterns}"
    assert (made.name, made.loss) == (f"hf:{name}", "cross-entropy")
    assert made.module.training
    assert {parameter.dtype for parameter in made.module.parameters()} == {torch.float32}
    output = made.example.repeated(3).call(made.module)
    assert len(output.logits) == 3
    assert getattr(output, "past_key_values", None) is None
    output.logits.sum().backward()
    blocks = {part for part in patterns.split(",") if part.endswith(".*")}
    for block in blocks:
        assert len(list(made.module.get_submodule(block.removesuffix(".*")).children())) == 2
    assert not dialled
    assert capfd.readouterr() == ("", "")


def test_weights_are_those_transformers_draws_under_the_seed() -> None:
    made = load_transformers("gpt2", {**_TEXT, "sequence": 12}, seed=3)
    config = transformers.AutoConfig.for_model(
        "gpt2", n_layer=2, n_embd=32, n_head=4, vocab_size=100, eos_token_id=99, bos_token_id=99
    )
    torch.manual_seed(3)
    same = transformers.AutoModelForCausalLM.from_config(config)
    expected = dict(same.named_parameters())
    given = dict(made.module.named_parameters())
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[path], expected[path]) for path in expected)


@pytest.mark.slow
def test_default_sizes_are_the_familys_own() -> None:
    made = load_transformers("distilbert", {}, seed=0, device="meta")
    expected = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig())
    assert sum(p.numel() for p in made.module.parameters()) == expected.num_parameters()
    assert made.example.tensors[0].shape == (2, 512)
    assert made.example.tensors[0].device.type == "cpu"


def test_a_70b_llama_takes_no_memory_on_meta() -> None:
    sizes = {"layers": 80, "hidden": 8192, "heads": 64, "num_key_value_heads": 8}
    made = load_transformers(
        "llama", {**sizes, "intermediate": 28672, "vocabulary": 128256}, seed=0, device="meta"
    )
    # The published number of parameters of Llama 3 70B.
    assert sum(p.numel() for p in made.module.parameters()) == 70_553_706_496
    assert {p.device.type for p in made.module.parameters()} == {"meta"}


def test_weights_beyond_the_memory_are_refused_before_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_models, "free_host_bytes", lambda: 10**6)
    with pytest.raises(MachineError, match=r"its weights take \d+\.\d+ MiB, and 976\.56 KiB are free"):
        _load("gpt2", {**_TEXT, "hidden": 256})
    assert _load("gpt2").example


def test_settings_of_torch_and_transformers_are_as_before() -> None:
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity(logging.INFO)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    try:
        made = _load("llama")
        assert next(made.module.parameters()).dtype == torch.float32
        assert log.get_verbosity() == logging.INFO
        assert torch.get_default_dtype() == torch.float64
        assert torch.equal(torch.get_rng_state(), state)
        import huggingface_hub.constants

        assert huggingface_hub.constants.HF_HUB_OFFLINE is False
    finally:
        torch.set_default_dtype(torch.float32)
        log.set_verbosity(before)


# Sizes in words


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("gpt2", {"layers": 3, "hidden": 48, "heads": 3}, {"n_layer": 3, "n_embd": 48, "n_head": 3}),
        ("gpt2", {"hidden": 48, "heads": 3, "intermediate": 100}, {"n_inner": 100}),
        ("gpt2", {"hidden": 48, "heads": 3}, {"n_inner": None}),
        (
            "t5",
            {"layers": 3, "hidden": 64, "heads": 4},
            {
                "num_layers": 3,
                "num_decoder_layers": 3,
                "d_model": 64,
                "num_heads": 4,
                "d_kv": 16,
                "d_ff": 256,
            },
        ),
        (
            "bart",
            {"layers": 1, "hidden": 64, "heads": 4},
            {
                "encoder_layers": 1,
                "decoder_layers": 1,
                "decoder_attention_heads": 4,
                "decoder_ffn_dim": 256,
                "encoder_ffn_dim": 256,
            },
        ),
        (
            "llama",
            {"layers": 1, "hidden": 1024, "heads": 16, "vocabulary": 100},
            {"num_key_value_heads": 16, "head_dim": 64, "intermediate_size": 2752},
        ),
        (
            "llama",
            {"layers": 1, "hidden": 64, "heads": 4, "num_key_value_heads": 2},
            {"num_key_value_heads": 2},
        ),
        ("mixtral", {"layers": 1, "hidden": 64, "heads": 8}, {"num_key_value_heads": 2}),
        ("mixtral", {"layers": 1, "hidden": 60, "heads": 3}, {"num_key_value_heads": 1}),
        ("opt", {"layers": 1, "hidden": 64, "heads": 4}, {"word_embed_proj_dim": 64, "ffn_dim": 256}),
        ("vit", {"layers": 1, "hidden": 64, "heads": 4, "classes": 7}, {"num_labels": 7}),
    ],
)
def test_sizes_in_words_reach_the_familys_own_keys(
    name: str, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    config: Any = load_transformers(name, settings, seed=0, device="meta").module.config
    assert {key: getattr(config, key) for key in expected} == expected


def test_a_longer_sequence_makes_the_table_of_positions_longer() -> None:
    made = load_transformers("gpt2", {**_TEXT, "sequence": 1500}, seed=0)
    assert made.example.tensors[0].shape == (2, 1500)
    assert made.module.get_submodule("transformer.wpe").num_embeddings == 1500
    assert "n_positions=1500 instead of 1024: `sequence` needs as many" in made.notes


def test_roberta_has_fewer_positions_than_its_table() -> None:
    sizes = {**_TEXT, "max_position_embeddings": 64}
    del sizes["sequence"]
    made = _load("roberta", sizes)
    assert made.example.tensors[0].shape == (2, 62)
    made.example.call(made.module)
    with pytest.raises(ModelError, match="a sequence of 63 tokens, and positions for 62"):
        _load("roberta", {**sizes, "sequence": 63})


def test_tokens_are_in_the_vocabulary_and_none_is_special() -> None:
    # BART's special tokens are 0, 1 and 2.
    made = _load("bart", {**_TEXT, "vocabulary": 6, "sequence": 500})
    for tokens in made.example.tensors:
        assert set(tokens.flatten().tolist()) == {3, 4, 5}


def test_tokens_and_weights_are_drawn_from_the_seed() -> None:
    first, same, other = (_load("gpt2", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.example.tensors[0], same.example.tensors[0])
    assert not torch.equal(first.example.tensors[0], other.example.tensors[0])
    weights = [made.module.get_submodule("lm_head").weight for made in (first, same, other)]
    assert torch.equal(weights[0], weights[1])  # type: ignore[arg-type]
    assert not torch.equal(weights[0], weights[2])  # type: ignore[arg-type]


# Tied embeddings


def test_tied_embeddings_are_told_and_untied_on_request() -> None:
    tied = _load("gpt2")
    assert tied.notes[-1] == (
        "lm_head and transformer.wte share a weight: where they are on several stages, each has a copy; "
        "settings={'tie_word_embeddings': False} gives each its own"
    )
    assert "encoder.embed_tokens, lm_head and shared share a weight" in _load("t5").notes[-1]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "distilbert", "opt"])
def test_untied_embeddings_are_apart(name: str) -> None:
    made = _load(name, {**_TEXT, "tie_word_embeddings": False})
    assert not any("share a weight" in note for note in made.notes)
    head = made.module.get_output_embeddings().weight  # type: ignore[operator]
    for _, table in made.module.named_modules():
        if isinstance(table, nn.Embedding):
            assert table.weight is not head
    paths = dict(made.module.named_parameters(remove_duplicate=False))
    assert len({id(parameter) for parameter in paths.values()}) == len(paths)


# A config.json


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    config = transformers.Qwen3Config(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=100, intermediate_size=128, layer_types=["full_attention", "sliding_attention"] * 2,
        dtype="bfloat16", max_position_embeddings=32, use_sliding_window=True, sliding_window=8,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_a_file_and_its_folder_are_read(config_file: Path, dialled: list[object]) -> None:
    for name in (str(config_file), str(config_file.parent)):
        made = _load(name, {})
        assert type(made.module).__name__ == "Qwen3ForCausalLM"
        assert len(list(made.module.get_submodule("model.layers").children())) == 4
        assert made.name == f"hf:{name}"
        assert made.example.tensors[0].shape == (2, 32)
        assert next(made.module.parameters()).dtype == torch.float32
    assert not dialled


def test_sizes_change_what_a_file_says(config_file: Path) -> None:
    config: Any = _load(str(config_file), {"layers": 3, "hidden": 32, "heads": 2}).module.config
    assert config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert (config.num_key_value_heads, config.head_dim, config.intermediate_size) == (1, 16, 64)


@pytest.mark.slow
def test_a_file_names_the_class(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 50}
    asked = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **small}
    file.write_text(json.dumps(asked), encoding="utf-8")
    made = _load(str(file), {"classes": 5})
    assert type(made.module).__name__ == "BertForSequenceClassification"
    assert made.example.call(made.module).logits.shape == (2, 5)
    file.write_text(json.dumps({**asked, "architectures": ["BertForMaskedML"]}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"Nearest: .*BertForMaskedLM"):
        _load(str(file), {})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is no JSON"),
        ("[1]", "has no model_type"),
        ('{"hidden_size": 32}', "has no model_type"),
        ("\x00", "is no JSON"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(FileError) as raised:
        _load(str(tmp_path), {})
    assert told in raised.value.what
    assert str(tmp_path / "config.json") in raised.value.what
    assert raised.value.hint


# What is refused


@pytest.mark.parametrize(
    ("name", "settings", "error", "told"),
    [
        ("gpt-2", {}, ModelError, "there is no model type and no file of this name"),
        ("lama", {}, ModelError, "Nearest: llama"),
        ("meta-llama/Llama-3", {}, FileError, "Nothing is downloaded"),
        ("gpt2", {"n_layers": 3}, UsageError, "Nearest: n_layer"),
        ("gpt2", {"n_layer": "x"}, ModelError, "expected int, got str"),
        ("gpt2", {"layers": 0}, UsageError, "layers=0: a whole number"),
        ("gpt2", {"layers": True}, UsageError, "a whole number of at least 1"),
        ("bert", {"layers": 1, "num_hidden_layers": 3}, UsageError, "{'num_hidden_layers': 3} set the same"),
        ("gpt2", {"layers": 1, "num_hidden_layers": 3}, UsageError, "settings={'n_layer': 3} set the same"),
        ("gpt2", {"classes": 5}, UsageError, "classes=5: the configuration gpt2 has no key for it"),
        ("vit", {"vocabulary": 5}, UsageError, "vocabulary=5: the configuration vit has no key for it"),
        ("vit", {"sequence": 5}, UsageError, "vit takes no tokens"),
        ("gpt2", {"hidden": 50, "heads": 4}, ModelError, "must be divisible by num_heads"),
        ("llama", {"hidden": 50, "heads": 4}, ModelError, "not a multiple of the number of attention heads"),
        ("oneformer", {}, ModelError, "takes task_inputs, which pplan cannot make up"),
        ("gpt2", {"architectures": ["Nothing"]}, ModelError, "which transformers"),
    ],
)
def test_what_cannot_be_built(
    name: str, settings: dict[str, Any], error: type[PplanError], told: str, dialled: list[object]
) -> None:
    with pytest.raises(error) as raised:
        load_transformers(name, settings, seed=0, device="meta")
    assert told in str(raised.value)
    assert raised.value.hint
    assert not dialled


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MachineError) as raised:
        _load("gpt2")
    assert raised.value.hint == 'pip install "pplan[transformers]"'
