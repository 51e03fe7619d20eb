"""`import pplan`: its words, its laziness, and the same errors as the command line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile


def test_all() -> None:
    assert pplan.__all__ == sorted(pplan.__all__)
    assert set(pplan.__all__) == {
        "ExportError",
        "FileError",
        "InfeasibleError",
        "MachineError",
        "ModelError",
        "Plan",
        "PplanError",
        "Profile",
        "UsageError",
        "__version__",
        "export",
        "load_plan",
        "load_profile",
        "profile",
        "sequential",
        "solve",
    }
    assert dir(pplan) == pplan.__all__
    assert all(getattr(pplan, name) is not None for name in pplan.__all__)
    assert pplan.Plan is Plan
    assert pplan.Profile is Profile
    assert pplan.__version__ == version("pplan")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pplan.nothing  # noqa: B018


def test_import_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, pplan\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'networkx', 'rich', 'typer'} & set(sys.modules)))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\n"


def test_load_and_export(tmp_path: Path, plan: Plan, profile: Profile) -> None:
    plan.save(tmp_path / "a.plan.json", force=False)
    profile.save(tmp_path / "a.profile.json", force=False)
    assert pplan.load_plan(tmp_path / "a.plan.json") == plan
    assert pplan.load_profile(str(tmp_path / "a.profile.json")) == profile
    with pytest.raises(pplan.FileError, match="no such plan file"):
        pplan.load_plan(tmp_path / "b.plan.json")
    with pytest.warns(UserWarning, match="torchgpipe cannot run the plan itself"):
        exported = pplan.export("torchgpipe", plan, device="cpu")
    assert exported.model_dump()["made_by"]["pplan"] == pplan.__version__
    exported.save(tmp_path / "a.torchgpipe.json", force=False)
    assert (tmp_path / "a.torchgpipe.json").exists()
    with pytest.raises(pplan.UsageError, match="unknown runtime"):
        pplan.export("nothing", plan)


def test_profile_refuses_arguments_that_contradict() -> None:
    import torch

    module, batch = torch.nn.Linear(2, 2), torch.zeros(1, 2)
    with pytest.raises(pplan.UsageError, match="without example_input"):
        pplan.profile(module)
    with pytest.raises(pplan.UsageError, match="with a module"):
        pplan.profile(module, batch, classes=3)
    with pytest.raises(pplan.UsageError, match="with the name 'vgg11'"):
        pplan.profile("vgg11", batch)
