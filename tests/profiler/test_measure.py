"""Real models measured for real, and everything a profile must hold."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchvision.models.resnet import BasicBlock

from pplan.cost_models.errors import MachineError, ModelError, UsageError
from pplan.profiler import measure
from pplan.profiler.measure import profile_model
from pplan.profiler.models import from_module, load_model
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions


class SmallVgg(nn.Module):
    """VGG-11 with a classifier of 64 units: its own takes most of the time and 500 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torchvision.models.vgg.make_layers(torchvision.models.vgg.cfgs["A"])
        self.classifier = nn.Sequential(
            nn.Linear(512, 64),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(64, 64),
            nn.ReLU(True),
            nn.Linear(64, 10),
        )

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.classifier(torch.flatten(self.features(given), 1))
        return result


@pytest.fixture(scope="module")
def vgg11() -> Profile:
    loaded = dataclasses.replace(from_module(SmallVgg(), torch.randn(1, 3, 32, 32)), classes=10)
    return profile_model(loaded, ProfileOptions(micro_batch_sizes=[1, 2], device="cpu", seed=3), rounds=2)


def test_a_real_profile_is_complete(vgg11: Profile) -> None:
    assert (vgg11.model, vgg11.device, vgg11.dtype, vgg11.classes) == ("SmallVgg", "cpu", "float32", 10)
    assert (vgg11.input_shape, vgg11.input_bytes_per_sample) == ([3, 32, 32], 3 * 32 * 32 * 4)
    assert (vgg11.seed, vgg11.threads, vgg11.device_memory_bytes) == (3, torch.get_num_threads(), None)
    assert vgg11.device_name
    assert len(vgg11.layers) == 21 + 1 + 6
    assert vgg11.micro_batch_sizes == [1, 2]
    assert [whole.micro_batch_size for whole in vgg11.whole] == [1, 2]
    assert len(vgg11.edges) == len(vgg11.layers) - 1
    assert vgg11.made_by.torch == torch.__version__
    assert vgg11.made_by.pplan
    for layer in vgg11.layers:
        for cost in layer.costs:
            assert cost.forward_seconds > 0
            assert cost.backward_seconds > 0 or layer.kind == "flatten"
            assert cost.output_bytes > 0
    assert sum(not layer.cut_after for layer in vgg11.layers) == 8 + 2


def test_the_closing_ratios_are_those_of_the_figures(vgg11: Profile) -> None:
    for index, whole in enumerate(vgg11.whole):
        forward = sum(layer.costs[index].forward_seconds for layer in vgg11.layers)
        backward = sum(layer.costs[index].backward_seconds for layer in vgg11.layers)
        assert whole.forward_closing_ratio == pytest.approx(forward / whole.forward_seconds)
        assert whole.backward_closing_ratio == pytest.approx(backward / whole.backward_seconds)
        both = whole.forward_seconds + whole.backward_seconds
        assert whole.closing_ratio == pytest.approx((forward + backward) / both)
        noted = any(f"micro-batch size {whole.micro_batch_size}: the layers" in n for n in vgg11.notes)
        assert noted == (abs(whole.closing_ratio - 1) > 0.05)


def test_it_survives_the_file_and_becomes_a_chain(vgg11: Profile) -> None:
    again = Profile.parse(vgg11.to_json(), "here")
    assert again == vgg11
    chain = again.chain()
    assert chain.sizes == (1, 2)
    assert chain.parameter_bytes.sum() == sum(p.nbytes for p in SmallVgg().parameters())


@pytest.mark.slow
def test_the_model_is_untouched() -> None:
    model = torchvision.models.ResNet(BasicBlock, [1, 1, 1, 1], num_classes=3)
    model.layer1.eval()
    before = copy.deepcopy(model.state_dict())
    training = [module.training for module in model.modules()]
    given = torch.randn(2, 3, 32, 32)
    state = torch.get_rng_state()
    profile = profile_model(
        (model, given), ProfileOptions(micro_batch_sizes=[2], device="cpu", dtype="float64"), rounds=1
    )
    assert profile.dtype == "float64"
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == training
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())


def test_the_model_counts_in_the_dtype_asked_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for dtype, item in (("float64", 8), ("float32", 4)):
        profile = profile_model(
            (model, torch.ones(2, 4)),
            ProfileOptions(micro_batch_sizes=[2], dtype=dtype, device="cpu"),
            rounds=1,
        )
        assert profile.layers[0].parameter_bytes == 20 * item
        assert profile.layers[1].buffer_bytes == 8 * item + 8
        assert profile.input_bytes_per_sample == 4 * item


