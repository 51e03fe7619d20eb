"""`pplan machine list` and `show`: what it lists and shows, its JSON and TOML, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.machine_tables import print_machines, print_topology
from pplan.cli.usage import list_verbs
from pplan.cli.verbs import root
from pplan.cost_models.collectives import all_reduce_seconds_by_algorithm
from pplan.cost_models.machines import MACHINES
from pplan.cost_models.topology_file import described_topology
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
Golden = Callable[[str, str], None]
Terminal = Callable[[int], Any]

MIXED = """
[[device]]
gpu = "a100-40gb"
count = 2
[[device]]
name = "old one"
memory = "16GiB"
count = 2
profile = "old.profile.json"
[[level]]
name = "pair"
size = 2
link = "NVLink 3"
bandwidth = "300GB/s"
latency = "5us"
[[level]]
name = "network"
bandwidth = "inf"
latency = "20us"
shared = true
"""


@pytest.mark.parametrize(
    ("width", "file"), [(110, "topology.txt"), (80, "topology_narrow.txt"), (40, "topology_40.txt")]
)
def test_tables(tmp_path: Path, golden: Golden, width: int, file: str, terminal: Terminal) -> None:
    console = terminal(width)
    print_machines(console)
    print_topology(described_topology(Path("g5.48xlarge"), 16), "Amazon EC2 g5.48xlarge", console)
    (tmp_path / "mixed.toml").write_text(MIXED)
    # The sources name the file's folder, which is another at every run.
    shown = terminal(width)
    print_topology(described_topology(tmp_path / "mixed.toml"), "mixed.toml", shown)
    tables = shown.text.split("\nMemory of A100-40GB: ")[0]
    golden(file, console.text + tables)


def test_it_lists_the_machines(run: Run) -> None:
    ran = run("machine", "list")
    assert (ran.status, ran.err) == (0, "")
    assert all(name in ran.out for name in MACHINES)
    listed = json.loads(run("machine", "list", "--json").out)
    assert [machine["name"] for machine in listed] == list(MACHINES)
    assert listed[0]["inside"]["bandwidth"]["value"] == 300e9
    assert "https://" in listed[0]["inside"]["bandwidth"]["source"]


@pytest.mark.parametrize("group", ["machine", "machine measure"])
def test_a_group_alone_prints_its_help(run: Run, group: str) -> None:
    ran = run(*group.split())
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == run(*group.split(), "--help").out
    for verb, _ in list_verbs(root):
        if verb.rpartition(" ")[0] == group:
            assert f"\n  {verb.split()[-1]} " in ran.out


def test_show_a_machine(run: Run) -> None:
    ran = run("machine", "show", "dgx-a100")
    assert (ran.status, ran.lines) == (0, ["Two machines, 16 GPUs; --gpus N shows another number"])
    assert ran.out.startswith(
        "NVIDIA DGX A100 640GB\n16 x A100-80GB (79.15 GiB), 8 a node; NVLink 3 300 GB/s"
    )
    # 1 MB: 1e6 / 300e9 + 5 us, and 1e6 / 25e9 + 20 us; 1 GB so too.
    assert "node       8.33 µs  3.34 ms" in ran.out
    assert "network    60.0 µs  40.0 ms" in ran.out
    assert "Latency of network: assumption: " in ran.out
    assert "Bandwidth of network: NVIDIA DGX A100" in ran.out
    four = run("machine", "show", "dgx-a100", "--gpus", "4")
    assert "4 x A100-80GB (79.15 GiB) in one node" in four.out
    assert four.err == ""
    assert "All-reduces" not in run("machine", "show", "dgx-a100", "--gpus", "1").out


def test_json_holds_the_same(run: Run, here: Path) -> None:
    (here / "mixed.toml").write_text(MIXED)
    shown = json.loads(run("machine", "show", "mixed.toml", "--json").out)
    topology = described_topology(here / "mixed.toml")
    assert (shown["title"], shown["gpus"], shown["gpus_per_node"]) == ("mixed.toml", 4, 2)
    assert [(d["name"], d["number"], d["profile"]) for d in shown["devices"]] == [
        ("A100-40GB", 2, None),
        ("old one", 2, "old.profile.json"),
    ]
    network = shown["levels"][1]
    assert (network["bandwidth_bytes_per_second"], network["devices_per_port"]) == (None, 2)
    assert network["sources"]["latency"] == "mixed.toml"
    assert {(t["level"], t["bytes"]): t["seconds"] for t in shown["transfers"]} == {
        ("pair", 10**6): pytest.approx(5e-6 + 1e6 / 300e9),
        ("pair", 10**9): pytest.approx(5e-6 + 1e9 / 300e9),
        ("network", 10**6): 20e-6,
        ("network", 10**9): 20e-6,
    }
    assert [(made["gpus"], made["bytes"]) for made in shown["all_reduces"]] == [
        (gpus, size) for gpus in (2, 4) for size in (10**6, 10**9)
    ]
    for made in shown["all_reduces"]:
        assert set(made["seconds"]) == {"ring", "tree", "hierarchical"}
        assert made["seconds"][made["best"]] == min(made["seconds"].values())
        each = all_reduce_seconds_by_algorithm(topology, range(made["gpus"]), float(made["bytes"]))
        assert made["seconds"] == each


def test_toml_is_a_file_for_solve(run: Run, here: Path) -> None:
    printed = run("machine", "show", "p4d.24xlarge", "--toml").out
    assert printed.startswith("# Amazon EC2 p4d.24xlarge\n")
    (here / "mine.toml").write_text(printed)
    assert described_topology(here / "mine.toml") == described_topology(Path("p4d.24xlarge"))
    assert run("machine", "show", "mine.toml", "--toml").out.startswith("# mine.toml\n")


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        ("shw", "no such verb: machine shw", "Did you mean pplan machine show?"),
        ("measure link", "no such verb: machine measure link", "Did you mean pplan machine measure links?"),
        ("list dgx-a100", "machine list: got unexpected extra argument", "pplan machine list --help"),
        ("show", "machine show: missing argument", "pplan machine show NAME|FILE.toml"),
        ("show dgx-a10", "topology dgx-a10: no such file, and no machine", "Did you mean dgx-a100?"),
        ("show h100", "topology h100: is a GPU, not a machine", "--gpu h100"),
        ("show none.toml", "none.toml: no such topology file", "existing"),
        ("show dgx-a100 --gpus 0", "--gpus 0: must be at least 1", "--gpus 8"),
        ("show dgx-a100 --json --toml", "machine show: both --toml and --json", "one of them"),
        ("list --gpus 8", "machine list: no such option: --gpus", "It is an option of: pplan import"),
        ("show dgx-a100 --gpu 8", "machine show: no such option: --gpu", "--gpus"),
    ],
)
def test_refusals_are_two_lines(run: Run, arguments: str, what: str, hint: str) -> None:
    ran = run("machine", *arguments.split())
    assert ran.status == 2
    assert bool(ran.out) == ("--json" in arguments)
    first, second = ran.lines
    assert first.startswith(f"pplan: {what}")
    assert hint in second


def test_control_characters_of_a_file_do_not_steer_the_terminal(run: Run, here: Path) -> None:
    (here / "evil.toml").write_text('[[device]]\nname = "a\\u001b[31m"\n')
    ran = run("machine", "show", "evil.toml")
    assert ran.status == 0
    assert r"a\x1b[31m" in ran.out
    assert "\x1b" not in ran.out
    assert "\x1b" not in run("machine", "show", "evil.toml", "--toml").out
    assert "\x1b" not in run("machine", "show", "evil.toml", "--json").out


@pytest.mark.slow
def test_solve_takes_a_machine_by_its_name(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    assert run("solve", "--topology", "dgx-a100").status == 0
    one = Plan.load(here / "toy.plan.json")
    assert (one.gpus, one.gpus_per_node) == (8, 8)
    assert one.topology == "8 x A100-80GB (79.15 GiB) in one node; NVLink 3 300 GB/s, 5 µs"
    assert run("solve", "--topology", "p3.16xlarge", "--gpus", "10").status == 0
    two = Plan.load(here / "toy.plan.json")
    assert (two.gpus, two.gpus_per_node) == (10, 8)
    ran = run("solve", "--topology", "dgx-a10")
    assert ran.status == 2
    assert ran.lines[-2] == "pplan: --topology dgx-a10: no such file, and no machine of that name"


def test_solve_wants_the_profile_of_every_kind_it_may_use(run: Run, here: Path, profile: Profile) -> None:
    profile.save(here / "toy.profile.json", force=False)
    (here / "mixed.toml").write_text(MIXED)
    ran = run("solve", "--topology", "mixed.toml")
    assert ran.status == 2
    assert ran.lines[-2].startswith("pplan: old.profile.json: no such file")
    assert ran.lines[-2].endswith("the profile of old one")
    assert run("solve", "--topology", "mixed.toml", "--gpus", "2").status == 0
    (here / "own.toml").write_text('[[device]]\nname = "old"\nprofile = "old.profile.json"\n')
    ran = run("solve", "--topology", "own.toml", "--gpus", "2")
    assert ran.status == 2
    assert ran.lines[-2].endswith("the profile of old")


def test_a_faster_kind_takes_less_time(tmp_path: Path, profile: Profile) -> None:
    steps = {}
    for speed in (1, 2):
        path = tmp_path / f"{speed}.toml"
        path.write_text(f'[[device]]\nname = "toy"\nspeed = {speed}\n')
        steps[speed] = pplan.solve(profile, gpus=1, topology=path, mini_batch=8, schedule="gpipe")
    assert steps[2].prediction.step_seconds == pytest.approx(steps[1].prediction.step_seconds / 2)
    assert any("2 times as fast" in note for note in steps[2].notes)
    assert not any("as fast" in note for note in steps[1].notes)


def test_from_python(tmp_path: Path) -> None:
    topology = pplan.topology("dgx-a100", gpus=16)
    assert topology.gpus == 16
    assert topology.link(0, 8).bandwidth_bytes_per_second == 25e9
    assert pplan.topology("DGX A100").gpus == 8
    (tmp_path / "mixed.toml").write_text(MIXED)
    assert pplan.topology(tmp_path / "mixed.toml").device(3).profile == "old.profile.json"
    with pytest.raises(pplan.UsageError, match="gpus='8': is not a whole number"):
        pplan.topology("dgx-a100", gpus="8")  # type: ignore[arg-type]
    with pytest.raises(pplan.UsageError, match="no machine of that name"):
        pplan.topology("dgx-a10")
