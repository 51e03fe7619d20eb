"""The ledger against terms worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import (
    Moment,
    StageBytes,
    Training,
    ledger,
    round_ledger,
    total,
)
from pplan.cost_models.optimizers import MIXED, Precision, StepKernels
from tests.stage_bytes import stage_workspace

STAGE = StageBytes(
    parameters=1000.0,
    trainable=800.0,
    buffers=10.0,
    saved=200.0,
    saved_input=30.0,
    input=40.0,
    received=40.0,
    sent=50.0,
    workspace=7.0,
)


def test_without_recomputation() -> None:
    terms = ledger(STAGE, in_flight=4, recompute="never", optimizer="adam")
    assert terms == {
        "weights": 1010,
        "gradients": 800,
        "optimizer": 1600,
        "weight_versions": 0,
        "activations": 4 * 230,
        "stage_inputs": 0,
        "communication": 90,
        "workspace": 7,
        "reserve": pytest.approx(0.05 * 4427),
    }
    assert total(terms) == pytest.approx(1.05 * 4427)


@pytest.mark.parametrize(("mode", "inputs"), [("always", 160), ("except_last", 120)])
def test_recomputation_keeps_inputs_and_one_micro_batch(mode: str, inputs: int) -> None:
    terms = ledger(STAGE, in_flight=4, recompute=mode, optimizer="momentum")
    assert (terms["activations"], terms["stage_inputs"], terms["optimizer"]) == (230, inputs, 800)


def test_selective_is_a_plans_word_and_no_stages() -> None:
    """A plan is called so where its stages differ; each of them recomputes in one of three ways."""
    with pytest.raises(UsageError, match="recompute 'selective': not known"):
        ledger(STAGE, in_flight=1, recompute="selective", optimizer="sgd")


def test_replicas_hold_buckets_and_versions_hold_weights() -> None:
    terms = ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd", replicas=2, weight_versions=3)
    assert (terms["communication"], terms["weight_versions"], terms["optimizer"]) == (890, 2000, 0)


def test_versions_of_a_part_of_the_layers() -> None:
    terms = ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd", weight_versions=1.5)
    assert terms["weight_versions"] == 500


def test_the_context_is_not_divided_by_the_allocator() -> None:
    without = ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd")
    context = ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd", context_bytes=512)
    assert context == without | {"context": 512}


def test_arrays_are_the_single_stages() -> None:
    both: dict[str, Any] = {
        name: np.array([value, 2 * value]) for name, value in vars(STAGE).items() if value is not None
    }

    def needs(stage: StageBytes) -> Any:
        return total(
            ledger(
                stage,
                in_flight=2,
                recompute="always",
                optimizer="adam",
                replicas=4,
                zero=3,
                precision=MIXED,
                weight_versions=2,
            )
        )

    assert needs(StageBytes(**both)).tolist() == pytest.approx([needs(STAGE), 2 * needs(STAGE)])


def test_workspace_of_a_stage_is_its_peak_above_all_that_it_saves() -> None:
    # Kept 100, 110, 150 while each layer runs: peaks 170, 200, 155.
    assert stage_workspace([100, 10, 40], [70, 90, 5]) == 50
    # The first layer's peak, 130, lies below the 150 that all save.
    assert stage_workspace([100, 10, 40], [30, 0, 0]) == 0
    assert stage_workspace([0, 0], [7, 3]) == 7


def test_only_one_micro_batch_needs_workspace() -> None:
    four = ledger(STAGE, in_flight=4, recompute="never", optimizer="sgd")
    one = ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd")
    assert four["workspace"] == one["workspace"] == 7


def test_unknown_optimizer() -> None:
    with pytest.raises(UsageError, match="'lion' is unknown"):
        ledger(STAGE, in_flight=1, recompute="never", optimizer="lion")


def test_unknown_recomputation() -> None:
    with pytest.raises(UsageError, match="'sometimes': not known"):
        ledger(STAGE, in_flight=1, recompute="sometimes", optimizer="sgd")


def test_fewer_versions_than_the_weights_themselves() -> None:
    with pytest.raises(UsageError, match="weight versions 0: must be at least 1"):
        ledger(STAGE, in_flight=1, recompute="never", optimizer="sgd", weight_versions=0)


def numbers(kernels: StepKernels, master: float = 0) -> Precision:
    return Precision(weight=2 if master else 4, gradient=2 if master else 4, master=master, kernels=kernels)


@pytest.mark.parametrize(
    ("optimizer", "precision", "temporaries"),
    [
        ("adamw", numbers("fused"), None),
        ("adamw-8bit", numbers("foreach"), None),
        ("adamw", numbers("foreach"), 800),
        ("adamw", numbers("for-loop"), 3 * 300),
        ("adam", numbers("for-loop"), 4 * 300),
        ("sgd", numbers("foreach"), 800),
        # Of float32 masters, and the gradients in float32 besides.
        ("adamw", numbers("foreach", master=4), 1600 + 1600),
        ("adamw", numbers("fused", master=4), None),
    ],
)
def test_temporaries_of_an_optimizers_step(
    optimizer: str, precision: Precision, temporaries: float | None
) -> None:
    stage = replace(STAGE, largest=300.0)
    assert Training(optimizer, precision).step_temporaries(stage) == temporaries
    spread = Training(optimizer, precision, replicas=4, zero=1).step_temporaries(stage)
    assert spread == (None if temporaries is None else temporaries / 4)


def test_the_ledger_is_the_larger_of_the_passes_and_the_optimizers_step() -> None:
    """Activations are gone when the optimizer steps; 800 bytes of temporaries take their place."""
    for in_flight in (1, 2, 3, 4, 9):
        terms = ledger(
            STAGE, in_flight=in_flight, recompute="never", optimizer="sgd", precision=numbers("foreach")
        )
        passing = in_flight * 230 + 7
        assert terms["optimizer_step"] == max(800 - passing, 0)
        kept = 1010 + 800 + 90
        assert total(terms) == pytest.approx(1.05 * (kept + max(passing, 800)))


def test_under_an_asynchronous_schedule_micro_batches_wait_while_the_optimizer_steps() -> None:
    for mode, each in (("never", 230), ("always", 40)):
        terms = ledger(
            STAGE,
            in_flight=3,
            recompute=mode,
            optimizer="sgd",
            precision=numbers("foreach"),
            weight_versions=3,
        )
        gone = terms["activations"] + terms["stage_inputs"] + terms["workspace"]
        assert terms["optimizer_step"] == max(800 + 2 * each - gone, 0)


@pytest.mark.parametrize("versions", [1.0, 3.0])
@pytest.mark.parametrize("mode", ["never", "always"])
def test_each_moment_is_a_line_of_the_micro_batches_in_flight(mode: str, versions: float) -> None:
    """So the search may divide by what each one adds."""

    def bytes_at(in_flight: float, moment: Moment) -> float:
        own = numbers("foreach")
        terms = ledger(
            STAGE,
            in_flight=in_flight,
            recompute=mode,
            optimizer="sgd",
            precision=own,
            weight_versions=versions,
            moment=moment,
        )
        return float(total(terms))

    moments: tuple[Moment, Moment] = ("passes", "step")
    for moment in moments:
        one, two, nine = (bytes_at(count, moment) for count in (1, 2, 9))
        assert nine == pytest.approx(one + 8 * (two - one))
    for count in range(1, 10):
        assert bytes_at(count, "any") == pytest.approx(max(bytes_at(count, own) for own in moments))


def test_a_ledger_in_whole_bytes_needs_no_less_than_it_does() -> None:
    """A plan that says 13,575 bytes and needs 13,575.45 does not fit into 13,575."""
    assert round_ledger({"weights": 12929.0, "reserve": 646.45}) == {"weights": 12929, "reserve": 647}
    assert round_ledger({"weights": 3.5, "gradients": 2.25, "reserve": 0.25}) == {
        "weights": 4,
        "gradients": 2,
        "reserve": 0,
    }
    random = Random(7)
    for _ in range(300):
        terms = {
            str(i): random.choice([0.0, 7.0, 1e6 * random.random()]) for i in range(random.randint(1, 9))
        }
        whole = round_ledger(terms)
        assert list(whole) == list(terms)
        assert all(abs(whole[name] - amount) < 1 for name, amount in terms.items())
        assert 0 <= sum(whole.values()) - sum(terms.values()) < 1
