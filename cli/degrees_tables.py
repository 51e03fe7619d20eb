"""An answer by degrees in tables."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from ..cost_models.quantities import (
    compare_percent,
    describe_gap,
    format_amount,
    format_bytes,
    format_count,
    format_seconds,
    percent,
    percent_at_most,
)
from ..cost_models.transformer.weight_update import NUMERIC_FORMATS
from .table import Column, line, number, print_head, print_notes, print_table, text, word

if TYPE_CHECKING:
    from rich.console import Console

    from ..planner.degrees.degree_combinations import Combination
    from ..planner.degrees.degree_file import (
        BaselineEntry,
        DegreesFile,
        OwnStageEntry,
        PlanEntry,
        StageEntry,
    )


MOST_PRINTED = 1000
"""Characters of what a trainer takes."""


def print_degrees(document: DegreesFile, console: Console) -> None:
    """The best plan, the fastest of all degrees, the stages, and the arguments of training programs."""
    best, step = document.plans[0], document.plans[0].step_seconds
    tokens = document.mini_batch * document.sequence / step
    sizes = f"{format_amount(document.parameters)} parameters"
    if document.active_parameters != document.parameters:
        sizes += f", of which a token uses {format_amount(document.active_parameters)}"
    others = [(own.step_seconds, own.name) for own in document.baselines if own.step_seconds is not None]
    other_step, other = min(others, default=(step, ""))
    among = f" of those allowed ({other} is faster)" if other_step < step * (1 - 1e-9) else ""
    name = f"{best.degrees[:1].upper()}{best.degrees[1:]}"
    print_head(
        console,
        [
            f"{name} is the fastest found{among} for {document.model} on "
            f"{format_count(document.devices, 'device')}: "
            f"{format_seconds(step)} a step, {format_amount(tokens)} tokens/s.",
            f"{format_count(document.layer_count, 'layer')}, {sizes}; a batch of "
            f"{format_count(document.mini_batch, 'sequence')} of {document.sequence} tokens, in "
            f"{NUMERIC_FORMATS}.",
            f"Pipeline {format_seconds(best.pipeline_seconds)}, gradients and update "
            f"{format_seconds(best.update_seconds)}; {_schedule(best)}, "
            f"{format_count(best.micro_batches, 'micro-batch')} of {best.micro_batch_size}; "
            f"{_recompute_clause(best)}{_predictors(best)}.",
            _proof(document),
        ],
    )
    plans: list[Column[PlanEntry]] = [
        text("degrees", lambda plan: plan.degrees, min_width=20),
        number("micro-batches", lambda plan: f"{plan.micro_batches} of {plan.micro_batch_size}", drop=3),
        number("virtual stages", lambda plan: plan.virtual_stages, drop=1),
        word("recompute", recompute_words, drop=2),
        number("step", lambda plan: plan.step_seconds, format_seconds),
        number("memory", lambda plan: plan.peak_bytes, format_bytes),
    ]
    print_table(console, plans, document.plans, title="The fastest combinations")
    if document.baselines:
        baselines: list[Column[BaselineEntry]] = [
            word("baseline", lambda own: own.name),
            text("degrees or reason", lambda own: own.degrees or own.reason, min_width=20),
            number("micro-batches of", lambda own: own.micro_batch_size, drop=2),
            word("recompute", lambda own: own.recompute, drop=1),
            number("step", lambda own: own.step_seconds, format_seconds),
            number(
                "vs. the fastest", lambda own: own.step_seconds and compare_percent(own.step_seconds, step)
            ),
        ]
        print_table(console, baselines, document.baselines, title="Baselines")
    stages: list[Column[StageEntry]] = [
        text("layers", _layers, min_width=7),
        number("forward", lambda stage: stage.forward_seconds, format_seconds),
        number("backward", lambda stage: stage.backward_seconds, format_seconds),
        number("update", lambda stage: stage.update_seconds, format_seconds, drop=2),
        number("weights", lambda stage: stage.ledger.weights, format_bytes, drop=1),
        number("gradients", lambda stage: stage.ledger.gradients, format_bytes, drop=1),
        number("optimizer", lambda stage: stage.ledger.optimizer, format_bytes, drop=1),
        number("activations", lambda stage: stage.ledger.activations, format_bytes, drop=1),
        number("memory", lambda stage: stage.bytes, format_bytes),
    ]
    if any(stage.host_bytes for stage in best.stages):
        stages.append(number("on the host", lambda stage: stage.host_bytes, format_bytes))
    print_table(console, stages, best.stages, title="Stages of the fastest, on each of their devices")
    _print_host_bytes(best, console)
    _print_by_stage(document, console)
    _print_arguments(best, console)
    print_notes(console, [*best.remarks, *document.notes])


def _proof(document: DegreesFile) -> str:
    """How far from the best the answer may be; to a millionth, its figures have no more digits."""
    from ..planner.degrees.degree_file import SAME

    among = format_count(document.combinations, "combination")
    searched = f"any of {among}, with every division of the layers that fits"
    if document.gap <= 1.1 * SAME:  # the search counts from the step, a gap from the bound
        faster = "faster" if document.gap <= 0 else "faster by more than a millionth"
        return f"Optimal in the search space ({searched}): none of these plans is {faster}."
    return f"Best found; {describe_gap(document.gap, format_seconds(document.bound_seconds))} ({searched})."


def _print_host_bytes(best: PlanEntry, console: Console) -> None:
    """What the host must have for offloaded activations."""
    most = max(stage.host_bytes for stage in best.stages)
    if most:
        words = f"Memory of the host: up to {format_bytes(most)} for each of its GPUs, pinned."
        line(console, words)


def _print_by_stage(document: DegreesFile, console: Console) -> None:
    """Where degrees by stage were searched: the stages of a faster plan, or that there is none."""
    if document.by_stage is None:
        return
    plan, bound = document.by_stage.plan, document.by_stage.bound_seconds
    step = document.plans[0].step_seconds
    console.print()
    if plan is None:
        words = "none of the 1F1B pipelines that were searched is faster"
        if bound < step * (1 - 1e-9):
            words = f"none was found that is faster; one would take at least {format_seconds(bound)}"
        line(console, f"Degrees by stage: {words}.")
        return
    gap = percent_at_most(max(plan.step_seconds / bound - 1, 0.0))
    faster = percent(step / plan.step_seconds - 1)
    line(
        console,
        f"Degrees by stage: {format_seconds(plan.step_seconds)} a step, {faster} faster; 1F1B, "
        f"{format_count(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size}, which the replicas "
        f"of a stage share; at most {gap} from the bound of such pipelines.",
    )
    columns: list[Column[OwnStageEntry]] = [
        text("devices", lambda own: f"{own.first_device}-{own.first_device + own.devices - 1}"),
        text("degrees", lambda own: own.degrees, min_width=12),
        text("layers", lambda own: _layers(own.costs), min_width=7),
        word("recompute", recompute_words, drop=2),
        number("forward", lambda own: own.costs.forward_seconds, format_seconds),
        number("backward", lambda own: own.costs.backward_seconds, format_seconds),
        number("update", lambda own: own.costs.update_seconds, format_seconds, drop=1),
        number("memory", lambda own: own.costs.bytes, format_bytes),
    ]
    print_table(console, columns, plan.stages, title="Stages with degrees of their own")


def _print_arguments(best: PlanEntry, console: Console) -> None:
    """What the trainers take; of what fills a screen, as where each block of many is named, the place in the
    file."""
    texts = {
        "megatron": ("Megatron-LM", shlex.join(best.megatron)),
        "megatron_bridge": ("Megatron-Bridge", shlex.join(best.megatron_bridge)),
        "torchtitan": ("torchtitan", shlex.join(best.torchtitan)),
        "nemo_automodel": (
            "NeMo AutoModel, sections of a recipe",
            json.dumps(best.nemo_automodel) if best.nemo_automodel else "",
        ),
    }
    for field, (trainer, words) in texts.items():
        if len(words) > MOST_PRINTED:
            words = f"{len(words):,} characters, plans[0].{field} of --json or of the file that -o writes"
        if words:
            console.print()
            line(console, f"{trainer}: {words}")


def _schedule(plan: PlanEntry) -> str:
    virtual_stages = plan.virtual_stages
    return "1F1B" if virtual_stages == 1 else f"interleaved 1F1B of {virtual_stages} virtual stages a device"


def _recompute_clause(plan: PlanEntry) -> str:
    if plan.recompute == "offload":
        return "recompute none, activations of attention and experts kept on the host"
    return f"recompute {recompute_words(plan)}"


def recompute_words(plan: PlanEntry | OwnStageEntry | Combination) -> str:
    """Of a stage's blocks: none, selective, full, offload, or how many of the first."""
    return plan.recompute if plan.recompute_blocks is None else f"first {plan.recompute_blocks}"


def _predictors(plan: PlanEntry) -> str:
    """Where the multi-token predictors are, if there are any."""
    if not plan.predictors:
        return ""
    last = len(plan.blocks) - 1
    count = format_count(plan.predictors, "multi-token predictor")
    return f"; {count} on stage {last - plan.predictor_offset} of 0 to {last}"


def _layers(stage: StageEntry) -> str:
    return " ".join(f"{first}-{last}" for first, last in stage.blocks if first <= last)
