"""Megatron's pipeline layout: `Et*3|(t*2|)*2t*3L`; where it breaks the rules, or is not the model's."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...cost_models.quantities import format_count
from ...cost_models.transformer.pipeline_layout import layout_problems
from ..formats.transformer_blocks import NotBlocksError, find_blocks, is_small
from .partition import Partition, from_blocks, partition_error, with_first_blocks
from .trainer_options import Options, read_number

_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,18})(?!\d)")
_REPEATED = re.compile(r"(.)\*(\d{1,18})(?!\d)")
MOST = 100_000
"""Characters of a layout without its repetitions."""


def split_layout(layout: str, where: str) -> list[str]:
    """The letters of each (virtual) stage, whatever they are. Raises FileError where they are too many."""
    return _unroll(layout, where).split("|")


def parse_layout(layout: str, where: str) -> list[int]:
    """Transformer blocks a stage. Raises FileError.

    `x*n` stands for n of x, `(...)*n` for n of what is inside; commas are passed over. The first stage begins
    with E and the last ends with L; m, a multi-token predictor, stands before L.
    """
    return [stage.count("t") for stage in _split_rightly(layout, where)]


def _split_rightly(layout: str, where: str, pipeline: int | None = None) -> list[str]:
    """The letters of each stage. Raises FileError where Megatron-LM does not train the layout.

    `pipeline`: its size; None: that of the layout, without virtual stages."""
    stages = split_layout(layout, where)
    letters = "".join(stages)
    problems = layout_problems(stages, pipeline or len(stages), letters.count("t"), letters.count("m"))
    if problems:
        raise partition_error(where, f"layout {layout!r}: {'; '.join(problems)}")
    return stages


def _unroll(layout: str, where: str) -> str:
    """The layout without repetitions and commas."""
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (_GROUP, _REPEATED):
        if sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text)) > MOST:
            raise partition_error(where, f"layout {layout[:40]!r}: it stands for more than {MOST} blocks")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text


def from_layout(layout: str, names: Sequence[str], where: str, options: Options) -> Partition:
    """The partition of a layout, with what the options beside it say. Devices without a layer of the profile
    are left out, and multi-token predictors passed over; of empty stages before the head, whose devices have
    layers, each has a norm of the head: with notes. Raises FileError."""
    pipeline = read_number(options, "pipeline_model_parallel_size", where)
    stages = _split_rightly(layout, where, pipeline)
    size = pipeline or len(stages)
    virtual = len(stages) // size
    empty = [stage for stage, letters in enumerate(stages) if not letters.strip("m")]
    idle = _idle_devices(empty, size, virtual)
    counts = {stage: letters.count("t") for stage, letters in enumerate(stages) if stage % size not in idle}
    moved = _norms_of_the_head([stage for stage in empty if stage in counts], counts, names, where)
    batch, own = (
        read_number(options, "global_batch_size", where),
        read_number(options, "micro_batch_size", where),
    )
    full = options.get("recompute_granularity") == ["full"]
    tells_recompute = "recompute_granularity" in options or batch is not None
    partition = replace(
        from_blocks(list(counts.values()), names, where, "megatron", len(moved)).with_notes(
            *_notes(stages, [stage for stage in empty if stage not in counts], moved)
        ),
        virtual_stages=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        mini_batch=batch,
        samples=own,
        recompute=("always" if full else "never") if tells_recompute else None,
    )
    if not full or options.get("recompute_method") != ["block"]:
        return partition
    number = read_number(options, "recompute_num_layers", where)
    if number is None:
        return replace(partition, recompute=None)
    return with_first_blocks(partition, number, names)


def _idle_devices(empty: Sequence[int], size: int, virtual: int) -> set[int]:
    """Those of a pipeline of this size all of whose virtual stages are empty."""
    devices = Counter(stage % size for stage in empty)
    return {device for device, count in devices.items() if count == virtual}


def _norms_of_the_head(
    empty: Sequence[int], counts: Mapping[int, int], names: Sequence[str], where: str
) -> dict[int, str]:
    """By empty stage of a device that has layers in others, the layer of the head that it has here: a plan
    has as many stages on every device, each of a layer or more. Raises FileError where there is none that
    takes next to no time."""
    if not empty:
        return {}
    before_head = list(counts)[-1 - len(empty) : -1]
    layers = _head(names)[: len(empty)]
    if before_head == list(empty) and len(_head(names)) > len(empty) and all(map(is_small, layers)):
        return dict(zip(empty, layers, strict=True))
    raise partition_error(
        where,
        f"its virtual stage {empty[0]} holds no layer of the profile, and its device has layers in others: a "
        "plan has as many stages on every device, each of a layer or more, and the head is not next, or has "
        "no norm to give",
        "pplan.lint costs it as it is, from the model's config.json; or move a block there.",
    )


def _head(names: Sequence[str]) -> Sequence[str]:
    try:
        return find_blocks(names).head
    except NotBlocksError:
        return ()


def _notes(stages: Sequence[str], empty: Sequence[int], moved: Mapping[int, str]) -> list[str]:
    """What a profile does not have of a layout."""
    notes, predictors = [], sum(letters.count("m") for letters in stages)
    if predictors:
        notes.append(
            f"{format_count(predictors, 'multi-token predictor')} (m): no layer of the profile, passed over; "
            "pplan.lint costs what m stands for, from the model's config.json"
        )
    if empty:
        numbers = ", ".join(map(str, empty[:10]))
        hold = f"stage {numbers} holds" if len(empty) == 1 else f"stages {numbers} hold"
        notes.append(f"{hold} no layer of the profile: left out, with the devices that only hand tensors on")
    notes += [
        f"stage {stage} holds no layer of the profile: it has {layer} here, which Megatron-LM has with the "
        "head or the last block; pplan.lint costs the layout as it is"
        for stage, layer in moved.items()
    ]
    return notes
