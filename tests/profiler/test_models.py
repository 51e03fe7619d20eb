"""Names and factories: what becomes a model, and what each wrong one is told."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError, UsageError
from pplan.profiler.models import from_module, load_model

_numbers = itertools.count()


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module of its own in the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])

    def write(text: str) -> str:
        name = f"users_model_{next(_numbers)}"
        (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + text, encoding="utf-8")
        return name

    return write


def test_torchvision_model_is_the_one_torch_builds_under_the_seed() -> None:
    loaded = load_model("squeezenet1_1", classes=7, seed=3)
    torch.manual_seed(3)
    same = torchvision.models.squeezenet1_1(weights=None, num_classes=7)
    assert [p.shape for p in loaded.module.parameters()] == [p.shape for p in same.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(loaded.module.parameters(), same.parameters(), strict=True))
    assert (loaded.name, loaded.classes, loaded.input_shape) == ("squeezenet1_1", 7, (3, 224, 224))
    assert loaded.module.training


def test_loading_leaves_the_random_state_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    load_model("squeezenet1_1", seed=5).example_input_for(2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("inception_v3", (3, 299, 299)), ("efficientnet_b2", (3, 288, 288)), ("r3d_18", (3, 16, 112, 112))],
)
def test_default_input_is_the_models_own(name: str, shape: tuple[int, ...]) -> None:
    assert load_model(name, classes=2).input_shape == shape


def test_example_inputs_repeat_and_have_the_shape_asked_for() -> None:
    loaded = load_model("squeezenet1_1", input_shape=(3, 64, 48))
    (given,) = loaded.example_input_for(5).tensors
    assert given.shape == (5, 3, 64, 48)
    assert torch.equal(given, loaded.example_input_for(5).tensors[0])


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        load_model("vgg91")
    assert "'vgg91'" in caught.value.what
    assert "vgg19" in caught.value.hint


def test_factory_with_a_module(factory: Callable[[str], str]) -> None:
    name = factory("def build():\n    return nn.Linear(4, 2)\n")
    loaded = load_model(f"{name}:build", input_shape=(4,), seed=9)
    torch.manual_seed(9)
    assert torch.equal(loaded.module.weight, nn.Linear(4, 2).weight)  # type: ignore[arg-type]
    assert loaded.input_shape == (4,)


def test_factory_with_an_example_input(factory: Callable[[str], str]) -> None:
    name = factory(
        "def build():\n    return nn.Embedding(9, 2), torch.tensor([[1, 2, 3], [4, 5, 6]])\n",
    )
    loaded = load_model(f"{name}:build")
    assert loaded.input_shape == (3,)
    (given,) = loaded.example_input_for(3).tensors
    assert given.tolist() == [[1, 2, 3], [4, 5, 6], [1, 2, 3]]
    assert given.dtype == torch.int64


def test_a_name_may_lead_into_a_class_or_to_a_module_itself(factory: Callable[[str], str]) -> None:
    name = factory(
        "class Models:\n    @staticmethod\n    def small():\n        return nn.Linear(1, 1)\n"
        "ready = nn.ReLU()\n"
    )
    assert isinstance(load_model(f"{name}:Models.small").module, nn.Linear)
    assert isinstance(load_model(f"{name}:ready").module, nn.ReLU)


@pytest.mark.parametrize(
    ("body", "attribute", "expected"),
    [
        ("def build():\n    return 3\n", "build", "returned an object of type int"),
        ("def build():\n    return None\n", "build", "returned None"),
        ("def build():\n    return nn.ReLU(), 1, 2\n", "build", "returned a tuple of ReLU, int, int"),
        ("def build():\n    return nn.ReLU(), 'x'\n", "build", "example input is an object of type str"),
        ("def build():\n    return nn.ReLU(), torch.ones(())\n", "build", "holds no sample"),
        ("build = 3\n", "build", "which cannot be called"),
        ("def builds():\n    return nn.ReLU()\n", "build", "has no 'build'"),
        ("def build(width):\n    return nn.ReLU()\n", "build", "missing 1 required positional argument"),
    ],
)
def test_wrong_factories(factory: Callable[[str], str], body: str, attribute: str, expected: str) -> None:
    name = factory(body)
    with pytest.raises(ModelError, match=expected) as caught:
        load_model(f"{name}:{attribute}")
    assert caught.value.hint


def test_a_factory_that_raises_is_told_its_own_line(factory: Callable[[str], str]) -> None:
    name = factory("def inner():\n    return nn.Linear('a', 2)\ndef build():\n    return inner()\n")
    with pytest.raises(ModelError) as caught:
        load_model(f"{name}:build")
    assert f"{name}.py:4, in inner: return nn.Linear('a', 2)" in caught.value.what
    assert "TypeError" in caught.value.what


def test_a_module_that_raises_or_does_not_parse(factory: Callable[[str], str]) -> None:
    raising = factory("x = 1\nraise ValueError('not today')\n")
    with pytest.raises(ModelError, match=r"ValueError: not today .*py:4"):
        load_model(f"{raising}:build")
    broken = factory("def build(:\n    pass\n")
    with pytest.raises(ModelError, match=rf"SyntaxError.*{broken}.py:3: def build\(:"):
        load_model(f"{broken}:build")
    leaving = factory("raise SystemExit(4)\n")
    with pytest.raises(ModelError, match="SystemExit: 4"):
        load_model(f"{leaving}:build")


def test_a_missing_module_and_a_module_that_misses_one(factory: Callable[[str], str]) -> None:
    with pytest.raises(ModelError, match="there is no module 'surely_not_here'"):
        load_model("surely_not_here.models:build")
    name = factory("import surely_not_here\n")
    with pytest.raises(ModelError, match=f"importing {name} failed: ModuleNotFoundError"):
        load_model(f"{name}:build")


@pytest.mark.parametrize("name", [":build", "module:"])
def test_half_a_name(name: str) -> None:
    with pytest.raises(ModelError, match="around the colon"):
        load_model(name)


def test_classes_are_not_for_factories() -> None:
    with pytest.raises(UsageError, match="classes=10"):
        load_model("a:b", classes=10)


@pytest.mark.parametrize("classes", [0, -1, 2.0, True, "10"])
def test_classes_are_a_positive_whole_number(classes: Any) -> None:
    with pytest.raises(UsageError, match=f"classes {classes!r}"):
        load_model("vgg11", classes=classes)


@pytest.mark.parametrize("shape", ["3x64x64", (), (3, 0, 4), (3, 2.5), 3, [True]])
def test_an_input_shape_is_positive_whole_numbers(shape: Any) -> None:
    with pytest.raises(UsageError, match="input_shape") as caught:
        load_model("vgg11", input_shape=shape)
    assert repr(shape) in caught.value.what


def test_numpys_numbers_are_numbers() -> None:
    classes: Any = np.int64(2)
    shape: Any = np.array([3, 32, 32])
    loaded = load_model("squeezenet1_1", classes=classes, input_shape=shape)
    assert (loaded.classes, loaded.input_shape) == (2, (3, 32, 32))
    assert {type(side) for side in loaded.input_shape} == {int}


def test_a_module_without_its_factory(factory: Callable[[str], str], tmp_path: Path) -> None:
    name = factory(
        "raise SystemExit\ndef _hidden(): pass\ndef build(): pass\nclass Net: pass\nready = nn.ReLU()\n"
    )
    with pytest.raises(ModelError, match=rf"'{name}': this is a module .*{name}.py\)") as caught:
        load_model(name)
    assert caught.value.hint == f"Name the factory too, as in {name}:build. It has build, Net."
    bare = factory("")
    with pytest.raises(ModelError) as caught:
        load_model(bare)
    assert caught.value.hint == f"Name the factory too, as in {bare}:FACTORY."
    (tmp_path / "vgg91").mkdir()
    with pytest.raises(ModelError, match="torchvision has no model of this name"):
        load_model("vgg91")


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("../mm.py:plain", "mm:plain (run pplan in the folder ..)."),
        ("/some/where/mm.py:plain", "mm:plain (run pplan in the folder /some/where)."),
        ("./nets/mm.py:plain", "nets.mm:plain."),
        ("mm.py:plain", "mm:plain."),
        ("nets/mm.py", "nets.mm:FACTORY."),
        ("mm.py", "mm:FACTORY."),
    ],
)
def test_a_path_is_no_module(factory: Callable[[str], str], tmp_path: Path, name: str, named: str) -> None:
    factory("")
    (tmp_path / "mm.py").write_text("raise SystemExit(1)")
    with pytest.raises(ModelError, match="path") as caught:
        load_model(name)
    assert "importable dotted name" in caught.value.hint
    assert named in caught.value.hint
    assert "python -c" not in caught.value.hint


def test_from_module_checks_what_it_gets() -> None:
    loaded = from_module(nn.Linear(3, 1), torch.ones(2, 3, dtype=torch.float64))
    assert (loaded.name, loaded.input_shape, loaded.example.batch) == ("Linear", (3,), 2)
    with pytest.raises(ModelError, match="the model is a int"):
        from_module(3, torch.ones(1))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="holds no sample"):
        from_module(nn.ReLU(), Tensor(0, 3))


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "3"])
def test_seeds_are_what_torch_and_the_file_can_hold(seed: Any) -> None:
    with pytest.raises(UsageError, match="seed") as caught:
        load_model("squeezenet1_1", seed=seed)
    assert repr(seed) in caught.value.what


def test_the_largest_seed_is_one() -> None:
    assert load_model("squeezenet1_1", seed=2**63 - 1, classes=2).classes == 2


BATCHES = """
def tensor(): return torch.ones(3, 3, 64, 64)
def pair(): return torch.ones(4, 8), torch.full((4, 8), 2.0)
def keywords(): return {"y": torch.ones(2, 8), "x": torch.zeros(2, 8)}
def noise(): return torch.randn(3, 8)
def patches(): return {"inputs_embeds": torch.ones(2, 5, 32)}
def nothing(): return {"n": 3}
def fails(): raise KeyError("no such file")
constant = 3
class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 2)
    def forward(self, x, y): return self.l(x - y)
