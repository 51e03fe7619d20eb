"""Segments run by themselves against the layers run in one chain; and what lies on the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import ModelError
from pplan.profiler import segments as segmented_module
from pplan.profiler.clocks import CpuClock
from pplan.profiler.layer import Layer, ReusedModule
from pplan.profiler.layers import as_sequential, build_chain
from pplan.profiler.losses import load_loss
from pplan.profiler.memory import LiveBytes, Meter, StepMemory, build_meter, lasting
from pplan.profiler.passes import OutputGradients, SavedBytes, run_layers
from pplan.profiler.segments import (
    Boundary,
    DeviceMover,
    SegmentedMeasurement,
    count_pass,
    layer_needs,
    plan_segments,
)
from pplan.profiler.size_run import SizeResult

MakeModel = Callable[[], nn.Sequential]

CPU = torch.device("cpu")
UNHELD = ", and the layers' seconds were not held against the whole model's"


class Recorded:
    """A mover that moves nothing and knows what would lie on the device."""

    def __init__(self) -> None:
        self.resident: set[int] = set()
        self.turns: list[set[int]] = []
        self.gradients: list[list[Tensor | None]] = []

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        assert not self.resident
        self.resident = {id(tensor) for tensor in tensors}
        self.turns.append(self.resident)
        yield
        self.gradients.append([tensor.grad for tensor in tensors])
        for tensor in tensors:
            tensor.grad = None
        self.resident = set()


def segmented(
    layers: Sequence[Layer], given: Any, cuts: Sequence[int], clock: Any = None, rounds: int = 1
) -> tuple[SizeResult, Recorded]:
    mover = Recorded()
    ends = [*cuts, len(layers)]
    segments = [range(a, b) for a, b in zip([0, *cuts], ends, strict=True)]
    runner = SegmentedMeasurement(layers, segments, CPU, clock or CpuClock(), 0, mover=mover)
    return runner.measure(given, rounds), mover


def in_one(
    model: nn.Module, layers: Sequence[Layer], given: Tensor, meter: Meter | None = None
) -> tuple[SavedBytes, StepMemory]:
    with meter or build_meter(CPU, model) as meter:
        count_pass(model, layers, given.clone(), OutputGradients(0), meter)
        saved, workspace = count_pass(model, layers, given.clone(), OutputGradients(0), meter)
    return saved, workspace.memory(saved.saved_bytes)


@pytest.mark.parametrize("cuts", [[], [1], [2], [6], [7, 8], [3, 4, 9], list(range(1, 11))])
def test_bytes_are_those_of_one_run(cuts: list[int], convolutions: MakeModel) -> None:
    """Also where a cut parts a layer from an in-place one, or from one that uses what the earlier saved."""
    model = convolutions()
    given = torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    run, _ = segmented(layers, given, cuts)
    whole, memory = in_one(model, layers, given)
    assert run.saved_bytes == whole.saved_bytes
    assert run.saved_input_bytes == whole.saved_input_bytes
    assert run.output_bytes == whole.output_bytes
    assert sum(bytes_ > 0 for bytes_ in whole.saved_input_bytes) > 1
    assert run.forward_workspace_bytes == list(memory.forward)
    # Before the last segment neither the model's output is held nor the gradient of it, but two numbers.
    last = cuts[-1] if cuts else 0
    above = np.subtract(run.backward_workspace_bytes, memory.backward).tolist()
    assert above == [2 * 4 - 2 * whole.output_bytes[-1]] * last + [0] * (len(layers) - last)


def test_bytes_do_not_hang_on_who_holds_the_arguments(
    monkeypatch: pytest.MonkeyPatch, convolutions: MakeModel
) -> None:
    """Python's own stack may, for as long as a call takes."""
    model, given = convolutions(), torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    plain, _ = segmented(layers, given, [3, 8])

    def holds(layers: Sequence[Layer], given: object, *others: Any, **options: Any) -> None:
        run_layers(layers, given, *others, **options)
        assert given == []

    monkeypatch.setattr(segmented_module, "run_layers", holds)
    held, _ = segmented(layers, given, [3, 8])
    assert held.forward_workspace_bytes == plain.forward_workspace_bytes
    assert held.backward_workspace_bytes == plain.backward_workspace_bytes


