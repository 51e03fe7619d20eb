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
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import UsageError, short_repr
from ..quantities import MOST_ACTIONS
from .action import Action, Program, Schedule, StageSlot
from .interleaved import looped_pipe
from .text_progress import check_progress
from .text_reader import HELP, DeviceList, LineReader, Number, ScheduleTextError, Values, Writer, Written
from .zb_v import v_pipe

MOST_TEXT = 20_000_000
"""Characters."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,59}")
PLACES = ("line", "loop", "v")
_WEIGHTS = re.compile(r"\bW\d*\b")
_KEYS = ("name", "source", "places", "chunks")
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
        """What runs where. Raises UsageError, with the line, for actions that are missing or repeated, of no
        micro-batch or chunk, or that wait for each other for ever."""
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
            line, own = self._list(device, values)
            self._check_chunks(own, device, line, chunks)
            _check_complete(own, device, line, micro_batches, chunks)
            lines.append(line)
            actions.append(tuple(own))
        pipe = _pipe(self.places, stages, chunks)
        check_progress(actions, pipe, lines)
        return Program(tuple(actions), (pipe,), (0,) * micro_batches)

    def _check_devices(self, values: Values) -> None:
        """Raises ScheduleTextError for a line of a device that there is not, or that an earlier line is of;
        `device 0` and `device p-1`, which are one with one stage alone, may stand beside each other."""
        earlier: dict[tuple[int, int], int] = {}
        for line, which, _ in self.rows:
            if which is None:
                continue
            device = which(values)
            if not 0 <= device < values["p"]:
                raise ScheduleTextError(
                    f"line {line}: device {device}, of devices 0 to {values['p'] - 1}",
                    "Remove the line, or use more stages; `device i:` is of every device without a line of "
                    "its own.",
                )
            first = earlier.setdefault((device, which({**values, "p": values["p"] + 1})), line)
            if first != line:
                raise ScheduleTextError(
                    f"line {line}: device {device}: line {first} is of it already", SECOND_LINE
                )

    def _check_chunks(self, own: Sequence[Action], device: int, line: int, chunks: int) -> None:
        """Raises ScheduleTextError for an action on a chunk that there is not."""
        for action in own:
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
        values = {**values, "i": device}
        own = [row for row in self.rows if row[1] is not None and row[1](values) == device]
        row = next(iter(own or [row for row in self.rows if row[1] is None]), None)
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
            lambda stages, micro_batches, chunks: self.program(stages, micro_batches, chunks),
            source=self.source or "the user's own",
            needs="any list of actions"
            + (", several chunks of layers on a device" if self.chunks > 1 else ""),
            bubble="see pplan simulate",
            in_flight_formula="see pplan simulate",
            default_virtual_stages=self.chunks,
            splits_backward=self.splits_backward,
        )


def _number(written: Iterator[Written], line: int, micro_batches: int) -> list[Action]:
    """The actions; those without a micro-batch are of the next that the text has not named before; later
    micro-batches are left out."""
    done: Counter[tuple[str, int]] = Counter()
    numbers = set[tuple[str, int, int]]()
    own = []
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
            own.append(Action(kind, number, chunk))  # type: ignore[arg-type]  # F, B or W: it was read
    return own


def _check_complete(own: Sequence[Action], device: int, line: int, micro_batches: int, chunks: int) -> None:
    times = Counter(own)
    where = f"line {line}: device {device}"
    for action, count in times.items():
        if count > 1:
            raise ScheduleTextError(f"{where}: {action} stands {count} times", "Name every action once.")
    all_actions = (
        Action(kind, m, c) for kind in ("F", "B") for c in range(chunks) for m in range(micro_batches)
    )
    for action in all_actions:
        if action not in times:
            raise ScheduleTextError(
                f"{where}: {action} is missing, with {micro_batches} micro-batches",
                "Every micro-batch needs an F and a B on every chunk; repeat more often: what is too much is "
                "left out.",
            )


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
    line_of_devices: dict[str, int] = {}
    for line, content in _logical_lines(text):
        word = content.split(None, 1)[0]
        splits |= word in ("let", "device") and _WEIGHTS.search(content) is not None
        if word == "let":
            name, write = LineReader(content[3:], line, set(lists)).read_list()
            lists[name] = write
        elif word == "device":
            rows.append((line, *LineReader(content[6:], line, set(lists)).read_row()))
            _refuse_second_line(content, line, line_of_devices)
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


def _refuse_second_line(content: str, line: int, earlier: dict[str, int]) -> None:
    """Raises ScheduleTextError for a line of `device`s that an earlier one is of, in the same words."""
    devices = "".join(content.split(":")[0].split()[1:])
    first = earlier.setdefault(devices, line)
    if first != line:
        raise ScheduleTextError(
            f"line {line}: {short_repr(content)}: line {first} is of device {devices} already", SECOND_LINE
        )


def _checked(key: str, value: str, line: int) -> str:
    allowed = {
        "name": bool(NAME.fullmatch(value)),
        "source": len(value) <= 300 and value.isprintable(),
        "places": value in PLACES,
        "chunks": value.isascii() and value.isdigit() and 1 <= len(value) <= 3 and int(value) > 0,
    }
    if not allowed[key]:
        rules = {
            "name": "lower-case letters, digits, - and _, a letter first, at most 60",
            "source": "one line of at most 300 characters",
            "places": f"one of {', '.join(PLACES)}",
            "chunks": "a number from 1 to 999",
        }
        raise ScheduleTextError(f"line {line}: {key}: {short_repr(value)}", f"Write {rules[key]}.")
    return value


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, content) without comments, continued lines joined."""
    start, content = 0, ""
    for number, raw in enumerate(text.splitlines(), 1):
        own = raw.split("#", 1)[0].rstrip()
        if not own.strip():
            continue
        if own[0].isspace() and content:
            content += " " + own.strip()
            continue
        if content:
            yield start, content
        start, content = number, own.strip()
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
