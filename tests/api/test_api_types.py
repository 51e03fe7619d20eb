"""Every argument of the Python API is refused where it is of another type, in Python's words."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.api.solve import MODELS
from pplan.api.stage_costs import CostOptions
from pplan.cost_models.arguments import list_declarations
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

FREE = {
    *("profile.model", "profile.example_input", "sequential.example_input", "sequential.model"),
    *("compare.plans", "plot_timelines.style"),
}
"""Of any type: what torch makes of it decides."""


def test_an_option_that_is_none_is_refused_with_the_nearest(profile: Profile) -> None:
    options: dict[str, Any] = {"micro_batch": 3}
    with pytest.raises(pplan.UsageError, match="micro_batch: is no option of solve") as refused:
        pplan.solve(profile, gpus=2, **options)
    assert refused.value.hint.startswith("Did you mean micro_batches?")


OF_COSTS = {*list_declarations(CostOptions), "stages", "micro_batches", "virtual_stages", "transfers"}
"""Options of `compare_schedules` that costs take."""
WITH_OPTIONS = (
    *("solve", "frontier", "sweep", "simulate", "simulate_costs", "compare_schedules", "explain"),
    *("data_parallel", "replan", "check", "profile", "import_profile", "import_plan", "lint_layout"),
)


@pytest.mark.parametrize("name", WITH_OPTIONS)
def test_every_option_is_a_keyword_of_the_signature_and_a_line_of_the_help(name: str) -> None:
    function = getattr(pplan, name)
    parameters = inspect.signature(function).parameters.values()
    assert {parameter.kind for parameter in parameters} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    text = inspect.getdoc(function) or ""
    lines = text[text.index("\nOptions:\n") :].splitlines()
    typed = {parameter.name: parameter for parameter in parameters}
    options = [line.strip().partition(": ") for line in lines if re.match(r"    \w+: ", line)]
    assert options
    for option, _, rest in options:
        default = typed[option].default
        is_required = default is inspect.Parameter.empty
        assert rest == f"{typed[option].annotation}" + ("" if is_required else f" = {default!r}")
    known = {option for option, _, _ in options}
    assert set(typed) - known <= {
        *("profile", "profile_file", "profile_sha256", "grid", "progress", "plan", "schedules", "model"),
        *("example_input", "remark", "path", "source", "layout", "config"),
    }


def test_the_signature_of_solve_has_all_options_of_a_profile_and_of_a_configuration() -> None:
    names = set(inspect.signature(pplan.solve).parameters)
    assert {name for model in (*MODELS, DegreeOptions) for name in list_declarations(model)} < names
    assert "    optimizer: str = 'sgd'\n        Optimizer (sets state memory).\n" in (
        inspect.getdoc(pplan.solve) or ""
    )
    assert inspect.signature(pplan.replan).parameters["lost"].default is inspect.Parameter.empty
    assert "gpus" not in inspect.signature(pplan.simulate).parameters


class Strange:
    """Of no type that any argument takes."""


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in pplan.__all__:
        made = getattr(pplan, name)
        if inspect.isfunction(made):
            yield name, made


def arguments() -> Iterator[tuple[str, str, str]]:
    """Functions and the names of their arguments, with the annotation as written."""
    for name, function in functions():
        for parameter in inspect.signature(function).parameters.values():
            if f"{name}.{parameter.name}" not in FREE:
                yield name, parameter.name, str(parameter.annotation)


def wrong(annotation: str) -> Iterator[Any]:
    """Values that the annotation does not take."""
    yield Strange()
    if annotation == "bool":
        yield from ("no", "false", 1, 0, None, [])
    elif "int" in annotation and "str" not in annotation and "Sequence" not in annotation:
        yield from ("8", 2.5, True, [1])
    elif annotation.startswith("float"):
        yield True
        if "str" not in annotation:
            yield "8"
    elif "str" in annotation and "Sequence" not in annotation and "Mapping" not in annotation:
        yield from (5, True, ["a"])
    elif annotation.startswith(("Sequence[str]", "Sequence[tuple")):
        yield from ("l1", 5, [5], None)
    elif annotation.startswith("Mapping"):
        yield from ("depth=4", 5, [("depth", 4)])


GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
_OF_CONFIGURATIONS = list_declarations(DegreeOptions).keys() - {
    name for model in MODELS for name in list_declarations(model)
}


def call(name: str, argument: str, value: Any, profile: Profile, plan: Plan) -> None:
    costs: dict[str, Any] = {"stages": 2, "micro_batches": 4, "forward_ms": 1, "backward_ms": 1}
    of_plan = {"plan": plan, "profile": profile}
    given: dict[str, dict[str, Any]] = {
        "solve": {"profile": profile, "gpus": 2, "mini_batch": 16},
        "frontier": {"profile": profile, "gpus": 2, "mini_batch": 16, "points": 1},
        "sweep": {"profile": profile, "grid": {"use_all": [True, False]}, "mini_batch": 16, "gpus": 2},
        "simulate": {"plan": plan, "profile": profile},
        "simulate_costs": {"schedule": "1f1b", **costs},
        "compare_schedules": {
            "schedules": ["1f1b"],
            **(costs if argument in OF_COSTS else of_plan),
        },
        "explain": {"plan": plan, "profile": profile},
        "data_parallel": {"profile": profile, "gpus": 2, "mini_batch": 16},
        "check": {"plan": plan, "profile": profile},
        "replan": {"plan": plan, "profile": profile, "lost": [1]},
        "lint": {"plan": plan, "profile": profile},
        "report": {"plan": plan},
        "plot_timelines": {},
        "compare": {},
        "lint_layout": {"layout": "EtL", "config": {}},
        "profile": {"model": "vgg11"},
        "import_profile": {"path": "a.csv"},
        "import_plan": {"source": "6,6", "profile": profile, "mini_batch": 16},
        "export": {"runtime": "torchgpipe", "plan": plan},
        "register_schedule": {"schedule": "name: mine\ndevice i: (F B)*m"},
        "sequential": {"model": None, "example_input": None},
        "load_model": {"name": "vgg11"},
        "topology": {"name": "dgx-a100"},
        "load_profile": {"path": "a.profile.json"},
        "load_plan": {"path": "a.plan.json"},
    }
    if (name, argument) == ("sweep", "use_all"):
        given[name]["grid"] = {"mini_batch": [8]}
        del given[name]["mini_batch"]
    if name == "solve" and argument in _OF_CONFIGURATIONS:
        given[name] = {"profile": GPT2, "gpus": 2, "gpu": "h100"}
    own = {**given[name], argument: value}
    plans = (Plan.model_validate(plan.model_dump()),) if name == "compare" else ()
    getattr(pplan, name)(*plans, **own)


CASES = [
    pytest.param(name, argument, annotation, id=f"{name}-{argument}")
    for name, argument, annotation in arguments()
    if (name, argument) != ("lint_layout", "by_stage")  # refused whatever it is
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "argument", "annotation"), CASES)
@pytest.mark.usefixtures("here")
def test_another_type_is_refused_by_name(
    name: str, argument: str, annotation: str, profile: Profile, plan: Plan
) -> None:
    if name == "sequential":
        pytest.importorskip("torch")
    for value in wrong(annotation):
        with pytest.raises(pplan.UsageError) as refused:
            call(name, argument, value, profile, plan)
        said = refused.value.what
        assert said.startswith(argument) or f" {argument}" in said, said
        assert not said.startswith("--"), said
        inner = value[0] if isinstance(value, list) and value else value
        assert any(type(seen).__name__ in said or repr(seen) in said for seen in (value, inner)), said


@pytest.mark.parametrize("argument", ["objective", "price", "use_all", "pins", "seconds_of"])
def test_options_that_are_handed_on_are_checked_too(argument: str, profile: Profile) -> None:
    wrong: dict[str, Any] = {argument: Strange()}
    for made in (
        lambda: pplan.frontier(profile, gpus=2, **wrong),
        lambda: pplan.sweep(profile, {"mini_batch": [16]}, gpus=2, **wrong),
        lambda: pplan.sweep(profile, {argument: [Strange()]}, gpus=2),
    ):
        with pytest.raises(pplan.UsageError, match=argument):
            made()


def test_a_flag_that_is_a_word_is_neither_taken_nor_recorded(profile: Profile) -> None:
    with pytest.raises(pplan.UsageError, match="use_all='no': is not True or False but of type str"):
        pplan.solve(profile, gpus=2, use_all=typing.cast("bool", "no"))
    assert pplan.solve(profile, gpus=2, mini_batch=16, use_all=True).options.use_all is True


@pytest.mark.parametrize(
    "pins", [["l1"], [("l1",)], [("l1", 0, 1)], [("l1", "0")], "l1", [(0, "l1")], {"l1": 0}]
)
def test_pins_are_layers_with_the_numbers_of_their_stages(pins: Any, profile: Profile) -> None:
    with pytest.raises(pplan.UsageError) as refused:
        pplan.solve(profile, gpus=2, pins=pins)
    assert refused.value.what.startswith("pins")
    assert '("features.10", 1)' in refused.value.hint or "pins[0][1]=" in refused.value.what


def test_lists_are_taken_for_pairs(profile: Profile, here: Path) -> None:
    del here
    plan = pplan.solve(profile, gpus=2, mini_batch=16, pins=[["features.0", 0]])  # type: ignore[list-item]
    assert plan.options.pins == (("features.0", 0),)
