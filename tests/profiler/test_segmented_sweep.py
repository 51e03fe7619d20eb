"""Sizes measured in segments on a CPU that pretends to have less memory, against the model measured whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError, ModelError, UsageError
from pplan.profiler.build_profile import build_profile
from pplan.profiler.clocks import CpuClock
from pplan.profiler.layers import as_sequential, build_chain
from pplan.profiler.losses import load_loss
from pplan.profiler.measure import profile_model
from pplan.profiler.modes import MeasurementTarget
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.segments import SegmentedSweep
from pplan.profiler.size_sweep import Progress, WholeSweep, sizes_to_try
from pplan.profiler.user_model import DoesNotFit, LoadedModel, ModelInput

MakeModel = Callable[[], nn.Sequential]

MUCH = 10**9
UNHELD = ", and the layers' seconds were not held against the whole model's"


def subject_of(
    model: nn.Module, clock: Any, given: Tensor | None = None, **options: Any
) -> MeasurementTarget:
    example = ModelInput.of(torch.ones(1, 4) if given is None else given)
    loaded = LoadedModel(model, "model", example)
    chain = build_chain(model, example, granularity=options.pop("granularity", "block"))
    return MeasurementTarget(loaded, chain, torch.device("cpu"), torch.float32, clock, 0, **options)


def swept(
    subject: MeasurementTarget,
    free: int | Callable[[], int],
    sizes: Sequence[int] | None = None,
    budget: float = 1e6,
    rounds: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> SegmentedSweep:
    asked = free if callable(free) else lambda: free
    sweep = SegmentedSweep(subject, sizes, budget, rounds, progress, free_bytes=asked)
    sweep.measure()
    return sweep


def left_of(sweep: SegmentedSweep) -> list[tuple[int, str]]:
    return [(left.micro_batch_size, left.reason) for left in sweep.unmeasured]


def sizes_of(sweep: SegmentedSweep) -> list[int]:
    return [result.size for result in sweep.results]


def whole_profile(subject: MeasurementTarget, sizes: Sequence[int]) -> Profile:
    sweep = WholeSweep(subject, sizes, 1e6, 1)
    sweep.measure()
    return build_profile(subject, sweep.results, sweep.unmeasured, sweep.notes)


@pytest.mark.parametrize("loss", ["none", "cross-entropy"])
@pytest.mark.parametrize(("free", "segments"), [(MUCH, 1), (32_000, 2), (28_000, 3)])
def test_the_profile_has_the_bytes_of_the_whole(
    free: int, segments: int, loss: str, convolutions: MakeModel
) -> None:
    given = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    subject = subject_of(convolutions(), CpuClock(), given, loss=load_loss(loss, 0))
    sweep = swept(subject, free, [3], rounds=1)
    profile = build_profile(subject, sweep.results, sweep.unmeasured, sweep.notes)
    expected = whole_profile(subject, [3])
    note = f"does not fit on cpu whole: measured in {segments} segment{'s' * (segments > 1)}{UNHELD}"
    assert profile.notes[0] == note
    assert (profile.whole, len(expected.whole)) == ([], 1)
    assert Profile.model_validate_json(profile.model_dump_json()) == profile
    assert [layer.name for layer in profile.layers] == [layer.name for layer in expected.layers]
    same = ("micro_batch_size", "saved_bytes", "saved_input_bytes", "output_bytes", "forward_workspace_bytes")
    last = sweep.segments(3)[-1].start
    for index, (found, wanted) in enumerate(zip(profile.layers, expected.layers, strict=True)):
        for ours, theirs in zip(found.costs, wanted.costs, strict=True):
            for name in same:
                assert getattr(ours, name) == getattr(theirs, name), (found.name, name)
            # Before the last segment neither the model's output nor its gradient is held, but two numbers.
            assert ours.backward_workspace_bytes is not None
            assert theirs.backward_workspace_bytes is not None
            above = ours.backward_workspace_bytes - theirs.backward_workspace_bytes
            assert above == (2 * 4 - 2 * (3 * 2 * 4) if index < last else 0)
            assert ours.forward_seconds > 0
    if expected.loss is not None:
        assert profile.loss is not None
        for ours, theirs in zip(profile.loss.costs, expected.loss.costs, strict=True):
            assert (ours.saved_bytes, ours.output_bytes) == (theirs.saved_bytes, theirs.output_bytes)
            assert ours.workspace_bytes == theirs.workspace_bytes > 0


def test_seconds_and_rounds_follow_from_the_clock(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5), takes(clock, 7, 11))
    sweep = swept(subject_of(model, clock), MUCH, [1, 4], rounds=2)
    assert sizes_of(sweep) == [1, 4]
    for result in sweep.results:
        assert result.rounds.medians("forward").tolist() == [result.size, 3 * result.size, 7 * result.size]
        assert result.rounds.medians("backward").tolist() == [
            2 * result.size,
            5 * result.size,
            11 * result.size,
        ]
        assert (len(result.rounds.layers), len(result.rounds.whole)) == (2, 0)
    assert (sweep.unmeasured, len(sweep.notes)) == ([], 1)


def test_the_budget_ends_the_default_sizes(clock: Any, takes: Any) -> None:
    # A pass takes 3 s a sample. A size: 2 counted on meta, a warm-up, 2 that count, 3 timed: 24 s for size 1,
    # 48 for size 2; size 4 is predicted to take 96 of the 27 left, besides 11 for finding the layers.
    begun = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), MUCH, budget=110.0)
    assert sizes_of(begun) == [1, 2]
    assert left_of(begun) == [(4, "budget")]
    assert begun.unmeasured[0].detail == "it would take about 96 s, 27 s of 110 s are left"


def test_named_sizes_behind_the_budget_are_recorded_too(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2))
    sweep = swept(subject_of(model, clock), MUCH, [2, 8, 16], budget=0.001)
    assert sizes_of(sweep) == [2]
    assert left_of(sweep) == [(8, "budget"), (16, "budget")]
    assert sweep.unmeasured[1].detail.startswith("after micro-batch size 8: it would take about")


def test_rounds_that_are_named_are_made_whatever_they_cost(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2))
    assert sizes_of(swept(subject_of(model, clock), MUCH, [1, 2, 4], budget=0.001, rounds=1)) == [1, 2, 4]


def test_default_sizes_end_where_a_layer_alone_does_not_fit(clock: Any, takes: Any) -> None:
    model = nn.Sequential(*(takes(clock, 1, 2) for _ in range(4)))
    sweep = swept(subject_of(model, clock), 560)
    assert sizes_of(sweep) == [1, 2, 4]
    assert left_of(sweep) == [(8, "does not fit")]
    assert "does not fit on cpu even alone" in sweep.unmeasured[0].detail
    assert sweep.notes == [
        f"does not fit on cpu whole: measured in 1 segment{UNHELD}",
        "from micro-batch size 4 on: measured in 3 segments",
    ]


def test_a_layer_too_large_at_the_smallest_size_is_an_error(clock: Any, takes: Any) -> None:
    with pytest.raises(
        DoesNotFit, match="micro-batch size 4: layer 0 does not fit on cpu even alone"
    ) as caught:
        swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), 100, [4, 8])
    assert "`micro_batch_sizes`" in caught.value.hint


def refuse(monkeypatch: pytest.MonkeyPatch, times: int, error: Exception) -> list[int]:
    """The allocator refuses so many times; how many segments were tried."""
    tried: list[int] = []
    measure = SegmentedSweep._measure_segments

    def refusing(sweep: SegmentedSweep, size: int, segments: Sequence[range]) -> Any:
        tried.append(len(segments))
        if len(tried) > times:
            return measure(sweep, size, segments)
        raise error

    monkeypatch.setattr(SegmentedSweep, "_measure_segments", refusing)
    return tried


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee the manual")


def test_memory_that_runs_out_all_the_same_makes_more_segments(
    monkeypatch: pytest.MonkeyPatch, convolutions: MakeModel
) -> None:
    tried = refuse(monkeypatch, 1, OUT)
    subject = subject_of(convolutions(), CpuClock(), torch.randn(2, 3, 10, 10))
    sweep = swept(subject, 38_000, [3], rounds=1)
    assert tried == [1, 3]
    assert sweep.notes == [f"does not fit on cpu whole: measured in 3 segments{UNHELD}"]


def test_memory_that_runs_out_always_is_told(monkeypatch: pytest.MonkeyPatch, clock: Any, takes: Any) -> None:
    tried = refuse(monkeypatch, 9, OUT)
    subject = subject_of(nn.Sequential(takes(clock, 1, 2)), clock)
    with pytest.raises(DoesNotFit, match="size 2 does not fit even in segments: CUDA out of memory"):
        swept(subject, MUCH, [2])
    # One layer alone cannot be taken apart any more.
    assert tried == [1]


@pytest.mark.parametrize(
    "error", [MachineError("no compiler", "Install one."), ModelError("mine", "Mend it.")]
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, clock: Any, takes: Any
) -> None:
    subject = subject_of(nn.Sequential(takes(clock, 1, 2)), clock)
    refuse(monkeypatch, 9, error)
    with pytest.raises(type(error), match=str(error)):
        swept(subject, MUCH, [2, 4])


def test_one_sample_that_batch_norm_refuses_is_left_out(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), nn.BatchNorm1d(4))
    sweep = swept(subject_of(model, clock), MUCH, budget=60.0)
    assert sizes_of(sweep)[0] == 2
    assert left_of(sweep)[0] == (1, "refused")
    assert sweep.unmeasured[0].detail.startswith("layer 1 (BatchNorm1d)")
    with pytest.raises(ModelError, match=r"layer 1 \(BatchNorm1d\)"):
        swept(subject_of(model, clock), MUCH, [1])


def test_a_sequential_made_of_layers_keeps_them(clock: Any) -> None:
    """Its granularity tells how the layers were found, not how to find them again."""
    inner = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    whole = build_chain(inner, torch.ones(1, 4), granularity="module:0")
    assert len(whole) == 2
    made = as_sequential(whole)
    subject = subject_of(made, clock)
    assert subject.chain.granularity == "module:0"
    assert [layer.name for layer in subject.chain.layers] == [layer.name for layer in whole.layers]
    assert len(swept(subject, MUCH, [2], rounds=1).results[0].counted.saved_bytes) == 2


def test_progress_tells_layers_and_the_budget(clock: Any, takes: Any) -> None:
    told: list[Progress] = []
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 1, 2))
    swept(subject_of(model, clock), MUCH, [1, 2], budget=300.0, progress=told.append)
    assert [(one.micro_batch_size, one.layer) for one in told] == [(1, "0"), (1, "1"), (2, "0"), (2, "1")]
    assert 0 < told[0].fraction < told[-1].fraction <= 1


def test_the_working_copy_stays_where_it_is(clock: Any, takes: Any) -> None:
    subject = subject_of(nn.Sequential(takes(clock, 1, 2), nn.Linear(4, 4)), clock)
    homes = [parameter.data_ptr() for parameter in subject.loaded.module.parameters()]
    swept(subject, MUCH, [1], rounds=1)
    assert [parameter.data_ptr() for parameter in subject.loaded.module.parameters()] == homes
    assert all(parameter.grad is None for parameter in subject.loaded.module.parameters())


def profiled(model: nn.Module, memory_bytes: int | None, sizes: Sequence[int] | None) -> Profile:
    given = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    return profile_model(
        (model, given),
        ProfileOptions(micro_batch_sizes=sizes),
        rounds=1,
        parts=False,
        memory_bytes=memory_bytes,
    )


def test_a_model_beyond_the_devices_memory_is_measured_in_segments(convolutions: MakeModel) -> None:
    found, expected = profiled(convolutions(), 32_000, [3]), profiled(convolutions(), None, [3])
    assert found.notes[0] == f"does not fit on cpu whole: measured in 2 segments{UNHELD}"
    assert (found.whole, len(expected.whole), found.device) == ([], 1, "cpu")
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.parameter_bytes == theirs.parameter_bytes
        assert ours.cut_reason == theirs.cut_reason
        assert ours.costs[0].saved_bytes == theirs.costs[0].saved_bytes
        assert ours.costs[0].forward_workspace_bytes == theirs.costs[0].forward_workspace_bytes


def test_sizes_beyond_the_devices_memory_are_left_where_the_smallest_fits(convolutions: MakeModel) -> None:
    """The largest is far above the others: what a size is thought to need beforehand is up to half too much,
    as the kernels of convolutions, which differ by processor, need more at some sizes."""
    sizes = [1, 2, 8]
    whole = profiled(convolutions(), None, sizes)
    largest = whole.whole[2].peak_bytes
    assert largest is not None
    found = profiled(convolutions(), largest * 9 // 10, sizes)
    assert [each.micro_batch_size for each in found.whole] == [1, 2]
    assert [(left.micro_batch_size, left.reason) for left in found.unmeasured] == [(8, "does not fit")]
    assert [each.micro_batch_size for each in profiled(convolutions(), 2 * largest, sizes).whole] == sizes


def test_a_layer_beyond_the_devices_memory_is_an_error(convolutions: MakeModel) -> None:
    with pytest.raises(DoesNotFit, match="layer 0 does not fit on cpu even alone"):
        profiled(convolutions(), 1000, [3])
    with pytest.raises(UsageError, match="memory_bytes=0"):
        profiled(convolutions(), 0, [3])


def test_default_sizes_are_those_of_a_model_that_fits(clock: Any, takes: Any) -> None:
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), MUCH, budget=1e9)
    assert sizes_of(sweep) == [1, 2, 4, 8, 16, 32, 64] == list(sizes_to_try(None, torch.device("cpu")))
