"""Whether a pipeline layout that somebody wrote is the model's, fits, and how far it is from the best."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Unpack

from ..cost_models import arguments
from ..cost_models.arguments import describe_options, list_declarations, options_from
from ..cost_models.errors import InfeasibleError, UsageError
from ..cost_models.machines import MachineOptions
from ..cost_models.quantities import format_count
from ..cost_models.transformer.pipeline_layout import layout_problems, stage_letters
from ..cost_models.transformer.transformer_shape import TransformerShape
from ..cost_models.transformer.weight_update import NUMERIC_FORMATS
from ..planner.degrees.degree_combinations import virtual_stage_numbers
from ..planner.degrees.degree_options import DegreeOptions
from ..planner.degrees.degree_search import DegreeAnswer, DegreePlan, search_degrees
from ..planner.degrees.layout_estimate import estimate_layout
from ..runtimes.exports import write_layout
from ..runtimes.imports import split_layout
from .degrees import DegreesKeywords, configuration_notes, machine_costs, read_shape

EVEN = "even"
"""In the place of a layout: none is given, and Megatron-LM divides the blocks evenly."""


@dataclass(frozen=True)
class LayoutReport:
    """What was found of a layout.

    `stages`: the letters of each (virtual) stage. `problems`: why Megatron-LM does not train the model so;
    `remarks`: what is odd, and what is not known of the configuration. With a machine, and where there are
    no problems, `plan` is the layout at the degrees that suit it best, `limit_bytes` what a device has for
    it, and `best` the search of all layouts at the same degrees; None where none fits.
    """

    layout: str
    model: str
    stages: tuple[str, ...]
    pipeline: int
    problems: tuple[str, ...]
    remarks: tuple[str, ...]
    plan: DegreePlan | None = None
    limit_bytes: float = float("inf")
    best: DegreeAnswer | None = None

    @property
    def virtual_stages(self) -> int:
        """Of a device."""
        return len(self.stages) // self.pipeline

    @property
    def fits(self) -> bool:
        """Whether the plan's memory is within the device's."""
        return self.plan is None or self.plan.estimate.peak_bytes <= self.limit_bytes

    @property
    def agrees(self) -> bool:
        """Whether the layout is the model's, and fits."""
        return not self.problems and self.fits

    @property
    def slower(self) -> float | None:
        """Its step over that of the best plan found, less 1."""
        if self.plan is None or self.best is None or not self.fits:
            return None
        return self.plan.estimate.step_seconds / self.best.plans[0].estimate.step_seconds - 1

    @property
    def best_layout(self) -> str | None:
        """The layout of the best plan found, where Megatron-LM takes it."""
        if self.best is None:
            return None
        plan = self.best.plans[0]
        return write_layout(plan.blocks, plan.setting.predictors, plan.setting.predictor_offset)

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
            "degrees": None if plan is None else plan.degrees.describe(),
            "formats": None if plan is None else NUMERIC_FORMATS,
            "step_seconds": None if plan is None else plan.estimate.step_seconds,
            "stage_bytes": None if plan is None else [stage.bytes for stage in plan.estimate.stages],
            "limit_bytes": None if plan is None or self.limit_bytes == float("inf") else self.limit_bytes,
            "best_degrees": None if best is None else best.plans[0].degrees.describe(),
            "best_layout": self.best_layout,
            "best_step_seconds": None if best is None else best.plans[0].estimate.step_seconds,
            "bound_seconds": None if best is None else best.bound_seconds,
        }
        return json.dumps(document, indent=1) + "\n"


@describe_options(DegreesKeywords, DegreeOptions, MachineOptions, refused=("by_stage",))
def lint(
    layout: str,
    config: str | Path | Mapping[str, Any],
    *,
    gpus: int | None = None,
    kernels: str | Path | None = None,
    **options: Unpack[DegreesKeywords],
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
    >>> pplan.lint("Ett|tt|tL", llama).problems
    ('it places 5 transformer blocks (t), the model has 6',)

    Raises UsageError and FileError.
    """
    layout, table = arguments.word("layout", layout), arguments.optional_path("kernels", kernels)
    values: dict[str, Any] = dict(options) if gpus is None else {**options, "gpus": gpus}
    takes = {*list_declarations(DegreeOptions), *list_declarations(MachineOptions)} - {"by_stage"}
    degree_options, machine = options_from(values, DegreeOptions, MachineOptions, of="lint", takes=takes)
    return lint_layout(layout, read_shape(config), machine, degree_options, table)


def lint_layout(
    layout: str,
    shape: TransformerShape,
    machine: MachineOptions,
    options: DegreeOptions,
    kernels: Path | None,
) -> LayoutReport:
    """The same, of what is read."""
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
        remarks += tuple(_unused_remarks(options, machine, kernels))
    report = LayoutReport(layout, shape.name, stages, pipeline, problems, remarks)
    if not has_machine or report.problems:
        return report
    return _with_estimate(report, shape, machine, options, kernels)


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


def _unused_remarks(options: DegreeOptions, machine: MachineOptions, kernels: Path | None) -> Iterator[str]:
    """Return a remark on the options that are given and say nothing without a number of devices."""
    names = [
        field.name
        for own in (options, machine)
        for field in fields(own)
        if field.name not in _WITHOUT_MACHINE and getattr(own, field.name) != field.default
    ]
    names += ["kernels"] * (kernels is not None)
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
    kernels: Path | None,
) -> LayoutReport:
    topology, costs, limit = machine_costs(machine, kernels, options.host_bandwidth)
    counts = [letters.count("t") for letters in report.stages]
    predictors = [letters.count("m") for letters in report.stages]
    options = replace(options, predictors=sum(predictors))
    offset = predictors[::-1].index(max(predictors))
    plan = estimate_layout(shape, counts, report.pipeline, topology.gpus, costs, options, limit, offset)
    own = plan.degrees
    same = replace(
        options,
        tp=(own.tensor,),
        cp=(own.context,),
        ep=(own.expert,),
        pp=(own.pipeline,),
        virtual_stages=tuple({*virtual_stage_numbers(shape, own.pipeline, options), plan.virtual_stages}),
        zero=(own.zero,),
        context_exchange=own.exchange,
    )
    candidate = plan if plan.estimate.peak_bytes <= limit else None
    try:
        best = search_degrees(shape, topology.gpus, costs, same, limit, candidate)
    except (InfeasibleError, UsageError):
        best = None
    return replace(report, plan=plan, limit_bytes=limit, best=best)
