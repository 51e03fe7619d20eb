"""Which sizes are measured and how often, by a clock that only the layers move."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError, ModelError
from pplan.profiler import size_run as size_passes_module
from pplan.profiler import size_sweep as whole_sweep_module
from pplan.profiler.build_profile import build_profile
from pplan.profiler.layer import Layer, LayerChain
from pplan.profiler.layers import build_chain
from pplan.profiler.losses import Loss
from pplan.profiler.modes import MeasurementTarget, Modes
from pplan.profiler.passes import LayerTimes, run_whole
from pplan.profiler.size_run import SizeRun
from pplan.profiler.size_sweep import Progress, WholeSweep, host_note
from pplan.profiler.timed_passes import run_parts
from pplan.profiler.user_model import LoadedModel, ModelInput

PROBE = 7
"""Seconds of the runs, of one, two and four samples, that find the cuts and what they hand on."""


def subject_of(model: nn.Module, clock: Any, given: object = None, **options: Any) -> MeasurementTarget:
    example = ModelInput.of(torch.ones(1, 4) if given is None else given)
    loaded = LoadedModel(model, "model", example)
    options = {"dtype": torch.float32, "clock": clock, "seed": 0, **options}
    return MeasurementTarget(loaded, build_chain(model, example), torch.device("cpu"), **options)


def swept(
    subject: MeasurementTarget,
    sizes: Sequence[int] | None = None,
    budget: float = 1e6,
    rounds: int | None = None,
    **options: Any,
) -> WholeSweep:
    sweep = WholeSweep(subject, sizes, budget, rounds, **options)
    sweep.measure()
    return sweep


def sizes_of(sweep: WholeSweep) -> list[int]:
    return [run.size for run in sweep.runs]


def rounds_of(sweep: WholeSweep) -> list[int]:
    return [len(run.rounds) for run in sweep.runs]


def left_of(sweep: WholeSweep) -> list[tuple[int, str]]:
    return [(left.micro_batch_size, left.reason) for left in sweep.unmeasured]


def test_every_figure_follows_from_the_clock(clock: Any, takes: Any) -> None:
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5)), clock), [1, 4], rounds=3)
    assert sizes_of(sweep) == [1, 4]
    for run in sweep.runs:
        assert run.rounds.medians("forward").tolist() == [run.size, 3 * run.size]
        assert run.rounds.medians("backward").tolist() == [2 * run.size, 5 * run.size]
        assert run.rounds.spreads() == [0, 0]
        assert run.rounds.host_medians("forward") == [None, None]
        assert run.rounds.whole_medians() == (4 * run.size, 7 * run.size)
        assert run.rounds.part_medians("input") == [None, None]
        assert run.rounds.loss_medians() is None
        assert (len(run.rounds), run.rounds.parts) == (3, [])
        assert run.counted.output_bytes == [16 * run.size] * 2
        assert run.counted.memory is not None
        assert run.counted.memory.saved == tuple(run.counted.saved_bytes)
        # In a layer's backward: two weights and their gradients; the input, the layer's own input or the
        # gradient that came in, the output and its gradient; two products and the sum of one.
        assert run.counted.peak_bytes == 4 * 4 + 5 * 16 * run.size + 16 * run.size + 4
        assert host_note(run) is None
    assert sweep.notes == []


def test_only_the_size_in_hand_holds_its_input_and_first_gradients(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SizeRun] = []
    plain = SizeRun._timed_whole

    def watched(run: SizeRun) -> None:
        plain(run)
        made.append(run)
        others = {id(other): other for other in made if other is not run}.values()
        assert (run._passes._input is not None, len(run._passes._gradients._by_shape)) == (True, 1)
        assert all(
            other._passes._input is None and not other._passes._gradients._by_shape for other in others
        )

    monkeypatch.setattr(SizeRun, "_timed_whole", watched)
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), [1, 2, 4])
    # The rounds behind the first ones go back to sizes that were put away.
    assert [run.size for run in made[9:]] == [1, 2, 4, 1, 2, 4]
    assert rounds_of(sweep) == [5, 5, 5]


def test_backward_in_two_parts(device_clock: Any, parted: Any) -> None:
    model = nn.Sequential(parted(device_clock, 1, 2, 4), parted(device_clock, 8, 16, 32))
    sweep = swept(subject_of(model, device_clock), [2], rounds=3, parts=True)
    rounds = sweep.runs[0].rounds
    assert rounds.medians("backward").tolist() == [4, 48]
    assert rounds.part_medians("input") == [0, 16]
    assert rounds.part_medians("weight") == [4, 32]
    assert rounds.backward_parts_ratio() == 1
    assert rounds.host_medians("forward") == [0.25, 2]
    assert [len(passes) for passes in (rounds.layers, rounds.whole, rounds.parts)] == [3, 3, 3]


def test_parts_that_take_much_longer_than_the_whole_are_noted(clock: Any, takes: Any) -> None:
    # An operation that computes both gradients runs in both parts; the first layer's in the second alone.
    subject = subject_of(nn.Sequential(takes(clock, 1, 2), takes(clock, 1, 2)), clock)
    sweep = swept(subject, [1], rounds=1, parts=True)
    notes = build_profile(subject, sweep.results, [], []).notes
    assert [note for note in notes if "two parts" in note] == [
        "micro-batch size 1: a backward in two parts takes 1.50 times as long as a whole one; zero-bubble "
        "schedules pay for it: compare them with 1f1b, or use a larger micro-batch"
    ]


@pytest.mark.parametrize(("parts", "expected"), [(False, "lw wl lw wl"), (True, "lwp wpl plw lwp")])
def test_each_round_begins_with_another_pass(
    parts: bool, expected: str, clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SizeRun(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), 1, parts=parts)
    seen: list[str] = []
    for name in ("_timed_layers", "_timed_whole", "_timed_parts"):
        monkeypatch.setattr(run, name, lambda letter=name[7]: seen.append(letter))
    for _ in range(4):
        run.round()
        seen.append(" ")
    assert "".join(seen).strip() == expected


class Accumulates(nn.Module):
    """Its backward takes 2 s, and 3 more where its weight has a gradient already."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock = clock

    def forward(self, given: Tensor) -> Tensor:
        self.clock.advance(1.0, 1.0)
        result = given * self.weight
        result.register_hook(self._backward)  # type: ignore[no-untyped-call]
        return result

    def _backward(self, gradient: Tensor) -> None:  # noqa: ARG002
        self.clock.advance(2.0 if self.weight.grad is None else 5.0, 0.0)


