"""Pipelines whose stages share matrices: two stages of two processes each, against the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from pplan.cost_models.errors import UsageError
from pplan.planner.plan_file import Plan
from pplan.runtimes.exports import export
from pplan.runtimes.pipelining.ranks import check_sizes, styles_by_module

MakePlan = Callable[..., Plan]
RunProcesses = Callable[..., None]
WORKER = Path(__file__).with_name("tensor_worker.py")


@pytest.mark.slow
def test_losses_and_gradients_are_the_plain_models(
    make_plan: MakePlan, run_processes: RunProcesses, tmp_path: Path
) -> None:
    """After three steps of Adam. Of each block's seven matrices a process has a half."""
    pytest.importorskip("transformers")
    plan = make_plan([3, 3], schedule="1f1b", micro_batches=4, micro_batch_size=2)
    document, _ = export("torch", plan)
    document.save(tmp_path / "small.torch.json", force=False)
    run_processes(tmp_path, 4, str(WORKER), "llama")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for rank in ranks[2:]:
        for losses, plain in zip(rank["losses"], rank["plain_losses"], strict=True):
            assert losses == pytest.approx(plain, abs=1e-9)
    assert max(rank["off"] for rank in ranks) < 1e-9
    assert sum(rank["split"] for rank in ranks) == 2 * 3 * 7


@pytest.mark.slow
def test_replicas_of_stages_that_share_matrices(
    make_plan: MakePlan, run_processes: RunProcesses, tmp_path: Path
) -> None:
    """2 stages x 2 replicas x 2 processes that share matrices: after three steps of Adam the gradients and
    weights are the plain model's, the mean of the replicas' losses too. Of each block's two matrices and a
    bias each of the four processes of its stage has a quarter."""
    plan = make_plan([2, 3], replicas=[2, 2], schedule="1f1b", micro_batches=2, micro_batch_size=4)
    document, _ = export("torch", plan)
    document.save(tmp_path / "small.torch.json", force=False)
    run_processes(tmp_path, 8, str(WORKER), "blocks")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(8)]
    assert max(rank["off"] for rank in ranks) < 1e-9
    for first, second in ((ranks[4], ranks[6]), (ranks[5], ranks[7])):
        for mine, other, plain in zip(first["losses"], second["losses"], first["plain_losses"], strict=True):
            means = [(a + b) / 2 for a, b in zip(mine, other, strict=True)]
            assert means == pytest.approx(plain, abs=1e-9)
    assert sum(rank["split"] for rank in ranks) == 4 * 3 * 3


@pytest.mark.parametrize(
    ("plan", "says"),
    [({"middle": "colwise"}, "no module"), ({"0": "diagonal"}, "diagonal")],
)
def test_plans_of_other_models_are_refused(plan: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        styles_by_module(nn.Sequential(nn.Linear(2, 2)), plan)


def test_names_with_wildcards() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    styles = styles_by_module(model, {"*.0": "rowwise", "0": ColwiseParallel()})
    assert isinstance(styles["0"], ColwiseParallel)
    assert set(styles) == {"0", "1.0"}


def test_matrices_that_cannot_be_shared_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(UsageError, match="3 is no multiple"):
        check_sizes(model[0], ColwiseParallel(), 2)