def test_whole_numbers_stay_whole() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
    given = torch.tensor([[1, 2, 9]])
    profile = profile_model(
        (model, given), ProfileOptions(micro_batch_sizes=[3], dtype="float64", device="cpu"), rounds=1
    )
    assert profile.input_bytes_per_sample == 3 * 8
    assert profile.layers[0].costs[0].output_bytes == 3 * 3 * 4 * 8


def test_evaluation_mode_is_said() -> None:
    profile = profile_model(
        (nn.Linear(4, 4).eval(), torch.ones(1, 4)),
        ProfileOptions(micro_batch_sizes=[1], device="cpu"),
        rounds=1,
    )
    assert any("evaluation mode" in note for note in profile.notes)


def test_an_off_closing_ratio_is_noted(clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = clock.stamp

    def costly() -> Any:
        # Stamps of 1 s: one falls into each layer's forward and backward, and one into each of the whole's.
        mark = plain()
        clock.advance(1.0, 0.0)
        return mark

    monkeypatch.setattr(clock, "stamp", costly)
    model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 4))
    profile = profile_model(
        (model, torch.ones(1, 4)), ProfileOptions(micro_batch_sizes=[1], device="cpu"), rounds=1, clock=clock
    )
    assert profile.whole[0].forward_closing_ratio == pytest.approx(6 / 5)
    assert profile.whole[0].backward_closing_ratio == pytest.approx(8 / 7)
    assert profile.whole[0].closing_ratio == pytest.approx(14 / 12)
    assert any("1.167" in note for note in profile.notes)


def test_a_clock_that_reads_nothing_is_an_error(clock: Any, takes: Any) -> None:
    model = (nn.Sequential(takes(clock, 0, 0)), torch.ones(1, 4))
    with pytest.raises(MachineError, match="micro-batch size 2: the clock reads 0 s") as caught:
        profile_model(model, ProfileOptions(micro_batch_sizes=[2], device="cpu"), rounds=1, clock=clock)
    assert "`micro_batch_sizes`" in caught.value.hint


def test_a_direction_of_no_time_has_no_closing_ratio(clock: Any, takes: Any) -> None:
    model = (nn.Sequential(takes(clock, 0, 2)), torch.ones(1, 4))
    profile = profile_model(model, ProfileOptions(micro_batch_sizes=[2], device="cpu"), rounds=1, clock=clock)
    whole = profile.whole[0]
    assert whole.closing_ratio == whole.backward_closing_ratio == 1
    assert whole.forward_closing_ratio is None


@pytest.mark.parametrize(
    ("options", "error", "expected"),
    [
        ({"dtype": "int8"}, UsageError, "dtype 'int8'"),
        ({"device": "tpu"}, UsageError, "device 'tpu'"),
        ({"device": "cuda:99"}, MachineError, "device 'cuda:99' is not here"),
        ({"budget_seconds": 0.0}, UsageError, "budget_seconds=0:"),
        ({"budget_seconds": float("nan")}, UsageError, "budget_seconds=nan:"),
        ({"micro_batch_sizes": []}, UsageError, r"micro_batch_sizes=\(\)"),
        ({"micro_batch_sizes": [4, 0]}, UsageError, r"micro_batch_sizes\[1\]=0"),
        ({"micro_batch_sizes": [1.5]}, UsageError, r"micro_batch_sizes\[0\]=1.5"),
        ({"micro_batch_sizes": "1,2"}, UsageError, "micro_batch_sizes='1,2'"),
        ({"micro_batch_sizes": 8}, UsageError, "micro_batch_sizes=8"),
        ({"seed": -1}, UsageError, "seed=-1"),
        ({"seed": 2**63}, UsageError, "seed=9223372036854775808"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], error: type[Exception], expected: str) -> None:
    with pytest.raises(error, match=expected):
        profile_model((nn.Linear(4, 4), torch.ones(1, 4)), ProfileOptions(**options))


def test_no_rounds_cannot_be_asked_for() -> None:
    with pytest.raises(UsageError, match="rounds=0"):
        profile_model((nn.Linear(4, 4), torch.ones(1, 4)), rounds=0)


def test_a_frozen_model_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ModelError, match="needs no gradient"):
        profile_model((model, torch.ones(1, 4)), ProfileOptions(micro_batch_sizes=[1], device="cpu"))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.stream = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"Linear cannot be copied: TypeError"):
        profile_model((model, torch.ones(1, 4)), ProfileOptions(device="cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float32])
def test_a_model_is_measured_in_its_own_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(dtype)
    profile = profile_model(
        (model, torch.ones(2, 4)), ProfileOptions(micro_batch_sizes=[1], device="cpu"), rounds=1
    )
    assert f"torch.{profile.dtype}" == str(dtype)
    assert profile.layers[0].parameter_bytes == 20 * dtype.itemsize
    assert profile.layers[0].costs[0].output_bytes == 4 * dtype.itemsize
    assert profile.input_bytes_per_sample == 4 * dtype.itemsize
    assert not any("measured in float32" in note for note in profile.notes)


def test_a_model_of_several_dtypes_is_measured_in_float32_and_told_so() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16())
    profile = profile_model(
        (model, torch.ones(2, 4)), ProfileOptions(micro_batch_sizes=[1], device="cpu"), rounds=1
    )
    assert profile.dtype == "float32"
    assert [layer.parameter_bytes for layer in profile.layers] == [80, 80]
    assert any("in bfloat16 and float32 and was measured in float32" in note for note in profile.notes)


class ConvertsByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, given: Tensor) -> Tensor:
        output: Tensor = self.second(self.first(given).double())
        return output


