"""Steps of Megatron-LM that others measured, predicted: python benchmarks/published_gpu.py FOLDER [--fit]

FOLDER holds `cases_b200.json`, `kernels_b200.csv` and `links_b200.json`: steps, kernels and links measured on
one node of eight B200 (SimuMax release v1.2, https://github.com/MooreThreads/SimuMax, Apache-2.0). Each step
is predicted from the model's sizes, the degrees of parallelism, the kernels and the links; `Overheads` are
the three figures that were fitted, to all of the steps. `--fit` fits them to half of the degrees, twice, and
prints the errors of the half that they were not fitted to: those are what to expect of other steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pplan.cost_models.transformer.kernel_table import CollectiveName, KernelTable, load_kernel_table
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
        table.peak, memory["default"]["gbps"] * 1e9, memory_share=shares["default"], shares=shares
    )
    own: GroupLinks = MeasuredLinks(inside["bandwidth"]["gbps"] * 1e9, inside["op"])
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
        (1.0, 1.03, 1.06, 1.09, 1.12, 1.15),
        (0.0, 1e-5, 2e-5, 3e-5, 4e-5, 5e-5),
        (0.0, 5e-4, 1e-3, 1.5e-3, 2e-3, 2.5e-3),
    )
    choices = [Overheads(*values) for values in grid]
    return min(choices, key=lambda own: sum(e * e for e in errors(cases, models, with_overheads(costs, own))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    published = json.loads((options.folder / "cases_b200.json").read_text())
    cases, models = published["cases"], published["models"]
    costs = load_costs(options.folder)
    if options.fit:
        for kept in (True, False):
            half = [case for case in cases if (case["parallel"] in FITTED) == kept]
            rest = [case for case in cases if (case["parallel"] in FITTED) != kept]
            own = fit(half, models, costs)
            left = sorted(abs(e) for e in errors(rest, models, with_overheads(costs, own)))
            print(
                f"fitted on {len(half)}: {own}; "
                f"the others: median {statistics.median(left):.1%}, worst {left[-1]:.1%}"
            )
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
        absolute = sorted(abs(error) for error in errors_of_it)
        print(f"{what}: median {statistics.median(absolute):.2%}, worst {absolute[-1]:.2%}")


if __name__ == "__main__":
    main()
