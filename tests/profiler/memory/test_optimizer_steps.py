"""What a step of torch.optim makes and frees again, counted, against the ledger's temporaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.memory import StageBytes, Training
from pplan.cost_models.optimizers import Precision, StepKernels
from pplan.profiler.memory import LiveBytes

SIZES = (30_000, 100_000, 100_000, 20_000)
"""The two largest in a row: a loop still has the last temporaries of one when it makes those of the next."""
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
FLAGS: dict[StepKernels, dict[str, bool]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def counted(name: str, sizes: Sequence[int], **flags: bool) -> int:
    """Bytes of a step above those that there are before and after it, its states existing."""
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[name](parameters, lr=1e-3, weight_decay=0.1, **flags)
    optimizer.step()
    states: list[Any] = [value for own in optimizer.state.values() for value in own.values()]
    held = [*parameters, *(parameter.grad for parameter in parameters), *states]
    with LiveBytes("cpu", [own for own in held if isinstance(own, Tensor)]) as meter:
        before = meter.allocated()
        optimizer.step()
    return int(meter.peak() - before)


@pytest.mark.parametrize("kernels", list(FLAGS))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_temporaries_are_those_that_torch_makes(name: str, kernels: StepKernels) -> None:
    weights, largest = 4.0 * sum(SIZES), 4.0 * max(SIZES)
    stage = StageBytes(weights, weights, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, largest=largest)
    made = Training(name, Precision(4, 4, kernels=kernels)).step_temporaries(stage)
    assert counted(name, SIZES, **FLAGS[kernels]) == pytest.approx(made or 0.0, abs=200)


def test_of_a_large_parameter_behind_a_small_one_they_are_less() -> None:
    """As in VGG: the ledger, which does not know the order, is too high by one of the largest."""
    large, small = 100_000, 1_000
    assert counted("adamw", (small, large, small), foreach=False) == pytest.approx(
        4 * (2 * large + small), abs=200
    )


def test_on_a_cpu_torch_steps_parameter_by_parameter() -> None:
    assert counted("adamw", SIZES) == counted("adamw", SIZES, foreach=False)