def test_a_model_that_fails_once_it_is_converted_is_told_of_it() -> None:
    """It trains as it is: that it does not on its example alone would be false."""
    with pytest.raises(ModelError) as refusal:
        profile_model((ConvertsByName(), torch.ones(2, 4)), ProfileOptions(device="cpu"))
    assert "of several dtypes, and were converted to float32 before it ran" in refusal.value.hint


def test_complex_parameters_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.complex64))
    for dtype in (None, "float32"):
        with pytest.raises(ModelError, match=r"1\.weight is complex64"):
            profile_model((model, torch.ones(1, 4)), ProfileOptions(dtype=dtype, device="cpu"))


def test_a_lazy_model_is_to_be_run_once() -> None:
    with pytest.raises(ModelError, match="weight is lazy") as caught:
        profile_model((nn.LazyLinear(4), torch.ones(1, 4)), ProfileOptions(device="cpu"))
    assert "once first" in caught.value.hint


def test_frozen_layers_are_told_in_the_profile() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    profile = profile_model(
        (model, torch.ones(1, 4)), ProfileOptions(micro_batch_sizes=[1], device="cpu"), rounds=1
    )
    assert [layer.trainable_bytes for layer in profile.layers] == [0, 80]
    assert profile.edges == [("0", "1")]


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


class Unmoved(nn.Linear):
    def _apply(self, fn: Any, recurse: bool = True) -> Any:  # noqa: ARG002
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


class Unrun(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if input.is_meta:
            raise NotImplementedError("no kernel")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")


@pytest.mark.parametrize("layer", [Uncopied, Unmoved, Unrun])
def test_no_memory_before_the_sweep_is_the_machines_lack(layer: type[nn.Linear]) -> None:
    with pytest.raises(MachineError) as caught:
        profile_model((nn.Sequential(layer(4, 4)), torch.ones(2, 4)), ProfileOptions(device="cpu"))
    assert caught.value.what == (
        "Sequential: the model does not fit on cpu: CUDA out of memory. Tried to allocate 2 GiB"
    )
    assert caught.value.hint


@pytest.mark.gpu
def test_a_profile_on_a_device() -> None:
    loaded = load_model("vgg11", classes=10, input_shape=(3, 32, 32))
    profile = profile_model(loaded, ProfileOptions(micro_batch_sizes=[1, 8], device="cuda"), rounds=3)
    assert profile.device == "cuda"
    assert profile.device_memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert all(
        cost.forward_host_seconds is not None and cost.forward_host_seconds > 0
        for layer in profile.layers
        for cost in layer.costs
    )
    assert sum(layer.costs[1].workspace_bytes for layer in profile.layers) > 0


def test_the_device_is_entered_before_its_random_numbers_are_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[str] = []

    def telling(name: str, context: Any) -> Any:
        def enters(*given: Any) -> Any:
            entered.append(name)
            return context(*given)

        return enters

    for name in ("fixed_seed", "_on"):
        monkeypatch.setattr(measure, name, telling(name, getattr(measure, name)))
    profile_model(
        (nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)),
        ProfileOptions(device="meta", micro_batch_sizes=[1]),
    )
    assert entered == ["_on", "fixed_seed"]


