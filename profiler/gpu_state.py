"""What a GPU says of itself while it is measured: clock, power, temperature, and who else uses it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ..cost_models.document import Rate, Record

if TYPE_CHECKING:
    import torch

CLOCK_CHANGES = 0.03
"""Share by which the clock may differ from the beginning to the end of the measuring without a word."""
_SECONDS = 10.0
"""How long nvidia-smi may take."""
_QUERY = ("clocks.sm", "power.draw", "temperature.gpu")


Count = Annotated[int, Field(ge=0, le=10**9)]
Degrees = Annotated[int, Field(ge=-1000, le=10**6)]


class GpuState(Record):
    """At one moment; None: the driver does not tell."""

    clock_mhz: Count | None = None
    """The clock of the multiprocessors."""
    power_watts: Rate | None = None
    temperature_celsius: Degrees | None = None
    other_processes: Count | None = None
    """Other processes that compute on it."""


class GpuRecord(Record):
    """After the warm-up, and when all was measured."""

    begin: GpuState
    end: GpuState

    def notes(self) -> list[str]:
        """What may make the measured seconds others than those of the training."""
        lines = []
        first, last = self.begin.clock_mhz, self.end.clock_mhz
        if first and last and abs(last / first - 1) > CLOCK_CHANGES:
            lines.append(
                f"the GPU's clock went from {first} to {last} MHz while it was measured: the seconds are of "
                "several clocks; fix it (nvidia-smi --lock-gpu-clocks), or give a larger `budget_seconds`"
            )
        others = max(self.begin.other_processes or 0, self.end.other_processes or 0)
        if others:
            count = "another process computes" if others == 1 else f"{others} other processes compute"
            lines.append(f"{count} on the GPU: the seconds and the free memory are shared with it")
        return lines


def read_gpu_state(device: torch.device) -> GpuState | None:
    """The state of a CUDA device, right after it has computed; None for others.

    As PyTorch tells it, which needs the package nvidia-ml-py; else as nvidia-smi does, where it is installed.
    """
    if device.type != "cuda":
        return None
    import torch

    clock = _ask(lambda: torch.cuda.clock_rate(device))
    if clock is None:
        return _smi_state(device)
    power = _ask(lambda: torch.cuda.power_draw(device))
    return GpuState(
        clock_mhz=clock,
        power_watts=None if power is None else power / 1e3,
        temperature_celsius=_ask(lambda: torch.cuda.temperature(device)),
        other_processes=_others(_ask(lambda: torch.cuda.list_gpu_processes(device))),
    )


def _ask(question: Callable[[], Any]) -> Any:
    """None where pynvml is missing, or the driver refuses."""
    try:
        return question()
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
    except Exception as error:  # pynvml.NVMLError derives from Exception alone
        if type(error).__module__.startswith("pynvml"):
            return None
        raise


def _others(processes: str | None) -> int | None:
    """Of torch.cuda.list_gpu_processes' lines: this process has a context, so it is one of them."""
    if processes is None or "process" not in processes:
        return None
    return max(sum(line.startswith("process") for line in processes.splitlines()) - 1, 0)


def _smi_state(device: torch.device) -> GpuState | None:
    import torch

    identity = _ask(lambda: str(torch.cuda.get_device_properties(device).uuid))
    if identity is None:
        return None
    where = ["nvidia-smi", f"--id=GPU-{identity.removeprefix('GPU-')}", "--format=csv,noheader,nounits"]
    values = _output([*where, f"--query-gpu={','.join(_QUERY)}"])
    if values is None:
        return None
    clock, power, temperature = (_number(value) for value in (*values.split(","), "", "", "")[:3])
    processes = _output([*where, "--query-compute-apps=pid"])
    return GpuState(
        clock_mhz=None if clock is None else round(clock),
        power_watts=power,
        temperature_celsius=None if temperature is None else round(temperature),
        other_processes=None if processes is None else max(len(processes.split()) - 1, 0),
    )


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _number(text: str) -> float | None:
    """None for what nvidia-smi does not know: [N/A], [Not Supported]."""
    try:
        return float(text)
    except ValueError:
        return None
