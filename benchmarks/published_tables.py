"""Published throughputs, predicted with no constant fitted to them: python benchmarks/published_tables.py

Products, attention and memory are at the shares that pplan assumes where it has no table of kernels. All
degrees are those published; nothing is searched but what a table does not say.

Megatron-LM on A100: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021, table 1: GPT of 1.7 billion to a trillion parameters on DGX A100 (NVLink 300 GB/s each
way, one 200 Gbit/s adapter a GPU), sequences of 2,048 tokens, full recomputation, no distributed optimizer.
The table says neither micro-batch size nor virtual stages: those that are fastest and fit are taken. Its
attention had no fused kernel: the passes over its scores are added.

Language models: tokens a second and GPU of torchtitan (docs/performance.md and benchmarks/ of
https://github.com/pytorch/torchtitan), NeMo AutoModel (docs/performance-summary.md of
https://github.com/NVIDIA-NeMo/Automodel, DGX H100, bfloat16), and, from TFLOP/s, of BLOOM (Le Scao et al.,
arXiv:2211.05100) and Llama 3 405B (Dubey et al., arXiv:2407.21783, table 4).

Zero Bubble: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, table 4: samples a second and
GPU, predicted from the seconds of F, B, W and transfers of the paper's own profile (table 9).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pplan.api.degrees import build_machine, rank_costs
from pplan.cost_models.machines import MachineOptions
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import simulate
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.implementations import IMPLEMENTATIONS
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits
from pplan.cost_models.transformer.training_setting import Recomputation, TrainingSetting
from pplan.cost_models.transformer.training_step import StepEstimate, estimate_step
from pplan.cost_models.transformer.transformer_shape import AttentionShape, TransformerShape

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


MEGATRON_REASON = """Without the passes over attention's scores the smallest models are predicted too fast."""

BANDWIDTH = 2039e9
UNFUSED_PASSES = 2 * 6.5 + 9.5
"""Passes over memory of the scores in 16 bits, with the forward run twice. Forward: scores written, fused
softmax (read, written), dropout (read, written, a mask of one byte), product with the values (read).
Backward: gradient written, dropout (read, mask, written), softmax (both read, written), three products
(read)."""
UNFUSED_PASSES_WITHOUT_DROPOUT = 2 * 4 + 7
"""Passes of unfused attention without dropout, which BLOOM's configuration does not have."""


class MegatronStep(NamedTuple):
    """Seconds of a row of table 1, with the micro-batch size and virtual stages that are fastest.

    `unfused` is what attention takes to write and read its scores.
    """

    seconds: float
    unfused: float
    micro_batch_size: int
    virtual_stages: int


def unfused_attention_seconds(row: MegatronRow, passes: float = UNFUSED_PASSES) -> float:
    """Seconds of a step in which attention without a fused kernel reads and writes its scores so many times,
    at 70 % of the memory's bandwidth, without the pipeline's bubble."""
    scores = 2 * row.heads / row.tensor * SEQUENCE**2
    samples = row.batch / (row.gpus / row.tensor / row.pipeline)
    layers = row.layers / row.pipeline
    return passes * scores * samples * layers / (0.7 * BANDWIDTH)


def predict_megatron(row: MegatronRow) -> MegatronStep:
    """Predict a row with its degrees on A100 of 80 GB."""
    costs = rank_costs(build_machine(MachineOptions(gpus=row.gpus, gpu="a100-80gb")), None)
    data = row.gpus // row.tensor // row.pipeline
    degrees = ParallelDegrees(tensor=row.tensor, pipeline=row.pipeline, data=data, zero=0)
    samples, blocks = row.batch // data, row.layers // row.pipeline
    steps = []
    for size in (size for size in (1, 2, 4, 8, 16) if samples % size == 0):
        micro_batches = samples // size
        numbers = [number for number in range(1, blocks + 1) if blocks % number == 0]
        interleaves = row.pipeline > 1 and micro_batches % row.pipeline == 0
        for virtual in numbers if interleaves else [1]:
            setting = TrainingSetting(micro_batches, Tokens(SEQUENCE, size), "full", virtual)
            estimate = estimate_step(row.shape, degrees, setting, costs)
            if estimate.peak_bytes <= 78e9:
                bubble = (row.pipeline - 1) / (virtual * micro_batches)
                unfused = unfused_attention_seconds(row) * (1 + bubble)
                steps.append(MegatronStep(estimate.step_seconds, unfused, size, virtual))
    return min(steps)


def _llama(
    hidden: int, inner: int, blocks: int, heads: int, shared: int, rows: int = 128256
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": rows,
    }


