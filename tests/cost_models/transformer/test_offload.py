"""Offload of activations: bytes by hand, and seconds and memory against a simulation of the copies."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, NamedTuple

import pytest

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.topology import Device, Link, two_level_topology
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_table import LayerTable
from pplan.cost_models.transformer.layer_work import Offload, Tokens, offload_tensors
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, Overheads, RankCosts, TopologyLinks
from pplan.cost_models.transformer.training_setting import TrainingSetting
from pplan.cost_models.transformer.training_step import estimate_step

LLAMA = transformer_shape(
    {
        "model_type": "llama",
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": 128256,
    }
)
MIXTRAL = transformer_shape(
    {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
)
TOPOLOGY = two_level_topology(Device("GPU", None), 8, 8, Link(450e9, 5e-6), Link(50e9, 2e-5))


def costs_with(host: float, flops: float = 1e15) -> RankCosts:
    return RankCosts(
        DeviceLimits(flops, 3e12),
        TopologyLinks(TOPOLOGY),
        overheads=Overheads(0.0),
        host_bandwidth=host,
    )


def table_with(host: float, shape: Any = LLAMA, recompute: Any = "offload", tensor: int = 1) -> LayerTable:
    setting = TrainingSetting(8, Tokens(4096), recompute)
    return LayerTable(shape, ParallelDegrees(tensor), setting, costs_with(host))


def test_bytes_of_a_block_by_hand() -> None:
    """Of attention its input, the norm's output, queries, keys, values and the result, which two modules
    save; of experts the norm's input, the tokens that are sent, and both products up."""
    tokens, wide = 4096, 8192
    own = table_with(1e9).blocks[False].offload
    assert own.saved == 2 * tokens * (2 * wide + wide + 2 * 1024 + wide)
    assert own.copied == own.saved + 2 * tokens * wide
    routed = table_with(1e9, MIXTRAL).blocks[True].offload
    attention = 2 * tokens * (2 * 4096 + 4096 + 2 * 1024 + 4096)
    assert routed.saved == attention + 2 * tokens * (4096 + 2 * 4096 + 2 * 2 * 14336)
    for shape in (LLAMA, MIXTRAL):
        for tensor in (1, 2, 4, 8):
            for work in table_with(1e9, shape, tensor=tensor).blocks.values():
                assert 0 < work.offload.saved <= work.saved


def test_small_tensors_stay() -> None:
    assert offload_tensors([2**20, 2**20 - 1], [2**20 - 1, 2**21]) == Offload(2 * (2**20 + 2**21), 10 * 2**20)


def test_copies_that_hide_take_no_time_and_free_memory() -> None:
    never, hidden = table_with(1e9, recompute="none"), table_with(1e15)
    blocks = range(8)
    assert hidden.seconds(blocks, 0) == never.seconds(blocks, 0)
    kept, saved = (own.ledger((blocks,), 0)["activations"] for own in (hidden, never))
    offload = never.blocks[False].offload
    assert kept == pytest.approx(saved - 8 * offload.saved)
    assert hidden.stage((blocks,), 0).host_bytes == 8 * offload.copied
    assert never.stage((blocks,), 0).host_bytes == 0


def test_slow_copies_are_what_a_block_takes() -> None:
    table = table_with(1e9)
    copies = table.blocks[False].offload.copied / 1e9
    never = table_with(1e9, recompute="none").seconds(range(3), 1)
    own = replace(table.degrees, pipeline=3)
    slow = LayerTable(LLAMA, own, table.setting, table.costs).seconds(range(3), 1)
    assert copies > never.forward
    assert copies > never.backward
    assert list(slow) == pytest.approx([3 * copies, 3 * copies])


class Part(NamedTuple):
    """Of a block's passes, in the order of forward: seconds, and of a copy (0: of a part that keeps all)."""

    forward: float
    backward: float
    copy: float


