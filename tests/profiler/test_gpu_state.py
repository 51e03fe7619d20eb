"""What is asked of a GPU while it is measured, with a driver that answers from a list."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pplan.profiler import gpu_state
from pplan.profiler.gpu_state import GpuRecord, GpuState, read_gpu_state

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
