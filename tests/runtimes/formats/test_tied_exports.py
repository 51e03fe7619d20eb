"""Exports of plans whose stages share a weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pplan.cost_models.errors import ExportError
from pplan.planner.plan_file import Plan
from pplan.runtimes.documents import MegatronBridgeExport, MegatronExport
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]


def shared(stages: Sequence[int]) -> list[dict[str, Any]]:
    return [{"tensor": "wte.weight", "bytes": 100, "stages": list(stages), "sum_seconds": 0.1}]


@pytest.mark.parametrize(
    ("runtime", "reason"),
    [
        ("torchgpipe", "its stages 0 and 2 share wte.weight, torchgpipe: it refuses a parameter that two"),
        ("fairscale", "share wte.weight, fairscale: it refuses a parameter that two stages share"),
        ("torchtitan", "torchtitan: it refuses tied weights together with pipeline parallelism"),
        ("nemo-automodel", "nemo-automodel: it refuses tied weights together with pipeline parallelism"),
    ],
)
def test_runtimes_that_keep_no_copies_refuse_the_plan(runtime: str, reason: str, make_plan: MakePlan) -> None:
    plan = make_plan([2, 2, 2], tied=shared((0, 2)), micro_batches=4)
    with pytest.raises(ExportError, match=reason):
        export(runtime, plan)


def test_an_alternative_that_keeps_the_users_together_is_taken(
    make_plan: MakePlan, alternative: Callable[..., dict[str, Any]]
) -> None:
    other = alternative(runtimes=["torchgpipe"], balance=[5, 1], schedule="gpipe")
    plan = make_plan([2, 2, 2], tied=shared((0, 2)), alternatives=[other])
    document, remark = export("torchgpipe", plan)
    assert document.balance == [5, 1]  # type: ignore[attr-defined]
    assert remark is not None
    assert "share wte.weight" in remark


@pytest.mark.parametrize("runtime", ["torch", "deepspeed"])
def test_runtimes_that_keep_copies_take_the_plan(runtime: str, make_plan: MakePlan) -> None:
    plan = make_plan([2, 2, 2], tied=shared((0, 1)), schedule="1f1b", micro_batches=4)
    assert export(runtime, plan)[1] is None


def test_megatron_ties_the_first_stage_to_the_last(make_decoder_plan: MakePlan) -> None:
    plan = make_decoder_plan([3, 4], schedule="1f1b", tied=shared((0, 1)))
    document, remark = export("megatron", plan)
    assert isinstance(document, MegatronExport)
    assert "--untie-embeddings-and-output-weights" not in document.arguments
    assert remark is not None
    assert "as Megatron-LM's do without --untie-embeddings-and-output-weights" in remark
    bridge, _ = export("megatron-bridge", plan)
    assert isinstance(bridge, MegatronBridgeExport)
    assert "model.share_embeddings_and_output_weights=true" in bridge.arguments
    with pytest.raises(ExportError, match="megatron: it ties the embedding on the first stage to the head"):
        export("megatron", make_decoder_plan([3, 2, 2], schedule="1f1b", tied=shared((0, 1))))


def test_stages_that_are_not_there_are_refused(make_plan: MakePlan) -> None:
    with pytest.raises(ValueError, match=r"tied 'wte.weight' is on the stages \[0, 3\]"):
        make_plan([2, 2], tied=shared((0, 3)))
