"""What implementations keep and read, counted on their code; FSDP in pipelines against torch's schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pplan.cost_models.errors import UsageError
from pplan.cost_models.program import list_unshards
from pplan.cost_models.schedules import device_actions, find_schedule
from pplan.cost_models.step_costs import Costs
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.block_kernels import block_work, head_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.implementations import (
    MEGATRON,
    TORCHTITAN,
    TRANSFORMERS,
    Implementation,
)
from pplan.cost_models.transformer.kernel_table import Collective, Kernel, Matmul, MemoryPass
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import Recomputation, TrainingSetting, block_ranges
from pplan.cost_models.transformer.training_step import estimate_step, pipeline_seconds
from pplan.cost_models.transformer.transformer_shape import TransformerShape

SIZES = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 1000,
}
SHAPE, TOKENS = transformer_shape(SIZES), Tokens(256, 2)
LARGE = transformer_shape({**SIZES, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6})
TOPOLOGY = two_level_topology(Device("H100", None), 8, 8, Link(450e9, 5e-6), Link(50e9, 2e-5))
COSTS = RankCosts(DeviceLimits(989e12, 3.35e12), TopologyLinks(TOPOLOGY))
PRODUCTS = ("mm", "bmm", "addmm", "_scaled_dot_product_flash_attention")
VIEWS = (
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "expand", "slice", "unsqueeze"),
    *("detach", "alias", "split", "as_strided", "select", "empty_like", "ones_like"),
)
"""Operations that read and write nothing, and those that the test itself runs."""


class Passes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that operations other than products read and write, every storage once an operation."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not name.startswith(PRODUCTS) and name not in VIEWS:
            self.bytes += sum(_sizes([*args, kwargs]).values()) + sum(_sizes(result).values())
        return result


def _sizes(tree: Any) -> dict[tuple[int, int], int]:
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {
        (own.untyped_storage().data_ptr(), int(own.storage_offset())): min(
            own.numel() * own.element_size(), own.untyped_storage().nbytes()
        )
        for own in tensors
    }


def saved_bytes(run: Callable[[], Tensor], besides: list[Tensor]) -> tuple[Tensor, int]:
    """The result, and the bytes of all storages that autograd keeps, but for those of some tensors."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda own: own):
        result = run()
    others = {own.untyped_storage().data_ptr() for own in besides}
    return result, sum(own.nbytes() for place, own in kept.items() if place not in others)


def count_passes(run: Callable[[], Tensor]) -> tuple[int, int]:
    """Bytes of passes, forward and backward."""
    with Passes() as forward:  # type: ignore[no-untyped-call]
        result = run()
    gradient = torch.ones_like(result)
    with Passes() as backward:  # type: ignore[no-untyped-call]
        result.backward(gradient)  # type: ignore[no-untyped-call]
    return forward.bytes, backward.bytes


def passes(kernels: tuple[Kernel, ...]) -> float:
    return sum(kernel.bytes for kernel in kernels if isinstance(kernel, MemoryPass))


@pytest.fixture(scope="module")
def transformers_block() -> tuple[Callable[[], Tensor], list[Tensor]]:
    transformers = pytest.importorskip("transformers")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = transformers.LlamaConfig(**{key: SIZES[key] for key in SIZES if key != "model_type"})
    config._attn_implementation = "sdpa"
    block = llama.LlamaDecoderLayer(config, 0).to(torch.bfloat16)
    hidden = torch.randn(2, 256, 512, dtype=torch.bfloat16, requires_grad=True)
    positions = llama.LlamaRotaryEmbedding(config)(hidden.detach(), torch.arange(256)[None])
    return lambda: block(hidden, position_embeddings=positions), [*block.parameters(), *positions]


def test_bytes_are_those_of_a_block_of_transformers(
    transformers_block: tuple[Callable[[], Tensor], list[Tensor]],
) -> None:
    run, parameters = transformers_block
    work = block_work(SHAPE, False, ParallelDegrees(), TOKENS, TRANSFORMERS)
    assert saved_bytes(run, parameters)[1] == pytest.approx(work.saved, rel=2e-3)
    run()  # so that gradients of parameters are there on both sides, or on none
    forward, backward = count_passes(run)
    assert forward == pytest.approx(passes(work.forward), rel=0.01)
    assert backward == pytest.approx(passes(work.backward), rel=0.01)


