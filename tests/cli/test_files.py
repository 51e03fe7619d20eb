"""`pplan show` and `pplan export`: the files they take, name, refuse and write."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


@pytest.fixture
def files(here: Path, profile: Profile, plan: Plan) -> Path:
    """Two profiles and a plan; toy's are the newest."""
    for age, (name, document) in enumerate(
        {"toy.plan.json": plan, "toy.profile.json": profile, "old.profile.json": profile}.items()
    ):
        document.save(here / name, force=False)
        os.utime(here / name, (1e9 - age, 1e9 - age))
    return here


def test_show_takes_the_newest_of_either(run: Run, files: Path) -> None:
    ran = run("show")
    assert (ran.status, ran.lines) == (0, ["Using toy.plan.json (newest profile or plan in this directory)"])
    assert ran.out.startswith("A pipeline of 3 stages")
    assert "Memory of one device, stages 0 to 2" in ran.out
    os.utime(files / "toy.profile.json", (1e9 + 5, 1e9 + 5))
    assert run("show").out.startswith("toy on cuda:0")


@pytest.mark.parametrize("name", ["toy.plan.json", "toy.profile.json"])
def test_show_json_is_exactly_the_file(run: Run, files: Path, name: str) -> None:
    ran = run("show", name, "--json")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == (files / name).read_text()


def test_show_tells_a_plan_by_its_keys_not_its_name(run: Run, files: Path) -> None:
    (files / "toy.plan.json").rename(files / "misnamed.profile.json")
    assert run("show", "misnamed.profile.json").out.startswith("A pipeline of 3 stages")


@pytest.mark.parametrize(
    ("verb", "makes"),
    [
        (["show"], "pplan profile vgg19"),
        (["solve", "--gpus", "2"], "pplan profile vgg19"),
        (["export", "torchgpipe"], "pplan solve --gpus 8"),
    ],
)
def test_no_file_here(run: Run, verb: list[str], makes: str) -> None:
    ran = run(*verb)
    assert ran.status == 2
    assert ran.lines[0].startswith("pplan: no p")
    assert makes in ran.lines[1]


@pytest.mark.parametrize("verb", [["show"], ["solve", "--gpus", "2"], ["export", "torchgpipe"]])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "no such"),
        (b"", "not a whole JSON file"),
        (b'{"schema": 1, "layers": [', "not a whole JSON file"),
        (b"\xff\xfe\x00", "not a text file"),
        (b"[1, 2]", "not a p"),
        (b'{"hello": "world"}', "not a p"),
        (b'{"schema": 99, "layers": [], "prediction": []}', "schema is 99"),
        (b'{"schema": 1, "layers": 7, "prediction": 7}', ": Field required (and "),
        (b'{"schema": 1, "layers": ' + b"[" * 100_000, "nested too deep"),
        (b'{"schema": 1, "layers": ' + b"1" * 5_000 + b"}", "a number is too long"),
    ],
)
def test_files_that_are_refused(
    run: Run, here: Path, verb: list[str], content: bytes | None, what: str
) -> None:
    if content is not None:
        (here / "bad.json").write_bytes(content)
    at = 1 if verb[0] == "solve" else len(verb)
    ran = run(*verb[:at], "bad.json", *verb[at:])
    assert ran.status == 2
    assert ran.out == ""
    assert len(ran.lines) == 2
    assert ran.lines[0].startswith("pplan: bad.json: ")
    assert what in ran.lines[0]
    assert {path.name for path in here.iterdir()} <= {"bad.json"}


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["export", "torchgpipe", "toy.profile.json"], "this is a profile, a plan is needed here"),
        (["solve", "toy.plan.json", "--gpus", "2"], "this is a plan, a profile is needed here"),
    ],
)
def test_one_kind_of_file_for_the_other(run: Run, files: Path, arguments: list[str], what: str) -> None:
    assert files
    ran = run(*arguments)
    assert ran.status == 2
    assert ran.lines[0].endswith(what)


def test_a_folder_is_not_a_file(run: Run, here: Path) -> None:
    (here / "folder").mkdir()
    ran = run("show", "folder")
    assert ran.status == 2
    assert ran.lines[0].startswith("pplan: folder: cannot be read: ")


def test_export_says_what_it_took_instead(run: Run, files: Path) -> None:
    ran = run("export", "torchgpipe")
    assert ran.status == 0, ran.err
    assert ran.lines[0] == "Using toy.plan.json (newest plan in this directory)"
    assert "torchgpipe cannot run the plan itself" in ran.lines[1]
    assert ran.lines[2:] == ["Wrote toy.torchgpipe.json"]
    assert "balance: 1, 1, 1, 1, 2, 2, 2, 2" in ran.out
    script = [line.strip() for line in ran.out.splitlines() if line.startswith("    ")]
    assert script == [
        "from pplan.runtimes.torchgpipe import build",
        "model = build('toy.torchgpipe.json', model, example_input)",
    ]
    content = json.loads((files / "toy.torchgpipe.json").read_text())
    assert content["balance"] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert "command" not in content["made_by"]
    assert content["made_by"]["pplan"] == pplan.__version__


