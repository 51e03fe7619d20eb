"""FLOPs against torch's counter on transformers' models, and what the ranks share against the whole."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.transformer.block_kernels import block_work, embedding_work, head_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import AttentionKernel, Collective, GroupedMatmul, Matmul
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees, padded_vocabulary
from pplan.cost_models.transformer.transformer_shape import TransformerShape

SEQUENCE = 64
LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SHAPES = {"llama": transformer_shape(LLAMA), "deepseek": transformer_shape(DEEPSEEK)}
TOKENS = Tokens(SEQUENCE)


def products(
    shape: TransformerShape, routed: bool, degrees: ParallelDegrees, tokens: Tokens = TOKENS
) -> dict[str, float]:
    """FLOPs of forward and backward, those of attention apart."""
    work = block_work(shape, routed, degrees, tokens)
    counts = {"forward": 0.0, "backward": 0.0, "attention": 0.0}
    for name, kernels in (("forward", work.forward), ("backward", work.backward)):
        for kernel in kernels:
            if isinstance(kernel, AttentionKernel):
                counts["attention"] += kernel.flops
            elif isinstance(kernel, Matmul | GroupedMatmul):
                counts[name] += kernel.flops
    return counts


@pytest.mark.slow
def test_flops_of_a_llama_as_torch_counts_them() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from torch.utils.flop_counter import FlopCounterMode

    config = transformers.AutoConfig.for_model(**LLAMA, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, SEQUENCE, dtype=torch.long), use_cache=False)
    shape, one = SHAPES["llama"], ParallelDegrees()
    block = products(shape, routed=False, degrees=one)
    attention = next(
        k for k in block_work(shape, False, one, TOKENS).forward if isinstance(k, AttentionKernel)
    )
    head = next(k for k in head_work(shape, one, TOKENS).forward if isinstance(k, Matmul))
    # Torch counts the whole square of attention, and pplan the half below the diagonal. Rotary positions are
    # an
    # outer product of a few numbers.
    own = 2 * (block["forward"] + 2 * attention.flops) + head.flops
    assert own == pytest.approx(counter.get_total_flops(), rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("routed", [False, True])
def test_a_backward_is_two_forwards(name: str, routed: bool) -> None:
    counts = products(SHAPES[name], routed, ParallelDegrees())
    assert counts["backward"] == 2 * counts["forward"]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(
    "degrees",
    [
        ParallelDegrees(tensor=2),
        ParallelDegrees(tensor=4),
        ParallelDegrees(context=2),
        ParallelDegrees(tensor=2, context=2),
    ],
)
@pytest.mark.parametrize("routed", [False, True])
def test_the_ranks_together_compute_what_one_would(name: str, routed: bool, degrees: ParallelDegrees) -> None:
    shape = SHAPES[name]
    ranks = degrees.tensor * degrees.context
    whole, share = (products(shape, routed, each) for each in (ParallelDegrees(), degrees))
    for part in ("forward", "backward", "attention"):
        assert ranks * share[part] == pytest.approx(whole[part])


@pytest.mark.parametrize("expert", [1, 2, 4, 8])
def test_experts_are_shared(expert: int) -> None:
    """Each of the expert-parallel devices has its own tokens, and a share of the experts."""
    degrees = ParallelDegrees(data=8, expert=expert)
    work = block_work(SHAPES["deepseek"], True, degrees, TOKENS)
    grouped = [kernel for kernel in work.forward if isinstance(kernel, GroupedMatmul)]
    rows = SEQUENCE * 2  # two experts a token
    for kernel in grouped:
        assert kernel.groups == 8 // expert
        assert kernel.groups * kernel.m == rows
    sent = [kernel for kernel in work.forward if isinstance(kernel, Collective)]
    assert [kernel.name for kernel in sent] == (["all_to_all"] * 2 if expert > 1 else [])
    assert all(kernel.bytes == 2 * rows * 256 for kernel in sent)


def test_collectives_of_tensor_parallelism() -> None:
    """Megatron-LM's sequence parallelism: two all-gathers and two reduce-scatters of the activations in
    forward; in backward these the other way round, and the inputs are gathered once more for the weights'
    gradients (Korthikanti et al. 2023, section 4.2.2)."""
    work = block_work(SHAPES["llama"], False, ParallelDegrees(tensor=4), TOKENS)
    whole = 2 * SEQUENCE * 256
    for kernels, gathers, scatters in ((work.forward, 2, 2), (work.backward, 4, 2)):
        own = [kernel for kernel in kernels if isinstance(kernel, Collective)]
        assert all(kernel.bytes == whole and kernel.group == "tensor" for kernel in own)
        assert sum(kernel.name == "all_gather" for kernel in own) == gathers
        assert sum(kernel.name == "reduce_scatter" for kernel in own) == scatters


def test_saved_bytes_of_a_layer() -> None:
    """The published formula for a layer with flash attention, adapted: no dropout masks, SwiGLU for GeLU, the
    input of each matrix once (Korthikanti et al. 2023, section 4.1)."""
    shape = SHAPES["llama"]
    s, h, f, heads = SEQUENCE, 256, 512, 8
    query_key_value = 2 * s * (h + 2 * h // 2)
    formula = 4 * 2 * s * h + query_key_value + 2 * s * h + 4 * s * heads + 3 * 2 * s * f
    assert block_work(shape, False, ParallelDegrees(), TOKENS).saved == formula
    assert block_work(shape, False, ParallelDegrees(tensor=4), TOKENS).saved == formula / 4
    assert block_work(shape, False, ParallelDegrees(), Tokens(SEQUENCE, 3)).saved == 3 * formula


@pytest.mark.parametrize(("tensor", "rows"), [(1, 128256), (2, 128256), (4, 128512), (8, 129024)])
def test_the_vocabulary_is_padded_as_megatron_does(tensor: int, rows: int) -> None:
    shape = transformer_shape({**LLAMA, "vocab_size": 128256})
    assert padded_vocabulary(shape, tensor) == rows
    kernel = next(
        k for k in head_work(shape, ParallelDegrees(tensor=tensor), TOKENS).forward if isinstance(k, Matmul)
    )
    assert kernel.n == rows // tensor


def test_an_embedding_computes_nothing() -> None:
    work = embedding_work(SHAPES["llama"], ParallelDegrees(tensor=2), TOKENS)
    assert not [kernel for kernel in work.forward if isinstance(kernel, Matmul)]


@pytest.mark.parametrize(
    ("degrees", "says"),
    [
        (ParallelDegrees(tensor=3), "8 heads"),
        (ParallelDegrees(tensor=8), "4 of keys"),
        (ParallelDegrees(context=8), "4 of keys"),
        (ParallelDegrees(expert=2), "no experts"),
    ],
)
def test_what_cannot_be_shared(degrees: ParallelDegrees, says: str) -> None:
    assert says in degrees.problem_with(SHAPES["llama"], SEQUENCE)


def test_what_experts_cannot_be_shared_by() -> None:
    shape: Any = SHAPES["deepseek"]
    assert "8 experts" in ParallelDegrees(expert=3, data=3).problem_with(shape, SEQUENCE)
    assert "does not divide" in ParallelDegrees(expert=8, data=4).problem_with(shape, SEQUENCE)
    assert "multiple" in ParallelDegrees(tensor=4).problem_with(shape, 66)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_head_by_hand(shape: TransformerShape, tensor: int) -> None:
    """Forward one product of 2 n h v FLOPs, backward two; both read and write the logits once more."""
    degrees = ParallelDegrees(tensor=tensor)
    work = head_work(shape, degrees, TOKENS)
    rows = padded_vocabulary(shape, tensor) // tensor
    flops = 2 * SEQUENCE * shape.hidden * rows
    for kernels, products in ((work.forward, 1), (work.backward, 2)):
        own = [kernel.flops for kernel in kernels if isinstance(kernel, Matmul)]
        assert own == [flops] * products
        fusions = [kernel for kernel in kernels if getattr(kernel, "kind", "") == "ce_fusion"]
        assert [kernel.bytes for kernel in fusions] == [2 * 2 * SEQUENCE * rows]  # type: ignore[union-attr]
