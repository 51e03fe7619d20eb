"""Llama 2 7B on two DGX H100: what collectives over both nodes cost, and FSDP among the plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pplan.api.degrees import search_configuration

CONFIG = Path(__file__).parent / "llama_2_7b.json"
TRAINING: dict[str, Any] = {"gpus": 16, "topology": "dgx-h100", "mini_batch": 256, "sequence": 4096}
PARAMETERS = 6.74e9
NVLINK, NIC = 450e9, 50e9


def one_way(size: float) -> float:
    """Seconds over the eight devices of a node, then over two nodes by the network cards of all eight."""
    return 7 / 8 * size / NVLINK + 1 / 2 * size / 8 / NIC


def test_gradients_go_through_all_network_cards_of_a_node() -> None:
    """Float32 gradients are reduced and scattered, bfloat16 weights gathered; by a flat ring in 758 ms."""
    exchanged = one_way(4 * PARAMETERS) + one_way(2 * PARAMETERS)
    assert exchanged == pytest.approx(0.129, abs=1e-3)
    # Passes over the gradients, and Adam's over a sixteenth of all states, at 70 % of 3.35 TB/s.
    passes = (16 + (12 + 34) / 16) * PARAMETERS / (0.7 * 3.35e12)
    best = search_configuration(CONFIG, **TRAINING, tp=(1,), pp=(1,), zero=(1,), micro_batch_size=(1,)).plans[
        0
    ]
    assert best.degrees.data == 16
    assert best.estimate.update_seconds == pytest.approx(exchanged + passes, rel=0.01)


BLOCK, TABLE = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096, 32000 * 4096


@pytest.mark.parametrize("zero", [2, 3])
def test_the_first_gather_and_the_last_reduction_of_fsdp_are_not_hidden(zero: int) -> None:
    """Gathers of the embedding and the first block show; later ones hide behind computing."""
    few: dict[str, Any] = {"tp": (1,), "pp": (1,), "micro_batch_size": (2,), "recompute": "selective"}
    plans = search_configuration(CONFIG, **TRAINING, **few, zero=(1, zero), memory_bytes=200 * 2**30).plans
    plain, sharded = (
        next(plan.estimate.stages[0] for plan in plans if plan.degrees.zero == own) for own in (1, zero)
    )
    gathers = sharded.forward_seconds - plain.forward_seconds
    assert gathers == pytest.approx(one_way(2 * (BLOCK + TABLE)), rel=0.1)
    # The embedding's backward, a pass over memory, is hidden behind a second gather with ZeRO 3.
    reductions = sharded.backward_seconds - plain.backward_seconds
    again = one_way(2 * TABLE) if zero == 3 else 0.0
    least = one_way(4 * (BLOCK + TABLE))
    assert 0.95 * least <= reductions <= (least + again) * 1.1


@pytest.mark.parametrize(
    ("zero", "shares"), [(0, (1, 1, 1)), (1, (1, 1, 16)), (2, (1, 16, 16)), (3, (16, 16, 16))]
)
def test_states_of_each_stage_of_zero(zero: int, shares: tuple[int, int, int]) -> None:
    """Bytes of a parameter: 2 of its weight, 4 of its gradient, 12 of Adam's; whole, or a sixteenth. FSDP has
    the weights of two blocks whole, and the gradients of one in both formats."""
    few: dict[str, Any] = {"tp": (1,), "pp": (1,), "micro_batch_size": (1,), "recompute": "full"}
    plan = search_configuration(CONFIG, **TRAINING, **few, zero=zero, memory_bytes=200 * 2**30).plans[0]
    ledger = plan.estimate.stages[0].ledger
    weights, gradients, states = (
        size * PARAMETERS / share for size, share in zip((2, 4, 12), shares, strict=True)
    )
    assert ledger["weights"] == pytest.approx(2 * 2 * BLOCK if zero == 3 else weights, rel=1e-3)
    assert ledger["gradients"] == pytest.approx(gradients + (zero > 1) * (2 + 4) * BLOCK, rel=1e-3)
    assert ledger["optimizer"] == pytest.approx(states, rel=1e-3)


def test_fsdp_is_searched_without_a_pipeline() -> None:
    plans = search_configuration(CONFIG, **TRAINING, tp=(1,), pp=(1,), micro_batch_size=(2, 4)).plans
    assert {plan.degrees.zero for plan in plans} == {1, 2, 3}  # with ZeRO 0 it does not fit
    assert plans[0].degrees.zero == 3
    assert plans[0].estimate.step_seconds <= 5.50


def test_pipelines_spread_the_states_of_the_optimizer() -> None:
    plans = search_configuration(
        CONFIG, **TRAINING, tp=(1,), pp=(2, 4), virtual_stages=(1,), micro_batch_size=(1,)
    ).plans
    assert {plan.degrees.zero for plan in plans} == {1}


def test_the_stages_of_zero_that_are_named() -> None:
    for zero in (1, 0, (0, 3)):
        plans = search_configuration(
            CONFIG, **TRAINING, tp=(2,), pp=(1,), zero=zero, micro_batch_size=(1,)
        ).plans
        assert {plan.degrees.zero for plan in plans} == ({zero} if isinstance(zero, int) else set(zero))


def test_one_device_has_nothing_to_spread() -> None:
    options: dict[str, Any] = {"gpu": "h100", "mini_batch": 8, "sequence": 4096, "layers": 2}
    assert {plan.degrees.zero for plan in search_configuration(CONFIG, gpus=1, **options).plans} == {1}


@pytest.mark.slow
def test_the_answer_is_no_slower_than_fsdp() -> None:
    answer = search_configuration(CONFIG, **TRAINING)
    fsdp = next(own.plan for own in answer.baselines if own.name == "fsdp")
    assert fsdp is not None
    assert answer.plans[0].estimate.step_seconds <= min(5.50, fsdp.estimate.step_seconds)
