"""A partition as it was read, whatever its format, and the errors of what could not be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ...cost_models.errors import FileError
from ...cost_models.quantities import format_count
from ...planner.plan_records import Recompute
from ..formats.first_blocks import first_block_words
from ..formats.transformer_blocks import NotBlocksError, find_blocks

FORMATS = (
    "a balance list (12,34), DeepSpeed's parts (0,12,46), a Megatron layout (Et*3|t*5L), module names by "
    "stage as torchtitan takes them, a device_map, or what pplan export wrote"
)


@dataclass(frozen=True)
class Partition:
    """A partition from another tool's file; None where that does not say.

    `ends`: by stage, the layers before its end; `virtual_stages` of them are on each device. `replicas`: of
    every stage. `devices`: ranks, device after device of the pipeline with its replicas. `samples`: of a
    micro-batch, on each replica. `stage_recompute`: a word for each stage. `runtime`: that the file was
    written for. `notes`: what was understood, or passed over.
    """

    format: str
    ends: tuple[int, ...]
    virtual_stages: int | None = None
    replicas: int | None = None
    devices: tuple[int, ...] | None = None
    schedule: str | None = None
    samples: int | None = None
    mini_batch: int | None = None
    recompute: Recompute | None = None
    stage_recompute: tuple[str, ...] | None = None
    runtime: str | None = None
    notes: tuple[str, ...] = ()

    def with_notes(self, *notes: str) -> Partition:
        """The same with more notes."""
        return replace(self, notes=(*self.notes, *notes))


def partition_error(where: str, why: str, hint: str = "") -> FileError:
    """The error for a partition that cannot be read, or is not one of the profile's layers."""
    return FileError(f"{where}: {why}", hint or f"Give {FORMATS}.")


def from_counts(counts: Sequence[int], names: Sequence[str], where: str) -> Partition:
    """The partition of a list of layers a stage; of transformer blocks a stage, where they are as many as the
    blocks."""
    _check_positive(counts, where)
    layers = len(names)
    if sum(counts) == layers:
        return Partition("balance", tuple(accumulate(counts)))
    try:
        model = find_blocks(names)
    except NotBlocksError:
        model = None
    if model is None or sum(counts) != model.blocks:
        raise partition_error(
            where,
            f"the balance adds up to {format_count(sum(counts), 'layer')}, the profile has {layers}",
            "Name the profile of that model, cut into the same layers: profile=FILE",
        )
    note = f"the list counts the {model.blocks} transformer blocks"
    return from_blocks(counts, names, where, "blocks").with_notes(note)


def from_blocks(
    counts: Sequence[int], names: Sequence[str], where: str, format: str, moved: int = 0
) -> Partition:
    """The partition of transformer blocks a stage: the embedding is on the first stage, the head on the last,
    but for its first `moved` layers, one of which each of the stages before has, which have no block."""
    try:
        model = find_blocks(names)
    except NotBlocksError as error:
        raise partition_error(
            where,
            f"it places transformer blocks, and in the profile {error}",
            "Name the profile of a transformer: profile=FILE",
        ) from error
    if sum(counts) != model.blocks:
        raise partition_error(
            where,
            f"it places {sum(counts)} transformer blocks, the profile has {model.blocks}",
            "Name the profile of that model: profile=FILE",
        )
    done = list(accumulate(counts))
    ends = [model.ends[count] for count in done[:-1]]
    if moved:
        ends[-moved:] = [end + number for number, end in enumerate(ends[-moved:], start=1)]
    return check_stages(Partition(format, (*ends, len(names))), where)


def with_first_blocks(partition: Partition, number: int, names: Sequence[str]) -> Partition:
    """The partition, of which every stage runs its first blocks again, at the most so many of them."""
    words = first_block_words(find_blocks(names), partition.ends, number)
    if set(words) <= {"always"}:
        return replace(partition, recompute="always")
    if (partition.virtual_stages or 1) > 1:
        note = (
            f"it runs the first {number} blocks of every virtual stage again; the plan of several stages a "
            "device does not know that, and recomputes whole devices where memory lacks"
        )
        return replace(partition, recompute=None).with_notes(note)
    note = (
        f"it runs the first {number} blocks of every stage again, each by itself; the plan has them, and "
        "what stands before them, in one checkpoint a stage"
    )
    return replace(partition, recompute=None, stage_recompute=words).with_notes(note)


def from_bounds(bounds: Sequence[int], names: Sequence[str], where: str) -> Partition:
    """The partition of DeepSpeed's parts: stage i holds layers bounds[i] up to, not including, bounds[i +
    1]."""
    counts = [end - first for first, end in pairwise(bounds)]
    return replace(from_counts(counts, names, where), format="deepspeed")


def check_stages(partition: Partition, where: str) -> Partition:
    """The partition, where no stage is empty. Raises FileError."""
    for stage, (first, end) in enumerate(pairwise((0, *partition.ends))):
        if end <= first:
            raise partition_error(
                where, f"stage {stage} holds no layer", "Omit it: every stage holds one or more."
            )
    return partition


def _check_positive(counts: Sequence[int], where: str) -> None:
    for stage, count in enumerate(counts):
        if count < 1:
            raise partition_error(where, f"stage {stage} has {count} layers, it must have 1 or more")
    if not counts:
        raise partition_error(where, "it lists no stage")
