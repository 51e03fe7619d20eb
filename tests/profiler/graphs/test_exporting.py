"""Graphs of torch.export: they compute what the model does, at any batch size, and name its own modules."""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
import types
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from pplan.cost_models.errors import ModelError
from pplan.profiler import exporting
from pplan.profiler.exported_graph import AutocastSwitched, GradientsSwitched
from pplan.profiler.exporting import export_graph
from pplan.profiler.graph import TracedGraph, device_of, graph_module
from pplan.profiler.user_model import ModelInput, flat


def run(traced: TracedGraph, model: nn.Module, given: ModelInput) -> Any:
    module = graph_module(traced.graph, model, traced.constants)
    used = [tensor for tensor, node in zip(given.tensors, traced.inputs, strict=True) if node is not None]
    output = module(*used)
    return output if traced.finish is None else traced.finish(output)


def assert_computes(traced: TracedGraph, model: nn.Module, given: ModelInput, *batches: int) -> None:
    """To the last bit: output, gradients of the parameters, and buffers written to."""
    for batch in batches:
        results: list[tuple[list[Tensor | None], object]] = []
        for is_traced in (False, True):
            one = copy.deepcopy(model)
            torch.manual_seed(3)
            some = given.repeated(batch).clone()
            output = run(traced, one, some) if is_traced else some.call(one)
            leaves, structure = flat(output)
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            loss = sum((leaf.double() ** 2).sum() for leaf in tensors if leaf.requires_grad)
            if isinstance(loss, Tensor):
                torch.autograd.backward(loss)
            others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
            gradients = [parameter.grad for parameter in one.parameters()]
            assert tensors, "nothing compared"
            results.append(([*tensors, *gradients, *one.buffers()], (others, structure, type(output))))
        (theirs, their_structure), (ours, our_structure) = results
        assert our_structure == their_structure
        for mine, expected in zip(ours, theirs, strict=True):
            if mine is None or expected is None:
                assert mine is expected
            else:
                assert mine.dtype == expected.dtype
                assert torch.equal(mine, expected)


def traced_well(
    model: nn.Module, example: object, *, train_batches: tuple[int, ...] = (2, 3, 7)
) -> TracedGraph:
    """Checked in both modes, and in float64; the graph of the training mode."""
    given = ModelInput.of(example)
    assert_computes(export_graph(model.eval(), given, "it"), model, given, 1, 2, 7)
    traced = export_graph(model.train(), given, "it")
    assert_computes(traced, model, given, *train_batches)
    double, of_doubles = copy.deepcopy(model).double(), given.to(dtype=torch.float64)
    assert_computes(export_graph(double, of_doubles, "it"), double, of_doubles, 3)
    return traced


def modules_called(traced: TracedGraph) -> list[str]:
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


def operations(traced: TracedGraph) -> Counter[str]:
    return Counter(
        getattr(node.target, "__name__", "") for node in traced.graph.nodes if node.op == "call_function"
    )


class Branching(nn.Module):
    """What torch.fx cannot trace: control flow on sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.act = nn.ReLU(inplace=True)

    def forward(self, given: Tensor) -> Tensor:
        value = self.wide(given) if given.shape[1] > 3 else given
        for _ in range(given.shape[1] // 2):
            value = self.shared(value)
        value = self.norm(value)
        value = value + self.drop(value)
        value = self.act(value)
        output: Tensor = value.view(given.shape[0], 2, 2)
        return output


@pytest.mark.slow
def test_leaf_modules_are_calls_of_the_models_own() -> None:
    traced = traced_well(Branching(), torch.randn(3, 4))
    assert modules_called(traced) == ["wide", "shared", "shared", "norm", "drop", "act"]
    calls = [traced.paths[node] for node in traced.graph.nodes if node.op == "call_module"]
    assert calls == ["wide", "shared", "shared@1", "norm", "drop", "act"]
    assert operations(traced) == {"add.Tensor": 1, "view.default": 1, "sym_size.int": 1}


def test_the_mode_may_change_afterwards() -> None:
    """Dropout that returned its input itself in the trace does not stand for that input elsewhere."""
    model = Branching().eval()
    given = ModelInput.of(torch.randn(3, 4))
    traced = export_graph(model, given, "Branching")
    assert_computes(traced, model.train(), given, 2, 5)


@pytest.mark.slow
def test_only_what_a_leaf_is_handed_counts_as_its_input() -> None:
    class Norm(nn.Module):
        """As in Llama: the input itself comes out of `to`."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, hidden: Tensor) -> Tensor:
            kind = hidden.dtype
            hidden = hidden.to(torch.float32)
            return self.weight * (hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)).to(kind)

    class Two(nn.Module):
        """Not one input, or not one argument."""

        def __init__(self) -> None:
            super().__init__()
            self.kept = nn.Parameter(torch.ones(4))

        def forward(self, given: Tensor, other: Tensor) -> Tensor:
            return given * self.kept + other

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.two, self.memory = Norm(), Two(), nn.LSTM(4, 4, batch_first=True)

        def forward(self, given: Tensor) -> Tensor:
            value = given + self.norm(given)
            output: Tensor = value + self.two(value, given) + self.memory(value)[0]
            return output

    traced = traced_well(Body(), torch.randn(2, 5, 4))
    assert modules_called(traced) == ["norm"]
    assert {node.target for node in traced.graph.nodes if node.op == "get_attr"} >= {"two.kept"}
    assert "two" in traced.paths.values()


