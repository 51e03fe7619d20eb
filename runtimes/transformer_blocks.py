"""Which layers of a model are its transformer blocks, told by their names, and the blocks that run again.

Megatron-LM, torchtitan and NeMo place whole blocks of a transformer, with the embedding before the first and
the head after the last. A plan knows its layers by the names of their modules.

`--recompute-granularity full --recompute-method block --recompute-num-layers N` of Megatron-LM runs the first
N transformer blocks of every (virtual) stage again, each by itself, or all where it has fewer: N is one
number for all stages, and the embedding is never among them (megatron-core 0.16.1,
`transformer/transformer_block.py`, `_checkpointed_forward`). A plan runs the first layers of a stage again as
one checkpoint, a number for each.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..cost_models.errors import ExportError
from ..cost_models.memory import count_first_layers, first_layers_word
from ..planner.plan_file import Plan

_BLOCK = re.compile(r"(?P<list>(?:.*?\.)?(?:layers|layer|h|blocks|block))\.(?P<number>\d{1,18})(?:\.|$)")
"""The outermost list of blocks on the way to a layer, under the names that transformers give it."""
_SMALL = re.compile(r"norm|^ln_|drop|slice|getitem|identity", re.IGNORECASE)
"""Last parts of the names of layers before a head that take next to no time."""
EMBEDDINGS = frozenset({"embed_tokens", "tok_embeddings", "wte", "embed_in", "word_embeddings"})
"""Last parts of the names that token embeddings go by."""


class NotBlocksError(ValueError):
    """Why the layers are not those of one stack of transformer blocks."""


@dataclass(frozen=True)
class Transformer:
    """The layers of a transformer: those of its embedding, its blocks, and those of its head.

    `list_name` is the module that holds the blocks, such as "model.layers". `ends` are, for the embedding
    and for each block, the layers before its end: the head begins at the last.
    """

    names: tuple[str, ...]
    list_name: str
    ends: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.ends) - 1

    @property
    def embedding(self) -> tuple[str, ...]:
        """The names of the layers before the first block."""
        return self.names[: self.ends[0]]

    @property
    def head(self) -> tuple[str, ...]:
        """The names of the layers after the last block."""
        return self.names[self.ends[-1] :]

    def keeps_whole(self, end: int) -> bool:
        """Whether a cut before layer `end` leaves the embedding and every block whole."""
        return end in self.ends or end > self.ends[-1] or end == 0

    def blocks_before(self, end: int) -> int:
        """The number of blocks that end before layer `end`."""
        return max(bisect_right(self.ends, end) - 1, 0)


def find_blocks(names: Sequence[str]) -> Transformer:
    """The transformer whose layers have these names, in order. Raises NotBlocksError."""
    if not names:
        raise NotBlocksError("the names of the layers are not known")
    matches = [_BLOCK.match(name) for name in names]
    inside = [layer for layer, match in enumerate(matches) if match]
    lists = dict.fromkeys(match["list"] for match in matches if match)
    if not lists:
        raise NotBlocksError(
            f"no layer has the name of a transformer's block, such as model.layers.0 (they are {names[0]} "
            f"to {names[-1]})"
        )
    if len(lists) > 1:
        raise NotBlocksError(f"there are blocks in {' and in '.join(lists)}")
    ends = _ends(names, matches[: inside[-1] + 1], inside[0])
    return Transformer(tuple(names), next(iter(lists)), ends)


def blocks_or_none(names: Sequence[str]) -> Transformer | None:
    """The transformer whose layers have these names, in order; None where they are no transformer's."""
    try:
        return find_blocks(names)
    except NotBlocksError:
        return None


def _ends(names: Sequence[str], matches: Sequence[re.Match[str] | None], first: int) -> tuple[int, ...]:
    """The layers before the end of the embedding and of each block. `matches` goes up to the last block."""
    ends, blocks_so_far = [first], 0
    for layer, match in enumerate(matches[first:], start=first):
        if match is None:
            raise NotBlocksError(f"layer {layer}, {names[layer]}, stands between the blocks")
        number = int(match["number"])
        if number not in (blocks_so_far - 1, blocks_so_far):
            raise NotBlocksError(f"{names[layer]} comes where block {blocks_so_far} should")
        if number == blocks_so_far:
            ends += [layer] * (blocks_so_far > 0)
            blocks_so_far += 1
    return (*ends, len(matches))


def find_plan_blocks(plan: Plan, runtime: str) -> Transformer:
    """The transformer of a plan. Raises ExportError where it is none: `runtime` builds transformers only."""
    try:
        return find_blocks(plan.layer_names)
    except NotBlocksError as error:
        raise ExportError(
            f"{runtime} places whole transformer blocks; in the plan of {plan.model} {error}",
            _profile_again(plan, "LIST"),
        ) from error


def check_whole_blocks(plan: Plan, model: Transformer, ends: Sequence[int], runtime: str) -> None:
    """Raises ExportError where a stage ends inside the embedding or inside a block."""
    for stage, end in enumerate(ends[:-1]):
        if not model.keeps_whole(end):
            part = "the embedding" if end < model.ends[0] else f"block {model.blocks_before(end)}"
            raise ExportError(
                f"stage {stage} ends after layer {end - 1}, {model.names[end - 1]}, inside {part}: {runtime} "
                "places whole transformer blocks",
                _profile_again(plan, model.list_name),
            )


def ends_remark(model: Transformer, runtime: str) -> str | None:
    """A sentence where the plan's layers have no embedding or no head, which the trainer's model has."""
    layers = {"embedding": model.embedding, "head": model.head}
    if missing := [f"no {name}" for name, own in layers.items() if not own]:
        return (
            f"The plan's layers have {' and '.join(missing)}: those of {runtime}'s model are not in the "
            "prediction."
        )
    return None


def _profile_again(plan: Plan, list_name: str) -> str:
    return (
        f"Measure whole blocks: pplan.profile({plan.model!r}, granularity='module:{list_name}.*'), and "
        "make the plan again: pplan solve"
    )


def is_small(name: str) -> bool:
    """Whether a layer of that name takes next to no time beside a head: a norm, a dropout, a slice."""
    return _SMALL.search(name.rpartition(".")[2]) is not None


class FirstBlocksError(ValueError):
    """Why no number of first blocks says what the stages recompute: a clause."""


def count_first_blocks(model: Transformer, ends: Sequence[int], words: Sequence[str]) -> int:
    """The N of stages with these `ends` that recompute by these words, which is 1 or more.

    Raises FirstBlocksError where a stage stops inside a block, or no N is that of all stages.

    >>> from pplan.runtimes.transformer_blocks import find_blocks
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

    >>> from pplan.runtimes.transformer_blocks import find_blocks
    >>> first_block_words(find_blocks(["embedding", "layers.0", "layers.1", "head"]), (3, 4), 1)
    ('first_2', 'never')
    """
    words = []
    for first, end in pairwise((0, *ends)):
        before, holds = model.blocks_before(first), model.blocks_before(end) - model.blocks_before(first)
        again = model.ends[before + min(number, holds)] - first if holds else 0
        words.append("never" if not again else "always" if again == end - first else first_layers_word(again))
    return tuple(words)


def is_decoder(model: Transformer) -> bool:
    """Whether it begins with a token embedding and ends with a head of its own: as Llama does."""
    names = [name.rpartition(".")[2] for name in model.embedding]
    return len(names) == 1 and names[0] in EMBEDDINGS and bool(model.head)
