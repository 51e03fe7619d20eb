"""What the command line's tests share: a run of `main` in an empty folder, documents, golden files."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from pplan.cli.app import main
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

GOLDEN = Path(__file__).parent.parent / "golden"


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Standard error by line."""
        return self.err.splitlines()


class Terminal(Console):
    """A console of so many columns, and what was printed on it."""

    def __init__(self, width: int) -> None:
        self._printed = io.StringIO()
        super().__init__(
            file=self._printed, width=width, markup=False, highlight=False, emoji=False, color_system=None
        )

    @property
    def text(self) -> str:
        return self._printed.getvalue()


@pytest.fixture
def terminal() -> type[Terminal]:
    """Makes a console of that width, which keeps what is printed on it as `text`."""
    return Terminal


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPLAN_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "110")
    return tmp_path


@pytest.fixture
def run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs pplan's own `main` with these arguments, as the console script does."""
    del here

    def run_main(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pplan", *arguments])
        capsys.readouterr()
        status = main()
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run_main


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden; PPLAN_UPDATE_GOLDEN=1 rewrites the file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if os.environ.get("PPLAN_UPDATE_GOLDEN") == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture
def profile() -> Profile:
    """Twelve layers at two sizes, on a GPU; one cut is forbidden, one size did not fit."""
    kinds = ("Conv2d", "ReLU", "MaxPool2d", "Linear")
    layers = [
        {
            "name": f"features.{index}" if index < 9 else f"classifier[{index - 9}]",
            "kind": kinds[index % 4],
            "parameter_bytes": 2**20 * (12 - index) if index % 4 in (0, 3) else 0,
            "cut_after": index != 4,
            "cut_reason": "in-place ReLU follows" if index == 4 else None,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": 1e-3 * size * (12 - index),
                    "backward_seconds": 2e-3 * size * (12 - index),
                    "output_bytes": 2**18 * size,
                    "saved_bytes": 2**19 * size,
                    "spread": 0.01 * (index % 3),
                    "forward_host_seconds": 2e-5,
                    "backward_host_seconds": 4e-5,
                }
                for size in (4, 8)
            ],
        }
        for index in range(12)
    ]
    whole = [
        {
            "micro_batch_size": size,
            "forward_seconds": 78e-3 * size,
            "backward_seconds": 150e-3 * size,
            "closing_ratio": 234 / 228,
            "forward_closing_ratio": 1.0,
            "backward_closing_ratio": 156 / 150,
            "spread": 0.02,
        }
        for size in (4, 8)
    ]
    return Profile.model_validate(
        {
            "schema": 1,
            "model": "toy",
            "device": "cuda:0",
            "device_name": "Toy GPU",
            "device_memory_bytes": 16 * 2**30,
            "input_shape": [3, 32, 32],
            "layers": layers,
            "whole": whole,
            "unmeasured": [{"micro_batch_size": 16, "reason": "does not fit", "detail": "out of memory"}],
            "notes": [
                "micro-batch size 16 was not measured (does not fit): out of memory",
                "The machine was busy.",
            ],
            "made_by": {
                "pplan": "0.1.0",
                "torch": "2.15.0",
                "cuda": "13.0",
                "time": "2026-01-02T03:04:05+00:00",
            },
        }
    )


@pytest.fixture
def plan(profile: Profile) -> Plan:
    """Three stages over six of eight GPUs, one with four replicas."""
    names = [layer.name for layer in profile.layers]
    bounds = [(0, 3, [0, 1, 2, 3]), (4, 8, [4]), (9, 11, [5])]
    stages = [
        {
            "first_layer": first,
            "last_layer": last,
            "replicas": len(devices),
            "devices": devices,
            "forward_seconds": 0.012,
            "backward_seconds": 0.024,
            "memory_bytes": 3 * 2**30,
            "memory_limit_bytes": 16 * 2**30,
            "memory": {"weights": 2**30, "gradients": 2**30, "optimizer": 0, "stage_inputs": 2**30},
        }
        for first, last, devices in bounds
    ]
    return Plan.model_validate(
        {
            "schema": 1,
            "model": "toy",
            "balance": [4, 5, 3],
            "mini_batch": 64,
            "micro_batches": 16,
            "micro_batch_size": 4,
            "schedule": "1f1b",
            "recompute": "never",
            "gpus": 8,
            "topology": "8 Toy GPUs of 16 GiB",
            "stages": stages,
            "prediction": {
                "step_seconds": 0.65,
                "samples_per_second": 64 / 0.65,
                "bubble": 0.11,
                "lower_bound_seconds": 0.65,
                "gap": 0.0,
                "exact": True,
            },
            "baselines": [
                {"name": "one-gpu", "step_seconds": None, "reason": "does not fit"},
                {"name": "data-parallel", "step_seconds": 0.7, "detail": "2 micro-batches"},
                {"name": "even", "step_seconds": 1.3},
            ],
            "alternatives": [
                {
                    "runtimes": ["torchgpipe", "fairscale"],
                    "balance": [1, 1, 1, 1, 2, 2, 2, 2],
                    "schedule": "gpipe",
                    "micro_batches": 16,
                    "micro_batch_size": 4,
                    "recompute": "except_last",
                    "step_seconds": 0.8,
                    "memory_bytes": [2**30] * 8,
                }
            ],
            "searched": "all straight and replicated pipelines",
            "notes": ["The mini-batch is 8 GPUs x 8."],
            "layer_names": names,
            "profile": {"file": "toy.profile.json", "sha256": "0" * 64},
            "made_by": {"pplan": "0.1.0", "command": "pplan solve --gpus 8"},
        }
    )