MODELS: Mapping[str, TransformerShape] = {
    "Llama 3 8B": transformer_shape(_llama(4096, 14336, 32, 32, 8)),
    "Llama 3 70B": transformer_shape(_llama(8192, 28672, 80, 64, 8)),
    "Llama 3 405B": transformer_shape(_llama(16384, 53248, 126, 128, 8)),
    "Llama 2 13B": transformer_shape(_llama(5120, 13824, 40, 40, 40, 32000)),
    "Llama 2 70B": transformer_shape(_llama(8192, 28672, 80, 64, 8, 32000)),
    "BLOOM 176B": replace(
        transformer_shape(_llama(14336, 57344, 70, 112, 112, 250880)), gated=False, tied=True
    ),
    "Qwen 3 30B-A3B": transformer_shape(
        _llama(2048, 6144, 48, 32, 4, 151936)
        | {"model_type": "qwen3_moe", "head_dim": 128, "moe_intermediate_size": 768}
        | {"num_experts": 128, "num_experts_per_tok": 8}
    ),
    "DeepSeek-V3": transformer_shape(
        _llama(7168, 18432, 61, 128, 128, 129280)
        | {"model_type": "deepseek_v3", "moe_intermediate_size": 2048, "n_shared_experts": 1}
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
        | {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128}
    ),
}


class Throughput(NamedTuple):
    """A published throughput of a language model: tokens a second and GPU, or, where `teraflops`, TFLOP/s.

    `power`: watts to which the GPU was limited, of 700, where it had another memory, too. `unfused`: the row
    of attention without a fused kernel whose passes are added.
    """

    model: str
    machine: str
    implementation: str
    degrees: ParallelDegrees
    sequence: int
    micro_batch_size: int
    micro_batches: int
    recompute: Recomputation
    published: float
    virtual_stages: int = 1
    teraflops: bool = False
    power: float = 700
    unfused: MegatronRow | None = None

    @property
    def name(self) -> str:
        """The model, its devices and degrees."""
        size = f"{self.degrees.devices} {self.machine.removeprefix('dgx-').removesuffix('-80gb').upper()}"
        return f"{self.model}, {size}, {self.degrees.describe()}, {self.sequence}"

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a token: of its matrices, and of causal attention."""
        shape = MODELS[self.model]
        matrices = shape.active_parameters() - shape.vocabulary * shape.hidden * (not shape.tied)
        widths = shape.attention.head_width + shape.attention.value_width
        return 6 * matrices + 3 * shape.blocks * self.sequence * shape.attention.heads * widths


_A100, _H100 = "dgx-a100-80gb", "dgx-h100"
_FSDP_64 = ParallelDegrees(data=64, zero=3)
_FSDP_8 = ParallelDegrees(data=8, zero=3)
_TP_8 = ParallelDegrees(tensor=8, data=8, zero=3)
_TP_8_FSDP_32 = ParallelDegrees(tensor=8, data=32, zero=3)
_BLOOM = ParallelDegrees(tensor=4, pipeline=12, data=8)
_LLAMA_64, _LLAMA_128 = (ParallelDegrees(tensor=8, pipeline=16, data=data) for data in (64, 128))
_LLAMA_CP = ParallelDegrees(tensor=8, context=16, pipeline=16, data=8, exchange="all-gather")
_QWEN = ParallelDegrees(expert=8, data=8, zero=2)
_RING_2 = ParallelDegrees(context=2, data=32, zero=3, exchange="ring")
_V3_64, _V3_256 = (ParallelDegrees(expert=64, pipeline=4, data=data) for data in (64, 256))
_UNFUSED = MegatronRow(176, 112, 14336, 70, 4, 12, 384, 2048, 112.5)
THROUGHPUTS = (
    Throughput("Llama 3 8B", _A100, "torchtitan", _FSDP_64, 8192, 1, 1, "selective", 2973),
    Throughput("Llama 3 70B", _A100, "torchtitan", _FSDP_64, 8192, 1, 1, "full", 331),
    Throughput("Llama 2 13B", _A100, "torchtitan", _FSDP_64, 4096, 2, 1, "none", 2162),
    Throughput("Llama 2 13B", _A100, "torchtitan", _FSDP_64, 4096, 2, 1, "selective", 1904),
    Throughput("Llama 2 70B", _A100, "torchtitan", _FSDP_64, 4096, 2, 1, "full", 353),
    Throughput("Llama 3 8B", _H100, "torchtitan", _FSDP_8, 8192, 2, 1, "selective", 6667, power=500),
    Throughput("Llama 3 8B", _H100, "torchtitan", _TP_8, 8192, 12, 1, "selective", 4378, power=500),
    Throughput("Llama 3 70B", _H100, "torchtitan", _TP_8_FSDP_32, 8192, 16, 1, "full", 597.3, power=500),
    Throughput("BLOOM 176B", _A100, "megatron", _BLOOM, 2048, 2, 128, "full", 112.5, 1, True, 700, _UNFUSED),
    Throughput("Llama 3 405B", _H100, "megatron", _LLAMA_64, 8192, 1, 32, "none", 430, 8, True),
    Throughput("Llama 3 405B", _H100, "megatron", _LLAMA_128, 8192, 1, 16, "none", 400, 8, True),
    Throughput("Llama 3 405B", _H100, "megatron", _LLAMA_CP, 131072, 1, 16, "none", 380, 8, True),
    Throughput("Qwen 3 30B-A3B", _H100, "megatron", _QWEN, 4096, 4, 16, "none", 12040),
    Throughput("Llama 3 70B", _H100, "megatron", _RING_2, 8192, 1, 4, "full", 866.77),
    Throughput("DeepSeek-V3", _H100, "megatron", _V3_64, 4096, 1, 8, "none", 1002, 8),
    Throughput("DeepSeek-V3", _H100, "megatron", _V3_256, 4096, 1, 32, "none", 865, 8),
)

THROUGHPUT_REASON = """The H100 of torchtitan had 500 W of 700 and 2.4 TB/s of 3.35. That their FLOP/s are
in proportion to their watts is an assumption, which brings three rows within 15 %. DeepSeek-V3 on 256 GPUs is
predicted too slow and on 1,024 is not, though each micro-batch was published as slower there: with half the
bytes of the all-to-all (DeepEP sends a token once to a node) they would be 1.05 and 1.27. Why is open."""
CAPPED_BANDWIDTH = 2.4e12
"""Bytes per second of the memory of torchtitan's H100 (96 GB of HBM2e)."""