@pytest.mark.parametrize("rounds", [1, None])
def test_the_first_backward_of_a_step_adds_to_no_gradients(clock: Any, rounds: int | None) -> None:
    subject = subject_of(nn.Sequential(Accumulates(clock)), clock)
    sweep = swept(subject, [1, 2], rounds=rounds, parts=True)
    for run in sweep.runs:
        assert run.rounds.whole_medians() == (1, 5)
        assert run.rounds.first_backward() == 2
    assert sweep.accumulation() == [0]  # of this clock, which only the model moves
    profile = build_profile(subject, sweep.results, [], [], [1.0])
    assert [layer.accumulation_seconds for layer in profile.layers] == [1]
    assert [(each.backward_seconds, each.first_backward_seconds) for each in profile.whole] == [
        (5, 2),
        (5, 2),
    ]
    (note,) = [note for note in profile.notes if "first backward" in note]
    assert "than predicted from the others: -40% at size 1, -40% at size 2" in note
    assert not [
        note for note in build_profile(subject, sweep.results, [], [], [3.0]).notes if "first" in note
    ]
    without = swept(subject, [1], rounds=1)
    assert without.runs[0].rounds.first_backward() is None


class Refuses(nn.Module):
    """Takes its gradient once only; a backward in two parts asks twice."""

    def __init__(self, error: Exception, limit: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.error, self.limit = error, limit

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = _Refuses.apply(given, self.weight, self)
        return result


class _Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, layer: Refuses) -> Tensor:
        ctx.layer, ctx.asked = layer, 0
        ctx.save_for_backward(weight)
        return given * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.asked += 1
        if ctx.asked > 1 and len(gradient) >= ctx.layer.limit:
            raise ctx.layer.error
        (weight,) = ctx.saved_tensors
        return gradient * weight, gradient.sum().reshape(1), None


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore"),
            "CUDA out of memory",
        ),
        (RuntimeError("not twice"), "the model's backward failed: RuntimeError: not twice"),
    ],
)
def test_parts_that_fail_are_left_out_and_nothing_else(
    error: Exception, said: str, clock: Any, takes: Any
) -> None:
    model = nn.Sequential(takes(clock, 1, 2), Refuses(error, 2), takes(clock, 1, 2))
    sweep = swept(subject_of(model, clock), [1, 2], rounds=3, parts=True)
    assert [len(run.rounds.parts) for run in sweep.runs] == [3, 0]
    assert rounds_of(sweep) == [3, 3]
    assert sweep.unmeasured == []
    (note,) = sweep.notes
    assert note.startswith(f"micro-batch size 2 has no backward in two parts: {said}")


