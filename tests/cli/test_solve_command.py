"""`pplan solve`: what its options become, and what it writes and prints; the solver is stood in for."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.api.provenance import made_by
from pplan.cli.solve_command import _next_step
from pplan.cost_models.document import MadeBy
from pplan.cost_models.errors import UsageError
from pplan.cost_models.text_files import sha256
from pplan.planner.plan_file import BUFFER_WARNING, Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def asked(here: Path, profile: Profile, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `pplan.solve` was asked for; it answers with the plan by hand."""
    profile.save(here / "toy.profile.json", force=False)
    seen: dict[str, Any] = {}

    def solve(profile: Profile, **wishes: Any) -> Plan:
        seen.update(wishes, profile=profile)
        return plan.model_copy(update={"made_by": made_by(MadeBy(), measured=profile.made_by)})

    monkeypatch.setattr("pplan.api.solve.solve", solve)
    return seen


def test_defaults(run: Run, here: Path, asked: dict[str, Any], profile: Profile) -> None:
    ran = run("solve", "--gpus", "8")
    assert ran.status == 0, ran.err
    assert asked.pop("profile") == profile
    assert asked == {
        "gpus": 8,
        "gpus_per_node": None,
        "gpu": None,
        "memory_bytes": None,
        "bandwidth": None,
        "latency": None,
        "topology": None,
        "runtime": None,
        "tp": None,
        "mini_batch": None,
        "micro_batches": None,
        "schedule": "auto",
        "recompute": "auto",
        "optimizer": "sgd",
        "planner": "best",
        "time_limit": 30.0,
        "use_all": False,
        "max_stages": None,
        "min_micro_batch": None,
        "cut_after": (),
        "keep_together": (),
        "pins": (),
        "memory_limit": None,
        "robust": False,
        "slow_devices": None,
        "precision": "auto",
        "gradient_dtype": "auto",
        "host_bandwidth": None,
        "host_memory_bytes": None,
        "zero": 0,
        "objective": "step-time",
        "price": None,
        "seconds_of": None,
        "profile_file": "toy.profile.json",
        "profile_sha256": sha256((here / "toy.profile.json").read_text()),
    }


def test_every_option_arrives_in_si_units(run: Run, asked: dict[str, Any]) -> None:
    options = (
        "--gpus 16 --gpus-per-node 8 --gpu A100-40GB --memory 16GiB --bandwidth 300GB/s,25GB/s "
        "--latency 5us,20us --topology two.toml --runtime torchgpipe --mini-batch 256 --micro-batches 32 "
        "--schedule gpipe --recompute except-last --optimizer adam --planner gpipe --time-limit 2min "
        "--precision fp32 --gradient-dtype fp32 "
        "--use-all --max-stages 4 --min-micro-batch 8 --cut-after features.3 --cut-after features.7 "
        "--keep-together classifier* "
        "--pin features.0=stage0 --pin classifier[2]=3"
    )
    ran = run("solve", "toy.profile.json", *options.split())
    assert ran.status == 0, ran.err
    assert asked["latency"] == pytest.approx((5e-6, 20e-6))
    wanted = {
        "gpus": 16,
        "gpus_per_node": 8,
        "gpu": "A100-40GB",
        "memory_bytes": 16 * 2**30,
        "bandwidth": (300e9, 25e9),
        "topology": Path("two.toml"),
        "runtime": "torchgpipe",
        "mini_batch": 256,
        "micro_batches": 32,
        "schedule": "gpipe",
        "recompute": "except_last",
        "optimizer": "adam",
        "precision": "fp32",
        "gradient_dtype": "fp32",
        "planner": "gpipe",
        "time_limit": 120.0,
        "use_all": True,
        "max_stages": 4,
        "min_micro_batch": 8,
        "cut_after": ("features.3", "features.7"),
        "keep_together": ("classifier*",),
        "pins": (("features.0", 0), ("classifier[2]", 3)),
    }
    assert {key: asked[key] for key in wanted} == wanted


def test_writes_the_plan_with_its_origin(
    run: Run, here: Path, asked: dict[str, Any], profile: Profile
) -> None:
    ran = run("solve", "--gpus", "8")
    assert asked
    assert ran.out.startswith("A pipeline of 3 stages over 6 GPUs is the fastest of the plans searched: ")
    assert ran.lines == ["Using toy.profile.json (newest profile in this directory)", "Wrote toy.plan.json"]
    origin = Plan.load(here / "toy.plan.json").made_by
    assert origin.command == ""
    assert (origin.torch, origin.cuda) == (profile.made_by.torch, profile.made_by.cuda)
    assert origin.pplan == pplan.__version__
    assert origin.time > "2026"


