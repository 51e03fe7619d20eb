"""The key of a profile: what changes it, and that nothing else does."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.text_files import sha256
from pplan.profiler.clocks import clock_for
from pplan.profiler.fingerprint import fingerprint
from pplan.profiler.measure import profile_model
from pplan.profiler.measurement_target import Setup
from pplan.profiler.models import from_module
from pplan.profiler.modes import Modes
from pplan.profiler.profile_options import ProfileOptions

CPU = torch.device("cpu")
SETUP = Setup(CPU, None, "block", (), "none", Modes(), 0, clock_for(CPU))


def key(module: nn.Module, example: object = None) -> str:
    return fingerprint(from_module(module, torch.ones(2, 4) if example is None else example), SETUP)


def scaled(factor: float) -> Callable[[Any], Any]:
    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(module: nn.Module, given: Tensor) -> Any:
            return forward(module, given) * factor

        return wrapper

    return decorate


class Config:
    width = 4

    def __init__(self) -> None:
        self.times = 1


class Net(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = Config()
        self.function = functools.partial(torch.add, alpha=factor)
        self.sizes: list[Any] = [1, (2,)]
        self.closure = lambda given: given * factor

    @scaled(3.0)
    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.linear(given)
        return result.exp() if os.environ.get("PPLAN_TEST_EXP") else result

    @property
    def doubled(self) -> int:
        return 2


class Circular(nn.Module):
    """Holds itself, and what holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.parent = [self]
        self.circle: list[Any] = []
        self.circle.append(self.circle)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.linear(given)
        return result


CHANGES: dict[str, Callable[[Net], object]] = {
    "attribute of a configuration": lambda net: setattr(net.config, "times", 2),
    "list in a list": lambda net: net.sizes.__setitem__(1, (3,)),
    "closure": lambda net: setattr(net, "closure", Net(2.0).closure),
    "partial": lambda net: setattr(net, "function", functools.partial(torch.add, alpha=2.0)),
    "forward of the instance": lambda net: setattr(net, "forward", lambda given: given),
    "hook": lambda net: net.linear.register_forward_hook(lambda *_: None),
    "mode": lambda net: net.eval(),
    "mode of a part": lambda net: net.linear.eval(),
    "frozen": lambda net: net.linear.weight.requires_grad_(False),
    "buffer of numbers": lambda net: net.register_buffer("numbers", torch.tensor([1, 2])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_model_holds_counts(name: str) -> None:
    assert key(Net()) == key(Net())
    changed = Net()
    CHANGES[name](changed)
    assert key(changed) != key(Net())


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (Config, "width", 5),
        (Net, "forward", scaled(4.0)(Net.forward.__wrapped__)),
        (Net, "forward", nn.Identity.forward),
        (Net, "doubled", property(lambda _: 3)),
        (nn.Linear, "forward", lambda _, given: given),
    ],
)
def test_what_its_classes_hold_counts(
    target: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(Net())
    monkeypatch.setattr(target, name, value)
    assert key(Net()) != before


def test_variables_that_its_files_name_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Net())
    monkeypatch.setenv("A_VARIABLE_OF_NOBODY" + "_ELSE", "1")
    assert key(Net()) == before
    monkeypatch.setenv("PPLAN_TEST_EXP", "1")
    assert key(Net()) != before


def test_shared_modules_and_tensors_are_told_from_equal_ones() -> None:
    def pair() -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    shared, tied, overlapping = pair(), pair(), pair()
    shared[1] = shared[0]
    tied[1].weight = tied[0].weight
    overlapping[1].weight.data = overlapping[0].weight.data
    assert len({key(each) for each in (pair(), shared, tied, overlapping)}) == 4


def test_objects_in_circles_have_a_key() -> None:
    assert key(Circular()) == key(Circular()) != key(Net())


def test_a_model_that_cannot_be_described_is_measured_and_not_kept(own_cache: Any) -> None:
    class Odd:
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            raise RuntimeError("not today")

    model, said = nn.Sequential(nn.Linear(4, 4)), list[str]()
    model.odd = Odd()  # type: ignore[assignment]
    options = ProfileOptions(micro_batch_sizes=[1], cache=True, device="cpu")
    assert profile_model((model, torch.ones(2, 4)), options, rounds=1, remark=said.append).layers
    assert said == ["Nothing is kept for a later run: the model cannot be described: RuntimeError: not today"]
    assert not list(own_cache.iterdir())


TYPED = """
import torch
from torch import nn
from tests.profiler.test_fingerprint import key
def helper(given):
    return given * FACTOR
class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, given):
        return helper(self.linear(given))
print(key(Typed()))
"""
CONFIGURED = """
import torch
import transformers
from tests.profiler.test_fingerprint import key
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=64))
print(key(model, torch.ones(2, 8, dtype=torch.long)))
"""


def key_of(text: str, seed: int) -> str:
    """What a new interpreter prints that is given the text."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    ran = subprocess.run(
        [sys.executable, "-"], input=text, capture_output=True, text=True, check=True, env=environment
    )
    return ran.stdout


@pytest.mark.slow
def test_code_that_was_typed_into_an_interpreter_counts() -> None:
    keys = [key_of(TYPED.replace("FACTOR", factor), 1) for factor in ("2", "2", "3")]
    assert (keys[0] == keys[1], keys[0] == keys[2]) == (True, False)


@pytest.mark.slow
def test_a_configured_model_has_the_same_key_in_every_process() -> None:
    pytest.importorskip("transformers")
    assert key_of(CONFIGURED, 1) == key_of(CONFIGURED, 2)
    assert len(key_of(CONFIGURED, 3).strip()) == len(sha256(""))
