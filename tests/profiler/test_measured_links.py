"""The topology file of measured links, read back as `pplan solve` reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.topology_file import ProfiledDevice, load_topology, make_topology
from pplan.profiler.measured_links import MeasuredLinks, Member, PairTimes
from pplan.profiler.torchrun_env import read_torchrun_env

SIZES = [1024, 65536, 2**20, 2**24]
INSIDE, BETWEEN = (5e-6, 300e9), (25e-6, 12.5e9)


def link_seconds(link: tuple[float, float], factor: float = 1.0) -> list[float]:
    latency, bandwidth = link
    return [factor * (latency + size / bandwidth) for size in SIZES]


def measured(
    nodes: list[int], name: str = "NVIDIA A100-SXM4-40GB", memory: int | None = 42_405_855_232
) -> MeasuredLinks:
    """Every pair takes what its level takes, there 1 % longer and back 1 % shorter."""
    pairs = []
    for first in range(len(nodes)):
        for second in range(first + 1, len(nodes)):
            link = INSIDE if nodes[first] == nodes[second] else BETWEEN
            there, back = link_seconds(link, 1.01), link_seconds(link, 0.99)
            pairs.append(PairTimes(first=first, second=second, there_seconds=there, back_seconds=back))
    return MeasuredLinks(
        backend="nccl",
        members=[
            Member(rank=rank, node=node, device_name=name, memory_bytes=memory)
            for rank, node in enumerate(nodes)
        ],
        sizes=SIZES,
        repeats=20,
        pairs=pairs,
        all_reduce_seconds=link_seconds(BETWEEN, 2.0),
    )


def test_two_nodes_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(measured([0, 0, 1, 1]).to_toml(), encoding="utf-8")
    read = load_topology(path)
    assert (read.gpu, read.memory_bytes) == ("a100-40gb", 42_405_855_232)
    assert (read.gpus, read.gpus_per_node) == (4, 2)
    assert read.bandwidth == pytest.approx((300e9, 12.5e9), rel=0.011)
    assert read.latency == pytest.approx((5e-6, 25e-6), rel=0.011)
    topology = make_topology(gpus=4, file=path, profiled=ProfiledDevice("cpu", "", None))
    assert topology.link(1, 2) == topology.levels[-1].link
    assert topology.link(0, 1).seconds(2**20) == pytest.approx(5e-6 + 2**20 / 300e9, rel=0.02)


def test_one_node_has_one_level(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(measured([0, 0], "some CPU", None).to_toml(), encoding="utf-8")
    read = load_topology(path)
    assert (read.gpu, read.memory_bytes, read.gpus, read.gpus_per_node) == (None, None, 2, 2)
    assert read.bandwidth is not None
    assert read.latency is not None
    assert len(read.bandwidth) == len(read.latency) == 1


def test_one_device_a_node_is_between_nodes(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    links = measured([0, 1])
    path.write_text(links.to_toml(), encoding="utf-8")
    read = load_topology(path)
    assert read.gpus_per_node == 1
    assert read.bandwidth == pytest.approx((12.5e9, 12.5e9), rel=0.011)
    assert any("one device a node" in remark for remark in links.remarks)


def test_comments_hold_what_was_measured() -> None:
    text = measured([0, 0, 1, 1]).to_toml()
    comments = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert "World size 4 on 2 nodes: 4 x NVIDIA A100-SXM4-40GB." in comments
    assert "Backend nccl" in comments
    assert "median of 2 pairs" in comments
    assert "median of 4 pairs" in comments
    assert comments.count("16.00 MiB") >= 3
    assert text.isascii()


def test_a_device_name_cannot_break_out_of_its_comment(tmp_path: Path) -> None:
    path = tmp_path / "links.toml"
    path.write_text(measured([0, 0], "bad\ngpus = 99\n\x00", None).to_toml(), encoding="utf-8")
    assert load_topology(path).gpus == 2


def test_what_the_file_cannot_say_is_remarked() -> None:
    uneven = measured([0, 0, 0, 1, 2])
    assert any("3, 1, 1 devices" in remark for remark in uneven.remarks)
    assert not any("devices" in remark for remark in measured([0, 0, 1]).remarks)
    other = uneven.members[0].model_copy(update={"device_name": "other"})
    mixed = uneven.model_copy(update={"members": [other, *uneven.members[1:]]})
    assert any("devices differ" in remark for remark in mixed.remarks)
    assert 'gpu = "' not in mixed.to_toml()


def test_a_slow_all_reduce_is_remarked() -> None:
    """A ring of two sends what a transfer sends: 2 (r - 1) / r bytes, twice the latency."""
    links = measured([0, 0], "some CPU", None)
    predicted = [2 * INSIDE[0] + size / INSIDE[1] for size in SIZES]
    assert links.predicted_all_reduce() == pytest.approx(predicted, rel=0.02)
    slow = links.model_copy(update={"all_reduce_seconds": [4 * value for value in predicted]})
    assert any("takes 4.0 times" in remark for remark in slow.remarks)
    even = links.model_copy(update={"all_reduce_seconds": predicted})
    assert even.remarks == []


def test_figures_far_from_a_line_are_remarked() -> None:
    links = measured([0, 0])
    times = [1.0, 1e-3, 1e-3, 1e-3]
    pair = links.pairs[0].model_copy(update={"there_seconds": times, "back_seconds": times})
    assert any("fitted line" in remark for remark in links.model_copy(update={"pairs": [pair]}).remarks)
    assert not any("fitted line" in remark for remark in links.remarks)


def test_the_slowest_pair_is_named() -> None:
    links = measured([0, 0, 0])
    slow = links.pairs[1].model_copy(update={"there_seconds": [9.0] * 4, "back_seconds": [7.0] * 4})
    pair, rate = links.model_copy(update={"pairs": [links.pairs[0], slow, links.pairs[2]]}).slowest_pair(
        "inside"
    )
    assert (pair.first, pair.second) == (0, 2)
    assert rate == pytest.approx(2**24 / 8)


def test_json_holds_the_measurement_and_the_fit() -> None:
    links = measured([0, 0, 1])
    content = json.loads(links.to_json())
    assert content["fitted"]["between"]["latency_seconds"] == pytest.approx(25e-6, rel=0.02)
    assert len(content["pairs"]) == 3
    assert content["sizes"] == SIZES


ENVIRONMENT = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_says_is_read() -> None:
    process = read_torchrun_env(ENVIRONMENT)
    assert (process.rank, process.world_size, process.local_rank, process.node) == (3, 4, 1, None)
    assert read_torchrun_env(ENVIRONMENT | {"GROUP_RANK": "1"}).node == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"RANK": ""}, "RANK is not set"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
        ({"WORLD_SIZE": "1"}, "one process"),
    ],
)
def test_another_start_is_refused_with_the_command(change: dict[str, str], what: str) -> None:
    with pytest.raises(UsageError, match=what) as refused:
        read_torchrun_env(ENVIRONMENT | change)
    assert "torchrun --no-python" in refused.value.hint
