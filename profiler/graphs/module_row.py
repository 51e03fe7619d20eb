"""A model that calls modules of the user's choice one after another, cut at these calls without tracing.

Nothing of its forward is written down but what those modules are handed. Its own code runs in parts: up to
the first of them; each of them; and from what the last one returned on. For the last part forward runs from
its start once more, without gradients and leaving the random state alone, and none of the modules in the row
computes anything. Whether that is the model is seen by comparing both, as always.
"""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...cost_models.errors import ModelError
from ..torch_internals import child_modules, copy_registries, tree_flatten, tree_leaves, tree_unflatten
from ..user_model.failures import first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput, copy_model
from ..user_model.seeding import fixed_seed
from .graph import TracedGraph, is_inside

IN_A_ROW = "calling these modules in a row"
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_SHORTEST = 2
"""Modules of a row that ends before the last of those named."""
_HINT = "Name modules that are called one after another, each with what the one before returned."


@dataclass(frozen=True)
class _Form:
    """A value without its tensors."""

    leaves: tuple[Any, ...]
    """In order; `Tensor` stands for each tensor."""
    structure: Any
    """As tree_flatten names it."""

    @classmethod
    def of(cls, value: Any) -> _Form:
        leaves, structure = tree_flatten(value)
        return cls(tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves), structure)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Form:
        """A structure never changes; torch 2.11 warns of a copy, an error under `python -W error`."""
        return _Form(copy.deepcopy(self.leaves, memo), self.structure)

    @property
    def count(self) -> int:
        """Of its tensors."""
        return sum(leaf is Tensor for leaf in self.leaves)

    def fill(self, tensors: Iterable[Tensor]) -> Any:
        """The value with these tensors."""
        left = iter(tensors)
        return tree_unflatten(
            [next(left) if leaf is Tensor else leaf for leaf in self.leaves], self.structure
        )


def _form_of(example: ModelInput) -> _Form:
    return _Form.of((example.args, example.kwargs))


class _RowStart(Exception):
    """The first module of the row is called, with these tensors."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.tensors = tensors


class _StopHere(nn.Module):
    """Stands for the modules of the row before they run."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _RowStart(_distinct(tree_leaves((args, kwargs))))


class _RecordedResults:
    """What the modules of a row return while the code behind them runs. No module: copies of the part and of
    the stand-ins in it keep the same."""

    def __init__(self, row: Sequence[str], returned: _Form) -> None:
        self._row, self._returned = tuple(row), returned
        self._left: list[str] = []
        self._tensors: tuple[Tensor, ...] = ()
        self._idle: contextlib.ExitStack | None = None
        self.count = returned.count

    @contextlib.contextmanager
    def supply(self, tensors: tuple[Tensor, ...]) -> Iterator[None]:
        """Until the last module is asked nothing needs gradients, nor draws from the random state."""
        self._left, self._tensors = list(self._row), tensors
        with contextlib.ExitStack() as self._idle:
            self._idle.enter_context(fixed_seed(0))
            self._idle.enter_context(torch.no_grad())
            yield
            self._tensors = ()
        if self._left:
            raise RuntimeError(f"forward does not call {self._left[0]}")

    def of(self, path: str) -> Any:
        """What the module of that name returns."""
        if self._left[:1] != [path]:
            raise RuntimeError(f"forward calls {path} out of the row")
        del self._left[0]
        if not self._left and self._idle is not None:
            self._idle.close()
        return self._returned.fill(self._tensors)


class _Answer(nn.Module):
    """Stands for a module of the row behind it."""

    def __init__(self, answers: _RecordedResults, path: str) -> None:
        super().__init__()
        self._answers, self._path = answers, path

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        return self._answers.of(self._path)


class BeforeModules(nn.Module):
    """The model up to the call of the first module, without those that are `unused` until then: returns the
    tensors of that call."""

    def __init__(
        self, model: nn.Module, row: Sequence[str], form: ModelInput, unused: Sequence[str] = ()
    ) -> None:
        super().__init__()
        instead = {path: nn.Identity() for path in unused}
        self.model = _twin(model, {**instead, **{path: _StopHere() for path in row}})
        self._form = _form_of(form)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Of the tensors of the model's input."""
        try:
            _called(self.model, self._form, inputs)
        except _RowStart as reached:
            return reached.tensors
        raise RuntimeError("forward calls none of the modules in the row")


class AfterModules(nn.Module):
    """The model from what the last module of the row returned on."""

    def __init__(self, model: nn.Module, row: Sequence[str], form: ModelInput, returned: _Form) -> None:
        super().__init__()
        self._answers, self._form = _RecordedResults(row, returned), _form_of(form)
        self.model = _twin(model, {path: _Answer(self._answers, path) for path in row})

    def forward(self, *inputs: Tensor) -> Any:
        """Of the tensors that the last module returned, then those of the model's input."""
        count = self._answers.count
        with self._answers.supply(inputs[:count]):
            return _called(self.model, self._form, inputs[count:])


def _called(model: nn.Module, form: _Form, inputs: Sequence[Tensor]) -> Any:
    args, kwargs = form.fill(inputs)
    return model(*args, **kwargs)


