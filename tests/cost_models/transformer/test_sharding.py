"""Parameters of a device, against what DTensor leaves it of models of transformers on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pplan.cost_models.hardware import Device, Link
from pplan.cost_models.topology import two_level_topology
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
DEVICES = 4
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 160,
    "vocab_size": 128 * DEVICES,
    "head_dim": 8,
}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of processes that there are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=DEVICES)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (DEVICES,), mesh_dim_names=("tp",))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen2", {}), ("starcoder2", {})],
)
def test_a_device_has_as_many_parameters_as_dtensor_leaves_it(
    family: str, more: dict[str, Any], mesh: Any
) -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    config = transformers.CONFIG_MAPPING[family](**SIZES, **more, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    split = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {f"model.{name}": split[style]() for name, style in config.base_model_tp_plan.items()}
    plan |= {"model.embed_tokens": RowwiseParallel(), "lm_head": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    own = [each.to_local() if isinstance(each, DTensor) else each for each in model.parameters()]

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
    assert parameters.dense == sum(each.numel() for each in own)
    assert layers.ledger((range(shape.blocks),), 0)["weights"] == 2 * parameters.dense
