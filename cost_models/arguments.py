"""Options of commands and of the Python API, each declared once, with the checks and readers of their values.

The fields of an `Options` are the keyword arguments of the Python API (`takes` puts them into a function's
signature), the options of the command line (`pplan.cli.option_parameters` makes them) and, for a plan, what
its file says under `options`. They are plain frozen dataclasses: the help of the command line imports no
pydantic. Models are composed by inheritance. To add an option, add a field, and use it where it matters.

A check takes a field's name and a value, and returns the value as the field holds it. A reader takes a typed
text (all texts, where an option repeats) and the option's name. Both raise UsageError. Sizes, rates and
durations are in `quantities`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import operator
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from math import inf
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, cast, dataclass_transform

from .errors import UsageError
from .quantities import LEAST_RATE, MOST_DEVICES, MOST_RATE, MOST_SLOWDOWN

MOST_DIGITS = 18
"""Most digits of a whole number: any such number fits in 64 bits."""
_WORDS: dict[str, object] = {"true": True, "false": False, "none": None, "null": None}


def read_choice(allowed: Iterable[str]) -> Callable[[str, str], str]:
    """A reader of one of the `allowed` words."""
    words = tuple(allowed)

    def read(text: str, name: str) -> str:
        if text in words:
            return text
        near = difflib.get_close_matches(text, words, n=1, cutoff=0.5)
        raise UsageError(
            f"{name} {text}: is not one of {', '.join(words)}",
            f"Did you mean {near[0]}?" if near else f"Give one of these, as in {name} {words[0]}.",
        )

    return read


def read_whole_number(least: int) -> Callable[[str, str], int]:
    """A reader of a whole number of at least `least`."""

    def read(text: str, name: str) -> int:
        return _whole(text, name, least)

    return read


def read_number_or_auto(text: str, name: str) -> int | str:
    """A whole number of at least 1, or `auto`."""
    if text == "auto":
        return text
    if not re.fullmatch(r"\d+", text):
        raise UsageError(f"{name} {text}: is neither a whole number nor auto", f"For example: {name} 8")
    return _whole(text, name, 1)


def read_counts(text: str, name: str) -> tuple[int, ...]:
    """`12,34` as whole numbers of at least 1, in their order."""
    return tuple(_whole(part.strip(), name, 1) for part in text.split(","))


def read_sizes(text: str, name: str) -> tuple[int, ...]:
    """`1,2,4,8` as whole numbers of at least 1, ascending and without repeats."""
    return tuple(sorted({_whole(part.strip(), name, 1, context=text) for part in text.split(",")}))


def read_slow_devices(text: str, name: str) -> tuple[float, float]:
    """`5%:1.5` or `0.05:1.5`: a share of the devices, and how many times as long they take."""
    number = r"(\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})"
    match = re.fullmatch(rf"{number}(%?):{number}", text.replace(" ", ""))
    if not match:
        raise UsageError(
            f"{name} {text}: is not a share of the devices and how many times as long they take",
            f"For example: {name} 5%:1.5",
        )
    return float(match[1]) / (100 if match[2] else 1), float(match[3])


def read_by_level(read: Callable[[str, str], float]) -> Callable[[str, str], tuple[float, ...]]:
    """A reader of `300GB/s,25GB/s`: inside a node and, where given, between nodes."""

    def read_levels(text: str, name: str) -> tuple[float, ...]:
        parts = [part.strip() for part in text.split(",")]
        if len(parts) > 2:
            raise UsageError(
                f"{name} {text}: has {len(parts)} values",
                "Give one value inside a node and, after a comma, one between nodes.",
            )
        return tuple(read(part, name) for part in parts)

    return read_levels


def read_settings(pairs: Sequence[str], name: str) -> dict[str, object]:
    """`("depth=24", "flag=true", "sizes=[1, 2]", "name=abc")` as keywords with values of their types.

    A value is read as JSON or as a Python literal where it is one (true, false and none by any case), and is
    text otherwise; quotes make text of what would be a number.
    """
    return _read_pairs(pairs, name, r"[^\W\d]\w*", "keyword", "depth=24")


def read_module_styles(pairs: Sequence[str], name: str) -> dict[str, object]:
    """`("layers.*.up=colwise",)` as words by the names of modules, with * for any part."""
    return _read_pairs(pairs, name, r"[\w.*?\[\]!-]+", "name of modules", "layers.*.up=colwise")


def _read_pairs(pairs: Sequence[str], name: str, key_form: str, what: str, example: str) -> dict[str, object]:
    values: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals:
            raise UsageError(
                f"{name} {pair!r}: there is no =", f"Write {name} KEY=VALUE, as in {name} {example}."
            )
        if not re.fullmatch(key_form, key):
            raise UsageError(
                f"{name} {pair!r}: {key!r} is no {what}", f"Before the = stands a name, as in {example}."
            )
        if key in values:
            raise UsageError(
                f"{name} {key} is given twice, as {values[key]!r} and as {_literal(value)!r}", "Give it once."
            )
        values[key] = _literal(value)
    return values


def _literal(text: str) -> object:
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    for parse in (json.loads, ast.literal_eval):
        try:
            value: object = parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        return value
    return text


def _whole(text: str, name: str, least: int, context: str = "") -> int:
    what = f"{name} {context or text}"
    if not re.fullmatch(r"[+-]?\d+", text):
        part = f"{text!r} is" if context else "is"
        raise UsageError(f"{what}: {part} not a whole number", f"For example: {name} {max(least, 8)}")
    if len(text.lstrip("+-")) > MOST_DIGITS:
        raise UsageError(
            f"{what}: must have at most {MOST_DIGITS} digits", f"For example: {name} {max(least, 8)}"
        )
    if int(text) < least:
        raise UsageError(f"{what}: must be at least {least}", f"For example: {name} {max(least, 8)}")
    return int(text)


def whole(name: str, value: Any, *, at_least: int = 1, at_most: int | None = None, example: str = "") -> int:
    """A whole number, numpy's too. Raises UsageError."""
    hint = f"Give a whole number, as in {name}={example or max(at_least, 8)}."
    if isinstance(value, bool):
        raise _wrong(name, value, "a whole number", hint)
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(name, value, "a whole number", hint) from None
    if number < at_least:
        raise UsageError(f"{name}={_short_number(number)}: must be at least {at_least}", hint)
    if at_most is not None and number > at_most:
        raise UsageError(f"{name}={_short_number(number)}: must be at most {at_most}", hint)
    return number


