"""The topology that options, a file or a machine, and the profiled device make together."""

from __future__ import annotations

from pathlib import Path

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.machines import MACHINES, PRESETS
from pplan.cost_models.topology import Device, Group, Level, Link, Topology, two_level_topology
from pplan.cost_models.topology_file import ProfiledDevice, described_topology, make_topology

CPU = ProfiledDevice("cpu", "", None)
A100 = ProfiledDevice("cuda", "NVIDIA A100-SXM4-40GB", 42_405_855_232)
OTHER = ProfiledDevice("cuda:0", "NVIDIA RTX A6000", 50_000_000_000)

MIXED = """
[[device]]
gpu = "a100-40gb"
count = 4
[[device]]
name = "old one"
memory = "16GiB"
count = 4
speed = 0.25
[[level]]
name = "pair"
size = 2
link = "NVLink 3"
bandwidth = "300GB/s"
latency = "5us"
[[level]]
name = "node"
size = 2
bandwidth = "30GB/s"
latency = "10us"
[[level]]
name = "network"
bandwidth = "10GB/s"
latency = "20us"
shared = true
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def links(topology: Topology) -> list[Link]:
    return [level.link for level in topology.levels]


def test_a_profiled_gpu_brings_its_own_memory_and_its_servers_links() -> None:
    topology = make_topology(gpus=16, profiled=A100)
    assert topology == two_level_topology(
        Device("NVIDIA A100-SXM4-40GB", 42_405_855_232),
        16,
        8,
        Link(300e9, 5e-6, "NVLink 3"),
        Link(25e9, 20e-6, "InfiniBand HDR"),
    )


def test_a_profiled_gpu_without_known_memory_has_that_of_its_preset() -> None:
    topology = make_topology(gpus=2, profiled=ProfiledDevice("cuda", "NVIDIA L4", None))
    assert topology.device(0).memory_bytes == PRESETS["l4"].memory_bytes.value


def test_a_gpu_without_preset_has_its_memory_and_pcie_4() -> None:
    topology = make_topology(gpus=2, profiled=OTHER)
    assert topology.device(1) == Device("NVIDIA RTX A6000", 50_000_000_000)
    assert links(topology)[0].bandwidth_bytes_per_second == 31.5e9
    assert "PCIe 4.0 x16 (as in an L4 server)" in topology.describe()


def test_a_cpu_has_no_memory_limit_and_the_links_of_a_t4_server() -> None:
    topology = make_topology(gpus=8, profiled=ProfiledDevice("cpu", "", 2**36))
    assert topology.kinds == (Device("CPU", None),)
    assert topology.describe() == (
        "8 x CPU (no memory limit) in one node; PCIe 3.0 x16 (as in a T4 server) 15.75 GB/s, 10 µs"
    )


def test_a_named_gpu_goes_before_the_profiled_one() -> None:
    topology = make_topology(gpus=4, gpu="H100", profiled=CPU)
    assert topology.kinds == (Device("H100", int(PRESETS["h100"].memory_bytes.value)),)
    assert links(topology)[0] == Link(450e9, 5e-6, "NVLink 4")


def test_options_replace_single_parts() -> None:
    topology = make_topology(
        gpus=4, memory_bytes=2**34, bandwidth=[200e9], latency=[0.0, 1e-3], gpus_per_node=2, profiled=A100
    )
    assert topology.kinds == (Device("NVIDIA A100-SXM4-40GB", 2**34),)
    assert topology.gpus_per_node == 2
    assert links(topology) == [Link(200e9, 0.0), Link(25e9, 1e-3, "InfiniBand HDR")]


@pytest.mark.parametrize("option", ["bandwidth", "latency"])
@pytest.mark.parametrize("values", [[], [1.0, 2.0, 3.0]])
def test_there_are_two_levels(option: str, values: list[float]) -> None:
    with pytest.raises(UsageError, match=f"`{option}`: {len(values)} values"):
        make_topology(
            gpus=2,
            profiled=CPU,
            bandwidth=values if option == "bandwidth" else None,
            latency=values if option == "latency" else None,
        )


@pytest.mark.parametrize(("option", "counts"), [("gpus=", (0, 4)), ("gpus_per_node=", (4, -1))])
def test_counts_are_at_least_one(option: str, counts: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=option):
        make_topology(gpus=counts[0], gpus_per_node=counts[1], profiled=CPU)


def test_a_whole_file(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'gpu = "a100-40gb"\nmemory = "39GiB"\ngpus = 16\ngpus_per_node = 4\n'
        'bandwidth = ["250GB/s", "12.5GB/s"]\nlatency = ["3us", "15us"]\n',
    )
    topology = make_topology(gpus=16, file=path, profiled=CPU)
    assert topology == two_level_topology(
        Device("A100-40GB", 39 * 2**30), 16, 4, Link(250e9, 3e-6), Link(12.5e9, 15e-6)
    )
    assert topology.device(0).memory_source == path.name
    assert links(topology)[0].bandwidth_source == path.name


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    assert make_topology(gpus=3, file=path, profiled=A100) == make_topology(gpus=3, profiled=A100)


def test_options_go_before_the_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, 'gpu = "t4"\nmemory = "10GiB"\ngpus_per_node = 2\nbandwidth = ["1GB/s", "2GB/s"]\n'
    )
    topology = make_topology(gpus=4, gpus_per_node=4, bandwidth=[5e9], file=path, profiled=A100)
    assert topology.kinds == (Device("T4", 10 * 2**30),)
    assert topology.gpus_per_node == 4
    assert links(topology) == [Link(5e9, 10e-6), Link(2e9, 20e-6)]


def test_another_gpu_leaves_the_files_devices_behind(tmp_path: Path) -> None:
    for text in ('gpu = "t4"\nmemory = "10GiB"\n', '[[device]]\ngpu = "t4"\nmemory = "10GiB"\nspeed = 0.5\n'):
        topology = make_topology(gpus=2, gpu="h100", file=write(tmp_path, text), profiled=CPU)
        assert topology.kinds == (Device("H100", int(PRESETS["h100"].memory_bytes.value)),)


def test_kinds_and_levels_of_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, MIXED)
    new, old = (
        Device("A100-40GB", int(PRESETS["a100-40gb"].memory_bytes.value)),
        Device("old one", 2**34, speed=0.25),
    )
    levels = (
        Level("pair", 2, Link(300e9, 5e-6, "NVLink 3")),
        Level("node", 2, Link(30e9, 10e-6)),
        Level("network", None, Link(10e9, 20e-6), devices_per_port=4),
    )
    assert described_topology(path) == Topology((Group(new, 4), Group(old, 4)), levels)
    assert make_topology(gpus=6, file=path, profiled=CPU).groups == ((new, 4), (old, 2))
    with pytest.raises(UsageError, match="gpus=9: the topology has 8 devices, of 2 kinds"):
        make_topology(gpus=9, file=path, profiled=CPU)


def test_options_on_top_of_levels(tmp_path: Path) -> None:
    topology = make_topology(
        gpus=8,
        memory_bytes=2**30,
        bandwidth=[1e9],
        latency=[1.0, 2.0],
        gpus_per_node=8,
        file=write(tmp_path, MIXED),
        profiled=CPU,
    )
    assert [device.memory_bytes for device in topology.kinds] == [2**30, 2**30]
    assert links(topology) == [Link(1e9, 1.0), Link(30e9, 2.0), Link(10e9, 20e-6)]
    assert topology.gpus_per_node == 8
    assert [level.size for level in topology.levels] == [2, 4, None]
    assert topology.levels[2].devices_per_port == 8, "what a node shares is shared by the whole node still"
    with pytest.raises(UsageError, match="gpus_per_node=3: a node has members of 2 devices"):
        make_topology(gpus=8, gpus_per_node=3, file=write(tmp_path, MIXED), profiled=CPU)


def test_one_level_has_no_between(tmp_path: Path) -> None:
    path = write(tmp_path, '[[level]]\nname = "box"\nsize = 4\nbandwidth = "1GB/s"\n')
    assert links(make_topology(gpus=4, bandwidth=[2e9], file=path, profiled=A100)) == [Link(2e9, 0.0)]
    with pytest.raises(UsageError, match="`bandwidth`: 2 values, the topology has one level"):
        make_topology(gpus=4, bandwidth=[2e9, 1e9], file=path, profiled=A100)
    with pytest.raises(UsageError, match="gpus=5: the levels hold 4 devices"):
        make_topology(gpus=5, file=path, profiled=A100)


def test_kinds_without_levels_have_those_of_the_first_known_server(tmp_path: Path) -> None:
    text = '[[device]]\nname = "mine"\ncount = 1\n[[device]]\ngpu = "h100"\ncount = 7\n'
    assert links(described_topology(write(tmp_path, text)))[0].name == "NVLink 4"
    own = described_topology(write(tmp_path, '[[device]]\nname = "mine"\n'))
    assert own.gpus == 1
    assert links(own)[0].name == "PCIe 4.0 x16 (as in an L4 server)"


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_by_its_name(name: str) -> None:
    one, three = described_topology(Path(name)), described_topology(Path(name), 20)
    assert one.gpus == one.gpus_per_node == 8
    assert three.gpus == 20
    assert three.link(7, 8) == three.levels[-1].link != three.link(6, 7)
    assert one == make_topology(gpus=8, file=Path(name.upper()), profiled=A100)
    machine = MACHINES[name]
    assert one.kinds[0].memory_bytes == PRESETS[machine.gpu].memory_bytes.value
    assert one.link(0, 7).bandwidth_bytes_per_second == machine.inside.bandwidth.value
    assert three.link(0, 8).bandwidth_bytes_per_second == machine.between.bandwidth.value
    shares = machine.gpus_per_adapter.value
    assert (three.ports(0, 8)[0] == three.ports(1, 8)[0]) is (shares > 1)


def test_names_that_are_neither_a_file_nor_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="topology dgx-a10: no such file, and no machine") as refused:
        described_topology(Path("dgx-a10"))
    assert "Did you mean dgx-a100?" in refused.value.hint
    for name in ("none.toml", "folder/none"):
        with pytest.raises(FileError, match="no such topology file"):
            described_topology(Path(name))
    (tmp_path / "mine").write_text("gpus = 3\n")
    assert described_topology(Path("mine")).gpus == 3


def test_a_file_leaves_the_rest_to_an_unknown_gpu(tmp_path: Path) -> None:
    topology = described_topology(write(tmp_path, "gpus = 4\n"))
    assert topology.describe().startswith("4 x the profiled GPU (no memory limit) in one node; PCIe 4.0 x16")
