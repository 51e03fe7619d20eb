"""Check of a pipeline layout: does it match the model, does it fit, and how far is it from the best."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..cost_models import arguments
from ..cost_models.arguments import arguments_class, takes
from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.quantities import format_count
from ..cost_models.transformer.pipeline_layout import layout_problems, stage_letters
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..cost_models.transformer.weight_update import NUMERIC_FORMATS
from ..planner.degrees.degree_combinations import virtual_stage_numbers
from ..planner.degrees.degree_options import DegreeOptions
from ..planner.degrees.degree_search import DegreeAnswer, search_degrees
from ..planner.degrees.layout_estimate import estimate_layout
from ..planner.plan_file import Plan, PlannedStage, most_memory_bytes
from ..runtimes.degree_exports import degree_request
from ..runtimes.imports import split_layout
from .degrees import configuration_notes, machine_costs, memory_warnings, read_options, read_shape
from .plan_summary import describe_degrees

EVEN = "even"
"""In the place of a layout: none is given, and Megatron-LM divides the blocks evenly."""


def plan_layout(plan: Plan) -> str | None:
    """Return the layout of a plan from a configuration, as Megatron-LM takes it; None for other plans."""
    return None if plan.training is None else degree_request(plan, plan.training).layout


@dataclass(frozen=True)
class LayoutReport:
    """What was found of a layout.

    `stages`: the letters of each (virtual) stage. `problems`: why Megatron-LM does not train the model so;
    `remarks`: what is odd, and what is not known of the configuration. With a machine, and where there are
    no problems, `plan` is the layout at the degrees that suit it best, and `best` the best plan of all
    layouts at the same degrees; None where none fits.
    """

    layout: str
    model: str
    stages: tuple[str, ...]
    pipeline: int
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    plan: Plan | None = None
    best: Plan | None = None

    @property
    def virtual_stages(self) -> int:
        """Of a device."""
        return len(self.stages) // self.pipeline

    @property
    def ranks(self) -> list[PlannedStage]:
        """The first (virtual) stage of each rank of the pipeline, which has the memory of all of them."""
        return [] if self.plan is None else self.plan.stages[: self.pipeline]

    @property
    def peak_bytes(self) -> int:
        """Memory of the device that needs most."""
        return max((stage.memory_bytes for stage in self.ranks), default=0)

    @property
    def limit_bytes(self) -> int | None:
        """Memory of a device; None where it is not known."""
        return self.ranks[0].memory_limit_bytes if self.ranks else None

    @property
    def fits(self) -> bool:
        """True if no device is over its memory by more than the error of the estimate."""
        return all(stage.memory_bytes <= most_memory_bytes(stage) for stage in self.ranks)

    @property
    def agrees(self) -> bool:
        """True if the layout matches the model and fits."""
        return not self.problems and self.fits

    @property
    def slower(self) -> float | None:
        """Its step over that of the best plan found, less 1."""
        if self.plan is None or self.best is None or not self.fits:
            return None
        return self.plan.prediction.step_seconds / self.best.prediction.step_seconds - 1

    @property
    def best_layout(self) -> str | None:
        """The layout of the best plan found, where Megatron-LM takes it."""
        return None if self.best is None else plan_layout(self.best)

    def to_json(self) -> str:
        """As JSON."""
        plan, best = self.plan, self.best
        document = {
            "layout": self.layout,
            "model": self.model,
            "stages": self.stages,
            "pipeline": self.pipeline,
            "virtual_stages": self.virtual_stages,
            "agrees": self.agrees,
            "problems": self.problems,
            "remarks": self.remarks,
            "degrees": None if plan is None else describe_degrees(plan),
            "formats": None if plan is None else NUMERIC_FORMATS,
            "step_seconds": None if plan is None else plan.prediction.step_seconds,
            "stage_bytes": None if plan is None else [stage.memory_bytes for stage in self.ranks],
            "limit_bytes": self.limit_bytes,
            "best_degrees": None if best is None else describe_degrees(best),
            "best_layout": self.best_layout,
            "best_step_seconds": None if best is None else best.prediction.step_seconds,
            "bound_seconds": None if best is None else best.prediction.lower_bound_seconds,
        }
        return json.dumps(document, indent=1) + "\n"


@arguments_class
class LayoutArguments(DegreeOptions, MachineOptions):
    """The arguments of `lint_layout`."""

    layout: str = field(kw_only=False)
    config: str | Path | Mapping[str, Any] = field(kw_only=False)


@takes(LayoutArguments)
def lint_layout(
    layout: str,
    config: str | Path | Mapping[str, Any],
    **options: Any,
) -> LayoutReport:
    """What is wrong with a pipeline layout of Megatron-LM, such as `Et*3|(tt|)*29m|L`, for a model.

    "even": no layout, as many blocks on every (virtual) stage.
    `config`: the model's config.json (its path, or what it says). `pp`: the pipeline's size; default: as many
    as the layout has stages. `virtual_stages`: of a device; default: as many as the layout makes.
    `predictors`: that Megatron-LM trains; default: those of `config` if the layout places any.
    With `gpus` or a `topology`, memory and step are estimated, at the degrees that suit the layout best of
    those that the options allow (as of `degrees`), and compared with the best layout at the same degrees. The
    layout itself is among those compared.

    >>> import pplan
    >>> llama = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}
    >>> llama |= {"num_attention_heads": 8, "num_hidden_layers": 6}
    >>> pplan.lint_layout("Ett|tt|tL", llama).problems
    ('it places 5 transformer blocks (t), the model has 6',)

    Raises UsageError and FileError.
    """
    if "by_stage" in options:
        raise UsageError("`by_stage`: a layout has one set of degrees", "Omit `by_stage`.")
    machine, degree_options = read_options(options)
    return check_layout(arguments.word("layout", layout), read_shape(config), machine, degree_options)


def check_layout(
    layout: str,
    shape: TransformerShape,
    machine: MachineOptions,
    options: DegreeOptions,
) -> LayoutReport:
    """Check a layout by what is read already."""
    if options.layers is not None:
        shape = shape.with_blocks(options.layers)
    virtual = _virtual_stages(options)
    if layout == EVEN:
        stages, problems = _even_stages(shape.blocks, options, virtual or 1)
    else:
        stages, problems = tuple(split_layout(layout, "layout")), ()
    pipeline = _pipeline_size(options, len(stages))
    if virtual is not None and not problems and len(stages) != pipeline * virtual:
        problems = (
            f"{format_count(len(stages), 'stage')}: not the {pipeline * virtual} of a pipeline of {pipeline} "
            f"with {format_count(virtual, 'virtual stage')} a device",
        )
    if layout != EVEN:
        predictors = options.predictors or (shape.predictors if "m" in "".join(stages) else 0)
        problems += tuple(layout_problems(stages, pipeline, shape.blocks, predictors))
    remarks = tuple(_remarks(stages, shape, options.sequence))
    has_machine = machine.gpus is not None or machine.topology is not None
    if not has_machine:
        remarks += tuple(_unused_remarks(options, machine))
    report = LayoutReport(layout, shape.name, stages, pipeline, problems, remarks)
    if not has_machine or report.problems:
        return report
    return _with_estimate(report, shape, machine, options)


def _virtual_stages(options: DegreeOptions) -> int | None:
    """Of a device, where they are given."""
    if options.virtual_stages is None:
        return None
    if len(options.virtual_stages) > 1:
        raise UsageError(
            f"virtual_stages={tuple(options.virtual_stages)}: a layout has one number of them",
            "Give it, as virtual_stages=(2,), or omit it.",
        )
    return options.virtual_stages[0]


def _even_stages(
    blocks: int, options: DegreeOptions, virtual: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The stages that Megatron-LM makes where it is given no layout, and why it makes none."""
    if options.pp is None:
        raise UsageError(
            f"layout={EVEN!r}: of how many stages is not known", "Give the pipeline's size, as pp=(8,)."
        )
    stages = _pipeline_size(options, 0) * virtual
    each, rest = divmod(blocks, stages)
    if rest or not each:
        words = (
            f"{format_count(blocks, 'transformer block')} do not divide by {format_count(stages, 'stage')}"
        )
        return ("",) * stages, (f"{words}: a layout is needed",)
    return tuple(stage_letters([each] * stages, options.predictors)), ()


