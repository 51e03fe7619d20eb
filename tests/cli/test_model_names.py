"""What `pplan profile hf:NAME` says to wrong names and files, and the hub's local cache."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pplan.cli.app import main
from pplan.profiler.transformers_models import configure_model, transformers_session

pytest.importorskip("transformers")

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


def download(hub: Path, name: str, commit: str, **keys: object) -> Path:
    """A configuration as huggingface_hub would have left it."""
    folder = hub / f"models--{name.replace('/', '--')}" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **keys}))
    return folder / "config.json"


def layers(name: str) -> int:
    with transformers_session() as transformers:
        return int(configure_model(transformers, name, {}).config.num_hidden_layers)


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["profile", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_hub_name_that_was_not_downloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = error(capsys, "hf:owner/small")
    assert "Nothing is downloaded" in says
    assert "name it as hf:./config.json or by --config." in says
    assert str(tmp_path / "home" / "hub") in says
    assert "owner/small.json: no such configuration file" in error(capsys, "hf:owner/small.json")


@pytest.mark.parametrize(
    ("path", "file"),
    [
        ("./config.json", "config"),
        ("config.json", "config"),
        ("models/tiny-llama/config.json", "tiny-llama"),
        ("models/tiny.json", "tiny"),
    ],
)
def test_files_of_a_configuration_have_its_name(tmp_path: Path, path: str, file: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(json.dumps(LLAMA | {"vocab_size": 99, "intermediate_size": 64}))
    device = ["--device", "analytic:a100-40gb", "--sequence", "8"]
    assert main(["profile", f"hf:{path}", *device, "--micro-batch-sizes", "1"]) == 0
    assert main(["solve", "--gpus", "2", "--mini-batch", "2", "--gpu", "a100-40gb"]) == 0
    assert {f"{file}.profile.json", f"{file}.plan.json"} == {one.name for one in tmp_path.glob("*.*.json")}


@pytest.mark.parametrize("content", ["{", "", "[1]", '"llama"'])
def test_a_file_that_is_no_configuration(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not: of model type None."""
    (tmp_path / "config.json").write_text(content)
    says = error(capsys, "hf:llama", "--config", "config.json")
    assert "not JSON" in says or "not the configuration of a model" in says
    assert "None" not in says


def test_a_file_without_a_model_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for config in ("config.json", "."):
        assert "has no model_type" in error(capsys, "hf:llama", "--config", config)


def test_the_file_says_what_a_hub_name_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the message for such a name says."""
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "no such"}))
    assert "no model type 'no such'" in error(capsys, "hf:owner/small", "--config", "config.json")


@pytest.mark.parametrize(("name", "nearest"), [("LlamaForCausalLM", "llama"), ("GPT2LMHeadModel", "gpt2")])
def test_the_name_of_a_class(name: str, nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"Nearest: {nearest}" in error(capsys, f"hf:{name}")


def test_what_the_cache_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each variable that huggingface_hub reads, and of the branch main though another was loaded later."""
    main_file = download(tmp_path / "home" / "hub", "owner/small", "aa", num_hidden_layers=3)
    later = download(tmp_path / "home" / "hub", "owner/small", "bb", num_hidden_layers=5)
    os.utime(main_file, ns=(1, 1))
    assert layers("owner/small") == 5
    refs = later.parent.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("aa")
    assert layers("owner/small") == 3
    download(tmp_path / "home" / "hub", "small-lm", "aa", num_hidden_layers=4)
    assert layers("small-lm") == 4
    download(tmp_path / "own", "owner/small", "cc", num_hidden_layers=6)
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "own"))
    assert layers("owner/small") == 6
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE")
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    download(tmp_path / "xdg" / "huggingface" / "hub", "owner/small", "dd", num_hidden_layers=7)
    assert layers("owner/small") == 7