def test_parts_that_fail_in_the_middle_of_a_round(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = run_parts, []

    def once_too_often(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(*args, **options)

    monkeypatch.setattr(size_passes_module, "run_parts", once_too_often)
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), [1], parts=True)
    assert len(calls) == 4
    assert rounds_of(sweep) == [5]
    assert sweep.runs[0].rounds.parts == []
    assert sweep.notes == ["micro-batch size 1 has no backward in two parts: CUDA out of memory"]


def test_parts_that_would_not_fit_in_a_cpus_memory_are_not_begun(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One sample saves 16 bytes: of 8, parts need 2.4 * 128 = 307 and the others 1.2 * 128 = 154.
    monkeypatch.setattr(whole_sweep_module, "free_host_bytes", lambda: 200)
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), [4, 8], rounds=1, parts=True)
    assert [len(run.rounds.parts) for run in sweep.runs] == [1, 0]
    assert "micro-batch size 8 has no backward in two parts: it would need" in sweep.notes[0]


def test_the_loss_is_measured_besides_the_layers(clock: Any, takes: Any) -> None:
    inner = takes(clock, 10, 20)
    loss = Loss("mine", lambda output: inner(output).sum())
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock, loss=loss), [2], rounds=1)
    (run,) = sweep.runs
    assert run.rounds.medians("forward").tolist() == [2]
    assert run.rounds.medians("backward").tolist() == [4]
    assert run.rounds.whole_medians() == (2, 4)
    measured = run.rounds.loss_medians()
    assert measured is not None
    assert (measured.forward, measured.backward) == (20, 40)
    # The loss' function is no part of the model: the weight that it saves counts too.
    assert (run.counted.loss_saved_bytes, run.counted.loss_output_bytes) == (2 * 16 + 4, 4)


def test_the_input_is_converted_as_the_model_is(clock: Any) -> None:
    seen: list[tuple[torch.dtype, bool]] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(2, 2, 1)

        def forward(self, given: Tensor) -> Tensor:
            if not given.is_meta:
                seen.append((given.dtype, given.is_contiguous(memory_format=torch.channels_last)))
            clock.advance(1.0, 1.0)
            result: Tensor = self.inner(given)
            return result

    modes = Modes(channels_last=True)
    model = modes.converted(nn.Sequential(Looks()).double())
    given = torch.ones(2, 2, 3, 3, dtype=torch.float64)
    subject = subject_of(model, clock, given, modes=modes, dtype=torch.float64)
    subject = dataclasses.replace(
        subject, loaded=dataclasses.replace(subject.loaded, example=ModelInput.of(given.float()))
    )
    seen.clear()
    swept(subject, [2], rounds=1)
    assert set(seen) == {(torch.float64, True)}


