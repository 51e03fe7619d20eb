"""The two parts of backward: their sum against torch's own gradients, their seconds by the layers' clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import thread_time
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from pplan.profiler.clocks import CpuClock, LeadTuner
from pplan.profiler.layer import Layer
from pplan.profiler.layers import build_chain
from pplan.profiler.passes import OutputGradients, run_whole
from pplan.profiler.timed_passes import PartTimes, run_parts
from pplan.profiler.torch_private import backward_parts
from pplan.profiler.user_model import ModelInput


def in_order(*modules: nn.Module) -> list[Layer]:
    """Layers that may hand tuples to each other."""
    return [
        Layer(str(index), type(module).__name__, module, None, tuple(module.parameters()), (), None)
        for index, module in enumerate(modules)
    ]


class Chained(nn.Module):
    """The model that these layers are."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)

    def forward(self, *given: Tensor) -> Any:
        value: Any = given[0] if len(given) == 1 else given
        for part in self.parts:
            value = part(value)
        return value


def gradients_of(model: nn.Module) -> list[Tensor | None]:
    made = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    return made


def compared(layers: Sequence[Layer], model: nn.Module, given: ModelInput) -> PartTimes:
    """Runs both; the gradients must be the same to the last bit."""
    starts = OutputGradients(0)
    run_whole(model, given.clone(), starts, CpuClock())
    whole = gradients_of(model)
    times = run_parts(layers, given.clone().layer_input, starts, CpuClock())
    parts = gradients_of(model)
    assert any(gradient is not None for gradient in whole)
    for path, one, other in zip([n for n, _ in model.named_parameters()], whole, parts, strict=True):
        assert (one is None) == (other is None), path
        assert one is None or other is None or torch.equal(one, other), path
    return times


def compared_in_order(*modules: nn.Module, given: Any) -> PartTimes:
    model = Chained(*modules).double()
    return compared(in_order(*modules), model, ModelInput.of(given))


