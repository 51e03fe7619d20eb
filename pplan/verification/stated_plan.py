"""A plan file as it is written, read without checking what it says."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .documents import Table

RECOMPUTES = ("never", "always", "except_last", "selective")
OFFLOAD = "offload"
"""Of a stage: what it saves waits in the host's memory."""
_FIRST = re.compile(r"first_([1-9]\d{0,6})")
MOST_DEVICES = 2**24
MOST_PASSES = 1_000_000
"""Micro-batches of all stages in a step, of which each action is followed."""
FIXED_PARTITION = "this partition alone"
"""What was searched of a plan whose partition another tool made."""
REPLANNED = "plans without the lost devices"
"""How it begins of a plan for devices that are left."""


@dataclass(frozen=True)
class StatedStage:
    """A part of the layers, `first_layer` to `last_layer`, and what the file says of it."""

    first_layer: int
    last_layer: int
    replicas: int
    devices: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int
    memory_limit_bytes: int | None
    memory: dict[str, int]
    recompute: str | None
    host_bytes: int | None


@dataclass(frozen=True)
class StatedPlan:
    """The keys of a plan that are checked; tables where the checks read the keys themselves."""

    balance: list[int]
    mini_batch: int
    micro_batches: int
    micro_batch_size: int
    schedule: str
    order: list[str]
    virtual_stages: int
    optimizer: str
    recompute: str
    runtime: str | None
    gpus: int | None
    gpus_per_node: int | None
    machine: str
    stages: list[StatedStage]
    prediction: Table
    objective: Table | None
    baselines: list[Table]
    alternatives: list[Table]
    options: Table
    searched: str
    notes: list[str]
    warnings: list[str]
    layer_names: list[str]
    profile: Table
    whole: Table

    @property
    def is_fixed_partition(self) -> bool:
        """Whether its partition is another tool's, and nothing else was searched."""
        return self.searched == FIXED_PARTITION

    @property
    def is_replanned(self) -> bool:
        """Whether it is for the devices that are left; the file does not say which were lost."""
        return self.searched.startswith(REPLANNED)

    @property
    def ends(self) -> tuple[int, ...]:
        """By part, the number of layers before its end."""
        return tuple(stage.last_layer + 1 for stage in self.stages)

    @property
    def modes(self) -> tuple[str, ...]:
        """By part, what recomputes: the stage's own word where the plan says `selective`."""
        mixed = self.recompute == "selective"
        return tuple(stage.recompute or "selective" if mixed else self.recompute for stage in self.stages)


def first_layers(word: str) -> int | None:
    """How many of its first layers a part of such a word runs again; None of other words."""
    match = _FIRST.fullmatch(word)
    return None if match is None else int(match[1])


def parse_plan(table: Table) -> StatedPlan:
    """Raises FileError for what is missing or of another kind, and for a step too long to be worked out."""
    stages = [_stage(own) for own in table.tables("stages", least=1)]
    return StatedPlan(
        balance=table.counts("balance", least=1),
        mini_batch=table.count("mini_batch", least=1),
        micro_batches=table.count("micro_batches", least=1, most=MOST_PASSES // len(stages)),
        micro_batch_size=table.count("micro_batch_size", least=1),
        schedule=table.text("schedule"),
        order=table.texts("order") if table.has("order") else [],
        virtual_stages=table.count("virtual_stages", 1, least=1),
        optimizer=table.text("optimizer", "sgd"),
        recompute=_word(table, "recompute", "never"),
        runtime=table.optional_text("runtime"),
        gpus=table.optional_count("gpus", least=1),
        gpus_per_node=table.optional_count("gpus_per_node", least=1),
        machine=table.text("machine", ""),
        stages=stages,
        prediction=table.table("prediction"),
        objective=table.table("objective") if table.has("objective") else None,
        baselines=table.tables("baselines"),
        alternatives=table.tables("alternatives"),
        options=table.table("options" if table.has("options") else "wishes", optional=True),
        searched=table.text("searched", ""),
        notes=table.texts("notes"),
        warnings=table.texts("warnings"),
        layer_names=table.texts("layer_names"),
        profile=table.table("profile"),
        whole=table,
    )


def _stage(table: Table) -> StatedStage:
    ledger = table.table("memory", optional=True)
    return StatedStage(
        first_layer=table.count("first_layer"),
        last_layer=table.count("last_layer"),
        replicas=table.count("replicas", 1, least=1),
        devices=tuple(table.counts("devices", most=MOST_DEVICES)),
        forward_seconds=table.number("forward_seconds"),
        backward_seconds=table.number("backward_seconds"),
        memory_bytes=table.count("memory_bytes"),
        memory_limit_bytes=table.optional_count("memory_limit_bytes"),
        memory={name: ledger.count(name) for name in ledger.content},
        recompute=_word(table, "recompute", None, of_stage=True) if table.has("recompute") else None,
        host_bytes=table.count("host_bytes") if table.has("host_bytes") else None,
    )


def _word(table: Table, key: str, default: str | None, *, of_stage: bool = False) -> str:
    word = table.text(key, default)
    if word not in RECOMPUTES and not (of_stage and (word == OFFLOAD or first_layers(word))):
        raise table.refusal(key, word, f"one of {', '.join(RECOMPUTES)}")
    return word
