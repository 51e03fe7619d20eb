"""Estimates: what they are made of, that all who use them say so, and calibration by a known GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import pplan
from pplan.cli.profile_tables import print_profile
from pplan.cost_models.errors import FileError, UsageError
from pplan.profiler import estimate as estimates
from pplan.profiler.estimate import Curves, Efficiency
from pplan.profiler.profile_file import Profile

KNOWN = Curves(Efficiency(0.55, 6e-6), Efficiency(0.7, 3e-6))


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def estimate(device: str = "analytic:h100", **settings: Any) -> Profile:
    return pplan.profile(small(), torch.ones(1, 64), device=device, micro_batch_sizes=[4], **settings)


def convolutions() -> nn.Sequential:
    """Some bound by FLOPs and some by memory."""
    widths = [(3, 64, 3), (64, 256, 3), (256, 64, 1), (64, 512, 5)]
    parts = [(nn.Conv2d(a, b, k, padding=k // 2), nn.ReLU(), nn.BatchNorm2d(b)) for a, b, k in widths]
    return nn.Sequential(*(module for part in parts for module in part))


def of_convolutions(device: str, calibrate: Profile | None = None) -> Profile:
    with torch.device("meta"):
        model, given = convolutions(), torch.empty(1, 3, 64, 64)
    return pplan.profile(model, given, device=device, calibrate=calibrate, micro_batch_sizes=[1, 8, 64])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Profile:
    """As a GPU of the known curves would have been measured."""
    with monkeypatch.context() as patched:
        patched.setattr(estimates, "Curves", lambda: KNOWN)
        made = of_convolutions("analytic:a100-40gb")
    return made.model_copy(update={"device": "cuda", "estimated": False, "notes": []})


def seconds(profile: Profile) -> list[float]:
    costs = [cost for layer in profile.layers for cost in layer.costs]
    return [taken for cost in costs for taken in (cost.forward_seconds, cost.backward_seconds)]


def test_a_layer_by_hand() -> None:
    profile = estimate(loss="mse")
    cost = profile.layers[0].costs[0]
    # One product, which is so small that its half_seconds are most of it.
    assert cost.forward_seconds == pytest.approx((2 * 4 * 64 * 256 / 67e12 + 7.8e-6) / 0.575 + 1.5e-6)
    assert cost.forward_host_seconds == 40e-6
    # What has no FLOPs is bound by the memory: 4x256 read and written.
    relu = profile.layers[1].costs[0]
    assert relu.forward_seconds == pytest.approx((2 * 4 * 4 * 256 / 3.35e12 + 1.24e-6) / 0.98 + 1.5e-6)
    assert profile.loss is not None
    assert profile.loss.costs[0].forward_seconds > 0


@pytest.mark.slow
def test_adding_gradients_as_measured() -> None:
    """VGG-11's on an H100 (torch 2.11, float32): the first backward of a step was 0.50 ms shorter."""
    made = pplan.profile("vgg11", input_shape=(3, 32, 32), device="analytic:h100", micro_batch_sizes=[1])
    accumulation = made.chain().accumulation_seconds
    assert accumulation is not None
    assert accumulation.sum() == pytest.approx(0.5e-3, rel=0.3)


def test_it_says_what_it_is() -> None:
    profile = estimate()
    assert (profile.device, profile.device_name) == ("analytic", "NVIDIA H100 80GB HBM3")
    assert profile.estimated
    assert not profile.structure_only
    assert profile.device_memory_bytes == 85_017_755_648
    assert profile.whole == []
    assert profile.notes[0].startswith("an estimate from FLOPs and bytes")
    assert "the efficiencies are those of other models on it" in profile.notes[0]
    assert "the efficiencies are assumptions" in estimate("analytic:a100-40gb").notes[0]
    assert Profile.parse(profile.to_json(), "again") == profile


def test_everything_that_uses_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    profile = estimate()
    plan = pplan.solve(profile, gpus=1, runtime="torchgpipe")
    assert "the profile is an estimate, not a measurement" in plan.warnings
    assert plan.profile.estimated
    assert pplan.export("torchgpipe", plan).estimated
    print_profile(profile, Console(width=200))
    assert "estimated and not measured" in capsys.readouterr().out
    real = profile.model_copy(update={"estimated": False})
    assert not pplan.export("torchgpipe", pplan.solve(real, gpus=1, runtime="torchgpipe")).estimated


def test_plans_are_for_that_gpu() -> None:
    plan = pplan.solve(estimate("analytic:a100-40gb"), gpus=2)
    assert plan.topology == "2 x NVIDIA A100-SXM4-40GB (39.39 GiB) in one node; NVLink 3 300 GB/s, 5 µs"


