"""Links really measured between processes of this machine, by gloo; and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pplan.cost_models.errors import MachineError
from pplan.cost_models.topology_file import load_topology
from pplan.profiler.links import EVERY_PAIR_UP_TO, _backend, _members, _Own, choose_pairs

ForkedPython = Callable[..., Any]
PPLAN = "import sys; from pplan.cli.app import main; sys.exit(main())"
DIES = """
import os, sys
from pplan.profiler import links
links.LinkBench.all_reduce = lambda *_: os._exit(7)
from pplan.cli.app import main
sys.exit(main())
"""
"""A process that is gone in the middle of measuring."""
QUICK = ("--sizes", "1KiB,1MiB", "--repeats", "3")
LIMIT = 120


def process(forked: ForkedPython, folder: Path, code: str, rank: int, port: int, *options: str) -> Any:
    """One of the two processes of a machine, as torchrun would start it."""
    return forked(
        folder.with_name(f"{folder.name}.{rank}"),
        folder,
        *("-c", code, "machine", "measure", "links", *QUICK, *options),
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        PPLAN_DEBUG="0",
    )


def torchrun(forked: ForkedPython, folder: Path, node: int, processes: int, port: int) -> Any:
    """One of the two nodes, whose processes are started as a user's are."""
    meeting = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={port}", f"--node-rank={node}"]
    return forked(
        folder.with_name(f"{folder.name}.{node}"),
        folder,
        *("-m", "torch.distributed.run", "--no-python", *meeting, f"--nproc-per-node={processes}"),
        *(sys.executable, "-c", PPLAN, "machine", "measure", "links", *QUICK),
        PPLAN_DEBUG="0",
    )


def ended(*processes: Any) -> list[tuple[int, str, str]]:
    """Status, output and errors of each; none is left behind."""
    results = [each.wait(LIMIT) for each in processes]
    return [(each.returncode, each.stdout, each.stderr) for each in results]


@pytest.mark.slow
def test_two_processes_of_one_machine(
    forked_python: ForkedPython, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port, options = free_port(), ("--json", "-o", "own.toml")
    first, second = ended(
        *(process(forked_python, tmp_path, PPLAN, rank, port, *options) for rank in range(2))
    )
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert (first[2] + second[2]).count("Wrote own.toml") == 1
    assert second[1] == ""
    found = json.loads(first[1])
    assert found["backend"] == "gloo"
    assert found["sizes"] == [1024, 2**20]
    assert [(pair["first"], pair["second"]) for pair in found["pairs"]] == [(0, 1)]
    (pair,) = found["pairs"]
    every = [*pair["there_seconds"], *pair["back_seconds"], *found["all_reduce_seconds"]]
    assert len(every) == 6
    assert all(0 < seconds < LIMIT for seconds in every)
    read = load_topology(tmp_path / "own.toml")
    assert (read.gpus, read.gpus_per_node) == (2, 2)
    assert read.bandwidth == pytest.approx(
        (found["fitted"]["inside"]["bandwidth_bytes_per_second"],), rel=1e-3
    )
    assert read.latency == pytest.approx((found["fitted"]["inside"]["latency_seconds"],), rel=1e-2)


@pytest.mark.slow
def test_two_nodes(forked_python: ForkedPython, free_port: Callable[[], int], tmp_path: Path) -> None:
    """Two torchruns, as on two machines: node 0 has two processes, node 1 has one."""
    port = free_port()
    first, second = ended(*(torchrun(forked_python, tmp_path, node, 2 - node, port) for node in range(2)))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "between nodes" in first[1]
    assert second[1] == ""
    read = load_topology(tmp_path / "links.toml")
    assert (read.gpus, read.gpus_per_node) == (3, 2)
    assert read.bandwidth is not None
    assert len(read.bandwidth) == 2


@pytest.mark.slow
def test_a_process_that_never_comes(forked_python: ForkedPython, tmp_path: Path) -> None:
    ((status, out, err),) = ended(process(forked_python, tmp_path, PPLAN, 0, 0, "--timeout", "2s"))
    assert (status, out) == (2, "")
    ours = err[err.index("pplan: ") :].splitlines()
    assert ours[0].startswith("pplan: machine measure links: lost another process while meeting the others")
    assert "within 2 s" in ours[1]
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_is_gone(
    forked_python: ForkedPython, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    codes = enumerate((PPLAN, DIES))
    first, second = ended(
        *(process(forked_python, tmp_path, code, rank, port, "--timeout", "30s") for rank, code in codes)
    )
    assert second[0] == 7
    assert (first[0], first[1]) == (2, "")
    assert first[2].count("pplan: machine measure links: lost another process while measuring") == 1
    assert not list(tmp_path.iterdir())


def test_few_processes_are_measured_in_all_pairs() -> None:
    pairs = choose_pairs([0] * EVERY_PAIR_UP_TO)
    assert len(pairs) == len(set(pairs)) == 28
    assert all(first < second for first, second in pairs)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0] * 9, [(0, 1)]),
        ([0] * 8 + [1] * 8, [(0, 1), (0, 8)]),
        (list(range(12)), [(0, 1)]),
        ([0, *range(1, 9), 8], [(8, 9), (0, 1)]),
    ],
)
def test_of_many_processes_one_pair_of_each_level(nodes: list[int], expected: list[tuple[int, int]]) -> None:
    assert choose_pairs(nodes) == expected


def gpu(identity: str, host: tuple[str, int] = ("a", 0)) -> _Own:
    return _Own(host, torch.device("cuda", 0), identity, "some GPU", 2**34)


def cpu(host: tuple[str, int] = ("a", 0)) -> _Own:
    return _Own(host, torch.device("cpu"), "", "some CPU", None)


def test_processors_are_measured_by_gloo() -> None:
    assert _backend([cpu(), cpu()]) == "gloo"


@pytest.mark.parametrize(
    ("everyone", "what"),
    [
        ([gpu("x"), cpu()], "rank 1 has no CUDA device"),
        ([gpu("x"), gpu("y"), gpu("x")], "ranks 0 and 2 share"),
    ],
)
def test_devices_that_do_not_go_together(everyone: list[_Own], what: str) -> None:
    with pytest.raises(MachineError, match=what):
        _backend(everyone)


def test_nodes_are_told_apart_by_name_and_by_number() -> None:
    """Containers on two machines may have one name."""
    hosts = [("a", 0), ("a", 0), ("a", 1), ("b", -1), ("b", -1)]
    assert [member.node for member in _members([cpu(host) for host in hosts])] == [0, 0, 1, 2, 2]
