"""A schedule as text: one line of actions for all devices, or one for each; read, checked and made a program.

    name: my-zb-h1
    source: Qi et al., ICLR 2024, section 2.1
    device i: F*(p-i) (B F)*i (B W F)*(m-i) W*i

A line `device i:` says in order what device i of p does with m micro-batches. `F` is the forward of the next
micro-batch that has had none on this device, `B` and `W` likewise; those of micro-batch m and later are left
out. Where a micro-batch has a W, its B computes the gradient of the input alone.

    F3  B[m-1-k]       of this micro-batch (0-based)
    F.1  B3.c          on this chunk of the device (0-based; `chunks: 2` says how many there are)
    ( ... )*n          so many times; none where n is below 1
    each c from 0 to v-1 ( ... )     for every value, upwards or downwards
    let f = F.0*p F.1*p              a list that starts again at its end: `f*3` takes the next three of it
    device 0: ...      of one device: stands instead of what `device i:` says; where several lines come
                       to be of one device (0 and p-1, of p = 1) the first counts

Numbers are p, m, i, v (chunks), the names of `each`, with + - * // % ( ) min max. `places: line` (the
default: one chunk a device), `loop` (all devices with their first chunk, then with their second, as
interleaved 1F1B) or `v` (two chunks: down the devices and back up, as ZB-V) says where the parts of the
layers are. `#` begins a comment; a line that begins with a blank continues the one above.

Schedules of the user are registered by name, from a text, a file or a plan.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from . import arguments
from .errors import FileError, UsageError, short_repr
from .program import Action, Program, Schedule, StageSlot
from .quantities import MOST_ACTIONS
from .schedules import PROGRAMS, PUBLISHED, SCHEDULES, looped_pipe, v_pipe
from .text_files import read_text

DEEPEST = 40
"""Brackets inside each other."""
MOST_NUMBER = 10**9
HELP = "docs/schedules.md describes the language."
_LITERAL = re.compile(r"([FBW])(\d{1,7})(?:\.(\d{1,7}))?")
_TOKEN = re.compile(
    rf"\s*(?:{_LITERAL.pattern}(?=\s*$|\s+[^\s*.\[]|\))|\d+|[A-Za-z_]\w*|//|[-+*%(),\[\].=:])"
)
_ACTION = re.compile(r"([FBW])(\d+)?")
_WORDS = {"each", "from", "to", "let", "min", "max"}


class ScheduleTextError(UsageError):
    """A schedule's text is invalid. The message names the line."""


