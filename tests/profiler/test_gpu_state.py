"""What is asked of a GPU while it is measured, with a driver that answers from a list."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from pplan.profiler import gpu_state, size_sweep
from pplan.profiler.build_profile import build_profile
from pplan.profiler.gpu_state import GpuRecord, GpuState, read_gpu_state
from pplan.profiler.layers import build_chain
from pplan.profiler.modes import MeasurementTarget
from pplan.profiler.passes import warm_until_stable
from pplan.profiler.segments import SegmentedSweep
from pplan.profiler.size_sweep import WholeSweep
from pplan.profiler.user_model import LoadedModel, ModelInput

CUDA = torch.device("cuda", 0)
LINES = "GPU:0\nprocess  4711 uses  1000.000 MB GPU memory\nprocess  4712 uses  20.000 MB GPU memory"


def answer(value: Any) -> Callable[[torch.device], Any]:
    return lambda _device: value


def refuse(error: Exception) -> Callable[[torch.device], Any]:
    def raising(_device: torch.device) -> Any:
        raise error

    return raising


def test_a_cpu_has_none() -> None:
    assert read_gpu_state(torch.device("cpu")) is None


def test_pytorch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "clock_rate", answer(1980))
    monkeypatch.setattr(torch.cuda, "power_draw", answer(612_500))
    monkeypatch.setattr(torch.cuda, "temperature", answer(61))
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", answer(LINES))
    assert read_gpu_state(CUDA) == GpuState(
        clock_mhz=1980, power_watts=612.5, temperature_celsius=61, other_processes=1
    )
    monkeypatch.setattr(torch.cuda, "temperature", refuse(RuntimeError("not supported")))
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", answer("GPU:0\nno processes are running"))
    state = read_gpu_state(CUDA)
    assert state is not None
    assert (state.temperature_celsius, state.other_processes) == (None, 0)


def test_without_pynvml_nvidia_smi_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_options: Any) -> Any:
        commands.append(command)
        out = "1755, [N/A], 48\n" if "--query-gpu" in command[-1] else "11\n12\n13\n"
        return SimpleNamespace(stdout=out)

    monkeypatch.setattr(torch.cuda, "clock_rate", refuse(ModuleNotFoundError("pynvml")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", answer(SimpleNamespace(uuid="ab-cd")))
    monkeypatch.setattr(subprocess, "run", run)
    assert read_gpu_state(CUDA) == GpuState(clock_mhz=1755, temperature_celsius=48, other_processes=2)
    assert all(command[:2] == ["nvidia-smi", "--id=GPU-ab-cd"] for command in commands)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("nvidia-smi"), subprocess.TimeoutExpired("nvidia-smi", 10.0)]
)
def test_a_machine_with_neither_is_measured_all_the_same(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*_command: Any, **_options: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.cuda, "clock_rate", refuse(ModuleNotFoundError("pynvml")))
    monkeypatch.setattr(torch.cuda, "get_device_properties", answer(SimpleNamespace(uuid="ab-cd")))
    monkeypatch.setattr(subprocess, "run", run)
    assert read_gpu_state(CUDA) is None


def test_a_clock_that_changes_and_other_processes_are_said() -> None:
    quiet = GpuState(clock_mhz=1980, other_processes=0)
    assert GpuRecord(begin=quiet, end=GpuState(clock_mhz=1965)).notes() == []
    assert GpuRecord(begin=GpuState(), end=GpuState()).notes() == []
    slow, shared = GpuState(clock_mhz=1410), GpuState(clock_mhz=1980, other_processes=2)
    (clock,) = GpuRecord(begin=quiet, end=slow).notes()
    assert clock.startswith("the GPU's clock went from 1980 to 1410 MHz while it was measured")
    (others,) = GpuRecord(begin=quiet, end=shared).notes()
    assert others.startswith("2 other processes compute on the GPU")
    assert 0 < gpu_state.CLOCK_CHANGES < 0.1


@pytest.mark.parametrize("segmented", [False, True])
def test_a_gpu_is_asked_after_a_warm_up_and_at_the_end(
    segmented: bool, clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments: list[float] = []

    def read(_device: torch.device) -> GpuState:
        moments.append(clock.now())
        return GpuState(clock_mhz=1980 - len(moments))

    def swept(sizes: list[int], warm_up_seconds: float) -> Any:
        monkeypatch.setattr(size_sweep.SizeSweep, "warm_up_seconds", warm_up_seconds)
        limits = (subject, sizes, 1e6, 1)
        sweep: Any = SegmentedSweep(*limits, free_bytes=lambda: 10**9) if segmented else WholeSweep(*limits)
        begun = clock.now()
        sweep.measure()
        return clock.now() - begun, sweep

    monkeypatch.setattr(size_sweep, "read_gpu_state", read)
    model = nn.Sequential(takes(clock, 1, 2))
    example = ModelInput.of(torch.ones(1, 4))
    loaded, chain = LoadedModel(model, "model", example), build_chain(model, example)
    subject = MeasurementTarget(loaded, chain, torch.device("cpu"), torch.float32, clock, 0)
    cold, _ = swept([1], 0.0)
    assert not moments
    warm, sweep = swept([1], 10.0)
    # A pass takes 3 s: four of them. After it the passes of one round: of the layers, and of the whole.
    assert warm - cold == 12
    assert clock.now() - moments[0] == (3 if segmented else 6)
    assert sweep.gpu_record() == GpuRecord(begin=GpuState(clock_mhz=1979), end=GpuState(clock_mhz=1978))
    del moments[:]
    swept([1, 2], 10.0)
    assert len(moments) == 1


def test_a_warm_up_ends_when_passes_take_as_long_as_before(clock: Any) -> None:
    """A clock that falls for 5 passes: ten that differ by under a hundredth, and ten before them."""
    seconds = [*(1.0, 1.1, 1.2, 1.3, 1.4), *(1.5 + 0.001 * number for number in range(100))]
    passes: list[float] = []

    def one_pass() -> float:
        passes.append(seconds[len(passes)])
        clock.advance(passes[-1], 0.0)
        return passes[-1]

    warm_until_stable(one_pass, clock, 1e6)
    assert len(passes) == 20 + 1
    passes.clear()
    warm_until_stable(one_pass, clock, 3.0)
    assert sum(passes) == pytest.approx(1.0 + 1.1 + 1.2)


@pytest.mark.parametrize(("share", "words"), [(1.04, ""), (1.3, "took 30% more of the device")])
def test_what_the_allocator_reserves_is_held_against_the_ledger(
    share: float, words: str, clock: Any, takes: Any
) -> None:
    model = nn.Sequential(takes(clock, 1, 2))
    example = ModelInput.of(torch.ones(1, 4))
    loaded, chain = LoadedModel(model, "model", example), build_chain(model, example)
    subject = MeasurementTarget(loaded, chain, torch.device("cpu"), torch.float32, clock, 0)
    sweep = WholeSweep(subject, [1], 1e6, 1)
    sweep.measure()
    (result,) = sweep.results
    assert result.counted.peak_bytes
    reserved = round(1000 * share)
    counted = dataclasses.replace(result.counted, peak_bytes=1000)
    results = [dataclasses.replace(result, counted=counted, reserved_bytes=reserved)]
    profile = build_profile(subject, results, (), ())
    assert profile.whole[0].reserved_bytes == reserved
    notes = [note for note in profile.notes if "caching allocator" in note]
    assert len(notes) == bool(words)
    assert all(words in note for note in notes)
