"""Every table at 60, 80 and 120 columns, in a pipe, and without colour: what answers is never dropped."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from pplan.api.doctor import Diagnosis
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes.checking.records import Check

Run = Callable[..., Any]
Golden = Callable[[str, str], None]

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
}
DEGREES = "--model llama.json --gpus 8 --gpu h100 --mini-batch 32"
SOLVED = "--gpus 3 --mini-batch 32"
TABLES = {
    "show_profile": ("show toy.profile.json --all", "layer name forward backward share"),
    "show_plan": ("show toy.plan.json", "stage devices layers forward memory used step"),
    "solve": (f"solve toy.profile.json {SOLVED}", "stage devices layers memory used"),
    "solve_details": (
        f"solve toy.profile.json {SOLVED} --details",
        "stage devices layers memory baseline step",
    ),
    "solve_sweep": (
        "solve toy.profile.json --sweep gpus=2,4 --mini-batch 32 --jobs 1",
        "gpus step samples/s",
    ),
    "solve_frontier": (f"solve toy.profile.json {SOLVED} --frontier", "step memory"),
    "compare": ("compare toy.plan.json --planners", "plan step"),
    "explain": ("explain toy.plan.json --current 4,4,4", "where step change what"),
    "simulate": ("simulate toy.plan.json", "stage compute imbalance"),
    "replan": ("solve toy.plan.json --lost 1 --within 20%", "stage devices layers"),
    "degrees": (f"solve {DEGREES.removeprefix('--model ')} --details", "degrees step"),
    "lint": (f"lint Et*2|t*2|t*2|t*2L {DEGREES}", "rank layout memory"),
    "schedules": ("simulate --list", "name bubble paper"),
    "topology": ("machine list", "name GPUs"),
    "check": ("check toy.plan.json", "stage devices predicted measured error"),
    "doctor": ("machine doctor", "what found"),
    "topology_show": ("machine show dgx-h100 --gpus 16", "bandwidth latency"),
}
"""Of each table its command, and the headings that every width shows."""
LONG = (
    "solve.solve sweep.sweep solve.frontier explain.explain explain.compare explain.replan "
    "degrees.solve_configuration lint_layout.check_layout simulate.simulate_files"
)
"""What works the tables' figures out: once for all widths."""


def _check() -> Check:
    """Of four stages on six devices and the even split beside it, calibrated, with memory."""
    seconds = {"forward": 0.0123, "backward": 0.0246, "input": 0.0123, "weight": 0.0123}
    longer = {name: 1.0731 * value for name, value in seconds.items()}
    stages = [
        {"first_layer": first, "last_layer": first + 11, "devices": devices}
        | {"planned": seconds, "measured": longer}
        for first, devices in ((0, [0, 1]), (12, [2, 3]), (24, [4]), (36, [5]))
    ]
    case = {
        "balance": [12] * 4,
        "schedule": "1f1b",
        "micro_batches": 16,
        "micro_batch_size": 4,
        "stages": stages,
    }
    case |= {"predicted_step_seconds": 0.439, "calibrated_step_seconds": 0.452}
    case |= {"step_seconds": [0.461, 0.455, 0.472]}
    case["devices"] = [
        {"device": device, "planned_bytes": 5 * 2**30, "measured_bytes": (5 * 2**30) + 2**27}
        | {"unseen": {"context": 2**29, "reserve": 2**28, "master_weights": 2**28}}
        for device in range(6)
    ]
    fitted = {"overhead": 1e-4, "looped_overhead": 2e-4, "slowdown": 1.05, "latency": 5e-5, "bandwidth": 4e9}
    content = {"schema": 1, "plan": "toy.plan.json", "model": "toy", "backend": "gloo", "processes": 6}
    content |= {
        "device_name": "some CPU",
        "cases": [{**case, "name": "plan"}, {**case, "name": "even split"}],
    }
    return Check.parse(json.dumps(content | {"corrections": fitted, "notes": ["a note"]}), "test")


def _diagnosis() -> Diagnosis:
    """Of a machine where some things are and some are not."""
    missing = "none that torch can use; profiles of the CPU, or estimates: this torch is built without CUDA"
    rows = (
        ("pplan", "ok", "0.2.0, Python 3.11.7", ""),
        ("torch", "missing", "not installed: nothing can be profiled or checked", "pip install torch"),
        ("GPU", "optional", missing, "pplan profile MODEL --device analytic:h100"),
        ("links", "note", "GPUs 0 and 1 go through the host; not measured", "pplan machine measure links"),
        (
            "transformers",
            "optional",
            "not installed; for models by the name hf:...",
            'pip install "pplan[transformers]"',
        ),
    )
    names = ("subject", "state", "text", "advice")
    return Diagnosis.parse(
        json.dumps({"schema": 1, "findings": [dict(zip(names, row, strict=True)) for row in rows]}), "test"
    )


@pytest.fixture
def files(
    here: Path, profile: Profile, solve_once: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> Path:
    for name in LONG.split():
        module, function = f"pplan.api.{name}".rsplit(".", 1)
        work = getattr(importlib.import_module(module), function)
        monkeypatch.setattr(f"{module}.{function}", _once(work))
    monkeypatch.setattr("pplan.api.check.check_plan", lambda *_, **__: _check())
    monkeypatch.setattr("pplan.api.doctor.examine_machine", _diagnosis)
    profile.save(here / "toy.profile.json", force=False)
    plan = solve_once(Path("toy.profile.json"), gpus=3, mini_batch=32, micro_batches=8)
    plan.save(here / "toy.plan.json", force=False)
    (here / "llama.json").write_text(json.dumps(LLAMA))
    return here


def _once(work: Callable[..., Any]) -> Callable[..., Any]:
    results: list[Any] = []

    def first_result(*arguments: Any, **keywords: Any) -> Any:
        if not results:
            results.append(work(*arguments, **keywords))
        return results[0]

    return first_result


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_tables(name: str, files: Path, run: Run, golden: Golden, monkeypatch: pytest.MonkeyPatch) -> None:
    words, headings = TABLES[name]
    printed: dict[int, str] = {}
    for width in (60, 80, 120, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        ran = run(*words.split(), *(["--force"] if words.startswith("solve") else []))
        assert ran.status in ((0, 4) if name != "doctor" else (2,)), ran.err
        printed[width] = ran.out.replace(str(files), "HERE")
        _check_table(printed[width], headings.split(), width)
    texts = (f"{width} columns\n\n{printed[width]}\n" for width in (60, 80, 120))
    golden(f"widths/{name}.txt", "".join(texts))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    shown = run(*words.split(), *(["--force"] if words.startswith("solve") else [])).out
    assert not re.search(r"\x1b\[(?:\d;)*(?:3|4|9)\d", shown)
    assert re.sub(r"\x1b\[[\d;]*m", "", shown).split() == printed[200].split()


def _check_table(text: str, headings: Sequence[str], width: int) -> None:
    """The headings stand over a rule, and no row of a table is wider than the terminal."""
    lines = text.splitlines()
    rules = [number for number, line in enumerate(lines) if set(line.strip()) == {"─"}]
    assert rules
    heads = " ".join(line for number in rules for line in lines[max(number - 2, 0) : number])
    assert set(headings) <= set(heads.split()), heads
    assert max(cell_len(lines[number]) for number in rules) <= width
