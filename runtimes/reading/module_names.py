"""Stages told by the names of their modules: torchtitan's lists, and Hugging Face's device_map."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TypeVar

from ...planner.plan_records import Recompute
from ..formats.module_lists import EMBEDDINGS
from ..formats.transformer_blocks import NotBlocksError, Transformer, find_blocks
from .partition import Partition, check_stages, partition_error
from .trainer_options import Options, read_number

SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "zbvzerobubble": "zb-v",
    "dualpipev": "dualpipe-v",
}
"""The plan's word by torch's, in small letters."""
Stage = TypeVar("Stage", int, str)
_RECOMPUTE: dict[str, Recompute] = {"full": "always", "True": "always", "none": "never", "False": "never"}
_BLOCK = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,18})$")
_NORMS = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
_HEADS = frozenset({"lm_head", "output", "embed_out"})


def from_modules(
    parts: Sequence[Sequence[str]], names: Sequence[str], where: str, options: Options
) -> Partition:
    """The partition of lists of module names, one a stage, with what the options beside them say.

    The names are the profile's, or torchtitan's: tok_embeddings, layers.N, norm, lm_head. Raises FileError.
    """
    layers = _Layers(names)
    owner: dict[int, int] = {}
    skipped_names: list[str] = []
    for stage, modules in enumerate(parts):
        for name in modules:
            indices = layers.of(name)
            skipped_names += [name] * (not indices and not name.endswith("rotary_emb"))
            for layer in indices:
                if owner.setdefault(layer, stage) != stage:
                    raise partition_error(
                        where, f"{name} is on stages {owner[layer]} and {stage}", "Name it once."
                    )
    stages = layers.assign_stages(owner, where)
    partition = _in_order(stages, len(parts), "torchtitan", where)
    if skipped_names:
        partition = partition.with_notes(
            f"{', '.join(dict.fromkeys(skipped_names))}: no layer of the profile, passed over"
        )
    return _with_options(partition, options, where)


def from_device_map(places: Mapping[str, object], names: Sequence[str], where: str) -> Partition:
    """The partition of a device_map: a stage is what follows one another on one device. Raises FileError."""
    layers = _Layers(names)
    devices = {name: str(place).removeprefix("cuda:") for name, place in places.items()}
    owner: dict[int, str] = {}
    for name in sorted(devices, key=lambda name: (name.count("."), len(name)), reverse=True):
        for layer in layers.of(name) if name else range(len(names)):
            owner.setdefault(layer, devices[name])
    indices = layers.assign_stages(owner, where)
    order = [device for device, _ in groupby(indices)]
    twice = [device for device in order if order.count(device) > 1]
    if twice:
        raise partition_error(
            where,
            f"device {twice[0]} has layers before and after those of another",
            "pplan's stages are layers that follow one another: give each device one run of them.",
        )
    stages = [order.index(device) for device in indices]
    partition = _in_order(stages, len(order), "device_map", where)
    return replace(partition, schedule="naive", devices=read_ranks(order))


def read_ranks(names: Sequence[object]) -> tuple[int, ...] | None:
    """Of devices, as numbers or cuda:N, each once; None where one is something else."""
    words = [str(name).removeprefix("cuda:") for name in names]
    ranks = [int(word) for word in words if re.fullmatch(r"[0-9]{1,9}", word)]
    return tuple(ranks) if ranks and len(ranks) == len(names) == len(set(ranks)) else None


class _Layers:
    """The layers of a profile, found by a module's name."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        try:
            self.model: Transformer | None = find_blocks(names)
        except NotBlocksError:
            self.model = None

    def of(self, module: str) -> list[int]:
        """The layers of a module, by the profile's names or else by what such modules are called."""
        inside = [
            layer for layer, name in enumerate(self.names) if name == module or name.startswith(f"{module}.")
        ]
        return inside or ([] if self.model is None else self._find_by_custom(self.model, module))

    def _find_by_custom(self, model: Transformer, module: str) -> list[int]:
        last, block = module.rpartition(".")[2], _BLOCK.search(module)
        if block:
            number = int(block[1])
            return list(range(*model.ends[number : number + 2])) if number < model.blocks else []
        if last in EMBEDDINGS:
            return list(range(model.ends[0]))
        head = range(model.ends[-1], len(self.names))
        if last in _HEADS:
            return list(head[-1:])
        return list(head[:-1]) if last in _NORMS else []

    def assign_stages(self, owner: Mapping[int, Stage], where: str) -> list[Stage]:
        """The stage of each layer; what is inside a head and not named goes with the layer before."""
        stages: list[Stage] = []
        for layer, name in enumerate(self.names):
            if layer in owner:
                stages.append(owner[layer])
            elif self._inside_head(layer):
                stages.append(stages[-1])
            else:
                raise partition_error(
                    where, f"layer {layer}, {name}, is on no stage", "Name the module on one of them."
                )
        return stages

    def _inside_head(self, layer: int) -> bool:
        """Whether it is neither the head's first layer nor its last: a slice between norm and projection."""
        return self.model is not None and self.model.ends[-1] < layer < len(self.names) - 1


def _in_order(stages: Sequence[int], count: int, format: str, where: str) -> Partition:
    """The partition of the stage of each layer. Raises FileError where stages fall, or one is empty."""
    for layer, (before, after) in enumerate(pairwise(stages)):
        if after < before:
            raise partition_error(
                where,
                f"layer {layer + 1} is on stage {after}, layer {layer} before it on stage {before}",
                "Stages hold the layers in their order.",
            )
    ends = tuple(sum(stage <= number for stage in stages) for number in range(count))
    return check_stages(Partition(format, ends), where)


def _with_options(partition: Partition, options: Options, where: str) -> Partition:
    """The partition, with what torchtitan's options, or a recipe of NeMo, say beside the names."""
    devices = read_number(options, "pipeline_parallel_degree", where) or read_number(
        options, "pp_size", where
    )
    stages = len(partition.ends)
    if devices and stages % devices:
        raise partition_error(
            where, f"{stages} stages on a pipeline of {devices} devices", "Give as many to each device."
        )
    word = (options.get("pipeline_parallel_schedule") or options.get("pp_schedule") or [""])[0]
    schedule = SCHEDULES.get(word.lower().replace("_", ""))
    if word and schedule is None:
        partition = partition.with_notes(f"schedule {word} does not tell the order: `schedule` names it")
    samples = read_number(options, "pipeline_parallel_microbatch_size", where) or read_number(
        options, "pp_microbatch_size", where
    )
    replicas = read_number(options, "data_parallel_replicate_degree", where) or read_number(
        options, "dp_replicate_size", where
    )
    return replace(
        partition,
        schedule=schedule,
        virtual_stages=stages // devices if devices else None,
        samples=samples,
        replicas=replicas,
        mini_batch=read_number(options, "global_batch_size", where),
        recompute=_RECOMPUTE.get((options.get("activation_checkpointing") or [""])[0]),
    )
