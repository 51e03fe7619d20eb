"""Models as chains: which layers, which cuts, and what stops a model from being one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from pplan.cost_models.errors import ModelError, UsageError
from pplan.profiler.layer import LayerChain, storage_aliases
from pplan.profiler.layers import build_chain
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.user_model import ModelInput, layer_failure


def run(chain: LayerChain, value: Any) -> Any:
    for layer in chain.layers:
        value = layer.module(value)
    return value


@pytest.fixture(scope="module")
def vgg19() -> LayerChain:
    with torch.device("meta"):
        model = torchvision.models.vgg19()
    return build_chain(model, torch.empty(2, 3, 32, 32, device="meta"))


def test_vgg19_has_46_layers(vgg19: LayerChain) -> None:
    names = [layer.name for layer in vgg19.layers]
    assert names == [
        *(f"features.{i}" for i in range(37)),
        "avgpool",
        "flatten",
        *(f"classifier.{i}" for i in range(7)),
    ]
    assert [layer.kind for layer in vgg19.layers][:3] == ["Conv2d", "ReLU", "Conv2d"]
    assert sum(layer.parameter_bytes for layer in vgg19.layers) == 4 * 143_667_240


def test_vgg19_is_not_cut_before_in_place_relus(vgg19: LayerChain) -> None:
    refused = {layer.name: layer.cut_reason for layer in vgg19.layers if layer.cut_reason}
    convolutions = [layer.name for layer in vgg19.layers if layer.kind == "Conv2d"]
    assert list(refused) == [*convolutions, "classifier.0", "classifier.3"]
    assert len(refused) == 18
    assert set(refused.values()) == {"in-place ReLU follows"}


@pytest.mark.slow
def test_resnet50_is_cut_where_one_tensor_passes() -> None:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    chain = build_chain(model, torch.empty(2, 3, 64, 64, device="meta"))
    assert len(chain) == 39
    names = [layer.name for layer in chain.layers]
    assert names[:6] == ["conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.0.relu"]
    assert {layer.kind for layer in chain.layers if layer.path is None} == {"Bottleneck", "flatten"}
    reasons = {layer.name: layer.cut_reason for layer in chain.layers}
    assert reasons["layer1.0"] == "in-place ReLU follows"
    assert reasons["layer1.0.relu"] is None
    ours = [p for layer in chain.layers for p in layer.parameters]
    assert {id(p) for p in ours} == {id(p) for p in model.parameters()}
    assert len(ours) == len(list(model.parameters()))


def test_nested_sequentials_are_taken_apart_and_others_are_not() -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential())
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    hooked.register_forward_hook(lambda *seen: None)  # noqa: ARG005
    model = nn.Sequential(block, nn.MultiheadAttention(4, 1).out_proj, hooked)
    names = [layer.name for layer in build_chain(model, torch.ones(1, 4)).layers]
    assert names == ["0.0", "0.1.0", "0.1.1", "1", "2"]


class Overwrites(nn.Module):
    """Changes a view of what came two layers before."""

    def forward(self, given: Tensor) -> Tensor:
        return given[:1].add_(1) * 2


def test_in_place_through_views_forbids_every_cut_it_reaches() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(0), Overwrites(), nn.Flatten(0), nn.Hardtanh())
    reasons = [layer.cut_reason for layer in build_chain(model, torch.ones(2, 4)).layers]
    assert reasons == ["in-place Overwrites 2 overwrites it", "in-place Overwrites follows", None, None, None]


class Counts(nn.Module):
    """Only runs for real: its result depends on values."""

    def forward(self, given: Tensor) -> Tensor:
        return given * given.sum().item()


class InBranch(nn.Module):
    """Overwrites what comes in, in the midst of a layer of several operations."""

    def __init__(self, *before: nn.Module) -> None:
        super().__init__()
        self.before, self.linear = nn.Sequential(*before), nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        value = self.before(given)
        return self.linear(value.detach() + 1) + value.mul_(2)  # type: ignore[no-any-return]


def test_an_in_place_operation_inside_a_layer_is_not_called_by_the_layers_kind() -> None:
    chain = build_chain(InBranch(nn.Linear(4, 4)), torch.ones(2, 4))
    assert [layer.kind for layer in chain.layers] == ["Linear", "Linear"]
    assert chain.layers[0].cut_reason == "an in-place operation in linear follows"
    chain = build_chain(InBranch(nn.Linear(4, 4), nn.Flatten()), torch.ones(2, 4))
    assert [layer.cut_reason for layer in chain.layers] == [
        "an in-place operation in linear overwrites it",
        "an in-place operation in linear follows",
        None,
    ]


@pytest.mark.parametrize(
    ("model", "overwrites"),
    [
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)), True),
        (nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True)), True),
        (nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True)), True),
        (InBranch(), True),
        (nn.Sequential(Counts(), nn.ReLU(inplace=True)), False),
        (nn.Sequential(nn.ReLU(inplace=True), Counts()), True),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)), False),
    ],
)
def test_models_that_overwrite_their_input(model: nn.Module, overwrites: bool) -> None:
    assert build_chain(model, torch.ones(2, 4)).overwrites_input is overwrites


def test_cuts_between_users_of_one_weight_which_the_first_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    chain = build_chain(model, torch.ones(1, 4))
    assert [layer.cut_reason for layer in chain.layers] == [None] * 4
    assert [layer.parameter_bytes for layer in chain.layers] == [80, 0, 16, 80]


def test_no_cut_between_uses_of_one_batch_norm() -> None:
    norm = nn.BatchNorm1d(4, affine=False)
    model = nn.Sequential(norm, nn.Linear(4, 4), norm, nn.Tanh())
    reasons = [layer.cut_reason for layer in build_chain(model, torch.ones(2, 4)).layers]
    assert reasons[0] is not None
    assert "share 0.running_mean" in reasons[0]
    assert reasons[1] == reasons[0]
    assert reasons[2] is None


class Reuses(nn.Module):
    """One activation used twice, a weight of its own, a size, a functional, a buffer, a default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.activation = nn.ReLU()
        self.scale = nn.Parameter(torch.full((6,), 1.5))
        self.register_buffer("shift", torch.arange(6.0), persistent=False)

    def forward(self, given: Tensor, offset: float = 0.5, mask: Tensor | None = None) -> Tensor:
        value = given.view(given.size(0), -1)
        value = self.activation(self.first(value))
        if mask is not None:
            value = value * mask
        value = self.activation(value * self.scale + self.shift)
        result: Tensor = self.second(F.dropout(value, 0.5, self.training)) + offset
        return result