def test_json_is_exactly_the_file(run: Run, here: Path, asked: dict[str, Any]) -> None:
    ran = run("solve", "--gpus", "8", "--json", "-o", "my.json")
    assert asked
    assert ran.out == (here / "my.json").read_text()
    assert json.loads(ran.out)["balance"] == [4, 5, 3]
    assert ran.lines[-1] == "Wrote my.json"


def test_default_output_is_replaced_but_not_a_named_one(run: Run, here: Path, asked: dict[str, Any]) -> None:
    assert run("solve", "--gpus", "8").status == 0
    before = (here / "toy.plan.json").stat().st_ino
    assert run("solve", "--gpus", "8").status == 0
    assert (here / "toy.plan.json").stat().st_ino != before
    asked.clear()
    old = (here / "toy.plan.json").read_text().replace("toy", "old")
    (here / "my.json").write_text(old)
    ran = run("solve", "--gpus", "8", "-o", "my.json")
    assert ran.status == 2
    assert ran.lines[-2] == "pplan: my.json exists already"
    assert "--force" in ran.lines[-1]
    assert not asked, "the search ran although its result could not be kept"
    assert run("solve", "--gpus", "8", "-o", "my.json", "--force").status == 0
    assert (here / "my.json").read_text() != old


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--gpus 0", "--gpus 0: must be at least 1"),
        ("--gpus -1", "--gpus -1: must be at least 1"),
        ("--gpus many", "--gpus many: is not a whole number"),
        ("--gpus 2.5", "--gpus 2.5: is not a whole number"),
        ("--gpus 2 --mini-batch 0", "--mini-batch 0: must be at least 1"),
        ("--gpus 2 --micro-batches some", "--micro-batches some: is neither a whole number nor auto"),
        ("--gpus 2 --micro-batches 0", "--micro-batches 0: must be at least 1"),
        ("--gpus 2 --schedule 1f2b", "--schedule 1f2b: not known"),
        ("--gpus 2 --recompute sometimes", "--recompute sometimes: is not one of never, always, except-last"),
        (
            "--gpus 2 --optimizer lion",
            "--optimizer lion: is not one of sgd, momentum, adam, adamw, adamw-8bit",
        ),
        ("--gpus 2 --runtime pipedream", "unknown runtime 'pipedream'"),
        ("--gpus 2 --memory 16", "--memory 16: the unit is missing"),
        ("--gpus 2 --bandwidth 25Gb/s", "--bandwidth 25Gb/s: must be in bytes, not bits, per second"),
        ("--gpus 2 --bandwidth 1GB/s,2GB/s,3GB/s", "--bandwidth 1GB/s,2GB/s,3GB/s: has 3 values"),
        ("--gpus 2 --latency soon", "--latency 'soon': not a duration"),
        ("--gpus 2 --time-limit 0s", "--time-limit 0s: must be above 0"),
        ("--gpus 2 --max-stages 0", "--max-stages 0: must be at least 1"),
        ("--gpus 2 --pin features.0", "--pin features.0: is not of the form LAYER=stageN"),
        ("--gpus 2 --recompute except-last --schedule 1f1b", "--recompute except-last with --schedule 1f1b"),
    ],
)
def test_bad_values(run: Run, here: Path, asked: dict[str, Any], options: str, what: str) -> None:
    ran = run("solve", *options.split())
    assert ran.status == 2
    assert ran.out == ""
    assert ran.lines[-2].startswith(f"pplan: {what}")
    assert ran.lines[-1].startswith("  ")
    assert not asked
    assert not (here / "toy.plan.json").exists()


