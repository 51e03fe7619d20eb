"""The blocks of a transformer, told by the names that real profiles give their layers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.runtimes.transformer_blocks import NotBlocksError, find_blocks, is_small


def test_a_decoder(decoder: Callable[[int], list[str]]) -> None:
    model = find_blocks(decoder(3))
    assert (model.list_name, model.ends, model.blocks) == ("model.layers", (1, 2, 3, 4), 3)
    assert (model.embedding, model.head) == (("model.embed_tokens",), ("model.norm", "lm_head"))
    assert [model.blocks_before(end) for end in range(7)] == [0, 0, 1, 2, 3, 3, 3]
    assert all(model.keeps_whole(end) for end in range(7))


def test_layers_finer_than_blocks() -> None:
    """As `--granularity fine` cuts: modules and operations inside a block are the block's."""
    inner = [f"transformer.h.{n}.{part}" for n in range(2) for part in ("ln_1", "attn.c_attn", "add_4")]
    model = find_blocks(["transformer.wte", "transformer.drop", *inner, "transformer.ln_f", "slice", "head"])
    assert (model.list_name, model.ends) == ("transformer.h", (2, 5, 8))
    assert [end for end in range(1, 12) if not model.keeps_whole(end)] == [1, 3, 4, 6, 7]


def test_lists_inside_blocks_are_the_blocks() -> None:
    names = [f"encoder.layer.{n}.experts.layers.{m}" for n in range(2) for m in range(2)]
    assert find_blocks(names).ends == (0, 2, 4)


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "the names of the layers are not known"),
        (["features.0", "features.1", "classifier"], "no layer has the name of a transformer's block"),
        (["layer1.0.conv1", "layer2.0.conv1"], "no layer has the name"),
        (["encoder.block.0", "decoder.block.0"], "blocks in encoder.block and in decoder.block"),
        (["layers.0", "mix", "layers.1"], "layer 1, mix, stands between the blocks"),
        (["embed", "layers", "layers.1"], "layers.1 comes where block 0 should"),
        (["layers.0", "layers.2"], "layers.2 comes where block 1 should"),
        (["layers.1", "layers.0"], "layers.1 comes where block 0 should"),
        (["layers.0", "layers.1", "layers.0.again"], "layers.0.again comes where block 2 should"),
    ],
)
def test_no_stack_of_blocks(names: list[str], why: str) -> None:
    with pytest.raises(NotBlocksError, match=why):
        find_blocks(names)


def test_what_is_small_beside_a_head() -> None:
    assert all(map(is_small, ["model.norm", "transformer.ln_f", "decoder.dropout", "slice_9"]))
    assert not any(map(is_small, ["lm_head", "cls", "pooler.dense", "normalizer.proj"]))