def test_bytes_are_those_of_the_loss_of_transformers() -> None:
    loss = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    logits = torch.randn(2, 256, 1000, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 1000, (2, 256))
    forward, backward = count_passes(lambda: loss(logits, labels, 1000))
    size = logits.numel() * 2
    work = head_work(SHAPE, ParallelDegrees(), TOKENS, TRANSFORMERS)
    own = [
        sum(k.bytes for k in kernels if isinstance(k, MemoryPass) and k.kind == "ce_fusion")
        for kernels in (work.forward, work.backward)
    ]
    # log_softmax in float32 stays; the logits too, and backward makes its gradient and that of its input.
    assert own == [pytest.approx(forward, rel=0.01), pytest.approx(backward, rel=0.01)]
    assert saved_bytes(lambda: loss(logits, labels, 1000), [])[1] == pytest.approx(2 * size, rel=0.01)


class TitanBlock(nn.Module):
    """The operations of torchtitan's Llama 3 block, with attention by torch."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = (nn.Linear(512, size, bias=False) for size in (768, 512))
        self.w1, self.w3 = (nn.Linear(512, 1536, bias=False) for _ in range(2))
        self.w2 = nn.Linear(1536, 512, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(512) for _ in range(2))

    def forward(self, hidden: Tensor, turns: Tensor) -> Tensor:
        heads = self.wqkv(self.norms[0](hidden)).view(2, 256, 12, 64).split([8, 2, 2], 2)
        queries, keys, values = (
            own.transpose(1, 2) for own in (*(turn(o, turns) for o in heads[:2]), heads[2])
        )
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        middle = hidden + self.wo(mixed.transpose(1, 2).reshape(2, 256, 512))
        inner = self.norms[1](middle)
        result: Tensor = middle + self.w2(silu(self.w1(inner)) * self.w3(inner))
        return result


def turn(own: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(own.float().reshape(*own.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(own)


@pytest.mark.slow
def test_a_compiled_block_keeps_what_the_partitioner_chooses() -> None:
    from functorch.compile import min_cut_rematerialization_partition  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    block = TitanBlock().to(torch.bfloat16)
    turns = torch.polar(torch.ones(256, 32), torch.rand(256, 32))[None, :, None]
    backend = aot_autograd(
        fw_compiler=lambda graph, _: graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compiled = torch.compile(block, backend=backend)
    hidden = torch.randn(2, 256, 512, dtype=torch.bfloat16, requires_grad=True)
    _, saved = saved_bytes(lambda: compiled(hidden, turns), [*block.parameters(), turns])
    work = block_work(SHAPE, False, ParallelDegrees(), TOKENS, TORCHTITAN)
    assert saved == pytest.approx(work.saved, rel=2e-3)


@pytest.mark.parametrize("implementation", [TORCHTITAN, TRANSFORMERS])
def test_a_gathered_input_is_kept_and_not_gathered_again(implementation: Implementation) -> None:
    one, four = (
        block_work(SHAPE, False, ParallelDegrees(tensor=tensor), TOKENS, implementation) for tensor in (1, 4)
    )
    hidden = 2 * 2 * 256 * 512
    # The inputs of the projections and of the matrices up are whole; all else is a quarter.
    assert four.saved == pytest.approx((one.saved - 2 * hidden) / 4 + 2 * hidden)
    gathers = [
        sum(k == Collective("all_gather", hidden, "tensor") for k in own)
        for own in (four.forward, four.backward)
    ]
    assert gathers == [2, 2]
    again = block_work(SHAPE, False, ParallelDegrees(tensor=4), TOKENS, MEGATRON).backward
    assert sum(k == Collective("all_gather", hidden, "tensor") for k in again) == 4


def test_selective_recomputation_of_torchtitan_keeps_every_second_product() -> None:
    work = block_work(SHAPE, False, ParallelDegrees(), TOKENS, TORCHTITAN)
    count = 512
    products = [(k.k, k.n) for k in work.selective if isinstance(k, Matmul)]
    assert products == [(512, 512), (512, 1536)]  # wo and w3: the second and the fourth of five
    kept = 2 * count * (512 + 768 + 512 + 1536 + 512) + 4 * count * 8
    assert work.saved - work.selective_saved == kept


@pytest.mark.parametrize(
    ("implementation", "recompute", "degrees", "predictors", "says"),
    [
        (TRANSFORMERS, "selective", ParallelDegrees(), 0, "transformers has none, full"),
        (TORCHTITAN, "none", ParallelDegrees(data=2, zero=1), 0, "spreads gradients"),
        (TORCHTITAN, "none", ParallelDegrees(context=2, exchange="ring", zero=3), 0, "has all-gather"),
        (
            TORCHTITAN,
            "none",
            ParallelDegrees(pipeline=2, data=2, zero=3),
            0,
            "no weights of 1 virtual stages",
        ),
        (TORCHTITAN, "none", ParallelDegrees(), 1, "no predictors"),
        (MEGATRON, "none", ParallelDegrees(pipeline=2, data=2, zero=3), 0, "one pipeline stage"),
    ],
)
def test_what_an_implementation_does_not_have(
    implementation: Implementation,
    recompute: Recomputation,
    degrees: ParallelDegrees,
    predictors: int,
    says: str,
) -> None:
    setting = TrainingSetting(8, Tokens(4096), recompute, predictors=predictors)
    assert says in implementation.problem_with(degrees, setting)
    with pytest.raises(UsageError, match=says):
        estimate_step(LARGE, degrees, setting, replace(COSTS, implementation=implementation))


def test_devices_without_replicas_need_no_fsdp() -> None:
    titan = replace(COSTS, implementation=TORCHTITAN)
    setting = TrainingSetting(2, Tokens(4096))
    shared, alone = (
        estimate_step(LARGE, degrees, setting, titan).stages[0].ledger
        for degrees in (ParallelDegrees(tensor=2), ParallelDegrees(tensor=2, zero=0))
    )
    assert shared == alone


@pytest.mark.parametrize(
    ("virtual", "most", "gathers"), [(2, 3, 2), (4, 3, 15), (8, 3, 47), (4, 4, 4), (4, 1, None)]
)
def test_gathers_are_those_of_torch(virtual: int, most: int, gathers: int | None) -> None:
    """Two ranks and eight micro-batches; the numbers are torch 2.14's."""
    kinds = {
        "F": torch_schedules._ComputationType.FORWARD,
        "B": torch_schedules._ComputationType.FULL_BACKWARD,
    }
    for device in range(2):
        actions = device_actions(device, 2, 8, virtual)
        theirs = torch_schedules._add_unshard_reshard(
            [torch_schedules._Action(own.chunk, kinds[own.kind], own.micro_batch) for own in actions], most
        )
        lists, active, fetched = [], set[int](), []
        for own in theirs:
            if own.computation_type == torch_schedules.UNSHARD:
                fetched.append(own.stage_index)
                active.add(own.stage_index)
            elif own.computation_type == torch_schedules.RESHARD:
                active.discard(own.stage_index)
            else:
                lists.append((sorted(fetched), sorted(active)))
                fetched = []
        ours = list_unshards(actions, most)
        assert [(sorted(new), sorted(all_)) for new, all_ in ours] == lists
        if gathers is not None and device == 0:
            assert sum(len(new) for new, _ in ours) == gathers


