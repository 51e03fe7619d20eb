"""Answers and refusals of `pplan solve` about small profiles, with the real solver."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.api.solve import watching_best
from pplan.planner.search.budget import SearchBudget
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]
SECONDS = 1e-3


def make_profile(
    layers: int,
    *,
    sizes: tuple[int, ...] = (1,),
    parameter_bytes: int = 10**8,
    trained: bool = True,
    seconds: Sequence[tuple[float, float]] | None = None,
) -> Profile:
    """Layers of these forward and backward seconds a sample; default: 1 ms and 2 ms each."""
    each = [(SECONDS, 2 * SECONDS)] * layers if seconds is None else seconds
    rows = [
        {
            "name": f"l{index}",
            "kind": "Linear",
            "parameter_bytes": parameter_bytes,
            "trainable_bytes": parameter_bytes if trained or index else 0,
            "buffer_bytes": 0,
            "cut_after": True,
            "crossing": 1,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": size * each[index][0],
                    "backward_seconds": size * each[index][1],
                    "output_bytes": 8 * size,
                    "saved_bytes": 8 * size,
                    "saved_input_bytes": 0,
                    "workspace_bytes": 0,
                }
                for size in sizes
            ],
        }
        for index in range(layers)
    ]
    document = {
        "schema": 1,
        "model": "toy",
        "device": "cuda",
        "device_name": "D",
        "dtype": "float32",
        "granularity": "block",
        "settings": {},
        "seed": 0,
        "layers": rows,
    }
    return Profile.parse(json.dumps(document), "toy")


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every search was stopped by its time limit at some point."""
    monkeypatch.setattr(SearchBudget, "was_interrupted", True)


@pytest.mark.usefixtures("interrupted")
def test_a_proven_answer_has_no_warning_about_the_time_limit(run: Run, here: Path) -> None:
    make_profile(6).save(here / "toy.profile.json", force=False)
    ran = run("solve", "--gpus", "2", "--memory", "8GiB", "--mini-batch", "4")
    assert "Optimal in the search space" in ran.out, ran.err
    assert "time limit" not in ran.out + ran.err
    plan = json.loads((here / "toy.plan.json").read_text())
    assert plan["prediction"]["exact"]
    assert plan["warnings"] == []


@pytest.mark.usefixtures("interrupted")
@pytest.mark.parametrize("objective", ["step-time", "memory"])
def test_an_answer_that_is_not_proven_has_the_warning(objective: str) -> None:
    options: dict[str, Any] = {"gpus": 6, "memory_bytes": 2**33, "mini_batch": 12, "objective": objective}
    plan = pplan.solve(make_profile(24), schedule="zb-h1", time_limit=0.001, **options)
    proven = plan.prediction.exact if plan.objective is None else plan.objective.exact
    assert not proven
    assert "the time limit of 0.001 s ended the search" in " ".join(plan.warnings)


def test_a_schedule_that_was_not_searched_and_is_faster_stands_in_the_second_line(
    run: Run, here: Path
) -> None:
    make_profile(8).save(here / "toy.profile.json", force=False)
    options = ("--gpus", "4", "--memory", "8GiB", "--mini-batch", "4")
    ran = run("solve", *options)
    first, second = ran.out.splitlines()[:2]
    assert first.startswith(
        "A pipeline of 2 stages over 4 GPUs is the fastest of the plans searched: 42.0 ms"
    )
    assert second == (
        "An interleaved pipeline would take 33.1 ms (1.27 x faster). This schedule was not searched: "
        "use --schedule any."
    )
    searched = run("solve", *options, "--schedule", "any")
    assert "would take" not in searched.out
    assert json.loads((here / "toy.plan.json").read_text())["prediction"]["step_seconds"] <= 0.0332


CANCELLATION = """
[[device]]
name = "a"
memory = "16GiB"
count = 1
speed = 1e6
[[device]]
name = "b"
memory = "16GiB"
count = 1
speed = 1e-6
[[level]]
name = "n"
size = 2
bandwidth = "10GB/s"
latency = "5us"
"""