@pytest.mark.slow
def test_dtypes_have_peaks_of_their_own() -> None:
    found = {}
    for dtype in ("float32", "bfloat16"):
        model, given = nn.Sequential(nn.Linear(4096, 4096)), torch.ones(1, 4096)
        made = pplan.profile(model, given, device="analytic:h100", dtype=dtype, micro_batch_sizes=[8192])
        found[dtype] = made.layers[0].costs[0].forward_seconds
    flops = 2 * 8192 * 4096 * 4096
    assert found["float32"] == pytest.approx((flops / 67e12 + 7.8e-6) / 0.575 + 1.5e-6)
    assert found["bfloat16"] == pytest.approx((flops / 989.5e12 + 7.8e-6) / 0.575 + 1.5e-6)


def test_tf32_is_of_the_estimate() -> None:
    model, given = nn.Sequential(nn.Linear(4096, 4096)), torch.ones(1, 4096)
    made = pplan.profile(model, given, device="analytic:h100", tf32=True, micro_batch_sizes=[8192])
    flops = 2 * 8192 * 4096 * 4096
    assert made.tf32
    assert made.layers[0].costs[0].forward_seconds == pytest.approx(
        (flops / 494.5e12 + 7.8e-6) / 0.575 + 1.5e-6
    )
    with pytest.raises(UsageError, match="tf32"):
        pplan.profile(model, given, device="analytic:v100-16gb", tf32=True, micro_batch_sizes=[1])


def test_a_file_of_figures(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('name = "Mine"\nmemory = "8GiB"\nbandwidth = "1GB/s"\nlaunch = "0"\nfloat32 = 1e15')
    profile = estimate(f"analytic:{path}")
    assert (profile.device_name, profile.device_memory_bytes) == ("Mine", 8 * 2**30)
    bytes_moved = 4 * (4 * 64 + 256 * 64 + 256 + 4 * 256)
    assert profile.layers[0].costs[0].forward_seconds == pytest.approx((bytes_moved / 1e9 + 1e-6) / 0.85)
    with pytest.raises(FileError):
        estimate(f"analytic:{tmp_path / 'none.toml'}")


def test_an_estimate_goes_on_to_the_sizes_that_a_device_holds(tmp_path: Path) -> None:
    """Past 8 by four, where four copies of the weights and what is saved at the next size fit."""

    def sized(memory_bytes: int) -> Profile:
        path = tmp_path / "my.toml"
        path.write_text(f'name = "Mine"\nmemory = "{memory_bytes}B"\nbandwidth = "1GB/s"\nfloat32 = 1e15')
        return pplan.profile(small(), torch.ones(1, 64), device=f"analytic:{path}")

    large = sized(2**40)
    assert large.micro_batch_sizes == [1, 2, 4, 8, 32, 128]
    saved = {cost.micro_batch_size: 0 for cost in large.layers[0].costs}
    for layer in large.layers:
        for cost in layer.costs:
            saved[cost.micro_batch_size] += cost.saved_bytes
    states = 4 * sum(layer.parameter_bytes for layer in large.layers)
    assert saved[128] == 4 * saved[32]
    assert sized(states + saved[32]).micro_batch_sizes == [1, 2, 4, 8, 32]
    assert sized(states + 4 * saved[8] - 1).micro_batch_sizes == [1, 2, 4, 8]


@pytest.mark.slow
def test_a_measured_profile_gives_its_curves(measured: Profile) -> None:
    again = of_convolutions("analytic:a100-40gb", measured)
    assert seconds(again) == pytest.approx(seconds(measured), rel=1e-6)
    assert "calibrated from a profile measured on NVIDIA A100-SXM4-40GB" in again.notes[0]
    assert (
        "FLOPs at most 55%, half of that in 6 µs, bytes at most 70%, half of that in 3 µs" in again.notes[0]
    )
    # On another GPU they are the same shares of what that one can do.
    other = of_convolutions("analytic:h100", measured)
    assert "FLOPs at most 55%, half of that in 6 µs" in other.notes[0]
    assert sum(seconds(other)) < sum(seconds(again))


@pytest.mark.slow
def test_what_cannot_calibrate(measured: Profile) -> None:
    with pytest.raises(UsageError, match="other layers"):
        estimate(calibrate=measured)
    real = estimate("analytic:a100-40gb").model_copy(update={"device": "cuda", "estimated": False})
    with pytest.raises(UsageError, match="float32, not bfloat16"):
        estimate(calibrate=real, dtype="bfloat16")
    with pytest.raises(UsageError, match="no figures"):
        estimate(calibrate=real.model_copy(update={"device_name": "GPU 9000"}))
    with pytest.raises(UsageError, match="not a measurement"):
        estimate(calibrate=estimate())
    with pytest.raises(UsageError, match="compiled"):
        estimate(calibrate=real.model_copy(update={"compiled": True}))
    with pytest.raises(UsageError, match="needs no calibration"):
        estimate("cpu", calibrate=real)
    with pytest.raises(UsageError, match="an input of"):
        estimate(calibrate=real.model_copy(update={"input_shape": [65]}))


@pytest.mark.parametrize("device", ["analytic", "analytic:", "analytic:h1"])
def test_names_that_are_none(device: str) -> None:
    with pytest.raises(UsageError, match="no preset of that name"):
        estimate(device)
