"""Schedules as text: the published ones written in the language are the published ones, and what is wrong is
said with its line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from pplan.cost_models.errors import FileError, PplanError, UsageError
from pplan.cost_models.program_order import resolve_order
from pplan.cost_models.schedule_text import (
    read_schedule,
    read_schedule_file,
    register_order,
    register_schedule,
    schedule_word,
    write_program,
)
from pplan.cost_models.schedules import PUBLISHED, SCHEDULES

ZB_V = """
places: v
device i: F*(2*(p-i)-1) (F.1 F)*i (F.1 B.1 W.1)*(p-i)
  (F B W F.1 B.1 W.1)*(max(m, 2*p-1) - 2*p+i+1) (B W F.1 B.1 W.1)*(p-i-1)
  (B B.1)*i (B W)*(p-i) W.1*i W*i
"""
INTERLEAVED = """
places: loop
let f = each c from 0 to v-1 (F.c*p)
let b = each c from v-1 to 0 (B.c*p)
device i: f*min(v*m, (v-1)*p + 2*(p-1-i)) (f b)*(v*m - ((v-1)*p + 2*(p-1-i)))
  b*min(v*m, (v-1)*p + 2*(p-1-i))
"""
TEXTS = {
    "naive": "device i: (F B)*m",
    "gpipe": "device i: F*m each k from m-1 to 0 (B[k])",
    "1f1b": "device i: F*(p-1-i) (F B)*m B*m",
    "zb-h1": "device i: F*(p-i) (B F)*i (B W F)*(m-i) B*m W*m",
    "zb-h2": "device i: F*(2*(p-i)-1) (B F)*(2*i) (B W F)*(m-2*i) B*m W*m",
    "looped-bfs": "places: loop\ndevice i: each c from 0 to v-1 (F.c*m) each c from v-1 to 0 "
    "(each k from m-1 to 0 (B[k].c))",
    "interleaved": INTERLEAVED,
    "zb-v": ZB_V,
}


@pytest.mark.parametrize("name", TEXTS)
def test_published_schedules_can_be_written(name: str) -> None:
    text = read_schedule(f"name: mine\n{TEXTS[name]}\n")
    for p in range(1, 6):
        for m in range(1, 12):
            if name == "interleaved" and m % p:
                continue
            own, published = text.program(p, m), SCHEDULES[name].program(p, m)
            assert (own.actions, own.pipes, own.pipe_of) == (
                published.actions,
                published.pipes,
                published.pipe_of,
            ), (p, m)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_program_written_out_is_read_back(name: str) -> None:
    program = SCHEDULES[name].program(4, 8)
    plain = len(program.pipes) == 1 and program.shares is None and program.update_every is None
    if not plain:
        with pytest.raises(UsageError, match="has no text"):
            write_program("mine", program)
        return
    back = read_schedule(write_program("mine", program, "a paper")).program(4, 8)
    assert (back.actions, back.pipes) == (program.actions, program.pipes)


def test_a_device_may_have_a_line_of_its_own() -> None:
    text = read_schedule("name: mine\ndevice p-1: (F B)*m\ndevice i: F*m B*m  # all of them\n")
    program = text.program(3, 2)
    assert [" ".join(map(str, own)) for own in program.actions] == ["F0 F1 B0 B1"] * 2 + ["F0 B0 F1 B1"]


def test_of_lines_of_one_device_by_their_numbers_the_first_counts() -> None:
    program = read_schedule("name: mine\ndevice 0: (F B)*m\ndevice p-1: F*m B*m\n").program(1, 2)
    assert " ".join(map(str, program.actions[0])) == "F0 B0 F1 B1"


WRONG = {
    "device i: (F B)*m": "no line `name",
    "name: mine": "no line `device",
    "name: 1f1b!\ndevice i: (F B)*m": "line 1: name: '1f1b!'",
    "name: mine\nname: other\ndevice i: (F B)*m": "line 2: 'name: other'",
    "name: mine\nsteps: 3\ndevice i: (F B)*m": "line 2: 'steps: 3'",
    "name: mine\nplaces: ring\ndevice i: (F B)*m": "line 2: places: 'ring'",
    "name: mine\nchunks: 2\ndevice i: (F B)*m": "line 2: chunks 2 with places line",
    "name: mine\n\ndevice i: (F Q)*m": "line 3: 'Q' is no action",
    "name: mine\ndevice i: (F B*m": "line 2: 'the end'",
    "name: mine\ndevice i: F*m B*k": "line 2: 'k' is no number",
    "name: mine\ndevice i: F*m B*(m//0)": "line 2: // 0",
    "name: mine\ndevice i: F*m B*99999999": "line 2: '99999999' is too large",
    "name: mine\ndevice i: F*m $": "line 2: '$' is no word",
    "name: mine\ndevice i: F*m B*(m-1)": "line 2: stage 0: B7 is missing",
    "name: mine\ndevice i: F*m B*m F0": "line 2: stage 0 runs F0 twice",
    "name: mine\ndevice i: F*m B*m F.1": "line 2: device 0: F0.1 is on chunk 1",
    "name: mine\ndevice i: F3 F3 F*m B*m": "line 2: stage 0 runs F3 twice",
    "name: mine\ndevice i: F9 F*m B*m": "line 2: F9: there are 8 micro-batches",
    "name: mine\ndevice i: B*m F*m": "line 2: the actions wait for each other: stage 0 "
    "waits at B0 for F0 of stage 0",
    "name: mine\ndevice i: B F*m B*m": "stage 0 waits at B0 for F0 of stage 0",
    "name: mine\ndevice i: F*m B*m\ndevice 1: (F B)*m": "line 3: the actions wait for each other: stage 1 "
    "waits at B0 for B0 of stage 2; stage 2 waits at F1 for F1 of stage 1",
    "name: mine\ndevice 0: F*m B*m": "device 1 of 3 has no line",
    "name: mine\ndevice i: F*m B*m\ndevice 7: F*m B*m": "line 3: device 7, of devices 0 to 2",
    "name: mine\ndevice i: F*m B*m\ndevice p-4: F": "line 3: device -1, of devices 0 to 2",
    "name: mine\ndevice i: F*m B*m\n\ndevice i: F": "line 4: device i: line 2 is of it already",
    "name: mine\ndevice p-1: F*m\ndevice p - 1 : B*m": "line 3: device 2: line 2 is of it already",
    "name: mine\ndevice i: F*m B*m\ndevice 1: F*m B*m\ndevice 2-1: B*m": "line 4: device 1: line 3 is of it",
    "name: mine\ndevice i: ((F*9999)*9999)*9999 B*m": "actions and repetitions",
    "name: mine\ndevice i: " + "(" * 50 + "F" + ")" * 50: "brackets",
    "name: mine\ndevice i: F*" + "-" * 5000 + "1": "brackets",
    "name: mine\ndevice i: F*m B*(" + "m*" * 2_000 + "1)": "a number of",
    "name: mine\nlet f = f\ndevice i: f*m B*m": "'f' is no action",
    "name: mine\nlet f = (F*0)\ndevice i: f*m B*m": "the list f is empty",
    "name: mine\nlet p = F\ndevice i: p*m B*m": "'p' cannot name a list",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_wrong_is_said_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        read_schedule(text).program(3, 8)
    assert message in error.value.what
    assert len(error.value.what) < 300
    assert error.value.hint


@pytest.mark.parametrize(
    ("places", "hint"),
    [("line", "Write `places: v` or `places: loop`"), ("v", "has two"), ("loop", "say `chunks: 3`")],
)
def test_what_to_do_about_a_chunk_that_there_is_not(places: str, hint: str) -> None:
    """What is advised can be written."""
    text = f"name: mine\nplaces: {places}\ndevice i: F*m F.1*m F.2*m B.2*m B.1*m B*m"
    with pytest.raises(UsageError) as error:
        read_schedule(text).program(3, 8)
    assert hint in error.value.hint


def test_the_next_micro_batch_is_one_that_the_text_has_not_named() -> None:
    own = read_schedule("name: mine\ndevice i: F1 F3 F*m B2 B*m").program(1, 5).actions[0]
    assert " ".join(map(str, own)) == "F1 F3 F0 F2 F4 B2 B0 B1 B3 B4"


def test_random_texts_are_programs_or_refused() -> None:
    """What is read without an error is a program that the simulator's own check takes."""
    words = "F B W F.1 B.1 F0 B1 ( ) *m *p *(m-i) *2 each k from 0 to m-1 [k] let f = f -1 // min , : % #"
    kinds = words.split()
    draw, programs = random.Random(7), 0
    for _ in range(3000):
        body = " ".join(draw.choice(kinds) for _ in range(draw.randint(1, 9)))
        start = draw.choice(["F*m B*m ", "(F B)*m ", "F*m (B W)*m ", "", "F*m each k from m-1 to 0 (B[k]) "])
        places = draw.choice(["", "places: loop\n", "places: v\n"])
        try:
            program = read_schedule(f"name: mine\n{places}device i: {start}{body}\n").program(2, 3)
        except UsageError:
            continue
        resolve_order(program)
        programs += 1
    assert programs > 20


