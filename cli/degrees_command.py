"""`pplan degrees`: tensor, context, expert, pipeline and data parallelism of a transformer, from its
configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..cost_models.machines.machine_options import MachineOptions
from ..planner.degrees.degree_options import DegreeOptions

if TYPE_CHECKING:
    from rich.console import Console

    from ..cost_models.transformer.layer_table import StageEstimate
    from ..planner.degrees.degree_search import DegreeAnswer, DegreePlan

Config = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="The config.json of a decoder-only transformer.", show_default=False
    ),
]
Kernels = Annotated[
    Path | None,
    typer.Option(
        "--kernels", metavar="FILE", help="A CSV file of measured kernels; default: the GPU's limits."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def degrees_command(
    config: Config,
    *,
    options: DegreeOptions,
    machine: MachineOptions,
    kernels: Kernels = None,
    as_json: AsJson = False,
) -> None:
    """Find the degrees of tensor, context, expert, pipeline and data parallelism with the shortest step."""
    from ..api.degrees import find_degrees
    from ..cost_models.transformer.transformer_shape import load_transformer_shape
    from .streams import console, result

    answer = find_degrees(load_transformer_shape(config), machine, options, kernels)
    if as_json:
        result(json.dumps(as_dictionary(answer), indent=2) + "\n")
        return
    _print_answer(answer, console())


def as_dictionary(answer: DegreeAnswer) -> dict[str, Any]:
    """What --json prints: seconds and bytes."""
    return {
        "model": answer.shape.name,
        "parameters": answer.shape.parameters(),
        "devices": answer.devices,
        "combinations": answer.combinations,
        "bound_seconds": answer.bound_seconds,
        "gap": answer.gap,
        "limit_bytes": answer.limit_bytes if answer.limit_bytes < float("inf") else None,
        "kernels": len(answer.kernels),
        "assumed_kernels": len(answer.assumed_kernels),
        "plans": [_plan_dictionary(answer, plan) for plan in answer.plans],
    }


def _plan_dictionary(answer: DegreeAnswer, plan: DegreePlan) -> Mapping[str, Any]:
    from ..api.degree_arguments import megatron_arguments, torchtitan_arguments

    estimate = plan.estimate
    return {
        **vars(plan.degrees),
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches": plan.micro_batches,
        "recompute": plan.recompute,
        "schedule": plan.setting.schedule,
        "virtual_stages": plan.virtual_stages,
        "step_seconds": estimate.step_seconds,
        "pipeline_seconds": estimate.pipeline_seconds,
        "update_seconds": estimate.update_seconds,
        "peak_bytes": estimate.peak_bytes,
        "blocks": list(plan.blocks),
        "stages": [
            {
                "blocks": [[own.start, own.stop - 1] for own in stage.blocks],
                "forward_seconds": stage.forward_seconds,
                "backward_seconds": stage.backward_seconds,
                "update_seconds": stage.update_seconds,
                "ledger": stage.ledger,
            }
            for stage in estimate.stages
        ],
        "megatron": megatron_arguments(answer, plan),
        "torchtitan": torchtitan_arguments(answer, plan),
    }


def _print_answer(answer: DegreeAnswer, console: Console) -> None:
    import shlex

    from ..api.degree_arguments import megatron_arguments, torchtitan_arguments, torchtitan_remarks
    from ..cost_models.quantities import format_bytes, format_seconds
    from .number_format import percent, three_digits
    from .table import Column, line, number, print_head, print_notes, print_table, text, word

    best, shape = answer.plans[0], answer.shape
    step = best.estimate.step_seconds
    tokens = answer.options.batch_size * answer.options.sequence / step
    active = shape.active_parameters()
    sizes = f"{shape.parameters() / 1e9:.4g} billion parameters"
    if active != shape.parameters():
        sizes += f", of which a token uses {active / 1e9:.4g} billion"
    print_head(
        console,
        [
            f"{best.degrees.describe()} is the fastest found for {shape.name} on {answer.devices} devices: "
            f"{format_seconds(step)} a step, {three_digits(tokens)} tokens/s.",
            f"{shape.blocks} layers, {sizes}; a batch of {answer.options.batch_size} sequences of "
            f"{answer.options.sequence} tokens, in bfloat16 with float32 gradients and Adam.",
            f"Pipeline {format_seconds(best.estimate.pipeline_seconds)}, gradients and update "
            f"{format_seconds(best.estimate.update_seconds)}; {_schedule(best)}, {best.micro_batches} "
            f"micro-batches of {best.micro_batch_size}; recompute {best.recompute}.",
            f"Best found; at most {percent(answer.gap)} from the proven bound of "
            f"{format_seconds(answer.bound_seconds)} (any of {answer.combinations} combinations: under 1F1B "
            "every division of the layers that fits, interleaved the even ones).",
        ],
    )
    plans: list[Column[DegreePlan]] = [
        text("degrees", lambda plan: plan.degrees.describe(), min_width=20),
        number("micro-batches", lambda plan: f"{plan.micro_batches} of {plan.micro_batch_size}", drop=2),
        number("virtual stages", lambda plan: plan.virtual_stages, drop=3),
        word("recompute", lambda plan: plan.recompute, drop=1),
        number("step", lambda plan: plan.estimate.step_seconds, format_seconds),
        number("memory", lambda plan: plan.estimate.peak_bytes, format_bytes),
    ]
    print_table(console, plans, answer.plans, title="The fastest combinations")
    stages: list[Column[StageEstimate]] = [
        text("layers", _layers, min_width=7),
        number("forward", lambda stage: stage.forward_seconds, format_seconds),
        number("backward", lambda stage: stage.backward_seconds, format_seconds),
        number("update", lambda stage: stage.update_seconds, format_seconds, drop=2),
        number("weights", lambda stage: stage.ledger["weights"], format_bytes, drop=1),
        number("gradients", lambda stage: stage.ledger["gradients"], format_bytes, drop=1),
        number("optimizer", lambda stage: stage.ledger["optimizer"], format_bytes, drop=1),
        number("activations", lambda stage: stage.ledger["activations"], format_bytes, drop=1),
        number("memory", lambda stage: stage.bytes, format_bytes),
    ]
    print_table(
        console, stages, best.estimate.stages, title="Stages of the fastest, on each of their devices"
    )
    console.print()
    line(console, "Megatron-LM: " + shlex.join(megatron_arguments(answer, best)))
    console.print()
    line(console, "torchtitan: " + shlex.join(torchtitan_arguments(answer, best)))
    print_notes(console, [*torchtitan_remarks(best), *_notes(answer)])


def _schedule(plan: DegreePlan) -> str:
    many = plan.virtual_stages
    return "1F1B" if many == 1 else f"interleaved 1F1B of {many} virtual stages a device"


def _layers(stage: StageEstimate) -> str:
    return " ".join(f"{own.start}-{own.stop - 1}" for own in stage.blocks if own)


def _notes(answer: DegreeAnswer) -> list[str]:
    from ..cost_models.quantities import format_seconds
    from .number_format import percent

    limits, overheads = answer.costs.limits, answer.costs.overheads
    shares = (
        f"products {percent(limits.product_share)} of the GPU's FLOP/s, attention "
        f"{percent(limits.attention_share)}, passes over memory {percent(limits.memory_share)} of its "
        "bandwidth"
    )
    notes = []
    if answer.costs.table is None:
        notes.append(
            f"no kernels are measured: by assumption they reach {shares}; give a table with `kernels`"
        )
    elif answer.assumed_kernels:
        notes.append(
            f"{len(answer.assumed_kernels)} of {len(answer.kernels)} kernels of the fastest are not in the "
            f"table: they lie between its nearest shapes, or, where it has none of their kind, reach {shares}"
        )
    notes.append(
        f"as fitted to a training loop on B200, products take {overheads.slowdown:g} times as long in it, "
        f"{format_seconds(overheads.gap)} follow each pass over memory, and each pass of a layer with "
        f"experts waits for {format_seconds(overheads.dispatch)}"
    )
    notes.append(
        "not modelled: overlap of communication and computing, experts that get unequal numbers of tokens, "
        "expert-tensor parallelism"
    )
    return notes