@pytest.mark.slow
def test_inputs_are_in_the_order_of_the_callers_tensors() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(
            self, value: Tensor, scale: int = 2, *, mask: Tensor | None = None, _unused: Tensor | None = None
        ) -> Tensor:
            output: Tensor = self.linear(value) * scale
            return output if mask is None else output * mask[:, None]

    example = {"mask": torch.rand(3), "_unused": torch.rand(3), "scale": 5, "value": torch.randn(3, 4)}
    traced = traced_well(Keywords(), example)
    mask, unused, value = traced.inputs
    assert mask is not None
    assert value is not None
    assert unused is None
    assert [node for node in traced.graph.nodes if node.op == "placeholder"] == [mask, value]
    assert traced.finish is None
    assert_computes(
        export_graph(Keywords(), ModelInput.of((torch.randn(3, 4), 3)), "it"),
        Keywords(),
        ModelInput.of((torch.randn(3, 4), 3)),
    )


def test_a_table_that_is_no_batch_keeps_its_size() -> None:
    class Tabled(nn.Module):
        def forward(self, value: Tensor, table: Tensor) -> Tensor:
            return value + table.mean(0)

    model, given = Tabled(), ModelInput.of((torch.randn(1, 4), torch.randn(2, 4)))
    traced = export_graph(model, given, "Tabled")
    assert_computes(traced, model, given, 1, 3)


@dataclasses.dataclass(frozen=True)
class Found:
    boxes: Tensor
    more: dict[str, Any]
    count: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.boxes, Tensor):
            raise TypeError("made of something else")


class Finds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: dict[str, Tensor]) -> Found:
        value = self.linear(given["image"])
        return Found(
            value, {"pair": (value.sum(), given["other"]), "none": None, "word": "w"}, value.shape[0]
        )


def test_outputs_are_what_the_model_returns() -> None:
    example = ({"other": torch.rand(3), "image": torch.randn(3, 4)},)
    traced = traced_well(Finds(), example)
    given = ModelInput.of(example).repeated(5)
    found = run(traced, Finds(), given)
    assert isinstance(found, Found)
    assert found.count == 5
    assert found.more["word"] == "w"
    assert torch.equal(found.more["pair"][1], given.tensors[0])


@pytest.mark.slow
def test_a_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    traced = traced_well(nn.TransformerEncoder(layer, 3), torch.randn(2, 5, 8))
    per_layer = [
        "self_attn.out_proj",
        "dropout1",
        "norm1",
        "linear1",
        "dropout",
        "linear2",
        "dropout2",
        "norm2",
    ]
    called = [name for name in modules_called(traced) if name.startswith("layers.1")]
    # The attention calls F.linear with the weights of its projection, not the projection.
    assert called == [f"layers.1.{name}" for name in per_layer[1:]]


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("hidden", torch.arange(4.0), persistent=False)
        self.plain = torch.full((4,), 2.0)

    def forward(self, given: Tensor) -> Tensor:
        rows = torch.arange(given.shape[0], device=given.device)
        value = self.linear(given) * torch.tensor([1.0, 2.0, 3.0, 4.0], device=given.device)
        output: Tensor = value + self.hidden + rows[:, None] + self.plain.to(value)
        return output


