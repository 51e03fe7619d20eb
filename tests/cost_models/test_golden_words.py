"""What is accepted, refused and said of values, texts and programs, against golden files.

Each check at its bounds and with values of other types; errors with their hints. `make golden` rewrites the
files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from pplan.cost_models import arguments
from pplan.cost_models.data_parallel import Workers, asynchronous, hogwild, stale_synchronous, synchronous
from pplan.cost_models.errors import PplanError
from pplan.cost_models.optimizers import OPTIMIZERS, find_optimizer
from pplan.cost_models.precision import training_precision
from pplan.cost_models.quantities import MOST_DEVICES, MOST_SLOWDOWN
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.schedule_text import read_schedule, write_program
from pplan.cost_models.schedules import SCHEDULES, find_schedule

Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        np.True_,
        0,
        1,
        2,
        3.0,
        0.5,
        -1,
        np.int64(4),
        np.float32(0.25),
        10**400,
        float("inf"),
    ),
    *(
        "auto",
        "",
        "5",
        (),
        [],
        (1,),
        (1, 2),
        [2, 0],
        (0.05, 1.5),
        (0.05, 1),
        (0.05, MOST_SLOWDOWN),
        (1, 2),
        (0, 2),
    ),
    *(
        (0.05, MOST_SLOWDOWN + 1),
        (0.5, "2"),
        (1, 2, 3),
        {},
        {"A": 1},
        {1: 2},
        {"A": (400, 60)},
        {"A": (60, 400)},
    ),
    *(
        "5%:1.5",
        ".05:2",
        "0:2",
        "100%:2",
        "5%:1",
        "5%",
        "A=400/60",
        "A=400/60,T=70/10",
        "A=1",
        "A=1/x",
        "A=5/5",
    ),
    *(
        (("a", 1),),
        (("a", 0),),
        (("a", -1),),
        (("a", MOST_DEVICES),),
        (("a", MOST_DEVICES + 1),),
        (("a",),),
        ((1, 1),),
    ),
    *(["a", "b"], ["a", 1], "x" * 200, print, {"depth": 24}),
)
CHECKS: Mapping[str, Callable[[str, Any], Any]] = {
    name: getattr(arguments, name)
    for name in (
        *("whole", "optional_whole", "whole_or_auto", "wholes", "number", "flag", "optional_number", "pins"),
        *(
            "slow_devices",
            "watts",
            "settings",
            "function",
            "word",
            "optional_word",
            "words",
            "path",
            "optional_path",
        ),
    )
}
READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "choice": arguments.read_choice(("never", "always", "auto")),
    "from 0": arguments.read_whole_number(0),
    "from 2": arguments.read_whole_number(2),
    "number or auto": arguments.read_number_or_auto,
    "counts": arguments.read_counts,
    "sizes": arguments.read_sizes,
    "slow": arguments.read_slow_devices,
    "levels": arguments.read_by_level(lambda text, name: float(len(text) + len(name))),
}
TEXTS = (
    *(
        "never",
        "nevr",
        "zzz",
        "0",
        "1",
        "2",
        "-1",
        "+3",
        "1.5",
        "auto",
        "",
        "8,4,8",
        "4, 0",
        "1,x",
        "1,2,3",
        "7",
    ),
    *(
        "9" * 18,
        "9" * 19,
        "-" + "9" * 18,
        "5%:1.5",
        "0.05:1.5",
        "5:",
        "5%1.5",
        " 5 % : 1.5 ",
        "a,b",
        "a,b,c",
        "1:1",
    ),
)
SETTINGS = (
    *(
        ("depth=24", "flag=True", "x=[1, 2]", "name=abc"),
        ("a=none", "b='5'", "c=null", "d=(1, 2)", "e="),
        ("a",),
    ),
    *(("1a=2",), ("a=1", "a=2"), ("a = 1.5",), ("=1",), ("a=b=c",)),
)


def answer(call: Callable[..., Any], *values: Any) -> object:
    """What it returns, with its type, or what it refuses."""
    try:
        own = call(*values)
    except PplanError as error:
        return str(error).replace("\n", " | ")
    except ValueError as error:
        return f"ValueError: {error}"
    return f"{type(own).__name__} {own!r}" if not callable(own) else "a function"


@pytest.mark.parametrize("name", CHECKS)
def test_arguments(name: str, golden: Golden, as_text: AsText) -> None:
    rows = {
        f"{number} {str(value)[:30]}": answer(CHECKS[name], "it", value)
        for number, value in enumerate(VALUES)
    }
    golden(f"cost_models/arguments/{name}.txt", as_text(rows))


def test_more_arguments(golden: Golden, as_text: AsText) -> None:
    rows = {
        "at most": [answer(lambda own: arguments.whole("it", own, at_most=5), own) for own in (4, 5, 6)],
        "at least": [
            answer(lambda own: arguments.whole("it", own, at_least=3, example="4"), own) for own in (2, 3)
        ],
        "example": answer(lambda: arguments.whole("it", "x", at_least=20)),
        "long": answer(lambda: arguments.whole("it", 2**300, at_most=2**256)),
        "digits": answer(lambda: arguments.whole("it", 2**255, at_most=5)),
        "level": [
            answer(arguments.by_level, "it", own, "(1, 2)")
            for own in (None, 1, (1, 2.5), "x", (1, "x"), True)
        ],
        "instance": [answer(arguments.instance, "it", own, int, "Give one.") for own in (1, "x")],
        "unknown": [
            answer(
                lambda own: (_ for _ in ()).throw(
                    arguments.unknown_word("it", own, ("never", "always"), ", more")
                ),
                own,
            )
            for own in ("nevr", "zzz")
        ],
    }
    golden("cost_models/arguments/more.txt", as_text(rows))


def test_texts_of_options(golden: Golden, as_text: AsText) -> None:
    rows: dict[str, object] = {
        f"{name} {number} {text[:20]}": answer(read, text, "--it")
        for name, read in READERS.items()
        for number, text in enumerate(TEXTS)
    }
    rows |= {f"settings {pairs}": answer(arguments.read_settings, pairs, "--set") for pairs in SETTINGS}
    golden("cost_models/option_texts.txt", as_text(rows))


def test_words_of_tables(golden: Golden, as_text: AsText) -> None:
    """Of unknown names, what runtimes train, and schedules with numbers that they cannot run."""
    rows: dict[str, object] = {
        "optimizer": answer(find_optimizer, "lion"),
        "schedule": answer(find_schedule, "1f2b"),
    }
    rows |= {"runtimes": RUNTIMES, "optimizers": OPTIMIZERS}
    for name, runtime in RUNTIMES.items():
        for precision in ("fp32", "mixed", "bf16"):
            for zero in range(4):
                rows[f"{name} {precision} {zero}"] = [
                    runtime.trains(precision, zero),
                    answer(runtime.check_states, precision, zero),
                ]
        rows[f"{name} runs"] = [own for own in SCHEDULES if runtime.runs(own)]
        rows[f"{name} replicas"] = [runtime.runs_replicas(own) for own in ((1,), (2, 2), (1, 2))]
        rows[f"{name} tied"] = [runtime.trains_tied(own) for own in ([2], [3], [2, 2])]
    for dtype in ("float32", "float16", "bfloat16", "float64", "int8"):
        for amp in (None, "bfloat16"):
            for precision in ("auto", "fp32", "mixed", "bf16"):
                for gradient in ("auto", "fp32", "fp16"):
                    key = f"{dtype} {amp} {precision} {gradient}"
                    rows[key] = [
                        answer(
                            lambda *own: training_precision(
                                own[0],
                                own[1],
                                precision=own[2],
                                gradient_dtype=own[3],
                                runtime=own[4],
                                device="cuda",
                            ),
                            dtype,
                            amp,
                            precision,
                            gradient,
                            runtime,
                        )
                        for runtime in (None, "megatron")
                    ]
    for name, schedule in SCHEDULES.items():
        for numbers in (
            (0, 1, None),
            (1, 0, None),
            (2, 2, 0),
            (2, 3, 2),
            (3, 2, None),
            (3, 3, 3),
            (2, 5, None),
            (4, 4, 1),
        ):
            own = answer(schedule.program, *numbers)
            rows[f"{name} {numbers}"] = "runs" if str(own).startswith("Program") else own
        rows[f"{name} says"] = [
            *(schedule.weight_versions(stage, 4, 8) for stage in range(4)),
            *(schedule.staleness(stage, 4, 8) for stage in range(4)),
            *(answer(schedule.in_flight, stage, 4, 8) for stage in range(4)),
        ]
    golden("cost_models/tables.txt", as_text(rows))


BAD_SCHEDULES = (
    *("", "F0", "name: x", "schedule x\n", "x\n0: F0 B0", "schedule a b\ndevice 0: F0 B0\n"),
    *(
        "schedule a\ndevice 0: F0\n",
        "schedule a\ndevice 0: F0 B0\ndevice 0: F0 B0\n",
        "schedule a\ndevice 1: F0 B0\n",
    ),
    *(
        "schedule a\ndevice 0: F0 F0 B0\n",
        "schedule a\ndevice 0: F0 B0 X0\n",
        "schedule a\ndevice 0: B0 F0\n",
    ),
    *("schedule a\ndevice 0: F0 F1 B0\n", "schedule a\ndevice 0: F0 B0\ndevice 1: F1 B1\n"),
)


def test_texts_of_schedules(golden: Golden, as_text: AsText) -> None:
    """Every schedule as its text, read back; and texts that are none."""
    rows: dict[str, object] = {}
    for name, schedule in SCHEDULES.items():
        program = schedule.program(2, 4)
        text = answer(lambda own: write_program("own", own, "a test"), program)
        if not str(text).startswith("str "):
            rows[name] = text
            continue
        text = write_program(f"own-{name}", program, "a test")
        own = read_schedule(text)
        rows[name] = text.splitlines()
        rows[f"{name} read"] = [own.name, answer(lambda read: read.source, own)]
    for number, text in enumerate(BAD_SCHEDULES):
        rows[f"bad {number}"] = answer(read_schedule, text)
    golden("cost_models/schedule_texts.txt", as_text(rows))


def test_paces(golden: Golden, as_text: AsText) -> None:
    """Of data-parallel methods with and without waiting."""
    rows: dict[str, object] = {}
    for seconds in ((1.0,), (1.0, 2.0), (0.1, 0.1, 0.4)):
        for servers, latency, size in ((1, 0.0, 5.0), (2, 0.1, 1.0), (1, 0.0, 0.0)):
            own = Workers(seconds, size, 2 * size, 10.0, latency, servers)
            rows[f"{seconds} {servers} {latency} {size}"] = [
                synchronous(own),
                *(asynchronous(own, push, fetch) for push in (1, 2, 3) for fetch in (1, 2, 4)),
                *(stale_synchronous(own, bound) for bound in (0, 1, 3)),
                hogwild(own, 20.0),
            ]
    rows["refused"] = [
        answer(lambda: Workers((), 1.0, 1.0, 1.0)),
        answer(lambda: Workers((-1.0,), 1.0, 1.0, 1.0)),
        answer(lambda: Workers((1.0,), 1.0, 1.0, 1.0, servers=0)),
        answer(lambda: asynchronous(Workers((1.0,), 1.0, 1.0, 1.0), 0, 1)),
        answer(lambda: asynchronous(Workers((1.0,), 1.0, 1.0, 1.0), 1, 0)),
        answer(lambda: stale_synchronous(Workers((1.0,), 1.0, 1.0, 1.0), -1)),
        answer(lambda: hogwild(Workers((1.0,), 1.0, 1.0, 1.0), 0.0)),
    ]
    golden("cost_models/paces.txt", as_text(rows))
