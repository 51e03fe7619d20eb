"""What a stage keeps and hands on: buffers, dtypes under autocast, tensors in tuples, weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pplan
from pplan.cost_models.errors import ExportError
from pplan.runtimes.pipelining.stage import (
    CutTensor,
    InputForm,
    StageModule,
    names_in_stage,
    trace_shapes,
    written_buffers,
)

FORM = InputForm(("[0]",), (False,))


class MeanOfPast(nn.Module):
    """Subtracts the mean of what it saw before, and so computes otherwise when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("past", torch.zeros(4, dtype=torch.float64))
        self.past: Tensor

    def forward(self, given: Tensor) -> Tensor:
        value = (given - self.past) * given
        with torch.no_grad():
            self.past.lerp_(given.mean(0), 0.5)
        return value


def stateful() -> nn.Sequential:
    torch.manual_seed(0)
    own = nn.Linear(4, 4).double()
    normed = nn.utils.spectral_norm(nn.Linear(4, 4).double())
    return nn.Sequential(own, nn.BatchNorm1d(4).double(), MeanOfPast(), normed)


@pytest.mark.parametrize("recompute", [2, 4])
@pytest.mark.parametrize("backwards", [(0, 1, 2), (2, 1, 0)])
def test_layers_that_run_again_find_their_first_state_and_leave_the_last(
    recompute: int, backwards: tuple[int, ...]
) -> None:
    plain = stateful()
    own = copy.deepcopy(plain)
    inputs = [torch.randn(5, 4, dtype=torch.float64) for _ in backwards]
    written = names_in_stage(own, written_buffers(own))
    assert len(written) == len(list(plain.buffers())) == 6
    stage = StageModule(own, (CutTensor(torch.float64, False),), recompute=recompute, written=written)
    for module in (plain, stage):
        outputs = [module(given) for given in inputs]
        for number in backwards:
            outputs[number].square().sum().backward()
    for parameter, expected in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=0)
    for value, changed in zip(own.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(value, changed, rtol=1e-12, atol=0)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:FutureWarning")
def test_what_torch_jit_made_runs_again_in_its_first_state_too() -> None:
    plain = stateful()
    inner = nn.Sequential(nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double(), nn.ReLU())
    plain.append(torch.jit.script(inner))
    own = nn.Sequential(*copy.deepcopy(plain[:4]), torch.jit.script(copy.deepcopy(inner)))
    stage = StageModule(
        own, (CutTensor(torch.float64, False),), recompute=5, written=names_in_stage(own, list(own.buffers()))
    )
    inputs = [torch.randn(5, 4, dtype=torch.float64) for _ in range(3)]
    for module in (plain, stage):
        for output in [module(given) for given in inputs]:
            output.square().sum().backward()
    assert len(list(own.buffers())) == 9
    for parameter, expected in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-12, atol=0)
    for value, changed in zip(own.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(value, changed, rtol=1e-12, atol=0)


def test_the_layers_of_a_model_know_which_buffers_forward_changes() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm, self.leave = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.register_buffer("scale", torch.ones(4))

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = self.leave(self.norm(self.enter(given)) * self.scale)
            return result

    layers: Any = pplan.sequential(Scaled(), torch.randn(2, 3))
    names = layers.written_buffers
    assert names is not None
    assert {name.rpartition(".")[2] for name in names} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert layers[:2].written_buffers is None, "of a part it is not known"
    assert len(written_buffers(layers)) == 3
    assert len(written_buffers(nn.Sequential(*layers))) == 4


class HalfInside(nn.Module):
    """Switches autocast on by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result: Tensor = self.linear(given)
        return result


def test_what_crosses_a_cut_under_autocast() -> None:
    layers = nn.Sequential(HalfInside(), HalfInside(), nn.BatchNorm1d(4))
    given = torch.randn(2, 4)
    shapes = trace_shapes(layers, [0, 1, 2, 3], (given,), FORM)
    assert shapes is not None
    assert [stage.outputs[0].dtype for stage in shapes[:2]] == [torch.bfloat16] * 2
    assert shapes[1].crossings == (CutTensor(torch.bfloat16, True),)
    assert all(type(tensor) is Tensor and tensor.is_meta for stage in shapes for tensor in stage.outputs)
    plain = trace_shapes(layers[2:], [0, 1], (given,), FORM)
    assert plain is not None
    assert plain[0].outputs[0].dtype == torch.float32


def test_another_autocast_than_when_it_was_built_is_refused() -> None:
    layers, given = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    for built_under in (False, True):
        with torch.autocast("cpu", enabled=built_under):
            shapes = trace_shapes(layers, [0, 1, 2], (given,), FORM)
        assert shapes is not None
        stage = StageModule(layers[:1], shapes[0].crossings, outputs=shapes[0].outputs, form=FORM)
        with torch.autocast("cpu", enabled=built_under):
            stage(given)
        with (
            torch.autocast("cpu", enabled=not built_under),
            pytest.raises(ExportError, match=r"hands on (bfloat16|float32) where") as caught,
        ):
            stage(given)
        assert caught.value.hint.startswith("Call build inside the torch.autocast")


class InTuple(nn.Module):
    """Takes a tensor, or the tuple of one, and returns the tuple of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Tensor | tuple[Tensor]) -> tuple[Tensor]:
        value = given[0] if isinstance(given, tuple) else given.flip(0)
        return (self.linear(value),)


def test_a_tensor_alone_in_a_tuple_arrives_in_one() -> None:
    layers, given = nn.Sequential(InTuple(), InTuple(), InTuple()), torch.randn(3, 4)
    shapes = trace_shapes(layers, [0, 1, 2, 3], (given,), FORM)
    assert shapes is not None
    assert shapes[1].crossings == (CutTensor(torch.float32, True, in_tuple=True),)
    stages = [
        StageModule(
            layers[i : i + 1],
            shapes[i].crossings,
            form=FORM if i == 0 else None,
            is_last=i == 2,
            outputs=shapes[i].outputs,
        )
        for i in range(3)
    ]
    value = given
    for stage in stages:
        value = stage(value)
    assert torch.equal(value, layers(given)[0])


@pytest.mark.parametrize("output", [(torch.ones(2, 2, requires_grad=True),), torch.ones(2, 2).long()])
def test_what_the_stage_behind_cannot_know_is_refused(output: object) -> None:
    class Constant(nn.Module):
        def forward(self, given: Tensor) -> object:  # noqa: ARG002
            return output

    stage = StageModule(nn.Sequential(Constant()))
    stage(torch.ones(2, 2))
    stage.is_told_nothing = True
    with pytest.raises(ExportError, match="not be run on the example input"):
        stage(torch.ones(2, 2))


def test_a_weight_among_the_outputs_is_trained_on() -> None:
    class WithWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            return given * self.weight, self.weight

    model = WithWeight()
    last = StageModule(nn.Sequential(model), (CutTensor(torch.float32, True),), is_last=True)
    value, weight = last(torch.ones(2, 3, requires_grad=True))
    (value.sum() + weight.sum()).backward()
    for output in (value, weight):
        output.detach_()  # as PyTorch's schedules do
    assert model.weight.requires_grad
    torch.testing.assert_close(model.weight.grad, torch.full((3,), 3.0))