def test_a_disk_that_fills_keeps_what_was_printed(
    run: Run, here: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("solve", "--gpus", "8").status == 0
    old = (here / "toy.plan.json").read_text()
    asked.clear()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    ran = run("solve", "--gpus", "8")
    assert asked
    assert ran.status == 2
    assert ran.out.startswith("A pipeline of 3 stages")
    assert ran.lines[-2] == "pplan: toy.plan.json: cannot be written: No space left on device"
    assert (here / "toy.plan.json").read_text() == old
    assert sorted(path.name for path in here.iterdir()) == ["toy.plan.json", "toy.profile.json"]


def test_says_what_it_wrote_although_the_reader_has_gone(
    run: Run, here: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("pplan.cli.plan_tables.print_answer", gone)
    ran = run("solve", "--gpus", "8")
    assert asked
    assert (ran.status, ran.out) == (0, "")
    assert ran.lines[-1] == "Wrote toy.plan.json"
    assert (here / "toy.plan.json").exists()


@pytest.mark.parametrize("options", ["-o toy.profile.json --force", "-o link --force", "-o two.toml --force"])
def test_never_overwrites_what_it_is_made_from(
    run: Run, here: Path, asked: dict[str, Any], options: str
) -> None:
    (here / "link").symlink_to("toy.profile.json")
    (here / "two.toml").write_text("gpus = 8\n")
    before = (here / "toy.profile.json").read_bytes()
    ran = run("solve", "toy.profile.json", "--topology", "two.toml", *options.split())
    assert ran.status == 2
    assert ran.lines[0] == f"pplan: {options.split()[1]}: would overwrite what it is made from"
    assert not asked
    assert (here / "toy.profile.json").read_bytes() == before


def test_nor_where_the_profile_has_the_plans_default_name(
    run: Run, here: Path, asked: dict[str, Any]
) -> None:
    (here / "toy.profile.json").rename(here / "toy.plan.json")
    ran = run("solve", "toy.plan.json", "--gpus", "2")
    assert (ran.status, ran.lines[0]) == (2, "pplan: toy.plan.json: would overwrite what it is made from")
    assert not asked


def test_a_link_that_leads_nowhere(run: Run, here: Path, asked: dict[str, Any]) -> None:
    (here / "link").symlink_to("target.json")
    ran = run("solve", "--gpus", "8", "-o", "link")
    assert ran.status == 2
    assert ran.lines[-2] == "pplan: link exists already"
    assert not asked
    assert run("solve", "--gpus", "8", "-o", "link", "--force").status == 0
    assert (here / "link").is_symlink()
    assert Plan.load(here / "target.json").model == "toy"


def test_the_profiles_hash_is_that_of_its_file(run: Run, here: Path, asked: dict[str, Any]) -> None:
    path = here / "toy.profile.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert run("solve", "--gpus", "8").status == 0
    assert asked["profile_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()


NEXT = [
    ({}, "export torch"),
    ({"objective": "throughput", "bandwidth": 1e12}, "show"),
    ({"schedule": "gpipe", "recompute": "except_last"}, "export torchgpipe"),
    ({"runtime": "huggingface"}, "export huggingface"),
]


@pytest.mark.parametrize(("options", "verb"), NEXT, ids=["1f1b", "late", "torchgpipe", "huggingface"])
def test_what_comes_next_takes_the_plan(profile: Profile, options: dict[str, Any], verb: str) -> None:
    """The export that is named does not refuse the plan."""
    pins = [("features.0", 0), ("classifier[2]", 1)]
    plan = pplan.solve(profile, gpus=2, mini_batch=8, pins=pins, time_limit=1, **options)
    words = _next_step(plan, Path("toy.plan.json"))
    assert words == f"Next: pplan {verb}"
    if "objective" in options:
        with pytest.raises(UsageError, match="asynchronous"):
            pplan.explain(plan, profile)


def test_one_stage_has_no_buffers_of_pytorch(profile: Profile) -> None:
    """It receives nothing: PyTorch trains the plan itself, and no other that is as fast."""
    plan = pplan.solve(profile, gpus=1, mini_batch=8, micro_batches=4, time_limit=1)
    other = next(row for row in plan.alternatives if "torch" in row.runtimes)
    whole = other.model_copy(update={"micro_batches": 1, "micro_batch_size": 8})
    document = pplan.export("torch", plan.model_copy(update={"alternatives": [whole]}))
    assert document.micro_batch_size == 2


def test_a_table_of_costs_is_to_be_imported_first(run: Run, here: Path) -> None:
    (here / "costs.csv").write_text("name,forward_ms,backward_ms\n")
    ran = run("solve", "costs.csv", "--gpus", "2")
    assert (ran.status, ran.lines[-1]) == (
        2,
        "  A table of costs becomes a profile first: pplan import costs.csv",
    )


@pytest.mark.parametrize("option", ["--robust", "--slow-devices=5%:1.5"])
@pytest.mark.parametrize("other", [["--frontier"], ["--planner", "even"], ["--objective", "memory"]])
def test_what_says_nothing_together_names_what_was_given(
    run: Run, here: Path, profile: Profile, option: str, other: list[str]
) -> None:
    profile.save(here / "toy.profile.json", force=False)
    ran = run("solve", "--gpus", "2", option, *other)
    assert ran.status == 2
    assert option.split("=")[0] in ran.lines[-2]
    assert ("--robust" in ran.err) == (option == "--robust")


def test_an_export_that_lacks_room_for_pytorchs_buffers_says_so(profile: Profile) -> None:
    """The plan warns of it; where no alternative fits it is exported all the same, not without a word."""
    pins = [("features.0", 0), ("classifier[2]", 1)]
    plan = pplan.solve(profile, gpus=2, mini_batch=8, pins=pins, time_limit=1)
    warning = f"{BUFFER_WARNING}1 needs 5 MiB more than its limit"
    lacking = plan.model_copy(update={"alternatives": [], "warnings": [warning]})
    with pytest.warns(UserWarning, match="In PyTorch's pipelining device 1 needs 5 MiB more"):
        pplan.export("torch", lacking)
    pplan.export("deepspeed", lacking)


def test_the_number_of_gpus_is_asked_for(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    ran = run("solve")
    assert ran.status == 2
    assert "--gpus: how many devices there are is not given" in ran.err
