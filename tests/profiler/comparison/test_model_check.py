"""What counts as rounding, what is run when, and what is said where nothing was compared."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pplan
from pplan.cost_models.errors import ModelError
from pplan.profiler import comparison
from pplan.profiler.comparison import ModelCheck
from pplan.profiler.layer import Comparison
from pplan.profiler.layers import build_chain, sequential
from pplan.profiler.trial import NotTheModel
from pplan.profiler.user_model import ModelInput

GIVEN = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).sin()


class Deep(nn.Module):
    """Its normalisations amplify rounding; nothing jumps, as the gradient of ReLU does at 0, where that would
    depend on the order of sums in torch's own kernels."""

    def __init__(self, dtype: torch.dtype = torch.float32, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(64, 64, dtype=dtype) for _ in range(layers))
        self.norm: nn.Module = nn.LayerNorm(64, dtype=dtype)

    def linear(self, part: nn.Linear, given: Tensor) -> Tensor:
        return F.linear(given, part.weight, part.bias)

    def forward(self, given: Tensor) -> Tensor:
        for part in self.parts:
            assert isinstance(part, nn.Linear)
            given = F.silu(self.norm(self.linear(part, given)))
        return given


class InHalves(Deep):
    """The same sums in another order."""

    def linear(self, part: nn.Linear, given: Tensor) -> Tensor:
        first, second = (
            F.linear(a, w) for a, w in zip(given.chunk(2, 1), part.weight.chunk(2, 1), strict=True)
        )
        return second + first + part.bias


class LowPrecision(Deep):
    """As under autocast."""

    def linear(self, part: nn.Linear, given: Tensor) -> Tensor:
        low = torch.float16 if given.dtype is torch.float32 else torch.float32
        return F.linear(given.to(low), part.weight.to(low), part.bias.to(low)).to(given.dtype)


class SlightlyOff(Deep):
    """By less than anybody sees in an output, and by more than rounding."""

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * 1.00005


def compare(
    model: Deep, other: type[Deep], dtype: torch.dtype = torch.float32, given: Tensor = GIVEN
) -> Comparison:
    """`model` with layers that compute as `other` does."""

    def bind(copy: nn.Module) -> nn.Sequential:
        copy.__class__ = other
        return nn.Sequential(copy)

    check = ModelCheck(model, ModelInput.of(given.to(dtype)), "model")
    return check.compare(bind, ["layer"], "torch.fx")


def test_the_same_operations_give_the_same_bits() -> None:
    found = compare(Deep(), Deep)
    assert found == Comparison(batches=(1, 1, 2))
    assert found.notes == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_another_order_of_sums_is_rounding_and_said(dtype: torch.dtype) -> None:
    found = compare(Deep(dtype), InHalves, dtype)
    assert 0 < found.rounding < torch.finfo(dtype).eps ** 0.5
    assert found.notes[0].startswith(
        "outputs and gradients of the layers are those of the model within rounding"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("other", [LowPrecision, SlightlyOff])
def test_less_precision_is_no_rounding(other: type[Deep], dtype: torch.dtype) -> None:
    with pytest.raises(NotTheModel, match=r"the output is not the model's on a batch of 1 \(off by"):
        compare(Deep(dtype), other, dtype)


def test_where_rounding_would_hide_a_difference_nothing_is_claimed() -> None:
    """Batch norm of two samples that differ by 1e-5 enlarges rounding by 1e5."""
    model, alike = Deep(layers=1), GIVEN[:1] + 1e-5 * GIVEN
    model.norm = nn.BatchNorm1d(64, eps=1e-8)
    found = compare(model, InHalves, given=alike)
    assert "not compared by value: on a batch of 2 rounding alone changes" in found.notes[0]
    assert compare(model, Deep, given=alike) == Comparison(batches=(2, 2, 3))


@pytest.mark.parametrize("seed", [5, 6])
def test_no_one_change_of_the_last_bits_is_the_measure(seed: int) -> None:
    """Four of them: of seed 6 one direction of the change leaves the output as it is and another does not, of
    seed 5 all change gradients by as much as these are."""
    model, alike = Deep(), GIVEN[:1] + 1e-5 * GIVEN
    torch.manual_seed(seed)
    for part in model.parts:
        assert isinstance(part, nn.Linear)
        part.reset_parameters()
    model.norm = nn.BatchNorm1d(64, eps=1e-8)
    assert "rounding alone changes" in compare(model, InHalves, given=alike).notes[0]


def test_what_has_no_values_is_not_compared() -> None:
    with torch.device("meta"):
        model = Deep()
    chain = build_chain(model, GIVEN.to("meta"), verify=True)
    assert chain.comparison is not None
    assert chain.comparison.notes == (
        "layers and model were not compared by value: tensors on the meta device have no values",
    )
    profile = pplan.profile(Deep(), GIVEN, device="meta", micro_batch_sizes=[2])
    assert chain.comparison.notes[0] in profile.notes


def test_what_does_not_fit_in_memory_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Deep()
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    monkeypatch.setattr(comparison, "free_bytes", lambda _: 8 * weights)
    with pytest.warns(UserWarning, match="not compared by value: it would need .* for weights, .* are free"):
        sequential(model, GIVEN)
    monkeypatch.setattr(comparison, "free_bytes", lambda _: 9 * weights)
    assert sequential(model, GIVEN) is not None


def test_what_takes_long_is_not_compared_or_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SECONDS", 0.0)
    assert compare(Deep(), Deep).batches == (1,)
    monkeypatch.setattr(comparison, "LONGEST_SECONDS", 0.0)
    assert compare(Deep(), Deep).notes == (
        "layers and model were not compared by value: a pass of the model takes 0 s",
    )


def test_unverified_sequentials_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison.ModelCheck, "compare", lambda *_: pytest.fail("compared"))
    assert len(sequential(Deep(), GIVEN, verify=False)) == len(build_chain(Deep(), GIVEN))


class FailsInTraining(Deep):
    def forward(self, given: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise LookupError("no table for training")
        return super().forward(given)


def test_a_model_that_fails_in_training_is_refused_with_its_line() -> None:
    check = ModelCheck(FailsInTraining(), ModelInput.of(GIVEN), "model")
    with pytest.raises(ModelError, match=r"not train on a batch of 1: LookupError: no table .*in forward"):
        check.compare(nn.Sequential, ["layer"], "torch.fx")


class NeedsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 2)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.head(given.detach() * 2 + given)
        return result


def test_gradients_of_inputs_are_compared_where_they_are_needed() -> None:
    def without(copy: nn.Module) -> nn.Sequential:
        return nn.Sequential(_Detaches(), copy)

    for needed in (True, False):
        given = ModelInput.of(GIVEN.clone().requires_grad_(needed))
        check = ModelCheck(NeedsInput(), given, "model")
        if not needed:
            assert check.compare(without, ["detach", "rest"], "torch.fx").batches == (1, 1, 2)
            continue
        with pytest.raises(NotTheModel, match="the gradient of input 0 is not the model's"):
            check.compare(without, ["detach", "rest"], "torch.fx")


class _Detaches(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given.detach()
