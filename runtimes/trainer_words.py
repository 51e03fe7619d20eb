"""Words of trainers: layouts, flags, overrides and the names of modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cost_models.transformer.pipeline_layout import stage_letters

INSTEAD = ". Exported instead"
"""What of a remark follows the reason."""


def write_layout(blocks: Sequence[int], predictors: int = 0, predictor_offset: int = 0) -> str:
    """The layout of stages with so many transformer blocks, the embedding on the first and the head on the
    last: `Et*3|t|t*2L` for 3, 1 and 2. Multi-token predictors, m, stand so many stages before the last."""
    stages = "|".join(stage_letters(blocks, predictors, predictor_offset))
    return re.sub(r"([tm])\1+", lambda match: f"{match[1]}*{len(match[0])}", stages)


def write_flags(settings: Mapping[str, object]) -> list[str]:
    """Megatron-LM's arguments, of settings by its names for them."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def write_overrides(settings: Mapping[str, object]) -> list[str]:
    """The same as overrides of a recipe of Megatron-Bridge (NeMo), whose sections have those names."""
    sections = {
        **dict.fromkeys(("micro_batch_size", "global_batch_size"), "train"),
        **dict.fromkeys(("data_parallel_sharding_strategy", "grad_reduce_in_fp32"), "ddp"),
    }
    return [f"{sections.get(name, 'model')}.{name}={value}" for name, value in settings.items()]


DISTRIBUTED_OPTIMIZER = [f"{section}.use_distributed_optimizer=true" for section in ("ddp", "optimizer")]
"""Overrides of Megatron-Bridge."""


@dataclass(frozen=True)
class ModuleNames:
    """What a decoder's modules are called: `blocks` is the list of its blocks."""

    embedding: str
    blocks: str
    norm: str
    head: str


WORDS = ModuleNames("tok_embeddings", "layers", "norm", "lm_head")
"""What its models' modules are called."""
