"""PyTorch takes the n-th loss of the last stage for that of micro-batch n: exported orders number them so."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from pplan.cost_models.program import Action, Program
from pplan.cost_models.schedule_text import register_schedule
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import step_seconds
from pplan.runtimes.torch_actions import action_rows, build_program


@pytest.fixture(autouse=True)
def _own_schedules() -> Iterator[None]:
    known = set(SCHEDULES)
    yield
    for name in set(SCHEDULES) - known:
        SCHEDULES.pop(name)


def losses(program: Program) -> list[int]:
    device, chunk = program.pipes[0][-1]
    own = program.actions[device]
    return [action.micro_batch for action in own if (action.kind, action.chunk) == ("F", chunk)]


def test_forwards_from_the_last_micro_batch_to_the_first() -> None:
    register_schedule("name: last-first\ndevice i: each k from m-1 to 0 (F[k]) B*m W*1")
    assert action_rows(build_program("last-first", 2, 3, 1)) == [
        "0F0,0F1,0F2,0I2,0B1,0B0,0W2",
        "1F0,1F1,1F2,1I2,1B1,1B0,1W2",
    ]


def test_any_order_of_forwards() -> None:
    """The same order under other numbers: what a micro-batch is called changes no second."""
    random_numbers = random.Random(5)
    for places in ("line", "v"):
        for _ in range(10):
            numbers = random_numbers.sample(range(4), 4)
            words = " ".join(f"F{number}" for number in numbers)
            chunks = [words] if places == "line" else [words, words.replace(" ", ".1 ") + ".1"]
            back = "B*m" if places == "line" else "B.1*m B*m"
            text = f"name: shuffled\nplaces: {places}\ndevice i: {' '.join(chunks)} {back}"
            own = register_schedule(text).program(3, 4)
            program = build_program("shuffled", 3, 4, own.chunks)
            assert losses(own) == numbers
            assert losses(program) == [0, 1, 2, 3]
            assert program.pipes == own.pipes
            place = {number: at for at, number in enumerate(numbers)}
            for row, before in zip(program.actions, own.actions, strict=True):
                assert list(row) == [Action(kind, place[m], chunk) for kind, m, chunk in before]
            seconds = [float(step_seconds(each, stage_costs(each, 1.0, 2.0))[0]) for each in (program, own)]
            assert seconds[0] == pytest.approx(seconds[1])


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "zb-h2", "zb-v", "dualpipe-v", "interleaved", "looped-bfs"]
)
def test_published_orders_stay(name: str) -> None:
    schedule = SCHEDULES[name]
    own = schedule.program(4, 8)
    assert build_program(name, 4, 8, schedule.default_virtual_stages).actions == own.actions
