"""Batches of several tensors: `share`, `step` and `eval` take any structure of them, or refuse it."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pplan.cost_models.errors import UsageError
from pplan.planner.plan_file import Plan
from pplan.profiler.layers import sequential
from pplan.runtimes.pipelining.process import PipelineProcess
from pplan.runtimes.torch_pipelining import build

MakePlan = Callable[..., Plan]
Start = Callable[[Any], tuple[PipelineProcess, nn.Module]]
SAMPLES = 4


class Several(nn.Module):
    """Tokens, a mask in a list, a table that all samples share, and an argument that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor, masks: list[Tensor], table: Tensor, twice: bool = False) -> Tensor:
        x = self.embedding(tokens) * masks[0][..., None] + table
        logits: Tensor = self.head(torch.relu(self.inner(x)) * (2 if twice else 1))
        return logits


def batch(samples: int = SAMPLES) -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "tokens": torch.randint(11, (samples, 7)),
        "masks": [torch.randint(2, (samples, 7)).double()],
        "table": torch.randn(7, 6).double(),
    }


def target(samples: int = SAMPLES) -> dict[str, Any]:
    torch.manual_seed(2)
    return {
        "values": torch.randn(samples, 7, 3).double(),
        "more": (torch.rand(samples, 1, 1).double(), [None]),
    }


def loss_of(output: Tensor, wanted: Any) -> Tensor:
    weight, rest = wanted["more"]
    assert rest == [None]
    return mse_loss(output * weight, wanted["values"] * weight)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("processes") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def start(one_process: None, make_plan: MakePlan) -> Start:  # noqa: ARG001
    """Makes a process that runs two stages, two samples at a time, from an example; and the plain model."""

    def make(example: Any) -> tuple[PipelineProcess, nn.Module]:
        torch.manual_seed(3)
        model, plain = Several().double(), Several().double()
        plain.load_state_dict(model.state_dict())
        names = list(sequential(model, example).layer_names)
        plan = make_plan(
            [2, len(names) - 2], layer_names=names, schedule="interleaved", virtual_stages=2, micro_batches=2
        )
        for stage in plan.stages:
            stage.devices[:] = [0]
        return build(plan, model, example_input=example, loss_fn=loss_of, device="cpu"), plain

    return make


@pytest.fixture(scope="module")
def process(start: Start) -> PipelineProcess:
    """For tests that train nothing."""
    return start(batch(3))[0]


def train_plainly(plain: nn.Module, given: dict[str, Any], wanted: dict[str, Any]) -> list[float]:
    """The losses of two micro-batches; the gradients are those of their mean."""
    losses = []
    for rows in (slice(0, 2), slice(2, 4)):
        weight = wanted["more"][0][rows]
        output = plain(given["tokens"][rows], [given["masks"][0][rows]], given["table"])
        loss = mse_loss(output * weight, wanted["values"][rows] * weight)
        torch.autograd.backward(loss / 2)
        losses.append(loss.item())
    return losses


def gradients(modules: list[nn.Module]) -> list[Tensor]:
    """All gradients, in the order of their sizes."""
    parameters = [own for module in modules for own in module.parameters()]
    assert all(own.grad is not None for own in parameters)
    found = [own.grad.clone() for own in parameters if own.grad is not None]
    return sorted(found, key=lambda own: (own.shape, own.norm().item()))