def test_a_traced_model_keeps_its_meaning() -> None:
    model = Reuses()
    given = torch.randn(3, 2, 3)
    chain = build_chain(model, given)
    assert [layer.name for layer in chain.layers] == [
        "view",
        "first",
        "activation",
        "mul",
        "add",
        "activation_1",
        "dropout",
        "second",
        "add_1",
    ]
    assert all(layer.cut_reason is None for layer in chain.layers)
    torch.manual_seed(1)
    expected = model(given)
    torch.manual_seed(1)
    assert torch.equal(run(chain, given), expected)
    assert {id(p) for layer in chain.layers for p in layer.parameters} == {id(p) for p in model.parameters()}
    assert chain.layers[4].buffers == (model.shift,)


class Branches(nn.Module):
    """Values that are no tensors, constants made on the way, and two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.table = torch.arange(4.0)

    def forward(self, given: Tensor) -> Tensor:
        left, right = given.chunk(2, dim=1)
        both = self.inner(left) + right * self.table + torch.ones(4)
        return torch.tanh(both).clamp(min=0)


def test_tuples_and_constants_do_not_cross_cuts() -> None:
    model = Branches()
    given = torch.randn(2, 8)
    chain = build_chain(model, given)
    assert [layer.name for layer in chain.layers][-2:] == ["tanh", "clamp"]
    assert torch.equal(run(chain, given), model(given))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 2)])

    def forward(self, given: Tensor) -> dict[str, Tensor]:
        value = torch.tanh(self.body(given))
        return {"one": self.heads[0](value), "two": self.heads[1](value)}


class Splits(nn.Module):
    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return given + 1, given * 2


class Nests(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> dict[str, tuple[Tensor, ...]]:
        return {"pair": pair}


class Joins(nn.Module):
    def forward(self, nested: dict[str, tuple[Tensor, ...]]) -> Tensor:
        return nested["pair"][0] * nested["pair"][1]


def test_elements_of_a_sequential_may_hand_on_a_tuple_and_nothing_deeper() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Splits(), Nests(), Joins(), nn.Tanh())
    given = torch.randn(2, 4)
    chain = build_chain(model, given)
    assert [layer.crossing for layer in chain.layers] == [1, 2, 1, 0]
    assert [layer.path for layer in chain.layers] == ["0", "1", None, "4"]
    assert chain.edges == ((0, 1), (1, 2), (2, 3))
    assert torch.equal(run(chain, given), model(given))


def test_the_last_layer_may_return_several_tensors() -> None:
    model = Pair()
    given = torch.randn(2, 4)
    chain = build_chain(model, given)
    assert [layer.name for layer in chain.layers] == ["body", "tanh", "heads"]
    result = run(chain, given)
    assert isinstance(result, dict)
    assert torch.equal(result["two"], model(given)["two"])


@pytest.mark.slow
def test_the_model_is_untouched() -> None:
    model = torchvision.models.resnet18(num_classes=2)
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    build_chain(model, torch.randn(2, 3, 32, 32))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_layers_that_the_meta_device_cannot_run_are_run_for_real() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counts(), nn.ReLU(inplace=True))
    reasons = [layer.cut_reason for layer in build_chain(model, torch.ones(1, 2)).layers]
    assert reasons == [None, "in-place ReLU follows", None]


def test_batch_norm_on_one_value_a_channel_is_tried_with_two_samples() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert len(build_chain(model, torch.ones(1, 2))) == 2


class Decides(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        if given.sum() > 0:
            return given
        return -given


@pytest.mark.slow
def test_an_untraceable_model_is_told_its_line() -> None:
    with pytest.raises(ModelError) as caught:
        build_chain(Decides(), torch.ones(1, 2))
    assert "test_layers.py" in caught.value.what
    assert "if given.sum() > 0:" in caught.value.what
    assert "a module of its own" in caught.value.hint


class Two(nn.Module):
    def forward(self, given: Tensor, other: Tensor) -> Tensor:
        return given + other


class Nothing(nn.Module):
    def forward(self, given: Tensor) -> Tensor:  # noqa: ARG002
        return torch.ones(1)


class Several(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        return torch.tanh(xs[0])


class Hands(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given


class Named(nn.Module):
    def forward(self, *, x: Tensor) -> Tensor:
        return torch.tanh(x)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Two(), r"does not fit forward\(given, other\): missing .* 'other'"),
        (Named(), r"does not fit forward\(\*, x\): too many positional arguments"),
        (nn.LazyLinear(3), "weight is lazy"),
        (nn.Sequential(nn.LazyLinear(3)), r"0\.weight is lazy"),
        (nn.Sequential(nn.LazyBatchNorm1d(affine=False)), "running_mean is lazy"),
        (Nothing(), "does not depend on its input"),
        (nn.Sequential(), "has no layers"),
        (Hands(), "has no layers"),
    ],
)
def test_models_that_are_no_chain(model: nn.Module, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        build_chain(model, torch.ones(1, 2))
    assert caught.value.hint


class Scales(nn.Module):
    """Arguments by position and by keyword, one of them no tensor, one not given."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(
        self, one: Tensor, factor: float = 2.0, *, two: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        value = torch.tanh(self.left(one)) * factor
        other = torch.relu(self.right(two))
        if mask is not None:
            value = value * mask
        return value + other, other


