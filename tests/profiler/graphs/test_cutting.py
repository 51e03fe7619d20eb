"""Cuts of graphs: what crosses where, against counting by hand on random programs, and what is chosen."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

from pplan.cost_models.errors import ModelError
from pplan.profiler.cutting import Granularity, parts
from pplan.profiler.flow import Flow
from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain, sequential
from pplan.profiler.tracing import trace_symbolically
from pplan.profiler.trial import Trial
from pplan.profiler.user_model import ModelInput


@dataclass(frozen=True)
class Step:
    """One operation of a random program on values by their numbers; 0 is the input."""

    operation: str
    sources: tuple[int, ...]


class Program(nn.Module):
    """Runs its steps; of one it may take the first half of the columns, or both twice."""

    def __init__(self, steps: list[Step], returned: tuple[int, ...]) -> None:
        super().__init__()
        self.steps, self.returned = steps, returned

    def forward(self, given: Tensor) -> tuple[Tensor, ...]:
        values = [given]
        for step in self.steps:
            values.append(getattr(self, step.operation)(*(values[source] for source in step.sources)))
        return tuple(values[number] for number in self.returned)

    def scale(self, one: Tensor) -> Tensor:
        return one * 1.5

    def add(self, one: Tensor, other: Tensor) -> Tensor:
        return one + other

    def widen(self, one: Tensor) -> Tensor:
        return torch.cat([one, one], dim=1)

    def view(self, one: Tensor) -> Tensor:
        return one[:, :4]

    def overwrite(self, one: Tensor, other: Tensor) -> Tensor:
        return one.add_(other)


@dataclass(frozen=True)
class Value:
    """What is known by hand: which tensor it is, which memory it is in, and how wide it is."""

    tensor: int
    memory: int
    width: int


def random_program(seed: int, *, in_place: bool) -> tuple[Program, list[Value]]:
    dice = random.Random(seed)
    values = [Value(0, 0, 8)]
    steps: list[Step] = []
    for number in range(1, dice.randint(3, 14)):
        source = dice.randrange(max(0, number - 4), number)
        same = [j for j, value in enumerate(values) if value.width == values[source].width]
        operations = ["scale", "add", "widen", "view", *(["overwrite"] * 2 if in_place else [])]
        operation = dice.choice(operations)
        one = values[source]
        if operation in ("add", "overwrite"):
            steps.append(Step(operation, (source, dice.choice(same))))
        else:
            steps.append(Step(operation, (source,)))
        values.append(
            {
                "scale": Value(number, number, one.width),
                "add": Value(number, number, one.width),
                "widen": Value(number, number, 2 * one.width),
                "view": Value(number, one.memory, 4),
                "overwrite": one,
            }[operation]
        )
    returned = tuple(sorted({len(steps), dice.randrange(len(steps) + 1)}))
    return Program(steps, returned), values


def by_hand(program: Program, values: list[Value], made: int) -> tuple[set[Value], bool]:
    """The tensors needed after the first `made` steps, and whether one of them is overwritten later."""
    later = program.steps[made:]
    needed = {source for step in later for source in step.sources} | set(program.returned)
    crossing = {values[number] for number in needed if number <= made}
    overwritten = {values[step.sources[0]].memory for step in later if step.operation == "overwrite"}
    return crossing, any(value.memory in overwritten for value in crossing)


def flow_of(model: nn.Module, given: Tensor) -> Flow:
    example = ModelInput.of(given)
    traced = trace_symbolically(model, example, "model")
    return Flow(traced, Trial(traced, model, example, "model"))


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [False, True])
def test_what_crosses_is_what_counting_by_hand_finds(in_place: bool) -> None:
    seen = overwrites = 0
    for seed in range(60):
        program, values = random_program(seed, in_place=in_place)
        flow = flow_of(program, torch.randn(2, 8))
        assert len(flow.order) == len(program.steps)
        for index, position in flow.positions.items():
            crossing, overwritten = by_hand(program, values, index)
            assert flow.tensors(position) == len(crossing)
            assert position.bytes == sum(2 * 4 * value.width for value in crossing)
            assert (flow.first_overwriting(position) is not None) == overwritten
            seen += len(crossing)
            overwrites += overwritten
    assert seen > 500
    assert bool(overwrites) == in_place


@pytest.mark.slow
@pytest.mark.parametrize("granularity", ["block", "fine"])
def test_layers_of_random_programs_compute_the_same(granularity: str) -> None:
    layers = 0
    for seed in range(60):
        program, _ = random_program(seed, in_place=True)
        given = torch.randn(2, 8)
        expected = program(given.clone())
        children = sequential(program, given, granularity=granularity)
        results = children(given.clone())
        assert len(results) == len(expected)
        assert all(map(torch.equal, results, expected))
        layers += len(children)
    assert layers > 100


@pytest.mark.slow
def test_fine_cuts_are_block_cuts_and_more() -> None:
    fewer = 0
    for seed in range(60):
        program, values = random_program(seed, in_place=False)
        flow = flow_of(program, torch.randn(2, 8))
        block, fine = (
            {part.after.index for part in parts(flow, Granularity.parse(kind)) if part.after is not None}
            for kind in ("block", "fine")
        )
        assert block <= fine
        fewer += block < fine
        assert block == {
            index
            for index in flow.positions
            if len(crossing := by_hand(program, values, index)[0]) == 1 and crossing != {values[0]}
        }
    assert fewer > 10


def resnet(granularity: str) -> LayerChain:
    with torch.device("meta"):
        model = torchvision.models.resnet18()
    return build_chain(model, torch.empty(2, 3, 64, 64, device="meta"), granularity=granularity)


def test_a_residual_block_is_cut_inside_where_two_tensors_cross() -> None:
    names = [(layer.name, layer.crossing) for layer in resnet("fine").layers]
    start = names.index(("layer1.0.conv1", 2))
    assert names[start : start + 7] == [
        ("layer1.0.conv1", 2),
        ("layer1.0.bn1", 2),
        ("layer1.0.relu", 2),
        ("layer1.0.conv2", 2),
        ("layer1.0.bn2", 2),
        ("layer1.0.add", 1),
        ("layer1.0.relu_1", 1),
    ]
    assert names[-1] == ("fc", 0)


def test_modules_of_the_users_choice_are_layers() -> None:
    names = [layer.name for layer in resnet("module:layer?.*,fc").layers]
    assert names == ["conv1", *(f"layer{i}.{j}" for i in range(1, 5) for j in (0, 1)), "avgpool", "fc"]
    # Of nested modules that match, the outermost.
    assert [layer.name for layer in resnet("module:layer1*").layers] == ["conv1", "layer1", "layer2.0.conv1"]


def test_the_edges_are_who_makes_and_who_uses() -> None:
    chain = resnet("fine")
    names = [layer.name for layer in chain.layers]
    edges = {(names[a], names[b]) for a, b in chain.edges}
    assert ("maxpool", "layer1.0.conv1") in edges
    assert ("maxpool", "layer1.0.add") in edges
    assert ("layer1.0.bn2", "layer1.0.add") in edges
    assert ("layer1.0.conv1", "layer1.0.add") not in edges
    assert all(a < b for a, b in chain.edges)
    assert {b for _, b in chain.edges} == set(range(1, len(chain)))


def test_a_pattern_that_matches_no_module_is_refused() -> None:
    with pytest.raises(ModelError, match=r"no module is named 'layr1\.\*'; nearest: layer1") as caught:
        resnet("module:layr1.*")
    assert "conv1, bn1" in caught.value.hint


def test_a_sequential_is_cut_by_patterns_and_finely() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 2)))
    given = torch.ones(2, 4)
    assert [x.name for x in build_chain(model, given, granularity="module:0").layers] == ["0", "1.0"]
    assert [x.name for x in build_chain(model, given, granularity="fine").layers] == ["0.0", "0.1", "1.0"]


class Undecided(nn.Module):
    """Not to be traced by anything."""

    def forward(self, given: Tensor) -> Tensor:
        return given if given.sum() > 0 else -given


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.undecided, self.last = nn.Linear(4, 4), Undecided(), nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        return self.last(self.undecided(torch.tanh(self.first(given))))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_modules_of_the_users_choice_need_not_be_traceable() -> None:
    model, given = Around(), torch.ones(2, 4)
    with pytest.raises(ModelError, match=r"given if given\.sum") as caught:
        build_chain(Undecided(), given)
    assert "module:PATTERN" in caught.value.hint
    for granularity in ("block", "module:undecided"):
        chain = build_chain(model, given, granularity=granularity)
        assert ("undecided", "undecided") in [(layer.name, layer.path) for layer in chain.layers]
    assert [layer.name for layer in chain.layers] == ["first", "undecided", "last"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        return self.head(self.block(self.block(given)))  # type: ignore[no-any-return]


def test_each_call_of_a_module_is_a_layer() -> None:
    chain = build_chain(Twice(), torch.ones(2, 4), granularity="module:block")
    assert [layer.name for layer in chain.layers] == ["block", "block_1", "head"]
    assert [layer.cut_reason for layer in chain.layers] == [None] * 3


class Tables(nn.Module):
    """A table that is made first and used last, and a size of the input's that is used last."""

    def __init__(self, *, overwritten: bool = False) -> None:
        super().__init__()
        self.overwritten = overwritten
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("base", torch.arange(4.0))

    def forward(self, given: Tensor) -> Tensor:
        base: Tensor = self.base  # type: ignore[assignment]
        batch, table = given.shape[0], base * 2 + torch.ones(4)
        value = torch.tanh(self.first(given))
        if self.overwritten:
            base.mul_(0)
        value = self.last(value)
        return value.view(batch, 2, -1) + table.expand(batch, 4).view(batch, 2, -1)  # type: ignore[no-any-return]