@pytest.mark.parametrize("options", [(), ("--schedule", "zb-h1"), ("--planner", "even")])
def test_a_small_stage_behind_a_large_one_keeps_its_digits(
    run: Run, here: Path, options: tuple[str, ...]
) -> None:
    """A stage of 3.3 ns behind one of 1 s had 3.33333338709 ns: the difference of two running sums."""
    seconds = [(1.0, 1.0), (1 / 3 * 1e-8, 1 / 7 * 1e-8)]
    make_profile(2, parameter_bytes=8, seconds=seconds).save(here / "toy.profile.json", force=False)
    (here / "two.toml").write_text(CANCELLATION)
    ran = run(
        "solve", "--topology", "two.toml", "--mini-batch", "2", "--use-all", "--cut-after", "l0", *options
    )
    assert ran.status == 0, ran.err
    stage = json.loads((here / "toy.plan.json").read_text())["stages"][1]
    assert stage["forward_seconds"] == pytest.approx(1e6 / 3 * 1e-8, rel=1e-15, abs=0)
    verified = run("lint", "toy.plan.json", "--profile", "toy.profile.json")
    assert verified.status == 0, verified.out
    assert " 0 differ" in verified.out


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_of_a_small_stage_behind_a_large_one_keep_their_digits(
    run: Run, here: Path, zero: int
) -> None:
    """The exchange of gradients hid behind a difference of running sums, too."""
    seconds = [(1.0, 1.0), *[(1 / 3 * 1e-8, 1 / 7 * 1e-8)] * 3]
    make_profile(4, parameter_bytes=2**22, seconds=seconds).save(here / "toy.profile.json", force=False)
    (here / "two.toml").write_text(
        CANCELLATION.replace("count = 1", "count = 2").replace("size = 2", "size = 4")
    )
    ran = run(
        *("solve", "--topology", "two.toml", "--mini-batch", "4", "--micro-batches", "2", "--use-all"),
        *("--cut-after", "l0", "--max-stages", "2", "--zero", str(zero)),
    )
    assert ran.status == 0, ran.err
    verified = run("lint", "toy.plan.json", "--profile", "toy.profile.json")
    assert verified.status == 0, verified.out
    assert " 0 differ" in verified.out


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "dualpipe-v"])
def test_devices_are_chosen_whatever_order_they_are_listed_in(schedule: str, tmp_path: Path) -> None:
    """A slow device that was listed first took a stage."""
    device = '[[device]]\nname = "d{0}"\nmemory = "16GiB"\ncount = 1\nspeed = {0}\n'
    link = '[[level]]\nname = "n"\nbandwidth = "100GB/s"\nlatency = "1us"\n'
    profile = make_profile(8, parameter_bytes=8, seconds=[(0.01, 0.02)] * 8)
    steps = set[float]()
    for speeds in ((0.2, 1.0, 1.0), (1.0, 1.0, 0.2), (1.0, 0.2, 1.0)):
        machine = tmp_path / "machine.toml"
        machine.write_text("".join(map(device.format, speeds)) + link)
        plan = pplan.solve(profile, topology=machine, mini_batch=4, micro_batches=4, schedule=schedule)
        assert {plan_device for stage in plan.stages for plan_device in stage.devices} == {
            rank for rank, speed in enumerate(speeds) if speed == 1.0
        }
        assert plan.prediction.exact
        steps.add(round(plan.prediction.step_seconds, 9))
    (step,) = steps
    assert 0.48 < step < 0.57


REFUSALS = [
    (
        "--runtime torchgpipe --mini-batch 16 --micro-batches 8",
        "8 micro-batches of 2 samples need size 2, but the profile measured only size 1",
        "Profile with --micro-batch-sizes 1,2 or use --micro-batches 16.",
    ),
    (
        "--runtime torchgpipe --mini-batch 16 --micro-batches 8 --cut-after l1",
        "8 micro-batches of 2 samples need size 2, but the profile measured only size 1",
        "Profile with --micro-batch-sizes 1,2 or use --micro-batches 16.",
    ),
    (
        "--pin l0=stage1",
        "--pin l0=stage1: stage 1 needs 1 cut between the beginning on stage 0 and l0, and none can be made",
        "Pin it to stage0, or omit the pin.",
    ),
    (
        "--pin l5=stage5",
        "--pin l5=stage5: it needs 6 stages, and 2 devices make at most 2 stages",
        "Pin it to stage1 or an earlier one.",
    ),
    (
        "--cut-after l0 --cut-after l1",
        "--cut-after names 2 layers, which makes 3 stages, and 2 devices make at most 2 stages",
        "Name at most 1 layer.",
    ),
    (
        "--cut-after l0 --max-stages 1",
        "--cut-after names 1 layer, which makes 2 stages, and --max-stages 1 allows no more",
        "Omit --cut-after.",
    ),
    (
        "--use-all --mini-batch 1 --max-stages 1",
        "--use-all: at most 1 stage of 1 replica each use 1 of the 2 devices",
        "Omit --use-all, or use --gpus 1.",
    ),
    (
        "--planner one-gpu --use-all",
        "--planner one-gpu: the options allow none of its plans: --use-all requires 2 devices, but it uses 1",
        "Omit --planner: other plans fit.",
    ),
    (
        "--planner interleaved --max-stages 1",
        "--planner interleaved: it needs 2 devices and 4 parts of the layers, but there are 1 and 6",
        "Omit --planner: other plans fit.",
    ),
    (
        "--planner gpipe --schedule 1f1b",
        "--planner gpipe: it plans gpipe, and the options allow 1f1b",
        "Omit --planner: other plans fit.",
    ),
    (
        "--planner even --micro-batches 1 --mini-batch 2",
        "--planner even: one replica needs size 2, but the profile measured 1",
        "Omit --planner: other plans fit.",
    ),
]