def model(): return Sum()
"""


def test_the_input_of_a_function_of_the_users(factory: Callable[[str], str]) -> None:
    name = factory(BATCHES)
    picture = load_model("squeezenet1_1", input_like=f"{name}:tensor")
    assert (picture.input_shape, picture.example.batch) == ((3, 64, 64), 3)
    pair = load_model(f"{name}:model", input_like=f"{name}:pair")
    assert [tuple(each.shape) for each in pair.example_input_for(6).tensors] == [(6, 8), (6, 8)]
    assert torch.equal(pair.example.call(pair.module), pair.module(torch.ones(4, 8), torch.full((4, 8), 2.0)))
    keywords = load_model(f"{name}:model", input_like=f"{name}:keywords")
    assert (sorted(keywords.example.kwargs), keywords.example.batch) == (["x", "y"], 2)
    same = [load_model(f"{name}:model", input_like=f"{name}:noise", seed=5).example for _ in range(2)]
    assert torch.equal(same[0].tensors[0], same[1].tensors[0])


@pytest.mark.slow
def test_a_model_of_transformers_takes_it_too(factory: Callable[[str], str]) -> None:
    sizes = {"layers": 2, "hidden": 32, "heads": 4, "vocabulary": 64}
    loaded = load_model("hf:gpt2", settings=sizes, input_like=f"{factory(BATCHES)}:patches")
    assert list(loaded.example.kwargs) == ["inputs_embeds"]
    assert loaded.granularity.startswith("module:transformer.h.*")
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel fails on the example input: ValueError"):
        load_model("hf:gpt2", settings=sizes, input_like=f"{factory(BATCHES)}:keywords")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tensors", "has no 'tensors'"),
        ("constant", "is no function, but of type int"),
        ("nothing", "is an object of type dict, and holds no tensor"),
        ("fails", "failed: KeyError: 'no such file'"),
    ],
)
def test_what_is_no_input_says_so(factory: Callable[[str], str], function: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason) as caught:
        load_model("squeezenet1_1", input_like=f"{factory(BATCHES)}:{function}")
    assert f":{function}" in caught.value.what
    assert caught.value.hint


def test_one_input_is_named(factory: Callable[[str], str]) -> None:
    with pytest.raises(UsageError, match="both say what the input is"):
        load_model("squeezenet1_1", input_like=f"{factory(BATCHES)}:tensor", input_shape=(3, 64, 64))
