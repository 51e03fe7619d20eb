"""Transformer blocks told by names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.cost_models.layer import Chain
from pplan.planner.planners.rules import repeated_blocks

MakeNamed = Callable[..., Chain]


@pytest.mark.parametrize(
    ("names", "stem", "starts"),
    [
        (["wte", "h.0", "h.1", "h.2", "ln_f"], "h.", (1, 2, 3, 4)),
        (["transformer.h.0.attn", "gelu", "transformer.h.1.attn"], "transformer.h.", (0, 2, 3)),
        (["bert.encoder.layer.0.attention", "bert.encoder.layer.0.gelu", "bert.encoder.layer.1"],
         "bert.encoder.layer.", (0, 2, 3)),
        (["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_0_1",
          "encoder.layers.encoder_layer_1", "encoder.layers.encoder_layer_1_1", "encoder.ln"],
         "encoder.layers.encoder_layer_", (0, 2, 4)),
        (["blocks.7", "blocks.8", "blocks.9", "blocks.10"], "blocks.", (0, 1, 2, 3, 4)),
        (["enc.block.0", "enc.block.1", "dec.block.0", "dec.block.1", "dec.block.2"], "dec.block.",
         (2, 3, 4, 5)),
        (["h.0.layers.0", "h.0.layers.1", "h.1.layers.0", "h.1.layers.1", "h.2.layers.0", "h.2.layers.1"],
         "h.", (0, 2, 4, 6)),
    ],
)  # fmt: skip
def test_blocks_are_numbered_layers(
    make_named: MakeNamed, names: list[str], stem: str, starts: tuple[int, ...]
) -> None:
    parameters = [0.0 if "gelu" in name else 1.0 for name in names]
    blocks = repeated_blocks(make_named(names, parameters))
    assert blocks is not None
    assert (blocks.stem, blocks.starts) == (stem, starts)


@pytest.mark.parametrize(
    ("names", "parameters"),
    [
        (["features.0", "features.1", "features.2"], [1, 1, 1]),
        (["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1"], [1, 1, 4, 4, 9, 9]),
        (["layers.0", "layers.1", "layers.2"], [0, 0, 0]),
        (["layers.0", "head"], [1, 1]),
        (["layers.0", "layers.2", "layers.4"], [1, 1, 1]),
        (["patch.3", "search.4"], [1, 1]),
    ],
)
def test_other_numbers_are_no_blocks(
    make_named: MakeNamed, names: list[str], parameters: list[float]
) -> None:
    assert repeated_blocks(make_named(names, parameters)) is None


def test_most_blocks_must_have_as_many_parameters(make_named: MakeNamed) -> None:
    names = [f"layers.{i}" for i in range(4)]
    blocks = repeated_blocks(make_named(names, [5, 2, 2, 2]))
    assert blocks is not None
    assert len(blocks) == 4
    assert repeated_blocks(make_named(names, [5, 5, 2, 2])) is None
