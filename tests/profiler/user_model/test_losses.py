"""Losses against torch's own, on outputs of every form."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pplan.cost_models.errors import ModelError, UsageError
from pplan.profiler.losses import Loss, load_loss
from pplan.profiler.passes import OutputGradients


def named(name: str, seed: int = 0) -> Loss:
    loss = load_loss(name, seed)
    assert loss is not None
    return loss


def output(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()


def classes(shape: tuple[int, ...], count: int, seed: int) -> Tensor:
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def test_none_is_none() -> None:
    assert load_loss("none") is None


@pytest.mark.parametrize(
    ("shape", "targets", "count", "moved"),
    [
        ((4, 10), (4,), 10, False),
        ((2, 5, 7), (2, 5), 7, True),
        ((2, 3, 4, 5), (2, 4, 5), 3, False),
        ((2, 3, 4, 5, 6), (2, 4, 5, 6), 3, False),
    ],
)
def test_the_classes_lie_in_the_last_of_three_dimensions_else_in_the_second(
    shape: tuple[int, ...], targets: tuple[int, ...], count: int, moved: bool
) -> None:
    given = output(*shape)
    expected = functional.cross_entropy(
        given.movedim(-1, 1) if moved else given, classes(targets, count, seed=6)
    )
    assert torch.equal(named("cross-entropy", seed=5).of(given), expected)


def test_all_outputs_that_need_a_gradient_are_summed() -> None:
    main, auxiliary, constant = output(2, 4), output(2, 3), torch.ones(2, 4)
    loss = named("cross-entropy").of({"out": main, "aux": [auxiliary], "kept": constant, "names": ["a"]})
    each = [
        functional.cross_entropy(main, classes((2,), 4, seed=1)),
        functional.cross_entropy(auxiliary, classes((2,), 3, seed=2)),
    ]
    torch.testing.assert_close(loss, sum(each))
    loss.backward()  # type: ignore[no-untyped-call]
    assert main.grad is not None
    assert auxiliary.grad is not None


def test_losses_that_the_model_computed_are_added_as_they_are() -> None:
    made = {"box": torch.tensor(2.0, requires_grad=True), "class": torch.tensor(3.0, requires_grad=True)}
    assert named("cross-entropy").of(made).item() == 5
    assert named("mse").of(made).item() == 5


def test_mean_squares_against_unit_normal_values() -> None:
    given = output(3, 2, 2)
    target = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(1))
    assert torch.equal(named("mse").of(given), functional.mse_loss(given, target))


def test_targets_are_drawn_once_and_leave_the_callers_numbers_alone() -> None:
    state, loss = torch.get_rng_state(), named("cross-entropy")
    loss.prepare(output(4, 10))
    assert torch.equal(torch.get_rng_state(), state)
    made = loss._targets  # type: ignore[attr-defined]
    before = dict(made)
    loss.of(output(4, 10))
    assert list(made) == list(before)
    assert all(made[key] is before[key] for key in made)


@pytest.mark.parametrize("name", ["cross-entropy", "mse"])
def test_an_output_without_a_gradient_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match="needs no gradient"):
        named(name).of(torch.ones(2, 3))


def test_an_output_without_classes_is_refused() -> None:
    with pytest.raises(ModelError, match=r"dimension of classes.*shape \(4,\)") as caught:
        named("cross-entropy").prepare(output(4))
    assert "mse" in caught.value.hint


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "losses_of_mine.py").write_text(
        "def total(output):\n    return output['x'].sum()\n"
        "def vector(output):\n    return output['x']\n"
        "def nothing(output):\n    return None\n"
        "def flat(output):\n    return output['x'].sum().detach()\n"
        "def fails(output):\n    return output['y']\n"
        "class Kept:\n    two = staticmethod(lambda output: 2 * output['x'].sum())\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("losses_of_mine", None)


@pytest.mark.usefixtures("here")
def test_a_function_of_the_users_gets_the_models_output() -> None:
    loss = named("losses_of_mine:total")
    assert (loss.name, loss.of({"x": output(2, 2)}).dim()) == ("losses_of_mine:total", 0)
    given = {"x": output(2, 2)}
    assert named("losses_of_mine:Kept.two").of(given) == 2 * loss.of(given)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vector", r"returned a value of shape \(2, 2\)"),
        ("nothing", "returned a value of type NoneType"),
        ("flat", "needs no gradient"),
        ("fails", r"failed on the model's output: KeyError: 'y' \(losses_of_mine.py:\d+, in fails"),
    ],
)
def test_a_function_that_makes_no_loss(name: str, expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        named(f"losses_of_mine:{name}").of({"x": output(2, 2)})


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("crossentropy", UsageError, "loss 'crossentropy' is not known"),
        ("losses_of_mine:other", ModelError, "losses_of_mine has no 'other'"),
        ("no_such_losses:f", ModelError, "there is no module 'no_such_losses'"),
        ("losses_of_mine:number", ModelError, "is no function, but of type int"),
        ("losses_of_mine:Kept", ModelError, "is no function, but of type type"),
    ],
)
def test_losses_that_there_are_not(name: str, error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        load_loss(name)


def test_memory_that_runs_out_is_no_fault_of_the_loss() -> None:
    def refuses(output: Any) -> Tensor:  # noqa: ARG001
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        Loss("refuses", refuses).of(torch.ones(1))


def test_nothing_is_drawn_for_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("drawn")

    output = torch.ones(2, 3, 4, device="meta", requires_grad=True)
    scores = torch.ones(2, 3, requires_grad=True)
    for name in ("randn", "randint"):
        monkeypatch.setattr(torch, name, refused)
    for loss in (load_loss("mse"), load_loss("cross-entropy")):
        assert loss is not None
        loss.prepare(output)
        assert loss.of(output).device.type == "meta"
        with pytest.raises(AssertionError, match="drawn"):
            loss.prepare(scores)
    (tensor,), (start,) = OutputGradients(0).of(output)
    assert tensor is output
    assert (start.shape, start.dtype, start.device.type) == (output.shape, output.dtype, "meta")
    with pytest.raises(AssertionError, match="drawn"):
        OutputGradients(0).of(scores)


def test_targets_are_made_anew_and_the_same() -> None:
    loss, output = load_loss("mse", 7), torch.ones(2, 3, requires_grad=True)
    assert loss is not None
    other = loss.without_targets()
    assert other is not loss
    assert torch.equal(other.of(output), loss.of(output))