def optional_whole(name: str, value: Any, *, example: str = "") -> int | None:
    """A whole number or None. Raises UsageError."""
    return None if value is None else whole(name, value, example=example)


def whole_or_auto(name: str, value: Any) -> int | None:
    """A whole number; None for None and for "auto". Raises UsageError."""
    return None if value == "auto" else optional_whole(name, value)


def wholes(name: str, values: Any) -> tuple[int, ...] | None:
    """Whole numbers of at least 1, or None. Raises UsageError."""
    if values is None:
        return None
    if not _goes_through(values):
        raise _wrong(name, values, "a list of whole numbers", f"For example: {name}=[1, 2, 4].")
    return tuple(whole(f"{name}[{index}]", value) for index, value in enumerate(values))


def number(name: str, value: Any) -> float:
    """A number, numpy's too. Raises UsageError."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _wrong(name, value, "a number", f"For example: {name}=60.")
    return _as_float(name, value)


def flag(name: str, value: Any) -> bool:
    """True or False, numpy's too. Raises UsageError."""
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise _wrong(name, value, "True or False", f"For example: {name}=True.")


def optional_number(name: str, value: Any) -> float | None:
    """A number or None. Raises UsageError."""
    return None if value is None else number(name, value)


def optional_rate(name: str, value: Any) -> float | None:
    """Bytes per second or None. Raises UsageError."""
    rate = optional_number(name, value)
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise UsageError(
            f"{name}={rate:g}: must be from {LEAST_RATE:g} to {MOST_RATE:g} bytes per second",
            f"For example: {name}=50e9.",
        )
    return rate


def pins(name: str, values: Any) -> tuple[tuple[str, int], ...]:
    """Names of layers with the numbers of their stages. Raises UsageError."""
    example = f'For example: {name}=[("features.10", 1)], a layer and the number of its stage, from 0.'
    if isinstance(values, Mapping) or not _goes_through(values):
        raise _wrong(name, values, "a list of layers with their stages", example)
    pairs = []
    for index, pin in enumerate(values):
        at = f"{name}[{index}]"
        if not isinstance(pin, tuple | list) or len(pin) != 2 or not isinstance(pin[0], str):
            raise _wrong(at, pin, "a layer and the number of its stage", example)
        pairs.append((pin[0], whole(f"{at}[1]", pin[1], at_least=0, at_most=MOST_DEVICES)))
    return tuple(pairs)


