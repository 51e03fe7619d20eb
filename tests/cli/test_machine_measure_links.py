"""`pplan machine measure links` around the measuring: who prints and writes, and what is refused before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cost_models.errors import MachineError
from pplan.cost_models.topology_file import load_topology
from pplan.profiler.measured_links import MeasuredLinks, Member, PairTimes
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
TOLD = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
SIZES = [1024, 2**20, 2**24]
SECONDS = [10e-6 + size / 2e9 for size in SIZES]


def links() -> MeasuredLinks:
    return MeasuredLinks(
        backend="gloo",
        members=[Member(rank=rank, node=0, device_name="some CPU") for rank in (0, 1)],
        sizes=SIZES,
        repeats=3,
        pairs=[PairTimes(first=0, second=1, there_seconds=SECONDS, back_seconds=SECONDS)],
        all_reduce_seconds=[3 * value for value in SECONDS],
    )


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[dict[str, Any]]]:
    """Makes this process one of torchrun's two; returns what the measuring was called with."""

    def make(rank: int) -> list[dict[str, Any]]:
        for name, value in (TOLD | {"RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)
        calls: list[dict[str, Any]] = []

        def measure(process: object, **options: Any) -> MeasuredLinks:
            calls.append({"process": process, **options})
            return links()

        monkeypatch.setattr("pplan.profiler.links.measure_links", measure)
        return calls

    return make


def test_the_first_process_prints_and_writes(run: Run, here: Path, as_rank: Callable[..., Any]) -> None:
    calls = as_rank(0)
    ran = run("machine", "measure", "links", "--sizes", "1MiB,1KiB", "--repeats", "5", "--timeout", "2m")
    assert ran.status == 0
    assert calls[0]["sizes"] == (1024, 2**20)
    assert (calls[0]["repeats"], calls[0]["timeout_seconds"]) == (5, 120.0)
    for shown in ("inside a node", "10.0 µs", "2 GB/s", "16.00 MiB", "All-reduce", "0 and 1"):
        assert shown in ran.out
    assert ran.lines == [
        "Note: an all-reduce of 16.00 MiB takes 3.0 times what these links predict for it",
        "Wrote links.toml",
    ]
    assert load_topology(here / "links.toml").bandwidth == pytest.approx((2e9,), rel=1e-3)


def test_solve_reads_it(run: Run, here: Path, as_rank: Callable[..., Any], profile: Profile) -> None:
    as_rank(0)
    assert run("machine", "measure", "links").status == 0
    profile.save(here / "toy.profile.json", force=False)
    ran = run("solve", "--topology", "links.toml", "--details")
    assert ran.status == 0
    assert "2 GB/s, 10 µs" in ran.out


def test_the_others_are_silent(run: Run, here: Path, as_rank: Callable[..., Any]) -> None:
    assert len(as_rank(1)) == 0
    ran = run("machine", "measure", "links")
    assert (ran.status, ran.out, ran.err) == (0, "", "")
    assert not list(here.iterdir())


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_tells_an_error(
    run: Run, as_rank: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    as_rank(rank)

    def fail(*_: object, **__: object) -> None:
        raise MachineError("it is gone", "Look.")

    monkeypatch.setattr("pplan.profiler.links.measure_links", fail)
    ran = run("machine", "measure", "links")
    assert ran.status == 2
    assert ran.lines == (["pplan: it is gone", "  Look."] if rank == 0 else [])


def test_without_torchrun(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    ran = run("machine", "measure", "links")
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines == [
        "pplan: machine measure links: torchrun did not start this process (RANK is not set)",
        "  Start one process for each device: torchrun --no-python --nproc-per-node 2 "
        "pplan machine measure links",
    ]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--sizes", "1MiB"], "--sizes 1MiB: one size"),
        (["--sizes", "1MiB,2"], "--sizes 2: the unit is missing"),
        (["--repeats", "0"], "--repeats 0: must be at least 1"),
        (["--timeout", "0"], "--timeout 0: must be at least 1 s"),
        (["-o", "none/links.toml"], "none/links.toml: the folder none does not exist"),
    ],
)
def test_what_is_refused_before_measuring(
    run: Run, as_rank: Callable[..., Any], arguments: list[str], what: str
) -> None:
    calls = as_rank(0)
    ran = run("machine", "measure", "links", *arguments)
    assert ran.status == 2
    assert ran.lines[0].startswith(f"pplan: {what}")
    assert len(ran.lines) == 2
    assert calls == []


def test_a_named_file_is_replaced_with_force_only(run: Run, here: Path, as_rank: Callable[..., Any]) -> None:
    as_rank(0)
    (here / "own.toml").write_text("gpus = 7\n")
    assert run("machine", "measure", "links", "-o", "own.toml").status == 2
    assert load_topology(here / "own.toml").gpus == 7
    assert run("machine", "measure", "links", "-o", "own.toml", "--force").status == 0
    assert load_topology(here / "own.toml").gpus == 2
