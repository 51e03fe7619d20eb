"""Layers that share parameters register each once, and follow the mode."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn import functional as F

from pplan.profiler.layer import BorrowedTensor, ReusedModule, find_tensor_users
from pplan.profiler.layers import build_chain, sequential, state_dict_names
from pplan.profiler.measure import profile_model
from pplan.profiler.profile_options import ProfileOptions


class Drops(nn.Module):
    def __init__(self, functional_too: bool) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.functional_too = functional_too

    def forward(self, given: Tensor) -> Tensor:
        value: Tensor = self.drop(self.norm(self.first(given)))
        return functional.dropout(value, 0.5, self.training) if self.functional_too else value


@pytest.mark.parametrize("functional_too", [False, True])
def test_modules_and_functions_follow_the_mode_without_a_word(functional_too: bool) -> None:
    model, given = Drops(functional_too), torch.randn(2, 4)
    layers = sequential(model, given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers.eval()
        assert torch.equal(layers(given), model.eval()(given))
        layers.train()


class Reused(nn.Module):
    """A linear layer, a batch norm and an activation used twice each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.activation = nn.ReLU()

    def forward(self, given: Tensor) -> Tensor:
        value: Tensor = self.norm(self.activation(self.same(self.first(given))))
        return self.norm(self.activation(self.same(value)))  # type: ignore[no-any-return]


def tied() -> nn.Module:
    """As a language model's last layer shares its weight with the first, and has a bias of its own."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


class Block(nn.Module):
    """Not to be traced, with an attention's weights that are read without calling who holds them."""

    def __init__(self, projection: nn.Linear, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1, batch_first=True)
        setattr(self.attention, "out_proj", projection)  # noqa: B010 - of another class than torch says
        self.steps = nn.ModuleList([nn.Linear(4, 4), norm])

    def forward(self, given: Tensor) -> Tensor:
        value = self.attention(given, given, given, need_weights=False)[0] if given.sum() < 1e9 else given
        for step in self.steps:
            value = step(value)
        return value


def blocks() -> nn.Module:
    first = Block(nn.Linear(4, 4), nn.BatchNorm1d(4))
    second = Block(first.attention.out_proj, first.steps[1])  # type: ignore[arg-type]
    third = Block(nn.Linear(4, 4), nn.BatchNorm1d(4))
    third.attention.in_proj_weight = first.attention.in_proj_weight
    return nn.Sequential(first, second, nn.Linear(4, 4), third, third)


class Composite(nn.Module):
    """Weights, buffers and modules used by functions and inside layers put together from several."""

    shift: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)
        self.register_buffer("count", torch.zeros(4))

    def forward(self, given: Tensor) -> Tensor:
        value = self.embed(given)
        value = value + self.norm(value) * self.scale + self.shift + self.count
        value = torch.tanh(value)
        value = value + self.head(self.norm(value)) * self.scale + self.count
        value = torch.tanh(value)
        return F.linear(value, self.embed.weight) + self.shift.to(value.dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "tied": tied,
    "blocks": blocks,
    "composite": Composite,
    "twice": lambda: (lambda part: nn.Sequential(part, nn.Tanh(), part))(nn.Sequential(nn.Linear(4, 4))),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    made = MODELS[request.param]().double()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def batch() -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def trained(model: nn.Module, parameters: Sequence[nn.Parameter], steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert len(set(losses)) == steps
    return losses


def assert_registered_once(layers: nn.Sequential) -> None:
    """The check of torchgpipe, and the same of what is saved."""
    assert len(list(layers.named_children())) == len(layers)
    own = [len(list(child.parameters())) for child in layers]
    assert sum(own) == len(list(layers.parameters())) > 0
    saved = [value.data_ptr() for value in layers.state_dict().values() if value.numel()]
    assert len(set(saved)) == len(saved) > 0


def test_each_tensor_is_registered_once(model: nn.Module) -> None:
    layers = sequential(model, batch())
    assert len(layers) == len(build_chain(model, batch()))
    assert_registered_once(layers)
    assert {id(p) for p in layers.parameters()} == {id(p) for p in model.parameters()}
    assert len({id(b) for b in layers.buffers()}) == len(list(model.buffers()))


def test_training_it_trains_the_model(model: nn.Module) -> None:
    plain = copy.deepcopy(model)
    layers = sequential(model, batch())
    losses = trained(layers, list(layers.parameters()))
    assert losses == trained(plain, list(plain.parameters()))
    for value, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert torch.equal(value, expected)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "part"])
