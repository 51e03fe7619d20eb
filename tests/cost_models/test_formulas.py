"""Single lines of the cost models against the same worked out by hand: `benchmarks/mutation.py` found that no
other quick test tells them from their opposites."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.arguments import Option, settings, slow_devices
from pplan.cost_models.errors import UsageError
from pplan.cost_models.quantities import format_rate
from pplan.cost_models.schedule_text import read_schedule
from pplan.cost_models.text_files import write_whole
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.attention_kernels import _attention_kernel
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import KernelTable, Matmul
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.model_families import FAMILIES
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting, even_blocks
from pplan.cost_models.transformer.training_step import estimate_step

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 100,
}


def test_whole_numbers_are_read_and_other_values_stay() -> None:
    value = Option(lambda *_: None, least=1).value
    assert value("3", "--n") == 3
    with pytest.raises(UsageError):
        value("0", "--n")
    assert Option(lambda *_: None).value("3", "--n") == "3"


@pytest.mark.parametrize(("source", "told"), [("", "the user's own"), ("source: a paper\n", "a paper")])
def test_where_an_order_comes_from(source: str, told: str) -> None:
    assert read_schedule(f"name: mine\n{source}device i: (F B)*m\n").schedule.source == told


@pytest.mark.skipif(sys.platform == "win32", reason="has no such permissions")
def test_a_file_may_be_read_by_whom_the_user_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a.txt", "a", force=False)
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_devices_share_the_heads_of_attention() -> None:
    shape = transformer_shape({"model_type": "llama", **SIZES})
    kernel = _attention_kernel(shape, 16, Tokens(16), 2, False)
    assert (kernel.heads, kernel.key_value_heads) == (4, 2)


def test_all_experts_may_take_every_token() -> None:
    keys = {"model_type": "mixtral", **SIZES, "num_local_experts": 4}
    experts = transformer_shape(keys | {"num_experts_per_tok": 4}).experts
    assert experts is not None
    assert experts.per_token == experts.number == 4
    with pytest.raises(UsageError, match="num_experts_per_tok=5: there are 4 experts"):
        transformer_shape(keys | {"num_experts_per_tok": 5})


@pytest.mark.parametrize(
    ("family", "more", "vectors"),
    [
        # Two norms, of the heads of queries and keys one each; the last norm.
        ("gemma3_text", {"head_dim": 8}, 4 * 64 + 2 * 8 + 64),
        ("llama", {}, 2 * 64 + 64),
        # A bias of each head's query, key and value, none of the output.
        ("qwen2", {}, 2 * 64 + (8 + 2 * 4) * 8 + 64),
    ],
)
def test_vectors_of_a_model(family: str, more: dict[str, Any], vectors: int) -> None:
    """That are in no matrix: one layer of attention 64 to 64 + 2 x 32 to 64, three matrices of 64 x 96."""
    shape = transformer_shape({"model_type": family, "tie_word_embeddings": True, **SIZES, **more})
    matrices = 100 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert shape.parameters() - matrices == vectors


def test_vectors_of_a_model_of_experts() -> None:
    """As above, and a gate of the expert for all tokens; four experts of 32, one for all of 48, a router."""
    keys = SIZES | {"model_type": "qwen2_moe", "tie_word_embeddings": True, "num_experts": 4}
    keys |= {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}
    experts = 3 * 64 * (4 * 32 + 48) + 64 * 4
    matrices = 100 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + experts
    assert transformer_shape(keys).parameters() - matrices == 2 * 64 + (8 + 2 * 4) * 8 + 64 + 64


def test_the_nearer_row_of_a_table_weighs_more() -> None:
    """By one over the squares of the distances, log 1.1 and log 3.7."""
    table = KernelTable(1e12, {"matmul TN": {(64.0, 128.0, 100.0): 0.2, (64.0, 128.0, 407.0): 0.8}})
    near, far = 1 / np.log(1.1) ** 2, 1 / np.log(3.7) ** 2
    share = (0.2 * near + 0.8 * far) / (near + far)
    kernel = Matmul(64, 128, 110, "TN")
    assert table.seconds(kernel) == pytest.approx(kernel.flops / (1e12 * share))


def test_a_narrow_product_takes_as_long_as_its_bytes() -> None:
    limits = DeviceLimits(1e15, 1e9, memory_share=0.5)
    kernel = Matmul(1, 1000, 1000, "TN")
    bytes_moved = 2 * (1000 + 1000 * 1000 + 1000)
    assert limits.product_seconds(kernel) == pytest.approx(bytes_moved / 0.5e9)


def test_no_block_is_behind_the_predictors() -> None:
    setting = TrainingSetting(4, Tokens(16), predictors=1, predictor_offset=2)
    blocks = setting.even_blocks(9, 5)
    assert blocks[3:] == [0, 0]
    assert sum(blocks) == 9
    assert max(blocks[:3]) - min(blocks[:3]) <= 1


@pytest.mark.parametrize(
    ("blocks", "counts"), [(4, [1, 1, 1, 1]), (5, [1, 2, 1, 1]), (6, [1, 2, 2, 1]), (7, [2, 2, 2, 1])]
)
def test_blocks_that_are_left_over_are_not_of_the_ends(blocks: int, counts: list[int]) -> None:
    assert even_blocks(blocks, 4) == counts


def test_devices_that_take_as_long_are_not_slow() -> None:
    assert slow_devices("slow_devices", (0.1, 1.5)) == (0.1, 1.5)
    with pytest.raises(UsageError, match="must be above 1"):
        slow_devices("slow_devices", (0.1, 1.0))


@pytest.mark.slow
def test_biases_that_a_configuration_leaves_out_are_as_its_own_class_says() -> None:
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    compared = 0
    for name, family in FAMILIES.items():
        if name not in auto.CONFIG_MAPPING:
            continue
        own = auto.CONFIG_MAPPING[name]()
        for flag in vars(family).values():
            if isinstance(flag, tuple) and hasattr(own, flag[0]):
                assert bool(getattr(own, flag[0])) == flag[1], (name, flag)
                compared += 1
    assert compared > 20


@pytest.mark.parametrize(
    ("rate", "words"),
    [(999.0, "999 B/s"), (1e3, "1 kB/s"), (1e6, "1 MB/s"), (3e9, "3 GB/s")],
)
def test_rates_have_decimal_units(rate: float, words: str) -> None:
    assert format_rate(rate) == words


def test_settings_are_values_by_names() -> None:
    assert settings("settings", {"depth": 24}) == {"depth": 24}
    for wrong in (["depth"], {1: 2}):
        with pytest.raises(UsageError, match="values by their names"):
            settings("settings", wrong)


def small_layers(micro_batches: int = 2, virtual: int = 1) -> LayerTable:
    """Two blocks on two stages of a device."""
    keys = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
    shape = transformer_shape({**keys, "num_hidden_layers": 2, "vocab_size": 96})
    topology = two_level_topology(Device("GPU", None), 2, 2, Link(1e9, 0.0), Link(1e9, 0.0))
    costs = RankCosts(DeviceLimits(1e12, 1e11), TopologyLinks(topology))
    setting = TrainingSetting(micro_batches, Tokens(8), virtual_stages=virtual)
    return LayerTable(shape, ParallelDegrees(pipeline=2), setting, costs)


def test_a_stage_without_predictors_has_nothing_of_theirs() -> None:
    """Nothing but the head, which is no shape of a block's weights."""
    layers = small_layers()
    assert layers.ledger((range(0),), 1)["placeholders"] == 0
    assert layers.ledger((range(2),), 0)["placeholders"] > 0


def test_a_stage_may_be_without_blocks() -> None:
    layers = small_layers()
    own = layers.shape, layers.degrees, layers.setting, layers.costs
    first, last = (estimate_step(*own, blocks=blocks).stages for blocks in ([0, 2], [2, 0]))
    assert [len(stage.blocks[0]) for stage in (*first, *last)] == [0, 2, 2, 0]
    for blocks in ([-1, 3], [1, 2], [2], [1, 1, 0]):
        with pytest.raises(UsageError, match="not 2 stages of 2 blocks"):
            estimate_step(*own, blocks=blocks)
    assert [small_layers(virtual=virtual).setting.schedule for virtual in (1, 2)] == ["1f1b", "interleaved"]
