"""GPT-2, whose embedding and head are one weight, and T5, whose two embeddings and head are, on three
processes against the plain model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pplan.planner.plan_file import Plan
from pplan.profiler.measure import profile_model
from pplan.profiler.models import load_model
from pplan.profiler.profile_options import ProfileOptions
from pplan.runtimes.exports import export

from .tied_worker import SETTINGS

MakePlan = Callable[..., Plan]
RunProcesses = Callable[..., None]
WORKER = Path(__file__).with_name("tied_worker.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "balance", "schedule"),
    [("hf:gpt2", [1, 2, 2], "zb-h1"), ("hf:t5", [4, 4, 2], "1f1b")],
)
def test_losses_gradients_and_weights_are_the_plain_models(
    model: str,
    balance: list[int],
    schedule: str,
    make_plan: MakePlan,
    run_processes: RunProcesses,
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    loaded = load_model(model, settings=SETTINGS[model])
    profile = profile_model(loaded, ProfileOptions(device="meta", micro_batch_sizes=[2]))
    assert all(layer.cut_after for layer in profile.layers[:-1])
    plan = make_plan(
        balance,
        schedule=schedule,
        micro_batches=4,
        micro_batch_size=2,
        layer_names=[layer.name for layer in profile.layers],
        profile={"file": "tied.profile.json", "sha256": "0", "granularity": profile.granularity},
    )
    document, _ = export("torch", plan)
    document.save(tmp_path / "tied.torch.json", force=False)
    (tmp_path / "model.txt").write_text(model)
    run_processes(tmp_path, len(balance), str(WORKER))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(len(balance))]
    for losses, plain in zip(ranks[-1]["losses"], ranks[0]["plain_losses"], strict=True):
        assert losses == pytest.approx(plain, abs=1e-9)
    assert ranks[0]["plain_losses"][-1][0] < ranks[0]["plain_losses"][0][0]
    assert max(off for rank in ranks for off in rank["off"].values()) < 1e-9
    copies = [copy for rank in ranks for copy in rank["copies"].values()]
    assert len(copies) == {"hf:gpt2": 2, "hf:t5": 3}[model]
    assert all(copy == copies[0] for copy in copies)