def test_a_layer_that_fails_is_told_with_what_it_was_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    layers = build_chain(model, torch.ones(2, 4)).layers
    with pytest.raises(ModelError, match=r"layer 0 \(Linear\) failed on an input of shape 2x5 \(float32\)"):
        segmented(layers, torch.ones(2, 5), [1])


class Metered(Recorded):
    """Counts what would lie on the device at the most, while it holds a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.peaks: list[int] = []

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        with super().holding(tensors), LiveBytes(CPU, tensors) as live:
            yield
            self.peaks.append(live.peak())


@pytest.mark.parametrize("free", [17_200, 18_000, 20_000])
def test_what_is_planned_fits(free: int, convolutions: MakeModel) -> None:
    model = convolutions()
    given = torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    saved, memory = in_one(model, layers, given, LiveBytes(CPU, lasting(model)))
    model.zero_grad(set_to_none=True)
    needs = layer_needs(layers, saved.saved_bytes, memory.workspace, saved.output_bytes)
    segments, mover = plan_segments(needs, given.nbytes, free), Metered()
    SegmentedMeasurement(layers, segments, CPU, CpuClock(), 0, mover=mover).measure(given, 1)
    assert len(mover.peaks) == len(segments) > 1
    for segment, peak in zip(segments, mover.peaks, strict=True):
        # What crosses to the next segment lies on the same device here.
        assert peak - saved.output_bytes[segment.stop - 1] <= free


def test_times_are_joined_and_the_note_says_how(clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 5), takes(clock, 7, 11))
    layers = build_chain(model, torch.ones(2, 4)).layers
    run, _ = segmented(layers, torch.ones(2, 4), [1, 2], clock, rounds=4)
    assert len(run.rounds.layers) == 4
    for times in run.rounds.layers:
        assert times.forward.tolist() == [2, 6, 14]
        assert times.backward.tolist() == [4, 10, 22]
        assert times.forward_host is None
    segments = [range(1), range(1, 2), range(2, 3)]
    note = SegmentedMeasurement(layers, segments, CPU, clock, 0).note
    assert note == f"does not fit on cpu whole: measured in 3 segments{UNHELD}"


def test_host_times_are_joined(device_clock: Any, takes: Any) -> None:
    model = nn.Sequential(takes(device_clock, 1, 2), takes(device_clock, 4, 8))
    layers = build_chain(model, torch.ones(1, 4)).layers
    (times,) = segmented(layers, torch.ones(1, 4), [1], device_clock)[0].rounds.layers
    assert times.forward_host is not None
    assert times.forward_host.tolist() == [0.25, 1]


def test_only_the_segment_in_hand_is_on_the_device(convolutions: MakeModel) -> None:
    model = convolutions()
    given = torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    mover = Recorded()
    seen: list[str] = []

    def looked_at(module: nn.Module, given: object) -> None:  # noqa: ARG001
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        assert own <= mover.resident
        seen.append(type(module).__name__)

    for layer in layers:
        layer.module.register_forward_pre_hook(looked_at)
    SegmentedMeasurement(
        layers, [range(4), range(4, 8), range(8, 11)], CPU, CpuClock(), 0, mover=mover
    ).measure(given, 1)
    assert len(seen) == 4 * len(layers)
    assert [len(turn) for turn in mover.turns] == [2 + 5, 4, 4]
    assert not set.intersection(*mover.turns)


def test_tied_weights_come_with_each_segment() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    layers = build_chain(model, torch.ones(2, 4)).layers
    _, mover = segmented(layers, torch.ones(2, 4), [2])
    shared = id(model[0].weight)
    assert [shared in turn for turn in mover.turns] == [True, True]


def test_gradients_are_those_of_the_segment_by_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(6, 3)).double()
    given = torch.randn(5, 4, dtype=torch.float64)
    layers = build_chain(model, given).layers
    _, mover = segmented(layers, given, [2])
    expected = []
    value = given
    for part in (model[:2], model[2:]):
        # A view of a leaf would not be let the in-place layer work on it.
        output = part(value.clone())
        (start,) = OutputGradients(0).of(output)[1]
        # A warm-up pass, two that count bytes, and one timed.
        expected.append([4 * one for one in torch.autograd.grad(output, list(part.parameters()), start)])
        value = output.detach()
    assert [len(part) for part in mover.gradients] == [2, 2]
    for found, wanted in zip(mover.gradients, expected, strict=True):
        torch.testing.assert_close(found, wanted)


def test_frozen_first_segment() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Tanh(), nn.Linear(4, 4))
    layers = build_chain(model, torch.ones(2, 4)).layers
    run, mover = segmented(layers, torch.ones(2, 4), [2])
    assert mover.gradients[0] == [None, None]
    assert None not in mover.gradients[1]
    assert run.saved_bytes == [0, 0, 32]
    with pytest.raises(ModelError, match="needs no gradient"):
        segmented(build_chain(model, torch.ones(2, 4)).layers[:2], torch.ones(2, 4), [1])


class Split(nn.Module):
    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return given.relu(), (given > 0).long()


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0].mul_(2) * self.weight + given[1]


def test_tuples_cross() -> None:
    modules = (nn.Linear(4, 4), Split(), Join())
    layers = [
        Layer(str(i), type(module).__name__, module, str(i), tuple(module.parameters()), (), None)
        for i, module in enumerate(modules)
    ]
    run, mover = segmented(layers, torch.ones(2, 4), [2])
    assert run.output_bytes == [32, 32 + 64, 32]
    assert [gradient is not None for part in mover.gradients for gradient in part] == [True] * 3


def test_a_boundary_hands_out_copies() -> None:
    kept = Boundary((torch.ones(3), torch.arange(3)), (True, False), (True, False))
    for _ in range(2):
        first, second = given = kept.on(CPU)
        first.mul_(5)
        second.mul_(5)
        assert first.requires_grad
        assert first.grad_fn is not None
        assert not second.requires_grad
        assert kept.counted_tensors(given) == [first]
    assert kept.value[0].tolist() == [1, 1, 1]
    assert kept.value[1].tolist() == [0, 1, 2]


def test_the_mover_puts_everything_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    tensors = [*model.parameters(), *model.buffers()]
    homes = [tensor.data_ptr() for tensor in tensors]
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def interrupted() -> None:
        with DeviceMover(CPU).holding(tensors):
            assert all(tensor.data_ptr() != home for tensor, home in zip(tensors, homes, strict=True))
            model(torch.randn(3, 4)).sum().backward()
            assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        interrupted()
    assert [tensor.data_ptr() for tensor in tensors] == homes
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.gpu
def test_on_a_device(convolutions: MakeModel) -> None:
    model = convolutions()
    given = torch.randn(2, 3, 10, 10)
    layers = build_chain(model, given).layers
    device = torch.device("cuda")
    held = torch.cuda.memory_allocated()
    run = SegmentedMeasurement(layers, [range(4), range(4, 11)], device, CpuClock(), 0).measure(given, 2)
    assert run.saved_bytes[0] == given.nbytes
    assert all(parameter.device == CPU and parameter.grad is None for parameter in model.parameters())
    # The libraries' own workspaces may remain; no weight does.
    assert torch.cuda.memory_allocated() - held <= 128 * 2**20


def test_a_loss_ends_the_last_segment() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    layers = build_chain(model, torch.ones(2, 4)).layers
    loss = load_loss("cross-entropy", seed=0)
    mover = Recorded()
    runner = SegmentedMeasurement(layers, [range(1), range(1, 3)], CPU, CpuClock(), 0, loss=loss, mover=mover)
    run = runner.measure(torch.ones(2, 4), 1)
    assert run.loss_output_bytes == 4
    assert run.loss_saved_bytes > 0
    assert run.rounds.layers[0].loss is not None
    assert (
        len(run.saved_bytes) == len(run.backward_workspace_bytes) == len(run.rounds.layers[0].backward) == 3
    )


def test_every_layer_is_visited_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    layers, seen = build_chain(model, torch.ones(2, 4)).layers, []

    def visit(layer: Layer) -> None:
        seen.append(layer.name)

    SegmentedMeasurement(layers, [range(2), range(2, 3)], CPU, CpuClock(), 0, visit=visit).measure(
        torch.ones(2, 4), 2
    )
    assert seen == ["0", "1", "2"]


class Twice(nn.Module):
    """Runs its first layer again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.first(self.last(self.middle(self.first(given))))
        return result


