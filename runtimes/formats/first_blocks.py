"""The first blocks of every stage that run again, as Megatron-LM counts them.

`--recompute-granularity full --recompute-method block --recompute-num-layers N` runs the first N transformer
blocks of every (virtual) stage again, each by itself, or all where it has fewer: N is one number for all
stages, and the embedding is never among them (megatron-core 0.16.1, `transformer/transformer_block.py`,
`_checkpointed_forward`). A plan runs the first layers of a stage again as one checkpoint, a number for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...cost_models.first_layers import count_first_layers, first_layers_word
from .transformer_blocks import Transformer


class FirstBlocksError(ValueError):
    """Why no number of first blocks says what the stages recompute: a clause."""


def count_first_blocks(model: Transformer, ends: Sequence[int], words: Sequence[str]) -> int:
    """The N of stages with these `ends` that recompute by these words, which is 1 or more.

    Raises FirstBlocksError where a stage stops inside a block, or no N is that of all stages.

    >>> from pplan.runtimes.formats.transformer_blocks import find_blocks
    >>> model = find_blocks(["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"])
    >>> count_first_blocks(model, (3, 6), ("first_2", "first_1"))
    1
    """
    least, most, counts = 1, model.blocks, list[int]()
    for stage, ((first, end), word) in enumerate(zip(pairwise((0, *ends)), words, strict=True)):
        again = {"never": 0, "always": end - first}.get(word, count_first_layers(word) or 0)
        if not (model.keeps_whole(first + again) or again == 0):
            raise FirstBlocksError(
                f"its stage {stage} runs its first {again} layers again, which end inside a block"
            )
        counts.append(model.blocks_before(first + again) - model.blocks_before(first))
        holds = model.blocks_before(end) - model.blocks_before(first)
        if counts[-1] < holds:
            most = min(most, counts[-1])
        least = max(least, counts[-1])
    if least > most:
        raise FirstBlocksError(f"its stages run {', '.join(map(str, counts))} first blocks again")
    return least


def first_block_words(model: Transformer, ends: Sequence[int], number: int) -> tuple[str, ...]:
    """By stage, what a plan recomputes whose stages run their first blocks again, at the most `number` of
    them; layers before the first block of a stage are among them.

    >>> from pplan.runtimes.formats.transformer_blocks import find_blocks
    >>> first_block_words(find_blocks(["embedding", "layers.0", "layers.1", "head"]), (3, 4), 1)
    ('first_2', 'never')
    """
    words = []
    for first, end in pairwise((0, *ends)):
        before, holds = model.blocks_before(first), model.blocks_before(end) - model.blocks_before(first)
        again = model.ends[before + min(number, holds)] - first if holds else 0
        words.append("never" if not again else "always" if again == end - first else first_layers_word(again))
    return tuple(words)
