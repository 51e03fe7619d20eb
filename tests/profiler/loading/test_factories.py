"""Factories with keyword options, and what a wrong option is told."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from pplan.cost_models.errors import ModelError, UsageError
from pplan.profiler.models import call_factory

_numbers = itertools.count()
_TEXT = """
from torch import nn

def build(depth: int = 2, width: int = 4):
    if depth < 1:
        raise ValueError(f"depth {depth}")
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def open_ended(**options):
    return options

def positional(depth, /):
    return depth

def needs(depth):
    return depth

instance = nn.Linear(2, 2)
Kind = nn.Linear
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """The name of one of `_TEXT`'s objects, in a module written to the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    name = f"users_factories_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(_TEXT, encoding="utf-8")
    return lambda attribute: f"{name}:{attribute}"


def test_settings_are_the_factorys_keywords(module: Callable[[str], str]) -> None:
    assert len(call_factory(module("build"))) == 2
    made = call_factory(module("build"), {"depth": 5, "width": 3})
    assert (len(made), made[0].in_features) == (5, 3)
    assert call_factory(module("open_ended"), {"any": None}) == {"any": None}


def test_a_class_is_a_factory_too(module: Callable[[str], str]) -> None:
    made = call_factory(module("Kind"), {"in_features": 3, "out_features": 7, "bias": False})
    assert isinstance(made, nn.Linear)
    assert made.weight.shape == (7, 3)
    assert made.bias is None


def test_an_unexpected_keyword_is_told_with_the_signature(module: Callable[[str], str]) -> None:
    with pytest.raises(UsageError) as raised:
        call_factory(module("build"), {"width": 3, "dept": 5})
    name = module("build")
    assert raised.value.what == f"settings['dept']: {name} takes no keyword 'dept'"
    assert raised.value.hint.startswith("Nearest: depth. Its signature is build(depth: ")
    with pytest.raises(UsageError, match=r"positional\(depth, /\)"):
        call_factory(module("positional"), {"depth": 1})


def test_a_factory_that_fails_is_told_with_what_it_was_given(module: Callable[[str], str]) -> None:
    with pytest.raises(ModelError) as raised:
        call_factory(module("build"), {"depth": 0})
    assert "ValueError: depth 0" in raised.value.what
    assert raised.value.hint == "Mend the factory; it is called with depth=0."
    with pytest.raises(ModelError, match="it is called without arguments"):
        call_factory(module("needs"))


def test_a_module_already_built_takes_no_settings(module: Callable[[str], str]) -> None:
    assert isinstance(call_factory(module("instance"), {}), nn.Linear)
    with pytest.raises(UsageError, match="is a module already built, which takes no options"):
        call_factory(module("instance"), {"depth": 5})