def _distinct(leaves: Iterable[Any]) -> tuple[Tensor, ...]:
    return tuple({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


def call_in_a_row(model: nn.Module, example: ModelInput, name: str, row: Sequence[str]) -> TracedGraph:
    """A graph of one call of each module of the `row`, and of the model's own code before and behind these.

    Raises ModelError where the model calls none, one twice, or computes something between two.
    """
    calls, unused = _record(model, example, name, row)
    if not calls:
        raise ModelError(f"{name} cannot be cut by {IN_A_ROW}: it calls none", _HINT)
    order = [path for path, _, _ in calls]
    twice = next((path for path in order if order.count(path) > 1), None)
    if twice is not None:
        raise ModelError(f"{name} cannot be cut by {IN_A_ROW}: it calls {twice} twice", _HINT)
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{index}") for index in range(len(example.tensors)))
    before, after = (_free(model, word) for word in ("before", "after"))
    first = graph.call_module(before, inputs)
    row_inputs = _distinct(tree_leaves(calls[0][1]))
    nodes = {id(own): graph.call_function(operator.getitem, (first, i)) for i, own in enumerate(row_inputs)}
    placed = {first: ""}
    results: list[fx.Node] = []
    for index, (path, arguments, returned) in enumerate(calls):
        try:
            args, kwargs = _as_nodes(arguments, nodes, f"{name} cannot be cut by {IN_A_ROW}: {path}")
        except ModelError:
            if index < _SHORTEST:
                raise
            # The row ends here: the rest belongs to what comes behind it.
            del calls[index:], order[index:]
            break
        node = graph.call_module(path, args, kwargs)
        placed[node] = path
        results = _results(graph, node, returned, nodes, f"{name} cannot be cut by {IN_A_ROW}: {path}")
    last = graph.call_module(after, (*results, *inputs))
    placed[last] = ""
    graph.output(last)
    returned = _Form.of(calls[-1][2])

    def parts(of: nn.Module) -> nn.Module:
        holder = nn.Module()
        holder.add_module(before, BeforeModules(of, order, example, unused))
        holder.add_module(after, AfterModules(of, order, example, returned))
        return holder

    return TracedGraph(graph, inputs, parts(model), placed, parts=parts)


def _record(
    model: nn.Module, example: ModelInput, name: str, row: Sequence[str]
) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """Of each call, in order: the module, what it was handed, and what it returned. And the modules, the
    outermost ones, that nothing has called before the first of these."""
    own = copy_model(model, name)
    calls: list[tuple[str, Any, Any]] = []
    early: set[str] = set()
    for path, module in own.named_modules():

        def begin(_: nn.Module, __: Any, path: str = path) -> None:
            early.update([] if calls else [path])

        module.register_forward_pre_hook(begin)
    for path in row:

        def note(_: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            calls.append((path, (args, kwargs), output))

        own.get_submodule(path).register_forward_hook(note, with_kwargs=True)
    device = next((tensor.device for tensor in own.parameters()), example.tensors[0].device)
    try:
        with torch.no_grad(), fixed_seed(0):
            example.to(device).clone().call(own)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(f"{name} cannot be cut by {IN_A_ROW}: {first_line(error)}", _HINT) from error
    used = [path for path in early if path and not is_inside(path, row)]
    unused: list[str] = []
    for path, module in own.named_modules():
        is_used = any(is_inside(path, [other]) or is_inside(other, [path]) for other in (*used, *row))
        if path and not is_used and not is_inside(path, unused) and any(True for _ in module.parameters()):
            unused.append(path)
    return calls, unused


def _as_nodes(arguments: Any, nodes: dict[int, fx.Node], where: str) -> Any:
    leaves, structure = tree_flatten(arguments)
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) not in nodes:
            raise ModelError(
                f"{where} is handed a tensor of shape {'x'.join(map(str, leaf.shape))} that the model "
                "computes behind the module before it",
                "Name the modules in between as well.",
            )
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise ModelError(f"{where} is handed a {type(leaf).__name__}", _HINT)
    leaves_as_nodes = [nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tree_unflatten(leaves_as_nodes, structure)


def _results(
    graph: fx.Graph, node: fx.Node, returned: Any, nodes: dict[int, fx.Node], where: str
) -> list[fx.Node]:
    """The tensors of what a module returned, each as a node."""
    if isinstance(returned, Tensor):
        nodes[id(returned)] = node
        return [node]
    if not isinstance(returned, tuple | list):
        raise ModelError(
            f"{where} returns a {type(returned).__name__}", "Return a tensor or a tuple of them."
        )
    results = []
    for index, value in enumerate(returned):
        if isinstance(value, Tensor):
            nodes[id(value)] = graph.call_function(operator.getitem, (node, index))
            results.append(nodes[id(value)])
        elif not isinstance(value, _PLAIN):
            raise ModelError(f"{where} returns a {type(value).__name__} in a tuple", _HINT)
    return results


def _free(model: nn.Module, word: str) -> str:
    """A name that the model has no attribute of."""
    while hasattr(model, word):
        word += "_"
    return word


def _twin(model: nn.Module, instead: dict[str, nn.Module], path: str = "") -> nn.Module:
    """The model's own modules and tensors, but for these and the modules around them."""
    if path in instead:
        return instead[path]
    if not any(f"{own}.".startswith(f"{path}." if path else "") for own in instead):
        return model
    twin = copy.copy(model)
    copy_registries(twin)
    for name, child in child_modules(model).items():
        if child is not None:
            child_modules(twin)[name] = _twin(child, instead, f"{path}.{name}" if path else name)
    return twin