def test_autocast_reaches_every_pass(clock: Any) -> None:
    seen: list[bool] = []

    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            clock.advance(1.0, 1.0)
            return super().forward(input)

    subject = subject_of(nn.Sequential(Looks(4, 4)), clock, modes=Modes(amp="bf16"))
    seen.clear()
    swept(subject, [2], rounds=1, parts=True)
    # Warm-up: bytes saved, bytes held, whole, parts. A round: three. And one without gradients to add to.
    assert seen == [True] * 8


def test_several_inputs(clock: Any, takes: Any) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = takes(clock, 1, 2)

        def forward(self, first: Tensor, second: Tensor) -> Tensor:
            result: Tensor = self.inner(first) + second
            return result

    class OfTuple(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
            result: Tensor = self.inner(*given)
            return result

    model = Adds()
    layer = Layer("all", "Adds", OfTuple(model), None, tuple(model.parameters()), (), None)
    example = ModelInput.of({"second": torch.ones(1, 4), "first": torch.ones(1, 4)})
    loaded, chain = LoadedModel(model, "model", example), LayerChain("model", (layer,), False)
    subject = MeasurementTarget(loaded, chain, torch.device("cpu"), torch.float32, clock, 0)
    sweep = swept(subject, [3], rounds=2)
    assert sweep.runs[0].rounds.medians("forward").sum() == 3
    assert sweep.runs[0].rounds.whole_medians() == (3, 6)


def test_a_size_that_the_host_limits_is_told(clock: Any, takes: Any) -> None:
    run = SizeRun(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), 4)
    device, host = np.array([0.004]), np.array([0.007])
    run.rounds.layers.append(LayerTimes(device, device + 0.001, host, host))
    assert host_note(run) == "micro-batch size 4 is bound by the host: 14 ms to launch, 9 ms on the device"
    run.rounds.layers[0] = LayerTimes(host, host, device, device)
    assert host_note(run) is None


@pytest.mark.slow
def test_what_is_compiled_gets_all_its_rounds_before_the_next_size(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, compiled = torch.compile, []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(len(inputs[0]) if inputs else 0)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda code, **options: plain(code, backend=backend, **options))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    subject = subject_of(model, clock, modes=Modes(compile=True))
    sweep = swept(subject, [1, 2], parts=True)
    assert rounds_of(sweep) == [5, 5]
    # Each layer, and the model, once for each size.
    assert len(compiled) == 2 * 3
    assert all(run.counted.memory and run.counted.peak_bytes and not run.rounds.parts for run in sweep.runs)
    assert sweep.notes == []


def test_what_is_compiled_has_no_workspace_where_no_allocator_tells(
    monkeypatch: pytest.MonkeyPatch, clock: Any
) -> None:
    monkeypatch.setattr(torch, "compile", lambda code, **_options: code)
    monkeypatch.delattr(torch.autograd, "_enable_profiler_legacy")
    sweep = swept(subject_of(nn.Linear(4, 4), clock, modes=Modes(compile=True)), [1])
    assert sweep.runs[0].counted.memory is None
    (note,) = sweep.notes
    assert note.startswith("compiled for the CPU: ")


def test_the_budget_decides_how_far_the_default_sizes_go(clock: Any, takes: Any) -> None:
    # A pass takes 3 s a sample, a round 6. Size 1: three warm-up passes and a round, 15 s. One round each of
    # sizes 2 and 4 takes 30 and 60 s, so that 90 of the 111 s left are kept, and 2 more rounds take 12.
    # Size 2: 30 s, and 69 are left; size 4: 60 s, and 9 are left, for a fourth round of size 1.
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), budget=126.0)
    assert sizes_of(sweep) == [1, 2, 4]
    assert rounds_of(sweep) == [4, 1, 1]
    assert clock.now() == PROBE + 27 + 30 + 60 + 6
    assert left_of(sweep) == [(8, "budget")]
    assert sweep.unmeasured[0].detail == "it would take about 216 s, 9 s of 126 s are left"


