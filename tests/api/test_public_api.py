"""`import pplan`: its words, its laziness, and the same errors as the command line."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
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
        "check",
        "compare",
        "compare_schedules",
        "data_parallel",
        "explain",
        "export",
        "frontier",
        "import_plan",
        "import_profile",
        "lint",
        "lint_layout",
        "load_model",
        "load_plan",
        "load_profile",
        "plot_timelines",
        "profile",
        "register_schedule",
        "replan",
        "report",
        "schedules",
        "sequential",
        "simulate",
        "simulate_costs",
        "solve",
        "sweep",
        "topology",
    }
    assert dir(pplan) == pplan.__all__
    assert all(getattr(pplan, name) is not None for name in pplan.__all__)
    assert pplan.Plan is Plan
    assert pplan.Profile is Profile
    assert pplan.__version__ == version("pplan")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pplan.nothing  # noqa: B018
    with pytest.raises(AttributeError, match=r"another function now: pplan\.solve"):
        pplan.degrees  # noqa: B018
    with pytest.raises(AttributeError, match=r"another function now: pplan\.lint\("):
        pplan.verify  # noqa: B018


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


@pytest.mark.slow
def test_solve_takes_a_profile_by_its_path(tmp_path: Path, profile: Profile) -> None:
    path = tmp_path / "a.profile.json"
    profile.save(path, force=False)
    by_path, by_text = pplan.solve(path, gpus=2), pplan.solve(str(path), gpus=2)
    assert by_path.profile == by_text.profile
    assert by_path.profile.file == "a.profile.json"
    assert by_path.profile.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert by_path.profile.layers_sha256 == profile.layers_sha256
    assert by_path.stages == pplan.solve(profile, gpus=2).stages
    with pytest.raises(pplan.FileError, match="no such profile file"):
        pplan.solve(tmp_path / "b.profile.json", gpus=2)


@pytest.mark.slow
def test_solve_takes_what_the_command_line_takes(tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "two.toml").write_text('memory = "8GiB"\n')
    one = pplan.solve(profile, gpus=2, bandwidth=5e9, latency=1e-5, micro_batches="auto")
    assert one.stages == pplan.solve(profile, gpus=2, bandwidth=[5e9], latency=(1e-5,)).stages
    assert "5 GB/s, 10 µs" in one.topology
    topology = pplan.solve(profile, gpus=2, topology=str(tmp_path / "two.toml")).topology
    assert topology == pplan.solve(profile, gpus=2, topology=tmp_path / "two.toml").topology
    assert "8.00 GiB" in topology
    (tmp_path / "counted.toml").write_text('memory = "8GiB"\ngpus = 2\n')
    assert pplan.solve(profile, topology=tmp_path / "counted.toml").gpus == 2
    with pytest.raises(pplan.UsageError, match="how many devices there are is not given"):
        pplan.solve(profile)
    numpys = pplan.solve(profile, gpus=np.int64(2), bandwidth=np.array([5e9, 1e9]))  # type: ignore[arg-type]
    assert len(numpys.stages) <= 2
    assert numpys.prediction.step_seconds > 0


@pytest.mark.parametrize(
    ("wishes", "what"),
    [
        ({"gpus": "2"}, "gpus='2': is not a whole number but of type str"),
        ({"gpus": 2.0}, "gpus=2.0: is not a whole number but of type float"),
        ({"gpus": True}, "gpus=True: is not a whole number but of type bool"),
        ({"gpus": None}, "`gpus`: how many devices there are is not given"),
        ({"gpus": 0}, "gpus=0: must be at least 1"),
        ({"gpus_per_node": "8"}, "gpus_per_node='8': is not a whole number"),
        ({"memory_bytes": 16e9}, "memory_bytes=16000000000.0: is not a whole number"),
        ({"memory_bytes": "16GiB"}, "memory_bytes='16GiB': is not a whole number"),
        ({"mini_batch": 2.5}, "mini_batch=2.5: is not a whole number"),
        ({"micro_batches": "some"}, "micro_batches='some': is not a whole number"),
        ({"micro_batches": 0}, "micro_batches=0: must be at least 1"),
        ({"bandwidth": "5GB/s"}, "bandwidth='5GB/s': is not a number or two"),
        ({"bandwidth": ["5GB/s"]}, "bandwidth=['5GB/s']: is not a number or two"),
        ({"bandwidth": True}, "bandwidth=True: is not a number or two"),
        ({"bandwidth": []}, "`bandwidth`: 0 values"),
        ({"bandwidth": float("nan")}, "bandwidth=nan: must be above 0"),
        ({"latency": {}.keys}, "latency=<built-in method keys"),
        ({"topology": 5}, "topology=5: is not a path but of type int"),
        ({"gpu": 5}, "gpu=5: is not a text"),
        ({"schedule": None}, "schedule=None: is not a text"),
        ({"recompute": True}, "recompute=True: is not a text"),
        ({"optimizer": 1}, "optimizer=1: is not a text"),
        ({"runtime": 1}, "runtime=1: is not a text"),
        ({"profile_file": 1}, "profile_file=1: is not a text"),
        ({"profile": {"schema": 1}}, "profile={'schema': 1}: is not a Profile but of type dict"),
        ({"profile": None}, "profile=None: is not a Profile"),
    ],
)
def test_arguments_of_a_wrong_type(profile: Profile, wishes: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {"profile": profile, "gpus": 2} | wishes
    with pytest.raises(pplan.UsageError) as caught:
        pplan.solve(**given)
    assert caught.value.what.startswith(what)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("function", "given", "wishes", "what"),
    [
        ("export", ("torchgpipe", "a.plan.json"), {}, "plan='a.plan.json': is not a Plan"),
        ("load_plan", (3,), {}, "path=3: is not a path"),
        ("load_profile", (None,), {}, "path=None: is not a path"),
        ("profile", ("vgg11",), {"micro_batch_sizes": 4}, "micro_batch_sizes=4: is not a list"),
        ("profile", ("vgg11",), {"micro_batch_sizes": "4"}, "micro_batch_sizes='4': is not a list"),
        ("profile", ("vgg11",), {"micro_batch_sizes": [1, "2"]}, "micro_batch_sizes[1]='2': is not"),
        ("profile", ("vgg11",), {"budget_seconds": "60s"}, "budget_seconds='60s': is not a number"),
        ("profile", ("vgg11",), {"input_shape": "3x2"}, "input_shape='3x2': is not a list"),
        ("profile", ("vgg11",), {"classes": "3"}, "classes='3': is not a whole number"),
        ("profile", ("vgg11",), {"seed": None}, "seed=None: is not a whole number"),
        ("profile", ("vgg11",), {"device": 0}, "device=0: is not a text"),
        ("profile", ("vgg11",), {"dtype": 32}, "dtype=32: is not a text"),
        ("profile", (3,), {}, "model=3: is not a Module but of type int"),
        ("sequential", ("vgg11", None), {}, "model='vgg11': is not a Module but of type str"),
    ],
)
def test_other_functions_refuse_wrong_types_too(
    function: str, given: tuple[Any, ...], wishes: dict[str, Any], what: str
) -> None:
    with pytest.raises(pplan.UsageError) as caught:
        getattr(pplan, function)(*given, **wishes)
    assert caught.value.what.startswith(what)


def test_simulate_refuses_a_profile_of_other_layers(plan: Plan, profile: Profile) -> None:
    other = plan.model_copy(
        update={"profile": plan.profile.model_copy(update={"layers_sha256": "0" * 64, "file": "a.json"})}
    )
    with pytest.raises(pplan.UsageError, match=r"has other layers than .* \(a\.json\)"):
        pplan.simulate(other, profile)


@pytest.mark.parametrize(
    ("wishes", "what"),
    [
        ({"plan": 3}, "plan=3: is not a Plan but of type int"),
        ({"profile": 3}, "profile=3: is not a Profile but of type int"),
        ({"schedule": 3}, "schedule=3: is not a text"),
        ({"schedule": "nothing"}, "schedule='nothing': not known"),
        ({"stages": 0}, "stages=0: must be at least 1"),
        ({"stages": "2"}, "stages='2': is not a whole number"),
        ({"stages": 99}, "stages=99: the allowed cuts make at most"),
        ({"micro_batches": 2.0}, "micro_batches=2.0: is not a whole number"),
        ({"micro_batches": 7}, "micro_batches=7: does not divide the global batch of"),
        ({"virtual_stages": True}, "virtual_stages=True: is not a whole number"),
        ({"topology": 5}, "topology=5: is not a path"),
    ],
)
def test_simulate_refuses_what_cannot_be(
    profile: Profile, wishes: dict[str, Any], what: str, solve_once: Callable[..., Plan]
) -> None:
    made = solve_once(profile, gpus=2, mini_batch=8)
    with pytest.raises(pplan.UsageError) as caught:
        pplan.simulate(**({"plan": made, "profile": profile} | wishes))
    assert caught.value.what.startswith(what)
    assert caught.value.hint


@pytest.mark.parametrize(("runtime", "device"), [(3, "cpu"), ("torchgpipe", 0)])
def test_export_refuses_wrong_types(plan: Plan, runtime: Any, device: Any) -> None:
    with pytest.raises(pplan.UsageError, match="is not a text but of type int"):
        pplan.export(runtime, plan, device=device)


FACTORY = """
import torch
from torch import nn


def make(width=2, by_name=False):
    given = torch.randn(3, width)
    return nn.Sequential(nn.Linear(width, 4)), {"input": given} if by_name else given
"""


def test_models_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As a profile says that they were built, and what it is called with."""
    (tmp_path / "zoo_of_one.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    request.addfinalizer(lambda: sys.modules.pop("zoo_of_one", None))
    measured = pplan.profile("zoo_of_one:make", settings={"width": 5}, device="meta")
    assert measured.settings == {"width": 5}
    model, example = pplan.load_model("zoo_of_one:make", settings=measured.settings)
    assert [tuple(parameter.shape) for parameter in model.parameters()] == [(4, 5), (4,)]
    assert getattr(example, "shape", None) == (3, 5)
    _, example = pplan.load_model("zoo_of_one:make", settings={"by_name": True})
    assert isinstance(example, dict)
    assert list(example) == ["input"]
    with pytest.raises(pplan.UsageError, match="classes=3: zoo_of_one:make"):
        pplan.load_model("zoo_of_one:make", classes=3)