def _pipeline_size(options: DegreeOptions, stages: int) -> int:
    if options.pp is None:
        return stages
    if len(options.pp) > 1:
        raise UsageError(f"pp={tuple(options.pp)}: a layout has one pipeline", "Give its size, as pp=(8,).")
    return options.pp[0]


def _remarks(stages: tuple[str, ...], shape: TransformerShape, sequence: int) -> list[str]:
    """List what is odd about the layout, and the notes of `degrees` about the configuration."""
    empty = [str(stage) for stage, letters in enumerate(stages) if not letters]
    remarks = []
    if empty and any(stages):
        more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
        remarks.append(f"empty stages: {', '.join(empty[:10])}{more}")
    predictors = sum(letters.count("m") for letters in stages)
    return [*remarks, *configuration_notes(shape, sequence, predictors)]


def _unused_remarks(options: DegreeOptions, machine: MachineOptions) -> Iterator[str]:
    """Return a remark on the options that are given and say nothing without a number of devices."""
    names = [
        field.name
        for own in (options, machine)
        for field in fields(own)
        if field.name not in _WITHOUT_MACHINE and getattr(own, field.name) != field.default
    ]
    if names:
        words = ", ".join(f"`{name}`" for name in names)
        yield f"memory and seconds are not estimated, and {words} not used: give `gpus` or a `topology`"


_WITHOUT_MACHINE = ("layers", "sequence", "predictors", "pp", "virtual_stages", "fix")
"""Options that the layout itself is judged by."""


def _with_estimate(
    report: LayoutReport,
    shape: TransformerShape,
    machine: MachineOptions,
    options: DegreeOptions,
) -> LayoutReport:
    costed = machine_costs(machine, options)
    gpus, costs, limit = costed.topology.gpus, costed.costs, costed.limit_bytes
    counts = [letters.count("t") for letters in report.stages]
    predictors = [letters.count("m") for letters in report.stages]
    options = replace(options, predictors=sum(predictors))
    offset = predictors[::-1].index(max(predictors))
    layout = estimate_layout(shape, counts, report.pipeline, gpus, costs, options, limit, offset)
    own = layout.degrees
    same = replace(
        options,
        tp=(own.tensor,),
        cp=(own.context,),
        ep=(own.expert,),
        pp=(own.pipeline,),
        virtual_stages=tuple({*virtual_stage_numbers(shape, own.pipeline, options), layout.virtual_stages}),
        zero=(own.zero,),
        context_exchange=own.exchange,
    )
    alone = DegreeAnswer(
        shape,
        gpus,
        options,
        costs,
        (layout,),
        layout.estimate.step_seconds,
        combinations=1,
        limit_bytes=limit,
    )
    candidate = layout if layout.estimate.peak_bytes <= limit else None
    try:
        best = costed.plan(search_degrees(shape, gpus, costs, same, limit, candidate))
    except (InfeasibleError, UsageError):
        best = None
    report = replace(report, plan=costed.plan(alone), best=best)
    warnings = memory_warnings(report.ranks) if report.fits else []
    return replace(report, remarks=(*warnings, *report.remarks))