def test_tables_and_sizes_do_not_stand_in_the_way_of_cuts() -> None:
    model, given = Tables(), torch.randn(3, 4)
    chain = build_chain(model, given)
    assert [layer.name for layer in chain.layers][:3] == ["first", "tanh", "last"]
    for batch in (3, 5):
        given = torch.randn(batch, 4)
        value: Any = given
        for layer in chain.layers:
            value = layer.module(value)
        assert torch.equal(value, model(given))


def test_a_table_is_not_moved_over_what_changes_it() -> None:
    model = Tables(overwritten=True)
    expected = Tables(overwritten=True)
    expected.load_state_dict(model.state_dict())
    given = torch.randn(3, 4)
    children = sequential(model, given, granularity="fine")
    assert torch.equal(children(given), expected(given))


@pytest.mark.slow
def test_dense_connections_are_counted_once_each() -> None:
    with torch.device("meta"):
        model = torchvision.models.densenet121()
    chain = build_chain(model, torch.empty(2, 3, 64, 64, device="meta"), granularity="fine")
    block = build_chain(model, torch.empty(2, 3, 64, 64, device="meta"))
    assert len(block) == 48
    assert max(layer.crossing for layer in block.layers) > 10
    # Before the last dense layer of the third block: the block's input and the outputs of 23 layers.
    inside = {layer.name: layer.crossing for layer in chain.layers}
    assert inside["features.denseblock3.denselayer23.conv2"] == 24
    assert inside["features.denseblock3.denselayer24.norm1"] == 25


