"""Figures of the GPUs against each other and the presets, and the file of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from pplan.cost_models.errors import FileError, UsageError
from pplan.cost_models.machines import (
    PRESETS,
    ROOFLINES,
    find_roofline,
    host_bandwidth,
    match_device,
    memory_bandwidth,
)
from pplan.cost_models.roofline_file import load_roofline

GOOD = 'name = "NVIDIA L4"\nmemory = "20GiB"\nbandwidth = "300GB/s"\nfloat32 = 30e12\nbfloat16 = 121e12\n'


NO_FIGURES = ["a10g"]
"""Presets of which no data sheet was found."""


def test_every_preset_has_one_and_is_found_by_its_device_name() -> None:
    assert list(ROOFLINES) == [name for name in PRESETS if name not in NO_FIGURES]
    for name, roofline in ROOFLINES.items():
        assert match_device(roofline.device_name) is PRESETS[name]
        assert roofline.memory_bytes == PRESETS[name].memory_bytes.value
        assert all(figure.source for figure in (*roofline.peaks.values(), roofline.bandwidth))


def test_published_figures() -> None:
    h100 = find_roofline("H100")
    assert (h100.peak("bfloat16"), h100.peak("tf32")) == (989.5e12, 494.5e12)
    assert (h100.peak("float32"), h100.bandwidth.value) == (67e12, 3.35e12)
    assert find_roofline("a100_80GB").peak("float16") == 312e12


def test_what_there_is_no_figure_of() -> None:
    with pytest.raises(UsageError, match="analytic:h1':") as refused:
        find_roofline("h1")
    assert "h100" in refused.value.hint
    with pytest.raises(UsageError, match="analytic:a10g': there are no figures"):
        find_roofline("a10g")
    with pytest.raises(UsageError, match="bfloat16"):
        find_roofline("v100-16gb").peak("bfloat16")


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(GOOD)
    read = load_roofline(path)
    assert (read.name, read.device_name, read.memory_bytes) == ("NVIDIA L4", "NVIDIA L4", 20 * 2**30)
    assert (read.peak("float32"), read.peak("bfloat16"), read.bandwidth.value) == (30e12, 121e12, 300e9)
    assert (read.launch.value, read.host_launch.value) == (1.5e-6, 40e-6)
    path.write_text(GOOD + 'launch = "7us"\nhost_launch = "0"')
    again = load_roofline(path)
    assert again.launch.value == pytest.approx(7e-6)
    assert again.host_launch.value == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + "bflot16 = 1e12", "unknown key 'bflot16'"),
        (GOOD.replace('name = "NVIDIA L4"', ""), "has no name"),
        (GOOD.replace("30e12", '"30 TFLOPS"'), "float32"),
        (GOOD.replace("30e12", "30"), "float32"),
        (GOOD.replace("300GB/s", "inf"), "bandwidth inf"),
        (GOOD.replace("20GiB", "20"), "memory"),
        ('name = "x"\nmemory = "1GiB"\nbandwidth = "1GB/s"', "no FLOP/s"),
        ("name = ", "not a TOML file"),
    ],
)
def test_what_cannot_stand_in_a_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(FileError) as refused:
        load_roofline(path)
    assert said in refused.value.what
    assert refused.value.hint


@pytest.mark.parametrize(
    ("name", "half", "single", "bandwidth", "gib"),
    [
        ("v100-16gb", 125, 15.7, 900, 16),
        ("v100-32gb", 125, 15.7, 900, 32),
        ("a100-40gb", 312, 19.5, 1555, 40),
        ("a100-80gb", 312, 19.5, 2039, 80),
        ("h100", 989.5, 67, 3350, 80),
        ("h200", 989.5, 67, 4800, 141),
        ("b200", 2250, 80, 8000, 180),
        ("l4", 121, 30.3, 300, 24),
        ("t4", 65, 8.1, 300, 16),
        ("rtx-4090", 165.2, 82.6, 1008, 24),
        ("rtx-3090", 71, 35.6, 936, 24),
        ("mi300x", 1307.4, 163.4, 5300, 192),
    ],
)
def test_figures_of_the_data_sheets(
    name: str, half: float, single: float, bandwidth: float, gib: float
) -> None:
    """Teraflops of dense products in 16 bits, and of float32; GB/s; the memory that it is sold with, of
    which a program finds a little less."""
    roofline = ROOFLINES[name]
    assert roofline.peak("float16") == pytest.approx(half * 1e12)
    assert roofline.peak("float32") == pytest.approx(single * 1e12)
    assert roofline.bandwidth.value == bandwidth * 1e9
    assert 0.9 < roofline.memory_bytes / (gib * 2**30) <= 1.0


@pytest.mark.parametrize(
    ("names", "peaks"),
    [
        (("v100-16gb", "v100-32gb"), {"float64": 7.8}),
        (("a100-40gb", "a100-80gb"), {"tf32": 156, "bfloat16": 312, "float64": 19.5}),
        (("h100", "h200"), {"tf32": 989 / 2, "bfloat16": 1979 / 2, "float64": 67}),
        (("b200",), {"tf32": 1100, "bfloat16": 2250, "float64": 40}),
        (("l4",), {"tf32": 60, "bfloat16": 121}),
        (("t4",), {}),
        (("rtx-4090",), {"tf32": 82.6, "bfloat16": 165.2}),
        (("rtx-3090",), {"tf32": 35.6, "bfloat16": 71}),
        (("mi300x",), {"tf32": 653.7, "bfloat16": 1307.4, "float64": 163.4}),
    ],
)
def test_the_other_numbers_of_the_data_sheets(names: tuple[str, ...], peaks: dict[str, float]) -> None:
    """Teraflops of dense products; of what stands in none there is no figure."""
    for name in names:
        others = {dtype: own.value for dtype, own in ROOFLINES[name].peaks.items()}
        assert others.pop("float16") > others.pop("float32") > 0
        assert others == pytest.approx({dtype: peak * 1e12 for dtype, peak in peaks.items()})
        assert ROOFLINES[name].has_flash_attention == ("bfloat16" in peaks)


@pytest.mark.parametrize(
    ("name", "transfers", "gigabytes"),
    [
        *((name, 8, 15.75) for name in ("v100-16gb", "v100-32gb", "t4")),
        *((name, 16, 31.5) for name in ("a100-40gb", "a100-80gb", "l4", "rtx-4090", "rtx-3090", "a10g")),
        *((name, 32, 63.0) for name in ("h100", "h200", "b200", "mi300x")),
    ],
)
def test_copies_to_the_host_take_85_percent_of_16_lanes(
    name: str, transfers: float, gigabytes: float
) -> None:
    """128 of 130 bits are data, which makers round to three or four digits."""
    assert gigabytes == pytest.approx(transfers * 16 * 128 / 130 / 8, rel=1e-3)
    title = PRESETS[name].title
    assert host_bandwidth(title) == pytest.approx(0.85 * gigabytes * 1e9)
    roofline = ROOFLINES.get(name)
    assert memory_bandwidth(title) == (None if roofline is None else roofline.bandwidth.value)
    assert (host_bandwidth("quantum"), memory_bandwidth("quantum")) == (None, None)