def test_export_to_the_cpu_as_json(run: Run, files: Path) -> None:
    ran = run("export", "fairscale", "toy.plan.json", "--device", "cpu", "-o", "f.json", "--json")
    assert ran.status == 0, ran.err
    assert ran.out == (files / "f.json").read_text()
    assert json.loads(ran.out)["devices"] == ["cpu"] * 8


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["torchgpip"], "unknown runtime 'torchgpip'"),
        (["torchgpipe", "--device", "tpu"], "--device tpu: is not one of cuda, cpu"),
        (["deepspeed", "toy.plan.json"], "deepspeed cannot run this plan of toy"),
    ],
)
def test_exports_that_are_refused(run: Run, files: Path, arguments: list[str], what: str) -> None:
    before = set(files.iterdir())
    ran = run("export", *arguments)
    assert ran.status == 2
    assert ran.lines[-2].startswith(f"pplan: {what}")
    assert set(files.iterdir()) == before


def test_show_says_what_a_file_for_a_runtime_is(run: Run, files: Path) -> None:
    assert run("export", "torchgpipe").status == 0
    ran = run("show", "toy.torchgpipe.json")
    assert files
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines == [
        "pplan: toy.torchgpipe.json: this is a file for a runtime, show takes profiles and plans",
        "  It is for your training script; name the plan it was made from.",
    ]


def test_show_says_what_a_simulation_is(run: Run, files: Path) -> None:
    costs = "--schedule 1f1b --stages 2 --micro-batches 2 --forward-ms 1 --backward-ms 2"
    (files / "toy.simulation.json").write_text(run("simulate", *costs.split(), "--json").out)
    ran = run("show", "toy.simulation.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines == [
        "pplan: toy.simulation.json: this is a simulation, show takes profiles and plans",
        "  It is for other programs; pplan simulate prints it as tables, of the same plan or costs.",
    ]
    ran = run("export", "torchgpipe", "toy.simulation.json")
    assert ran.lines[0].endswith("this is a simulation, a plan is needed here")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_deepspeed_takes_no_device(run: Run, here: Path, plan: Plan, device: str) -> None:
    own = plan.alternatives[0].model_copy(
        update={"runtimes": ["deepspeed"], "schedule": "1f1b", "recompute": "never"}
    )
    plan.model_copy(update={"alternatives": [own]}).save(here / "toy.plan.json", force=False)
    ran = run("export", "deepspeed", "--device", device)
    assert ran.status == 0, ran.err
    said = "--device cpu changes nothing here: DeepSpeed takes its devices from its launcher"
    assert (said in ran.lines) == (device == "cpu")


def test_an_export_never_overwrites_its_plan(run: Run, files: Path) -> None:
    before = (files / "toy.plan.json").read_bytes()
    ran = run("export", "torchgpipe", "toy.plan.json", "-o", "./toy.plan.json", "--force")
    assert ran.status == 2
    assert ran.lines[0] == "pplan: toy.plan.json: would overwrite what it is made from"
    assert (files / "toy.plan.json").read_bytes() == before


def test_a_file_with_a_byte_order_mark(run: Run, files: Path) -> None:
    path = files / "toy.plan.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert run("show", "toy.plan.json").out.startswith("A pipeline of 3 stages")


def solved(run: Run, *arguments: str) -> Any:
    return run("solve", "--gpus", "2", "--memory", "40GiB", "--mini-batch", "16", *arguments)


@pytest.mark.slow
def test_an_own_plan_is_replaced_where_nobody_changed_it(run: Run, here: Path, profile: Profile) -> None:
    """Also for the same layers, measured again; with other spaces it is still the same."""
    profile.save(here / "toy.profile.json", force=False)
    assert solved(run).status == 0
    plan = here / "toy.plan.json"
    assert solved(run).status == 0
    plan.write_text(json.dumps(json.loads(plan.read_text())))
    profile.model_copy(update={"device_name": "Another"}).save(here / "toy.profile.json", force=True)
    assert solved(run).status == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "edit",
    [
        {"notes": ["mine: do not lose"]},
        {"model": "renamed"},
        {"unknown": 1},
        {"made_by": {"pplan": "0.1.0"}},
    ],
)
def test_an_edited_plan_is_kept(run: Run, here: Path, profile: Profile, edit: dict[str, Any]) -> None:
    profile.save(here / "toy.profile.json", force=False)
    assert solved(run).status == 0
    plan = here / "toy.plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | edit))
    before = plan.read_bytes()
    ran = solved(run)
    assert (ran.status, ran.out, plan.read_bytes()) == (2, "", before)
    assert ran.lines[-2:] == [
        "pplan: toy.plan.json exists already, and not as pplan wrote it",
        "  Give --force to replace it, or another name with -o.",
    ]
    assert solved(run, "--force").status == 0
    assert plan.read_bytes() != before


