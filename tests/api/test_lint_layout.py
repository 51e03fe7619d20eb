"""Layouts against megatron-core's own rules, and their estimates against the search of every division."""

from __future__ import annotations

import json
import re
from itertools import combinations_with_replacement, pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

import pplan
from pplan.cli.app import main
from pplan.cost_models.errors import InfeasibleError
from pplan.cost_models.memory import MEMORY_ERROR
from pplan.cost_models.transformer.pipeline_layout import layout_problems
from pplan.runtimes.imports import split_layout

MODEL = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
}
DEEP = {**MODEL, "num_hidden_layers": 61, "num_nextn_predict_layers": 1}


def random_layout(random: Random) -> str:
    """Mostly a good one, with a part that may be wrong."""
    stages = ["t" * random.randint(0, 3) for _ in range(random.randint(1, 6))]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    if random.random() < 0.5:
        where = random.randrange(len(stages))
        many = "m" * random.randint(1, 2)
        stages[where] = (
            stages[where][:-1] + many + "L" if stages[where].endswith("L") else stages[where] + many
        )
    text = "|".join(stages)
    for _ in range(random.choice((0, 0, 1, 2))):
        where = random.randrange(len(text) + 1)
        text = text[:where] + random.choice(["", "t", "m", "E", "L", "|", "x"]) + text[where + 1 :]
    return text


def test_what_megatron_refuses_is_a_problem(layout_class: Any) -> None:
    """3,000 random layouts, most with a mistake, and both sides of the rules."""
    random, seen = Random(0), {True: 0, False: 0}
    for _ in range(3000):
        text = random_layout(random)
        pipeline = random.randint(1, 4)
        letters = text.replace("|", "")
        blocks = letters.count("t") + random.choice((0, 0, 0, 1))
        predictors = letters.count("m") + random.choice((0, 0, 0, 1)) if "m" in text else 0
        try:
            own = layout_class(text, pipeline)
            own.validate_layer_layout(num_layers=blocks, mtp_num_layers=predictors)
            refused = ""
        except (AssertionError, IndexError) as error:
            refused = str(error) or "no layer"
        problems = layout_problems(split_layout(text, "layout"), pipeline, blocks, predictors)
        assert bool(problems) == bool(refused), (text, pipeline, blocks, predictors, problems, refused)
        seen[bool(refused)] += 1
    assert min(seen.values()) > 300


def test_as_many_stages_as_the_pipeline_has() -> None:
    """With the virtual stages given, a layout of another pipeline is found; without, it has more of them."""
    layout = "Et*4|(tttt|)*14tmL"
    assert pplan.lint_layout(layout, DEEP, pp=(16,), virtual_stages=(1,)).agrees
    assert pplan.lint_layout(layout, DEEP, pp=(8,), virtual_stages=(2,)).agrees
    assert pplan.lint_layout(layout, DEEP, pp=(8,)).virtual_stages == 2
    stale = pplan.lint_layout(layout, DEEP, pp=(8,), virtual_stages=(1,))
    assert stale.problems == ("16 stages: not the 8 of a pipeline of 8 with 1 virtual stage a device",)
    with pytest.raises(pplan.UsageError, match="a layout has one number of them"):
        pplan.lint_layout(layout, DEEP, pp=(8,), virtual_stages=(1, 2))


def test_no_layout() -> None:
    """`even`: as many blocks on every stage, as Megatron-LM does it, or a problem."""
    six = pplan.lint_layout("even", MODEL, pp=(3,))
    assert (six.agrees, six.stages) == (True, ("Ett", "tt", "ttL"))
    assert pplan.lint_layout("even", MODEL, pp=(3,), virtual_stages=(2,)).stages == ("Et", *["t"] * 4, "tL")
    for pipeline in (4, 12):
        report = pplan.lint_layout("even", MODEL, pp=(pipeline,))
        assert report.problems == (
            f"6 transformer blocks do not divide by {pipeline} stages: a layout is needed",
        )
        assert not report.remarks
    with pytest.raises(pplan.UsageError, match="of how many stages"):
        pplan.lint_layout("even", MODEL)
    costed = pplan.lint_layout("even", MODEL, pp=(2,), gpus=2, gpu="h100", mini_batch=8)
    same = pplan.lint_layout("Ettt|tttL", MODEL, pp=(2,), gpus=2, gpu="h100", mini_batch=8)
    assert costed.plan is not None
    assert same.plan is not None
    assert costed.plan.prediction.step_seconds == same.plan.prediction.step_seconds


