"""What people share says nothing of who made it where: no command, path, setting, user or computer."""

from __future__ import annotations

import getpass
import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]

FOLDER, VALUE = "secret-folder-3141", "secret-value-2718"
FACTORY = """
from torch import nn

def make(depth, token):
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
"""
TOPOLOGY = """
[[device]]
name = "box"
memory = "16GiB"
count = 2
[[level]]
name = "node"
bandwidth = "10GB/s"
"""
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
}


@pytest.fixture
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a secret name and a model, a topology, a schedule and a configuration in it."""
    folder = here / FOLDER
    (folder / "llama").mkdir(parents=True)
    (folder / "private_models.py").write_text(FACTORY)
    (folder / "mine.toml").write_text(TOPOLOGY)
    (folder / "own.schedule").write_text("name: own\ndevice i: F*(p-i) (B F)*m\n")
    (folder / "llama/config.json").write_text(json.dumps(LLAMA))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("private_models", None)


def texts(folder: Path, *suffixes: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.name.endswith(suffixes)}


@pytest.mark.slow
def test_a_measured_model(run: Run, folder: Path) -> None:
    profile, plan = folder / "toy.profile.json", folder / "toy.plan.json"
    private = ("--set", "depth=6", "--set", f"token={VALUE}")
    how = ("--input", "8", "--device", "analytic:a100-40gb", "--micro-batch-sizes", "1,2,4")
    ran = run("profile", "private_models:make", *private, *how, "-o", str(profile))
    assert ran.status == 0, ran.err
    measured = Profile.load(profile)
    assert measured.settings == {"depth": 6, "token": "..."}
    assert measured.made_by.command.startswith(
        "pplan profile private_models:make --set depth=... --set token=... --input 8"
    )
    assert VALUE not in profile.read_text()

    machine = ("--topology", str(folder / "mine.toml"), "--mini-batch", "16")
    own = ("--schedule", str(folder / "own.schedule"), "-o", str(folder / "own.plan.json"))
    commands: list[tuple[str, ...]] = [
        ("solve", str(profile), *machine, "--frontier", "-o", str(plan)),
        ("solve", str(profile), *machine, *own),
        ("solve", str(plan), "--lost", "1", "-o", str(folder / "lost.plan.json")),
        ("import", "3,3", "--profile", str(profile), *machine, "-o", str(folder / "theirs.plan.json")),
        ("export", "torchgpipe", str(plan), "-o", str(folder / "toy.torchgpipe.json")),
        ("export", "torch", str(plan), "-o", str(folder / "toy.torch.json")),
        ("report", str(plan), "--explain", "-o", str(folder / "toy.html")),
        ("simulate", str(plan), "--trace", str(folder / "toy.trace.json"), "--plot", str(folder / "toy.svg")),
    ]
    for command in commands:
        ran = run(*command)
        assert ran.status == 0, ran.err
    shared = texts(folder, ".plan.json", ".frontier.json", ".torchgpipe.json", ".torch.json", ".html", ".svg")
    shared |= texts(folder, ".trace.json")
    assert len(shared) == 10
    for verb in ("simulate", "explain"):
        shared[verb] = run(verb, str(plan), "--json").out
    for name, text in shared.items():
        assert FOLDER not in text, name
        assert VALUE not in text, name
        assert "--set" not in text, name
        assert '"command"' not in text, name
        for own_name in (getpass.getuser(), socket.gethostname()):
            assert len(own_name) < 5 or own_name not in text, name


def test_a_configuration(run: Run, folder: Path) -> None:
    config = str(folder / "llama/config.json")
    options = ("--gpus", "2", "--gpu", "h100", "--mini-batch", "4", "--sequence", "16", "--layers", "2")
    assert run("solve", config, *options, "-o", str(folder / "toy.plan.json")).status == 0
    assert FOLDER not in (folder / "toy.plan.json").read_text()


@pytest.mark.slow
def test_a_transformers_model_by_its_path(run: Run, folder: Path) -> None:
    pytest.importorskip("transformers")
    model, out = f"hf:{folder / 'llama/config.json'}", folder / "x.profile.json"
    how = ("--sequence", "16", "--micro-batch-sizes", "1", "--device", "analytic:a100-40gb")
    ran = run("profile", model, *how, "-o", str(out))
    assert ran.status == 0, ran.err
    assert Profile.load(out).model == "hf:llama/config.json"


def test_a_command_of_an_older_plan_is_read_and_not_written(run: Run, here: Path, plan: Plan) -> None:
    content = json.loads(plan.to_json())
    content["made_by"] = {"pplan": "0.1.0", "command": f"pplan solve /home/{FOLDER}/toy.profile.json"}
    (here / "old.plan.json").write_text(json.dumps(content))
    old = Plan.load(here / "old.plan.json")
    assert FOLDER in old.made_by.command
    assert FOLDER not in old.to_json()
    assert run("export", "torchgpipe", "old.plan.json", "-o", "old.torchgpipe.json").status == 0
    assert FOLDER not in (here / "old.torchgpipe.json").read_text()
    assert run("report", "old.plan.json", "-o", "old.html").status == 0
    assert FOLDER not in (here / "old.html").read_text()


def test_provenance_tells_what_a_file_discloses(run: Run, here: Path, plan: Plan) -> None:
    plan.save(here / "toy.plan.json", force=False)
    shown = run("show", "--provenance", "toy.plan.json")
    assert shown.status == 0
    assert "made_by.pplan" in shown.out
    assert "It holds no absolute path, no e-mail address" in shown.out
    content = json.loads(plan.to_json())
    content["notes"] = [
        "costs from /home/ada/costs.csv, see ada@example.com, C:\\Users\\ada\\x, 25 GB/s, 1/2"
    ]
    content["made_by"]["command"] = "pplan solve ~/models/toy.profile.json"
    (here / "old.plan.json").write_text(json.dumps(content))
    found = json.loads(run("show", "--provenance", "old.plan.json", "--json").out)
    assert found["origin"]["made_by.command"] == "pplan solve ~/models/toy.profile.json"
    assert set(found["private"]) == {
        *("/home/ada/costs.csv", "ada@example.com", "C:\\Users\\ada\\x", "~/models/toy.profile.json"),
    }
    (here / "page.html").write_text("<p>/home/ada/costs.csv</p><a href='https://a.example/x/y'></a>")
    assert json.loads(run("show", "--provenance", "page.html", "--json").out)["private"] == [
        "/home/ada/costs.csv"
    ]