def test_a_plan_of_another_profile_of_this_name_is_kept(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    assert solved(run).status == 0
    before = (here / "toy.plan.json").read_bytes()
    profile.save(here / "other.profile.json", force=False)
    ran = solved(run, "other.profile.json")
    assert (ran.status, (here / "toy.plan.json").read_bytes()) == (2, before)
    assert ran.lines[-2] == "pplan: toy.plan.json exists already, for another model, profile or device"


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale"])
def test_an_edited_export_is_kept(run: Run, files: Path, runtime: str) -> None:
    assert run("export", runtime, "toy.plan.json").status == 0
    assert run("export", runtime, "toy.plan.json").status == 0
    path = files / f"toy.{runtime}.json"
    path.write_text(path.read_text().replace('"chunks": 16', '"chunks": 8'))
    before = path.read_bytes()
    assert run("export", runtime, "toy.plan.json").status == 2
    assert path.read_bytes() == before


COSTS = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\na,1,2,8,8\nb,1,2,8,8\n"
SCHEDULE = ("simulate", "--stages", "2", "--micro-batches", "4", "--forward-ms", "1", "--backward-ms", "2")


@pytest.mark.parametrize(
    ("command", "over", "kinds"),
    [
        ((*SCHEDULE, "--trace", "toy.profile.json"), "toy.profile.json", ("profile", "trace")),
        ((*SCHEDULE, "--trace", "toy.plan.json"), "toy.plan.json", ("plan", "trace")),
        (("import", "toy.csv", "-o", "toy.plan.json"), "toy.plan.json", ("plan", "profile")),
        (("import", "toy.csv", "-o", "drawing.svg"), "drawing.svg", ("SVG drawing", "profile")),
        (
            ("export", "torchgpipe", "toy.plan.json", "-o", "toy.profile.json"),
            "toy.profile.json",
            ("profile", "file"),
        ),
        (
            ("export", "torchgpipe", "toy.plan.json", "--script", "toy.profile.json"),
            "toy.profile.json",
            ("profile", "text"),
        ),
        (
            ("solve", "toy.profile.json", "--gpus", "2", "-o", "toy.csv"),
            "toy.csv",
            ("table or graph of costs", "plan"),
        ),
        (
            ("solve", "toy.profile.json", "--gpus", "2", "-o", "photo.png"),
            "photo.png",
            ("PNG image", "plan"),
        ),
        (
            ("solve", "toy.profile.json", "--sweep", "gpus=1,2", "--csv", "toy.csv"),
            "toy.csv",
            ("table or graph of costs", "text"),
        ),
    ],
)
def test_no_file_of_another_kind_is_written_over(
    run: Run, files: Path, command: tuple[str, ...], over: str, kinds: tuple[str, str]
) -> None:
    (files / "toy.csv").write_text(COSTS)
    (files / "drawing.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
    (files / "photo.png").write_bytes(b"\x89PNG\r\n\x1a\n\xff")
    before = {path.name: path.read_bytes() for path in files.iterdir()}
    ran = run(*command, "--force")
    assert ran.status == 2
    assert ran.lines[-2].startswith(f"pplan: {over}: is a {kinds[0]}, and a {kinds[1]}")
    assert ran.lines[-1] == "  Name another file, or delete that one first."
    assert {path.name: path.read_bytes() for path in files.iterdir()} == before


def test_an_import_takes_no_measured_profiles_place(run: Run, files: Path) -> None:
    (files / "toy.csv").write_text(COSTS)
    before = (files / "toy.profile.json").read_bytes()
    ran = run("import", "toy.csv", "--json")
    assert (ran.status, (files / "toy.profile.json").read_bytes()) == (2, before)
    assert "toy.profile.json exists already, for another model, profile or device" in ran.err
    assert run("import", "toy.csv", "-o", "imported.profile.json").status == 0
    assert run("import", "toy.csv", "-o", "imported.profile.json", "--force").status == 0


def test_an_empty_file_is_of_any_kind(run: Run, files: Path) -> None:
    (files / "made.json").write_text("\n")
    assert run("export", "torchgpipe", "toy.plan.json", "-o", "made.json", "--force").status == 0


def test_an_api_save_writes_over_no_other_kind(files: Path, profile: Profile) -> None:
    with pytest.raises(pplan.PplanError, match="is a plan, and a profile is written only over a profile"):
        profile.save(files / "toy.plan.json", force=True)
    profile.save(files / "toy.profile.json", force=True)
