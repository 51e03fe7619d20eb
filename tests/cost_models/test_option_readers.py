"""What is typed for options as values: the types of settings, and what a wrong one is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pplan.cost_models.arguments import read_module_styles, read_settings, unknown_option
from pplan.cost_models.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("24", 24),
        ("-3", -3),
        ("0.5", 0.5),
        ("1e-5", 1e-5),
        ("true", True),
        ("False", False),
        ("none", None),
        ("null", None),
        ("abc", "abc"),
        ("", ""),
        ("a=b", "a=b"),
        ("'24'", "24"),
        ('"true"', "true"),
        ("[1,2]", [1, 2]),
        ("(1, 2)", (1, 2)),
        ('{"a": [true, null]}', {"a": [True, None]}),
        ("[[['global'], 2]]", [[["global"], 2]]),
        ("[1,", "[1,"),
        ("1x", "1x"),
        ("os.getcwd()", "os.getcwd()"),
    ],
)
def test_values_have_their_types(text: str, value: object) -> None:
    parsed = read_settings([f"key={text}"], "--set")["key"]
    assert parsed == value
    assert type(parsed) is type(value)


def test_pairs_stay_in_order_and_spaces_are_trimmed() -> None:
    assert list(read_settings((" depth = 24 ", "name=x"), "--set").items()) == [("depth", 24), ("name", "x")]
    assert read_settings((), "--set") == {}


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5))
def test_what_python_writes_is_read_back(value: object) -> None:
    assert read_settings([f"key={value!r}"], "--set") == {"key": value}


def test_styles_by_the_names_of_modules() -> None:
    """As transformers' plans and torch's have them: with * for any part."""
    plan = {"layers.*.mlp.up_proj": "colwise", "down": "rowwise"}
    pairs = [f"{name}={style}" for name, style in plan.items()]
    assert read_module_styles(pairs, "--tp-plan") == plan
    for pair, told in (("up", "there is no ="), ("a b=colwise", "'a b' is no name of modules")):
        with pytest.raises(UsageError, match=told) as raised:
            read_module_styles([pair], "--tp-plan")
        assert "layers.*.up=colwise" in raised.value.hint


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        (["depth"], "--set 'depth': there is no ="),
        (["=24"], "'' is no keyword"),
        (["a-b=24"], "'a-b' is no keyword"),
        (["depth=24", "depth=12"], "--set depth is given twice, as 24 and as 12"),
    ],
)
def test_wrong_pairs_are_refused(pairs: list[str], told: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_settings(pairs, "--set")
    assert told in raised.value.what
    assert raised.value.hint


def test_a_name_that_is_no_option_is_told_the_nearest() -> None:
    near = unknown_option("gpuss", ["gpus", "memory"], "solve")
    assert near.what == "gpuss: is no option of solve"
    assert near.hint == "Did you mean gpus? There are: gpus, memory."
    assert unknown_option("zzz", ["gpus", "memory"], "check").hint == "There are: gpus, memory."
