"""Steps and memory against those of published runs on B200, and against sums by hand.

Measured figures: SimuMax release v1.2 (https://github.com/MooreThreads/SimuMax, Apache-2.0), Megatron-LM with
Transformer Engine on eight B200. `benchmarks/published_gpu.py` predicts all of its steps.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from published_gpu import FUSED_LOSS, MeasuredLinks

from pplan.cost_models.errors import UsageError
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.block_kernels import block_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import (
    AttentionKernel,
    GroupedMatmul,
    Matmul,
    MemoryPass,
)
from pplan.cost_models.transformer.kernel_table_file import load_kernel_table
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting, chunks_in_flight, even_blocks
from pplan.cost_models.transformer.training_step import estimate_step
from pplan.cost_models.transformer.transformer_shape import TransformerShape
from pplan.cost_models.transformer.weight_update import ParameterCounts, update_seconds

GIB = 2**30
LLAMA = transformer_shape(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 12,
        "vocab_size": 128256,
    }
)
DEEPSEEK_V2 = transformer_shape(
    {
        "model_type": "deepseek_v2",
        "hidden_size": 5120,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 128,
        "num_hidden_layers": 4,
        "vocab_size": 102400,
        "n_routed_experts": 160,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
)
TOPOLOGY = two_level_topology(Device("B200", None), 8, 8, Link(900e9, 5e-6), Link(50e9, 2e-5))
COSTS = RankCosts(DeviceLimits(2250e12, 8e12), TopologyLinks(TOPOLOGY))


@pytest.mark.parametrize(
    ("shape", "degrees", "stage", "measured_gib"),
    [
        (LLAMA, ParallelDegrees(pipeline=2, data=4), 0, 66.55),
        (LLAMA, ParallelDegrees(pipeline=2, data=4), 1, 62.97),
        (LLAMA, ParallelDegrees(tensor=2, data=4), 0, 60.68),
        (LLAMA, ParallelDegrees(tensor=4, data=2), 0, 39.07),
        (LLAMA, ParallelDegrees(tensor=8), 0, 28.29),
        (DEEPSEEK_V2, ParallelDegrees(expert=8, data=8), 0, 45.63),
        (DEEPSEEK_V2, ParallelDegrees(expert=4, pipeline=2, data=4), 0, 31.58),
        (DEEPSEEK_V2, ParallelDegrees(expert=4, pipeline=2, data=4), 1, 44.70),
    ],
)
def test_memory_of_published_runs(
    shape: TransformerShape, degrees: ParallelDegrees, stage: int, measured_gib: float
) -> None:
    costs = replace(COSTS, implementation=FUSED_LOSS)
    estimate = estimate_step(shape, degrees, TrainingSetting(8, Tokens(4096)), costs)
    assert estimate.stages[stage].bytes / GIB == pytest.approx(measured_gib, rel=2e-3)


def test_workspace_of_wide_models() -> None:
    """Beside one block the vocabulary's table decides. The head's backward holds its weight's empty gradient,
    with the logits, the norm's input and result, and the gradients of its input and of what was sent; the
    embedding's backward holds the gradient of the whole table, when that micro-batch's activations are free.
    """
    wide = replace(LLAMA, hidden=16384, feed_forward=1024, routed=(False,) * 2)
    estimate = estimate_step(wide, ParallelDegrees(pipeline=2), TrainingSetting(8, Tokens(1024)), COSTS)
    first, last = (stage.ledger["workspace"] for stage in estimate.stages)
    rows, tokens = 128256, 1024
    assert last == 2 * (rows * 16384 + rows * tokens + (2 + 1 + 1) * tokens * 16384)
    kept = estimate.stages[1].ledger["activations"]
    assert first == 2 * (rows * 16384 + tokens * 16384) - kept


KERNELS = """operation,shape,peak_tflops,efficiency
matmul,"m=4096, k=8192, n=5120, layout=TN",2250,0.6275
matmul,"m=4096, k=5120, n=8192, layout=NN",2250,0.6428
matmul,"m=5120, k=4096, n=8192, layout=NT",2250,0.4732
matmul,"m=4096, k=4096, n=8192, layout=TN",2250,0.4603
matmul,"m=4096, k=8192, n=4096, layout=NN",2250,0.3905
matmul,"m=8192, k=4096, n=4096, layout=NT",2250,0.5703
matmul,"m=4096, k=8192, n=28672, layout=TN",2250,0.4943
matmul,"m=4096, k=28672, n=8192, layout=NN",2250,0.4819
matmul,"m=28672, k=4096, n=8192, layout=NT",2250,0.4535
matmul,"m=4096, k=14336, n=8192, layout=TN",2250,0.4763
matmul,"m=4096, k=8192, n=14336, layout=NN",2250,0.4943
matmul,"m=8192, k=4096, n=14336, layout=NT",2250,0.4568
matmul,"m=4096, k=8192, n=64128, layout=TN",2250,0.4901
matmul,"m=4096, k=64128, n=8192, layout=NN",2250,0.4656
matmul,"m=64128, k=4096, n=8192, layout=NT",2250,0.4529
sdp_fwd,"seq_len=4096, head_num=32, kv_head_num=4, qk_head_dim=128, v_head_dim=128",2250,0.7318
sdp_bwd,"seq_len=4096, head_num=32, kv_head_num=4, qk_head_dim=128, v_head_dim=128",2250,0.7963
"""
COLLECTIVES: dict[str, dict[str, Any]] = {
    "all_reduce": {
        "scale": 2,
        "offset": -1,
        "efficient_factor": 0.7424,
        "latency_us": 5.52,
        "fixed_latency_us": 22.2,
    },
    "all_gather": {
        "scale": 1,
        "offset": -1,
        "efficient_factor": 0.6735,
        "latency_us": 9.18,
        "fixed_latency_us": 23.1,
    },
    "reduce_scatter": {
        "scale": 1,
        "offset": -1,
        "efficient_factor": 0.6731,
        "latency_us": 8.03,
        "fixed_latency_us": 25.6,
    },
}


@pytest.mark.parametrize(("micro_batches", "measured"), [(4, 0.7255), (8, 1.3870), (32, 5.3765)])
def test_seconds_of_published_runs(micro_batches: int, measured: float, tmp_path: Path) -> None:
    """On two tensor-parallel devices. GB/s are of 2^30 bytes."""
    file = tmp_path / "kernels.csv"
    file.write_text(KERNELS)
    shares = {"default": 0.666, "ce_fusion": 0.2795}
    limits = DeviceLimits(2250e12, 8000 * GIB, memory_share=0.666, shares=shares)
    costs = RankCosts(limits, MeasuredLinks(900 * GIB, COLLECTIVES), load_kernel_table(file))
    degrees = ParallelDegrees(tensor=2, data=4)
    estimate = estimate_step(LLAMA, degrees, TrainingSetting(micro_batches, Tokens(4096)), costs)
    assert estimate.step_seconds == pytest.approx(measured, rel=0.02)


def test_gaps_and_slowdown(tmp_path: Path) -> None:
    """Products of a table take longer in a training loop. Every kernel of a layer with experts has a gap."""
    file = tmp_path / "kernels.csv"
    file.write_text(KERNELS)
    table, degrees = load_kernel_table(file), ParallelDegrees(tensor=2, data=4)
    limits, links = DeviceLimits(2250e12, 8000 * GIB), MeasuredLinks(900 * GIB, COLLECTIVES)
    plain, slow, gaps = (
        RankCosts(limits, links, table, own)
        for own in (Overheads(0.0, 1.0), Overheads(0.0, 1.5), Overheads(1.0, 1.0))
    )
    product = Matmul(4096, 8192, 5120, "TN")
    assert slow.kernel_seconds(product, degrees) == 1.5 * plain.kernel_seconds(product, degrees)
    for shape in (LLAMA, DEEPSEEK_V2):
        for routed in set(shape.routed):
            work = block_work(shape, routed, degrees, Tokens(4096))
            more = [
                one - other
                for one, other in zip(gaps.seconds(work, degrees), plain.seconds(work, degrees), strict=True)
            ]
            counts = [
                sum(routed or isinstance(each, MemoryPass) for each in kernels)
                for kernels in (work.forward, work.backward)
            ]
            assert more == pytest.approx(counts)


def test_recomputation_keeps_inputs_and_computes_twice() -> None:
    degrees = ParallelDegrees(pipeline=4, tensor=2)
    plain, again = (
        estimate_step(LLAMA, degrees, TrainingSetting(8, Tokens(4096), recompute), COSTS)
        for recompute in ("none", "full")
    )
    for one, other in zip(plain.stages, again.stages, strict=True):
        assert other.forward_seconds == one.forward_seconds
        assert other.bytes < one.bytes
    middle = again.stages[1]
    assert middle.backward_seconds == pytest.approx(plain.stages[1].backward_seconds + middle.forward_seconds)
    # Three micro-batches in flight, of three blocks each.
    assert middle.ledger["activations"] == 3 * 3 * 2 * 4096 * 8192 / 2


@pytest.mark.parametrize("again", [1, 5, 11])
def test_recomputation_of_the_first_blocks_of_a_stage(again: int) -> None:
    """Of twelve equal blocks: as many forwards more, and as many inputs in place of what a block keeps."""
    degrees = ParallelDegrees(tensor=8)
    whole = TrainingSetting(8, Tokens(4096), "full")
    settings = (replace(whole, recompute="none"), replace(whole, recompute_blocks=again), whole)
    none, some, full = (estimate_step(LLAMA, degrees, setting, COSTS) for setting in settings)
    share = again / LLAMA.blocks
    assert some.step_seconds == pytest.approx(
        (1 - share) * none.step_seconds + share * full.step_seconds, rel=1e-9
    )
    activations = [each.stages[0].ledger["activations"] for each in (none, some, full)]
    assert activations[1] == pytest.approx((1 - share) * activations[0] + share * activations[2], rel=1e-9)
    assert some.stages[0].ledger["workspace"] == none.stages[0].ledger["workspace"]


def test_selective_recomputation_runs_attention_again() -> None:
    """Flash attention keeps 4 bytes of each token and head; its forward runs again, nothing else."""
    degrees = ParallelDegrees(pipeline=4, tensor=2)
    plain, again = (
        estimate_step(LLAMA, degrees, TrainingSetting(8, Tokens(4096), recompute), COSTS)
        for recompute in ("none", "selective")
    )
    attention = COSTS.kernel_seconds(AttentionKernel(4096, 32, 4, 128, 128, False), degrees)
    for stage, (one, other) in enumerate(zip(plain.stages, again.stages, strict=True)):
        assert other.forward_seconds == one.forward_seconds
        assert other.backward_seconds == pytest.approx(one.backward_seconds + 3 * attention)
        saved = one.ledger["activations"] - other.ledger["activations"]
        assert saved == (4 - stage) * 3 * 4 * 4096 * 32


@pytest.mark.parametrize(("stages", "virtual"), [(2, 2), (4, 3), (3, 4), (8, 2)])
@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_memory_of_interleaved_pipelines(stages: int, virtual: int, rounds: int) -> None:
    """Of equal virtual stages the first device keeps 1 + (p - 1)/(p v) times the activations of all layers
    over p (Korthikanti et al., MLSys 2023, section 4.2.3); each device what its list of actions holds."""
    many, each = rounds * stages, 2
    shape = LLAMA.with_blocks(stages * virtual * each)
    setting = TrainingSetting(many, Tokens(4096), virtual_stages=virtual)
    estimate = estimate_step(shape, ParallelDegrees(pipeline=stages), setting, COSTS)
    one = estimate_step(shape.with_blocks(1), ParallelDegrees(), TrainingSetting(1, Tokens(4096)), COSTS)
    block = one.stages[0].ledger["activations"]
    program = find_schedule("interleaved").program(stages, many, virtual)
    for device, stage in enumerate(estimate.stages):
        held = max(program.in_flight(device))
        assert stage.ledger["activations"] == pytest.approx(held * virtual * each * block)
        assert [len(own) for own in stage.blocks] == [each] * virtual
    if rounds > 1:
        layers = shape.blocks * (1 + (stages - 1) / (stages * virtual))
        assert estimate.stages[0].ledger["activations"] == pytest.approx(layers * block)


@pytest.mark.parametrize(("stages", "virtual", "rounds"), [(2, 2, 4), (3, 3, 5), (4, 2, 9), (4, 5, 9)])
def test_virtual_stages_held_at_a_time(stages: int, virtual: int, rounds: int) -> None:
    """Of unequal ones too: the most that a device keeps, over its whole list of actions."""
    program = find_schedule("interleaved").program(stages, stages * rounds, virtual)
    random = Random(stages * 100 + virtual)
    for device in range(stages):
        kept = [random.choice((1, 5, 25)) for _ in range(virtual)]
        level = most = 0
        for action in program.actions[device]:
            level += kept[action.chunk] * (1 if action.kind == "F" else -1)
            most = max(most, level)
        peaks = chunks_in_flight(device, stages, stages * rounds, virtual)
        assert most == max(sum(n * own for n, own in zip(each, kept, strict=True)) for each in peaks)


def test_seconds_of_an_interleaved_pipeline() -> None:
    """Without embedding, head and transfers: (m + (p - 1)/v) (F + B), as Narayanan et al., SC 2021, section
    2.2.2 say."""
    shape = replace(LLAMA, vocabulary=128)
    free = two_level_topology(Device("GPU", None), 8, 8, Link(float("inf"), 0.0), Link(float("inf"), 0.0))
    costs = RankCosts(DeviceLimits(2250e12, 8e12), TopologyLinks(free), overheads=Overheads(0.0))
    setting = TrainingSetting(8, Tokens(4096), virtual_stages=3)
    estimate = estimate_step(shape, ParallelDegrees(pipeline=4), setting, costs)
    middle = estimate.stages[1]
    each = middle.forward_seconds + middle.backward_seconds
    assert estimate.pipeline_seconds == pytest.approx((8 + 3 / 3) * each, rel=1e-2)


@pytest.mark.parametrize(
    ("virtual", "many", "stages", "says"),
    [(2, 6, 4, "no multiple of 4"), (2, 4, 1, "at least 2 stages")],
)
def test_pipelines_that_cannot_be_interleaved(virtual: int, many: int, stages: int, says: str) -> None:
    setting = TrainingSetting(many, Tokens(4096), virtual_stages=virtual)
    with pytest.raises(UsageError, match=says):
        estimate_step(LLAMA, ParallelDegrees(pipeline=stages), setting, COSTS)


def test_states_by_degrees() -> None:
    """Bytes of weights, gradients and states of all devices, against the parameters: 6 bytes of each on every
    device that has it, and 12 once (ZeRO-1) or on each (without)."""
    for degrees in (
        ParallelDegrees(tensor=2, pipeline=2, data=2, expert=4),
        ParallelDegrees(data=8, expert=2),
        ParallelDegrees(context=2, pipeline=4, expert=2),
    ):
        total = 0.0
        for zero in (1, 0):
            own = replace(degrees, zero=zero)
            estimate = estimate_step(DEEPSEEK_V2, own, TrainingSetting(4, Tokens(4096)), COSTS)
            per_stage = degrees.devices / degrees.pipeline
            optimizer = sum(stage.ledger["optimizer"] for stage in estimate.stages) * per_stage
            if zero:
                total = optimizer
                continue
            weights = sum(stage.ledger["weights"] for stage in estimate.stages) * per_stage
            assert optimizer == pytest.approx(6 * weights)
        # Whole weights (norms, routers, projections down) are on each tensor-parallel device.
        once = 12 * DEEPSEEK_V2.parameters()
        if degrees.tensor == 1:
            assert total == pytest.approx(once)
        else:
            assert once < total < 1.01 * once


BLOCK = LLAMA.with_blocks(2).parameters() - LLAMA.with_blocks(1).parameters()
TABLE = 128256 * 8192


@pytest.mark.parametrize(("zero", "whole"), [(2, True), (3, False)])
def test_states_of_fsdp(zero: int, whole: bool) -> None:
    """A device of eight has an eighth of gradients, master weights and moments, in float32; of the weights in
    bfloat16 all, or the two largest layers (here embedding, and head with its norm); and the gradients of one
    layer, in both."""
    setting = TrainingSetting(4, Tokens(4096))
    ledger = estimate_step(LLAMA, ParallelDegrees(data=8, zero=zero), setting, COSTS).stages[0].ledger
    all_of_it = LLAMA.parameters()
    assert ledger["weights"] == (2 * all_of_it if whole else 2 * 2 * (TABLE + 8192))
    assert ledger["gradients"] == pytest.approx(4 * all_of_it / 8 + (2 + 4) * (TABLE + 8192))
    assert ledger["optimizer"] == pytest.approx(12 * all_of_it / 8)


@pytest.mark.parametrize("zero", [2, 3])
def test_collectives_of_fsdp_run_beside_the_computing(zero: int) -> None:
    """On slow links a pass takes what they take: an all-gather of 2 bytes a weight, in forward and, with the
    weights spread, in backward too, and there a reduce-scatter of 4; on fast links what computing takes."""
    setting, degrees = TrainingSetting(4, Tokens(256)), ParallelDegrees(data=8, zero=zero)
    slow, fast = (
        RankCosts(
            DeviceLimits(2250e12, 8e12),
            TopologyLinks(two_level_topology(Device("GPU", None), 8, 8, link, link)),
        )
        for link in (Link(1e6, 0.0), Link(1e18, 0.0))
    )
    stage = estimate_step(LLAMA, degrees, setting, slow).stages[0]
    sent = (12 * BLOCK + 2 * TABLE) * 7 / 8 / 1e6
    assert stage.forward_seconds == pytest.approx(2 * sent)
    assert stage.backward_seconds == pytest.approx((4 + (2 if zero == 3 else 0)) * sent)
    stage = estimate_step(LLAMA, degrees, setting, fast).stages[0]
    plain = estimate_step(LLAMA, replace(degrees, zero=1), setting, fast).stages[0]
    assert stage.forward_seconds == pytest.approx(plain.forward_seconds)
    assert stage.backward_seconds == pytest.approx(plain.backward_seconds)


def test_fsdp_has_no_pipeline() -> None:
    with pytest.raises(UsageError, match="one pipeline stage"):
        estimate_step(LLAMA, ParallelDegrees(pipeline=2, zero=3), TrainingSetting(4, Tokens(4096)), COSTS)


def test_seconds_of_a_pipeline_of_equal_stages() -> None:
    """Without embedding, head, transfers and update: (m + p - 1) (F + B), as 1F1B takes."""
    shape = replace(LLAMA, vocabulary=128)
    free = two_level_topology(Device("GPU", None), 8, 8, Link(float("inf"), 0.0), Link(float("inf"), 0.0))
    costs = RankCosts(DeviceLimits(2250e12, 8e12), TopologyLinks(free), overheads=Overheads(0.0))
    estimate = estimate_step(shape, ParallelDegrees(pipeline=4), TrainingSetting(6, Tokens(4096)), costs)
    middle = estimate.stages[1]
    each = middle.forward_seconds + middle.backward_seconds
    assert estimate.pipeline_seconds == pytest.approx((6 + 4 - 1) * each, rel=1e-2)
    assert estimate.step_seconds == estimate.pipeline_seconds + estimate.update_seconds


@pytest.mark.parametrize(("blocks", "stages"), [(12, 5), (7, 7), (80, 16), (61, 8)])
def test_even_blocks(blocks: int, stages: int) -> None:
    counts = even_blocks(blocks, stages)
    assert sum(counts) == blocks
    assert max(counts) - min(counts) <= 1
    assert min(counts[0], counts[-1]) == min(counts)


@pytest.mark.parametrize("counts", [[12], [6, 5], [6, 6, 0], [13, -1]])
def test_blocks_that_are_no_division(counts: list[int]) -> None:
    with pytest.raises(UsageError, match="blocks="):
        estimate_step(LLAMA, ParallelDegrees(pipeline=2), TrainingSetting(4, Tokens(4096)), COSTS, counts)


@pytest.mark.parametrize(("stages", "virtual"), [(2, 1), (3, 1), (6, 1), (2, 3), (4, 2)])
def test_many_micro_batches_follow_as_the_last_did(
    stages: int, virtual: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step of all of them simulated, against that of fewer of which the rest is told."""
    module = "pplan.cost_models.transformer.training_step._SIMULATED"
    setting = TrainingSetting(stages * 100, Tokens(4096), virtual_stages=virtual)
    degrees = ParallelDegrees(pipeline=stages)
    monkeypatch.setattr(module, 1000)
    whole = estimate_step(LLAMA, degrees, setting, COSTS)
    monkeypatch.setattr(module, 32)
    few = estimate_step(LLAMA, degrees, setting, COSTS)
    assert few.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)


