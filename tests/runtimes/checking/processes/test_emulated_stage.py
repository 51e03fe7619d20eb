"""Stages that wait: how long and when, and the gradients that PyTorch's schedules ask for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from pplan.runtimes.checking.processes.trained_model import EmulatedStage, emulate_stages, emulated_loss
from pplan.runtimes.checking.records import StageSeconds, StageWaits

SECONDS = StageSeconds(forward=1.0, backward=5.0, input=2.0, weight=3.0)


@pytest.fixture
def slept() -> list[float]:
    return []


@pytest.fixture
def stage(slept: list[float]) -> EmulatedStage:
    return EmulatedStage(SECONDS, 7, slept.append)


def test_a_whole_backward(stage: EmulatedStage, slept: list[float]) -> None:
    given = torch.ones(2, 3, requires_grad=True)
    output = stage(given)
    assert (output.shape, output.dtype, slept) == ((2, 7), torch.float32, [1.0])
    torch.autograd.backward(output, torch.ones(2, 7))
    assert slept[0] == 1.0
    assert sorted(slept[1:]) == [2.0, 3.0]
    assert given.grad is not None
    assert torch.equal(given.grad, torch.zeros(2, 3))
    assert stage.weight.grad is not None
    assert stage.weight.grad.item() == 14.0


def test_a_backward_that_was_not_told_apart(slept: list[float]) -> None:
    stage = EmulatedStage(StageSeconds(forward=1.0, backward=5.0), 7, slept.append)
    torch.autograd.backward(stage(torch.ones(2, 3, requires_grad=True)).sum())
    assert slept == [1.0, 5.0]


def test_gradients_apart(stage: EmulatedStage, slept: list[float]) -> None:
    """As a zero-bubble schedule asks for them: the input's waits first, the weights' when they are asked."""
    given = torch.ones(2, 3, requires_grad=True)
    output = stage(given)
    slept.clear()
    gradients, groups = stage_backward_input([output], [torch.ones(2, 7)], [given], stage.parameters())
    assert slept == [2.0]
    assert isinstance(gradients[0], Tensor)
    assert torch.equal(gradients[0], torch.zeros(2, 3))
    assert stage.weight.grad is None
    stage_backward_weight(stage.parameters(), groups)
    assert slept == [2.0, 3.0]
    assert stage.weight.grad is not None
    assert stage.weight.grad.item() == 14.0


def test_the_first_stage_waits_for_both(stage: EmulatedStage, slept: list[float]) -> None:
    """Its input needs no gradient, but the layers behind its first one do."""
    output = stage(torch.ones(2, 3))
    slept.clear()
    torch.autograd.backward(output.sum())
    assert sorted(slept) == [2.0, 3.0]


def test_nothing_is_waited_for_on_meta(stage: EmulatedStage, slept: list[float]) -> None:
    """Where PyTorch is told the shapes."""
    assert stage.to("meta")(torch.ones(2, 3, device="meta")).shape == (2, 7)
    assert slept == []


def test_as_many_bytes_cross_every_cut() -> None:
    waits = StageWaits(stages=[StageSeconds(forward=0.0, backward=0.0)] * 3, crossing_bytes=[4096, 96])
    made: Tensor = torch.ones(4, 5)
    crossed = []
    for stage in emulate_stages(waits, samples=4):
        made = stage(made)
        crossed.append(made.nbytes)
    assert crossed == [4096, 96, 16]
    assert emulated_loss(made, None).dim() == 0


def test_cuts_between_stages() -> None:
    with pytest.raises(ValueError, match="1 cuts between 3 stages"):
        StageWaits(stages=[SECONDS] * 3, crossing_bytes=[1])
