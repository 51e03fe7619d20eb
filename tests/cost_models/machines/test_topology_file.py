"""What a topology file may say, what is refused, and that a topology's text reads back as the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import FileError
from pplan.cost_models.machines import MACHINES
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.cost_models.topology_file import described_topology, load_topology, to_toml


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flat_keys(tmp_path: Path) -> None:
    read = load_topology(
        write(tmp_path, 'gpu = "A100 40GB"\nmemory = "39GiB"\ngpus = 16\nlatency = ["3us", "15us"]\n')
    )
    assert (read.gpu, read.memory_bytes, read.gpus) == ("a100-40gb", 39 * 2**30, 16)
    assert read.latency == (3e-6, 15e-6)
    assert load_topology(write(tmp_path, "")).gpus is None


def test_one_level_needs_no_brackets(tmp_path: Path) -> None:
    read = load_topology(write(tmp_path, 'bandwidth = "inf"\nlatency = "0"\n'))
    assert read.bandwidth == (math.inf,)
    assert read.latency == (0.0,)


def test_devices_are_counted(tmp_path: Path) -> None:
    two = '[[device]]\ngpu = "t4"\ncount = 2\n[[device]]\ngpu = "l4"\ncount = 3\n'
    assert load_topology(write(tmp_path, two)).gpus == 5
    assert load_topology(write(tmp_path, "gpus = 5\n" + two)).gpus == 5
    assert load_topology(write(tmp_path, '[[device]]\ngpu = "t4"\n')).gpus is None
    assert load_topology(write(tmp_path, 'gpus = 4\n[[device]]\ngpu = "t4"\n')).gpus == 4


LEVEL = '[[level]]\nname = "node"\nsize = 4\nbandwidth = "1GB/s"\n'
OUTER = '[[level]]\nname = "hall"\nbandwidth = "1GB/s"\n'


@pytest.mark.parametrize(
    ("text", "what", "hint"),
    [
        ("gpu = ", "not a TOML file", "bandwidth ="),
        pytest.param("gpus = " + "9" * 5000, "not a TOML file", "bandwidth =", id="a number too long"),
        pytest.param("a = " + "[" * 20_000, "not a TOML file", "bandwidth =", id="nested too deep"),
        ("bandwith = 3", "unknown key 'bandwith'", "Did you mean bandwidth?"),
        ("[nodes]\na = 1", "unknown key 'nodes'", "gpus_per_node"),
        ("[[levels]]\na = 1", "unknown key 'levels'", "Did you mean level?"),
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
        # tables
        ("device = 5", "device: ", "[[device]]"),
        ("device = []", "device: ", "[[device]]"),
        ("[level]\nname = 1", "level: ", "[[level]]"),
        ("[[device]]\ncount = 8", "device 1: has neither gpu nor name", 'gpu = "t4"'),
        ('[[device]]\ngpu = "t44"', "device 1: gpu t44", "Did you mean t4?"),
        ('[[device]]\nname = "a"\nmem = "1GiB"', "device 1: unknown key 'mem'", "Did you mean memory?"),
        ('[[device]]\nname = "a"\nmemory = "16"', "device 1: memory 16: the unit is missing", "16GiB"),
        ('[[device]]\nname = "a"\nspeed = 0', "device 1: speed: ", "speed = 1.0"),
        ('[[device]]\nname = "a"\nspeed = "2"', "the value is '2'", "speed = 1.0"),
        ('[[device]]\nname = "a"\nspeed = inf', "the value is inf", "speed = 1.0"),
        ('[[device]]\nname = "a"\ncount = 0', "device 1: count: ", "count = 8"),
        ('[[device]]\nname = "a"\nspeed = 2.0\nprofile = "x"', "both a speed (2) and a profile", "one of"),
        ('[[device]]\nname = "a"\ncount = 1\n[[device]]\nname = "b"', "device 2: has no count", "count = 8"),
        ('gpus = 9\n[[device]]\nname = "a"\ncount = 8', "gpus 9: the counts of the devices make 8", "= 8"),
        ('gpu = "t4"\n[[device]]\nname = "a"', "gpu: stands beside [[device]]", "Move it"),
        ('latency = "5us"\n' + LEVEL, "latency: stands beside [[level]]", "Move it"),
        ("gpus_per_node = 8\n" + LEVEL, "gpus_per_node: stands beside [[level]]", "Move it"),
        ('[[level]]\nname = "node"', "level 1: has no bandwidth", 'bandwidth = "300GB/s"'),
        (LEVEL + '[[level]]\nbandwidth = "1GB/s"', "level 2: has no name", 'name = "node"'),
        (LEVEL + "bandwidht = 1", "level 1: unknown key 'bandwidht'", "Did you mean bandwidth?"),
        (LEVEL + "size_ = 1", "level 1: unknown key 'size_'", "Did you mean size?"),
        ('[[level]]\nname = "node"\nsize = 0\nbandwidth = "1GB/s"', "level 1: size: ", "size = 8"),
        (
            '[[level]]\nname = "node"\nbandwidth = "100Gbps"',
            "level 1 (node): bandwidth 100Gbps: ",
            "12.5GB/s",
        ),
        (
            '[[level]]\nname = "n"\nbandwidth = "1GB/s"\nlatency = "5"',
            "level 1 (n): latency 5: the unit",
            "5us",
        ),
        (LEVEL + "shared = true", "level 1 (node): shared, but its members are single devices", "around it"),
        (LEVEL + OUTER + "shared = true\ndevices_per_port = 2", "both shared and devices_per_port", "one of"),
        (
            LEVEL + OUTER + "devices_per_port = 3",
            "devices_per_port 3 does not divide the 4 devices",
            "divisor",
        ),
        (LEVEL + OUTER + 'shared = "yes"', "level 2: shared: ", "[[level]]"),
        (LEVEL + LEVEL, "level node: there are two of that name", "own name"),
        (OUTER + LEVEL, "level hall: has no size and another level around it", "outermost"),
        ("gpus = 5\n" + LEVEL, "gpus=5: the levels hold 4 devices", "outermost"),
    ],
)
def test_a_bad_file_says_where_and_what(tmp_path: Path, text: str, what: str, hint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(FileError) as refused:
        load_topology(path)
    assert refused.value.what.startswith(f"{path}: ")
    assert what in refused.value.what
    assert hint in refused.value.hint


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no such topology file"):
        load_topology(tmp_path / "none.toml")


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_reads_back_from_its_text(tmp_path: Path, name: str) -> None:
    topology = described_topology(Path(name))
    text = to_toml(topology, MACHINES[name].title)
    assert text.startswith(f"# {MACHINES[name].title}\n")
    assert described_topology(write(tmp_path, text)) == topology
    assert topology.levels[0].link.bandwidth_source in text


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
RATES = st.one_of(st.just(math.inf), st.floats(1.0, 1e15))
LINKS = st.builds(Link, RATES, st.floats(0, 1e3), TEXTS | st.just(""), TEXTS, TEXTS)
DEVICES = st.one_of(
    st.builds(Device, TEXTS, st.none() | st.integers(1, 2**40), st.floats(1e-3, 1e3), memory_source=TEXTS),
    st.builds(Device, TEXTS, st.none(), profile=TEXTS),
)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    names = draw(st.lists(TEXTS, min_size=1, max_size=4, unique=True))
    levels: list[Level] = []
    inner = 1
    for name in names:
        size = draw(st.integers(1, 4))
        divisors = [d for d in range(1, inner + 1) if inner % d == 0]
        outermost = len(levels) == len(names) - 1 and draw(st.booleans())
        link, ports = draw(LINKS), draw(st.sampled_from(divisors))
        levels.append(Level(name, None if outermost else size, link, ports, draw(TEXTS)))
        inner *= size
    left = 20 if levels[-1].size is None else inner
    groups: list[Group] = []
    while left and (not groups or draw(st.booleans())):
        groups.append(Group(draw(DEVICES), draw(st.integers(1, left))))
        left -= groups[-1].number
    return Topology(tuple(groups), tuple(levels))


@pytest.mark.slow
@settings(deadline=None)
@given(topologies(), TEXTS)
def test_any_topology_reads_back_from_its_text(
    tmp_path_factory: pytest.TempPathFactory, topology: Topology, title: str
) -> None:
    path = tmp_path_factory.mktemp("topology") / "a.toml"
    path.write_bytes(to_toml(topology, title).encode())
    read = described_topology(path)
    assert read.levels == topology.levels
    assert [read.device(r) for r in range(read.gpus)] == [topology.device(r) for r in range(topology.gpus)]


@pytest.mark.parametrize("line", ["gpus = 1_000_000_000", '[[device]]\nname = "g"\ncount = 1_000_000_000'])
def test_a_line_of_too_many_devices_is_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(line)
    with pytest.raises(FileError, match=r"cluster\.toml: gpus 1000000000: at most 65536 devices"):
        load_topology(file)
