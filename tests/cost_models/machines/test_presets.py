"""The presets: every figure has its source, and device names match the models that they are, only."""

from __future__ import annotations

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.machines import PRESETS, Figure, Preset, find_preset, match_device

GIB = 2**30


def figures(preset: Preset) -> dict[str, Figure]:
    return {
        "memory": preset.memory_bytes,
        "gpus per node": preset.gpus_per_node,
        "bandwidth inside": preset.inside.bandwidth,
        "latency inside": preset.inside.latency,
        "bandwidth between": preset.between.bandwidth,
        "latency between": preset.between.latency,
    }


def test_the_gpus_that_people_have() -> None:
    assert set(PRESETS) == {
        "v100-16gb",
        "v100-32gb",
        "a100-40gb",
        "a100-80gb",
        "h100",
        "h200",
        "b200",
        "l4",
        "a10g",
        "t4",
        "rtx-4090",
        "rtx-3090",
        "mi300x",
    }


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_every_figure_has_a_source(preset: Preset) -> None:
    for what, figure in figures(preset).items():
        assert figure.value > 0, what
        assert figure.source.startswith("assumption: ") or "https://" in figure.source, what


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_memory_is_never_an_assumption(preset: Preset) -> None:
    assert "assumption" not in preset.memory_bytes.source


@pytest.mark.parametrize(
    ("name", "nominal_gigabytes"),
    [
        ("v100-16gb", 16),
        ("v100-32gb", 32),
        ("a100-40gb", 40),
        ("a100-80gb", 80),
        ("h100", 80),
        ("l4", 24),
        ("a10g", 24),
        ("t4", 16),
        ("rtx-4090", 24),
        ("rtx-3090", 24),
        ("mi300x", 192),
    ],
)
def test_usable_memory_is_at_most_the_nominal_and_near_it(name: str, nominal_gigabytes: int) -> None:
    assert 0.9 * nominal_gigabytes * GIB < PRESETS[name].memory_bytes.value <= nominal_gigabytes * GIB


def test_usable_memory_of_an_h200_is_139_8_gib() -> None:
    assert PRESETS["h200"].memory_bytes.value / GIB == pytest.approx(139.8, abs=0.01)


@pytest.mark.parametrize(
    ("name", "data_sheet_both_directions"),
    [
        ("a100-40gb", 600e9),
        ("a100-80gb", 600e9),
        ("h100", 900e9),
        ("h200", 900e9),
        ("b200", 1800e9),
        ("mi300x", 128e9),
    ],
)
def test_bandwidth_is_one_direction(name: str, data_sheet_both_directions: float) -> None:
    assert PRESETS[name].inside.bandwidth.value == data_sheet_both_directions / 2


@pytest.mark.parametrize(("name", "transfers_per_second"), [("t4", 8e9), ("l4", 16e9), ("rtx-4090", 16e9)])
def test_pcie_bandwidth_is_that_of_16_lanes_less_their_encoding(
    name: str, transfers_per_second: float
) -> None:
    expected = transfers_per_second * 16 * 128 / 130 / 8
    assert PRESETS[name].inside.bandwidth.value == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("device_name", "preset"),
    [
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100-SXM3-32GB", "v100-32gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_device_matches_its_preset(device_name: str, preset: str) -> None:
    found = match_device(device_name)
    assert found is not None
    assert found.name == preset


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA A100-PCIE-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA L40S",
        "NVIDIA L40",
        "NVIDIA A10",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla V100-PCIE-16GB",
        "AMD Instinct MI300A",
        "",
    ],
)
def test_a_device_with_other_links_or_memory_matches_none(device_name: str) -> None:
    assert match_device(device_name) is None


@pytest.mark.parametrize("name", ["rtx-4090", "RTX 4090", "rtx4090", "rtx_4090"])
def test_a_preset_is_found_however_it_is_spelled(name: str) -> None:
    assert find_preset(name) is PRESETS["rtx-4090"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("a100", "a100-40gb or a100-80gb"),
        ("h20", "h200"),
        ("b100-40gb", "a100-40gb"),
        ("v100-61gb", "v100-16gb"),
    ],
)
def test_an_unknown_preset_names_the_nearest_and_all(name: str, nearest: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_preset(name)
    assert name in refused.value.what
    assert f"Did you mean {nearest}?" in refused.value.hint
    assert all(preset in refused.value.hint for preset in PRESETS)


def test_a_name_like_none_gets_the_list_only() -> None:
    with pytest.raises(UsageError) as refused:
        find_preset("quantum!")
    assert "Did you mean" not in refused.value.hint
    assert "mi300x" in refused.value.hint


def test_memory_as_the_tools_of_the_makers_print_it() -> None:
    """In MiB: what deviceQuery or nvidia-smi says of a card."""
    said = {
        "v100-16gb": 16_160.5,
        "v100-32gb": 32_510.5,
        "a100-40gb": 40_339.3125,
        "a100-80gb": 81_050.625,
        "h100": 81_079.25,
        "a10g": 22_731,
        "t4": 15_109.75,
        "h200": 143_156,
        "b200": int(178.35 * 2**30) / 2**20,
        "l4": 22_518.4375,
        "rtx-4090": 24_080.875,
        "rtx-3090": 24_237.5,
    }
    assert {name: PRESETS[name].memory_bytes.value / 2**20 for name in said} == said


def test_a_context_is_what_was_seen_of_one() -> None:
    """In MiB: 426 of an Ada, and, between 426 and 612, 512; on Hopper two workspaces of cuBLAS more."""
    own = {name: preset.context_bytes.value / 2**20 for name, preset in PRESETS.items()}
    seen = {"l4": 426, "rtx-4090": 426, "h100": 512 + 64, "h200": 512 + 64}
    assert own == {name: seen.get(name, 512) for name in PRESETS}


def test_usual_servers_and_what_they_are_joined_by() -> None:
    """Eight GPUs each; Gb/s of the network for a GPU. A transfer starts in 5 us over own links,
    10 over PCIe, 20 through the network."""
    gigabits = {"v100-16gb": 100, "v100-32gb": 100, "a100-40gb": 200, "a100-80gb": 200}
    gigabits |= dict.fromkeys(("h100", "h200", "b200", "mi300x"), 400)
    for name, preset in PRESETS.items():
        assert preset.gpus_per_node.value == 8
        assert preset.between.bandwidth.value == gigabits.get(name, 100) * 1e9 / 8
        own_links = name not in ("l4", "a10g", "t4", "rtx-4090", "rtx-3090")
        assert (preset.inside.latency.value, preset.between.latency.value) == (
            5e-6 if own_links else 1e-5,
            2e-5,
        )
    assert PRESETS["v100-16gb"].inside.bandwidth.value == 2 * 25e9  # two of the six links of NVLink 2