Values = Mapping[str, int]
Number = Callable[[Values], int]
Read = TypeVar("Read")


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

    @property
    def _following(self) -> str:
        return self.words[self.at + 1] if self.at + 1 < len(self.words) else ""

    def take(self, expected: str = "") -> str:
        """The next word, which must be the `expected` one."""
        word = self.word
        if not word or (expected and word != expected):
            raise self.wrong(f"{short_repr(word or 'the end')} where {expected or 'a word'} should stand")
        self.at += 1
        return word

    def _nested(self, read: Callable[[], Read]) -> Read:
        """Read the content of a bracket or after a sign, at most `DEEPEST` levels deep."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.wrong(f"more than {DEEPEST} brackets inside each other")
        inner = read()
        self.depth -= 1
        return inner

    def _new_name(self, of: str) -> str:
        name = self.take()
        if not name.isidentifier() or name in self.names | _WORDS | self.lists or _ACTION.fullmatch(name):
            raise self.wrong(f"{short_repr(name)} cannot name a {of}")
        return name

    def read_list(self) -> tuple[str, Writer]:
        """The rest of `let NAME = ...`."""
        name = self._new_name("list")
        self.take("=")
        self.lists = set()  # a list takes from no other
        return name, self.read_sequence("")

    def read_row(self) -> tuple[Number | None, Writer]:
        """The rest of `device i: ...`."""
        if self.words[self.at : self.at + 2] == ["i", ":"]:
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
            literals = list[Written]()  # a plan's order may have a million
            while (match := _LITERAL.fullmatch(self.word)) and self._following not in ("*", ".", "["):
                literals.append(Written(match[1], int(match[2]), int(match[3] or 0)))
                self.at += 1
            terms.append(self._count_term(literals) if literals else self._term())
        if closing:
            self.take(closing)
        return lambda values, device: chain.from_iterable(term(values, device) for term in terms)

    def _count_term(self, actions: Sequence[Written]) -> Writer:
        line = self.line

        def write(values: Values, device: DeviceList) -> Iterator[Written]:  # noqa: ARG001 - called as all are
            for written in actions:
                device.count(line)
                yield written

        return write

    def _term(self) -> Writer:
        """An action, a list's next, a bracket or `each`, and how often."""
        if self.word == "each":
            return self._each()
        if self.word == "(":
            term = self._bracket()
        else:
            term = self._next_of(self.take()) if self.word in self.lists else self._action()
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
        return self._nested(lambda: self.read_sequence(")"))

    def _each(self) -> Writer:
        self.take("each")
        name = self._new_name("number")
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
        number: Number | None = _always(self._integer(match[2])) if match[2] else None
        if number is None and self.word == "[":
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
            yield Written(match[1], None if number is None else number(values), chunk(values))

        return write

    def read_number(self, level: int = 0) -> Number:
        """Sums of products of factors."""
        if level == len(_SIGNS):
            return self._factor()
        first, more = self.read_number(level + 1), list[tuple[str, Number]]()
        while self.word in _SIGNS[level]:
            more.append((self.take(), self.read_number(level + 1)))
        return _chained(first, more, self.line) if more else first

    def _factor(self) -> Number:
        word = self.take()
        if word.isdigit():
            return _always(self._integer(word))
        if word == "-":
            return _chained(_always(0), [("-", self._nested(self._factor))], self.line)
        if word == "(":
            inner = self._nested(self.read_number)
            self.take(")")
            return inner
        if word in ("min", "max"):
            self.take("(")
            inner = self._nested(self.read_number)
            self.take(",")
            second = self._nested(self.read_number)
            self.take(")")
            return _chained(inner, [(word, second)], self.line)
        if word not in self.names:
            raise self.wrong(f"{short_repr(word)} is no number; p, m, i, v and the names of `each` are")
        return lambda values: values[word]

    def _integer(self, digits: str) -> int:
        if len(digits) > 7:
            raise self.wrong(f"{short_repr(digits)} is too large a number")
        return int(digits)


def _always(value: int) -> Number:
    return lambda values: value  # noqa: ARG005 - called as numbers that depend on them are


_SIGNS = (("+", "-"), ("*", "//", "%"))
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