@pytest.mark.parametrize(("options", "what", "hint"), REFUSALS)
def test_a_refusal_names_the_check_that_failed(
    run: Run, here: Path, options: str, what: str, hint: str
) -> None:
    make_profile(6).save(here / "toy.profile.json", force=False)
    ran = run(
        "solve", "--gpus", "2", "--memory", "8GiB", "--mini-batch", "4", "toy.profile.json", *options.split()
    )
    assert ran.status == 3, ran.out
    assert " ".join(ran.err.split()).startswith(f"pplan: {what} {hint}")


def test_deepspeed_trains_every_stage(run: Run, here: Path) -> None:
    make_profile(6, trained=False).save(here / "toy.profile.json", force=False)
    options = ("--gpus", "2", "--memory", "8GiB", "--mini-batch", "4", "--runtime", "deepspeed")
    ran = run("solve", *options, "--cut-after", "l0")
    assert ran.status == 3
    assert "deepspeed: it trains every stage, and l0 has no trainable weights" in ran.err


def test_memory_that_would_fit_keeps_three_digits_and_is_enough(run: Run, here: Path) -> None:
    make_profile(2, parameter_bytes=7_190_000).save(here / "toy.profile.json", force=False)
    options = ("solve", "--gpus", "2", "--mini-batch", "4")
    ran = run(*options, "--memory", "8MiB")
    assert "needs at least 21.60 MiB" in ran.err
    assert "What would fit: --memory 21.6MiB a device." in ran.err
    assert run(*options, "--memory", "21.6MiB").status == 0
    assert run(*options, "--memory", "21.5MiB").status == 3


ONLY_BOTH = "--schedule {}: only 1f1b and gpipe were searched, as other schedules do not combine with"
ONLY_GPIPE = "--schedule {}: only gpipe was searched, as other schedules do not combine with"


@pytest.mark.parametrize(
    ("options", "schedules", "part"),
    [
        ("--recompute first-layers --schedule 1f1b", ("1f1b",), ""),
        ("--recompute first-layers --schedule any", ("1f1b", "gpipe"), ONLY_BOTH.format("any")),
        ("--recompute except-last --schedule any", ("gpipe",), ONLY_GPIPE.format("any")),
        (
            "--recompute first-layers --schedule synthesized",
            ("1f1b", "gpipe"),
            ONLY_BOTH.format("synthesized"),
        ),
        ("--recompute except-last --schedule synthesized", ("gpipe",), ONLY_GPIPE.format("synthesized")),
        (
            "--runtime deepspeed --schedule synthesized",
            ("1f1b",),
            "--schedule synthesized: only 1f1b was searched, as deepspeed takes no orders of actions",
        ),
    ],
)
def test_the_part_of_a_request_that_is_searchable_is_searched(
    run: Run, here: Path, options: str, schedules: tuple[str, ...], part: str
) -> None:
    """The answer itself says which part, not only its details."""
    make_profile(6, parameter_bytes=8).save(here / "toy.profile.json", force=False)
    ran = run("solve", "--gpus", "2", "--memory", "8GiB", "--mini-batch", "4", *options.split())
    assert ran.status == 0, ran.err
    assert json.loads((here / "toy.plan.json").read_text())["schedule"] in schedules
    printed = " ".join(ran.out.split())
    assert part in printed
    assert ("searched, as" in printed) == bool(part)


