"""Which sizes are measured and how often, by a clock that only the layers move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError, ModelError
from pplan.profiler import sweep as sweep_module
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_file import Profile
from pplan.profiler.sweep import Progress


def measured(model: nn.Module, clock: Any, **options: Any) -> Profile:
    given = options.pop("given", torch.ones(1, 4))
    return profile_model((model, given), device="cpu", clock=clock, **options)


def test_every_figure_follows_from_the_clock(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5))
    profile = measured(model, clock, micro_batch_sizes=[4, 1, 4], rounds=3)
    assert profile.micro_batch_sizes == [1, 4]
    for layer, forward, backward in zip(profile.layers, (1, 3), (2, 5), strict=True):
        assert [cost.forward_seconds for cost in layer.costs] == [forward, 4 * forward]
        assert [cost.backward_seconds for cost in layer.costs] == [backward, 4 * backward]
        assert [cost.spread for cost in layer.costs] == [0, 0]
        assert [cost.forward_host_seconds for cost in layer.costs] == [None, None]
        assert [cost.output_bytes for cost in layer.costs] == [16, 64]
    for whole, size in zip(profile.whole, (1, 4), strict=True):
        assert (whole.forward_seconds, whole.backward_seconds) == (4 * size, 7 * size)
        assert whole.closing_ratio == whole.forward_closing_ratio == whole.backward_closing_ratio == 1
        assert (whole.spread, whole.rounds) == (0, 3)
    assert profile.notes == []


def test_host_seconds_are_stored_where_the_clock_has_them(device_clock: Any, takes: Any) -> None:
    profile = measured(
        nn.Sequential(takes(device_clock, 1, 2)), device_clock, micro_batch_sizes=[2], rounds=1
    )
    cost = profile.layers[0].costs[0]
    assert (cost.forward_host_seconds, cost.backward_host_seconds) == (0.5, 1)


def test_the_budget_decides_how_far_the_default_sizes_go(clock: Any, takes: Any) -> None:
    # A pass takes 3 s a sample, a round 6. Size 1: both warm-up passes and 3 rounds, 24 s. Size 2: predicted
    # 4 rounds of 12 s, below the 76 s left; in truth 42. Size 4: predicted 96 s of 34. Then rounds 4 and 5 of
    # size 1, round 4 of size 2; its fifth would take 12 s of 10.
    profile = measured(nn.Sequential(takes(clock, 1, 2)), clock, budget_seconds=100.0)
    assert profile.micro_batch_sizes == [1, 2]
    assert [whole.rounds for whole in profile.whole] == [5, 4]
    assert clock.now() < 100
    assert [(left.micro_batch_size, left.reason) for left in profile.unmeasured] == [(4, "budget")]
    assert profile.unmeasured[0].detail == "it would take about 96 s, 34 s of 100 s are left"
    assert any("micro-batch size 4 was not measured (budget)" in note for note in profile.notes)


def test_the_smallest_size_is_measured_whatever_the_budget(clock: Any, takes: Any) -> None:
    profile = measured(
        nn.Sequential(takes(clock, 1, 2)), clock, micro_batch_sizes=[8, 16, 32], budget_seconds=0.001
    )
    assert profile.micro_batch_sizes == [8]
    assert profile.whole[0].rounds == 3
    assert [(left.micro_batch_size, left.reason) for left in profile.unmeasured] == [
        (16, "budget"),
        (32, "budget"),
    ]


def test_the_budget_that_would_do_for_the_named_sizes(clock: Any, takes: Any) -> None:
    # Size 8 takes 24 s a pass, both warm-up passes and 3 rounds 192 s. Predicted: 4 rounds of 96 s for size
    # 16, of 192 s for size 32: 384 + 768 s more.
    model = nn.Sequential(takes(clock, 1, 2))
    profile = measured(model, clock, micro_batch_sizes=[8, 16, 32], budget_seconds=200.0)
    assert profile.unmeasured[0].detail == (
        "it would take about 384 s, 8 s of 200 s are left; "
        "a budget of about 1344 s would do for all that were asked for"
    )
    assert profile.notes[-2].startswith(
        "micro-batch size 16 was asked for and not measured (budget): it would"
    )
    assert profile.notes[-1].startswith("micro-batch size 32 was asked for and not measured (budget): after")
    again = measured(model, clock, micro_batch_sizes=[8, 16, 32], budget_seconds=1344.0)
    assert (again.micro_batch_sizes, again.unmeasured, again.notes) == ([8, 16, 32], [], [])


def test_unspent_time_is_left(clock: Any, takes: Any) -> None:
    profile = measured(nn.Sequential(takes(clock, 1, 2)), clock, micro_batch_sizes=[1, 2], budget_seconds=1e6)
    assert [whole.rounds for whole in profile.whole] == [5, 5]


def test_default_sizes_end_at_64_on_a_cpu(clock: Any, takes: Any) -> None:
    profile = measured(nn.Sequential(takes(clock, 1, 2)), clock, budget_seconds=1e6)
    assert profile.micro_batch_sizes == [1, 2, 4, 8, 16, 32, 64]
    assert profile.unmeasured == []


def test_the_rest_goes_where_the_spread_is(clock: Any, takes: Any) -> None:
    calls = {1: 0, 2: 0}

    def noisy(batch: int) -> float:
        calls[batch] += 1
        return 1.0 + (0.3 if batch == 2 and calls[2] % 3 == 0 else 0.0)

    layer = takes(clock, 1, 1)
    layer.forward_of = noisy
    profile = measured(nn.Sequential(layer), clock, micro_batch_sizes=[1, 2], budget_seconds=300.0)
    steady, varying = profile.whole
    assert steady.rounds == 5
    assert varying.rounds is not None
    assert varying.rounds > 20
    assert clock.now() <= 300


def test_a_size_that_turns_out_to_fit_is_measured_after_all(clock: Any, takes: Any) -> None:
    # The first 8 passes take 10 s, as on a busy machine, all others 1 s a sample. After 3 rounds size 2 is
    # predicted to take 160 s, of which 120 are left; after 6 rounds 88 s, of which 114 are left.
    calls = []

    def calming(batch: int) -> float:
        calls.append(batch)
        return 10.0 if len(calls) <= 8 + PROBES else float(batch)

    layer = takes(clock, 1, 2**-20)
    layer.forward_of = calming
    profile = measured(nn.Sequential(layer), clock, budget_seconds=200.0)
    assert profile.micro_batch_sizes[:2] == [1, 2]
    assert profile.layers[0].costs[1].forward_seconds == pytest.approx(2)
    assert profile.whole[0].rounds is not None
    assert profile.whole[0].rounds >= 6


PROBES = 1
"""Runs that find the cuts."""


class Outgrows(nn.Module):
    """Needs memory that is not there from `limit` samples on."""

    def __init__(self, limit: int, error: Exception) -> None:
        super().__init__()
        self.inner, self.limit, self.error = nn.Linear(4, 4), limit, error

    def forward(self, given: Tensor) -> Tensor:
        if len(given) >= self.limit and given.device.type != "meta":
            raise self.error
        result: Tensor = self.inner(given)
        return result


REFUSALS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
]


@pytest.mark.parametrize("error", REFUSALS)
def test_out_of_memory_ends_the_sweep(error: Exception, clock: Any, takes: Any) -> None:
    profile = measured(nn.Sequential(takes(clock, 1, 2), Outgrows(4, error)), clock, budget_seconds=1e6)
    assert profile.micro_batch_sizes == [1, 2]
    (left,) = profile.unmeasured
    assert (left.micro_batch_size, left.reason) == (4, "does not fit")
    assert left.detail == str(error).split("\n")[0]


def test_named_sizes_after_one_that_does_not_fit_are_recorded_too(clock: Any, takes: Any) -> None:
    profile = measured(
        nn.Sequential(takes(clock, 1, 2), Outgrows(4, REFUSALS[0])),
        clock,
        micro_batch_sizes=[2, 6, 8],
        budget_seconds=1e6,
    )
    assert profile.micro_batch_sizes == [2]
    assert [(left.micro_batch_size, left.reason) for left in profile.unmeasured] == [
        (6, "does not fit"),
        (8, "does not fit"),
    ]


def test_out_of_memory_at_the_smallest_size_is_an_error(clock: Any, takes: Any) -> None:
    with pytest.raises(
        MachineError, match="smallest micro-batch size, 4, does not fit: CUDA out of"
    ) as caught:
        measured(nn.Sequential(takes(clock, 1, 2), Outgrows(4, REFUSALS[0])), clock, micro_batch_sizes=[4, 8])
    assert "--micro-batch-sizes" in caught.value.hint


def test_a_cpu_size_that_would_not_fit_is_not_begun(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One sample saves 16 bytes, so 8 samples need 1.2 * 8 * 16 = 153.6.
    monkeypatch.setattr(sweep_module, "free_host_bytes", lambda: 150)
    profile = measured(nn.Sequential(takes(clock, 1, 2)), clock, budget_seconds=1e6)
    assert profile.micro_batch_sizes == [1, 2, 4]
    assert [(left.micro_batch_size, left.reason) for left in profile.unmeasured] == [(8, "does not fit")]


def test_one_sample_that_batch_norm_refuses_is_left_out(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), nn.BatchNorm1d(4))
    profile = measured(model, clock, budget_seconds=100.0)
    assert profile.micro_batch_sizes[0] == 2
    assert any("micro-batch size 1 is left out: layer 1 (BatchNorm1d)" in note for note in profile.notes)
    with pytest.raises(ModelError, match=r"layer 1 \(BatchNorm1d\)"):
        measured(model, clock, micro_batch_sizes=[1])


def test_progress_tells_layers_passes_and_the_budget(clock: Any, takes: Any) -> None:
    told: list[Progress] = []
    measured(
        nn.Sequential(takes(clock, 1, 2), takes(clock, 1, 2)),
        clock,
        budget_seconds=300.0,
        progress=told.append,
    )
    assert [one.layer for one in told[:2]] == ["0", "1"]
    assert {one.doing for one in told} >= {"warm-up", "round 1 of 3", "round 4"}
    fractions = [one.fraction for one in told]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert 0.3 < fractions[-1] <= 1
