"""One line of a schedule's text: its actions, repetitions, lists and numbers become functions.

The language is described in `schedule_text`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from ..errors import UsageError, short_repr

DEEPEST = 40
"""Brackets inside each other."""
MOST_NUMBER = 10**9
HELP = "docs/schedules.md describes the language."
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_]\w*)|(//|[-+*%(),\[\].=:]))")
_ACTION = re.compile(r"([FBW])(\d+)?")
_WORDS = {"each", "from", "to", "let", "min", "max"}


class ScheduleTextError(UsageError):
    """What is wrong with a schedule's text, and in which line."""


Values = Mapping[str, int]
Number = Callable[[Values], int]


class Written(NamedTuple):
    """An action as it stands in the text; None: the next micro-batch."""

    kind: str
    micro_batch: int | None
    chunk: int


@dataclass
class DeviceList:
    """A device whose list is being made: the lists that it takes from, and how many words it has had."""

    lists: Mapping[str, Writer]
    most: int
    words: int = 0
    open_lists: dict[str, Iterator[Written]] = field(default_factory=dict)

    def count(self, line: int) -> None:
        """One more word. Raises ScheduleTextError where there are far more than actions."""
        self.words += 1
        if self.words > self.most:
            raise ScheduleTextError(
                f"line {line}: a device has more than {self.most} actions and repetitions",
                "Repeat no more often than there are micro-batches.",
            )


Writer = Callable[[Values, DeviceList], Iterator[Written]]