def test_three_sizes_come_before_further_rounds(clock: Any, takes: Any) -> None:
    # As above; where there is no time for a third size, the second gets its rounds.
    for budget, rounds in ((105.0, [1, 1, 1]), (117.0, [3, 1, 1]), (104.0, [4, 4])):
        subject = subject_of(nn.Sequential(takes(clock, 1, 2)), clock)
        assert rounds_of(swept(subject, budget=budget)) == rounds


def test_loading_that_used_the_budget_up_leaves_a_quarter_of_its_seconds(clock: Any, takes: Any) -> None:
    """Three rounds of three sizes take 189 s, a quarter of what loading took."""
    subject = subject_of(nn.Sequential(takes(clock, 1, 2)), clock)
    sweep = swept(subject, budget=5.0, earlier_seconds=4 * 189.0)
    assert (sizes_of(sweep), rounds_of(sweep)) == ([1, 2, 4], [3, 3, 3])
    (note,) = sweep.notes
    assert note == (
        "micro-batch size 1 alone took 783 s (756 s of it loading and tracing) with 3 rounds, the budget is "
        "5 s: larger sizes and further rounds need more"
    )
    assert rounds_of(swept(subject, budget=5.0, earlier_seconds=100.0)) == [2]


def test_parts_take_their_share_of_the_budget(clock: Any, parted: Any) -> None:
    # A pass takes 7 s, a round 21, whatever the size. Size 1: four warm-up passes and a round, 49 s. Size 2
    # is predicted to take twice as long, 98 s with one round, which are kept: 2 more rounds take 42 of 151 s.
    # It takes 49 s, and size 4 is then predicted to take as long, too: there are no more rounds of size 2.
    model = nn.Sequential(parted(clock, 1, 2, 4), parted(clock, 0, 0, 2))
    sweep = swept(subject_of(model, clock), budget=200.0, parts=True)
    assert (sizes_of(sweep), rounds_of(sweep)) == ([1, 2, 4], [3, 1, 1])
    assert clock.now() == 3 + 91 + 2 * 49
    assert sweep.unmeasured[0].detail.startswith("it would take about 91 s, 11 s of 200 s are left")


def test_a_size_that_fits_with_fewer_rounds_is_measured(clock: Any, takes: Any) -> None:
    # A pass takes 3 s a sample. Size 1: 27 s. Size 2: 54 s predicted, 30 s with one round; 42 s are left, and
    # 30 s are spent; another round would take 12 s, which are left.
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), budget=69.0)
    assert (sizes_of(sweep), rounds_of(sweep)) == ([1, 2], [3, 2])
    assert clock.now() == PROBE + 69


def test_the_smallest_size_is_measured_whatever_the_budget(clock: Any, takes: Any) -> None:
    told: list[tuple[str, float]] = []
    sweep = swept(
        subject_of(nn.Sequential(takes(clock, 1, 2)), clock),
        [8, 16, 32],
        budget=0.001,
        parts=True,
        remark=lambda text: told.append((text, clock.now())),
    )
    # After the first pass.
    assert told == [
        (
            "Micro-batch size 8 alone takes at least 96 s: a pass of the model takes 24 s, "
            "the budget is 0.001 s",
            PROBE + 24,
        )
    ]
    assert sweep.accumulation() is None
    assert clock.now() == PROBE + 96
    assert (sizes_of(sweep), rounds_of(sweep)) == ([8], [1])
    assert left_of(sweep) == [(16, "budget"), (32, "budget")]
    # Two passes that count and a round of two, 24 s each, without the pass of the peak; three rounds would be
    # what is needed.
    assert sweep.runs[0].counted.peak_bytes is None
    assert sweep.notes == [
        "micro-batch size 8: a budget of 0.001 s leaves no time to count the peak of a step, what the loss "
        "allocates and what adding gradients takes; plans take the loss to allocate nothing, and the first "
        "micro-batch for as long as the others",
        "micro-batch size 8 has no backward in two parts: a budget of 0.001 s is too short, it takes 144 s",
        "micro-batch size 8 alone took 96 s with 1 round, the budget is 0.001 s: "
        "its seconds are less certain; about 216 s would do for it",
    ]