def test_what_an_earlier_segment_registers_comes_along_and_is_not_saved() -> None:
    given = torch.randn(2, 8)
    model = as_sequential(build_chain(Twice(), given))
    layers = build_chain(model, given).layers
    assert (
        sum(any(isinstance(part, ReusedModule) for part in layer.module.modules()) for layer in layers) == 1
    )
    run, mover = segmented(layers, given, [2])
    whole, _ = in_one(model, layers, given)
    assert run.saved_bytes == whole.saved_bytes
    first, last = model[0], model[2]
    used = {id(first.weight), id(first.bias), id(last.bias)}
    assert mover.turns[1] == used
    for_planning = layer_needs(layers, [0] * 4, [0] * 4, [0] * 4)
    assert for_planning[3].storages == for_planning[0].storages


def test_compiled_layers_bring_the_plain_ones_weights() -> None:
    model, given = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    layers = build_chain(model, given).layers

    class Hides(nn.Module):
        """As what torch.compile runs: it does not register what it runs."""

        def __init__(self, layer: Layer) -> None:
            super().__init__()
            self.held = (layer.module,)

        def forward(self, given: Tensor) -> Tensor:
            ran.append(self.held[0])
            result: Tensor = self.held[0](given)
            return result

    ran: list[nn.Module] = []
    mover = Recorded()
    hidden = [replace(layer, module=Hides(layer)) for layer in layers]
    segments = [range(1), range(1, 2)]
    run = SegmentedMeasurement(layers, segments, CPU, CpuClock(), 0, mover=mover, running=hidden).measure(
        given, 1
    )
    assert mover.turns == [{id(tensor) for tensor in layer.module.parameters()} for layer in layers]
    assert set(ran) == {layer.module for layer in layers}
    assert run.saved_bytes == in_one(model, layers, given)[0].saved_bytes


