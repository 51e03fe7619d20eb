"""Checks of torchgpipe and DeepSpeed in the processes that a check starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from pplan.runtimes.checking.launching import run_in_processes
from pplan.runtimes.checking.records import Case, Job, ModelSpec

MakeCase = Callable[..., Case]
MODEL = """
    import torch
    from torch import nn

    def small():
        layers = [nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
        return nn.Sequential(*layers), torch.randn(3, 6)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with the models."""
    (tmp_path / "runtime_models.py").write_text(dedent(MODEL))
    monkeypatch.chdir(tmp_path)


def job_of(cases: list[Case]) -> Job:
    spec = ModelSpec(name="runtime_models:small", loss="mse", by_user=("runtime_models:small",))
    return Job(model=spec, cases=cases, steps=2, warm_ups=1)


def check(job: Job, backend: str) -> None:
    """Every case trains as the plain model, and its memory is measured where a process has one stage."""
    found = run_in_processes(job)
    assert found.backend == backend
    for case, ran in zip(job.cases, found.cases, strict=True):
        assert ran.losses is not None
        assert ran.losses.plain is not None
        assert len(set(ran.losses.plain)) == 2
        assert ran.losses.pipeline == pytest.approx(ran.losses.plain, rel=1e-4)
        assert len(ran.ran.step_seconds) == 2
        assert len(ran.ran.stages) == len(ran.ran.peak_bytes) == len(case.parts) - 1
        assert all(own.forward > 0 and own.backward > 0 for own in ran.ran.stages)
        assert all((peak is None) == (backend == "one process") for peak in ran.ran.peak_bytes)


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_one_process(make_runtime_case: MakeCase) -> None:
    """It ends, with FairScale's threads."""
    cases = [make_runtime_case("fairscale", [2, 3], checkpoint=word) for word in ("never", "except_last")]
    check(job_of(cases), "one process")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.usefixtures("models")
def test_deepspeed(make_runtime_case: MakeCase) -> None:
    """Two stages, and one of two replicas."""
    cases = [make_runtime_case("deepspeed", [2, 3]), make_runtime_case("deepspeed", [5], replicas=2)]
    check(job_of(cases), "gloo")
