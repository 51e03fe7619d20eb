"""Published throughputs, predicted with no constant fitted to them: python benchmarks/published_tables.py

Megatron-LM on A100: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, table 1: GPT of 1.7 billion to a trillion parameters on DGX A100 (NVLink 300 GB/s each
way, one 200 Gbit/s adapter a GPU), sequences of 2,048 tokens, full recomputation, no distributed optimizer.
The table says neither micro-batch size nor virtual stages: those that the search finds fastest are taken.
Products, attention and memory are at the assumed efficiencies, as for every GPU without a table of kernels.

Zero Bubble: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, table 4: samples a second and
GPU, predicted from the seconds of F, B, W and transfers of the paper's own profile (table 9).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.transformer_shape import AttentionShape, TransformerShape
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.degree_search import DegreePlan, search_degrees

SEQUENCE, VOCABULARY = 2048, 51200


class MegatronRow(NamedTuple):
    """Of table 1; parameters in billions, TFLOP/s of a GPU."""

    parameters: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    teraflops: float

    @property
    def shape(self) -> TransformerShape:
        width = self.hidden // self.heads
        return TransformerShape(
            "gpt",
            self.hidden,
            VOCABULARY,
            4 * self.hidden,
            AttentionShape(self.heads, self.heads, width, width),
            (False,) * self.layers,
            gated=False,
            tied=True,
        )

    @property
    def flops(self) -> float:
        """Of a step, with the recomputed forward (section 5.1, equation 3)."""
        tokens = self.batch * SEQUENCE
        inside = 1 + SEQUENCE / (6 * self.hidden) + VOCABULARY / (16 * self.layers * self.hidden)
        return 96.0 * tokens * self.layers * self.hidden**2 * inside


MEGATRON = (
    MegatronRow(1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    MegatronRow(3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    MegatronRow(7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    MegatronRow(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    MegatronRow(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    MegatronRow(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    MegatronRow(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    MegatronRow(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    MegatronRow(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    MegatronRow(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)


MEGATRON_REASON = """The smallest models are predicted too fast. Their attention wrote its scores to memory,
which is not costed: those passes alone take longer than what is missing. Products of the largest reach more
than the share of the peak that is assumed for all."""

BANDWIDTH = 2039e9
UNFUSED_PASSES = 2 * 6.5 + 9.5
"""Passes over memory of the scores in 16 bits, with the forward run twice. Forward: scores written, fused
softmax (read, written), dropout (read, written, a mask of one byte), product with the values (read).
Backward: gradient written, dropout (read, mask, written), softmax (both read, written), three products
(read)."""


def unfused_attention_seconds(row: MegatronRow) -> float:
    """Seconds of a step in which attention without a fused kernel reads and writes its scores, at 70 % of the
    memory's bandwidth."""
    scores = 2 * row.heads / row.tensor * SEQUENCE**2
    samples = row.batch / (row.gpus / row.tensor / row.pipeline)
    layers = row.layers / row.pipeline
    return UNFUSED_PASSES * scores * samples * layers / (0.7 * BANDWIDTH)


def predict_megatron(row: MegatronRow) -> DegreePlan:
    """The fastest with the row's degrees on A100 of 80 GB."""
    inside, between = Link(300e9, 5e-6), Link(25e9, 1e-5)
    topology = two_level_topology(Device("A100", None), row.gpus, 8, inside, between)
    costs = RankCosts(DeviceLimits(312e12, BANDWIDTH), TopologyLinks(topology))
    options = DegreeOptions(
        mini_batch=row.batch,
        sequence=SEQUENCE,
        tp=(row.tensor,),
        pp=(row.pipeline,),
        zero=(0,),
        recompute="full",
    )
    return search_degrees(row.shape, row.gpus, costs, options, 78e9).plans[0]


