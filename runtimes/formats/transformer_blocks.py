"""Which layers of a model are its transformer blocks, told by their names.

Megatron-LM, torchtitan and NeMo place whole blocks of a transformer, with the embedding before the first and
the head after the last. A plan knows its layers by the names of their modules.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ...cost_models.errors import ExportError
from ...planner.plan_file import Plan

_BLOCK = re.compile(r"(?P<list>(?:.*?\.)?(?:layers|layer|h|blocks|block))\.(?P<number>\d{1,18})(?:\.|$)")
"""The outermost list of blocks on the way to a layer, under the names that transformers give it."""
_SMALL = re.compile(r"norm|^ln_|drop|slice|getitem|identity", re.IGNORECASE)
"""Last parts of the names of layers before a head that take next to no time."""


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
