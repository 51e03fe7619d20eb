"""A field of a model of options becomes an option: the recipe of CONTRIBUTING, tried with a toy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner, Result

from pplan.cli import field_names
from pplan.cli.field_names import TYPED, typed_text
from pplan.cli.option_parameters import Only, Without, with_options
from pplan.cost_models import arguments
from pplan.cost_models.arguments import Options, option, options_class, options_from
from pplan.cost_models.errors import UsageError
from pplan.cost_models.quantities import parse_seconds


@options_class
class ToyOptions(Options):
    """Of a toy."""

    wheels: int = option(4, arguments.whole, "How many wheels it has.", "N", least=2, panel="The toy")
    wind_up_seconds: float = option(
        1.5,
        arguments.number,
        "How long the spring is wound.",
        "2s",
        flag="wind-up",
        read=parse_seconds,
        default_text="1500ms",
    )
    colours: tuple[str, ...] = option(
        (), arguments.words, "Of the parts.", "NAME", flag="colour", repeats=True
    )
    kind: str | None = option(None, arguments.optional_word, "What it is.", "car|boat", words=("car", "boat"))
    squeaks: bool = option(False, arguments.flag, "It squeaks.")
    boxed: bool = option(True, arguments.flag, "Without its box.", flag="no-boxed")
    secret: int = option(7, arguments.whole)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wheels % 2:
            raise UsageError(f"wheels={self.wheels}: must be even", "Omit `wheels`, or give `squeaks`.")


Toy = Callable[..., Result]
made: list[ToyOptions] = []


def play(
    name: Annotated[Path, typer.Argument()] = Path("toy"),
    *,
    toy: ToyOptions,
    loud: Annotated[bool, typer.Option("--loud")] = False,
) -> None:
    """Play."""
    del name, loud
    made.append(toy)


def few(*, toy: Annotated[ToyOptions, Only("wheels", "kind")]) -> None:
    """Take some fields."""
    made.append(toy)


def most(*, toy: Annotated[ToyOptions, Without("wheels", "colours")]) -> None:
    """Take the others."""
    made.append(toy)


@pytest.fixture
def fields(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The toy's fields are not left to other tests."""
    made.clear()
    monkeypatch.setattr(field_names, "FIELDS", dict(field_names.FIELDS))
    yield
    TYPED.set({})


@pytest.fixture
def run(fields: None) -> Callable[..., Result]:
    del fields

    def run_it(*given: str, command: Callable[..., None] = play) -> Result:
        app = typer.Typer()
        app.command()(with_options(command))
        return CliRunner(env={"COLUMNS": "120", "TERM": "dumb"}).invoke(app, list(given))

    return run_it


def test_help_has_the_name_the_form_the_default_and_the_sentence_of_every_field(run: Toy) -> None:
    said = run("--help").output
    assert "The toy" in said
    for text in ("--wheels", "How many wheels it has. [default: 4]", "--wind-up", "2s", "[default: 1500ms]"):
        assert text in said
    for text in ("--colour", "--kind", "car|boat", "--squeaks", "--no-boxed", "--loud"):
        assert text in said
    assert "secret" not in said


def test_nothing_typed_is_every_default(run: Toy) -> None:
    assert run().exit_code == 0
    assert made == [ToyOptions()]


def test_what_is_typed_is_read_and_checked_once(run: Toy) -> None:
    typed = "a --wheels 6 --wind-up 2min --colour red --colour blue --kind boat --squeaks --no-boxed --loud"
    ran = run(*typed.split())
    assert ran.exit_code == 0, ran.output
    assert made == [
        ToyOptions(
            wheels=6, wind_up_seconds=120.0, colours=("red", "blue"), kind="boat", squeaks=True, boxed=False
        ),
    ]
    assert (typed_text("wheels"), typed_text("wind_up_seconds"), typed_text("secret")) == ("6", "2min", None)


@pytest.mark.parametrize(
    ("typed", "what"),
    [
        ("--wheels many", "--wheels many: is not a whole number"),
        ("--wheels 0", "--wheels 0: must be at least 2"),
        ("--wheels 3", "--wheels 3: must be even"),
        ("--wind-up 5", "--wind-up 5: the unit is missing"),
        ("--kind bot", "--kind bot: is not one of car, boat"),
    ],
)
def test_errors_of_the_command_line_name_the_option_and_the_text(run: Toy, typed: str, what: str) -> None:
    error = run(*typed.split()).exception
    assert isinstance(error, UsageError)
    assert field_names.as_options(error.what).startswith(what)


def test_errors_of_python_name_the_field_and_their_advice_becomes_options(run: Toy) -> None:
    with pytest.raises(UsageError) as refused:
        options_from({"wheels": 5}, ToyOptions, of="play")
    assert refused.value.what == "wheels=5: must be even"
    run()
    assert field_names.as_options(refused.value.what) == "--wheels 5: must be even"
    assert field_names.as_options(refused.value.hint) == "Omit --wheels, or give --squeaks."
    with pytest.raises(UsageError, match="wheel: is no option of play"):
        options_from({"wheel": 5}, ToyOptions, of="play")
    with pytest.raises(UsageError, match="wheels: is no option of play"):
        options_from({"wheels": 5}, ToyOptions, of="play", takes=["kind"])


def test_a_value_is_printed_as_it_was_typed(run: Toy) -> None:
    run("--wind-up", "2min")
    assert field_names.as_options("wind_up_seconds=120.0: too long") == "--wind-up 2min: too long"
    assert field_names.as_options("wind_up_seconds=60: say") == "--wind-up 60: say"


def test_a_command_takes_some_fields(run: Toy) -> None:
    only, without = run("--help", command=few).output, run("--help", command=most).output
    assert ("--wheels" in only, "--kind" in only, "--squeaks" in only) == (True, True, False)
    assert ("--wheels" in without, "--kind" in without, "--squeaks" in without) == (False, True, True)
    assert run("--wheels", "8", command=few).exit_code == 0
    assert made[-1] == ToyOptions(wheels=8)


def test_a_field_that_there_is_not_cannot_be_taken(fields: None) -> None:
    del fields

    def wrong(*, toy: Annotated[ToyOptions, Only("wings")]) -> None:
        made.append(toy)

    wrong.__annotations__["toy"] = Annotated[ToyOptions, Only("wings")]
    with pytest.raises(TypeError, match="ToyOptions has no options wings"):
        with_options(wrong)


def test_the_signature_is_of_options(fields: None) -> None:
    del fields
    names: Any = list(inspect.signature(with_options(play)).parameters)
    assert names[1:] == [
        *("name", "wheels", "wind_up_seconds", "colours", "kind", "squeaks", "boxed", "loud")
    ]