def test_the_budget_that_would_do_counts_what_the_first_pass_took(clock: Any, takes: Any) -> None:
    """A first pass that takes longer than all later ones would do so with a larger budget, too."""
    layer = takes(clock, 1, 2)
    seconds = iter([1000.0] * 5)
    layer.register_forward_hook(lambda *_: clock.advance(next(seconds, 0.0), 0.0))
    sweep = swept(subject_of(nn.Sequential(layer), clock), [8], budget=500.0, parts=True)
    (said,) = [note for note in sweep.notes if " alone took " in note]
    taken, enough = (float(re.findall(rf"{words} (\d+) s", said)[0]) for words in ("took", "about"))
    assert taken >= 1000
    assert enough >= taken


def test_parts_wait_for_a_longer_budget_at_the_smallest_size(clock: Any, parted: Any) -> None:
    # A pass takes 5 s: three to count, one in parts to warm up, and one of each of three kinds: 35 s.
    model = nn.Sequential(parted(clock, 1, 2, 4))
    short = swept(subject_of(model, clock), [1], budget=34.0, parts=True)
    assert (rounds_of(short), len(short.runs[0].rounds.parts)) == ([1], 0)
    assert short.notes[0] == (
        "micro-batch size 1 has no backward in two parts: a budget of 34 s is too short, it takes 35 s"
    )
    long = swept(subject_of(model, clock), [1], budget=35.0, parts=True)
    assert (rounds_of(long), len(long.runs[0].rounds.parts), long.notes) == ([1], 1, [])


def test_the_budget_that_would_do_for_the_named_sizes(clock: Any, takes: Any) -> None:
    # Size 8 takes 24 s a pass, three warm-up passes and 3 rounds 216 s. Predicted: twice and four times that
    # for sizes 16 and 32, 432 + 864 s more.
    subject = subject_of(nn.Sequential(takes(clock, 1, 2)), clock)
    sweep = swept(subject, [8, 16, 32], budget=224.0)
    assert sweep.unmeasured[0].detail == (
        "it would take about 432 s, 8 s of 224 s are left; "
        "a budget of about 1512 s would do for all that were asked for"
    )
    assert sweep.unmeasured[1].detail.startswith("after micro-batch size 16: it would take about 432 s")
    again = swept(subject, [8, 16, 32], budget=1512.0)
    assert (sizes_of(again), again.unmeasured, again.notes) == ([8, 16, 32], [], [])


def test_unspent_time_is_left(clock: Any, takes: Any) -> None:
    assert rounds_of(swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), [1, 2])) == [5, 5]


def test_default_sizes_end_at_64_on_a_cpu(clock: Any, takes: Any) -> None:
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock))
    assert sizes_of(sweep) == [1, 2, 4, 8, 16, 32, 64]
    assert sweep.unmeasured == []


def test_the_rest_goes_where_the_spread_is(clock: Any, takes: Any) -> None:
    calls = {1: 0, 2: 0}

    def noisy(batch: int) -> float:
        calls[batch] += 1
        return 1.0 + (0.3 if batch == 2 and calls[2] % 3 == 0 else 0.0)

    layer = takes(clock, 1, 1)
    layer.forward_of = noisy
    steady, varying = rounds_of(swept(subject_of(nn.Sequential(layer), clock), [1, 2], budget=300.0))
    assert steady == 5
    assert varying > 20
    assert clock.now() <= 300


