"""Our orders against those of torch.distributed.pipelining, where it has the schedule."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.program import Action, Kind, Program
from pplan.cost_models.runtime import TORCH_CLASSES
from pplan.cost_models.schedules import dualpipe_v, gpipe, interleaved, looped_bfs, one_f_one_b, zb_v

pytest.importorskip("torch", reason="the orders are compared with torch's")

KINDS: dict[str, Kind] = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


def torchs(
    name: str, stages: int, micro_batches: int, virtual_stages: int | None = None
) -> list[list[Action]]:
    """Each rank's computations, those of an overlapped pair one after the other; communication left out."""
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    ranks = get_schedule_ops(name, stages, micro_batches, virtual_stages)
    return [[own for op in ops if op is not None for own in computations(op, stages)] for ops in ranks]


def computations(operation: Any, stages: int) -> list[Action]:
    return [
        Action(KINDS[part.computation_type.name], part.microbatch_index, part.stage_index // stages)
        for part in operation.sub_actions or (operation,)
        if part.computation_type.name in KINDS
    ]


def ours(program: Program) -> list[list[Action]]:
    return [list(own) for own in program.actions]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_gpipe(stages: int, more: int) -> None:
    program = gpipe(stages, stages + more, backwards="first_to_last")
    assert ours(program) == torchs("GPipe", stages, stages + more)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_1f1b(stages: int, more: int) -> None:
    """In torch's table the last rank's forwards are numbered from 1; what it runs is not affected."""
    theirs = torchs("1F1B", stages, stages + more)
    first = theirs[-1][0].micro_batch
    assert first in (0, 1)
    theirs[-1] = [a._replace(micro_batch=a.micro_batch - first) if a.kind == "F" else a for a in theirs[-1]]
    assert ours(one_f_one_b(stages, stages + more)) == theirs


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("chunks", [2, 3])
def test_interleaved(stages: int, rounds: int, chunks: int) -> None:
    micro_batches = rounds * stages
    expected = torchs("Interleaved1F1B", stages, micro_batches, chunks)
    assert ours(interleaved(stages, micro_batches, chunks)) == expected


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 10), (4, 3), (3, 8), (4, 15)])
def test_interleaved_with_rounds_of_other_sizes(stages: int, micro_batches: int) -> None:
    size = micro_batches // max(1, micro_batches // stages)
    expected = torchs("Interleaved1F1B", stages, micro_batches, 2)
    assert ours(interleaved(stages, micro_batches, 2, a_round=size)) == expected


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("chunks", [2, 3])
def test_looped_bfs(stages: int, micro_batches: int, chunks: int) -> None:
    expected = torchs("LoopedBFS", stages, micro_batches, chunks)
    assert ours(looped_bfs(stages, micro_batches, chunks)) == expected


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8, 17])
def test_zb_v(stages: int, micro_batches: int) -> None:
    assert ours(zb_v(stages, micro_batches)) == torchs("ZBVZeroBubble", stages, micro_batches, 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("more", [0, 1, 6])
def test_dualpipe_v(stages: int, more: int) -> None:
    micro_batches = 2 * stages + more
    assert ours(dualpipe_v(stages, micro_batches)) == torchs("DualPipeV", stages, micro_batches, 2)


@pytest.mark.parametrize("name", TORCH_CLASSES.values())
def test_the_class_that_is_named_is_torchs(name: str) -> None:
    from torch.distributed.pipelining import schedules

    assert hasattr(schedules, name)
