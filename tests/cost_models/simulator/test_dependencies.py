"""The order of the clock, and lists that are refused."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import Action, Program, StageSlot, linear_program
from pplan.cost_models.program_order import resolve_order
from pplan.cost_models.schedules import find_schedule

F0, B0, W0, F1, B1 = Action("F", 0), Action("B", 0), Action("W", 0), Action("F", 1), Action("B", 1)
LOOP = (tuple(StageSlot(device, chunk) for chunk in range(2) for device in range(2)),)
"""Two devices of two chunks."""


def looped(*lists: str) -> Program:
    """A program on LOOP of one micro-batch, from lists such as "F0 F0.1 B0.1 B0"."""
    actions = tuple(tuple(action(word) for word in own.split()) for own in lists)
    return Program(actions, LOOP, (0,))


def action(word: str) -> Action:
    m, _, chunk = word[1:].partition(".")
    return Action(word[0], int(m), int(chunk or 0))  # type: ignore[arg-type]


def test_the_clock_of_gpipe_is_torchgpipes() -> None:
    """Tick by tick, stage by stage: F0 | F1 F0 | F2 F1 F0 | ..., as torchgpipe's clock_cycles."""
    order = resolve_order(find_schedule("gpipe").program(3, 3))
    columns = zip(order.device.tolist(), map(str, order.actions), strict=True)
    assert " ".join(f"{device}{action}" for device, action in columns) == (
        "0F0 0F1 1F0 0F2 1F1 2F0 1F2 2F1 2F2 2B2 1B2 2B1 0B2 1B1 2B0 0B1 1B0 0B0"
    )


def test_senders_and_receivers() -> None:
    order = resolve_order(looped("F0 F0.1 B0.1 W0.1 B0", "F0 F0.1 B0.1 B0"))
    at = {(d, str(a)): i for i, (d, a) in enumerate(zip(order.device.tolist(), order.actions, strict=True))}
    sources = {key: order.source[i] for key, i in at.items() if order.source[i] >= 0}
    assert sources == {
        (1, "F0"): at[0, "F0"], (0, "F0.1"): at[1, "F0"], (1, "F0.1"): at[0, "F0.1"],
        (0, "B0.1"): at[1, "B0.1"], (1, "B0"): at[0, "B0.1"], (0, "B0"): at[1, "B0"],
    }  # fmt: skip
    assert {order.target[source]: source for source in sources.values()} == {
        at[key]: source for key, source in sources.items()
    }
    assert [str(a) for i, a in enumerate(order.actions) if order.splits[i]] == ["B0.1"]
    assert {str(a) for i, a in enumerate(order.actions) if order.finishing[i]} == {"W0.1", "B0", "B0.1"}


def test_an_order_is_kept_as_long_as_its_program() -> None:
    program = find_schedule("1f1b").program(2, 3)
    assert resolve_order(program) is resolve_order(program)
    assert resolve_order(replace(program)) is not resolve_order(program)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (linear_program([[F0, B0], [F0]]), "stage 1: B0 is missing, and B0 of stage 0 waits for it\n"),
        (linear_program([[B0], [F0, B0]]), "stage 0: F0 is missing, and F0 of stage 1 waits for it\n"),
        (linear_program([[B0], [B0]]), "stage 0: F0 is missing, and B0 of stage 0 waits for it\n"),
        (linear_program([[F0, W0]]), "stage 0: B0 is missing, and W0 of stage 0 waits for it\n"),
        (linear_program([[F1, B1]]), "stage 0: F0 is missing\n"),
        (linear_program([[F0, F0, B0]]), "stage 0 runs F0 twice"),
        (linear_program([[F0, B0, W0, W0]]), "stage 0 runs W0 twice"),
        (linear_program([[F0, B0, Action("X", 0)]]), "X0 of stage 0: there is no such action"),  # type: ignore[arg-type]
        (linear_program([[F0, B0, Action("F", -1)]]), "F-1 of stage 0: there is no such action"),
        (linear_program([[F0, B0, Action("F", 0, 1)]]), "F0.1 of stage 0: there is no such action"),
        (looped("F0 F0.1 B0.1 B0", "F0 F0.1 B0"), "stage 1: B0.1 is missing"),
        (replace(looped("F0", "F0"), pipes=(LOOP[0][:2],)), None),
        (replace(looped("F0", "F0"), pipes=((StageSlot(0),),)), "F0 of stage 1 stands where its micro-batch"),
    ],
)
def test_impossible_programs_are_refused(program: Program, message: str | None) -> None:
    with pytest.raises(UsageError, match=message or "B0 is missing"):
        resolve_order(program)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (linear_program([[B0, F0]]), "other: stage 0 waits at B0 for F0 of stage 0\n"),
        (linear_program([[F0, W0, B0]]), "other: stage 0 waits at W0 for B0 of stage 0\n"),
        (
            linear_program([[F0, B0, F1, B1], [F1, B1, F0, B0]]),
            "other: stage 0 waits at B0 for B0 of stage 1; stage 1 waits at F1 for F1 of stage 0\n",
        ),
        # Stage 0 waits too, but is not part of the circle.
        (
            linear_program([[F0, B0, F1, B1], [F0, F1, B0, B1], [F1, F0, B0, B1]]),
            "other: stage 0 waits at B0 for B0 of stage 1; stage 1 waits at F1 for F1 of stage 0\n",
        ),
        (
            looped("F0.1 F0 B0.1 B0", "F0 F0.1 B0.1 B0"),
            "stage 0 waits at F0.1 for F0 of stage 1; stage 1 waits",
        ),
    ],
)
def test_deadlocks_name_the_circle(program: Program, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        resolve_order(program)
    assert message in str(caught.value)


def test_a_program_goes_with_its_order() -> None:
    program = find_schedule("1f1b").program(2, 3)
    resolve_order(program)
    gone = weakref.ref(program)
    del program
    gc.collect()
    assert gone() is None