MOST_TEXT = 20_000_000
"""Characters."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,59}")
PLACES = ("line", "loop", "v")
_WEIGHTS = re.compile(r"\bW\d*\b")
_KEYS: dict[str, tuple[Callable[[str], Any], str]] = {
    "name": (NAME.fullmatch, "lower-case letters, digits, - and _, a letter first, at most 60"),
    "source": (
        lambda value: len(value) <= 300 and value.isprintable(),
        "one line of at most 300 characters",
    ),
    "places": (PLACES.__contains__, f"one of {', '.join(PLACES)}"),
    "chunks": (re.compile("0{0,2}[1-9]|0?[1-9][0-9]|[1-9][0-9]{2}").fullmatch, "a number from 1 to 999"),
}
SECOND_LINE = (
    "Write one line for a device, or make one of both: a line that begins with a blank continues the one "
    "above."
)


@dataclass(frozen=True)
class ScheduleText:
    """A schedule's text as it was read. `rows`: by line, the device that it is of (None: every other one) and
    its actions."""

    name: str
    source: str
    places: str
    chunks: int
    lists: Mapping[str, Writer]
    rows: Sequence[tuple[int, Number | None, Writer]]
    splits_backward: bool = False

    def program(self, stages: int, micro_batches: int, virtual_stages: int | None = None) -> Program:
        """Return the program for given numbers of stages, micro-batches and chunks per device.

        Raises:
            UsageError: Actions are missing, repeated, have an unknown micro-batch or chunk, or wait for each
                other forever. The message names the line.
        """
        try:
            return self._program(stages, micro_batches, virtual_stages)
        except ScheduleTextError as error:
            raise ScheduleTextError(f"schedule {self.name}: {error.what}", error.hint) from None

    def _program(self, stages: int, micro_batches: int, virtual_stages: int | None) -> Program:
        chunks = self.chunks if virtual_stages is None else virtual_stages
        if self.places != "loop" and chunks != self.chunks:
            raise UsageError(
                f"virtual stages {chunks}: {self.name} runs {self.chunks} on a device",
                f"Leave virtual stages at {self.chunks}.",
            )
        if 3 * stages * micro_batches * chunks > MOST_ACTIONS:
            raise UsageError(
                f"{stages} stages, {micro_batches} micro-batches, {chunks} chunks: more than {MOST_ACTIONS} "
                "actions",
                "Use fewer micro-batches.",
            )
        lines, actions = [], []
        values = {"p": stages, "m": micro_batches, "v": chunks}
        self._check_devices(values)
        for device in range(stages):
            line, device_actions = self._list(device, values)
            self._check_chunks(device_actions, device, line, chunks)
            lines.append(line)
            actions.append(tuple(device_actions))
        pipe = _pipe(self.places, stages, chunks)
        program = Program(tuple(actions), (pipe,), (0,) * micro_batches)
        try:
            from .program_order import resolve_order  # imports numpy, which names do not need

            resolve_order(program)
        except UsageError as error:
            stage = re.search(r"stage (\d+)", error.what)
            where = f"line {lines[int(stage[1])]}: " if stage else ""
            raise ScheduleTextError(f"{where}{error.what}", error.hint) from None
        return program

    def _check_devices(self, values: Values) -> None:
        """Check that every line of a device belongs to a different, existing device.

        `device 0` and `device p-1` are equal for a single stage and may both be given.

        Raises:
            ScheduleTextError: A device does not exist or has two lines.
        """
        earlier: dict[tuple[int | str, int], int] = {}
        for line, which, _ in self.rows:
            device = "i" if which is None else which(values)
            if isinstance(device, int) and not 0 <= device < values["p"]:
                raise ScheduleTextError(
                    f"line {line}: device {device}, of devices 0 to {values['p'] - 1}",
                    "Remove the line, or use more stages; `device i:` is of every device without a line of "
                    "its own.",
                )
            with_more = 0 if which is None else which({**values, "p": values["p"] + 1})
            first = earlier.setdefault((device, with_more), line)
            if first != line:
                raise ScheduleTextError(
                    f"line {line}: device {device}: line {first} is of it already", SECOND_LINE
                )

    def _check_chunks(self, actions: Sequence[Action], device: int, line: int, chunks: int) -> None:
        """Check that the actions are on existing chunks.

        Raises:
            ScheduleTextError: A chunk does not exist.
        """
        for action in actions:
            if not 0 <= action.chunk < chunks:
                has = f"Count chunks from 0 to {chunks - 1}"
                hints = {
                    "line": "Write `places: v` or `places: loop`: with a line a device has one chunk.",
                    "v": f"{has}: with `places: v` a device has two.",
                    "loop": f"{has}, or say `chunks: {action.chunk + 1}`.",
                }
                raise ScheduleTextError(
                    f"line {line}: device {device}: {action} is on chunk {action.chunk}, and a device has "
                    f"{chunks}",
                    f"{has}." if action.chunk < 0 else hints[self.places],
                )

    def _list(self, device: int, values: Values) -> tuple[int, list[Action]]:
        """Return the line and the actions of a device."""
        values = {**values, "i": device}
        device_rows = [row for row in self.rows if row[1] is not None and row[1](values) == device]
        row = next(iter(device_rows or [row for row in self.rows if row[1] is None]), None)
        if row is None:
            raise ScheduleTextError(
                f"device {device} of {values['p']} has no line",
                f"Add `device {device}: ...`, or `device i: ...` for all that have none.",
            )
        line, _, write = row
        most = 12 * values["m"] * values["v"] + 1000
        return line, _number(write(values, DeviceList(self.lists, most)), line, values["m"])

    @property
    def schedule(self) -> Schedule:
        """The schedule, to be registered by its name."""
        return Schedule(
            self.name,
            self.program,
            source=self.source or "the user's own",
            needs="any list of actions"
            + (", several chunks of layers on a device" if self.chunks > 1 else ""),
            bubble="see pplan simulate",
            in_flight_formula="see pplan simulate",
            default_virtual_stages=self.chunks,
            any_virtual_stages=True,
            splits_backward=self.splits_backward,
        )


def _number(written: Iterator[Written], line: int, micro_batches: int) -> list[Action]:
    """Return the actions with their micro-batches.

    Actions without a micro-batch get the next one that the text has not named. Later micro-batches are
    omitted.
    """
    done: Counter[tuple[str, int]] = Counter()
    numbers = set[tuple[str, int, int]]()
    actions = []
    for kind, number_in_text, chunk in written:
        if number_in_text is None:
            while (kind, chunk, done[kind, chunk]) in numbers:
                done[kind, chunk] += 1
            number = done[kind, chunk]
            done[kind, chunk] += 1
        elif 0 <= number_in_text < micro_batches:
            number = number_in_text
            numbers.add((kind, chunk, number))
        else:
            raise ScheduleTextError(
                f"line {line}: {kind}{number_in_text}: there are {micro_batches} micro-batches, from 0",
                "Name a micro-batch below m.",
            )
        if number < micro_batches:
            actions.append(Action(kind, number, chunk))  # type: ignore[arg-type]  # F, B or W: it was read
    return actions


def _pipe(places: str, stages: int, chunks: int) -> tuple[StageSlot, ...]:
    if places == "v":
        return v_pipe(stages)[0]
    return looped_pipe(stages, chunks)[0]


def read_schedule(text: str) -> ScheduleText:
    """The schedule that a text describes. Raises ScheduleTextError, with the line."""
    if len(text) > MOST_TEXT:
        raise ScheduleTextError(
            f"the schedule's text has {len(text)} characters", f"Write at most {MOST_TEXT}."
        )
    fields, line_of = dict[str, str](), dict[str, int]()
    splits = False
    lists: dict[str, Writer] = {}
    rows: list[tuple[int, Number | None, Writer]] = []
    for line, content in _logical_lines(text):
        word = content.split(None, 1)[0]
        splits |= word in ("let", "device") and _WEIGHTS.search(content) is not None
        if word == "let":
            name, write = LineReader(content[3:], line, set(lists)).read_list()
            lists[name] = write
        elif word == "device":
            rows.append((line, *LineReader(content[6:], line, set(lists)).read_row()))
        else:
            key, colon, value = content.partition(":")
            if not colon or key.strip() not in _KEYS or key.strip() in fields:
                raise ScheduleTextError(
                    f"line {line}: {short_repr(content)} is no line of a schedule, or stands twice",
                    f"Lines begin with {', '.join(f'{key}:' for key in _KEYS)}, let or device. {HELP}",
                )
            fields[key.strip()] = _checked(key.strip(), value.strip(), line)
            line_of[key.strip()] = line
    if "name" not in fields or not rows:
        missing = "`name: ...`" if "name" not in fields else "`device i: ...`"
        raise ScheduleTextError(f"the schedule's text has no line {missing}", HELP)
    places = fields.get("places", "line")
    chunks = int(fields.get("chunks", "1" if places == "line" else "2"))
    if (places == "line" and chunks != 1) or (places == "v" and chunks != 2):
        raise ScheduleTextError(
            f"line {line_of['chunks']}: chunks {chunks} with places {places}",
            "A line has 1 chunk a device, a v has 2, a loop any number.",
        )
    return ScheduleText(fields["name"], fields.get("source", ""), places, chunks, lists, rows, splits)


def _checked(key: str, value: str, line: int) -> str:
    is_allowed, rule = _KEYS[key]
    if not is_allowed(value):
        raise ScheduleTextError(f"line {line}: {key}: {short_repr(value)}", f"Write {rule}.")
    return value


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number and content of each line, without comments and with continued lines joined."""
    start, content = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].rstrip()
        if not line.strip():
            continue
        if line[0].isspace() and content:
            content += " " + line.strip()
            continue
        if content:
            yield start, content
        start, content = number, line.strip()
    if content:
        yield start, content


