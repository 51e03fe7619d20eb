"""Devices, dtypes and versions by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pplan.cost_models.errors import MachineError, UsageError
from pplan.profiler import local_machine


def test_dtypes_by_name() -> None:
    assert [local_machine.parse_dtype(name).itemsize for name in local_machine.DTYPES] == [4, 2, 2, 8]
    with pytest.raises(UsageError) as caught:
        local_machine.parse_dtype("float8")
    assert "bfloat16" in caught.value.hint


def two_devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_devices_where_there_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    two_devices(monkeypatch, 2)
    assert local_machine.parse_device(None) == torch.device("cuda", 0)
    assert local_machine.parse_device("cuda:1") == torch.device("cuda", 1)
    assert local_machine.parse_device("cpu") == torch.device("cpu")
    with pytest.raises(MachineError, match="finds 2 CUDA devices") as caught:
        local_machine.parse_device("cuda:2")
    assert caught.value.hint == "Use one of cpu, cuda:0, cuda:1, meta."
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", ""):
        with pytest.raises(UsageError, match="is not known"):
            local_machine.parse_device(wrong)


def test_devices_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    two_devices(monkeypatch, 0)
    assert local_machine.parse_device(None) == torch.device("cpu")
    with pytest.raises(MachineError, match="finds 0 CUDA devices"):
        local_machine.parse_device("cuda")


def test_free_memory_minds_the_control_group(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 900 kB\nMemAvailable:   700 kB\n"}
    monkeypatch.setattr(local_machine, "_text", lambda path: files.get(path, ""))
    assert local_machine.free_host_bytes() == 700 * 1024
    files["/sys/fs/cgroup/memory.max"] = "300000\n"
    files["/sys/fs/cgroup/memory.current"] = "100000\n"
    assert local_machine.free_host_bytes() == 200000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert local_machine.free_host_bytes() == 700 * 1024
    files.clear()
    assert local_machine.free_host_bytes() is None


def test_names_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n",
        "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue\n",
    }
    monkeypatch.setattr(local_machine, "_text", lambda path: files.get(path, ""))
    assert local_machine.device_name(torch.device("cpu")) == "Some CPU @ 2 GHz"
    assert local_machine.device_memory_bytes(torch.device("cpu")) is None
    made = local_machine.versions()
    assert (made.torch, made.driver) == (torch.__version__, "570.86.15")
    files.clear()
    assert local_machine.device_name(torch.device("cpu"))
    assert local_machine.versions().driver is None


def test_a_missing_file_reads_as_nothing(tmp_path: Path) -> None:
    assert local_machine._text(str(tmp_path / "none")) == ""
