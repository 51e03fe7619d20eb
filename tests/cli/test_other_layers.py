"""Costs of profiled layers for a runtime that has layers of its own: the second line says whose they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan

Run = Callable[..., Any]
TRAINERS = {"megatron": "sh", "megatron-bridge": "sh", "torchtitan": "sh", "nemo-automodel": "yaml"}
NAMES = ["model.embed_tokens", *(f"model.layers.{block}" for block in range(8)), "model.norm", "lm_head"]
SOLVE = ("solve", "--gpus", "2", "--mini-batch", "8", "--schedule", "1f1b")


def expected_warning(runtime: str, device: str) -> str:
    """With the other command. An imported table may be that of the runtime's own layers."""
    if device == "unknown":
        subject = "the imported seconds and bytes may not be those"
    else:
        subject = "these are the seconds and bytes of the profiled layers, not those"
    return f"{subject} of {runtime}'s own kernels and memory, which pplan solve config.json estimates"


@pytest.fixture(params=["cuda", "unknown"])
def device(request: pytest.FixtureRequest, here: Path) -> str:
    """The device of a profile of a decoder in this folder; unknown: an imported table."""
    rows = "".join(f"{name},0.01,0.02,1000000,1000000\n" for name in NAMES)
    columns = "name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes\n"
    (here / "decoder.csv").write_text(columns + rows)
    imported = pplan.import_profile("decoder.csv", micro_batch_size=1)
    profile = imported.model_copy(update={"device": request.param, "device_memory_bytes": 8 * 2**30})
    profile.save(here / "decoder.profile.json", force=True)
    return str(request.param)


@pytest.mark.parametrize("runtime", TRAINERS)
def test_solve_for_a_trainer_with_layers_of_its_own(runtime: str, device: str, run: Run, here: Path) -> None:
    ran = run(*SOLVE, "--runtime", runtime)
    plan = pplan.load_plan(here / "decoder.plan.json")
    warning = expected_warning(runtime, device)
    assert ran.out.splitlines()[1] == f"Warning: {warning}"
    assert ran.out.count(warning) == 1
    assert plan.warnings[0] == warning
    answer = json.loads(run(*SOLVE, "--runtime", runtime, "--force", "--json").out)
    assert answer["warnings"][0] == warning


@pytest.mark.usefixtures("device")
def test_the_profiled_layers_are_those_that_are_trained(run: Run) -> None:
    for options in ((), ("--runtime", "torch"), ("--runtime", "deepspeed")):
        assert "own kernels and memory" not in run(*SOLVE, "--force", *options).out


@pytest.mark.parametrize("runtime", TRAINERS)
def test_exports_carry_the_warning(runtime: str, device: str, run: Run, here: Path) -> None:
    """In the document, as a comment of the trainer's text, and as a printed line."""
    run(*SOLVE)
    warning = expected_warning(runtime, device)
    ran = run("export", runtime)
    text = (here / f"decoder.{runtime}.{TRAINERS[runtime]}").read_text()
    document = json.loads(run("export", runtime, "-o", "document.json", "--json").out)
    assert f"Warning: {warning}." in ran.err
    assert f"# Warning: {warning}\n" in text
    assert document["warnings"] == [warning]


@pytest.mark.usefixtures("device")
def test_an_export_from_python_warns() -> None:
    plan = pplan.solve("decoder.profile.json", gpus=2, mini_batch=8, schedule="1f1b")
    with pytest.warns(UserWarning, match="pplan solve config.json"):
        pplan.export("megatron", plan)