def write_program(name: str, program: Program, source: str = "") -> str:
    """The text of a program of one pipe, with every action named: it is read back as the same program, for
    these numbers of devices and micro-batches.

    Raises UsageError for a program of several pipes, of parts of micro-batches, or that updates meanwhile.
    """
    places = name_places(program)
    rows = [f"device {device}: {' '.join(map(str, own))}" for device, own in enumerate(program.actions)]
    head = [f"name: {name}", *([f"source: {source}"] if source else []), f"places: {places}"]
    return "\n".join([*head, f"chunks: {program.chunks}", *rows]) + "\n"


def name_places(program: Program) -> str:
    """`line`, `loop` or `v`. Raises UsageError for what the language has no word for."""
    plain = len(program.pipes) == 1 and program.shares is None and program.update_every is None
    if plain:
        for places in PLACES:
            fits = {"line": program.chunks == 1, "loop": True, "v": program.chunks == 2}[places]
            if fits and _pipe(places, program.devices, program.chunks) == program.pipes[0]:
                return places
    raise UsageError(
        "a schedule of several pipes, of halves of micro-batches or with updates meanwhile has no text",
        "Use a synchronous schedule whose micro-batches all go the same way.",
    )


WORDS = ("auto", "any", "synthesized")
"""That stand for a choice of schedules."""
SUFFIX = ".schedule"
LARGEST = 20_000_000
"""Bytes of a file."""