@pytest.mark.slow
def test_constants_keep_their_values_and_devices_follow_the_tensors() -> None:
    traced = traced_well(Constants(), torch.randn(3, 4))
    named = [str(node.target) for node in traced.graph.nodes if node.op == "get_attr"]
    own = [name for name in named if hasattr(traced.constants, name)]
    assert sorted(set(named) - set(own)) == ["hidden", "plain"]
    assert [getattr(traced.constants, name).tolist() for name in own] == [[1.0, 2.0, 3.0, 4.0]]
    assert not traced.constants.state_dict()
    assert not [name for name in own if hasattr(Constants(), name)]
    assert [node.target for node in traced.graph.nodes].count(device_of) == 1
    arguments = [value for node in traced.graph.nodes for value in (*node.args, *node.kwargs.values())]
    assert not [value for value in arguments if isinstance(value, torch.device)]


def test_every_value_has_its_kind() -> None:
    traced = export_graph(Constants(), ModelInput.of(torch.randn(3, 4)), "Constants")
    kinds = {node.name: node.meta["value_kind"] for node in traced.graph.nodes if node.op != "output"}
    by_kind = {kind: {name for name, other in kinds.items() if other == kind} for kind in kinds.values()}
    assert by_kind["device"] == {"device_of"}
    assert len(by_kind["size"]) == 1
    assert "linear" in by_kind["tensor"]
    assert set(by_kind) == {"device", "size", "tensor"}


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.teacher = nn.Linear(4, 4)
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.frozen(given)
        with torch.no_grad():
            taught = self.teacher(value) + torch.zeros(given.shape[0], 1, device=given.device)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = self.linear(value)
        output: Tensor = value + taught
        return output


def test_regions_without_gradients_and_under_autocast() -> None:
    model, given = Regions(), ModelInput.of(torch.randn(3, 4))
    traced = export_graph(model, given, "Regions")
    assert_computes(traced, model, given, 2, 5)
    # Nothing frozen needs the switch, so it is a layer like any other.
    assert modules_called(traced)[0] == "frozen"
    kept = [type(module) for module in traced.constants.children()]
    assert kept == [GradientsSwitched, AutocastSwitched]
    output = run(traced, model, given)
    output.sum().backward()
    assert model.linear.weight.grad is not None
    assert model.teacher.weight.grad is None


def test_tied_weights_and_buffers_are_named_as_the_models() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.words.weight

        def forward(self, given: Tensor) -> Tensor:
            output: Tensor = self.head(self.words(given)) + self.words.weight.sum()
            return output

    model, given = Tied(), ModelInput.of(torch.randint(0, 9, (3, 5)))
    traced = export_graph(model, given, "Tied")
    assert modules_called(traced) == ["words", "head"]
    assert_computes(traced, model, given, 1, 4)