@pytest.mark.parametrize("granularity", ["block", "fine", "module:left,right"])
def test_several_inputs_and_outputs(granularity: str) -> None:
    model, one, two = Scales(), torch.randn(2, 4), torch.randn(2, 3)
    chain = build_chain(model, ModelInput((one, 3.0), {"two": two}), granularity=granularity)
    results = run(chain, (one, two))
    assert all(map(torch.equal, results, model(one, 3.0, two=two)))
    swapped = build_chain(model, {"two": two, "one": one}, granularity=granularity)
    assert all(map(torch.equal, run(swapped, (two, one)), model(one, two=two)))
    assert len(chain) == {"block": 2, "fine": 6, "module:left,right": 4}[granularity]


@pytest.mark.parametrize(
    ("shape", "named"),
    [((1, 1, 64, 64), "(3, 224, 224)"), ((1, 3, 16, 16), "(3, 32, 32)"), ((1, 3), "(3, 224, 224)")],
)
def test_a_wrong_input_shape_names_layer_shape_and_field(shape: tuple[int, ...], named: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg11()
    with pytest.raises(ModelError) as caught:
        build_chain(model, torch.empty(shape, device="meta"))
    assert "layer features." in caught.value.what
    assert "input of shape 1x" in caught.value.what
    assert f"input_shape={named}" in caught.value.hint


def test_a_failing_layer_of_the_users_is_told_its_line() -> None:
    class Fails(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            raise KeyError(f"gone at {given.dim()}")

    with pytest.raises(ModelError, match=r"layer 1 \(Fails\) failed on .* 1x2 .*KeyError.*test_layers.py"):
        build_chain(nn.Sequential(nn.Linear(2, 2), Fails()), torch.ones(1, 2))


HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)


@pytest.mark.parametrize("register", HOOKS)
@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Several(), nn.Linear(2, 2)])
def test_hooks_of_the_whole_model_are_not_dropped(model: nn.Module, register: str) -> None:
    model = copy.deepcopy(model)
    handle = getattr(model, register)(lambda *seen: None)  # noqa: ARG005
    with pytest.raises(ModelError, match=f"{type(model).__name__} has hooks of its own"):
        build_chain(model, torch.ones(1, 2))
    (layer,) = build_chain(nn.Sequential(model), torch.ones(1, 2)).layers
    assert layer.module is model
    handle.remove()
    if isinstance(model, nn.Sequential):
        assert len(build_chain(model, torch.ones(1, 2))) == 2