def register_schedule(schedule: Schedule | ScheduleText | str) -> Schedule:
    r"""Register a schedule by its name. docs/schedules.md describes its text.

        >>> import pplan
        >>> schedule = pplan.register_schedule("name: fill-drain\ndevice i: F*m B*m")
        >>> pplan.simulate_costs(
        ...     schedule="fill-drain", stages=4, micro_batches=8, forward_ms=10, backward_ms=20
        ... )
        <SimulatedStep: 4 stages, 8 micro-batches, 330 ms a step, bubble 27.3 %>

    A schedule of the same name is replaced.

    Raises:
        UsageError: The name is that of a published schedule, or the text is invalid.
    """
    if not isinstance(schedule, str | ScheduleText | Schedule):
        raise UsageError(
            f"schedule={short_repr(schedule)}: is not a text of a schedule", f"Give its lines. {HELP}"
        )
    text = read_schedule(schedule) if isinstance(schedule, str) else schedule
    registered = text.schedule if isinstance(text, ScheduleText) else text
    if registered.name in (*PUBLISHED, *WORDS):
        raise UsageError(f"schedule {registered.name!r} is pplan's own", "Give yours another name.")
    _ORDERS.pop(registered.name, None)
    PROGRAMS.forget(registered.name)
    SCHEDULES[registered.name] = registered
    return registered


_Counts = tuple[int, int, int]
_ORDERS: dict[str, dict[_Counts, Program]] = {}
"""Of schedules that are known from plans alone: by name, devices, micro-batches and virtual stages."""


def register_order(text: ScheduleText, stages: int, micro_batches: int, virtual_stages: int) -> Schedule:
    """Return the schedule of a plan's order, which is defined for these numbers only.

    It is registered unless a schedule of this name with the same order is known.

    Raises:
        UsageError: The text does not fit these numbers, or a schedule of this name has another order.
    """
    counts = (stages, micro_batches, virtual_stages)
    program = text.program(*counts)
    if text.name not in SCHEDULES:
        register_schedule(replace(text.schedule, build=partial(_order_of_a_plan, text.name)))
        _ORDERS[text.name] = {}
    orders = _ORDERS.get(text.name)
    other = SCHEDULES[text.name].program(*counts) if orders is None else orders.setdefault(counts, program)
    if (other.actions, other.pipes) != (program.actions, program.pipes):
        raise UsageError(
            f"schedule {text.name!r} is known with another order for {stages} devices and {micro_batches} "
            "micro-batches",
            "Rename one of the two.",
        )
    return SCHEDULES[text.name]


def _order_of_a_plan(name: str, *counts: int) -> Program:
    orders = _ORDERS.get(name, {})
    if counts not in orders:
        numbers = "; ".join(f"{p} devices with {m} micro-batches" for p, m, _ in orders)
        raise UsageError(
            f"schedule {name!r} is known of a plan alone, for {numbers}, and not for {counts[0]} with "
            f"{counts[1]}",
            "Give the schedule's own file.",
        )
    return orders[counts]


def read_schedule_file(path: Path) -> str:
    """Register the schedule that a file describes and return its name.

    Raises:
        FileError: The file cannot be read.
        UsageError: The file describes no schedule. The message names the line.
    """
    if path.is_file() and path.stat().st_size > LARGEST:
        raise FileError(f"{path}: has more than {LARGEST} bytes", HELP)
    try:
        return register_schedule(read_text(path, "schedule")).name
    except ScheduleTextError as error:
        raise UsageError(f"{path}: {error.what}", error.hint) from error


def schedule_word(field: str, value: Any, besides: Sequence[str] = WORDS) -> str:
    """Return the name of a known schedule, a word of `besides`, or the name of the schedule in a file.

    Raises:
        UsageError: The name is unknown.
    """
    text = str(value) if isinstance(value, Path) else arguments.word(field, value)
    if text.endswith(SUFFIX):
        return read_schedule_file(Path(text))
    if text in besides or text in SCHEDULES:
        return text
    raise arguments.unknown_word(field, text, (*besides, *SCHEDULES), f"; or a file of your own, my{SUFFIX}")


def optional_schedule(field: str, value: Any) -> str | None:
    """Return the name of a schedule like `schedule_word`, or None for None."""
    return None if value is None else schedule_word(field, value, ())