def test_loading_is_of_the_budget() -> None:
    loaded = from_module(nn.Linear(4, 4), torch.ones(2, 4))
    options = ProfileOptions(device="cpu", budget_seconds=100.0, cache=False)
    quick = profile_model(loaded, dataclasses.replace(options, micro_batch_sizes=[1, 2]), rounds=1)
    slow = profile_model(dataclasses.replace(loaded, loading_seconds=1000.0), options)
    assert [cost.micro_batch_size for cost in quick.layers[0].costs] == [1, 2]
    # Three sizes are measured in the quarter of these seconds that is left for them.
    assert [(each.micro_batch_size, each.rounds) for each in slow.whole] == [(1, 3), (2, 3), (4, 3)]
    assert [left.reason for left in slow.unmeasured] == ["budget"]
    assert any("1000 s of it loading and tracing" in note for note in slow.notes)


@pytest.mark.parametrize("seconds", [3600.0, -3600.0])
@pytest.mark.parametrize("at", [30, 60])
def test_a_clock_that_jumps_in_a_pass_changes_no_cost(
    clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, at: int
) -> None:
    """Forwards, as where a machine slept, and backwards, which no monotonic clock does: medians of five."""

    def measured() -> Profile:
        model = nn.Sequential(takes(clock, 1, 2), takes(clock, 3, 4))
        options = ProfileOptions(micro_batch_sizes=[1], device="cpu", budget_seconds=10**6)
        return profile_model((model, torch.ones(1, 4)), options, rounds=5, clock=clock)

    plain, stamp, stamps = measured(), clock.stamp, 0

    def jumping() -> Any:
        nonlocal stamps
        stamps += 1
        if stamps == at:
            clock.advance(seconds, seconds)
        return stamp()

    monkeypatch.setattr(clock, "stamp", jumping)
    jumped = measured()
    assert stamps > 60
    for own, expected in zip(jumped.layers, plain.layers, strict=True):
        for cost, other in zip(own.costs, expected.costs, strict=True):
            assert (cost.forward_seconds, cost.backward_seconds) == pytest.approx(
                (other.forward_seconds, other.backward_seconds)
            )
    assert jumped.whole[0].forward_seconds == pytest.approx(plain.whole[0].forward_seconds)
    assert jumped.whole[0].closing_ratio == pytest.approx(1.0)


def test_values_that_are_no_numbers_take_as_long(clock: Any, takes: Any) -> None:
    """From some pass on, as where a model diverges: seconds and bytes are measured, not values."""
    calls = 0

    class Diverges(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return given * (float("nan") if calls > 6 else 1.0)

    model = nn.Sequential(takes(clock, 1, 2), Diverges(), takes(clock, 3, 4))
    options = ProfileOptions(micro_batch_sizes=[1], device="cpu")
    profile = profile_model((model, torch.ones(1, 4)), options, rounds=5, clock=clock)
    assert calls > 10
    assert [layer.costs[0].forward_seconds for layer in profile.layers] == [1, 0, 3]
    assert [layer.costs[0].backward_seconds for layer in profile.layers] == [2, 0, 4]
    assert Profile.model_validate_json(profile.to_json()) == profile


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _distributed(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def _sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def _hooked(model: nn.Module) -> nn.Module:
    traced = torch.fx.symbolic_trace(model)
    traced.register_forward_hook(lambda module, inputs, output: output)  # noqa: ARG005
    return traced


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("wrap", "expected", "hint"),
    [
        (_distributed, "it is a DistributedDataParallel, which runs in several processes", r"`\.module`"),
        (_sharded, r"0\.weight is a DTensor, of which each process has a part", "before fully_shard"),
        (_hooked, "has hooks of its own", "Remove the hook"),
        (lambda model: model.to("meta"), r"0\.weight is on the meta device", "device='meta'"),
    ],
)
def test_models_that_are_wrapped_or_without_values(
    wrap: Callable[[nn.Module], nn.Module], expected: str, hint: str
) -> None:
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=expected) as caught:
        profile_model((model, torch.ones(1, 4)), ProfileOptions(device="cpu"))
    assert re.search(hint, caught.value.hint)