REMEDIES = [
    (
        "--schedule interleaved --micro-batches 7 --mini-batch 7",
        "interleaved: with 4 stages, micro-batches 7: interleaved needs a multiple of the stages, 4",
        "--schedule interleaved --micro-batches 8 --mini-batch 8",
    ),
    (
        "--schedule dualpipe-v --micro-batches 2 --mini-batch 2",
        "dualpipe-v: with 4 stages, micro-batches 2: dualpipe-v needs at least 8, two a stage",
        "--schedule dualpipe-v --micro-batches 8 --mini-batch 8",
    ),
    (
        "--schedule zb-v --mini-batch 8 --max-stages 1",
        "zb-v needs two devices or more, and --max-stages 1 allows no more",
        "--schedule auto --mini-batch 8 --max-stages 1",
    ),
    (
        "--mini-batch 15 --micro-batches 3 --max-stages 2 --runtime torchgpipe",
        "3 micro-batches of 5 samples need size 5, but the profile measured only size 1",
        "--mini-batch 15 --micro-batches 15 --max-stages 2 --runtime torchgpipe",
    ),
    (
        "--mini-batch 28 --micro-batches 4",
        "4 micro-batches of 7 samples need size 7, but the profile measured only size 1",
        "--mini-batch 28 --micro-batches 28",
    ),
    (
        "--mini-batch 8 --pin l1=stage3",
        "--pin l1=stage3: stage 3 needs 3 cuts",
        "--mini-batch 8 --pin l1=stage1",
    ),
    (
        "--mini-batch 8 --use-all --max-stages 2 --runtime torchgpipe",
        "--use-all: at most 2 stages of 1 replica each use 2 of the 4 devices",
        "--mini-batch 8 --max-stages 2 --runtime torchgpipe",
    ),
    (
        "--mini-batch 8 --use-all --max-stages 2 --gpus 3",
        "--use-all: no stages and replicas that the micro-batches allow use more than 2 of the 3 devices",
        "--mini-batch 8 --use-all --max-stages 2 --gpus 2",
    ),
    (
        "--mini-batch 8 --recompute first-layers --schedule zb-h1",
        "--recompute first-layers with --schedule zb-h1: not searched",
        "--mini-batch 8 --recompute first-layers --schedule any",
    ),
    (
        "--mini-batch 8 --recompute except-last --schedule zb-h1",
        "--recompute except-last with --schedule zb-h1: only GPipe's backward begins with the last one",
        "--mini-batch 8 --recompute always --schedule zb-h1",
    ),
]


@pytest.mark.parametrize(("options", "what", "remedy"), REMEDIES)
def test_the_remedy_of_a_refusal_leads_to_a_plan(
    run: Run, here: Path, options: str, what: str, remedy: str
) -> None:
    """Each option that the remedy changes stands in the hint."""
    make_profile(8, parameter_bytes=8).save(here / "toy.profile.json", force=False)
    head = ("solve", "toy.profile.json")
    defaults = {"--gpus": "4", "--memory": "8GiB"}
    options, remedy = (
        " ".join([own, *(f"{name} {value}" for name, value in defaults.items() if name not in own)])
        for own in (options, remedy)
    )
    refused = run(*head, *options.split())
    message, _, hint = refused.err.strip().partition("\n")
    assert refused.status in (2, 3)
    assert what in message
    changed = set(remedy.split()) - set(options.split())
    assert all(word.removeprefix("l1=") in hint for word in changed)
    assert run(*head, *remedy.split()).status == 0


UNFIT = [
    (
        3,
        "--planner interleaved --memory 100MiB",
        "--planner interleaved: it needs 2 devices and 4 parts of the layers, but there are 2 and 3 "
        "Omit --planner. Memory is too small for that, too.",
    ),
    (
        6,
        "--planner one-gpu --memory 1GiB",
        "--planner one-gpu: does not fit: device 0 needs 1.56 GiB of 1.00 GiB",
    ),
    (
        6,
        "--planner data-parallel --memory 1GiB",
        "--planner data-parallel: does not fit: device 0 needs 2.05 GiB of 1.00 GiB",
    ),
    (
        2,
        "--planner even --runtime deepspeed",
        "--planner even: deepspeed trains every stage, and stage 0 (l0) has 0 trainable bytes",
    ),
]


@pytest.mark.parametrize(("layers", "options", "what"), UNFIT)
def test_a_planner_without_a_plan_names_the_stage_that_fails(
    run: Run, here: Path, layers: int, options: str, what: str
) -> None:
    make_profile(layers, trained=False).save(here / "toy.profile.json", force=False)
    memory = () if "--memory" in options else ("--memory", "8GiB")
    ran = run("solve", "toy.profile.json", "--gpus", "2", "--mini-batch", "4", *memory, *options.split())
    assert ran.status == 3, ran.out
    assert what in " ".join(ran.err.split())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_layers_without_a_backward_print_no_warning_of_numpy(schedule: str) -> None:
    """The ratio of the parts of a backward to the whole was 0 / 0."""
    plan = pplan.solve(
        make_profile(4, parameter_bytes=8, seconds=[(1.0, 0.0)] * 4),
        gpus=2,
        memory_bytes=2**33,
        mini_batch=4,
        schedule=schedule,
    )
    assert plan.prediction.step_seconds > 0
    assert "a backward in two parts" not in " ".join(plan.warnings)


@pytest.mark.parametrize("mini_batch", [16, None])
def test_a_search_tells_its_best_plan_from_the_baselines_on(mini_batch: int | None) -> None:
    """Without a global batch half of it is searched, too: its steps are shorter, and not told."""
    steps = list[float]()
    with watching_best(steps.append):
        plan = pplan.solve(make_profile(6), gpus=4, mini_batch=mini_batch)
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] == plan.prediction.step_seconds
    baselines = [row.step_seconds for row in plan.baselines if row.step_seconds is not None]
    assert steps[0] in baselines