class ZeroBubbleSetting(NamedTuple):
    """Milliseconds of a micro-batch of so many samples on a stage, and of its transfer."""

    model: str
    stages: int
    samples: int
    forward: float
    backward: float
    weight: float
    transfer: float


ZERO_BUBBLE_MODELS = (
    ZeroBubbleSetting("1.5B", 8, 6, 18.522, 18.086, 9.337, 0.601),
    ZeroBubbleSetting("6.2B", 8, 3, 29.802, 29.428, 19.530, 0.577),
)
ZERO_BUBBLE = {
    ("1.5B", 24): {"1f1b": 11.8, "zb-h1": 12.9, "zb-h2": 14.5},
    ("1.5B", 32): {"1f1b": 12.5, "zb-h1": 13.4, "zb-h2": 14.8},
    ("1.5B", 64): {"1f1b": 13.6, "zb-h1": 14.2, "zb-h2": 14.9},
    ("6.2B", 24): {"1f1b": 3.50, "zb-h1": 3.88, "zb-h2": 4.32},
    ("6.2B", 32): {"1f1b": 3.70, "zb-h1": 4.00, "zb-h2": 4.35},
    ("6.2B", 64): {"1f1b": 4.03, "zb-h1": 4.20, "zb-h2": 4.39},
}
"""Samples a second and GPU by model and micro-batches: of 1F1B, ZB-1p and ZB-2p."""


ZERO_BUBBLE_REASON = """Nearly all are predicted too fast, 1F1B and ZB-1p by about
5 %: the profile has no optimizer's step, no norm of the gradients and no launches. ZB-2p updates without
waiting for that norm, and is nearer."""


def predict_zero_bubble(own: ZeroBubbleSetting, micro_batches: int, schedule: str) -> float:
    """Samples a second and GPU."""
    program = find_schedule(schedule).program(own.stages, micro_batches)
    backward = own.backward if schedule != "1f1b" else own.backward + own.weight
    weight = own.weight if schedule != "1f1b" else None
    costs = stage_costs(program, own.forward, backward, weight, own.transfer)
    return micro_batches * own.samples / (simulate(program, costs).step_seconds * 1e-3) / own.stages


def megatron_errors() -> Iterator[float]:
    print(f"{'billion':>8} {'TP':>3} {'PP':>3} {'DP':>4} {'b':>2} {'v':>2} {'TFLOP/s':>8} predicted  error")
    for row in MEGATRON:
        plan = predict_megatron(row)
        predicted = row.flops / plan.estimate.step_seconds / row.gpus / 1e12
        error = row.teraflops / predicted - 1
        print(
            f"{row.shape.parameters() / 1e9:8.1f} {row.tensor:3} {row.pipeline:3} {plan.degrees.data:4} "
            f"{plan.micro_batch_size:2} {plan.virtual_stages:2} "
            f"{row.teraflops:8.0f} {predicted:9.1f} {error:+6.1%}"
        )
        yield error


def zero_bubble_errors() -> Iterator[float]:
    print(f"\n{'model':>5} {'m':>3} {'schedule':8} {'measured':>9} {'predicted':>9} error")
    for own in ZERO_BUBBLE_MODELS:
        for (model, micro_batches), measured in ZERO_BUBBLE.items():
            for schedule, samples in measured.items() if model == own.model else ():
                predicted = predict_zero_bubble(own, micro_batches, schedule)
                error = samples / predicted - 1
                print(
                    f"{model:>5} {micro_batches:3} {schedule:8} {samples:9.2f} {predicted:9.2f} {error:+6.1%}"
                )
                yield error


def main() -> None:
    for errors, why in ((megatron_errors(), MEGATRON_REASON), (zero_bubble_errors(), ZERO_BUBBLE_REASON)):
        absolute = sorted(abs(error) for error in errors)
        print(f"seconds: median {statistics.median(absolute):.1%}, worst {absolute[-1]:.1%}. {why}")


if __name__ == "__main__":
    main()