def test_frozen_parameters_are_not_trainable() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    layers = build_chain(model, torch.ones(1, 4)).layers
    assert [(layer.parameter_bytes, layer.trainable_bytes) for layer in layers] == [
        (80, 0),
        (80, 64),
        (80, 80),
    ]


@pytest.mark.parametrize(
    ("layer", "given", "hint"),
    [
        (nn.BatchNorm1d(4), torch.ones(1, 4), "micro-batch sizes of 2 or more"),
        (nn.Linear(4, 4), torch.ones(1, 4, dtype=torch.int64), "dtype that the layer takes"),
        (nn.Embedding(4, 4), torch.ones(1, 4), "dtype that the layer takes"),
        (nn.Conv1d(4, 4, 1).double(), torch.ones(1, 4, 4), "dtype that the layer takes"),
        (nn.LayerNorm(4), torch.ones(1, 4, dtype=torch.float64), "dtype that the layer takes"),
        (nn.Softmax(1), torch.ones(1, 4, dtype=torch.int64), "dtype that the layer takes"),
        (nn.Linear(4, 4), torch.ones(1, 3), "input_shape=(3, 224, 224)"),
        (nn.Bilinear(4, 4, 4), torch.ones(1, 4), "input_shape=(3, 224, 224)"),
    ],
)
def test_the_hint_fits_what_the_layer_said(layer: nn.Module, given: Tensor, hint: str) -> None:
    with pytest.raises(Exception, match=r".") as said:
        layer(given)
    assert hint in layer_failure("0", type(layer).__name__, given, said.value).hint


def test_layers_are_kept_together_by_the_users_pins() -> None:
    with torch.device("meta"):
        model, given = torchvision.models.vgg11(num_classes=2), torch.empty(2, 3, 32, 32)
    chain = build_chain(model, given, keep_together=["classifier.*", "features.1?"])
    reasons = {layer.name: layer.cut_reason for layer in chain.layers}
    names = list(reasons)
    free = [name for name in names if reasons[name] is None]
    assert reasons["features.8"] == "in-place ReLU follows"
    assert [name for name in names if reasons[name] == "kept together: features.1?"] == [
        f"features.{i}" for i in (10, 12, 14, 15, 17)
    ]
    assert [name for name in names if reasons[name] == "kept together: classifier.*"] == [
        f"classifier.{i}" for i in (1, 2, 4, 5)
    ]
    assert {"features.7", "features.9", "features.19", "flatten"} < set(free)


def test_a_pin_that_matches_no_layer_is_refused() -> None:
    with torch.device("meta"):
        model, given = torchvision.models.vgg11(), torch.empty(2, 3, 32, 32)
    with pytest.raises(ModelError, match=r"no layer is named 'clasifier\.\*'; nearest: classifier") as caught:
        build_chain(model, given, keep_together=["clasifier.*"])
    assert "features.0, features.1" in caught.value.hint


@pytest.mark.parametrize("granularity", ["blocks", "module", "module:", "fine:a", ""])
def test_an_unknown_granularity_is_refused(granularity: str) -> None:
    with pytest.raises(UsageError, match="granularity"):
        build_chain(nn.Sequential(nn.ReLU()), torch.ones(1, 2), granularity=granularity)


class Passes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, given: Tensor) -> Tensor:
        result: Tensor = self.c(self.b(self.a(given)))
        return result


def test_parameters_over_the_same_memory_are_shared_too() -> None:
    model = Passes()
    model.b.weight.data = model.a.weight.data
    assert storage_aliases(model) == (("a.weight", "b.weight"),)
    chain = build_chain(model, torch.ones(2, 4))
    assert [layer.cut_reason for layer in chain.layers] == ["a and b share a.weight", None, None]
    profile = profile_model((model, torch.ones(2, 4)), ProfileOptions(device="meta", micro_batch_sizes=[2]))
    assert [layer.cut_after for layer in profile.layers] == [False, True, True]
    assert [(tied.tensor, tied.layers) for tied in profile.tied] == [("a.weight", ["a", "b"])]


def test_neighbours_in_one_flat_buffer_are_not_shared() -> None:
    model = Passes()
    flat = torch.randn(3 * 16)
    for index, layer in enumerate((model.a, model.b, model.c)):
        layer.weight.data = flat[16 * index : 16 * index + 16].view(4, 4)
    assert storage_aliases(model) == ()
    assert all(layer.cut_reason is None for layer in build_chain(model, torch.ones(2, 4)).layers)
    # Unless they overlap: here by one number.
    model.c.weight.data = flat[31:47].view(4, 4)
    assert storage_aliases(model) == (("b.weight", "c.weight"),)
