"""`pplan profile`: what its options become and what it writes; the measuring is stood in for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cli.streams import remark
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def asked(here: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `pplan.profile` was asked for; it answers with the profile by hand."""
    del here
    seen: dict[str, Any] = {}

    def measure(model: str, **options: Any) -> Profile:
        seen.update(options, model=model)
        return profile

    monkeypatch.setattr("pplan.profiler.names.refuse_unknown_name", lambda _: None)
    monkeypatch.setattr("pplan.api.profiles.profile", measure)
    return seen


def test_defaults(run: Run, here: Path, asked: dict[str, Any]) -> None:
    ran = run("profile", "toy")
    assert ran.status == 0, ran.err
    assert asked == {
        "model": "toy",
        "input_shape": None,
        "input_like": None,
        "classes": None,
        "micro_batch_sizes": None,
        "dtype": None,
        "device": None,
        "calibrate": None,
        "granularity": None,
        "keep_together": (),
        "settings": None,
        "loss": None,
        "compile": False,
        "channels_last": False,
        "amp": None,
        "tf32": False,
        "cudnn_benchmark": False,
        "budget_seconds": 60.0,
        "seed": 0,
        "tensor_parallel": None,
        "tensor_plan": None,
        "progress": None,
        "cache": True,
        "resume": False,
        "remark": remark,
    }
    assert ran.lines == ["Wrote toy.profile.json"]
    assert ran.out.startswith("toy on cuda:0 (Toy GPU), float32, input 3x32x32: 12 layers")
    assert Profile.load(here / "toy.profile.json").made_by.command == "pplan profile toy"


def test_every_option_arrives(run: Run, asked: dict[str, Any]) -> None:
    options = (
        "--input 3x32x32 --input-like zoo.inputs:batch --classes 10 --micro-batch-sizes 8,1,2,2 "
        "--dtype bfloat16 --device cuda:1 "
        "--budget 1.5m --seed 7 --granularity module:blocks.*,head --keep-together stem.* "
        "--keep-together head "
        "--set depth=24 --set name=abc --layers 8 --loss mse --compile --channels-last --amp bf16 --tf32 "
        "--cudnn-benchmark --resume --calibrate other.profile.json --tp 2 --tp-plan up=colwise"
    )
    ran = run("profile", "zoo.big:make", *options.split())
    assert ran.status == 0, ran.err
    assert asked == {
        "model": "zoo.big:make",
        "input_shape": (3, 32, 32),
        "input_like": "zoo.inputs:batch",
        "classes": 10,
        "micro_batch_sizes": (1, 2, 8),
        "dtype": "bfloat16",
        "device": "cuda:1",
        "calibrate": Path("other.profile.json"),
        "granularity": "module:blocks.*,head",
        "keep_together": ("stem.*", "head"),
        "settings": {"depth": 24, "name": "abc", "layers": 8},
        "loss": "mse",
        "compile": True,
        "channels_last": True,
        "amp": "bf16",
        "tf32": True,
        "cudnn_benchmark": True,
        "budget_seconds": 90.0,
        "seed": 7,
        "tensor_parallel": 2,
        "tensor_plan": {"up": "colwise"},
        "progress": None,
        "cache": True,
        "resume": True,
        "remark": remark,
    }


def test_json_is_exactly_the_file(run: Run, here: Path, asked: dict[str, Any]) -> None:
    ran = run("profile", "toy", "--json")
    assert asked
    assert ran.out == (here / "toy.profile.json").read_text()
    assert json.loads(ran.out)["model"] == "toy"


def test_the_file_is_named_after_the_model(
    run: Run, here: Path, asked: dict[str, Any], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = profile.model_copy(update={"model": "zoo/../big:make it"})
    monkeypatch.setattr("pplan.api.profiles.profile", lambda *_, **__: named)
    del asked
    assert run("profile", "whatever").lines == ["Wrote zoo_.._big_make_it.profile.json"]
    assert (here / "zoo_.._big_make_it.profile.json").exists()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--input 3x-1", "--input 3x-1: is not the shape of one sample"),
        ("--input 0x3", "--input 0x3: is not the shape of one sample"),
        ("--micro-batch-sizes 1,two", "--micro-batch-sizes 1,two: 'two' is not a whole number"),
        ("--micro-batch-sizes 0,1", "--micro-batch-sizes 0,1: must be at least 1"),
        ("--micro-batch-sizes 1,,2", "--micro-batch-sizes 1,,2: '' is not a whole number"),
        ("--budget long", "--budget 'long': not a duration"),
        ("--budget 0s", "--budget 0s: must be above 0"),
        ("--classes 0", "--classes 0: must be at least 1"),
        ("--seed -1", "--seed -1: must be at least 0"),
        ("--resume --no-cache", "--resume and --no-cache: there is nothing to resume"),
        ("-o no/such/folder.json", "no/such/folder.json: the folder no/such does not exist"),
        ("-o .", ".: is a folder"),
    ],
)
def test_bad_values_are_refused_before_measuring(
    run: Run, here: Path, asked: dict[str, Any], options: str, what: str
) -> None:
    ran = run("profile", "toy", *options.split())
    assert ran.status == 2
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert len(ran.lines) == 2
    assert not asked
    assert not list(here.iterdir())


def test_an_existing_file_is_refused_before_measuring(run: Run, here: Path, asked: dict[str, Any]) -> None:
    (here / "mine.json").write_text("old")
    ran = run("profile", "toy", "-o", "mine.json")
    assert (ran.status, ran.lines[0]) == (2, "pplan: mine.json exists already")
    assert not asked


def test_a_folder_that_refuses_files(
    run: Run, here: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    ran = run("profile", "toy")
    assert ran.status == 2
    assert ran.lines[0] == "pplan: toy.profile.json: the folder . cannot be written to: Permission denied"
    assert not asked
    assert not list(here.iterdir())


@pytest.mark.parametrize("options", ["--dtype float8", "--device gpu", "--device cuda:99"])
def test_what_torch_must_know_is_refused_before_the_model_is_built(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, options: str
) -> None:
    built: list[str] = []
    monkeypatch.setattr("pplan.profiler.models.load_model", lambda name, **_: built.append(name))
    ran = run("profile", "vgg11", *options.split())
    assert ran.status == 2
    assert options.split()[1] in ran.lines[0]
    assert len(ran.lines) == 2
    assert not built
    assert not list(here.iterdir())


def test_the_bar_shows_the_layer_in_hand_on_a_terminal(
    run: Run, asked: dict[str, Any], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pplan.profiler.size_sweep import Progress

    def measure(model: str, *, progress: Any, **_: Any) -> Profile:
        del model
        progress(Progress("warm-up", 4, "features[0]", 0.5))
        return profile

    monkeypatch.setattr("pplan.api.profiles.profile", measure)
    monkeypatch.setattr("pplan.cli.profile_command.is_interactive", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    ran = run("profile", "toy")
    assert ran.status == 0
    assert not asked
    assert "micro-batch size 4: warm-up, features[0]" in ran.err
    assert "50%" in ran.err
    assert ran.lines[-1].endswith("Wrote toy.profile.json")
