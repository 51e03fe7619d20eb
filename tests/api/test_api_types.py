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
from pplan.api.options import (
    CheckKeywords,
    CheckOptions,
    FrontierKeywords,
    FrontierOptions,
    ImportPlanKeywords,
    PartitionKeywords,
    PartitionOptions,
    ProblemKeywords,
    SolveKeywords,
    SweepKeywords,
    SweepOptions,
)
from pplan.api.simulate import SimulateKeywords
from pplan.api.solve import MODELS
from pplan.api.stage_costs import CostKeywords
from pplan.cost_models.arguments import Options, list_declarations
from pplan.cost_models.machines import MachineKeywords, MachineOptions
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.explanation.explain_options import ExplainKeywords, ExplainOptions
from pplan.planner.objectives.objective import ObjectiveKeywords, ObjectiveOptions
from pplan.planner.plan_file import Plan
from pplan.planner.plan_options import (
    OverrideKeywords,
    Overrides,
    PlanKeywords,
    PlanOptions,
    TrainingKeywords,
)
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import (
    ImportKeywords,
    ProfileImportOptions,
    ProfileKeywords,
    ProfileOptions,
    TensorParallelKeywords,
    TensorParallelOptions,
)

FREE = {
    *("profile.model", "profile.example_input", "sequential.example_input", "sequential.model"),
    "compare.plans",
}
"""Of any type: what torch makes of it decides."""


def written(keywords: Any) -> dict[str, str]:
    """The annotations of a TypedDict as they are written."""
    texts = {
        name: getattr(value, "__forward_arg__", str(value))
        for name, value in keywords.__annotations__.items()
    }
    return {
        name: text.removeprefix("Required[").removesuffix("]") if text.startswith("Required") else text
        for name, text in texts.items()
    }


@pytest.mark.parametrize(
    ("keywords", "model"),
    [
        (MachineKeywords, MachineOptions),
        (PlanKeywords, PlanOptions),
        (ObjectiveKeywords, ObjectiveOptions),
        (OverrideKeywords, Overrides),
        (PartitionKeywords, PartitionOptions),
        (ExplainKeywords, ExplainOptions),
        (CheckKeywords, CheckOptions),
        (ProfileKeywords, ProfileOptions),
        (TensorParallelKeywords, TensorParallelOptions),
        (ImportKeywords, ProfileImportOptions),
    ],
)
def test_the_keywords_are_the_fields_of_the_options(keywords: Any, model: type[Options]) -> None:
    assert set(keywords.__annotations__) == set(list_declarations(model)) - {"gpus"}
    made = {name: value for name, value in vars(model()).items() if name != "gpus"}
    assert model(**made) == model()


def test_keywords_of_several_models_are_all_of_theirs() -> None:
    def names(*models: type[Options]) -> set[str]:
        return {name for model in models for name in list_declarations(model)}

    for keywords, known in (
        (SolveKeywords, names(*MODELS, DegreeOptions)),
        (ProblemKeywords, names(MachineOptions, PlanOptions)),
        (FrontierKeywords, names(MachineOptions, PlanOptions, FrontierOptions)),
        (SweepKeywords, names(*MODELS, SweepOptions)),
        (SimulateKeywords, names(MachineOptions, Overrides) - {"gpus"}),
        (ImportPlanKeywords, names(MachineOptions, PartitionOptions) | set(TrainingKeywords.__annotations__)),
    ):
        assert set(keywords.__annotations__) == known
    assert set(TrainingKeywords.__annotations__) < names(PlanOptions)


def test_an_option_that_is_none_is_refused_with_the_nearest(profile: Profile) -> None:
    options: dict[str, Any] = {"micro_batch": 3}
    with pytest.raises(pplan.UsageError, match="micro_batch: is no option of solve") as refused:
        pplan.solve(profile, gpus=2, **options)
    assert refused.value.hint.startswith("Did you mean micro_batches?")


def test_help_names_every_option_with_its_default() -> None:
    for name in ("solve", "frontier", "sweep", "simulate", "simulate_costs", "explain", "replan", "check",
                 "profile", "import_profile", "import_plan", "lint"):  # fmt: skip
        function = getattr(pplan, name)
        annotation = str(inspect.signature(function).parameters["options"].annotation)
        keywords = written(
            inspect.unwrap(function).__globals__[annotation.removeprefix("Unpack[").removesuffix("]")]
        )
        text = inspect.getdoc(function) or ""
        said = dict(re.findall(r"^    (\w+): (.+)$", text[text.index("\nOptions:\n") :], re.MULTILINE))
        refused = {"by_stage"} if name == "lint" else set[str]()
        assert set(said) == set(keywords) - refused
        assert all(line.partition(" = ")[0] == keywords[option] for option, line in said.items())
    options = vars(PlanOptions()) | vars(MachineOptions()) | vars(ObjectiveOptions())
    text = inspect.getdoc(pplan.solve) or ""
    assert all(f"\n    {option}: " in text and f" = {value!r}\n" in text for option, value in options.items())
    assert "\n        Optimizer (sets state memory).\n" in text


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
                if parameter.kind is parameter.VAR_KEYWORD:
                    named = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
                    for option, annotation in written(inspect.unwrap(function).__globals__[named]).items():
                        yield name, option, annotation
                else:
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
            **(costs if argument in CostKeywords.__annotations__ else of_plan),
        },
        "explain": {"plan": plan, "profile": profile},
        "data_parallel": {"profile": profile, "gpus": 2, "mini_batch": 16},
        "check": {"plan": plan, "profile": profile},
        "replan": {"plan": plan, "profile": profile, "lost": [1]},
        "verify": {"plan": plan, "profile": profile},
        "report": {"plan": plan},
        "compare": {},
        "lint": {"layout": "EtL", "config": {}},
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
    if (name, argument) != ("lint", "by_stage")  # refused whatever it is
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
