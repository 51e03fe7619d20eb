"""What a process takes of a device before its first tensor."""

from __future__ import annotations

import pytest

from pplan.cost_models.machines import PRESETS, Preset, device_context


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_every_preset_has_one_and_says_where_it_is_from(preset: Preset) -> None:
    context = preset.context_bytes
    # With kernels loaded as they are needed: before CUDA 11.7 all were loaded at once, more than 1 GB.
    assert 256 * 2**20 <= context.value <= 1024 * 2**20
    assert context.source.startswith("assumption: ")
    assert "https://" in context.source


@pytest.mark.parametrize("name", ["RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_a_device_is_found_by_its_title_and_by_its_drivers_name(name: str) -> None:
    assert device_context(name) is PRESETS["rtx-4090"].context_bytes


@pytest.mark.parametrize("name", ["CPU", "AMD EPYC 7742", "toy", "", "NVIDIA H100 PCIe"])
def test_a_device_without_preset_has_none(name: str) -> None:
    assert device_context(name) is None
