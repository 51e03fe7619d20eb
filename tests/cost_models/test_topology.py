"""Levels of links, the topology that options, file and profile make together, and its description."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.presets import PRESETS
from pplan.cost_models.topology import Device, Link, ProfiledDevice, Topology, load_topology, make_topology

CPU = ProfiledDevice("cpu", "", None)
A100 = ProfiledDevice("cuda", "NVIDIA A100-SXM4-40GB", 42_405_855_232)
OTHER = ProfiledDevice("cuda:0", "NVIDIA RTX A6000", 50_000_000_000)

FAST, SLOW = Link(100e9, 1e-6, "fast"), Link(10e9, 5e-6, "slow")


def two_nodes_of_four(inside: Link = FAST, between: Link = SLOW) -> Topology:
    return Topology(Device("GPU", None), 8, 4, inside, between)


def test_seconds_are_latency_and_bytes_over_bandwidth() -> None:
    assert SLOW.seconds(20e9) == pytest.approx(2.000005)
    assert SLOW.occupancy_seconds(20e9) == 2.0
    assert SLOW.seconds(np.array([0.0, 10e9])).tolist() == pytest.approx([5e-6, 1.000005])


def test_endless_bandwidth_takes_only_the_latency() -> None:
    link = Link(math.inf, 5e-6)
    assert link.seconds(1e15) == 5e-6
    assert link.occupancy_seconds(1e15) == 0.0


def test_a_link_between_nodes_is_the_one_between() -> None:
    topology = two_nodes_of_four()
    for a in range(8):
        for b in range(8):
            across = (a < 4) != (b < 4)
            assert topology.crosses(a, b) is across
            assert topology.link(a, b) is (SLOW if across else FAST)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([2], FAST), ([0, 3], FAST), ([4, 5, 6, 7], FAST), ([3, 4], SLOW), (range(8), SLOW)],
)
def test_the_slowest_level_of_a_group(devices: list[int], expected: Link) -> None:
    assert two_nodes_of_four().slowest(devices) is expected


def test_a_network_faster_than_the_node_is_slowest_only_where_it_is_alone() -> None:
    topology = two_nodes_of_four(inside=SLOW, between=FAST)
    assert topology.slowest([3, 4]) is FAST
    assert topology.slowest([2, 3, 4]) is SLOW


def test_of_two_equal_bandwidths_the_longer_latency_is_slower() -> None:
    late = Link(FAST.bandwidth_bytes_per_second, 1e-3)
    assert two_nodes_of_four(between=late).slowest(range(8)) is late


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_link_needs_bandwidth(rate: float) -> None:
    with pytest.raises(UsageError, match="--bandwidth"):
        Link(rate, 0.0)


@pytest.mark.parametrize("wait", [-1e-6, math.nan, math.inf])
def test_a_link_needs_a_finite_latency(wait: float) -> None:
    with pytest.raises(UsageError, match="--latency"):
        Link(1e9, wait)


@pytest.mark.parametrize(("option", "counts"), [("--gpus ", (0, 4)), ("--gpus-per-node ", (4, -1))])
def test_counts_are_at_least_one(option: str, counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=option):
        Topology(Device("GPU", None), *counts, FAST, SLOW)


def test_a_device_needs_memory() -> None:
    with pytest.raises(UsageError, match="--memory 0"):
        Device("GPU", 0)


def test_a_profiled_gpu_brings_its_own_memory_and_its_servers_links() -> None:
    topology = make_topology(gpus=16, profiled=A100)
    assert topology.device == Device("NVIDIA A100-SXM4-40GB", 42_405_855_232)
    assert topology.gpus_per_node == 8
    assert topology.inside == Link(300e9, 5e-6, "NVLink 3")
    assert topology.between == Link(25e9, 20e-6, "InfiniBand HDR")


def test_a_profiled_gpu_without_known_memory_has_that_of_its_preset() -> None:
    topology = make_topology(gpus=2, profiled=ProfiledDevice("cuda", "NVIDIA L4", None))
    assert topology.device.memory_bytes == PRESETS["l4"].memory_bytes.value


def test_a_gpu_without_preset_has_its_memory_and_pcie_4() -> None:
    topology = make_topology(gpus=2, profiled=OTHER)
    assert topology.device == Device("NVIDIA RTX A6000", 50_000_000_000)
    assert topology.inside.bandwidth_bytes_per_second == 31.5e9
    assert "PCIe 4.0 x16 (as in an L4 server)" in topology.describe()


def test_a_cpu_has_no_memory_limit_and_the_links_of_a_t4_server() -> None:
    topology = make_topology(gpus=8, profiled=ProfiledDevice("cpu", "", 2**36))
    assert topology.device == Device("CPU", None)
    assert topology.describe() == (
        "8 x CPU (no memory limit) in one node; PCIe 3.0 x16 (as in a T4 server) 15.75 GB/s, 10 µs"
    )


def test_a_named_gpu_goes_before_the_profiled_one() -> None:
    topology = make_topology(gpus=4, gpu="H100", profiled=CPU)
    assert topology.device == Device("H100", int(PRESETS["h100"].memory_bytes.value))
    assert topology.inside == Link(450e9, 5e-6, "NVLink 4")


def test_options_replace_single_parts() -> None:
    topology = make_topology(
        gpus=4, memory_bytes=2**34, bandwidth=[200e9], latency=[0.0, 1e-3], gpus_per_node=2, profiled=A100
    )
    assert topology.device == Device("NVIDIA A100-SXM4-40GB", 2**34)
    assert topology.gpus_per_node == 2
    assert topology.inside == Link(200e9, 0.0)
    assert topology.between == Link(25e9, 1e-3, "InfiniBand HDR")


@pytest.mark.parametrize("option", ["bandwidth", "latency"])
@pytest.mark.parametrize("values", [[], [1.0, 2.0, 3.0]])
def test_there_are_two_levels(option: str, values: list[float]) -> None:
    with pytest.raises(UsageError, match=f"--{option}: {len(values)} values"):
        make_topology(
            gpus=2,
            profiled=CPU,
            bandwidth=values if option == "bandwidth" else None,
            latency=values if option == "latency" else None,
        )


def test_descriptions() -> None:
    inside, between = Link(300e9, 5e-6, "NVLink 3"), Link(25e9, 20e-6, "InfiniBand HDR")
    device = Device("A100-40GB", 40 * 2**30)
    assert Topology(device, 8, 4, inside, between).describe() == (
        "8 x A100-40GB (40.00 GiB), 4 a node; NVLink 3 300 GB/s, 5 µs inside; "
        "InfiniBand HDR 25 GB/s, 20 µs between"
    )
    assert Topology(device, 4, 4, inside, between).describe() == (
        "4 x A100-40GB (40.00 GiB) in one node; NVLink 3 300 GB/s, 5 µs"
    )
    assert Topology(device, 1, 4, inside, between).describe() == "1 x A100-40GB (40.00 GiB)"
    assert Topology(device, 2, 1, inside, Link(math.inf, 0.0)).describe() == (
        "2 x A100-40GB (40.00 GiB), 1 a node; unlimited, 0 s between"
    )


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_whole_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'gpu = "a100-40gb"\nmemory = "39GiB"\ngpus = 16\ngpus_per_node = 4\n'
        'bandwidth = ["250GB/s", "12.5GB/s"]\nlatency = ["3us", "15us"]\n',
    )
    read = load_topology(path)
    assert read.gpus == 16
    topology = make_topology(gpus=16, file=path, profiled=CPU)
    assert topology == Topology(
        Device("A100-40GB", 39 * 2**30), 16, 4, Link(250e9, 3e-6), Link(12.5e9, 15e-6)
    )


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert make_topology(gpus=3, file=path, profiled=A100) == make_topology(gpus=3, profiled=A100)
    assert load_topology(path).gpus is None


def test_one_level_needs_no_brackets(tmp_path: Path) -> None:
    read = load_topology(write(tmp_path, 'bandwidth = "inf"\nlatency = "0"\n'))
    assert read.bandwidth == (math.inf,)
    assert read.latency == (0.0,)


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'gpu = "t4"\nmemory = "10GiB"\ngpus_per_node = 2\nbandwidth = ["1GB/s", "2GB/s"]\n'
    )
    topology = make_topology(gpus=4, gpus_per_node=4, bandwidth=[5e9], file=path, profiled=A100)
    assert topology.device == Device("T4", 10 * 2**30)
    assert topology.gpus_per_node == 4
    assert topology.inside == Link(5e9, 10e-6)
    assert topology.between == Link(2e9, 20e-6)


def test_another_gpu_leaves_the_files_memory_behind(tmp_path: Path) -> None:
    path = write(tmp_path, 'gpu = "t4"\nmemory = "10GiB"\n')
    topology = make_topology(gpus=2, gpu="h100", file=path, profiled=CPU)
    assert topology.device.memory_bytes == PRESETS["h100"].memory_bytes.value


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("gpu = ", "not a TOML file", "bandwidth ="),
        ("bandwith = 3", "unknown key 'bandwith'", "Did you mean bandwidth?"),
        ("[nodes]\na = 1", "unknown key 'nodes'", "gpus_per_node"),
        ('gpu = "a100"', "gpu a100", "a100-40gb"),
        ("gpu = 4090", "gpu", "gpu ="),
        ('memory = "lots"', "memory 'lots'", "16GiB"),
        ("memory = 16", "the value is 16", "gpu ="),
        ("gpus = 0", "the value is 0", "gpu ="),
        ("gpus = true", "the value is True", "gpu ="),
        ('gpus = "8"', "the value is '8'", "gpu ="),
        ('bandwidth = ["100Gb/s"]', "bytes, not bits", "12.5GB/s"),
        ('bandwidth = ["1GB/s", "1GB/s", "1GB/s"]', "bandwidth", "300GB/s"),
        ("bandwidth = []", "bandwidth", "300GB/s"),
        ("latency = [5]", "latency", "gpu ="),
        ('latency = ["5"]', "the unit is missing", "5us"),
    ],
)
def test_a_bad_file_says_where_and_what(tmp_path: Path, text: str, what: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FileError) as refused:
        make_topology(gpus=2, file=path, profiled=CPU)
    assert refused.value.what.startswith(f"{path}: ")
    assert what in refused.value.what
    assert hint in refused.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such topology file"):
        load_topology(tmp_path / "none.toml")