def slow_devices(name: str, value: Any) -> tuple[float, float] | None:
    """A share of the devices and how many times as long they take, also as a text, or None. Raises
    UsageError."""
    if value is None:
        return None
    hint = f"For example: {name}='5%:1.5', each device takes 1.5 times as long with a probability of 5 %."
    if isinstance(value, str):
        value = read_slow_devices(value, name)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, value, "a share of the devices and how many times as long they take", hint)
    share, times = (number(f"{name}[{index}]", own) for index, own in enumerate(value))
    if not 0 < share < 1:
        raise UsageError(
            f"{name}={share:g}:{times:g}: the share must be above 0 and below 1",
            "Of devices that are always slow, the topology says so: speed = 0.67.",
        )
    if not 1 < times <= MOST_SLOWDOWN:
        raise UsageError(
            f"{name}={share:g}:{times:g}: must be above 1 and at most {MOST_SLOWDOWN:g} times as long", hint
        )
    return share, times


def watts(name: str, value: Any) -> dict[str, tuple[float, float]] | None:
    """Return the watts of each kind of device while it computes and while it waits.

    The value may be a mapping, a text, or None.

    Raises:
        UsageError: The value is invalid.
    """
    hint = f"For example: {name}='A100=400/60,T4=70/10', computing and waiting."
    if value is None:
        return None
    kinds = value
    if isinstance(value, str):
        pairs = [number.partition("=")[::2] for number in value.split(",")]
        kinds = {kind.strip(): power.split("/") for kind, power in pairs}
    if not isinstance(kinds, Mapping) or not kinds:
        raise _wrong(name, value, "watts by kind of device", hint)
    powers = {}
    for kind, both in kinds.items():
        try:
            busy, idle = (float(number) for number in both)
        except (TypeError, ValueError):
            raise UsageError(f"{name}={value!r}: {kind} has not two numbers of watts", hint) from None
        if not 0 <= idle <= busy < inf:
            raise UsageError(f"{name}={value!r}: {kind} must have 0 <= waiting <= computing", hint)
        powers[str(kind)] = (busy, idle)
    return powers


def settings(name: str, value: Any) -> dict[str, object] | None:
    """Values by their names, or None. Raises UsageError."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, value, "values by their names", f'For example: {name}={{"depth": 24}}.')
    return dict(value)


def function(name: str, value: Any) -> None:
    """Raises UsageError for what is neither None nor can be called."""
    if value is not None and not callable(value):
        raise _wrong(name, value, "a function", f"For example: {name}=print.")


def by_level(name: str, values: Any, example: str) -> Sequence[float] | None:
    """One number, or numbers inside a node and between nodes, or None. Raises UsageError."""
    if values is None:
        return None
    items = (values,) if isinstance(values, Real) else tuple(values) if _goes_through(values) else ("",)
    if not all(isinstance(value, Real) and not isinstance(value, bool) for value in items):
        raise _wrong(name, values, "a number or two", f"For example: {name}={example}.")
    return tuple(_as_float(name, value) for value in items)


def word(name: str, value: Any) -> str:
    """A text. Raises UsageError."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a text", f'For example: {name}="auto".')
    return value


def optional_word(name: str, value: Any) -> str | None:
    """A text or None. Raises UsageError."""
    return None if value is None else word(name, value)


def unknown_word(name: str, value: str, choices: Sequence[str], more: str = "") -> UsageError:
    """Return the error for a word that is not one of the `choices`, with similar ones.

    `more` ends their list.
    """
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.7)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{name}={value!r}: not known", f"{guess}Use one of: {', '.join(choices)}{more}.")


def words(name: str, values: Any) -> tuple[str, ...]:
    """Texts. Raises UsageError."""
    if not _goes_through(values):
        raise _wrong(name, values, "a list of texts", f'For example: {name}=("layer1.*",).')
    return tuple(word(f"{name}[{index}]", value) for index, value in enumerate(values))


def path(name: str, value: Any) -> Path:
    """A path, also as a text. Raises UsageError."""
    if not isinstance(value, str | Path):
        raise _wrong(name, value, "a path", f'For example: {name}="a file".')
    return Path(value)