class Decides(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        if given.sum() > 0:  # the line that stops it
            return given
        return -given


class Counts(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given.view(int(given.shape[0]), 2, 2)  # one batch size


class Branches(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        if given.numel() > 24:  # from seven samples on
            return given.sin()
        return given.relu()


class BranchesEverywhere(nn.Module):
    """Whether a number of elements is even is another thing for every other batch size."""

    def forward(self, given: Tensor) -> Tensor:
        return given.sin() if given[:, :3].numel() % 2 else given.cos()


class Mistaken(nn.Module):
    def forward(self, given: Tensor) -> Tensor:
        return given @ torch.ones(7, 7)  # shapes


@pytest.mark.parametrize(
    ("model", "words", "line"),
    [
        (Decides(), "cannot be traced by torch.export", "if given.sum() > 0:"),
        (Counts(), "holds for 3 samples only", "given.view(int(given.shape[0]), 2, 2)"),
        (Branches(), "holds for 2 to 6 samples only", "if given.numel() > 24:"),
        (
            BranchesEverywhere(),
            "holds for 3 to 127 samples only",
            "given[:, :3].numel() % 2 else given.cos()",
        ),
        (Mistaken(), "cannot be traced by torch.export", "given @ torch.ones(7, 7)"),
    ],
)
def test_what_cannot_be_traced_is_told_with_its_line(
    model: nn.Module, words: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        export_graph(model, ModelInput.of(torch.randn(3, 4)), "package:factory")
    assert caught.value.what.startswith("package:factory")
    assert words in caught.value.what
    assert line in caught.value.what
    assert Path(__file__).name in caught.value.what
    assert "granularity='module:" in caught.value.hint
    assert "nn.Sequential" in caught.value.hint
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_and_all_is_as_before(capfd: pytest.CaptureFixture[str]) -> None:
    class Talks(Branching):
        def forward(self, given: Tensor) -> Tensor:
            print("forward")
            warnings.warn("forward", stacklevel=1)
            logging.getLogger("talks").error("forward")
            return super().forward(given)

    model = Talks()
    hooks, disabled = len(model.wide._forward_pre_hooks), logging.root.manager.disable
    state = copy.deepcopy(model.state_dict())
    export_graph(model, ModelInput.of(torch.randn(3, 4)), "Talks")
    assert capfd.readouterr() == ("", "")
    assert logging.root.manager.disable == disabled
    assert len(model.wide._forward_pre_hooks) == hooks
    assert "forward" not in vars(model)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_memory_is_no_fault_of_the_model(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(exporting, "copy_to_meta", fails)
    with pytest.raises(type(error)):
        export_graph(Branching(), ModelInput.of(torch.randn(3, 4)), "Branching")


def test_masks_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever version of transformers is loaded, or none."""
    masks: Any = types.ModuleType("transformers.masking_utils")
    masks.is_torchdynamo_exporting = lambda: True
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", masks)
    seen = []

    class Asks(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            seen.append(masks.is_torchdynamo_exporting())
            return given + 1

    export_graph(Asks(), ModelInput.of(torch.randn(3, 4)), "Asks")
    assert seen
    assert not any(seen)
    assert masks.is_torchdynamo_exporting()
    assert not hasattr(masks, "find_packed_sequence_indices")


def language_model(kind: str, head: str, **sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, bos_token_id=1, eos_token_id=1, pad_token_id=0, **sizes
    )
    config.use_cache = False
    model: nn.Module = getattr(transformers, head).from_config(config)
    return model


IDS = torch.randint(1, 50, (2, 8), generator=torch.Generator().manual_seed(0))


def apart(traced: TracedGraph, model: nn.Module) -> Counter[str]:
    """Names of the classes of leaf modules that operations other than calls of them ran in."""
    return Counter(
        type(model.get_submodule(path.partition("@")[0])).__name__
        for node, path in traced.paths.items()
        if node.op == "call_function" and not list(model.get_submodule(path.partition("@")[0]).children())
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "example", "causal"),
    [
        (
            ("gpt2", "AutoModelForCausalLM", {"n_layer": 2, "n_embd": 16, "n_head": 2}),
            {"input_ids": IDS},
            True,
        ),
        (
            (
                "llama",
                "AutoModelForCausalLM",
                {
                    "num_hidden_layers": 2,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_attention_heads": 4,
                    "num_key_value_heads": 2,
                },
            ),
            {"input_ids": IDS},
            True,
        ),
        (
            (
                "bert",
                "AutoModelForMaskedLM",
                {
                    "num_hidden_layers": 2,
                    "hidden_size": 16,
                    "intermediate_size": 24,
                    "num_attention_heads": 4,
                },
            ),
            {"input_ids": IDS},
            False,
        ),
        (
            (
                "t5",
                "AutoModelForSeq2SeqLM",
                {"num_layers": 1, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 8},
            ),
            {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]},
            False,
        ),
    ],
    ids=["gpt2", "llama", "bert", "t5"],
)
def test_language_models(model: tuple[str, str, dict[str, int]], example: Any, causal: bool) -> None:
    kind, head, sizes = model
    made, given = language_model(kind, head, **sizes), ModelInput.of(example)
    traced = export_graph(made.eval(), given, kind)
    assert_computes(traced, made, given, 1, 3)
    traced = export_graph(made.train(), given, kind)
    assert_computes(traced, made, given, 3)
    # Of the rotary embedding, which takes two arguments, nothing else.
    assert set(apart(traced, made)) <= {"LlamaRotaryEmbedding"}
    attention = [node for node in traced.graph.nodes if "scaled_dot_product" in str(node.target)]
    assert attention or kind == "t5"  # T5 of transformers before 5.15 multiplies matrices itself.
    assert all(_is_causal(node) == causal for node in attention if kind != "t5")


def _is_causal(node: fx.Node) -> bool:
    return bool(node.kwargs.get("is_causal", node.args[5] if len(node.args) > 5 else False))


def test_functional_dropout_keeps_the_mode_of_the_trace() -> None:
    class Functional(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            return F.dropout(given, 0.5, self.training)

    model, given = Functional(), ModelInput.of(torch.ones(3, 4))
    traced = export_graph(model, given, "Functional")
    assert_computes(traced, model, given, 2)
    assert not torch.equal(run(traced, model.eval(), given), given.tensors[0])