def test_copies_keep_the_sharing(model: nn.Module, way: str) -> None:
    layers = sequential(model, batch())
    copies: dict[str, Callable[[], nn.Sequential]] = {
        "deepcopy": lambda: copy.deepcopy(layers),
        "pickle": lambda: pickle.loads(pickle.dumps(layers)),
        "part": lambda: copy.deepcopy(nn.Sequential(*layers)),
    }
    other = copies[way]()
    assert_registered_once(other)
    assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in layers.parameters()})
    kept = {name: value.clone() for name, value in layers.state_dict().items()}
    losses = trained(other, list(other.parameters()))
    assert all(torch.equal(value, kept[name]) for name, value in layers.state_dict().items())
    assert losses == trained(layers, list(layers.parameters()))


@pytest.mark.parametrize("assign", [False, True])
def test_it_is_saved_and_loaded(model: nn.Module, assign: bool) -> None:
    layers, other = sequential(model, batch()), sequential(copy.deepcopy(model), batch())
    trained(layers, list(layers.parameters()))
    file = io.BytesIO()
    torch.save(layers.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), assign=assign)
    assert trained(other, list(other.parameters())) == trained(layers, list(layers.parameters()))


def test_conversion_keeps_the_sharing(model: nn.Module) -> None:
    layers, plain = sequential(model, batch()), copy.deepcopy(model)
    plain.float().double()
    layers.float()
    assert {value.dtype for value in (*layers.parameters(), *layers.buffers())} <= {
        torch.float32,
        torch.int64,
    }
    assert layers(batch().float()).dtype == torch.float32
    layers.load_state_dict(sequential(plain, batch()).state_dict())
    layers.double()
    assert trained(layers, list(layers.parameters())) == trained(plain, list(plain.parameters()))


def test_it_runs_on_the_meta_device(model: nn.Module) -> None:
    if any(isinstance(part, Block) for part in model.modules()):
        pytest.skip("decides by values")
    layers = sequential(model, batch()).to("meta")
    assert layers(batch().to("meta")).shape == (6, 4)


def test_checkpoints_move_both_ways(model: nn.Module) -> None:
    names = state_dict_names(model, batch())
    layers, fresh = sequential(model, batch()), copy.deepcopy(model)
    assert set(names) == set(model.state_dict())
    assert set(names.values()) == set(layers.state_dict())
    trained(layers, list(layers.parameters()))
    state = layers.state_dict()
    fresh.load_state_dict({old: state[name] for old, name in names.items()})
    own = fresh.state_dict()
    other = sequential(copy.deepcopy(model), batch())
    other.load_state_dict({name: own[old] for old, name in names.items()})
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["itself", "deepcopy", "pickle"])
def test_finer_layers_share_as_well(model: nn.Module, way: str) -> None:
    layers = sequential(model, batch(), granularity="fine")
    assert len(layers) >= len(sequential(model, batch()))
    assert_registered_once(layers)
    names = state_dict_names(model, batch(), granularity="fine")
    assert set(names) == set(model.state_dict())
    assert set(names.values()) == set(layers.state_dict())
    plain = copy.deepcopy(model)
    copies: dict[str, Callable[[], nn.Sequential]] = {
        "itself": lambda: layers,
        "deepcopy": lambda: copy.deepcopy(layers),
        "pickle": lambda: pickle.loads(pickle.dumps(layers)),
    }
    other = copies[way]()
    assert_registered_once(other)
    assert trained(other, list(other.parameters())) == trained(plain, list(plain.parameters()))


def test_the_models_second_names_lead_to_the_first() -> None:
    model = tied()
    assert state_dict_names(model, torch.ones(1, 4)) == {
        "0.weight": "0.weight",
        "2.weight": "0.weight",
        "2.bias": "2.bias",
    }


def test_one_set_of_running_statistics() -> None:
    torch.manual_seed(0)
    model = Reused()
    layers = sequential(model, torch.ones(2, 4))
    kinds = [type(child) for child in layers]
    assert kinds == [nn.Linear, nn.Linear, nn.ReLU, nn.BatchNorm1d, ReusedModule, ReusedModule, ReusedModule]
    assert layers[3] is model.norm
    layers(torch.randn(6, 4))
    assert model.norm.num_batches_tracked == torch.tensor(2)
    layers.eval()
    layers(torch.randn(6, 4))
    assert model.norm.num_batches_tracked == torch.tensor(2)