def predict_throughput(row: Throughput, *, capped: bool = True) -> float:
    """Predict a throughput in the row's unit.

    Args:
        row: What was published.
        capped: Take the GPU's FLOP/s in proportion to its limit of power, and its own memory's bandwidth.
    """
    topology = build_machine(MachineOptions(gpus=row.degrees.devices, topology=row.machine))
    costs = replace(rank_costs(topology, None), implementation=IMPLEMENTATIONS[row.implementation])
    if capped and row.power < 700:
        limits = DeviceLimits(costs.limits.flops * row.power / 700, CAPPED_BANDWIDTH)
        costs = replace(costs, limits=limits)
    tokens = Tokens(row.sequence, row.micro_batch_size)
    setting = TrainingSetting(row.micro_batches, tokens, row.recompute, row.virtual_stages)
    estimate: StepEstimate = estimate_step(MODELS[row.model], row.degrees, setting, costs)
    samples = row.micro_batches * row.micro_batch_size * row.degrees.data
    step = estimate.step_seconds
    if row.unfused is not None:
        bubble = (row.degrees.pipeline - 1) / row.micro_batches
        step += unfused_attention_seconds(row.unfused, UNFUSED_PASSES_WITHOUT_DROPOUT) * (1 + bubble)
    rate = samples * row.sequence / step / row.degrees.devices
    return rate * row.flops_per_token / 1e12 if row.teraflops else rate


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
    print(
        f"{'billion':>8} {'TP':>3} {'PP':>3} {'b':>2} {'v':>2} {'TFLOP/s':>8} predicted  error  "
        "with fused attention"
    )
    for row in MEGATRON:
        step = predict_megatron(row)
        fused, predicted = (
            row.flops / seconds / row.gpus / 1e12 for seconds in (step.seconds, step.seconds + step.unfused)
        )
        error = row.teraflops / predicted - 1
        print(
            f"{row.shape.parameters() / 1e9:8.1f} {row.tensor:3} {row.pipeline:3} "
            f"{step.micro_batch_size:2} {step.virtual_stages:2} "
            f"{row.teraflops:8.0f} {predicted:9.1f} {error:+6.1%} {row.teraflops / fused - 1:+6.1%}"
        )
        yield error


def throughput_errors() -> Iterator[float]:
    print(f"\n{'case':64} {'published':>9} {'predicted':>9} ratio  as the catalogue has the GPU")
    for row in THROUGHPUTS:
        predicted = predict_throughput(row)
        unit = "TFLOP/s" if row.teraflops else ""
        own = f"{predict_throughput(row, capped=False) / row.published:5.2f}" if row.power < 700 else ""
        ratio = predicted / row.published
        print(f"{row.name:64} {row.published:9.1f} {predicted:9.1f} {ratio:5.2f}  {own} {unit}")
        yield row.published / predicted - 1


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
    tables = (
        (megatron_errors(), MEGATRON_REASON),
        (throughput_errors(), THROUGHPUT_REASON),
        (zero_bubble_errors(), ZERO_BUBBLE_REASON),
    )
    for errors, why in tables:
        absolute = sorted(abs(error) for error in errors)
        print(f"seconds: median {statistics.median(absolute):.1%}, worst {absolute[-1]:.1%}. {why}")


if __name__ == "__main__":
    main()
