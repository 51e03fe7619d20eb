"""The training object in one process: what it refuses, state dicts, checkpoints, autocast, batch norms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined,unused-ignore]  # public, not exported
from torch.nn.functional import cross_entropy

from pplan.cost_models.errors import ExportError, FileError, UsageError
from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export
from pplan.runtimes.pipelining.training import Training
from pplan.runtimes.training import build

MakePlan = Callable[..., Plan]
Start = Callable[..., Training]
SGD = partial(torch.optim.SGD, lr=0.1)


def network(width: int = 8, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm2d(width) if norm else nn.Tanh()
    return nn.Sequential(nn.Conv2d(3, width, 3), middle, nn.Conv2d(width, 5, 2), nn.Flatten())


def images(samples: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, 4, 4, generator=random), torch.randint(5, (samples,), generator=random)


@pytest.fixture(params=["torchgpipe", "fairscale"])
def start(make_plan: MakePlan, request: pytest.FixtureRequest) -> Iterator[Start]:
    """A training of two stages in this process."""
    pytest.importorskip(request.param)
    plan = make_plan([2, 2], micro_batches=4, micro_batch_size=2, recompute="except_last")
    document: Any = export(request.param, plan, device="cpu")[0]
    trainings: list[Training] = []

    def run(model: nn.Module, loss_fn: Any = cross_entropy, **options: Any) -> Training:
        trainings.append(build(document, model, loss_fn, images(2)[0], optimizer=SGD, **options))
        return trainings[-1]

    yield run
    for training in trainings:
        training.close()


@pytest.fixture
def one_stage(make_plan: MakePlan) -> Iterator[Start]:
    """A training of one stage by torch.distributed.pipelining, in a group of one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    plan = make_plan([4], schedule="1f1b", micro_batches=4, micro_batch_size=2)
    document: Any = export("torch", plan)[0]

    def run(model: nn.Module, loss_fn: Any = cross_entropy, **options: Any) -> Training:
        return build(document, model, loss_fn, images(2)[0], device="cpu", **options)

    yield run
    gc.collect()
    dist.destroy_process_group()


def tied() -> nn.Sequential:
    """The head's weight is the embedding's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 11, bias=False))
    model[3].weight = model[0].weight
    return model


@pytest.fixture
def two_stages(make_plan: MakePlan) -> Iterator[Start]:
    """A training of two stages that take turns in one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    plan = make_plan([2, 2], schedule="interleaved", virtual_stages=2, micro_batches=4)
    here = [stage.model_copy(update={"devices": [0]}) for stage in plan.stages]
    document: Any = export("torch", plan.model_copy(update={"stages": here}))[0]

    def run(model: nn.Module, **options: Any) -> Training:
        return build(document, model, cross_entropy, torch.arange(2), device="cpu", **options)

    yield run
    gc.collect()
    dist.destroy_process_group()


def test_every_copy_of_a_shared_weight_is_loaded_and_goes_on(two_stages: Start, tmp_path: Path) -> None:
    """As the plain model does, that trained twice as long."""
    adam = partial(torch.optim.AdamW, lr=0.1)
    inputs, labels, plain = torch.arange(8), torch.arange(8).roll(3), tied()
    optimizer, trainings = adam(plain.parameters()), [two_stages(tied(), optimizer=adam) for _ in range(2)]
    for step in range(6):
        training = trainings[step // 3]
        if step == 3:
            trainings[0].save(tmp_path / "ckpt", step=step)
            training.load(tmp_path / "ckpt")
        training.step(inputs, labels)
        training.optimizer.step()
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(plain(inputs), labels))
        optimizer.step()
    copies = [own for name, own in training.named_parameters() if name == "0.weight"]
    assert len(copies) == 2
    for copy in copies:
        torch.testing.assert_close(copy, plain[0].weight)
        assert training.optimizer.state[copy]["step"] == 6


def test_a_scaler_marks_an_overflow_in_channels_last(two_stages: Start) -> None:
    training = two_stages(tied())
    training.groups = replace(training.groups, pipeline=dist.group.WORLD)
    for parameter in training.parameters():
        parameter.data = torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last)
        parameter.grad = torch.ones_like(parameter)
    last = training.parameters()[-1]
    assert last.grad is not None
    assert not last.grad.is_contiguous()
    last.grad[0, 0, 0, 0] = float("nan")
    training._share_overflow()
    assert not training.parameters()[0].grad.isfinite().all()  # type: ignore[union-attr]