def test_the_loss_workspace_is_that_of_the_whole() -> None:
    model, given = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 50)), torch.randn(6, 8)
    layers, loss = build_chain(model, given).layers, load_loss("cross-entropy")
    assert loss is not None
    found = [
        SegmentedMeasurement(layers, segments, CPU, CpuClock(), 0, loss, mover=Recorded()).measure(given, 1)
        for segments in ([range(2)], [range(1), range(1, 2)])
    ]
    with build_meter(CPU, model) as meter:
        count_pass(model, layers, given.clone(), OutputGradients(0), meter)
        saved, workspace = count_pass(model, layers, given.clone(), OutputGradients(0), meter, loss)
    expected = workspace.loss(saved.saved_bytes, saved.loss_saved_bytes)
    assert [(run.loss_saved_bytes, run.loss_workspace) for run in found] == [
        (saved.loss_saved_bytes, expected)
    ] * 2
    # The gradient of the logits, and that of their log-softmax, at the least.
    assert expected.backward >= 2 * 6 * 50 * 4


class Linked(nn.Module):
    """Runs a recurrent layer of an earlier segment on what that returned."""

    def __init__(self, held: nn.Module) -> None:
        super().__init__()
        self.again = ReusedModule(held)

    def forward(self, given: tuple[Tensor, Any]) -> Tensor:
        result: Tensor = self.again(given[0])[0]
        return result


def test_recurrent_layers_are_flattened_once_they_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    flattened: list[nn.Module] = []
    recurrent = nn.LSTM(4, 4)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", lambda module: flattened.append(module))
    layer = Layer("0", "LSTM", recurrent, "0", tuple(recurrent.parameters()), (), None)
    again = Layer("1", "LSTM", Linked(recurrent), "1", (), (), None)
    segmented([layer, again], torch.randn(3, 2, 4), [1])
    assert flattened == [recurrent, recurrent]