def test_bytes_that_products_and_updates_move() -> None:
    """Of a device that computes at once, at a byte a second: each number of a product once, two bytes each, a
    weight's gradient read and written in four; of a parameter the gradient zeroed, looked through, scaled to
    its norm, which is read, and read for the update; three float32 states read and written, the master weight
    read again, and the weight written. Of four replicas each gradient is divided by four, too, and each
    updates its quarter."""
    limits = DeviceLimits(1e30, 1.0, memory_share=1.0)
    assert limits.product_seconds(Matmul(3, 5, 7, "NN")) == 2 * (3 * 5 + 5 * 7 + 3 * 7)
    m, n, k = 3, 5, 7
    for part, each in (("forward", 2), ("weight_gradient", 8)):
        product: Any = GroupedMatmul(4, m, n, k, part)  # type: ignore[arg-type]
        assert limits.product_seconds(product) == 4 * (2 * m * k + 2 * m * n + each * n * k)
    own = ParameterCounts(10.0, 0.0)
    costs = RankCosts(limits, TopologyLinks(TOPOLOGY), overheads=Overheads(0.0))
    whole, shared = 10 * (4 + 4), 10 * (4 + 8 + 4 + 3 * 2 * 4 + 4 + 2)
    assert update_seconds(own, ParallelDegrees(), costs) == pytest.approx(whole + shared)
    free = two_level_topology(Device("GPU", None), 8, 8, Link(float("inf"), 0.0), Link(float("inf"), 0.0))
    costs = RankCosts(limits, TopologyLinks(free), overheads=Overheads(0.0))
    updated = update_seconds(own, ParallelDegrees(data=4), costs)
    assert updated == pytest.approx(whole + 10 * 8 + shared / 4)
