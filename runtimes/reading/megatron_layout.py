"""Megatron's pipeline layout: `Et*3|(t*2|)*2t*3L`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .partition import Partition, from_blocks, partition_error
from .trainer_options import Options, read_number

_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,18})(?!\d)")
_REPEATED = re.compile(r"(.)\*(\d{1,18})(?!\d)")
MOST = 100_000
"""Characters of a layout without its repetitions."""


def parse_layout(layout: str, where: str) -> list[int]:
    """Transformer blocks a stage. Raises FileError.

    `x*n` stands for n of x, `(...)*n` for n of what is inside; commas are passed over. The first stage begins
    with E and the last ends with L; m (multi-token prediction) is nothing that a profile has.
    """
    layout_text = _unroll(layout, where)
    unknown = sorted(set(layout_text) - set("EtL|"))
    if unknown:
        hint = (
            "m is a block that predicts further tokens, which a profile does not have"
            if "m" in unknown
            else ""
        )
        raise partition_error(where, f"layout {layout!r}: {unknown[0]!r} is none of E, t, L and |", hint)
    text = layout_text.replace("|", "")
    if not re.fullmatch(r"Et*L", text):
        raise partition_error(
            where, f"layout {layout!r}: it must begin with E and end with L, with each once"
        )
    return [stage.count("t") for stage in layout_text.split("|")]


def _unroll(layout: str, where: str) -> str:
    """The layout without repetitions and commas."""
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (_GROUP, _REPEATED):
        if sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text)) > MOST:
            raise partition_error(where, f"layout {layout[:40]!r}: it stands for more than {MOST} blocks")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text


def from_layout(layout: str, names: Sequence[str], where: str, options: Options) -> Partition:
    """The partition of a layout, with what the options beside it say. Raises FileError."""
    blocks = parse_layout(layout, where)
    size = read_number(options, "pipeline_model_parallel_size", where) or len(blocks)
    if len(blocks) % size:
        raise partition_error(
            where,
            f"the layout has {len(blocks)} stages, pipeline_model_parallel_size {size} does not divide them",
            "Give a pipeline size that does.",
        )
    virtual = len(blocks) // size
    batch, own = (
        read_number(options, "global_batch_size", where),
        read_number(options, "micro_batch_size", where),
    )
    full = options.get("recompute_granularity") == ["full"]
    tells_recompute = "recompute_granularity" in options or batch is not None
    return replace(
        from_blocks(blocks, names, where, "megatron"),
        virtual_stages=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        mini_batch=batch,
        samples=own,
        recompute=("always" if full else "never") if tells_recompute else None,
    )
