"""`pplan import`: what it writes and says, and that the profile goes on to show, solve and simulate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]

HEADER = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes"
SCALED = "costs scale with the samples"


@pytest.fixture
def graph(here: Path) -> Path:
    """Six equal layers at batch 32, each with 4 MB of weights and a small output, one line each."""
    figures = (
        "forward_compute_time=8.0, backward_compute_time=16.0, activation_size=3200.0, parameter_size=4e6"
    )
    load = "forward_compute_time=5.0, backward_compute_time=0.0, activation_size=640.0, parameter_size=0.0"
    lines = [f"node1 -- Input -- {load}", *(f"node{i} -- Linear(8, 8) -- {figures}" for i in range(2, 8))]
    path = here / "toy.graph.txt"
    path.write_text("\n".join([*lines, *(f"\tnode{i} -- node{i + 1}" for i in range(1, 7)), ""]))
    return path


def test_what_is_written_and_printed(run: Run, here: Path, graph: Path) -> None:
    ran = run("import", graph.name, "--micro-batch-size", "32")
    assert (ran.status, ran.lines) == (0, ["Wrote toy.profile.json"])
    assert ran.out.startswith("toy on unknown, float32: 6 layers, 6.00 million parameters (22.89 MiB)")
    assert SCALED in ran.out
    profile = Profile.load(here / "toy.profile.json")
    assert profile.made_by.command == "pplan import toy.graph.txt --micro-batch-size 32"
    assert profile.made_by.pplan == pplan.__version__
    assert profile.made_by.torch is None
    assert profile.input_bytes_per_sample == 20
    shown = run("show")
    assert (shown.status, shown.out) == (0, ran.out)


def test_every_option_arrives(run: Run, here: Path, graph: Path) -> None:
    options = (
        "--model big --granularity fine --dtype float16 --micro-batch-size 8 --format pipedream -o x.json"
    )
    assert run("import", graph.name, *options.split()).lines == ["Wrote x.json"]
    profile = Profile.load(here / "x.json")
    assert (profile.model, profile.granularity, profile.dtype) == ("big", "fine", "float16")
    assert profile.micro_batch_sizes == [8]
    assert run("import", graph.name, "-o", "x.json").status == 2
    ran = run("import", graph.name, "-o", "x.json", "--force", "--json")
    assert (ran.status, ran.out) == (0, (here / "x.json").read_text())


def test_the_same_file_gives_the_same_profile(graph: Path) -> None:
    one, two = (pplan.import_profile(graph).model_dump(exclude={"made_by": {"time"}}) for _ in range(2))
    assert one == two
    assert one["made_by"]["pplan"] == pplan.__version__


@pytest.mark.slow
def test_plans_say_that_costs_were_scaled(run: Run, here: Path, graph: Path) -> None:
    assert run("import", graph.name, "--micro-batch-size", "32").status == 0
    ran = run(
        "solve", "--gpus", "3", "--memory", "16GiB", "--mini-batch", "48", "--bandwidth", "inf", "--details"
    )
    assert ran.status == 0, ran.err
    assert SCALED in ran.out
    plan = pplan.load_plan(here / "toy.plan.json")
    assert any(SCALED in note for note in plan.notes)
    assert any("scaled with the samples from the one measured, 32" in note for note in plan.notes)
    # All of the work of 48 samples is 6 x 24 ms x 48 / 32; three devices need a third of it at least.
    assert plan.prediction.step_seconds >= 6 * 24e-3 * 48 / 32 / 3 * (1 - 1e-9)
    assert plan.prediction.lower_bound_seconds >= 6 * 24e-3 * 48 / 32 / 3 * (1 - 1e-9)


def test_a_measured_profile_of_one_size_is_still_not_scaled(run: Run, here: Path, graph: Path) -> None:
    measured = pplan.import_profile(graph, micro_batch_size=32).model_copy(
        update={"scales_with_samples": False}
    )
    measured.save(here / "own.profile.json", force=False)
    ran = run("solve", "own.profile.json", "--gpus", "2", "--mini-batch", "8")
    assert ran.status == 2
    assert "no measured micro-batch size divides it" in ran.err


def test_tables_from_python(here: Path) -> None:
    (here / "costs.csv").write_text(f"{HEADER}\na,1,2,10,4\nb,1,2,10,4\n")
    profile = pplan.import_profile("costs.csv", micro_batch_size=8, model="mine")
    assert (profile.model, [layer.name for layer in profile.layers]) == ("mine", ["a", "b"])
    with pytest.raises(pplan.UsageError, match="micro_batch_size='8': is not a whole number"):
        pplan.import_profile("costs.csv", micro_batch_size="8")  # type: ignore[arg-type]
    with pytest.raises(pplan.UsageError, match="path=7: is not a path"):
        pplan.import_profile(7)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (("none.txt",), "none.txt: no such costs or partition file", "Name an existing"),
        (("bad.csv",), "bad.csv: line 3: forward_ms is 'x', not a number", "Write it as"),
        (("bad.csv", "--format", "xml"), "--format xml: is not one of pipedream, csv, json", "Give one of"),
        (("junk.txt",), "junk.txt: holds no costs and no partition that pplan knows", "a balance list"),
        (("deep.json",), "deep.json: not a table of costs: ", "Mend the file"),
        (("number.json",), "number.json: layers is 3, not a list of objects", "a list of objects"),
        (("empty.csv",), "empty.csv: is empty", "Costs are a PipeDream graph"),
        (("bad.csv", "--gpus", "2"), "--gpus: bad.csv holds costs, which takes no such option", "Omit it"),
        (("bad.csv", "--replicas", "2"), "--replicas: bad.csv holds costs", "Omit it"),
        (("bad.csv", "--tp", "1,2"), "--tp 1,2: costs are those of one number of devices", "--tp 2"),
        (("bad.csv", "--micro-batch-size", "0"), "--micro-batch-size 0: must be at least 1", "For example"),
        (
            ("bad.csv", "--granularity", "fin"),
            "--granularity fin: is not one of block, fine",
            "Did you mean fine?",
        ),
        ((), "import: missing argument 'FILE|PARTITION'", "pplan import FILE"),
    ],
)
def test_refusals(run: Run, here: Path, arguments: tuple[str, ...], what: str, hint: str) -> None:
    (here / "bad.csv").write_text(f"{HEADER}\na,1,2,10,4\nb,x,2,10,4\n")
    (here / "junk.txt").write_text("Dear reader,\n")
    (here / "empty.csv").write_text("")
    (here / "deep.json").write_text("[" * 10**5)
    (here / "number.json").write_text('{"layers": 3}')
    ran = run("import", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert hint in ran.lines[1]
    assert not list(here.glob("*.profile.json"))


def test_the_file_itself_is_not_overwritten(run: Run, graph: Path) -> None:
    ran = run("import", graph.name, "-o", graph.name, "--force")
    assert ran.status == 2
    assert "would overwrite what it is made from" in ran.lines[0]


def test_a_table_of_layers_that_several_devices_share(run: Run, here: Path) -> None:
    """Two devices are faster together than as two stages, and the plan says so; --tp names the number."""
    names = ("forward_ms", "backward_ms", "activation_mb", "parameter_mb")
    columns = ["name", *names, *(f"tp2_{name}" for name in names)]
    rows = [f"layer{number},10,20,1,40,5,10,1,20" for number in range(3)]
    (here / "toy.csv").write_text("\n".join([",".join(columns), *rows, ""]))
    assert run("import", "toy.csv").status == 0
    asked = ("solve", "--gpus", "2", "--memory", "16GiB", "--mini-batch", "1", "--bandwidth", "100GB/s")
    ran = run(*asked, "--details")
    assert ran.status == 0, ran.err
    assert "One group of 2 GPUs is the fastest of the plans searched: 45.0 ms a step" in ran.out
    assert "if one device has every layer, the best plan found takes 90.0 ms a step" in ran.out
    plan = pplan.load_plan(here / "toy.plan.json")
    assert (plan.profile.tensor_parallel, plan.prediction.exact) == (2, True)
    assert {name for other in plan.alternatives for name in other.runtimes} <= {
        *("torch", "megatron", "megatron-bridge", "torchtitan", "nemo-automodel")
    }
    assert run(*asked, "--tp", "1").out.startswith(
        "One GPU is the fastest of the plans searched: 90.0 ms a step"
    )
    ran = run(*asked, "--tp", "4")
    assert (ran.status, "--tp 4: the profile has no costs of layers that 4 devices" in ran.err) == (2, True)
    ran = run(*asked, "toy.profile.json", "toy.profile.json")
    assert (ran.status, "two profiles for --tp 1" in ran.err) == (2, True)
    ran = run(*asked, "toy.profile.json", "toy.profile.json", "--frontier")
    assert (ran.status, "--frontier with 2 profiles: it takes one" in ran.err) == (2, True)