def image(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Tokens(nn.Module):
    """Patches become tokens; a class token and positions of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(1, 6, 8))

    def forward(self, given: Tensor) -> Tensor:
        tokens = torch.cat([self.token.expand(len(given), -1, -1), self.inner(given)], dim=1)
        return tokens + self.positions


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, given: Tensor) -> Tensor:
        normed = self.norm(given)
        given = given + self.attention(normed, normed, normed, need_weights=False)[0] * self.scale
        result: Tensor = given + self.inner(given)
        return result


class Encoder(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, given: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first, *others = (given,) if isinstance(given, Tensor) else given
        made = torch.relu_(self.inner(first))
        return functional.max_pool2d(made, 2), made, *others


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        low, skip, *others = given
        both = torch.cat([functional.interpolate(low, scale_factor=2), skip], dim=1)
        made = torch.relu_(self.inner(both))
        return (made, *others) if others else made


class Through(nn.Module):
    """Runs `inner` on one entry of a tuple."""

    def __init__(self, at: int, inner: nn.Module) -> None:
        super().__init__()
        self.at, self.inner = at, inner

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (*given[: self.at], self.inner(given[self.at]), *given[self.at + 1 :])


class Sum(nn.Module):
    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return torch.stack(given).sum(dim=0)


def vgg() -> nn.Module:
    features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"], batch_norm=True)
    return nn.Sequential(features, nn.Flatten(), nn.Linear(512, 16), nn.ReLU(True), nn.Linear(16, 3))


def densenet() -> nn.Module:
    """Of two layers a block."""
    model: nn.Module = torchvision.models.DenseNet(8, (2, 2, 2), 16)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("build", [vgg, torchvision.models.resnet18, densenet, torchvision.models.mnasnet0_5])
def test_real_models(build: Callable[[], nn.Module]) -> None:
    model = build().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    given = ModelInput.of(image(2, 3, 32, 32))
    layers = build_chain(model, given).layers
    times = compared(layers, model, given)
    for layer, inputs, weights in zip(layers, times.input, times.weight, strict=True):
        assert (weights > 0) == (layer.trainable_bytes > 0), layer.name
        if layer.trainable_bytes:
            assert (inputs > 0) == (layer is not layers[0]), layer.name


def test_a_transformer_with_tokens_and_positions_of_its_own() -> None:
    times = compared_in_order(Tokens(), Block(), Block(), nn.Linear(8, 2), given=image(2, 5, 3))
    assert times.input[0] == 0
    assert min(times.input[1:]) > 0
    assert min(times.weight) > 0


def test_skips_across_layers_and_in_place_operations() -> None:
    compared_in_order(
        Encoder(3), Encoder(4), Through(0, nn.BatchNorm2d(4)), Decoder(), Decoder(), given=image(2, 3, 8, 8)
    )


def test_a_layer_that_is_fed_by_a_second_input_only(clock: Any, parted: Any) -> None:
    # What it makes needs no gradient of its input's: the whole of its backward is for its weights.
    layers = in_order(
        Through(0, parted(clock, 1, 2, 4)),
        Through(1, parted(clock, 8, 16, 32)),
        Sum(),
        parted(clock, 1, 2, 4),
    )
    times = run_parts(layers, (torch.ones(2, 4), torch.ones(2, 4)), OutputGradients(0), clock)
    assert times.input.tolist() == [0, 0, 0, 2]
    assert times.weight.tolist() == [4, 32, 0, 4]
    modules = (Through(0, nn.Linear(4, 4)), Through(1, nn.Linear(4, 4)), Sum(), nn.Linear(4, 4))
    compared_in_order(*modules, given=(image(3, 4), image(3, 4)))


def test_tied_weights() -> None:
    embedding, head = nn.Embedding(7, 8), nn.Linear(8, 7, bias=False)
    head.weight = embedding.weight
    compared_in_order(embedding, Block(), head, given=torch.tensor([[1, 2, 6], [0, 2, 2]]))


@pytest.mark.parametrize("shared", [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)])
def test_one_module_in_several_layers(shared: nn.Module) -> None:
    compared_in_order(
        nn.Conv2d(3, 4, 1), shared, nn.ReLU(True), shared, nn.Sigmoid(), shared, given=image(2, 3, 5, 5)
    )


def test_one_module_twice_in_a_layer() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = self.inner(torch.relu(self.inner(given)))
            return result

    compared_in_order(Twice(), Twice(), Twice(), given=image(2, 4, 5, 5))


def test_weights_that_are_computed() -> None:
    def normed() -> nn.Module:
        linear = nn.Linear(4, 4)
        nn.utils.parametrizations.weight_norm(linear)
        return linear

    compared_in_order(normed(), nn.Tanh(), normed(), given=image(3, 4))


def test_frozen_layers() -> None:
    times = compared_in_order(
        nn.Linear(4, 4).requires_grad_(False),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.Linear(4, 4).requires_grad_(False),
        nn.Linear(4, 4),
        given=image(3, 4),
    )
    assert times.input[:3].tolist() == [0, 0, 0]
    assert [weights > 0 for weights in times.weight] == [False, False, True, False, True]


def test_gradients_accumulate() -> None:
    shared = nn.Conv2d(4, 4, 1)
    model = Chained(nn.Conv2d(4, 4, 1), shared, nn.Sigmoid(), shared).double()
    for _ in range(3):
        run_parts(in_order(*model.parts), image(2, 4, 5, 5), OutputGradients(0), CpuClock())
    thrice = gradients_of(model)
    run_whole(model, ModelInput.of(image(2, 4, 5, 5)), OutputGradients(0), CpuClock())
    for one, three in zip(gradients_of(model), thrice, strict=True):
        torch.testing.assert_close(three, None if one is None else 3 * one)


def test_one_layer_alone() -> None:
    times = compared_in_order(nn.Linear(4, 4), given=image(3, 4))
    assert times.input.tolist() == [0]
    assert times.weight[0] > 0


def test_recomputed_layers() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = torch.utils.checkpoint.checkpoint(self.inner, given, use_reentrant=False)
            return result

    compared_in_order(nn.Linear(4, 4), Recomputed(), given=image(3, 4))


class Counts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which gradients each call of a convolution's backward is asked for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: Counter[tuple[bool, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution_backward.default:
            self.asked[tuple(args[-1])] += 1
        return func(*args, **(kwargs or {}))


def test_each_gradient_is_computed_once() -> None:
    modules = [nn.Conv2d(4, 4, 1), nn.ReLU(True), nn.Conv2d(4, 4, 1), nn.Sigmoid(), nn.Conv2d(4, 4, 1)]
    with Counts() as counts:
        run_parts(in_order(*modules), torch.ones(1, 4, 2, 2), OutputGradients(0), CpuClock())
    # In the order input, weight, bias: the first layer's input needs none.
    assert counts.asked == {(True, False, False): 2, (False, True, True): 3}


class CompositeWatcher(torch.autograd.Function):
    """Computes both gradients in one operation, and writes down which are asked for."""

    asked: list[tuple[bool, ...]] = []

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(given, weight)
        return given * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        CompositeWatcher.asked.append(ctx.needs_input_grad)
        given, weight = ctx.saved_tensors
        return gradient * weight, gradient * given


def test_an_operation_that_computes_both_runs_twice() -> None:
    class Multiplies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4,), 3.0))

        def forward(self, given: Tensor) -> Tensor:
            result: Tensor = CompositeWatcher.apply(given, self.weight)
            return result

    modules = [Multiplies().double(), nn.Tanh(), Multiplies().double()]
    compared_in_order(*modules, given=image(2, 4))
    CompositeWatcher.asked.clear()
    run_parts(in_order(*modules), image(2, 4), OutputGradients(0), CpuClock())
    assert len(CompositeWatcher.asked) == 3


def test_every_part_gets_its_own_seconds(device_clock: Any, parted: Any) -> None:
    clock = device_clock
    layers = in_order(
        parted(clock, 1, 2, 4), nn.ReLU(inplace=True), parted(clock, 8, 16, 32), parted(clock, 64, 128, 256)
    )
    times = run_parts(layers, torch.ones(2, 4), OutputGradients(0), clock)
    assert times.input.tolist() == [0, 0, 16, 128]
    assert times.weight.tolist() == [4, 0, 32, 256]
    assert times.input_host is not None
    assert times.weight_host is not None
    assert times.input_host.tolist() == [0, 0, 4, 32]
    assert times.weight_host.tolist() == [1, 0, 8, 64]


def test_an_input_that_needs_a_gradient(clock: Any, parted: Any) -> None:
    layers = in_order(parted(clock, 1, 2, 4), parted(clock, 8, 16, 32))
    times = run_parts(layers, torch.ones(2, 4, requires_grad=True), OutputGradients(0), clock)
    assert times.input.tolist() == [2, 16]
    assert times.weight.tolist() == [4, 32]


def test_a_first_layer_of_several_tensors_has_weights_only(clock: Any, parted: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = parted(clock, 1, 2, 4), parted(clock, 8, 16, 32)

        def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
            near = self.first(given)
            return near, self.second(near)

    layers = in_order(Two(), Sum(), parted(clock, 64, 128, 256))
    times = run_parts(layers, torch.ones(2, 4), OutputGradients(0), clock)
    # The second's input gradient is the first's weight gradient's.
    assert times.input.tolist() == [0, 0, 128]
    assert times.weight.tolist() == [4 + 16 + 32, 0, 256]


def test_a_shared_weight_is_each_layers_own(clock: Any, parted: Any) -> None:
    first, second = parted(clock, 1, 2, 4), parted(clock, 8, 16, 32)
    second.weight = first.weight
    layers = in_order(first, nn.Tanh(), second)
    times = run_parts(layers, torch.ones(2, 4), OutputGradients(0), clock)
    assert times.input.tolist() == [0, 0, 16]
    assert times.weight.tolist() == [4, 0, 32]


def test_the_device_is_held_back_before_each_part(clock: Any, parted: Any) -> None:
    layers = in_order(parted(clock, 1, 2, 4), parted(clock, 8, 16, 32))
    leads = LeadTuner()
    leads.inputs.holds, leads.weights.holds = np.array([1.0]), np.array([2.0, 3.0])
    run_parts(layers, torch.ones(2, 4), OutputGradients(0), clock, leads=leads)
    # The first layer's input needs no gradient.
    assert clock.held_back == [1, 2, 3]


def residual_block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, 3 * width, 0.0, batch_first=True, norm_first=True)


@pytest.mark.parametrize(
    ("modules", "given"),
    [
        ([nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 5), nn.Linear(5, 5)], image(3, 6)),
        ([nn.Linear(8, 8), residual_block(8), residual_block(8), nn.LayerNorm(8)], image(2, 4, 8)),
        ([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()], image(2, 3, 8, 8)),
    ],
)
def test_pending_gradients_are_those_that_pytorchs_pipelining_keeps(
    modules: list[nn.Module], given: Tensor
) -> None:
    """Of each stage behind the first layer to the end, cut at every place."""
    model = nn.Sequential(*modules).double()
    times = run_parts(in_order(*model), given.clone(), OutputGradients(0), CpuClock())
    assert times.pending_bytes is not None
    for first in range(1, len(model)):
        stage = model[first:]
        received = model[:first](given).detach().requires_grad_()
        output = stage(received)
        gradient = torch.randn_like(output)
        _, groups = backward_parts()[0]([output], [gradient], [received], stage.parameters())
        kept = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for group in groups
            for of_node in group["grads"]
            for one in of_node
            if one is not None
        }
        assert times.pending_bytes[first:].sum() == sum(kept.values())


class ThreadClock(CpuClock):
    """Seconds in which this thread ran: other processes take none of them."""

    def stamp(self) -> float:
        return thread_time()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = given + self.b(torch.tanh(self.a(given)))
        return result


def settles(one_pass: Callable[[], Sequence[Any]], holds: Callable[..., bool]) -> bool:
    """Return whether it holds for the least seconds of all passes."""
    rounds: list[Sequence[Any]] = []
    for _ in range(8):
        rounds += [one_pass() for _ in range(8)]
        if holds(
            *(np.min(np.array(passes, dtype=np.float64), axis=0) for passes in zip(*rounds, strict=True))
        ):
            return True
    return False


@pytest.mark.slow
def test_equal_blocks_take_equal_seconds_wherever_they_stand() -> None:
    layers, clock = in_order(*(Residual(64) for _ in range(96))), ThreadClock()

    def one_pass() -> tuple[Any, Any]:
        times = run_parts(layers, torch.randn(2, 64, requires_grad=True), OutputGradients(0), clock)
        return times.input, times.weight

    def are_equal(*parts: Any) -> bool:
        quarters = [
            [np.median(seconds[first : first + 24]) for first in (0, 24, 48, 72)] for seconds in parts
        ]
        # Walking the graph before a block took the last quarter 0.5 ms longer than the first.
        return all(max(of_part) < 1.5 * min(of_part) + 1e-4 for of_part in quarters)

    assert settles(one_pass, are_equal)


@pytest.mark.slow
def test_the_layers_of_a_stage_add_up_to_what_pytorchs_pipelining_takes() -> None:
    blocks, clock = [Residual(256) for _ in range(4)], ThreadClock()
    run_input, run_weight = backward_parts()
    stage, given = nn.Sequential(*blocks), torch.randn(2048, 256, requires_grad=True)

    def as_a_stage() -> tuple[float, float]:
        output = stage(given)
        gradient = torch.randn_like(output)
        moments = [clock.stamp()]
        _, groups = run_input([output], [gradient], [given], stage.parameters())
        moments.append(clock.stamp())
        run_weight(stage.parameters(), groups)
        return moments[1] - moments[0], clock.stamp() - moments[1]

    def by_layer() -> tuple[float, float]:
        times = run_parts(in_order(*blocks), given, OutputGradients(0), clock)
        return times.input.sum(), times.weight.sum()

    def one_pass() -> tuple[Any, ...]:
        whole = run_whole(stage, ModelInput.of(given), OutputGradients(0), clock).backward
        return as_a_stage(), by_layer(), whole

    def agree(stage_parts: Any, layer_parts: Any, whole: Any) -> bool:
        # They differ by 5 % on a quiet machine.
        return bool(np.allclose(layer_parts, stage_parts, rtol=0.15) and layer_parts.sum() < 1.3 * whole)

    assert settles(one_pass, agree)
