"""Parameters of a device, against what DTensor leaves it of models of transformers on the meta device: of all
families, each parameter split as the name of its module says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.model_families import FAMILIES
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
DEVICES = 4
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 3 * 128 * DEVICES,
    "pad_token_id": 1,
    "tie_word_embeddings": False,
    **EXPERTS,
}
LATENT = {"moe_intermediate_size": 48, "n_group": 2, "topk_group": 1, "n_shared_experts": 2}
LATENT |= {"kv_lora_rank": 24, "q_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
LATENT |= {"v_head_dim": 12, "head_dim": 8, "num_key_value_heads": 8}
SHARED = {"moe_intermediate_size": 48, "n_shared_experts": 2, "first_k_dense_replace": 2, "head_dim": 8}
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "dots1": SHARED,
    "glm4_moe": SHARED,
    "flint": {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 48},
    "dbrx": {
        "d_model": 64, "n_heads": 8, "n_layers": 3,
        "attn_config": {"clip_qkv": 8, "rope_theta": 500000, "kv_n_heads": 4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    **{key: {"head_dim": 8} for key in ("helium", "hunyuan_v1_dense", "ministral")},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 4},
}  # fmt: skip
"""Sizes by family, where they need others."""
BIASES = ("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias", "use_qk_norm", "qk_layernorm")
HEADS_OF_ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "data2vec-text", "ernie", "megatron-bert")

COLUMNS = re.compile(
    r"(q|k|v|q_b|kv_b|qkv|gate|up|gate_up)_proj|output_projection|query(_key_value)?|key|value|Wqkv|c_attn|fc1|fc_in|c_fc"
    r"|dense_h_to_4h|[wv]1|input_linear|lm_head|embed_out|decoder"
)
ROWS = re.compile(r"(o|out|down|c)_proj|dense_4h_to_h|fc2|fc_out|w2|output_linear|dense")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """Of processes that there are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=DEVICES)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


def placement(owner: Any, name: str, kind: str) -> Any:
    """As torch's ColwiseParallel and RowwiseParallel split the weight and the bias of a linear layer, and
    Megatron-LM the table of the vocabulary. GPT-2 has its matrices the other way round."""
    from torch.distributed.tensor import Replicate, Shard

    last = name.rsplit(".", 1)[-1]
    is_turned = type(owner).__name__ == "Conv1D"
    if kind == "sinks":
        return Shard(0)
    if isinstance(owner, torch.nn.Embedding):
        return Shard(0) if owner.num_embeddings == SIZES["vocab_size"] else Replicate()
    is_up = name.endswith("intermediate.dense")
    is_of_head = (".lm_head." in f".{name}." and last == "dense") or ".transform." in name
    if ROWS.fullmatch(last) and not is_up and not is_of_head:
        return (Shard(0) if is_turned else Shard(1)) if kind == "weight" else Replicate()
    if COLUMNS.fullmatch(last) or is_up or (kind == "bias" and name.endswith(("lm_head", "predictions"))):
        return Shard(1) if is_turned and kind == "weight" else Shard(0)
    return Replicate()


def small_model(family: str, biases: bool) -> tuple[Any, Any]:
    kind = transformers.CONFIG_MAPPING[family]
    more = MORE.get(family, {})
    names = {*kind(**{"num_hidden_layers": 4, **more}).to_dict(), *kind.attribute_map}
    keys = {name: value for name, value in SIZES.items() if name in names}
    keys |= {name: biases for name in BIASES if name in names} | more
    if family in (*HEADS_OF_ENCODERS, "dbrx"):
        keys.pop("tie_word_embeddings", None)
    config = kind(**keys)
    build = transformers.AutoModelForCausalLM
    if family in HEADS_OF_ENCODERS:
        build = transformers.AutoModelForMaskedLM
    with torch.device("meta"):
        return config, build.from_config(config)


@cache
def left_to_a_device(shape: tuple[int, ...], place: Any, mesh: Any) -> int:
    """Elements of a parameter."""
    from torch.distributed.tensor import distribute_tensor

    return int(distribute_tensor(torch.empty(shape, device="meta"), mesh, [place]).to_local().numel())


def compare(family: str, biases: bool, mesh: Any) -> None:
    config, model = small_model(family, biases)
    modules, dense, routed = dict(model.named_modules()), 0, 0
    for name, each in model.named_parameters():
        path, kind = name.rsplit(".", 1)
        if re.search(r"\bexperts\b", path):
            routed += each.numel()
            continue
        dense += left_to_a_device(tuple(each.shape), placement(modules[path], path, kind), mesh)

    limits, link = DeviceLimits(1e14, 1e12), Link(1e11, 1e-6)
    topology = two_level_topology(Device("GPU", None), DEVICES, DEVICES, link, link)
    shape = transformer_shape({**config.to_dict(), "model_type": family})
    layers = LayerTable(
        shape,
        ParallelDegrees(tensor=DEVICES),
        TrainingSetting(1, Tokens(64)),
        RankCosts(limits, TopologyLinks(topology)),
    )
    parameters = layers.parameters(range(shape.blocks), 0)
    assert parameters.dense == dense
    assert parameters.routed == routed
    assert layers.ledger((range(shape.blocks),), 0)["weights"] == 2 * (dense + routed)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("family", ["llama", "phi", "deepseek_v3", "gpt2", "gemma2", "mixtral"])
def test_a_device_has_as_many_parameters_as_dtensor_leaves_it(family: str, biases: bool, mesh: Any) -> None:
    compare(family, biases, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_device_of_every_family(family: str, biases: bool, mesh: Any) -> None:
    compare(family, biases, mesh)