def _costs(seconds: float, most: int) -> Costs:
    ones = torch.ones(2, 4, 1).double().numpy()
    return Costs(forward=ones, backward=2 * ones, unshard=seconds * ones[..., 0], unsharded_chunks=most)


def test_actions_wait_for_their_gathers() -> None:
    program = find_schedule("interleaved").program(2, 8, 4)
    plain = simulate(program, replace(_costs(0.0, 4), unshard=None)).step_seconds
    assert simulate(program, _costs(0.0, 1)).step_seconds == plain
    # All gathered at once: the first is not hidden, the others are.
    assert simulate(program, _costs(0.5, 4)).step_seconds == plain + 0.5
    steps = [simulate(program, _costs(0.5, most)).step_seconds for most in (4, 3, 2, 1)]
    assert steps == sorted(steps)
    # One at a time: none is hidden, as it begins when the action before ends.
    for device in range(2):
        count = sum(len(own) for own, _ in list_unshards(program.actions[device], 1))
        assert steps[-1] >= 8 * 4 * 3 + 0.5 * count


def test_the_ledger_of_fsdp_in_a_pipeline() -> None:
    titan = replace(COSTS, implementation=TORCHTITAN)
    setting = TrainingSetting(8, Tokens(4096), virtual_stages=4)
    shared = ParallelDegrees(pipeline=2, data=8)
    counts = (1, 1, 1, 1, 1, 1, 0, 0)
    tables = {
        zero: LayerTable(LARGE, replace(shared, zero=zero, max_param_unsharded_stages=most), setting, titan)
        for zero, most in ((1, 4), (2, 4), (3, 3))
    }
    ranges = block_ranges(counts)
    for device in range(2):
        ledgers = {zero: own.ledger(own.own_blocks(ranges, device), device) for zero, own in tables.items()}
        parameters = [sum(tables[3].parameters(ranges[slot], slot)) for slot in range(device, len(counts), 2)]
        assert ledgers[1]["weights"] == ledgers[2]["weights"] == 2 * sum(parameters)
        assert ledgers[3]["weights"] == 2 * (sum(parameters) - min(parameters))
        assert ledgers[1]["gradients"] == ledgers[3]["gradients"] == 4 * sum(parameters)
        largest = tables[2]._largest_parameters(tables[2].own_blocks(ranges, device))
        assert ledgers[2]["gradients"] == pytest.approx(4 * sum(parameters) / 8 + 6 * largest)
        assert ledgers[1]["optimizer"] == ledgers[3]["optimizer"] == pytest.approx(12 * sum(parameters) / 8)