def test_the_model_is_untouched(model: nn.Module) -> None:
    def picture() -> dict[str, object]:
        return {
            name: [
                set(vars(part)),
                {key: id(value) for key, value in (*part._parameters.items(), *part._buffers.items())},
                {key: id(value) for key, value in part._modules.items()},
                len(part._forward_pre_hooks),
                set(part._non_persistent_buffers_set),
                part.training,
            ]
            for name, part in model.named_modules()
        }

    before = picture()
    layers = sequential(model, batch())
    layers(batch())
    assert picture() == before


def test_its_own_chain_knows_the_sharers(model: nn.Module) -> None:
    """A profile of the nn.Sequential forbids the cuts that the model's does, and has its tied weights."""
    chain = build_chain(model, batch())
    again = build_chain(sequential(model, batch()), batch())
    cuts = [layer.cut_reason is None for layer in chain.layers]
    shared, of_again = (
        [
            (own.layers, own.tensor.shape)
            for own in find_tensor_users(whole, [layer.module for layer in made.layers], made.aliases)
            if own.is_tied
        ]
        for whole, made in ((model, chain), (sequential(model, batch()), again))
    )
    assert shared
    assert of_again == shared
    assert [layer.cut_reason is None for layer in again.layers] == cuts
    assert [layer.name for layer in again.layers] == [layer.name for layer in chain.layers]
    assert [layer.parameter_bytes for layer in again.layers] == [
        layer.parameter_bytes for layer in chain.layers
    ]
    profile = profile_model(
        (sequential(model, batch()), batch()),
        ProfileOptions(micro_batch_sizes=[2], device="cpu", dtype="float64"),
        rounds=1,
    )
    assert [layer.cut_after for layer in profile.layers[:-1]] == cuts[:-1]


def test_functions_borrow_weights_and_buffers() -> None:
    model = Composite()
    layers = sequential(model, torch.ones(2, 4))
    borrowed = [part for child in layers for part in child.modules() if isinstance(part, BorrowedTensor)]
    assert {id(part()) for part in borrowed} == {
        id(model.scale),
        id(model.count),
        id(model.embed.weight),
        id(model.shift),
    }
    assert "shift" not in "".join(layers.state_dict())
    assert sum("count" in name for name in layers.state_dict()) == 1


def test_a_traced_part_keeps_its_hooks() -> None:
    first = nn.Linear(4, 4)
    part = fx.symbolic_trace(nn.Sequential(first, nn.Tanh()))
    part.register_forward_hook(lambda _module, _given, output: output + 1)
    layers = sequential(nn.Sequential(first, part), torch.ones(2, 4))
    given = torch.randn(2, 4)
    assert torch.equal(layers(given), torch.tanh(first(first(given))) + 1)
    assert_registered_once(layers)


class Indexes(nn.Module):
    """Holds containers of others, and takes their elements by number."""

    def __init__(self, steps: nn.Sequential, weights: nn.ParameterList) -> None:
        super().__init__()
        self.steps, self.weights = steps, weights

    def forward(self, given: Tensor) -> Tensor:
        value: Tensor = given
        for number in range(len(self.steps)):
            value = self.steps[number](value) * self.weights[number]
        return value + self.steps(given)  # type: ignore[no-any-return]


def test_shared_containers_can_be_indexed() -> None:
    torch.manual_seed(0)
    steps = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    weights = nn.ParameterList([torch.rand(4) for _ in steps])
    model = nn.Sequential(Indexes(steps, weights), nn.Tanh(), Indexes(steps, weights)).double()
    layers, plain = sequential(model, batch()), copy.deepcopy(model)
    assert_registered_once(layers)
    assert list(layers[2].parameters()) == []
    assert trained(layers, list(layers.parameters())) == trained(plain, list(plain.parameters()))


def test_shared_activations_inside_blocks_leave_the_blocks_alone() -> None:
    activation = nn.ReLU()
    parts = [nn.TransformerEncoderLayer(4, 1, 4, activation=activation, batch_first=True) for _ in range(2)]
    layers = sequential(nn.Sequential(*parts), torch.ones(2, 3, 4))
    assert list(layers) == parts