@pytest.mark.parametrize("form", ["dict", "tuple", "mapping", "another order"])
def test_nested_inputs_and_targets_train_as_the_plain_model(start: Start, form: str) -> None:
    """Losses and gradients of `step`, and the losses of `eval`."""
    given, wanted = batch(), target()
    inputs: Any = {
        "dict": given,
        "tuple": tuple(given.values()),
        "mapping": UserDict(given),
        "another order": dict(reversed(given.items())),
    }[form]
    example = batch(3)
    process, plain = start(tuple(example.values()) if form == "tuple" else example)
    expected = train_plainly(plain, given, wanted)
    losses = process.step(process.share(inputs), process.share(wanted))
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-12)
    trained = gradients(list(process.modules.values()))
    for own, other in zip(trained, gradients([plain]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-14)
    evaluated = process.eval(process.share(inputs), process.share(wanted))
    assert [loss.item() for loss in evaluated] == pytest.approx(expected, rel=1e-12)
    assert all(map(torch.equal, trained, gradients(list(process.modules.values()))))


def changed(**keys: Any) -> dict[str, Any]:
    return batch() | keys


TABLE = torch.zeros(7, 6).double()


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (changed(masks=[np.ones((4, 7))]), r"batch's \['masks'\]\[0\] is of type ndarray, which is not supp"),
        (
            changed(tokens=[1, 2, 3, 4], masks=[]),
            r"the global batch's \['table'\] holds 7 samples",
        ),
        (changed(masks=[{1, 2}]), r"\['masks'\]\[0\] is of type set"),
        ([1, 2, 3, 4], "the global batch is of type list and holds no tensor"),
        (np.ones((4, 7)), "the global batch is of type ndarray and holds no tensor"),
        (None, "the global batch is of type NoneType and holds no tensor"),
        (torch.zeros(3, 7), "the global batch holds 3 samples, the plan's holds 4"),
        (torch.zeros(8, 7), "the global batch holds 8 samples, the plan's holds 4"),
        (torch.tensor(1.0), "the global batch holds 0 samples"),
    ],
)
def test_what_cannot_be_shared_out_is_named(process: PipelineProcess, inputs: Any, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        process.share(inputs)


@pytest.mark.parametrize("run", ["step", "eval"])
@pytest.mark.parametrize(
    ("inputs", "wanted", "what"),
    [
        ({"tokens": batch()["tokens"], "table": TABLE}, target(), r"the input lacks \['masks'\]\[0\], which"),
        (
            changed(masks=[None]),
            target(),
            r"\['masks'\]\[0\] is of type NoneType, in the example",
        ),
        (changed(twice=True), target(), r"\['twice'\] is True, in the example input it is not there"),
        (changed(other=TABLE), target(), r"\['other'\] is a tensor, in the example input it is not there"),
        (batch(), None, "the target is of type NoneType and holds no tensor"),
        (batch(), [1, 2, 3, 4], "the target is of type list and holds no tensor"),
        (batch(), target() | {"names": ["a"]}, r"the target's \['names'\]\[0\] is of type str, which is not"),
        (
            batch(),
            {"values": torch.zeros(3, 7, 3)},
            r"the target's \['values'\] holds 3 samples, a step of this",
        ),
    ],
)
def test_what_cannot_be_trained_on_is_named(
    process: PipelineProcess, run: str, inputs: Any, wanted: Any, what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        getattr(process, run)(inputs, wanted)


def test_a_smaller_last_batch_is_refused_with_advice(process: PipelineProcess) -> None:
    with pytest.raises(UsageError, match=r"\['tokens'\] holds 3 samples, the plan's holds 4") as caught:
        process.share(batch(3))
    assert "drop_last=True" in caught.value.hint
    with pytest.raises(UsageError, match=r"\['tokens'\] holds 2 samples, a step of this process") as caught:
        process.step(batch(2), target())
    assert "drop_last=True" in caught.value.hint
    with pytest.raises(UsageError, match="holds 8 samples, a step of this process takes 4") as caught:
        process.step(batch(8), target())
    assert "`share` picks them" in caught.value.hint


def test_a_replica_has_its_part_of_every_micro_batch(process: PipelineProcess) -> None:
    document = process.document.model_copy(update={"replicas": 2})
    replica: Any = SimpleNamespace(replica=1)
    second = dataclasses.replace(process, document=document, coordinates=replica)
    own = second.share(changed(twice=False))
    assert list(own) == ["tokens", "masks", "table", "twice"]
    assert torch.equal(own["tokens"], batch()["tokens"][[1, 3]])
    assert torch.equal(own["masks"][0], batch()["masks"][0][[1, 3]])
    assert torch.equal(own["table"], batch()["table"])
    assert own["twice"] is False
    labels = second.share((torch.arange(4), [{"weight": torch.arange(4) * 2}, None]))
    assert (labels[0].tolist(), labels[1][0]["weight"].tolist(), labels[1][1]) == ([1, 3], [2, 6], None)
