"""The machines: every figure has its source, published figures, and names however they are spelled."""

from __future__ import annotations

import pytest

from pplan.cost_models.machines import MACHINES, PRESETS, Figure, Machine, find_machine, unknown_machine


def figures(machine: Machine) -> dict[str, Figure]:
    return {
        "gpus": machine.gpus,
        "bandwidth inside": machine.inside.bandwidth,
        "latency inside": machine.inside.latency,
        "bandwidth between": machine.between.bandwidth,
        "latency between": machine.between.latency,
        "GPUs an adapter": machine.gpus_per_adapter,
    }


def test_the_machines_that_people_have() -> None:
    assert set(MACHINES) == {
        "dgx-a100",
        "dgx-h100",
        "8x4090",
        "p3.16xlarge",
        "p4d.24xlarge",
        "p4de.24xlarge",
        "p5.48xlarge",
        "g5.48xlarge",
        "a2-highgpu-8g",
        "a3-highgpu-8g",
        "nd-a100-v4",
        "nd-h100-v5",
    }


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_every_figure_has_a_source(machine: Machine) -> None:
    for what, figure in figures(machine).items():
        assert figure.value > 0, what
        assert figure.source.startswith("assumption: ") or "https://" in figure.source, what
    assert machine.gpu in PRESETS
    assert machine.gpus.value % machine.gpus_per_adapter.value == 0


@pytest.mark.parametrize(
    ("name", "gpu", "inside_both_directions", "network_gigabits"),
    [
        ("dgx-a100", "a100-80gb", 600e9, 8 * 200),
        ("dgx-h100", "h100", 900e9, 8 * 400),
        ("p3.16xlarge", "v100-16gb", 100e9, 25),
        ("p4d.24xlarge", "a100-40gb", 600e9, 400),
        ("p4de.24xlarge", "a100-80gb", 600e9, 400),
        ("p5.48xlarge", "h100", 900e9, 3200),
        ("g5.48xlarge", "a10g", 63e9, 100),
        ("a2-highgpu-8g", "a100-40gb", 600e9, 100),
        ("a3-highgpu-8g", "h100", 900e9, 4 * 200),
        ("nd-a100-v4", "a100-40gb", 600e9, 1600),
        ("nd-h100-v5", "h100", 900e9, 3200),
    ],
)
def test_published_figures(name: str, gpu: str, inside_both_directions: float, network_gigabits: int) -> None:
    """What is published of a whole machine: all its adapters together."""
    machine = MACHINES[name]
    assert machine.gpu == gpu
    assert machine.gpus.value == 8
    assert 2 * machine.inside.bandwidth.value == inside_both_directions
    adapters = machine.gpus.value / machine.gpus_per_adapter.value
    assert adapters * machine.between.bandwidth.value * 8 == network_gigabits * 1e9


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("DGX A100", "dgx-a100"),
        ("dgxh100", "dgx-h100"),
        ("8x4090", "8x4090"),
        ("P4D.24XLARGE", "p4d.24xlarge"),
        ("Standard_ND96isr_H100_v5", "nd-h100-v5"),
        ("a3_highgpu_8g", "a3-highgpu-8g"),
    ],
)
def test_a_machine_is_found_however_it_is_spelled(name: str, machine: str) -> None:
    assert find_machine(name) is MACHINES[machine]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("dgx", "dgx-a100 or dgx-h100"), ("p4d.24xlrge", "p4d.24xlarge"), ("p5", "p5.48xlarge")],
)
def test_an_unknown_name_gets_the_nearest_and_all(name: str, nearest: str) -> None:
    assert find_machine(name) is None
    refused = unknown_machine(name)
    assert refused.what.startswith(f"topology={name!r}: ")
    assert f"Did you mean {nearest}?" in refused.hint
    assert all(machine in refused.hint for machine in MACHINES)


def test_a_gpu_is_no_machine() -> None:
    refused = unknown_machine("A100-80GB", "topology")
    assert refused.what == "topology A100-80GB: is a GPU, not a machine"
    assert "gpu='a100-80gb'" in refused.hint
    assert "Did you mean" not in unknown_machine("quantum!").hint