def optional_path(name: str, value: Any) -> Path | None:
    """A path, also as a text, or None. Raises UsageError."""
    return None if value is None else path(name, value)


def instance(name: str, value: Any, kind: type, hint: str) -> None:
    """Raises UsageError where `value` is not a `kind`."""
    if not isinstance(value, kind):
        raise _wrong(name, value, f"a {kind.__name__}", hint)


def _as_float(name: str, value: Any) -> float:
    """It as a float. Raises UsageError for what is too large for one."""
    try:
        converted = float(value)
    except OverflowError:
        raise UsageError(f"{name}: the number is too large", f"For example: {name}=60.") from None
    return converted


def _short_number(number: int) -> str:
    """The number; Python writes none of more than 4300 digits."""
    return str(number) if number.bit_length() <= 256 else f"(a number of {number.bit_length()} bits)"


def _goes_through(values: Any) -> bool:
    """Return whether the value can be iterated and is not a text."""
    try:
        iter(values)
    except TypeError:
        return False
    return not isinstance(values, str)


def _wrong(name: str, value: Any, expected_type: str, hint: str) -> UsageError:
    text = repr(value)
    text = f"{text[:60]}…" if len(text) > 60 else text
    return UsageError(f"{name}={text}: is not {expected_type} but of type {type(value).__name__}", hint)


Check = Callable[[str, Any], Any]
"""Function of a field's name and a value that returns what the field holds. Raises UsageError."""
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Argument = TypeVar("Argument")
Value = TypeVar("Value")
Model = TypeVar("Model")
Read = Callable[[Any, str], Any]
"""Reader of a typed text (of all, if an option repeats) under the option's name. Raises UsageError."""


@dataclass(frozen=True)
class Option:
    """Declaration of a field for the command line.

    Attributes:
        help: One sentence. A field without it is not an option of the command line.
        form: Placeholder for the value.
        panel: Heading in the help.
        flag: Name of the option if it differs from the field. One that begins with "no-" sets the field to
            False.
        words: Allowed words.
        least: Smallest allowed integer.
        read: Reader of texts other than words or numbers.
        repeats: True if the option may be given several times.
        default_text: Default as it is typed, if it differs from the value.
        aliases: Other names of the option.
    """

    check: Check
    help: str = ""
    form: str | None = None
    panel: str | None = None
    words: tuple[str, ...] = ()
    least: int | None = None
    flag: str = ""
    read: Read | None = None
    repeats: bool = False
    default_text: str | None = None
    aliases: tuple[str, ...] = ()

    @property
    def is_count(self) -> bool:
        """Return whether the option takes a whole number."""
        return self.least is not None

    def value(self, typed: Any, flag: str) -> Any:
        """Convert what was typed for `flag`, one text or all of them. Raises UsageError."""
        if self.read is not None:
            return self.read(typed, flag)
        if self.words:
            return read_choice(self.words)(typed, flag)
        return typed if self.least is None else read_whole_number(self.least)(typed, flag)


def option(default: Any, check: Check, help: str = "", form: str | None = None, **more: Any) -> Any:
    """A field of `Options` with its declaration."""
    return field(default=default, metadata={"option": Option(check, help, form, **more)})


def settings_option(help: str, check: Check = settings) -> Any:
    """A field of keywords: of a factory, or keys of a configuration, typed one by one as NAME=VALUE."""
    return option(None, check, help, "NAME=VALUE", flag="set", read=read_settings, repeats=True)


if TYPE_CHECKING:

    class Converted(Generic[Argument, Value]):
        """Type of a field that is given in one type and held in another."""

        def __get__(self, instance: object, owner: Any = None) -> Value: ...

        def __set__(self, instance: object, value: Argument) -> None: ...

else:

    class Converted:
        """Type of a field that is given in one type and held in another, which pydantic sees."""

        def __class_getitem__(cls, types: tuple[Any, Any]) -> Any:
            return types[1]


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def options_class(model: type[Model]) -> type[Model]:
    """Make a frozen dataclass of keywords; mypy, told that it is frozen, forgets what a field holds."""
    return dataclass(frozen=True, kw_only=True)(model)


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
def arguments_class(model: type[Model]) -> type[Model]:
    """Mark a class whose fields are the arguments of a function. It is never made, and gets no methods."""
    return model