def test_gathers_are_in_the_step() -> None:
    """The pipeline with them is no faster, and the update gathers nothing."""
    titan = replace(COSTS, implementation=TORCHTITAN)
    setting = TrainingSetting(8, Tokens(4096), virtual_stages=4)
    degrees = ParallelDegrees(pipeline=2, data=4, zero=3)
    counts = [1, 1, 1, 1, 1, 1, 0, 0]
    sharded = estimate_step(LARGE, degrees, setting, titan, counts)
    kept = estimate_step(
        LARGE, replace(degrees, zero=1, max_param_unsharded_stages=4), setting, titan, counts
    )
    assert sharded.pipeline_seconds > kept.pipeline_seconds
    assert sharded.update_seconds < kept.update_seconds
    layers = LayerTable(LARGE, degrees, setting, titan)
    ranges = block_ranges(counts)
    own = [layers.seconds(blocks, slot) for slot, blocks in enumerate(ranges)]
    transfers = [layers.transfer_seconds(slot) for slot in range(7)]
    gathers = layers.gather_seconds(ranges)
    assert min(gathers[:6]) > 0
    assert sharded.pipeline_seconds == pipeline_seconds(own, transfers, 8, 4, gathers, 3)


def divisions(blocks: int, slots: int) -> list[tuple[int, ...]]:
    """With at least one block on all stages but the first and the last."""
    if slots == 1:
        return [(blocks,)]
    return [
        (own, *rest)
        for own in range(blocks + 1)
        for rest in divisions(blocks - own, slots - 1)
        if slots == 1 or all(rest[:-1])
    ]


@pytest.mark.parametrize("share", [1.0, 0.93])
def test_no_division_is_below_the_bound_of_a_search(share: float) -> None:
    """With all memory, and with less than the fastest needs: every division is estimated."""
    from pplan.planner.degrees.degree_options import DegreeOptions
    from pplan.planner.degrees.degree_search import search_degrees

    titan = replace(COSTS, implementation=TORCHTITAN)
    shape: TransformerShape = LARGE.with_blocks(9)
    options = DegreeOptions(
        implementation="torchtitan",
        mini_batch=16,
        pp=(2,),
        tp=(1,),
        virtual_stages=(4,),
        micro_batch_size=(1,),
        recompute="never",
    )
    degrees = ParallelDegrees(pipeline=2, data=4, zero=3)
    setting = TrainingSetting(4, Tokens(4096), virtual_stages=4)
    layers = LayerTable(shape, degrees, setting, titan)
    every = [own for own in divisions(9, 8) if len(own) == 8]
    estimates = {own: estimate_step(shape, degrees, setting, titan, own) for own in every}
    limit = share * min(estimates.values(), key=lambda own: own.step_seconds).peak_bytes
    fitting = [own for own in estimates.values() if own.peak_bytes <= limit]
    answer = search_degrees(shape, 8, titan, options, limit)
    best = answer.plans[0]
    assert best.degrees.zero == 3
    assert best.estimate.peak_bytes <= limit
    assert layers.peak_bytes(best.blocks) <= limit
    fastest = min(own.step_seconds for own in fitting)
    assert answer.bound_seconds <= fastest * (1 + 1e-9)
    assert best.estimate.step_seconds == pytest.approx(fastest, rel=0.02)
