"""A processor's seconds are planned on GPUs only where that is said, and then it is said first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]

PROCESSOR = {"device": "cpu", "device_name": "Some EPYC", "device_memory_bytes": None}


@pytest.fixture
def of_a_processor(profile: Profile, here: Path) -> Profile:
    """The profile of twelve layers, measured on a processor, in the working directory."""
    made = profile.model_copy(update=PROCESSOR)
    made.save(here / "toy.profile.json", force=True)
    return made


MACHINES: list[dict[str, Any]] = [
    {"gpu": "h100"},
    {"topology": "dgx-a100"},
    {"topology": "gpus.toml"},
    {"topology": "named.toml"},
]


@pytest.fixture
def files(here: Path) -> None:
    """Topologies of GPUs, by the preset's name and by the driver's."""
    (here / "gpus.toml").write_text('gpu = "t4"\ngpus = 2\n')
    (here / "named.toml").write_text('[[device]]\nname = "NVIDIA A100-SXM4-40GB"\nmemory = "40GB"\n')


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.usefixtures("files")
def test_gpus_are_not_planned_with_a_processors_seconds(
    machine: dict[str, Any], of_a_processor: Profile, run: Run
) -> None:
    options = [f"--{name}={value}" for name, value in machine.items()]
    ran = run("solve", "--gpus", "2", *options)
    assert ran.status == 2
    for said in ("measured on a processor, Some EPYC", "--device analytic:", "--seconds-of cpu"):
        assert said in ran.err
    for made in (
        lambda: pplan.solve(of_a_processor, gpus=2, **machine),
        lambda: pplan.frontier(of_a_processor, gpus=2, **machine),
        lambda: pplan.sweep(of_a_processor, {"mini_batch": [16]}, gpus=2, **machine),
        lambda: pplan.import_plan("6,6", of_a_processor, mini_batch=64, **machine),
    ):
        with pytest.raises(pplan.UsageError, match="measured on a processor"):
            made()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.usefixtures("files")
def test_where_it_is_said_the_first_line_under_the_answer_says_so(
    machine: dict[str, Any], of_a_processor: Profile, here: Path, run: Run
) -> None:
    assert of_a_processor.device == "cpu"
    options = [f"--{name}={value}" for name, value in machine.items()]
    ran = run("solve", "--gpus", "2", "--mini-batch", "64", "--seconds-of", "cpu", *options)
    lines = ran.out.splitlines()
    assert lines[1].startswith("Warning: the seconds are those of a processor, Some EPYC, and not of ")
    plan = pplan.load_plan(here / "toy.plan.json")
    assert plan.warnings[0].startswith("the seconds are those of a processor")
    assert plan.device_kind == "GPU"
    exported = pplan.export("torch", plan, device="cuda")
    assert exported.mini_batch == 64


def test_seconds_of_is_for_processors_alone(profile: Profile, of_a_processor: Profile) -> None:
    with pytest.raises(pplan.UsageError, match="not those of a processor but of Toy GPU"):
        pplan.solve(profile, gpus=2, seconds_of="cpu")
    with pytest.raises(pplan.UsageError, match="seconds_of='tpu': not known"):
        pplan.solve(of_a_processor, gpus=2, seconds_of="tpu")


def test_devices_like_the_profiled_processor_are_no_gpus(
    of_a_processor: Profile, here: Path, run: Run
) -> None:
    del of_a_processor
    ran = run("solve", "--gpus", "2", "--mini-batch", "64")
    assert ran.status == 0
    answer, first, second, *_ = ran.out.splitlines()
    assert "2 CPUs" in answer
    assert "GPU" not in answer
    assert first.startswith("Warning: the layers' seconds are those of this processor, Some EPYC")
    plan = pplan.load_plan(here / "toy.plan.json")
    assert any("the memory of Some EPYC is not known" in said for said in plan.warnings), second
    assert json.loads((here / "toy.plan.json").read_text())["warnings"] == plan.warnings


def test_an_export_to_cuda_of_a_processors_plan_is_refused(of_a_processor: Profile, run: Run) -> None:
    run("solve", "--gpus", "2", "--mini-batch", "64", "--max-stages", "2", "--use-all")
    ran = run("export", "torchgpipe", "--device", "cuda")
    assert ran.status == 2
    assert "the plan is for processors" in ran.err
    assert "--seconds-of cpu" in ran.err
    ran = run("export", "torchgpipe", "--json")
    assert ran.status == 0
    assert "the export is for the CPU" in ran.err
    assert set(json.loads(ran.out)["devices"]) == {"cpu"}
    plan = pplan.solve(of_a_processor, gpus=2, mini_batch=64)
    with pytest.raises(pplan.UsageError, match="the plan is for processors"):
        pplan.export("torch", plan, device="cuda")


@pytest.mark.usefixtures("of_a_processor")
def test_stages_of_one_process_share_its_cores(run: Run) -> None:
    """torchrun gives each process of the others one thread unasked."""
    training = ("--mini-batch", "8", "--schedule", "gpipe")
    run("import", "6,6", "--gpus", "2", *training, "-o", "two.plan.json")
    told = {name: run("export", name, "two.plan.json").err for name in ("torchgpipe", "fairscale", "torch")}
    told["gpus"] = run("export", "torchgpipe", "two.plan.json", "--force", "--device", "cuda").err
    run("import", "12", "--gpus", "1", *training, "-o", "one.plan.json")
    told["one"] = run("export", "torchgpipe", "one.plan.json", "--force").err
    assert {name for name, text in told.items() if "run it with OMP_NUM_THREADS=1" in text} == {
        *("torchgpipe", "fairscale")
    }


def test_another_machine_is_not_simulated_with_a_processors_seconds(
    of_a_processor: Profile, run: Run
) -> None:
    plan = pplan.solve(of_a_processor, gpus=2, mini_batch=64)
    with pytest.raises(pplan.UsageError, match="measured on a processor"):
        pplan.simulate(plan, of_a_processor, topology="dgx-a100")
    run("solve", "--gpus", "2", "--mini-batch", "64")
    assert run("simulate", "--gpu", "h100").status == 2


def test_a_stated_speed_says_what_the_seconds_are(of_a_processor: Profile, here: Path) -> None:
    (here / "fast.toml").write_text('[[device]]\ngpu = "t4"\ncount = 2\nspeed = 20.0\n')
    plan = pplan.solve(of_a_processor, gpus=2, mini_batch=64, topology=here / "fast.toml")
    assert "by the stated speeds" in plan.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_name", "machine"),
    [("NVIDIA A100-SXM4-80GB", {"topology": "dgx-a100"}), ("NVIDIA H100 80GB HBM3", {"gpu": "h100"})],
)
def test_a_preset_and_its_drivers_name_are_one_device(
    profile: Profile, device_name: str, machine: dict[str, Any]
) -> None:
    same = profile.model_copy(update={"device": "analytic", "device_name": device_name, "estimated": True})
    plan = pplan.solve(same, gpus=2, mini_batch=64, **machine)
    assert plan.warnings == ["the profile is an estimate, not a measurement"]
    other = pplan.solve(same, gpus=2, mini_batch=64, gpu="t4")
    assert (
        other.warnings[0]
        == f"the layers' seconds are those of {device_name}: for T4, profile the model on one"
    )


def test_a_profile_without_device_says_whose_seconds_they_are_taken_for(profile: Profile) -> None:
    unknown = profile.model_copy(update={"device": "unknown", "device_name": "", "device_memory_bytes": None})
    plan = pplan.solve(unknown, gpus=2, mini_batch=64, gpu="h100")
    assert plan.warnings[0] == (
        "the profile does not say which device its seconds are of: they are taken to be those of H100"
    )


def test_devices_that_nobody_named(profile: Profile) -> None:
    unknown = profile.model_copy(update={"device": "unknown", "device_name": "", "device_memory_bytes": None})
    plan = pplan.solve(unknown, gpus=2, mini_batch=64)
    assert plan.warnings[:2] == [
        "the profile does not say which device its seconds are of: they are taken to be those of the devices "
        "of the plan",
        "the memory of the devices is not known: no plan is refused for what it holds; `memory` gives it",
    ]
    assert plan.topology.startswith("2 x device")