def test_a_registered_schedule_has_its_name(tmp_path: Path) -> None:
    file = tmp_path / "own.schedule"
    file.write_text("name: own-order\ndevice i: F*m B*m\n", encoding="utf-8")
    assert read_schedule_file(file) == "own-order"
    assert schedule_word("schedule", str(file)) == "own-order"
    assert SCHEDULES["own-order"].program(2, 2).actions[0][0].kind == "F"
    with pytest.raises(UsageError, match="pplan's own"):
        register_schedule("name: zb-h1\ndevice i: F*m B*m\n")
    with pytest.raises(UsageError, match="pplan's own"):
        register_schedule("name: any\ndevice i: F*m B*m\n")
    with pytest.raises(FileError, match="no such schedule file"):
        read_schedule_file(tmp_path / "none.schedule")
    file.write_text("name: own-order\ndevice i: F*m B*m ?\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"own\.schedule: line 2"):
        read_schedule_file(file)
    with pytest.raises(UsageError, match="Did you mean 1f1b"):
        schedule_word("schedule", "1f1")


def test_the_order_of_a_plan_is_of_its_numbers_alone() -> None:
    first = read_schedule(write_program("from-a-plan", SCHEDULES["1f1b"].program(2, 4)))
    register_order(first, 2, 4, 1)
    register_order(first, 2, 4, 1)
    register_order(read_schedule(write_program("from-a-plan", SCHEDULES["1f1b"].program(3, 6))), 3, 6, 1)
    assert SCHEDULES["from-a-plan"].program(3, 6).actions == SCHEDULES["1f1b"].program(3, 6).actions
    with pytest.raises(UsageError, match="2 devices with 4 micro-batches; 3 devices with 6"):
        SCHEDULES["from-a-plan"].program(2, 5)
    other = read_schedule(write_program("from-a-plan", SCHEDULES["gpipe"].program(2, 4)))
    with pytest.raises(UsageError, match="another order"):
        register_order(other, 2, 4, 1)


@pytest.mark.parametrize("opening", ["(", "-", "min(1, "])
def test_numbers_inside_each_other(opening: str) -> None:
    """Refused before Python runs out of stack; as many beside each other are not."""
    closing = ")" if "(" in opening else ""
    with pytest.raises(PplanError, match="brackets inside each other"):
        read_schedule(f"name: mine\ndevice i: (F B)*({opening * 60}m{closing * 60})\n")
    beside = " + ".join([f"{opening}0{closing}"] * 60)
    read_schedule(f"name: mine\ndevice i: (F B)*(m + 0*({beside}))\n").program(2, 3)


def test_actions_inside_each_other() -> None:
    with pytest.raises(PplanError, match="brackets inside each other"):
        read_schedule(f"name: mine\ndevice i: {'(' * 60}F B{')' * 60}*m\n")
    read_schedule(f"name: mine\ndevice i: {'(F B)*0 ' * 60}(F B)*m\n").program(2, 3)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "interleaved", "zb-v"])
def test_words_in_another_form_say_the_same(name: str) -> None:
    """Actions with their numbers, some of them run once, in brackets or one after the other by `each`."""
    program = SCHEDULES[name].program(2, 4)
    head, *rows = write_program("mine", program).splitlines()
    for seed in range(10):
        rng, lines = random.Random(seed), [head]
        for row in rows:
            key, colon, words = row.partition(": ")
            forms = ("{}", "{}*1", "({})", "({})*1", "{} (F0 B0)*0", "each k from 1 to 1 ({})")
            own = [rng.choice(forms).format(word) for word in words.split()]
            lines.append(f"{key}{colon}{' '.join(own)}" if key.startswith("device") else row)
        assert read_schedule("\n".join(lines)).program(2, 4).actions == program.actions
