"""Steps of Megatron-LM that others measured, predicted: python benchmarks/published_gpu.py FOLDER [--fit]

FOLDER holds `cases_b200.json`, `kernels_b200.csv` and `links_b200.json`: steps, kernels and links measured on
one node of eight B200 (SimuMax release v1.2, https://github.com/MooreThreads/SimuMax, Apache-2.0). Each step
is predicted from the model's sizes, the degrees of parallelism, the kernels and the links; `Overheads` are
the two figures that were fitted, to all of the steps. `--fit` fits them without each of the degrees, and to
half of the degrees, twice, and prints the errors of the steps that they were not fitted to: those are what
to expect of other steps. Its GB/s are of 2^30 bytes, and its FLOPs of attention those of the whole square,
as the scripts that measured them count (`simu_tools/efficency_test`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pplan.cost_models.transformer.kernel_table import NEIGHBOURS, CollectiveName, KernelTable, row_flops
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, GroupLinks, Overheads, RankCosts
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import StepEstimate, estimate_step
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape

GIB = 2**30
FITTED = ("tp1pp2", "tp4pp1", "tp1ep8pp1")
"""The degrees of one half of the steps."""


@dataclass(frozen=True)
class MeasuredLinks:
    """The collectives of one node as they were measured: the share of the links' bandwidth, and latencies."""

    bandwidth: float
    operations: Mapping[str, Mapping[str, Any]]
    is_concave = True
    """Each collective is a line of its bytes."""

    def collective(self, name: CollectiveName, bytes: float, size: int, stride: int) -> float:
        if size == 1:
            return 0.0
        if name == "ring":
            return self.transfer(bytes, stride)
        own = self.operations["all2all" if name == "all_to_all" else name]
        steps = size + own["offset"]
        by_size = own.get("fixed_latency_us_by_comm_num", {})
        fixed = by_size.get(str(size), own.get("fixed_latency_us", 0.0))
        latency = own["scale"] * steps * own["latency_us"] + fixed
        wire = own["scale"] * bytes * steps / size
        return float(wire / (self.bandwidth * own["efficient_factor"]) + latency * 1e-6)

    def transfer(self, bytes: float, stride: int) -> float:  # noqa: ARG002
        own = self.operations["p2p"]
        return float(bytes / (self.bandwidth * own["efficient_factor"]) + own["latency_us"] * 1e-6)


def read_shape(model: Mapping[str, Any], layers: int) -> TransformerShape:
    """Of the sizes as that project names them."""
    heads, width = model["head_num"], model["head_size"]
    attention = AttentionShape(heads, model["kv_head_num"], width, width)
    if model.get("attention_type") == "mla":
        rotary = model["qk_pos_emb_head_dim"]
        attention = AttentionShape(
            heads,
            heads,
            model["qk_head_dim"] + rotary,
            model["v_head_dim"],
            model.get("q_lora_rank") or 0,
            model["kv_lora_rank"],
            rotary,
        )
    experts = None
    if model.get("expert_num", 1) > 1:
        shared = model.get("moe_shared_expert_intermediate_size") or 0
        experts = ExpertShape(model["expert_num"], model["topk"], model["moe_ffn_hidden_size"], shared)
    dense = model.get("dense_layers", 0) if experts else layers
    return TransformerShape(
        model["model_name"],
        model["hidden_size"],
        model["vocab_size"],
        model["intermediate_size"],
        attention,
        tuple(layer >= dense for layer in range(layers)),
        experts,
        bool(model.get("use_swiglu", True)),
    )


def predict(case: Mapping[str, Any], model: Mapping[str, Any], costs: RankCosts) -> StepEstimate:
    degrees = ParallelDegrees(case["tp"], case["cp"], case["ep"], case["pp"], case["dp"])
    tokens = Tokens(case["sequence"], case["micro_batch_size"])
    setting = TrainingSetting(case["micro_batches"], tokens)
    return estimate_step(read_shape(model, case["layers"]), degrees, setting, costs)


def load_costs(folder: Path) -> RankCosts:
    links = json.loads((folder / "links_b200.json").read_text())
    memory, inside = links["memory_gbps"], links["networks"]["high_intra_node"]
    table: KernelTable = load_kernel_table(folder / "kernels_b200.csv")
    shares = {kind: own["efficient_factor"] for kind, own in memory.items()}
    limits = DeviceLimits(
        table.peak, memory["default"]["gbps"] * GIB, memory_share=shares["default"], shares=shares
    )
    own: GroupLinks = MeasuredLinks(inside["bandwidth"]["gbps"] * GIB, inside["op"])
    return RankCosts(limits, own, table)


def with_overheads(costs: RankCosts, overheads: Overheads) -> RankCosts:
    return RankCosts(costs.limits, costs.links, costs.table, overheads)


