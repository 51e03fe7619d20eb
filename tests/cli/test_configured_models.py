"""`pplan profile hf:...` of a configuration: by --config, or by a hub's name in the local cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pplan.cli.app import main
from pplan.profiler.profile_file import Profile

pytest.importorskip("transformers")

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
LAYER = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64)
"""Bytes of a block in float32."""


def measure(tmp_path: Path, *arguments: str) -> Profile:
    made = tmp_path / "made.profile.json"
    sizes = ["--micro-batch-sizes", "1", "--sequence", "16", "--no-cache"]
    assert main(["profile", *arguments, "--device", "meta", *sizes, "-o", str(made), "--force"]) == 0
    return Profile.load(made)


@pytest.mark.slow
def test_a_configuration_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sizes.json"
    file.write_text(json.dumps(CONFIG))
    profile = measure(tmp_path, "hf:llama", "--config", str(file))
    assert [layer.parameter_bytes for layer in profile.layers].count(LAYER) == 2
    for model, says in (
        ("hf:gpt2", "of model type llama, not of gpt2"),
        ("vgg11", "no model of transformers"),
    ):
        capsys.readouterr()
        assert main(["profile", model, "--config", str(file)]) == 2
        assert says in capsys.readouterr().err
    for text in ("[]", "{", '{"model_type": 3}'):
        file.write_text(text)
        assert main(["profile", "hf:llama", "--config", str(file)]) == 2
    assert main(["profile", "hf:llama", "--config", str(tmp_path / "none.json")]) == 2


def test_a_name_of_a_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what the cache has; nothing is downloaded."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    assert main(["profile", "hf:owner/small", "--device", "meta"]) == 2
    assert "Nothing is downloaded" in capsys.readouterr().err
    folder = tmp_path / "home" / "hub" / "models--owner--small" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    profile = measure(tmp_path, "hf:owner/small")
    assert [layer.parameter_bytes for layer in profile.layers].count(LAYER) == 2