def test_a_size_that_turns_out_to_fit_is_measured_after_all(clock: Any, takes: Any) -> None:
    # The first 9 passes take 10 s, as on a busy machine, all others 1 s a sample. After 3 rounds size 2 is
    # predicted to take 2.5 rounds of 40 s, 90 s are left; after 6 rounds 2.5 of 22 s, 84 s are left.
    calls: list[int] = []

    def calming(batch: int) -> float:
        calls.append(batch)
        return 10.0 if len(calls) <= 9 else float(batch)

    layer = takes(clock, 1, 2**-20)
    layer.forward_of = calming
    subject = subject_of(nn.Sequential(layer), clock)
    calls.clear()
    clock.advance(-clock.now(), 0.0)
    sweep = swept(subject, budget=180.0)
    assert sizes_of(sweep)[:2] == [1, 2]
    assert sweep.runs[1].rounds.medians("forward")[0] == pytest.approx(2)
    assert rounds_of(sweep)[0] >= 6


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
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2), Outgrows(4, error)), clock))
    assert sizes_of(sweep) == [1, 2]
    assert left_of(sweep) == [(4, "does not fit")]
    assert sweep.unmeasured[0].detail == str(error).split("\n")[0]


def test_named_sizes_after_one_that_does_not_fit_are_recorded_too(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), Outgrows(4, REFUSALS[0]))
    sweep = swept(subject_of(model, clock), [2, 6, 8])
    assert sizes_of(sweep) == [2]
    assert left_of(sweep) == [(6, "does not fit"), (8, "does not fit")]


def test_out_of_memory_at_the_smallest_size_is_an_error(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), Outgrows(4, REFUSALS[0]))
    said = "smallest micro-batch size, 4, does not fit: CUDA out of"
    with pytest.raises(MachineError, match=said) as caught:
        swept(subject_of(model, clock), [4, 8])
    assert "`micro_batch_sizes`" in caught.value.hint


def test_out_of_memory_in_a_later_round_keeps_the_whole_rounds(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = run_whole, []

    def once_too_often(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1 + 4:
            raise REFUSALS[0]
        return plain(*args, **options)

    monkeypatch.setattr(size_passes_module, "run_whole", once_too_often)
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock), [1], parts=True)
    rounds = sweep.runs[0].rounds
    assert [len(passes) for passes in (rounds.layers, rounds.whole, rounds.parts)] == [3, 3, 3]


def test_a_cpu_size_that_would_not_fit_is_not_begun(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One sample saves 16 bytes, so 8 samples need 1.2 * 8 * 16 = 153.6.
    monkeypatch.setattr(whole_sweep_module, "free_host_bytes", lambda: 150)
    sweep = swept(subject_of(nn.Sequential(takes(clock, 1, 2)), clock))
    assert sizes_of(sweep) == [1, 2, 4]
    assert left_of(sweep) == [(8, "does not fit")]


def test_one_sample_that_batch_norm_refuses_is_left_out(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), nn.BatchNorm1d(4))
    sweep = swept(subject_of(model, clock), budget=100.0)
    assert sizes_of(sweep)[0] == 2
    assert left_of(sweep)[0] == (1, "refused")
    assert sweep.unmeasured[0].detail.startswith("layer 1 (BatchNorm1d)")
    with pytest.raises(ModelError, match=r"layer 1 \(BatchNorm1d\)"):
        swept(subject_of(model, clock), [1])


def test_progress_tells_layers_passes_and_the_budget(clock: Any, takes: Any) -> None:
    told: list[Progress] = []
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 1, 2))
    subject = subject_of(model, clock, loss=Loss("sum", torch.sum))
    swept(subject, [1, 2], budget=300.0, progress=told.append)
    assert [one.layer for one in told[:3]] == ["0", "1", None]
    assert {one.doing for one in told} >= {"warm-up", "round 1 of 3", "round 4"}
    fractions = [one.fraction for one in told]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0
    assert 0.3 < fractions[-1] <= 1