def simulate_copies(parts: list[Part], blocks: int, actions: list[tuple[str, int]]) -> tuple[float, float]:
    """Seconds of a device's actions with no wait for other devices, and the most that is on it of what is
    offloaded, in seconds of a copy: as megatron-core 0.16 does it (`fine_grained_activation_offload.py`).

    Behind a part's forward its tensors are copied out, copy after copy, and nothing waits. The end of a
    part's backward begins one copy back, in the order in which they are needed, with a block's parts ahead:
    the last block stays where its backward is next, or the first of all, and elsewhere was brought back by
    the micro-batch before. A copy waits for that out, and the part's backward for it."""
    groups = [(block, place) for block in range(blocks) for place, own in enumerate(parts) if own.copy]
    of_a_block = len(groups) // blocks
    numbers = [number for kind, number in actions if kind == "B"]
    now = out_end = back_end = 0.0
    begins: dict[tuple[int, int, int], float] = {}
    gone: dict[tuple[int, int, int], float] = {}
    back: dict[tuple[int, int, int], float] = {}
    held: list[tuple[float, float, float]] = []
    pending: list[tuple[int, int, int]] = []

    def bring_one() -> None:
        nonlocal back_end
        if pending and pending[0] in gone:
            key = pending.pop(0)
            begins[key] = max(now, back_end, gone[key])
            back_end = back[key] = begins[key] + parts[key[2]].copy

    for at, (kind, number) in enumerate(actions):
        if kind == "F":
            is_next = actions[at + 1 : at + 2] == [("B", number)] or number == numbers[0]
            pending += [(number, *own) for own in reversed(groups)][of_a_block * is_next :]
            for block in range(blocks):
                for place, own in enumerate(parts):
                    key = number, block, place
                    begins[key], now = now, now + own.forward
                    if own.copy and not (is_next and block == blocks - 1):
                        out_end = gone[key] = max(out_end, now) + own.copy
                        held.append((begins[key], gone[key], own.copy))
            continue
        for block, place in product(range(blocks - 1, -1, -1), range(len(parts) - 1, -1, -1)):
            own = parts[place]
            key = number, block, place
            if own.copy and key in gone:
                while key not in back:
                    bring_one()
                now = max(now, back[key])
            now += own.backward
            if own.copy:
                held.append((begins[key], now, own.copy))
                bring_one()
    edges = sorted([(a, own) for a, _, own in held] + [(b, -own) for _, b, own in held])
    most = total = 0.0
    for _, change in edges:
        total += change
        most = max(most, total)
    return now, most


ATTENTION_MODULES: list[tuple[float, float | None]] = [(2, None), (2.25, None), (1, None)]
"""Of Llama's blocks the input and the norm's output, then queries, keys, values and result, then the result
again; and the most of a block's seconds that they take, where it is not a fifth."""
EXPERT_MODULES: list[tuple[float, float | None]] = [
    (2, 0.1), (2.5, 0.1), (1, 0.06), (1, 0.02), (2, 0.5), (14, 0.2),
]  # fmt: skip
"""Of Mixtral's the same, and the norm's input, the tokens that are sent, both products up."""


@pytest.mark.parametrize("seed", range(60))
def test_a_simulation_of_the_copies(seed: int) -> None:
    """Of a device's own work under 1F1B, with a block's seconds divided at random over its modules: it takes
    no longer than what is said, and needs no more memory."""
    random = Random(seed)
    stages = random.randint(1, 6)
    stage, many, blocks = random.randrange(stages), random.randint(1, 12), random.randint(1, 6)
    host = 10 ** random.uniform(10, 12.5)
    setting = TrainingSetting(many, Tokens(4096), "offload")
    own_shape, routed = (MIXTRAL, True) if seed % 2 else (LLAMA, False)
    shape = own_shape.with_blocks(max(blocks, stages))
    table = LayerTable(shape, ParallelDegrees(pipeline=stages), setting, costs_with(host))
    work = table.blocks[routed]
    forward, backward = table.costs.seconds(work, table.degrees)
    copy = work.offload.copied / host
    modules = EXPERT_MODULES if routed else ATTENTION_MODULES
    shares = [random.uniform(0.05, 0.2) if most is None else random.uniform(0, most) for _, most in modules]
    shares.append(1 - sum(shares))
    total = sum(size for size, _ in modules)
    sizes = [*(size / total for size, _ in modules), 0.0]
    parts = [Part(forward * a, backward * a, copy * b) for a, b in zip(shares, sizes, strict=True)]
    program = find_schedule("1f1b").program(stages, many)
    actions: list[tuple[str, int]] = [(action.kind, action.micro_batch) for action in program.actions[stage]]
    seconds, most = simulate_copies(parts, blocks, actions)
    said = many * blocks * (max(forward, copy) + max(backward, copy))
    assert seconds <= said * (1 + 1e-9)
    never = LayerTable(shape, table.degrees, replace(setting, recompute="none"), table.costs)
    ledger, full = table.ledger((range(blocks),), stage), never.ledger((range(blocks),), stage)
    stay = full["activations"] * (1 - work.offload.saved / work.saved)
    counted = ledger["activations"] - stay + 3 * work.offload.copied
    assert most * host <= counted * (1 + 1e-9)


def test_a_step_with_offload() -> None:
    costs = costs_with(50e9)
    kinds: tuple[Any, ...] = ("none", "offload", "full")
    none, offload, full = (
        estimate_step(
            LLAMA, ParallelDegrees(tensor=2, pipeline=4), TrainingSetting(8, Tokens(4096), kind), costs
        )
        for kind in kinds
    )
    assert none.step_seconds <= offload.step_seconds < full.step_seconds
    assert none.peak_bytes > offload.peak_bytes
    assert [stage.host_bytes > 0 for stage in offload.stages] == [True] * 4
