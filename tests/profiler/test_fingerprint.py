"""The key of a profile: what changes it, and that nothing else does."""

from __future__ import annotations

import functools
import operator
import os
import re
import subprocess
import sys
from collections import deque, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.text_files import sha256
from pplan.profiler.cache import process_state
from pplan.profiler.clocks import clock_for
from pplan.profiler.fingerprint import fingerprint
from pplan.profiler.measure import profile_model
from pplan.profiler.models import from_module
from pplan.profiler.modes import Modes, Setup
from pplan.profiler.profile_options import ProfileOptions

CPU = torch.device("cpu")
SETUP = Setup(CPU, None, "block", (), "none", Modes(), 0, clock_for(CPU))


def key(module: nn.Module, example: object = None, loss: str = "none") -> str:
    loaded = from_module(module, torch.ones(2, 4) if example is None else example)
    return fingerprint(loaded, replace(SETUP, loss=loss))


def scaled(factor: float) -> Callable[[Any], Any]:
    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(module: nn.Module, given: Tensor) -> Any:
            return forward(module, given) * factor

        return wrapper

    return decorate


@contextmanager
def suppressing(times: int) -> Iterator[int]:
    yield times


class Config:
    width = 4
    sizes: object = ()

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


@dataclass(slots=True)
class Slotted:
    times: int
    inner: object = None


class Named(str):
    """A text with a setting."""

    def __new__(cls, text: str, times: int) -> Named:
        named = super().__new__(cls, text)
        named.times = times  # type: ignore[attr-defined]
        return named


