"""Numbers in words, tables and messages, by hand: each where it changes its form, and just before."""

from __future__ import annotations

import random
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from pplan.cost_models.errors import (
    LONGEST,
    LONGEST_WORD,
    SHORT,
    DefectError,
    ExportError,
    FileError,
    InfeasibleError,
    MachineError,
    ModelError,
    PplanError,
    UsageError,
    short_repr,
)
from pplan.cost_models.quantities import (
    compare_percent,
    compare_steps,
    describe_gap,
    either,
    format_amount,
    html_table,
    percent,
    percent_at_most,
    ranges,
    three_digits,
    whole_percent,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0.00"), (9.994, "9.99"), (9.996, "10.0"), (-9.996, "-10.0"), (-1.5, "-1.50")),
        *((10.04, "10.0"), (99.94, "99.9"), (99.96, "100"), (-99.96, "-100"), (1234.4, "1234")),
    ],
)
def test_three_digits_count(value: float, text: str) -> None:
    assert three_digits(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        *((0, "0"), (12.4, "12"), (999_499, "999499"), (999_500, "1.00 million"), (144e6, "144 million")),
        *((999.4e6, "999 million"), (999.5e6, "1.00 billion"), (7.02e9, "7.02 billion")),
        *((999.4e9, "999 billion"), (999.5e9, "1.00 trillion"), (2e15, "2000 trillion")),
    ],
)
def test_large_numbers_in_words(count: float, text: str) -> None:
    assert format_amount(count) == text


def test_shares_in_percent() -> None:
    assert (percent(0.0612), percent(-0.5), percent(1)) == ("6.1 %", "-50.0 %", "100.0 %")
    assert (whole_percent(0.0612), whole_percent(1), whole_percent(0.996)) == ("6 %", "100 %", "100 %")


@pytest.mark.parametrize(
    ("share", "text"),
    [
        *((0.0, "0.0 %"), (0.131, "13.1 %"), (0.1311, "13.2 %"), (0.0005, "0.05 %"), (0.00051, "0.1 %")),
        *(
            (0.000412, "0.05 %"),
            (2e-6, "0.0002 %"),
            (0.3, "30.0 %"),
            (1.0, "100.0 %"),
            (1e-12, "0.0000001 %"),
        ),
    ],
)
def test_a_gap_is_never_rounded_down(share: float, text: str) -> None:
    """What is called "at most" is so: 13.11 % are not at most 13.1 %, and 0.04 % not at most 0.0 %."""
    assert percent_at_most(share) == text
    assert float(text.removesuffix(" %")) >= 100 * share * (1 - 1e-12)


@pytest.mark.parametrize(
    ("gap", "text"),
    [
        (0.0612, "at most 6.2 % from the proven bound of 3.00 s"),
        (1.0, "at most 100.0 % from the proven bound of 3.00 s"),
        (244.42, "no useful bound is proven"),
    ],
)
def test_a_large_gap_is_no_useful_bound(gap: float, text: str) -> None:
    assert describe_gap(gap, "3.00 s") == text


@pytest.mark.parametrize(
    ("step", "reference", "factor", "share"),
    [
        (2.0, 2.0, "the same", "the same"),
        (2.0 + 1e-9, 2.0, "the same", "the same"),
        (2.0, 2.0 + 1e-9, "the same", "the same"),
        (1 + 3e-9, 1.0, "nearly the same", "nearly the same"),
        (1.00049, 1.0, "nearly the same", "nearly the same"),
        (0.99951, 1.0, "nearly the same", "nearly the same"),
        (1.00051, 1.0, "0.1 % slower", "0.1 % slower"),
        (1.0, 1.004, "0.4 % faster", "0.4 % faster"),
        (1.0, 1.00499, "0.5 % faster", "0.5 % faster"),
        (1.005, 1.0, "0.5 % slower", "0.5 % slower"),
        (1.0051, 1.0, "1.01 x slower", "0.5 % slower"),
        (1.0, 1.0051, "1.01 x faster", "0.5 % faster"),
        (2.5, 2.0, "1.25 x slower", "25.0 % slower"),
        (2.0, 2.5, "1.25 x faster", "20.0 % faster"),
        (40.0, 2.0, "20.0 x slower", "1900.0 % slower"),
    ],
)
def test_steps_compared(step: float, reference: float, factor: str, share: str) -> None:
    assert compare_steps(step, reference) == factor
    assert compare_percent(step, reference) == share


def test_ranges_read_back_to_their_numbers() -> None:
    assert ranges([5, 0, 2, 1]) == "0-2, 5"
    assert ranges([]) == ""
    for seed in range(50):
        numbers = sorted(random.Random(seed).sample(range(12), seed % 9))
        words = [own.split("-") for own in ranges(numbers).split(", ") if own]
        assert [n for own in words for n in range(int(own[0]), int(own[-1]) + 1)] == numbers
        assert all(int(later[0]) > int(before[-1]) + 1 for before, later in pairwise(words))
        assert all(len(own) == 1 or int(own[0]) < int(own[1]) for own in words)


def test_one_of_several() -> None:
    assert (either([1, 2, 4]), either(["a", "b"]), either([3])) == ("1, 2 or 4", "a or b", "3")


def test_a_table_of_a_notebook_is_read_as_it_was_given() -> None:
    rows = [["<b>", "1 & 2"], ['"', "'"]]
    table = ElementTree.fromstring(html_table("a <caption>", ["one", ">"], rows))
    assert [own.tag for own in table] == ["caption", "thead", "tbody"]
    assert table.findtext("caption") == "a <caption>"
    assert [own.text for own in table.iter("th")] == ["one", ">"]
    assert [[cell.text for cell in row] for row in table.findall("tbody/tr")] == rows


def test_what_is_long_is_cut_in_a_message() -> None:
    assert short_repr("x" * (SHORT - 2)) == repr("x" * (SHORT - 2))
    assert short_repr("x" * (SHORT - 1)) == "'" + "x" * (SHORT - 1) + "…"
    fits, long = "y" * (LONGEST_WORD - 1), "z" * LONGEST_WORD
    error = PplanError(f"{fits} {long} {fits} end", long)
    assert error.what == f"{fits} {'z' * SHORT}… {fits} end"
    assert error.hint == long  # a message of that length is left as it is
    assert PplanError("", f"{long}z").hint == f"{'z' * SHORT}…"
    words = "w " * (LONGEST // 2)
    assert PplanError(words).what == words
    assert PplanError(f"{words}more").what == f"{words}…"


def test_errors_say_what_they_are() -> None:
    """Their kinds and statuses, as `docs/errors.md` and the command line say them."""
    kinds = {UsageError: "usage", FileError: "file", ModelError: "model", MachineError: "machine"}
    kinds |= {ExportError: "export", PplanError: "error", InfeasibleError: "infeasible"}
    for own, kind in kinds.items():
        error, status = own("what", "do"), 3 if own is InfeasibleError else 2
        assert error.as_json == {"status": status, "kind": kind, "message": "what", "advice": "do"}
        assert isinstance(error, PplanError)
        assert str(error) == "what\ndo"
        assert str(own("what")) == "what"
    details = {"limit_bytes": 3, "would_fit": []}
    said = InfeasibleError("what", "do", details).as_json
    assert said == InfeasibleError("what", "do").as_json | details
    assert not issubclass(DefectError, PplanError)