def errors(cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts) -> list[float]:
    """Of the seconds, relative."""
    return [
        predict(case, models[case["model"]], costs).step_seconds * 1e3 / case["step_ms"] - 1 for case in cases
    ]


def fit(cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts) -> Overheads:
    """The overheads with the least squares of the relative errors, of a grid."""
    grid = itertools.product(
        [number * 1e-5 for number in range(11)],
        [number * 1e-4 for number in range(21)],
    )
    choices = [Overheads(*values) for values in grid]
    return min(choices, key=lambda own: sum(e * e for e in errors(cases, models, with_overheads(costs, own))))


def print_errors_of_others(
    cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts
) -> None:
    """Of the steps to which the overheads were not fitted: each half of the degrees, and each of them."""
    degrees = list(dict.fromkeys(case["parallel"] for case in cases))
    print_errors(
        "nothing fitted", [abs(e) for e in errors(cases, models, with_overheads(costs, Overheads(3e-5, 0.0)))]
    )
    for kept in (FITTED, tuple(each for each in degrees if each not in FITTED)):
        print_errors(f"fitted to {', '.join(kept)}", left_out_errors(cases, models, costs, kept))
    left = [
        error
        for out in degrees
        for error in left_out_errors(cases, models, costs, [each for each in degrees if each != out])
    ]
    print_errors("each of the degrees left out in turn", left)


def print_left_out_rows(table: KernelTable, bandwidth: float) -> None:
    """Errors of each row's seconds where the table is without it, with and without its bytes."""
    print(f"{table.source}: median and worst error of a row that is left out, and of its FLOPs alone")
    for kind, rows in table.efficiency.items():
        if len(rows) <= NEIGHBOURS:
            continue
        found: dict[float, list[float]] = {bandwidth: [], math.inf: []}
        for shape in rows:
            others = {own: share for own, share in rows.items() if own != shape}
            left = KernelTable(table.peak, {kind: others})
            for own, errors_of_it in found.items():
                measured = row_flops(kind, shape) / (table.peak * rows[shape])
                errors_of_it.append(abs(left.row_seconds(kind, shape, own) / measured - 1))
        text = ", ".join(f"{statistics.median(own):.1%} {max(own):.0%}" for own in found.values())
        print(f"  {kind} ({len(rows)} rows): {text}")


def left_out_errors(
    cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts, kept: Sequence[str]
) -> list[float]:
    own = fit([case for case in cases if case["parallel"] in kept], models, costs)
    rest = [case for case in cases if case["parallel"] not in kept]
    return [abs(error) for error in errors(rest, models, with_overheads(costs, own))]


def print_errors(what: str, own: Sequence[float]) -> None:
    print(f"{what}: median {statistics.median(own):.2%}, worst {max(own):.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--rows", action="store_true", help="leave out each row of the tables of kernels")
    options = parser.parse_args()
    published = json.loads((options.folder / "cases_b200.json").read_text())
    cases, models = published["cases"], published["models"]
    costs = load_costs(options.folder)
    if options.rows:
        for name, bandwidth in (("kernels_b200.csv", 8000 * GIB), ("kernels_a100_pcie.csv", 1935e9)):
            print_left_out_rows(load_kernel_table(options.folder / name), bandwidth)
    if options.fit:
        print_errors_of_others(cases, models, costs)
    print(
        f"{'model':12} {'degrees':22} {'m':>3} {'measured ms':>11} {'predicted':>9} {'error':>7} {'peer':>7}"
        f"  {'GiB':>6} {'predicted':>9} {'error':>7} {'peer':>7}"
    )
    seconds, memory = [], []
    for case in cases:
        estimate = predict(case, models[case["model"]], costs)
        degrees = ParallelDegrees(case["tp"], case["cp"], case["ep"], case["pp"], case["dp"])
        step, peak = estimate.step_seconds * 1e3, estimate.peak_bytes / GIB
        measured_step, measured_peak = case["step_ms"], case["peak_allocated_gib"]
        seconds.append(step / measured_step - 1)
        memory.append(peak / measured_peak - 1)
        print(
            f"{case['model']:12} {degrees.describe():22} {case['micro_batches']:3} {measured_step:11.1f} "
            f"{step:9.1f} {seconds[-1]:+7.1%} {case['peer_step_ms'] / measured_step - 1:+7.1%}  "
            f"{measured_peak:6.2f} {peak:9.2f} {memory[-1]:+7.2%} "
            f"{case['peer_alloc_gib'] / measured_peak - 1:+7.2%}"
        )
    for what, errors_of_it in (("seconds", seconds), ("memory", memory)):
        print_errors(what, [abs(error) for error in errors_of_it])


if __name__ == "__main__":
    main()