def test_a_published_layout_and_one_that_no_longer_matches() -> None:
    """DeepSeek-V3 on 16 ranks, from megatron-core's documentation; with the blocks of an earlier model."""
    good = pplan.lint_layout("Et*3|(tt|)*29,m|L", DEEP, pp=(16,))
    assert good.agrees
    assert good.virtual_stages == 2
    assert good.stages[30:] == ("m", "L")
    older = {**DEEP, "num_hidden_layers": 60}
    assert pplan.lint_layout("Et*3|(tt|)*29,m|L", older, pp=(16,)).problems == (
        "it places 61 transformer blocks (t), the model has 60",
    )
    none = {**DEEP, "num_nextn_predict_layers": 0}
    assert pplan.lint_layout("Et*3|(tt|)*29,m|L", none, pp=(16,)).problems == (
        "it places 1 multi-token predictor (m), the model has 0",
    )
    without = pplan.lint_layout("Et*3|(tt|)*29||L", DEEP, pp=(1,))
    assert without.agrees
    assert without.remarks == (
        "empty stages: 30, 31",
        "the configuration has 1 multi-token predictor, of which 0 are counted: set `predictors`, or place "
        "each in the layout as m",
    )


def test_the_notes_about_a_configuration_are_those_of_solve() -> None:
    """A model type that is not known, local attention and a predictor."""
    config = {**MODEL, "model_type": "llama9", "sliding_window": 128, "num_nextn_predict_layers": 1}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 3
    options: dict[str, Any] = {"gpus": 2, "gpu": "h100", "mini_batch": 8, "pp": (2,), "tp": (1,)}
    linted = pplan.lint_layout("Ettt|tttL", config, **options)
    notes = pplan.solve(config, **options).notes
    assert list(linted.remarks) == notes[:3]
    assert "llama9" in notes[0]
    assert "3 of 6 blocks is local" in notes[1]
    assert "1 multi-token predictor, of which 0" in notes[2]


@pytest.mark.parametrize("memory_bytes", [80 * 10**9, 2100 * 10**6])
def test_distance_from_the_best_of_every_layout(memory_bytes: int) -> None:
    """Each layout of six blocks on three stages: none is faster than `best`, and those that do not fit are
    said so."""
    options: dict[str, Any] = {
        "gpus": 3,
        "gpu": "a100-80gb",
        "memory_bytes": memory_bytes,
        "tp": (1,),
        "mini_batch": 6,
        "sequence": 512,
        "micro_batch_size": (1,),
        "virtual_stages": (1,),
        "recompute": "none",
    }
    fitting = []
    for ends in combinations_with_replacement(range(7), 2):
        counts = [end - first for first, end in pairwise((0, *ends, 6))]
        if counts[1] == 0:
            continue
        layout = f"E{'t' * counts[0]}|{'t' * counts[1]}|{'t' * counts[2]}L"
        report = pplan.lint_layout(layout, MODEL, **options)
        assert report.plan is not None
        peaks = [stage.memory_bytes for stage in report.ranks]
        assert report.limit_bytes is not None
        assert (max(peaks) > report.limit_bytes) >= (not report.fits)
        assert not report.fits or max(peaks) <= report.limit_bytes * (1 + MEMORY_ERROR)
        if report.fits:
            assert report.best is not None
            assert report.plan.prediction.step_seconds >= report.best.prediction.lower_bound_seconds
            fitting.append((report.plan.prediction.step_seconds, report.slower, report))
    assert fitting
    assert (len(fitting) < 21) == (memory_bytes < 80 * 10**9)
    fastest = min(fitting, key=lambda each: each[0])
    assert fastest[1] == pytest.approx(0, abs=1e-9)
    slowest = max(fitting, key=lambda each: each[0])
    assert slowest[1] == pytest.approx(slowest[0] / fastest[0] - 1)
    best_layout = fastest[2].best_layout
    assert best_layout is not None
    assert pplan.lint_layout(best_layout, MODEL, pp=(3,)).agrees