class KeepsAside(nn.Module):
    """Uses a value and what `step` makes of it."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.first, self.step, self.last = nn.Linear(4, 4), step, nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        value = self.first(given)
        return self.last(torch.tanh(self.step(value))) + value  # type: ignore[no-any-return]


class FunctionalDropout(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return F.dropout(given, 0.5, self.training)


@pytest.mark.parametrize(
    ("step", "crossing"),
    [
        (nn.Identity(), {1}),
        (FunctionalDropout().eval(), {1}),
        (FunctionalDropout(), {2}),
        (nn.ReLU(inplace=True), {1}),
        (nn.ReLU(), {2}),
        (nn.Dropout().eval(), {2}),
    ],
)
def test_one_tensor_by_two_names_crosses_once(step: nn.Module, crossing: set[int]) -> None:
    flow = flow_of(KeepsAside(step), torch.randn(2, 4))
    found = [flow.positions[i] for i, node in enumerate(flow.order, 1) if "step" in flow.traced.paths[node]]
    assert {flow.tensors(position) for position in found} == crossing


def test_layers_made_in_one_mode_are_right_in_the_other() -> None:
    model = KeepsAside(nn.Dropout()).eval()
    given = torch.randn(8, 4)
    layers = sequential(model, given, granularity="fine")
    for training in (True, False):
        model.train(training)
        layers.train(training)
        torch.manual_seed(0)
        expected = model(given)
        torch.manual_seed(0)
        assert torch.equal(layers(given), expected)
