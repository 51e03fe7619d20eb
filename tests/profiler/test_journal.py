"""A journal cut off anywhere still tells all that was whole."""

from __future__ import annotations

import json
from pathlib import Path

import filelock
import numpy as np
import pytest

from pplan.profiler.journal import Journal, read
from pplan.profiler.memory import LossWorkspace, StepMemory
from pplan.profiler.passes import CountedBytes, LayerTimes, PassTimes
from pplan.profiler.timed_passes import PartTimes, SizeResult

COUNTED = CountedBytes(
    saved_bytes=[4, 8],
    saved_input_bytes=[0, 4],
    output_bytes=[4, 4],
    loss_saved_bytes=2,
    loss_output_bytes=4,
    memory=StepMemory(static=10, other=1, saved=(4, 8), forward=(1, 2), backward=(3, 4)),
    loss_workspace=LossWorkspace(5, 6),
    peak_bytes=30,
)
LAYERS = LayerTimes(
    np.array([0.1, 1 / 3]),
    np.array([0.2, 0.4]),
    np.array([0.01, 0.03]),
    np.array([0.02, 0.04]),
    PassTimes(0.5, 0.6, 0.05, 0.06),
)
PLAIN = LayerTimes(np.array([0.1, 1e-9]), np.array([0.2, 0.4]))
WHOLE = PassTimes(0.7, 0.8)
PARTS = PartTimes(np.array([0.0, 0.2]), np.array([0.1, 0.1]))
COUNTS = [(0, 0, 0, 0), (0, 0, 0, 0), (1, 0, 0, 0), (1, 1, 0, 0), (1, 1, 1, 0), (1, 1, 1, 1), (2, 1, 1, 1)]
"""Passes of layers, whole, parts, and rounds, after so many lines behind the first."""


def opened(path: Path, *, resume: bool = True, key: str = "key", layers: int = 2) -> Journal:
    return Journal.open(path, key, layers, resume=resume)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal of one size."""
    path = tmp_path / "a.journal"
    journal = opened(path)
    journal.write_counts(4, COUNTED)
    journal.write_pass(4, "layers", LAYERS)
    journal.write_pass(4, "whole", WHOLE)
    journal.write_pass(4, "parts", PARTS)
    journal.write_round(4, 1.5)
    journal.write_pass(4, "layers", PLAIN)
    journal.close()
    return path


def counts(kept: SizeResult) -> tuple[int, int, int, int]:
    rounds = kept.rounds
    return len(rounds.layers), len(rounds.whole), len(rounds.parts), len(kept.round_seconds)


def test_what_was_written_is_read_back_exactly(path: Path) -> None:
    journal = opened(path)
    journal.close()
    (kept,) = journal.sizes.values()
    assert (list(journal.sizes), kept.counted, kept.round_seconds, journal.seconds) == (
        [4],
        COUNTED,
        [1.5],
        1.5,
    )
    assert journal.passes == 4
    for found, put in zip(kept.rounds.layers, (LAYERS, PLAIN), strict=True):
        for name in ("forward", "backward", "forward_host", "backward_host"):
            assert np.array_equal(getattr(found, name), getattr(put, name))
        assert found.loss == put.loss
    assert kept.rounds.whole == [WHOLE]
    assert np.array_equal(kept.rounds.parts[0].input, PARTS.input)
    assert np.array_equal(kept.rounds.parts[0].weight, PARTS.weight)


def test_cut_off_at_any_byte_it_tells_the_whole_lines(path: Path) -> None:
    content = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == len(COUNTS) == 7
    for length in range(len(content) + 1):
        kept, end = read(content[:length], "key", 2)
        whole = [each for each in ends if each <= length]
        assert end == (whole[-1] if whole else 0)
        if len(whole) < 2:
            assert not kept
        else:
            assert counts(kept[4]) == COUNTS[len(whole) - 1]


def test_it_goes_on_behind_the_last_whole_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    journal = opened(path)
    assert counts(journal.sizes[4]) == COUNTS[5]
    journal.write_pass(4, "whole", WHOLE)
    journal.close()
    again = opened(path)
    again.close()
    assert counts(again.sizes[4]) == (1, 2, 1, 1)
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"{}", b"[]", b'{"size": 9, "round": 1}', b"\xff", b'{"size": 4, "pass": "no"}'),
        b'{"size": 4, "pass": "parts", "seconds": {"input": [1, 1%s], "weight": [1, 1]}}' % (b"0" * 400),
        b'{"size": 4, "round": 1%s}' % (b"0" * 400),
        b'{"size": 4, "round": -1}',
        b'{"size": 4, "round": NaN}',
        b'{"size": 4, "pass": "whole", "seconds": {"forward": "1", "backward": 1}}',
        b'{"size": 4, "pass": "whole", "seconds": {"forward": null, "backward": 1}}',
        b'{"size": 4, "pass": "layers", "seconds": {"forward": 1, "backward": [1, 1]}}',
        b'{"size": 4, "pass": "layers", "seconds": {"forward": [1, NaN], "backward": [1, 1]}}',
        b'{"size": 4, "pass": "layers", "seconds": {"forward": [1, 1], "backward": [1, -1]}}',
    ],
)
def test_nothing_is_read_behind_a_line_that_is_not_ours(path: Path, line: bytes) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    kept, end = read(b"".join([*lines[:4], line + b"\n", *lines[4:]]), "key", 2)
    assert counts(kept[4]) == COUNTS[3]
    assert end == sum(map(len, lines[:4]))


def test_another_keys_journal_or_another_number_of_layers_is_nothing(path: Path) -> None:
    content = path.read_bytes()
    assert read(content, "other", 2) == ({}, 0)
    assert read(content, "key", 3)[0] == {}


def test_without_resume_it_is_begun_anew_and_says_what_there_was(path: Path) -> None:
    journal = opened(path, resume=False)
    assert (journal.sizes, journal.passes, journal.passes_in_file) == ({}, 0, 4)
    assert not journal.is_worth_keeping
    journal.close()
    assert len(path.read_bytes().splitlines()) == 1


def test_parts_that_were_left_out_are_none(path: Path) -> None:
    journal = opened(path)
    journal.write_parts_left_out(4, "too large")
    journal.close()
    kept, _ = read(path.read_bytes(), "key", 2)
    assert (kept[4].parts_left_out, kept[4].rounds.parts) == ("too large", [])


def test_two_processes_do_not_write_the_same(path: Path) -> None:
    journal = opened(path)
    before = path.read_bytes()
    with pytest.raises(filelock.Timeout):
        opened(path, resume=False)
    assert path.read_bytes() == before
    journal.remove()
    assert not path.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("output_bytes", [4]), ("saved_input_bytes", [4, -1]), ("memory.forward", [1, 2, 3])],
)
def test_bytes_of_other_layers_or_below_zero_are_not_read(path: Path, field: str, value: list[int]) -> None:
    first, line, *others = path.read_bytes().splitlines()
    record = json.loads(line)
    *inside, name = field.split(".")
    (record["counted"][inside[0]] if inside else record["counted"])[name] = value
    changed = b"\n".join([first, json.dumps(record).encode(), *others, b""])
    assert read(changed, "key", 2) == ({}, len(first) + 1)
