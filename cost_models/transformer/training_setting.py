"""What a training step trains, and how the blocks lie over the stages of its pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from ..program import list_unshards
from ..schedules import device_actions, one_f_one_b_in_flight
from .layer_work import Tokens

Recomputation = Literal["none", "selective", "full", "offload"]


@dataclass(frozen=True)
class TrainingSetting:
    """What a step trains: `micro_batches` of `tokens` on each replica.

    `recompute` full: a block keeps its input, and runs its forward again before its backward; selective: only
    the attention itself runs again (Korthikanti et al., MLSys 2023, section 5), of which flash attention
    keeps no more than its statistics; offload: nothing runs again, what megatron-core's modules of attention
    and experts save is kept in the host's memory. `recompute_blocks`, with full: of each (virtual) stage only
    the first so many run again (Megatron-LM's `--recompute-method block`); None: all. `virtual_stages` of a
    device: above 1 the schedule is interleaved 1F1B, and the micro-batches are a multiple of the pipeline's
    stages. `predictors`: of further tokens (DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437, section 2.2), on
    the last (virtual) stage, or so many stages before it as `predictor_offset` says; no block is behind them.
    """

    micro_batches: int
    tokens: Tokens
    recompute: Recomputation = "none"
    virtual_stages: int = 1
    recompute_blocks: int | None = None
    predictors: int = 0
    predictor_offset: int = 0

    @property
    def schedule(self) -> str:
        """Its name."""
        return "1f1b" if self.virtual_stages == 1 else "interleaved"

    def recomputed(self, blocks: int) -> int:
        """Of a stage's blocks those whose whole forward runs again: its first ones."""
        if self.recompute != "full":
            return 0
        return blocks if self.recompute_blocks is None else min(self.recompute_blocks, blocks)

    def predictor_slot(self, slots: int) -> int | None:
        """Of so many (virtual) stages that with the predictors."""
        return slots - 1 - self.predictor_offset if self.predictors else None

    def block_slots(self, slots: int) -> range:
        """The (virtual) stages that may hold blocks: all up to the predictors'."""
        place = self.predictor_slot(slots)
        return range(slots if place is None else place + 1)

    def fewest_blocks(self, blocks: int, slots: int) -> tuple[int, ...]:
        """Fewest blocks of each (virtual) stage that the search allows: none on the stages of the embedding,
        the head and the predictors, and one on each stage between if the model has enough blocks."""
        ends = {0, slots - 1, self.predictor_slot(slots)}
        between = set(self.block_slots(slots)) - ends
        return tuple(int(slot in between and len(between) <= blocks) for slot in range(slots))

    def even_blocks(self, blocks: int, slots: int) -> list[int]:
        """Blocks of each (virtual) stage, as equal as can be."""
        room = len(self.block_slots(slots))
        return even_blocks(blocks, room) + [0] * (slots - room)


def even_blocks(blocks: int, stages: int) -> list[int]:
    """Blocks of each stage, as equal as can be; the first stages and then the last have those that are left
    out, since embedding and head are there."""
    base, left = divmod(blocks, stages)
    middle = sorted(range(stages), key=lambda stage: (stage in (0, stages - 1), stage))
    more = set(middle[:left])
    return [base + (stage in more) for stage in range(stages)]


def block_ranges(counts: Sequence[int]) -> list[range]:
    """The blocks of stages that follow one another."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


@lru_cache(maxsize=4096)
def chunks_unsharded(
    device: int, stages: int, micro_batches: int, virtual_stages: int, most: int
) -> frozenset[tuple[int, ...]]:
    """Sets of virtual stages of a device whose weights are gathered at the same time, of `most` at most."""
    actions = device_actions(device, stages, min(micro_batches, 4 * stages), virtual_stages)
    return frozenset(tuple(sorted(chunks)) for _, chunks in list_unshards(actions, most))


@lru_cache(maxsize=4096)
def chunks_in_flight(
    device: int, stages: int, micro_batches: int, virtual_stages: int
) -> tuple[tuple[int, ...], ...]:
    """Micro-batches that a device holds of each of its virtual stages: what it holds at its peak, whatever
    the stages keep of one, is one of these.

    Of equal stages it is at most min(v m, 2 (p - i - 1) + (v - 1) p + 1) in all, and on the first device 1 +
    (p - 1)/(p v) times the activations of a 1F1B pipeline's (Korthikanti et al., MLSys 2023, section 4.2.3).
    """
    if virtual_stages == 1:
        return ((one_f_one_b_in_flight(device, stages, micro_batches),),)
    # After so many rounds the list of actions repeats itself.
    actions = device_actions(device, stages, min(micro_batches, 4 * stages), virtual_stages)
    counts = [0] * virtual_stages
    states: set[tuple[int, ...]] = set()
    for action, following in zip(actions, [*actions[1:], None], strict=True):
        counts[action.chunk] += 1 if action.kind == "F" else -1
        # Before another forward it holds less than behind that.
        if action.kind == "F" and (following is None or following.kind != "F"):
            states.add(tuple(counts))
    peaks: list[tuple[int, ...]] = []
    for own in sorted(states, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(own, other, strict=True)) for other in peaks):
            peaks.append(own)
    return tuple(peaks)