class Halves(nn.Module):
    """A module in no other, with a setting."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner = nn.Dropout(factor)


Pair = namedtuple("Pair", "a b")
Couple = namedtuple("Couple", "a b")
HELD: dict[str, tuple[Any, Any]] = {
    "slots": (Slotted(1), Slotted(2)),
    "slots in slots": (Slotted(1, Slotted(1)), Slotted(1, Slotted(2))),
    "scalar of numpy": (np.int64(1), np.int64(2)),
    "array": (np.arange(5000), np.where(np.arange(5000) == 2500, 0, np.arange(5000))),
    "dtype of an array": (np.zeros(2, np.int32), np.zeros(2, np.float32)),
    "range": (range(3), range(4)),
    "slice": (slice(1, 2), slice(1, 3)),
    "deque": (deque([1, 2]), deque([1, 3])),
    "fraction": (Fraction(1, 2), Fraction(1, 3)),
    "bytes": (bytearray(b"a"), bytearray(b"b")),
    "method": (operator.methodcaller("exp"), operator.methodcaller("sin")),
    "pattern": (re.compile("a"), re.compile("b")),
    "function of torch": (torch.relu, torch.tanh),
    "Python module": (operator, functools),
    "whole numbers": (torch.arange(5000), torch.arange(5000).flip(0)),
    "truth": (torch.tensor([True, False]), torch.tensor([True, True])),
    "constants": (torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)),
    "dtype of nothing": (torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int64)),
    "within a long list": ([0] * 3000, [0] * 1500 + [1] + [0] * 1499),
    "within a long dictionary": (dict.fromkeys(range(3000), 0), dict.fromkeys(range(3000), 0) | {1500: 1}),
    "tuple or list": ((1, 2), [1, 2]),
    "named tuple": (Pair(1, 2), Couple(1, 2)),
    "text with a setting": (Named("a", 1), Named("a", 2)),
    "hexadecimal text": ("0x1f", "0x2f"),
    "text like an address": ("<f at 0x1f>", "<f at 0x2f>"),
    "module outside": ([Halves(0.1)], [Halves(0.2)]),
    "context that decorates": (suppressing(1)(print), suppressing(2)(print)),
    "function of torch, decorated": (scaled(1.0)(nn.Linear.forward), scaled(2.0)(nn.Linear.forward)),
}


def holding(value: object) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.held = value  # type: ignore[assignment]
    return module


@pytest.mark.parametrize("name", HELD)
def test_values_without_a_dictionary_count(name: str) -> None:
    first, second = HELD[name]
    assert key(holding(first)) == key(holding(first)) != key(holding(second))


def test_what_tells_nothing_about_itself_has_no_key() -> None:
    begun = (number for number in (1, 2))
    next(begun)
    for opaque in (begun, memoryview(b"a")):
        with pytest.raises(TypeError, match="cannot pickle"):
            key(holding(opaque))


def test_objects_of_factories_are_told_apart() -> None:
    """Classes and empty cells that have the same names."""

    def made(first: object, second: object) -> Any:
        class Local:
            held = first

        return Local, lambda: (first, second)

    (one, _), (other, _) = made(1, 0), made(2, 0)
    assert key(holding([one, other, one])) != key(holding([one, other, other]))
    assert key(holding(made(None, 1)[1])) != key(holding(made(1, None)[1]))


def test_values_of_weights_do_not_count_wherever_they_are_held() -> None:
    def tied() -> nn.Module:
        linear = nn.Linear(4, 4)
        linear.register_buffer("scale", torch.rand(4))
        return nn.Sequential(linear, holding([linear.weight, linear.scale, linear, nn.Linear(4, 4)]))

    assert key(tied()) == key(tied())


class Told(nn.Linear):
    number = "0x1f"

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.marker = object()

    def extra_repr(self) -> str:
        return f"{self.marker} {self.number}"


def test_addresses_in_texts_of_modules_do_not_count() -> None:
    first, second = Told(), Told()
    assert first.extra_repr() != second.extra_repr()
    assert key(first) == key(second)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(weight=torch.ones(4)),
        nn.Sequential(nn.CrossEntropyLoss()),
        nn.Sequential(nn.CrossEntropyLoss(reduction="sum")),
    ],
)
def test_settings_of_a_loss_that_is_a_module_count(loss: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = []
    for each in (nn.CrossEntropyLoss(), nn.Sequential(nn.CrossEntropyLoss(reduction="none")), loss, loss):
        monkeypatch.setattr(sys.modules[__name__], "chosen_loss", each, raising=False)
        keys.append(key(nn.Linear(4, 4), loss=f"{__name__}:chosen_loss"))
    assert (len(set(keys)), keys[2]) == (3, keys[3])


def test_the_file_of_a_named_loss_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    keys = []
    for end in ("", "", "other = 1\n"):
        (tmp_path / "own_loss.py").write_text(f"import torch\nloss = torch.sum\n{end}")
        sys.modules.pop("own_loss", None)
        keys.append(key(nn.Linear(4, 4), loss="own_loss:loss"))
    assert (keys[0] == keys[1], keys[0] == keys[2]) == (True, False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cuda.matmul.fp32_precision", "tf32"),
        ("cudnn.conv.fp32_precision", "ieee"),
        ("cudnn.rnn.fp32_precision", "ieee"),
        ("mkldnn.matmul.fp32_precision", "bf16"),
        ("mkldnn.conv.fp32_precision", "bf16"),
        ("cuda.matmul.allow_fp16_reduced_precision_reduction", False),
        ("cuda.matmul.allow_bf16_reduced_precision_reduction", False),
    ],
)
def test_precisions_of_the_process_count(name: str, value: object) -> None:
    path, _, attribute = name.rpartition(".")
    place = operator.attrgetter(path)(torch.backends)
    before, state = getattr(place, attribute), process_state()
    setattr(place, attribute, value)
    try:
        changed = process_state()
    finally:
        setattr(place, attribute, before)
    assert changed != state == process_state()


@pytest.mark.parametrize(
    ("target", "name", "value"),
    [
        (Config, "width", 5),
        (Config, "sizes", (1, 2)),
        (Config, "sizes", [1, 2]),
        (Config, "sizes", {"of": {1: (2,)}}),
        (Net, "forward", scaled(4.0)(Net.forward.__wrapped__)),
        (Net, "forward", nn.Identity.forward),
        (Net, "doubled", property(lambda _: 3)),
        (nn.Linear, "forward", lambda _, given: given),
        (nn.Linear, "forward", scaled(2.0)(nn.Linear.forward)),
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
