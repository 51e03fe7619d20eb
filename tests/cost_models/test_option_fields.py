"""Fields of options: what is typed, what is refused, and whose a name is."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Any

import pytest

from pplan.cost_models import arguments
from pplan.cost_models.arguments import (
    Converted,
    Option,
    Options,
    arguments_class,
    check_values,
    list_declarations,
    option,
    options_class,
    options_from,
    takes,
    unknown_option,
)
from pplan.cost_models.errors import UsageError


@options_class
class Size(Options):
    count: int = option(1, arguments.whole, "How many.", "N", least=1)
    share: float | None = option(None, arguments.optional_number)
    plain: str = "is no option"


@options_class
class Kind(Options):
    count: int = option(2, arguments.whole)
    is_fast: bool = option(False, arguments.flag)


def test_fields_are_checked_and_kept_as_they_are_checked() -> None:
    assert list(list_declarations(Size)) == ["count", "share"]
    assert Size(share=3).share == 3.0
    assert isinstance(Size(share=3).share, float)
    for wrong in ({"count": 0}, {"count": "3"}, {"share": "much"}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Size(**wrong)


def test_a_name_of_several_is_the_first_ones() -> None:
    for models in ((Size, Kind), (Kind, Size)):
        first, second = options_from({"count": 7, "share": 0.5, "is_fast": True}, *models)
        assert (first.count, second.count) == (7, {Kind: 2, Size: 1}[models[1]])
        size, kind = (first, second) if models[0] is Size else (second, first)
        assert (size.share, kind.is_fast) == (0.5, True)
    assert options_from({}, Size, Kind) == [Size(), Kind()]


def test_a_name_that_none_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(UsageError) as refused:
        options_from({"shares": 1}, Size, Kind, of="profile")
    assert refused.value.what == "shares: is no option of profile"
    assert refused.value.hint == "Did you mean share? There are: count, share, is_fast."
    with pytest.raises(UsageError) as refused:
        options_from({"share": 1}, Size, Kind, takes=("count", "is_fast"))
    assert refused.value.what == "share: is no option of solve"
    assert refused.value.hint == "There are: count, is_fast."
    assert options_from({"count": 4}, Size, takes=("count",)) == [Size(count=4)]
    assert unknown_option("zzz", ["count"], "check").hint == "There are: count."


def test_values_are_checked_by_themselves() -> None:
    check_values({"count": 1, "is_fast": True, "other": object()}, Size, Kind)
    for values in ({"is_fast": 3}, {"count": 0}, {"share": "much"}):
        with pytest.raises(UsageError, match=next(iter(values))):
            check_values(values, Size, Kind)


@pytest.mark.parametrize(
    ("own", "typed", "value"),
    [
        (Option(arguments.whole, least=3), "4", 4),
        (Option(arguments.whole, words=("fast", "slow")), "fast", "fast"),
        (Option(arguments.whole), "as it is", "as it is"),
        (
            Option(arguments.whole, words=("fast",), read=lambda typed, flag: flag + typed),
            "x",
            "--ownx",
        ),
    ],
)
def test_what_is_typed_is_read(own: Option, typed: str, value: Any) -> None:
    assert own.value(typed, "--own") == value
    assert own.is_count == (own.least is not None)


@pytest.mark.parametrize(
    ("own", "typed"),
    [(Option(arguments.whole, least=3), "2"), (Option(arguments.whole, words=("fast", "slow")), "other")],
)
def test_what_cannot_be_typed_is_refused(own: Option, typed: str) -> None:
    with pytest.raises(UsageError, match="--own"):
        own.value(typed, "--own")


@arguments_class
class Drawing(Kind, Size):
    """The arguments of a function."""

    share: float | None = field()
    title: str = field(kw_only=False)
    width: Converted[float | str, float] = option(2.0, arguments.number, "How wide it is.")


@takes(Drawing)
def draw(title: str, **options: Any) -> str:
    """Draw it."""
    return f"{title} {options}"


def test_a_function_has_the_arguments_of_a_model_in_its_signature_and_help() -> None:
    assert draw("a", share=1.0, width="3") == "a {'share': 1.0, 'width': '3'}"
    signature = inspect.signature(draw)
    assert str(signature).replace("'", "") == (
        "(title: str, *, count: int = 2, share: float | None, plain: str = is no option, "
        "is_fast: bool = False, width: float | str = 2.0) -> str"
    )
    assert inspect.getdoc(draw) == (
        "Draw it.\n\nOptions:\n"
        "    count: int = 2\n"
        "    share: float | None\n"
        "    is_fast: bool = False\n"
        "    width: float | str = 2.0\n"
        "        How wide it is."
    )
