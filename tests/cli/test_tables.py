"""The tables against golden files, and the first line of a plan in each case."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import pplan
from pplan.api.page.page_tables import stage_table
from pplan.api.plan_summary import answer_lines
from pplan.cli import streams
from pplan.cli.plan_tables import planned_memory, print_answer, print_ledger, print_plan
from pplan.cli.profile_tables import print_profile
from pplan.cli.table import Column, height, number, print_table, table, text, word
from pplan.cost_models.document import MadeBy
from pplan.cost_models.quantities import format_count, three_digits
from pplan.planner.plan_file import DefaultMiniBatch, Plan
from pplan.profiler.profile_file import Profile

Golden = Callable[[str, str], None]
Terminal = Callable[[int], Any]


@pytest.mark.parametrize(
    ("width", "file"), [(110, "profile.txt"), (80, "profile_narrow.txt"), (40, "profile_40.txt")]
)
def test_profile(profile: Profile, golden: Golden, width: int, file: str, terminal: Terminal) -> None:
    console = terminal(width)
    print_profile(profile, console)
    golden(file, console.text)


@pytest.mark.parametrize("launch", [0.001, 0.5])
def test_the_rate_of_an_estimate_is_that_of_one_gpu(
    profile: Profile, terminal: Terminal, launch: float
) -> None:
    """With 0.5 s for each launch the device waits for its host."""
    layers = [
        layer.model_copy(
            update={
                "costs": [
                    cost.model_copy(update={"forward_host_seconds": launch, "backward_host_seconds": launch})
                    for cost in layer.costs
                ]
            }
        )
        for layer in profile.layers
    ]
    estimate = profile.model_copy(update={"layers": layers, "whole": [], "estimated": True})
    plan = pplan.solve(
        estimate, gpus=1, mini_batch=32, micro_batches=8, memory_bytes=2**40, recompute="never"
    )
    console = terminal(120)
    print_profile(estimate, console)
    totals = console.text.partition("Layer sum")[2].splitlines()
    row = next(row.split() for row in totals if row.split()[:1] == ["4"])
    assert three_digits(plan.prediction.samples_per_second) in row


def test_equal_rows_of_an_estimate_are_one(profile: Profile, terminal: Terminal) -> None:
    """Blocks with experts differ by some bytes of workspace, which no column has."""
    one = profile.layers[0]
    blocks = [
        one.model_copy(
            update={
                "name": f"model.layers.{n}",
                "costs": [cost.model_copy(update={"workspace_bytes": 2**20 + 32 * n}) for cost in one.costs],
            }
        )
        for n in range(12)
    ]
    changes = {"layers": blocks, "edges": [], "tied": []}
    for estimated, rows in (
        (True, ["model.layers.0-11 x 12"]),
        (False, ["model.layers.0 ", "model.layers.1 "]),
    ):
        console = terminal(120)
        print_profile(profile.model_copy(update={**changes, "estimated": estimated}), console)
        for row in rows:
            assert row in console.text


def test_equal_layers_are_one_row(profile: Profile, terminal: Terminal) -> None:
    """Of eighty with the same figures, numbered in turn; the first differs in one byte."""
    one = profile.layers[0]
    blocks = [one.model_copy(update={"name": f"model.layers.{n}"}) for n in range(81)]
    blocks[0] = blocks[0].model_copy(update={"parameter_bytes": one.parameter_bytes + 1})
    other = one.model_copy(update={"name": "again", "kind": "Other"})
    console = terminal(120)
    print_profile(profile.model_copy(update={"layers": [*blocks, other], "edges": []}), console)
    rows = [line for line in console.text.splitlines() if "model.layers" in line or "again" in line]
    assert [row.split()[1] for row in rows] == ["model.layers.1-80", "model.layers.0", "again"]
    assert "model.layers.1-80 x 80" in rows[0]
    assert "97.6 %" in rows[0]
    assert "All layers, equal ones together" in console.text


@pytest.mark.parametrize(("width", "file"), [(110, "plan.txt"), (80, "plan_narrow.txt"), (40, "plan_40.txt")])
def test_plan(plan: Plan, golden: Golden, width: int, file: str, terminal: Terminal) -> None:
    console = terminal(width)
    print_plan(plan, console)
    print_ledger(planned_memory(plan), console)
    golden(file, console.text)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_short_answer(plan: Plan, golden: Golden, width: int, terminal: Terminal) -> None:
    console = terminal(width)
    print_answer(plan, console, "Next: pplan check.")
    golden(f"plan_short_{width}.txt", console.text)
    lines = console.text.splitlines()
    assert len(lines) <= 20
    head = next(line for line in lines if line.startswith("stage "))
    rows = [line for line in lines if re.match(r" *\d+ ", line)]
    assert max(map(len, [head, *rows])) <= width  # sentences are the terminal's to wrap
    assert {"devices", "layers", "forward", "backward", "memory", "used"} <= set(head.split())


@pytest.mark.parametrize("no_color", [False, True])
def test_short_answer_in_a_pipe_and_on_a_terminal_is_the_same_text(
    plan: Plan, no_color: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = []
    for is_terminal in (True, False):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", "160")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color:
            monkeypatch.setenv("NO_COLOR", "1")
        print_answer(plan, streams.console(), "Next: pplan check.")
        printed.append(stream.getvalue())
    terminal_text, piped = printed
    assert "\x1b" not in piped
    assert re.sub(r"\x1b\[[\d;]*m", "", terminal_text) == piped
    if no_color:
        assert not re.search(r"\x1b\[(?:\d;)*(?:3|4|9)\d", terminal_text)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_short_answer_of_many_stages(plan: Plan, width: int, terminal: Terminal) -> None:
    """The first and last rows; what answers is there at every width."""
    stages = [plan.stages[0].model_copy(update={"devices": [number]}) for number in range(40)]
    warned = changed(plan, stages=stages, balance=[4] * 40, warnings=["The profile is an estimate."])
    console = terminal(width)
    print_answer(warned, console, "Next: pplan check.")
    lines = console.text.splitlines()
    assert "Warning: The profile is an estimate." in lines[1:3]
    head = next(line.split() for line in lines if line.startswith("stage "))
    assert {"stage", "devices", "layers", "memory"} <= set(head)
    rows = [row[0] for line in lines if (row := re.findall(r"^ *(\d+|\.\.\.) ", line))]
    assert rows[0] == "0"
    assert "..." in rows
    assert rows[-1] == "39"
    assert width < 80 or sum(height(console, line) for line in lines) == 15


def test_no_table_of_other_runtimes_where_one_was_named(plan: Plan, terminal: Terminal) -> None:
    console = terminal(110)
    print_plan(changed(plan, runtime="deepspeed"), console)
    assert "Alternatives" not in console.text


def test_ledger_of_many_stages_goes_on_below(plan: Plan, terminal: Terminal) -> None:
    console = terminal(45)
    print_ledger(2 * planned_memory(plan), console)
    heads = [
        line.split()
        for line in console.text.splitlines()
        if line.split()[:1] == ["stage"] and "inputs" not in line
    ]
    assert heads == [["stage", str(a), "stage", str(a + 1), "stage", str(a + 2)] for a in (0, 3)]


def changed(document: Plan, **fields: Any) -> Plan:
    return document.model_copy(update=fields)


def _one_stage(plan: Plan, gpus: int) -> Plan:
    whole = plan.stages[0].model_copy(
        update={"first_layer": 0, "last_layer": 11, "replicas": gpus, "devices": list(range(gpus))}
    )
    return changed(plan, stages=[whole], balance=[12], gpus=gpus)


def test_answer_pipeline_on_fewer_gpus(plan: Plan) -> None:
    assert answer_lines(plan) == [
        "A pipeline of 3 stages over 6 GPUs is the fastest of the plans searched: "
        "650 ms a step, 98.5 samples/s.",
        "It uses 6 of the 8 GPUs: of the plans searched none is faster on more; data parallelism on all 8 "
        "takes 700 ms a step.",
    ]


def test_answer_fewer_gpus_with_nothing_on_all(plan: Plan) -> None:
    bare = changed(plan, baselines=[], alternatives=[])
    assert (
        answer_lines(bare)[1]
        == "It uses 6 of the 8 GPUs: of the plans searched none is faster on more of them."
    )
    prediction = plan.prediction.model_copy(update={"exact": False})
    unproven = answer_lines(changed(bare, prediction=prediction))[1]
    assert unproven == "It uses 6 of the 8 GPUs: of the plans scored none is faster on more of them."


def test_a_named_planner_is_the_fastest_of_its_own_proposals_alone(plan: Plan) -> None:
    options = replace(plan.options, planner="even")
    prediction = plan.prediction.model_copy(update={"exact": False})
    lines = answer_lines(changed(plan, baselines=[], alternatives=[], options=options, prediction=prediction))
    assert lines == [
        "A pipeline of 3 stages over 6 GPUs is the fastest of the plans that the planner even proposes: "
        "650 ms a step, 98.5 samples/s.",
        "It uses 6 of the 8 GPUs: of the plans that the planner even proposes none is faster on more of "
        "them.",
    ]


def test_an_alternative_on_more_gpus_that_is_faster_is_named(plan: Plan) -> None:
    """None of the plans searched is faster: an interleaved one, which is not searched, may be."""
    parts = {"virtual_stages": 2, "step_seconds": 0.6, "schedule": "interleaved"}
    answers = [
        ([1] * 16, "; one of its alternatives, interleaved, takes 600 ms a step on 8."),
        ([1] * 12, ": of the plans searched none is faster on more of them."),
    ]
    for balance, words in answers:
        stages = len(balance) // 2
        devices = [[part % stages] for part in range(len(balance))]
        update = {"balance": balance, "devices": devices, "replicas": [1] * len(balance), **parts}
        other = plan.alternatives[0].model_copy(update=update)
        held = changed(plan, baselines=[], alternatives=[other])
        assert answer_lines(held)[1] == f"It uses 6 of the 8 GPUs{words}"


def test_samples_are_those_of_a_group_where_devices_share_layers(plan: Plan) -> None:
    chosen = DefaultMiniBatch(samples_per_device=8)
    profile = plan.profile.model_copy(update={"tensor_parallel": 2})
    lines = answer_lines(changed(plan, default_mini_batch=chosen, profile=profile))
    assert lines[1].startswith("Global batch 64, 8 samples a group of 2 GPUs, as none was given")


def test_answer_fewer_gpus_as_a_runtime_reaches(plan: Plan) -> None:
    held = changed(plan, baselines=[], alternatives=[], runtime="torchgpipe", gpus_per_node=6)
    assert answer_lines(held)[1] == "It uses 6 of the 8 GPUs: torchgpipe reaches those of one node."


def test_answer_virtual_stages(plan: Plan) -> None:
    """Three devices with two parts of the layers each."""
    parts = [plan.stages[0].model_copy(update={"devices": [number % 3]}) for number in range(6)]
    shape = {"stages": parts, "balance": [part.layers for part in parts], "virtual_stages": 2}
    chunked = changed(plan, **shape, schedule="interleaved", gpus=3, alternatives=[])
    assert answer_lines(chunked) == [
        "A pipeline of 3 stages over 3 GPUs, 2 virtual stages on each, is the fastest of the plans searched: "
        "650 ms a step, 98.5 samples/s."
    ]


def test_only_straight_alternatives_tell_what_all_gpus_would_give(plan: Plan) -> None:
    """Not one of eight parts on four devices, nor of eight stages with replicas."""
    whole = {"balance": [1, 1, 1, 1, 2, 2, 2, 2], "step_seconds": 0.7}
    others = [
        plan.alternatives[0].model_copy(update=whole | more)
        for more in ({"virtual_stages": 2}, {"replicas": [2] * 8})
    ]
    held = changed(plan, baselines=[], alternatives=others)
    assert (
        answer_lines(held)[1]
        == "It uses 6 of the 8 GPUs: of the plans searched none is faster on more of them."
    )


def test_answer_data_parallelism(plan: Plan) -> None:
    assert answer_lines(_one_stage(plan, 8)) == [
        "Data parallelism over 8 GPUs is the fastest of the plans searched: 650 ms a step, 98.5 samples/s."
    ]


def test_answer_one_gpu(plan: Plan) -> None:
    alone = changed(_one_stage(plan, 1), gpus=4)
    first, second = answer_lines(alone)
    assert first == "One GPU is the fastest of the plans searched: 650 ms a step, 98.5 samples/s."
    assert second.startswith("It uses 1 of the 4 GPUs: ")


def test_answer_when_a_runtime_leaves_out_the_faster_way(plan: Plan) -> None:
    baselines = [plan.baselines[1].model_copy(update={"step_seconds": 0.5})]
    held = changed(plan, runtime="torchgpipe", baselines=baselines, gpus=6)
    assert answer_lines(held) == [
        "Data parallelism over 6 GPUs is faster: 500 ms a step, 128 samples/s; torchgpipe does not run it.",
        "This plan is a pipeline of 3 stages over 6 GPUs: 650 ms a step, 98.5 samples/s.",
    ]


@pytest.mark.parametrize(("runtime", "name"), [("deepspeed", "data-parallel"), ("torchgpipe", "one-gpu")])
def test_answer_when_options_leave_out_what_the_runtime_runs(plan: Plan, runtime: str, name: str) -> None:
    baselines = [plan.baselines[1].model_copy(update={"name": name, "step_seconds": 0.5})]
    first = answer_lines(changed(plan, runtime=runtime, baselines=baselines, gpus=4))[0]
    assert first.endswith("the options given leave it out.")


def test_a_faster_way_over_the_same_devices_is_told_apart_from_the_plan(plan: Plan) -> None:
    stage = plan.stages[0].model_copy(update={"last_layer": plan.stages[-1].last_layer})
    baselines = [plan.baselines[1].model_copy(update={"name": "one-gpu", "step_seconds": 0.5})]
    one = changed(plan, stages=[stage.model_copy(update={"devices": [0]})], baselines=baselines, gpus=1)
    first, second = answer_lines(one)[:2]
    assert first.startswith("One GPU, run otherwise, is faster: 500 ms a step")
    assert second.startswith("This plan is one GPU: ")


def test_answer_is_not_proven_without_exact(plan: Plan) -> None:
    prediction = plan.prediction.model_copy(update={"exact": False})
    first = answer_lines(changed(plan, prediction=prediction))[0]
    assert first.startswith("A pipeline of 3 stages over 6 GPUs is the fastest of the plans scored: ")


def test_what_all_gpus_would_give_is_what_the_runtime_can_run(plan: Plan) -> None:
    whole, half = [1, 1, 1, 1, 2, 2, 2, 2], [6, 6]
    alternatives = [
        plan.alternatives[0].model_copy(
            update={"runtimes": runtimes, "balance": balance, "step_seconds": step}
        )
        for runtimes, balance, step in (
            (["deepspeed"], whole, 0.7),
            (["torchgpipe"], half, 0.75),
            ([], whole, 0.9),
            (["torchgpipe"], whole, 0.6),
        )
    ]
    held = changed(plan, runtime="torchgpipe", alternatives=alternatives)
    assert answer_lines(held) == [
        "A pipeline of 3 stages over 6 GPUs is the fastest that torchgpipe can run of the plans searched: "
        "650 ms a step, 98.5 samples/s.",
        "It uses 6 of the 8 GPUs: of the plans searched none is faster on more; a straight gpipe pipeline on "
        "all 8 takes 900 ms a step.",
    ]


@pytest.mark.parametrize("width", [20, 30, *range(40, 131, 5)])
def test_no_figure_is_cut_at_any_width(plan: Plan, profile: Profile, width: int, terminal: Terminal) -> None:
    def printed(columns: int) -> str:
        console = terminal(columns)
        print_plan(plan, console)
        print_ledger(planned_memory(plan), console)
        print_profile(profile, console)
        return str(console.text)

    def figures(output: str) -> set[str]:
        return {token.rstrip(",;.") for token in output.split() if re.match(r"\d|-$", token)}

    narrow = printed(width)
    assert "…" not in narrow
    assert figures(narrow) <= figures(printed(200))
    assert {"96.0", "192", "650", "1.026"} <= figures(narrow)
    tables = [line for line in narrow.splitlines() if "───" in line]
    assert len(tables) >= 6
    assert width < 40 or all(len(line) <= width for line in tables)


def test_the_least_important_columns_go_first(terminal: Terminal) -> None:
    columns: list[Column[str]] = [
        word("a", str),
        number("bb", lambda _: 12, drop=2),
        number("cc", lambda _: 34, drop=1),
        number("dd", lambda _: 56, drop=2),
        text("e", lambda _: "y" * 30),
    ]

    def heads(width: int) -> list[str]:
        return [str(column.header) for column in table(terminal(width), columns, ["x"]).columns]

    assert heads(1 + 3 * 3 + 25) == ["a", "bb", "cc", "dd", "e"]
    assert heads(1 + 3 * 3 + 24) == ["a", "bb", "dd", "e"]
    assert heads(1 + 2 * 3 + 24) == ["a", "e"]
    assert heads(5) == ["a", "e"]


def test_a_text_is_whole_where_it_fits(terminal: Terminal) -> None:
    long = "encoder.layers.11.self_attention.out_proj"
    for width, whole in ((5 + 1 + len(long), True), (4 + 1 + len(long), False)):
        console = terminal(width)
        columns: list[Column[str]] = [number("stage", lambda _: 0), text("layer", str)]
        print_table(console, columns, [long])
        assert (long in console.text) is whole
        assert long in "".join(console.text.split("─")[-1].split()[1:])


def test_the_first_backward_of_a_step_has_a_column_where_it_was_measured(
    profile: Profile, terminal: Terminal
) -> None:
    console = terminal(160)
    print_profile(profile, console)
    assert "first" not in console.text
    seconds = [whole.model_copy(update={"first_backward_seconds": 0.0123}) for whole in profile.whole]
    console = terminal(160)
    print_profile(profile.model_copy(update={"whole": seconds}), console)
    assert console.text.count("12.3 ms") == len(seconds) > 0


def test_one_is_not_many(profile: Profile, terminal: Terminal) -> None:
    console = terminal(110)
    print_profile(profile.model_copy(update={"layers": profile.layers[:1]}), console)
    assert "input 3x32x32: 1 layer, 3.15 million parameters (12.00 MiB)" in console.text
    assert "layers," not in console.text
    assert [format_count(n, thing) for n in (1, 2) for thing in ("GPU", "micro-batch")] == [
        "1 GPU",
        "1 micro-batch",
        "2 GPUs",
        "2 micro-batches",
    ]


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_size_that_was_not_measured_is_told_once(
    profile: Profile, by_hand: bool, terminal: Terminal
) -> None:
    """By the profiler's note; where the profile is not pplan's own, by its entry, whatever notes it has."""
    if by_hand:
        profile = profile.model_copy(update={"made_by": MadeBy(), "notes": ["micro-batch size 16 is large."]})
    console = terminal(110)
    print_profile(profile, console)
    told = "icro-batch size 16 was not measured (does not fit): out of memory"
    assert console.text.count(told) == 1
    assert console.text.splitlines()[-1] == f"Note: {profile.notes[-1]}"


def test_names_do_not_steer_the_terminal(plan: Plan, profile: Profile, terminal: Terminal) -> None:
    evil = "a\x1b[31mb\nc\u202ed"
    layers = [profile.layers[0].model_copy(update={"name": evil, "kind": evil}), *profile.layers[1:]]
    console = terminal(110)
    print_profile(profile.model_copy(update={"layers": layers, "model": evil, "notes": [evil]}), console)
    names = [evil, *plan.layer_names[1:]]
    baselines = [base.model_copy(update={"name": evil, "reason": evil}) for base in plan.baselines]
    print_plan(changed(plan, layer_names=names, topology=evil, baselines=baselines), console)
    shown = r"a\x1b[31mb\nc\u202ed"
    assert console.text.count(shown) >= 9
    assert not {"\x1b", "\u202e"} & set(console.text)
    assert "\nc" not in console.text


@pytest.mark.parametrize(
    ("low", "high", "error", "shown"),
    [
        (0.012, 0.0131, None, "12.4 ms a step (80 % interval 12.0 to 13.1 ms), "),
        (0.0009, 0.0131, 0.01, "12.4 ms a step (80 % interval 900 µs to 13.1 ms), "),
        (
            0.0129,
            0.0131,
            None,
            "12.4 ms a step (80 % interval 12.9 to 13.1 ms: some stage is late in most steps), ",
        ),
        (0.0124001, 0.0124002, None, "12.4 ms a step, "),
        (0.012, 0.0131, 0.08, "12.4 ms a step (± 8 %), "),
        (None, None, 0.08, "12.4 ms a step (± 8 %), "),
        (None, None, 0.004, "12.4 ms a step, "),
        (None, None, None, "12.4 ms a step, "),
    ],
)
def test_the_answer_has_one_interval(
    plan: Plan, low: float | None, high: float | None, error: float | None, shown: str, terminal: Terminal
) -> None:
    """The wider one of the draws of layers' times and the error of their sum."""
    own = {"step_seconds": 0.0124, "lower_bound_seconds": 0.0124, "low_seconds": low, "high_seconds": high}
    own["uncertainty"] = error
    predicted = plan.prediction.model_copy(update=own)
    console = terminal(110)
    print_plan(changed(plan, prediction=predicted), console)
    text = " ".join(console.text.split()) + " "
    assert shown in text
    assert text.count("±") + text.count("interval") == ("(" in shown)


def test_layers_that_are_recomputed_have_a_column_where_stages_differ(plan: Plan, terminal: Terminal) -> None:
    words = ["first_2", "always", "never"]
    stages = [
        stage.model_copy(update={"recompute": word}) for stage, word in zip(plan.stages, words, strict=True)
    ]
    differing = plan.model_copy(update={"stages": stages, "recompute": "by_stage"})
    for show in (print_plan, lambda own, console: print_answer(own, console, "")):
        whole, some = terminal(160), terminal(160)
        show(plan, whole)
        show(differing, some)
        assert "recomputed" not in whole.text
        rows = [line.split() for line in some.text.splitlines() if re.match(r" *[012]  ", line)]
        assert [row[3] for row in rows[:3]] == ["2", "5", "0"]
    table = stage_table(differing)
    assert [row[list(table.headings).index("recomputed")].text for row in table.rows] == ["2", "5", "0"]
    assert "recomputed" not in stage_table(plan).headings
