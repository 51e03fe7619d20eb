"""Links really measured between processes of this machine, by gloo; and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from pplan.cost_models.errors import MachineError
from pplan.cost_models.machines.topology_file import load_topology
from pplan.profiler.links import EVERY_PAIR_UP_TO, _backend, _members, _Own, chosen_pairs

PPLAN = "import sys; from pplan.cli.app import main; sys.exit(main())"
DIES = """
import os, sys
from pplan.profiler import links
links._Bench.all_reduce = lambda *_: os._exit(7)
from pplan.cli.app import main
sys.exit(main())
"""
"""A process that is gone in the middle of measuring."""
QUICK = ("--sizes", "1KiB,1MiB", "--repeats", "3")
LIMIT = 120


def environment(**more: str) -> dict[str, str]:
    mine = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PPLAN_DEBUG": "0"}
    return {**os.environ, **mine, **more}


def torchrun(folder: Path, options: Sequence[str], arguments: Sequence[str]) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--no-python", *options]
    return subprocess.Popen(
        [*launcher, sys.executable, "-c", PPLAN, "profile-links", *QUICK, *arguments],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def process(folder: Path, code: str, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two processes, as torchrun would start it."""
    told = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [sys.executable, "-c", code, "profile-links", *QUICK, "--timeout", "2s" if port == 0 else "30s"],
        cwd=folder,
        env=environment(**told, **meeting),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[tuple[int, str, str]]:
    """Status, output and errors of each; none is left behind."""
    results = []
    try:
        for each in processes:
            out, err = each.communicate(timeout=LIMIT)
            results.append((each.returncode, out, err))
    finally:
        for each in processes:
            with contextlib.suppress(ProcessLookupError):
                each.kill()
            each.wait()
    return results


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port: int = held.getsockname()[1]
        return port


@pytest.mark.slow
def test_two_processes_of_one_machine(tmp_path: Path) -> None:
    ((status, out, err),) = ended(
        torchrun(tmp_path, ["--standalone", "--nproc-per-node=2"], ["--json", "-o", "own.toml"])
    )
    assert status == 0, err
    assert err.count("Wrote own.toml") == 1
    found = json.loads(out)
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
def test_two_nodes(tmp_path: Path) -> None:
    """Two torchruns, as on two machines: node 0 has two processes, node 1 has one."""
    meeting = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    first, second = ended(
        torchrun(tmp_path, [*meeting, "--node-rank=0", "--nproc-per-node=2"], []),
        torchrun(tmp_path, [*meeting, "--node-rank=1", "--nproc-per-node=1"], []),
    )
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "between nodes" in first[1]
    assert second[1] == ""
    read = load_topology(tmp_path / "links.toml")
    assert (read.gpus, read.gpus_per_node) == (3, 2)
    assert read.bandwidth is not None
    assert len(read.bandwidth) == 2


@pytest.mark.slow
def test_a_process_that_never_comes(tmp_path: Path) -> None:
    ((status, out, err),) = ended(process(tmp_path, PPLAN, rank=0, port=0))
    assert (status, out) == (2, "")
    ours = err[err.index("pplan: ") :].splitlines()
    assert ours[0].startswith("pplan: profile-links: lost another process while meeting the others")
    assert "within 2 s" in ours[1]
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_process_that_is_gone(tmp_path: Path) -> None:
    port = free_port()
    first, second = ended(process(tmp_path, PPLAN, 0, port), process(tmp_path, DIES, 1, port))
    assert second[0] == 7
    assert (first[0], first[1]) == (2, "")
    assert first[2].count("pplan: profile-links: lost another process while measuring") == 1
    assert not list(tmp_path.iterdir())


def test_few_processes_are_measured_in_all_pairs() -> None:
    pairs = chosen_pairs([0] * EVERY_PAIR_UP_TO)
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
    assert chosen_pairs(nodes) == expected


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