def test_a_layout_with_partial_recomputation() -> None:
    report = pplan.lint_layout(
        "Ett|tt|ttL", MODEL, gpus=3, gpu="h100", mini_batch=6, tp=(1,), recompute="partial"
    )
    assert report.plan is not None
    assert report.plan.degrees is not None
    assert report.plan.degrees.recompute == "first_1"


@pytest.mark.parametrize("memory_bytes", [80 * 10**9, 10**6])
@pytest.mark.parametrize("layout", ["E|tt|t||t|L", "E|t|t|t|t|L", "Et|t||t|t|L"])
def test_partial_recomputation_of_layouts_that_the_search_has_not(layout: str, memory_bytes: int) -> None:
    """Each stage between needs a block there, so that none is left to stay as it is."""
    four = {**MODEL, "num_hidden_layers": 4}
    options: dict[str, Any] = {"gpu": "h100", "mini_batch": 12, "tp": (1,), "memory_bytes": memory_bytes}
    report = pplan.lint_layout(layout, four, gpus=6, pp=(3,), recompute="partial", **options)
    assert report.plan is not None
    assert report.plan.degrees is not None
    assert report.plan.degrees.recompute == "first_1"
    assert report.fits == (memory_bytes > 10**6) == (report.slower is not None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(DEEP))
    arguments = ["lint", "Et*3|(tt|)*29m|L", "--model", str(config), "--pp", "16"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["virtual_stages"] == 2
    assert main(["lint", "Et*3|(tt|)*28m|L", "--model", str(config), "--pp", "16"]) == 4
    printed = capsys.readouterr().out
    assert "it places 59 transformer blocks (t), the model has 61" in printed
    arguments = ["lint", "Et*3|t*3mL", "--model", str(config), "--layers", "6", "--tp", "1", "--ep", "1"]
    assert main([*arguments, "--gpus", "2", "--gpu", "h100", "--mini-batch", "8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"The layout is .* % slower than that", " ".join(printed.split()))
    assert re.search(r"E[t*\d]*\|[t*\d]*m[|L]", "".join(printed.split()))
    assert main(["lint", "Et" * 3, "--model", str(config), "--pp", "1,2"]) == 2
    assert main(["lint", "(t" + "*9" * 3000, "--model", str(config)]) in (2, 4)
    assert len(capsys.readouterr().out) < 4000


def test_the_best_layout_is_as_fast_and_no_memory_is_negative(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a device whose context takes more than there is, what it has is told."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    command = ["--model", str(config), "--tp", "1", "--gpus", "2", "--gpu", "h100", "--mini-batch", "1"]
    assert main(["lint", "EttttttL", *command, "--pp", "1", "--gpus", "1", "--memory", "100MB"]) == 4
    printed = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"It does not fit: where it needs least, [\d.]+ .iB of the 95.37 MiB of a device", printed
    )
    assert "None that fits at these degrees was found." in printed
    report = pplan.lint_layout("Ettt|tttL", MODEL, gpus=2, gpu="h100", mini_batch=1, tp=(1,))
    best = report.best_layout
    assert best is not None
    assert main(["lint", best, *command]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "The layout is as fast as that." in printed
    assert " 1 micro-batch x 1," in printed


def test_the_predictors_that_are_asked_for() -> None:
    """A model with no predictors in its config.json. The number must be that of the layout."""
    ten = {**MODEL, "num_hidden_layers": 10}
    assert pplan.lint_layout("E|(t|)*10m,L", ten, pp=(12,), predictors=1).agrees
    assert pplan.lint_layout("E|(t|)*10m,L", ten, pp=(12,), predictors=2).problems == (
        "it places 1 multi-token predictor (m), the model has 2",
    )
    assert pplan.lint_layout("E|(t|)*10L", ten, pp=(12,), predictors=1).problems == (
        "it places 0 multi-token predictors (m), the model has 1",
    )
    assert pplan.lint_layout("E|(t|)*10,L", ten, pp=(12,)).agrees
    assert pplan.lint_layout("even", ten, pp=(2,), predictors=1).stages == ("Ettttt", "tttttmL")
    machine: dict[str, Any] = {"gpus": 2, "gpu": "h100", "mini_batch": 8, "tp": (1,)}
    with_predictor, without = (
        pplan.lint_layout("even", ten, pp=(2,), predictors=n, **machine) for n in (1, 0)
    )
    assert with_predictor.plan is not None
    assert without.plan is not None
    assert with_predictor.plan.training is not None
    assert with_predictor.plan.training.predictors == 1
    assert with_predictor.plan.prediction.step_seconds > without.plan.prediction.step_seconds


@pytest.mark.parametrize("layout", ["E|tt|tt|L", "E|tttt||L", "E||tttt|L"])
def test_no_best_layout_is_slower_than_the_one_that_is_judged(layout: str) -> None:
    """Four micro-batches and a large head: the search alone gave `E|t|t*3|L`, 0.4 % slower than the first."""
    model = {**MODEL, "hidden_size": 4096, "intermediate_size": 8192, "vocab_size": 256000}
    model["num_hidden_layers"] = 4
    report = pplan.lint_layout(layout, model, gpus=4, gpu="h100", mini_batch=4, sequence=4096, tp=(1,))
    assert report.best is not None
    assert report.slower is not None
    assert report.slower >= 0
    assert report.best.prediction.gap >= 0
    if layout == "E|tt|tt|L":
        assert report.best_layout == "E|t*2|t*2|L"


@pytest.mark.parametrize("recompute", ["none", "partial"])
def test_the_virtual_stages_of_the_layout_are_searched(recompute: str) -> None:
    """Two blocks in 12 virtual stages, more than the search makes of them without being asked."""
    model = {**MODEL, "num_hidden_layers": 2}
    few: dict[str, Any] = {"mini_batch": 8, "tp": (1,), "pp": (4,), "micro_batch_size": (1,)}
    report = pplan.lint_layout("E|||||t||t||||L", model, gpus=4, gpu="h100", recompute=recompute, **few)
    assert report.best is not None
    assert report.slower is not None
    assert report.slower >= 0


def test_the_verdict_names_the_numeric_formats(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL))
    command = [
        "lint",
        "Ettt|tttL",
        "--model",
        str(config),
        "--gpus",
        "2",
        "--gpu",
        "h100",
        "--mini-batch",
        "8",
    ]
    assert main(command) == 0
    assert "in bfloat16 with float32 gradients and Adam" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["formats"] == "bfloat16 with float32 gradients and Adam"


EXPERTS = {**MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
JUDGED: dict[str, Any] = {"gpus": 8, "gpu": "h100", "pp": (2,), "mini_batch": 16, "sequence": 8192}


@pytest.mark.parametrize(
    ("name", "values", "more"),
    [
        ("mini_batch", (16, 32), {}),
        ("sequence", (4096, 8192), {}),
        ("layers", (6, 7), {}),
        ("predictors", (0, 1), {}),
        ("zero", ((0,), (1,)), {}),
        ("tp", ((1,), (2,)), {}),
        ("pp", ((2,), (4,)), {}),
        ("cp", ((1,), (2,)), {}),
        ("ep", ((1,), (2,)), {}),
        ("micro_batch_size", ((1,), (2,)), {}),
        ("virtual_stages", ((1,), (2,)), {}),
        ("recompute", ("none", "full"), {}),
        ("offload", (False, True), {"memory_bytes": 3 * 10**9, "recompute": "none", "host_bandwidth": 1e12}),
        ("host_bandwidth", (1e9, 1e12), {"memory_bytes": 3 * 10**9, "recompute": "none", "offload": True}),
        ("context_exchange", ("ring", "all-gather"), {"cp": (2,)}),
        ("fix", ({"tp": 1}, {"tp": 2}), {}),
        ("gpus", (8, 16), {}),
        ("gpu", ("h100", "a100-80gb"), {}),
        ("gpus_per_node", (2, 8), {"tp": (4,)}),
        ("memory_bytes", (40 * 10**9, 80 * 10**9), {}),
        ("bandwidth", ((1e9,), (1e11,)), {"tp": (4,)}),
        ("latency", ((1e-3,), (1e-6,)), {"tp": (4,)}),
        ("topology", ("dgx-a100", "dgx-h100"), {"gpu": None, "gpus": None}),
    ],
)
def test_every_option_has_an_effect(name: str, values: tuple[Any, Any], more: dict[str, Any]) -> None:
    options = {**JUDGED, **more}
    reports = [pplan.lint_layout("Ettt|tttL", EXPERTS, **{**options, name: value}) for value in values]
    first, second = (json.loads(report.to_json()) for report in reports)
    assert first != second
    assert any(report.problems for report in reports) or all(report.plan for report in reports)


def test_options_without_a_machine() -> None:
    """Options without effect are named."""
    report = pplan.lint_layout("Ettt|tttL", MODEL, gpu="h100", tp=(2,), fix={"zero": 0})
    assert report.plan is None
    assert report.remarks == (
        "memory and seconds are not estimated, and `zero`, `tp`, `gpu` not used: give `gpus` or a `topology`",
    )
    assert pplan.lint_layout("Ettt|tttL", MODEL, pp=(2,), virtual_stages=(1,), layers=6).remarks == ()
    with pytest.raises(pplan.UsageError, match="pipeline of at least 2 stages"):
        pplan.lint_layout("Ettt|tttL", MODEL, gpus=2, gpu="h100", pp=(1,))
    with pytest.raises(pplan.FileError, match="no_such"):
        pplan.lint_layout("Ettt|tttL", MODEL, gpus=2, gpu="h100", kernels="no_such.csv")


@pytest.mark.parametrize(("share", "fits"), [(0.9, True), (-0.5, True), (1.1, False)])
def test_memory_within_the_estimates_error_is_a_warning(share: float, fits: bool) -> None:
    """Above a device's memory by a share of the error: solve and lint warn; by more they refuse."""
    options: dict[str, Any] = {"gpus": 1, "gpu": "a100-80gb", "mini_batch": 4, "sequence": 512}
    options |= {"micro_batch_size": (1,), "recompute": "none", "zero": (1,)}
    layout = "EttttttL"
    whole = pplan.lint_layout(layout, MODEL, **options)
    peak, context = whole.peak_bytes, whole.ranks[0].memory["context"]
    options["memory_bytes"] = int(context + (peak - context) / (1 + share * MEMORY_ERROR))
    report = pplan.lint_layout(layout, MODEL, **options)
    warned = [text for text in report.remarks if "may run out of memory" in text]
    assert (report.fits, report.agrees, len(warned)) == (fits, fits, fits and share > 0)
    if not fits:
        with pytest.raises(InfeasibleError):
            pplan.solve(MODEL, **options)
        return
    plan = pplan.solve(MODEL, **options)
    assert plan.stages[0].memory_bytes == peak
    assert len(plan.warnings) == (share > 0)
    assert pplan.lint(plan).agrees


@pytest.mark.slow
def test_a_model_by_its_name_in_transformers() -> None:
    assert pplan.lint_layout("even", "hf:llama", gpus=16, gpu="h100", pp=(2,), tp=(8,)).agrees