@options_class
class Options:
    """Fields made by `option`, checked when they are set. Raises UsageError."""

    def __post_init__(self) -> None:
        for name, declaration in list_declarations(type(self)).items():
            object.__setattr__(self, name, declaration.check(name, getattr(self, name)))


def list_declarations(model: Any) -> dict[str, Option]:
    """The declarations of a model's fields, by their names; an inherited one of a field declared again."""
    declarations: dict[str, Option] = {}
    for base in reversed(model.__mro__):
        attributes = vars(base) | vars(base).get("__dataclass_fields__", {})
        metadata = {name: value.metadata for name, value in attributes.items() if isinstance(value, Field)}
        declarations |= {name: each["option"] for name, each in metadata.items() if "option" in each}
    return declarations


def options_from(
    values: Mapping[str, Any],
    *models: type[Options],
    of: str = "solve",
    takes: Collection[str] | None = None,
) -> list[Any]:
    """A model of each kind, with what is given for its fields. A name that several have is the first one's.

    `of` names in errors whose options they are, `takes` those that it has, where that are not all.
    Raises UsageError for a name that none has.
    """
    owners: dict[str, type[Options]] = {}
    for model in models:
        for name in list_declarations(model):
            if takes is None or name in takes:
                owners.setdefault(name, model)
    for name in values:
        if name not in owners:
            raise unknown_option(name, list(owners), of)
    return [
        model(**{name: value for name, value in values.items() if owners[name] is model}) for model in models
    ]


def takes(
    model: Callable[Parameters, object],
) -> Callable[[Callable[..., Result]], Callable[Parameters, Result]]:
    """Give a function the parameters of a model: type checkers, editors and `help` see each by its name.

    Args:
        model: A class made by `arguments_class`, with a field for every argument. Inherited fields are
            keywords. One that is declared again as `field()` has to be given.
    """

    def add(function: Callable[..., Result]) -> Callable[Parameters, Result]:
        parameters, lines = [], ["Options:"]
        for name, (kind, default, declared) in _list_arguments(model).items():
            is_positional = isinstance(default, Field) and default.kw_only is False
            place = (
                inspect.Parameter.POSITIONAL_OR_KEYWORD if is_positional else inspect.Parameter.KEYWORD_ONLY
            )
            default = default.default if isinstance(default, Field) else default
            is_required = default is MISSING
            stated = inspect.Parameter.empty if is_required else default
            parameters.append(inspect.Parameter(name, place, default=stated, annotation=kind))
            if declared is not None:
                lines.append(f"    {name}: {kind}" + ("" if is_required else f" = {default!r}"))
                lines += [f"        {line}" for line in _wrap(declared.help)]
        parameters.sort(key=lambda parameter: parameter.kind)
        described: Any = function
        described.__signature__ = inspect.Signature(
            parameters, return_annotation=function.__annotations__["return"]
        )
        described.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
        return function

    return add


def _list_arguments(model: Any) -> dict[str, tuple[str, Any, Option | None]]:
    """Return the written type, the default or field, and the declaration of each argument, by name."""
    listed: dict[str, tuple[str, Any, Option | None]] = {}
    declarations = list_declarations(model)
    for base in reversed(model.__mro__):
        for name, written in inspect.get_annotations(base).items():
            kind = str(written)
            if kind.startswith("Converted["):
                converted = cast(ast.Subscript, ast.parse(kind, mode="eval").body)
                kind = ast.unparse(cast(ast.Tuple, converted.slice).elts[0])
            listed[name] = kind, vars(base).get(name, MISSING), declarations.get(name)
    return listed


def _wrap(sentence: str) -> list[str]:
    """The lines of a sentence; most are short, and need no textwrap."""
    return textwrap.wrap(sentence, _LINE) if len(sentence) > _LINE else [sentence] if sentence else []


_LINE = 92
"""Characters of a line of a sentence in a docstring."""


def check_values(values: Mapping[str, Any], *models: type[Options]) -> None:
    """Check each value of a field that one of the models has.

    Raises:
        UsageError: A value is invalid.
    """
    for model in models:
        for name, declaration in list_declarations(model).items():
            if name in values:
                declaration.check(name, values[name])


def unknown_option(name: str, names: list[str], of: str) -> UsageError:
    """Return the error for an unknown option."""
    near = difflib.get_close_matches(str(name), names, n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    return UsageError(f"{name}: is no option of {of}", f"{guess}There are: {', '.join(names)}.")
