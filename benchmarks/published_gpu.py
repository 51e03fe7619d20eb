"""Steps of Megatron-LM that others measured, predicted: python benchmarks/published_gpu.py FOLDER

FOLDER holds `cases_b200.json`, `kernels_b200.csv` and `links_b200.json`: steps, kernels and links measured on
one node of eight B200 (SimuMax release v1.2, https://github.com/MooreThreads/SimuMax, Apache-2.0). Each step
is predicted from the model's sizes, the degrees of parallelism, the kernels and the links. Fitted are
`Overheads.slowdown` for the seconds, and for the memory the bytes that libraries keep (`LIBRARIES`,
`EXPERT_LIBRARIES`). The table has the errors with pplan's figures, and those of each model, and of each of
the degrees, with figures fitted to the others: those are what to expect of other steps. `--rows` leaves out
each row of the tables of kernels. The folder's GB/s are of 2^30 bytes, and its FLOPs of attention those of
the whole square, as the scripts that measured them count (`simu_tools/efficency_test`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pplan.cost_models.transformer.implementations import MEGATRON
from pplan.cost_models.transformer.kernel_table import NEIGHBOURS, CollectiveName, KernelTable, row_flops
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, GroupLinks, Overheads, RankCosts
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import StepEstimate, estimate_step
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape

GIB = 2**30
FUSED_LOSS = replace(MEGATRON, loss_saved=1)
"""Megatron-LM with Transformer Engine's loss, which keeps no scores in float32: with these the last stages of
DeepSeek-V2 need 0.3 GiB more than was measured."""
SLOWDOWNS = [1 + number * 0.0025 for number in range(61)]
"""Slowdowns to try in a fit."""


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
    return RankCosts(limits, own, table, implementation=FUSED_LOSS)


def seconds_errors(
    cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts, overheads: Overheads
) -> list[float]:
    """Relative errors of the seconds."""
    own = replace(costs, overheads=overheads)
    return [
        predict(case, models[case["model"]], own).step_seconds * 1e3 / case["step_ms"] - 1 for case in cases
    ]


def fit(cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts) -> Overheads:
    """Return the overheads with the least squares of the relative errors."""
    choices = [replace(costs.overheads, slowdown=each) for each in SLOWDOWNS]
    return min(choices, key=lambda own: sum(e * e for e in seconds_errors(cases, models, costs, own)))


def stages_without_libraries(case: Mapping[str, Any], estimate: StepEstimate) -> list[tuple[float, float]]:
    """Bytes of each stage that were measured, and those of its ledger without what libraries keep."""
    ranks = list(case["peak_allocated_mb_by_rank"].values())
    size = len(ranks) // len(estimate.stages)
    return [
        (max(ranks[place * size : (place + 1) * size]) * 2**20, stage.bytes - stage.ledger["libraries"])
        for place, stage in enumerate(estimate.stages)
    ]


def memory_errors(
    cases: Sequence[Mapping[str, Any]],
    models: Mapping[str, Any],
    costs: RankCosts,
    kept: Sequence[Mapping[str, Any]],
) -> list[float]:
    """Relative errors of the fullest device's memory, with the libraries' bytes of the steps that are kept.

    Those are the mean of the steps without experts, or of those with; of the others where none is kept, and 0
    without any.
    """
    left: dict[bool, list[float]] = {False: [], True: []}
    for case in kept:
        stages = stages_without_libraries(case, predict(case, models[case["model"]], costs))
        left[case["ep"] > 1] += [measured - predicted for measured, predicted in stages]
    found = []
    for case in cases:
        stages = stages_without_libraries(case, predict(case, models[case["model"]], costs))
        own = left[case["ep"] > 1] or left[case["ep"] == 1] or [0.0]
        libraries = statistics.mean(own)
        found.append((max(each for _, each in stages) + libraries) / (case["peak_allocated_gib"] * GIB) - 1)
    return found


class LeftOut(NamedTuple):
    """Relative errors of steps to which nothing was fitted, by the steps' names."""

    seconds: dict[str, float]
    memory: dict[str, float]


def leave_out(
    key: str, cases: Sequence[Mapping[str, Any]], models: Mapping[str, Any], costs: RankCosts
) -> LeftOut:
    """Fit to all steps but those that share a value of a key with one, for each of its values."""
    errors = LeftOut({}, {})
    for value in dict.fromkeys(case[key] for case in cases):
        kept = [case for case in cases if case[key] != value]
        out = [case for case in cases if case[key] == value]
        names = [case["case"] for case in out]
        own = seconds_errors(out, models, costs, fit(kept, models, costs))
        errors.seconds.update(zip(names, own, strict=True))
        errors.memory.update(zip(names, memory_errors(out, models, costs, kept), strict=True))
    return errors


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


def print_errors(what: str, errors: Iterable[float]) -> None:
    own = [abs(error) for error in errors]
    print(f"{what}: median {statistics.median(own):.2%}, worst {max(own):.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", action="store_true", help="leave out each row of the tables of kernels")
    options = parser.parse_args()
    published = json.loads((options.folder / "cases_b200.json").read_text())
    cases, models = published["cases"], published["models"]
    costs = load_costs(options.folder)
    if options.rows:
        for name, bandwidth in (("kernels_b200.csv", 8000 * GIB), ("kernels_a100_pcie.csv", 1935e9)):
            print_left_out_rows(load_kernel_table(options.folder / name), bandwidth)
    by_model, by_degrees = (leave_out(key, cases, models, costs) for key in ("model", "parallel"))
    seconds = seconds_errors(cases, models, costs, costs.overheads)
    peaks = [predict(case, models[case["model"]], costs).peak_bytes / GIB for case in cases]
    memory = [peak / case["peak_allocated_gib"] - 1 for peak, case in zip(peaks, cases, strict=True)]
    print(
        f"{'':40} {'seconds':^41} {'memory':^40}\n{'model':12} {'degrees':22} {'m':>3} {'ms':>7} "
        f"{'error':>7} {'model':>7} {'degrees':>7} {'peer':>7}   {'GiB':>6} "
        f"{'error':>7} {'model':>7} {'degrees':>7} {'peer':>7}"
    )
    for case, of_seconds, of_memory in zip(cases, seconds, memory, strict=True):
        degrees = ParallelDegrees(case["tp"], case["cp"], case["ep"], case["pp"], case["dp"])
        name, step, peak = case["case"], case["step_ms"], case["peak_allocated_gib"]
        print(
            f"{case['model']:12} {degrees.describe():22} {case['micro_batches']:3} {step:7.1f} "
            f"{of_seconds:+7.1%} {by_model.seconds[name]:+7.1%} {by_degrees.seconds[name]:+7.1%} "
            f"{case['peer_step_ms'] / step - 1:+7.1%}   {peak:6.2f} "
            f"{of_memory:+7.2%} {by_model.memory[name]:+7.2%} {by_degrees.memory[name]:+7.2%} "
            f"{case['peer_alloc_gib'] / peak - 1:+7.2%}"
        )
    print_errors("seconds", seconds)
    print_errors("seconds, each model left out", by_model.seconds.values())
    print_errors("seconds, each of the degrees left out", by_degrees.seconds.values())
    nothing = replace(costs.overheads, slowdown=1.0)
    print_errors("seconds, nothing fitted", seconds_errors(cases, models, costs, nothing))
    print_errors("memory", memory)
    print_errors("memory, each model left out", by_model.memory.values())
    print_errors("memory, each of the degrees left out", by_degrees.memory.values())
    print_errors("memory, libraries not counted", memory_errors(cases, models, costs, []))


if __name__ == "__main__":
    main()