def test_a_checkpoint_of_another_model_is_refused_with_both_names(start: Start, tmp_path: Path) -> None:
    class Wide(nn.Sequential):
        pass

    start(network()).save(tmp_path / "ckpt", step=1)
    with pytest.raises(FileError, match=r"is of Sequential \(\w{12}\), the plan trains Wide \(\w{12}\)"):
        start(Wide(*network(width=9))).load(tmp_path / "ckpt")
    with pytest.raises(FileError, match="no checkpoint is there"):
        start(network()).load(tmp_path / "other")


def test_a_checkpoint_is_replaced_and_gives_weights_and_progress_back(start: Start, tmp_path: Path) -> None:
    first = start(network())
    for step in range(2):
        first.step(*images())
        first.optimizer.step()
        first.save(tmp_path / "ckpt", step=step, note=["kept"])
    second = start(network())
    assert second.load(tmp_path / "ckpt") == {"step": 1, "note": ["kept"]}
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    for name, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[name], value)


def test_state_dicts_have_the_models_names(start: Start) -> None:
    training, other = start(network()), network()
    other.load_state_dict(training.state_dict())
    nn.init.ones_(other[0].weight)  # type: ignore[arg-type]
    training.load_state_dict(other.state_dict())
    assert torch.equal(training.eval(images()[0]), other(images()[0]))
    assert [name for name, _ in training.named_parameters()] == [name for name, _ in other.named_parameters()]
    with pytest.raises(UsageError, match=r"0\.bias is \(9,\), the model's is \(8,\)"):
        training.load_state_dict(network(width=9).state_dict())
    with pytest.raises(UsageError, match=r"0\.bias is not there, the model's is"):
        training.load_state_dict({})


def test_an_autocast_around_a_step_reaches_the_workers(start: Start) -> None:
    training, plain, (inputs, labels) = start(network()), network(), images()
    with torch.autocast("cpu", torch.bfloat16):
        loss = training.step(inputs, labels)
        expected = cross_entropy(plain(inputs), labels)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    exact = training.step(inputs, labels)
    assert exact.item() == pytest.approx(cross_entropy(plain(inputs), labels).item(), abs=1e-6)
    assert exact.item() != loss.item()


def test_deferred_batch_norms_have_the_statistics_of_whole_batches(start: Start) -> None:
    training, plain = start(network(norm=True), deferred_batch_norm=True), network(norm=True)
    for samples in (8, 5):  # of five samples, three micro-batches
        training.step(*images(samples))
        plain(images(samples)[0])
    names = [name for name in plain.state_dict() if name.endswith(("mean", "tracked"))]
    assert len(names) == 2
    for name in names:
        torch.testing.assert_close(training.state_dict()[name], plain.state_dict()[name])


def test_what_is_refused(start: Start) -> None:
    training = start(network())
    with pytest.raises(UsageError, match="the batch holds 9 samples, the plan's 8"):
        training.step(*images(9))
    with pytest.raises(UsageError, match="divisor=3 with loss_reduction='mean'"):
        training.step(*images(), divisor=3)
    with pytest.raises(UsageError, match="loss_reduction='none' is unknown"):
        start(network(), loss_reduction="none")
    with pytest.raises(UsageError, match="divisor=0 with loss_reduction='sum'"):
        start(network(), loss_reduction="sum").step(*images(), divisor=0)


class OwnLoss(nn.Module):
    """Returns its loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()[:3]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x)
        return logits, logits.square().mean()


def test_pipes_say_what_to_change_in_a_model_that_returns_its_loss(start: Start) -> None:
    with pytest.raises(ExportError, match=r"(?s)a scalar.*(loss outside|logits)"):
        start(OwnLoss(), None)


def test_a_micro_batch_without_labels_is_no_nan(one_stage: Start) -> None:
    """Also where the loss is a mean; with a sum it is the plain model's."""
    inputs, labels = images()
    labels[:3] = -100
    loss = one_stage(network()).step(inputs, labels)
    assert loss.isfinite()
    by_sum = one_stage(network(), partial(cross_entropy, reduction="sum"), loss_reduction="sum")
    plain = cross_entropy(network()(inputs), labels)
    assert by_sum.step(inputs, labels, divisor=(labels != -100).sum()).item() == pytest.approx(plain.item())


def test_a_loss_that_diverged_is_a_nan(one_stage: Start) -> None:
    inputs, labels = images()
    inputs[0] = float("nan")
    assert one_stage(network()).step(inputs, labels).isnan()


def test_the_mode_of_the_model_is_kept(one_stage: Start) -> None:
    model = network(norm=True)
    model[1].eval()
    training = one_stage(model)
    training.eval(images(3)[0])
    assert [part.training for part in model] == [True, False, True, True]
