"""Models whose layers hand on other shapes at some batch sizes: no plan uses these sizes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pplan
from pplan.cost_models.errors import ExportError, ModelError, UsageError
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes import torchgpipe

ESTIMATE = "analytic:h100"


class Three(nn.Module):
    """Three layers, with something between the first two and at the end."""

    def __init__(
        self, between: Callable[[Tensor], Any] = torch.relu, end: Callable[[Tensor], Any] = torch.relu
    ) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(10, 16), nn.Linear(16, 16), nn.Linear(16, 8)
        self.between, self.end = between, end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.c(torch.relu(self.b(self.between(self.a(x))))))


class Squeeze(nn.Module):
    """A layer that is called whole."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


def opaque() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 16), Squeeze(), nn.Linear(16, 8))


def profiled(model: nn.Module, sizes: tuple[int, ...] | None = None) -> Profile:
    return pplan.profile(model, torch.randn(4, 10), device=ESTIMATE, micro_batch_sizes=sizes)


def shares(plan: Plan) -> set[int]:
    return {-(-plan.micro_batch_size // stage.replicas) for stage in plan.stages}


DROPS = {
    "squeeze": lambda: Three(lambda x: x.squeeze()),
    "squeeze(0)": lambda: Three(lambda x: x.squeeze(0)),
    "output": lambda: Three(end=lambda x: x.squeeze()),
    "tuple": lambda: Three(end=lambda x: (x, x.sum(1, keepdim=True).squeeze())),
    "dict": lambda: Three(end=lambda x: {"logits": x.squeeze(), "norm": x.norm(dim=1)}),
    "whole": opaque,
}


@pytest.mark.parametrize("sizes", [None, (1, 2, 4)])
@pytest.mark.parametrize("kind", DROPS)
def test_a_size_that_drops_the_batch_dimension_is_left_out(kind: str, sizes: tuple[int, ...] | None) -> None:
    profile = profiled(DROPS[kind](), sizes)
    assert 1 not in profile.micro_batch_sizes
    assert [(each.micro_batch_size, each.reason) for each in profile.unmeasured] == [(1, "refused")]
    note = next(note for note in profile.notes if note.startswith("micro-batch size 1 is left out: layer "))
    assert note.split()[7] in [layer.name for layer in profile.layers]


@pytest.mark.parametrize("gpus", [2, 4])
def test_no_plan_has_a_refused_size(gpus: int) -> None:
    profile = profiled(DROPS["squeeze"]())
    for mini_batch, use_all in ((gpus, False), (2 * gpus, True), (12, True)):
        plan = pplan.solve(profile, gpus=gpus, mini_batch=mini_batch, memory_bytes=2**34, use_all=use_all)
        assert min(shares(plan)) > 1
    with pytest.raises(UsageError, match="need size 1, which is no size for this model: layer squeeze hands"):
        pplan.solve(profile, gpus=gpus, mini_batch=4, micro_batches=4, memory_bytes=2**34)


def test_a_model_that_only_a_refused_size_was_asked_of_is_refused() -> None:
    with pytest.raises(ModelError, match=r"layer squeeze hands on shape \(16,\) for 1 sample"):
        profiled(DROPS["squeeze"](), (1,))


@pytest.mark.parametrize(
    "between", [lambda x: x @ x.T @ x, lambda x: x * torch.ones(len(x), len(x)).sum()], ids=["@", "*"]
)
def test_what_stays_inside_a_layer_is_its_own(between: Callable[[Tensor], Any]) -> None:
    assert profiled(Three(between)).micro_batch_sizes[0] == 1


def test_sizes_that_depend_on_the_batch_are_refused() -> None:
    model = Three(end=lambda x: x @ x.T)
    what = r"layer .* hands on shape \(2, 2\) for 2 samples, and \(4, 4\) for 4 samples"
    with pytest.raises(ModelError, match=what):
        profiled(model)
    with pytest.warns(UserWarning, match="micro-batches compute something else than the batch: layer "):
        pplan.sequential(model, torch.randn(4, 10))


@pytest.mark.parametrize(
    "end",
    [
        lambda x: x.view(-1),
        lambda x: x.max(dim=1, keepdim=True).values,
        lambda x: x.sum(),
        lambda x: x.mean(0),
        lambda x: (x, x.sum()),
        lambda x: x.unsqueeze(0),
        lambda x: x.reshape(-1, 4),
        lambda x: x.T,
    ],
    ids=["view", "max", "scalar", "mean", "tuple", "unsqueeze", "reshape", "transposed"],
)
def test_legal_outputs_are_not_refused(end: Callable[[Tensor], Any]) -> None:
    profile = profiled(Three(end=end))
    assert profile.micro_batch_sizes[0] == 1
    assert not [note for note in profile.notes if "left out" in note]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pplan.sequential(Three(end=end), torch.randn(4, 10))


def test_runtimes_refuse_such_micro_batches() -> None:
    model, example = Three(), torch.randn(4, 10)
    plan = pplan.solve(
        profiled(model), gpus=2, mini_batch=4, micro_batches=4, memory_bytes=2**34, runtime="torchgpipe"
    )
    model.between = lambda x: x.squeeze()
    with pytest.warns(UserWarning, match="2 samples or more: layer squeeze hands on shape"):
        layers = pplan.sequential(model, example)
    with pytest.raises(ExportError, match="micro-batches of 1 samples a replica are not"):
        torchgpipe.build(plan, layers, example, devices=["cpu", "cpu"][: len(plan.stages)])