class LineReader:
    """Reads one line: words become functions of the numbers."""

    def __init__(self, text: str, line: int, lists: set[str]) -> None:
        self.line, self.lists, self.depth = line, lists, 0
        self.names = {"p", "m", "i", "v"}
        self.words = list(self._split(text))
        self.at = 0

    def _split(self, text: str) -> Iterator[str]:
        text, position = text.rstrip(), 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if not match:
                raise self.wrong(f"{short_repr(text[position:].strip()[:20])} is no word of a schedule")
            yield match[0].strip()
            position = match.end()

    def wrong(self, what: str) -> ScheduleTextError:
        """An error of this line."""
        return ScheduleTextError(f"line {self.line}: {what}", HELP)

    @property
    def word(self) -> str:
        """The word that comes next; empty at the end."""
        return self.words[self.at] if self.at < len(self.words) else ""

    def take(self, expected: str = "") -> str:
        """The next word, which must be the `expected` one."""
        word = self.word
        if not word or (expected and word != expected):
            raise self.wrong(f"{short_repr(word or 'the end')} where {expected or 'a word'} should stand")
        self.at += 1
        return word

    def deeper(self, by: int) -> None:
        """A bracket opens or closes."""
        self.depth += by
        if self.depth > DEEPEST:
            raise self.wrong(f"more than {DEEPEST} brackets inside each other")

    def read_list(self) -> tuple[str, Writer]:
        """The rest of `let NAME = ...`."""
        name = self.take()
        if not name.isidentifier() or name in self.names | _WORDS | self.lists or _ACTION.fullmatch(name):
            raise self.wrong(f"{short_repr(name)} cannot name a list")
        self.take("=")
        self.lists = set()  # a list takes from no other
        return name, self.read_sequence("")

    def read_row(self) -> tuple[Number | None, Writer]:
        """The rest of `device i: ...`."""
        if self.word == "i" and self.words[self.at + 1 : self.at + 2] == [":"]:
            self.at += 1
            which = None
        else:
            self.names -= {"i"}
            which = self.read_number()
            self.names |= {"i"}
        self.take(":")
        return which, self.read_sequence("")

    def read_sequence(self, closing: str) -> Writer:
        """Terms up to the closing bracket, or to the end."""
        terms: list[Writer] = []
        while self.word and self.word != closing:
            literals = self._read_literals()
            terms.append(_write_literals(literals, self.line) if literals else self.read_term())
        if closing:
            self.take(closing)

        def write(values: Values, device: DeviceList) -> Iterator[Written]:
            for term in terms:
                yield from term(values, device)

        return write

    def _read_literals(self) -> list[Written]:
        """The next words as far as they are `F3` or `B3.1`, not repeated: those of a plan's order, of which
        there may be a million."""
        actions, words, count = list[Written](), self.words, len(self.words)
        while self.at < count:
            word, end, chunk = words[self.at], self.at + 1, "0"
            if word[0] not in "FBW" or not word[1:].isdigit() or len(word) > 8:
                break
            if end + 1 < count and words[end] == "." and words[end + 1].isdigit():
                chunk, end = words[end + 1], end + 2
            if len(chunk) > 7 or (end < count and words[end] in "*.["):
                break
            actions.append(Written(word[0], int(word[1:]), int(chunk)))
            self.at = end
        return actions

    def read_term(self) -> Writer:
        """An action, a list's next, a bracket or `each`, and how often."""
        if self.word == "(":
            term = self._bracket()
        elif self.word == "each":
            return self._each()
        elif self.word in self.lists:
            term = self._next_of(self.take())
        else:
            term = self._action()
        if self.word != "*":
            return term
        self.take("*")
        count, line = self._factor(), self.line

        def write(values: Values, device: DeviceList) -> Iterator[Written]:
            for _ in range(count(values)):
                device.count(line)
                yield from term(values, device)

        return write

    def _bracket(self) -> Writer:
        self.take("(")
        self.deeper(1)
        inner = self.read_sequence(")")
        self.deeper(-1)
        return inner

    def _each(self) -> Writer:
        self.take("each")
        name = self.take()
        if not name.isidentifier() or name in self.names | _WORDS | self.lists or _ACTION.fullmatch(name):
            raise self.wrong(f"{short_repr(name)} cannot name a number")
        self.take("from")
        first = self.read_number()
        self.take("to")
        last = self.read_number()
        self.names |= {name}
        inner = self._bracket()
        self.names -= {name}
        line = self.line

        def write(values: Values, device: DeviceList) -> Iterator[Written]:
            low, high = first(values), last(values)
            for value in range(low, high + 1) if low <= high else range(low, high - 1, -1):
                device.count(line)
                yield from inner({**values, name: value}, device)

        return write

    def _next_of(self, name: str) -> Writer:
        line = self.line

        def write(values: Values, device: DeviceList) -> Iterator[Written]:
            if name not in device.open_lists:
                whole = list(device.lists[name](values, device))
                if not whole:
                    raise ScheduleTextError(f"line {line}: the list {name} is empty", HELP)
                device.open_lists[name] = cycle(whole)
            device.count(line)
            yield next(device.open_lists[name])

        return write

    def _action(self) -> Writer:
        word = self.take()
        match = _ACTION.fullmatch(word)
        if not match:
            raise self.wrong(f"{short_repr(word)} is no action (F, B, W), list or bracket")
        kind, digits = match[1], match[2]
        number: Number | None = None
        if digits:
            number = _always(self._integer(digits))
        elif self.word == "[":
            self.take("[")
            number = self.read_number()
            self.take("]")
        chunk = _always(0)
        if self.word == ".":
            self.take(".")
            chunk = self._factor()
        line = self.line

        def write(values: Values, device: DeviceList) -> Iterator[Written]:
            device.count(line)
            yield Written(kind, None if number is None else number(values), chunk(values))

        return write

    def read_number(self) -> Number:
        """Sums of products."""
        return self._chain(("+", "-"), self._product)

    def _product(self) -> Number:
        return self._chain(("*", "//", "%"), self._factor)

    def _chain(self, signs: tuple[str, ...], read: Callable[[], Number]) -> Number:
        first, more = read(), list[tuple[str, Number]]()
        while self.word in signs:
            more.append((self.take(), read()))
        return _chained(first, more, self.line) if more else first

    def _factor(self) -> Number:
        word = self.take()
        if word.isdigit():
            return _always(self._integer(word))
        if word == "(":
            self.deeper(1)
            inner = self.read_number()
            self.take(")")
            self.deeper(-1)
            return inner
        if word == "-":
            self.deeper(1)
            inner = self._factor()
            self.deeper(-1)
            return _chained(_always(0), [("-", inner)], self.line)
        if word in ("min", "max"):
            self.take("(")
            self.deeper(1)
            first = self.read_number()
            self.take(",")
            second = self.read_number()
            self.take(")")
            self.deeper(-1)
            return _chained(first, [(word, second)], self.line)
        if word not in self.names:
            raise self.wrong(f"{short_repr(word)} is no number; p, m, i, v and the names of `each` are")
        return lambda values: values[word]

    def _integer(self, digits: str) -> int:
        if len(digits) > 7:
            raise self.wrong(f"{short_repr(digits)} is too large a number")
        return int(digits)


def _write_literals(actions: Sequence[Written], line: int) -> Writer:
    def write(values: Values, device: DeviceList) -> Iterator[Written]:  # noqa: ARG001 - called as all are
        for written in actions:
            device.count(line)
            yield written

    return write


def _always(value: int) -> Number:
    return lambda values: value  # noqa: ARG005 - called as numbers that depend on them are


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}


def _chained(first: Number, more: Sequence[tuple[str, Number]], line: int) -> Number:
    """Operations one after another, from the left."""

    def value(values: Values) -> int:
        result = first(values)
        for sign, number in more:
            right = number(values)
            if sign in ("//", "%") and right == 0:
                raise ScheduleTextError(f"line {line}: {sign} 0", "Divide by another number.")
            result = _OPERATIONS[sign](result, right)
            if abs(result) > MOST_NUMBER:
                raise ScheduleTextError(f"line {line}: a number of {result}", "Write smaller numbers.")
        return result

    return value
