"""Which tool traces a model: none for a plain nn.Sequential, else torch.fx, else torch.export."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import operator
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from ..cost_models.errors import ModelError
from .cutting import Granularity, refuse_unmatched
from .graph import AROUND, TracedGraph, find_attribute, is_inside
from .torch_private import (
    child_modules,
    copy_registries,
    has_hooks,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from .trial import (
    NoCuts,
    NoOtherGraph,
    NotTheModel,
    Trial,
    keep_custom_functions,
    lengths_that_vary,
    notice_checkpoints,
    notice_modes,
    refuse_failing,
    runs_on_meta,
)
from .user_model import (
    ModelInput,
    at_user_line,
    copy_model,
    copy_to_meta,
    failing_as,
    first_line,
    fixed_seed,
    is_out_of_memory,
)

# torch.fx: a model's forward is run on stand-ins for tensors, which write down what is done with them.

INSTEAD = (
    "Move that line into a module of its own, which then becomes one layer, or name modules of yours to be "
    "layers, as in granularity='module:PATTERN' (what is inside them is then not traced)."
)
_CONTAINERS = (nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder)
"""Modules of torch.nn that hold layers worth telling apart."""


def trace_symbolically(
    model: nn.Module, example: ModelInput, name: str, leaves: Collection[str] = ()
) -> TracedGraph:
    """The graph of `model` called with `example`; arguments that are no tensors keep their values.

    Modules of torch.nn are not gone into, nor are those that `leaves` names (dotted). A copy is called, with
    stand-ins for tensors, of which it may keep some.

    Raises ModelError with the line of the model's code that cannot be traced, or where `example` does not fit
    what forward takes; where memory runs out, what the allocator raises.
    """
    if "forward" in vars(model):
        raise ModelError(
            f"{name} cannot be traced by torch.fx: its forward is an attribute, and not its class's",
            INSTEAD,
        )
    arguments = _arguments(model, example, name)
    graph, copy, modes = _traced(model, _constants_of(arguments, name), leaves, name)
    placeholders = {str(node.target): node for node in graph.nodes if node.op == "placeholder"}
    inputs = tuple(placeholders[key] for key, value in arguments.items() if isinstance(value, Tensor))
    _erase(graph, [node for node in placeholders.values() if node not in inputs])
    paths = {node: _innermost(node) for node in graph.nodes}
    ordered = _ordered(inputs, arguments, example)
    return TracedGraph(graph, ordered, _lacking(graph, copy, model), paths, modes=modes)


def bind_example(model: nn.Module, example: ModelInput, name: str) -> inspect.BoundArguments:
    """How `example` falls on the parameters of forward. Raises ModelError where it does not."""
    signature = inspect.signature(model.forward)
    try:
        return signature.bind(*example.args, **example.kwargs)
    except TypeError as error:
        raise ModelError(
            f"{name}: the example input does not fit forward{_bare(signature)}: {error}",
            "Give a tensor, a tuple of forward's arguments, or a dict of its keyword arguments.",
        ) from None


def _bare(signature: inspect.Signature) -> str:
    """Without annotations."""
    empty = inspect.Parameter.empty
    names = [parameter.replace(annotation=empty) for parameter in signature.parameters.values()]
    return str(inspect.Signature(names))


def _traced(
    model: nn.Module, constants: dict[str, Any] | None, leaves: Collection[str], name: str
) -> tuple[fx.Graph, nn.Module, dict[str, str]]:
    """The graph, the copy that was traced, on the meta device unless that would show in the graph, and the
    modules whose mode was read."""
    for place in (copy_to_meta, copy_model):
        copy = place(model, name)
        try:
            with (
                warnings.catch_warnings(),
                keep_custom_functions(),
                lengths_that_vary(copy),
                notice_modes(copy) as modes,
            ):
                warnings.simplefilter("ignore")
                graph = _Tracer(leaves).trace(copy, concrete_args=constants)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if place is copy_to_meta and "meta" in str(error):
                continue
            raise ModelError(
                f"{name} cannot be traced by torch.fx: {first_line(error)}{at_user_line(error)}", INSTEAD
            ) from error
        _refuse_assigned_buffers(copy, name)
        if not _knows_meta(graph, copy, model):
            break
    return graph, copy, modes


def _refuse_assigned_buffers(copy: nn.Module, name: str) -> None:
    """`self.count = self.count + 1` is not in the graph: the stand-in stays with the copy."""
    for path, module in copy.named_modules():
        for key, value in module.named_buffers(recurse=False, remove_duplicate=False):
            if isinstance(value, fx.Proxy):
                raise ModelError(
                    f"{name} cannot be traced by torch.fx: forward gives the buffer "
                    f"{f'{path}.' if path else ''}{key} a new value",
                    "Change it in place: buffer.copy_(value). " + INSTEAD,
                )


def _knows_meta(graph: fx.Graph, copy: nn.Module, model: nn.Module) -> bool:
    """Whether what the trace made for itself, or the devices it wrote down, are the copy's and no others."""
    own = {id(tensor) for tensor in (*copy.parameters(), *copy.buffers())}
    constants = (find_attribute(str(node.target), copy) for node in graph.nodes if node.op == "get_attr")
    devices = {tensor.device for tensor in constants if isinstance(tensor, Tensor) and id(tensor) not in own}
    for node in graph.nodes:
        devices |= {arg for arg in tree_leaves((node.args, node.kwargs)) if isinstance(arg, torch.device)}
    return torch.device("meta") in devices and any(
        not p.is_meta for p in (*model.parameters(), *model.buffers())
    )


class _Tracer(fx.Tracer):
    # A buffer must stay a reference to the model's own, not become a constant of the copy that is traced.
    proxy_buffer_attributes = True

    def __init__(self, leaves: Collection[str]) -> None:
        super().__init__()
        self._leaves = leaves

    def is_leaf_module(self, module: nn.Module, path: str) -> bool:
        if path in self._leaves or isinstance(module, torch.jit.ScriptModule):
            return True
        return super().is_leaf_module(module, path) and not isinstance(module, _CONTAINERS)

    def create_arg(self, value: Any) -> Any:
        """Keeps the class of an OrderedDict, which fx would make a dict of."""
        if type(value) is OrderedDict:
            return super().create_arg(
                self.create_proxy("call_function", OrderedDict, (list(value.items()),), {})
            )
        return super().create_arg(value)


def container_paths(model: nn.Module) -> list[str]:
    """The modules of torch.nn that are gone into, and that torch.fx mostly cannot trace."""
    return [path for path, module in model.named_modules() if path and isinstance(module, _CONTAINERS)]


def _arguments(model: nn.Module, example: ModelInput, name: str) -> dict[str, Any]:
    """Every parameter of forward with its value: those that are not given have their defaults."""
    bound = bind_example(model, example, name)
    bound.apply_defaults()
    for parameter in bound.signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            if bound.arguments[parameter.name]:
                raise ModelError(
                    f"{name} cannot be traced by torch.fx: its forward takes {parameter}",
                    "Name the arguments of forward.",
                )
            del bound.arguments[parameter.name]
    return dict(bound.arguments)


def _constants_of(arguments: dict[str, Any], name: str) -> dict[str, Any] | None:
    constants = {key: value for key, value in arguments.items() if not isinstance(value, Tensor)}
    for key, value in constants.items():
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value)):
            raise ModelError(
                f"{name} cannot be traced by torch.fx: its argument {key} is a {type(value).__name__} "
                "that holds tensors",
                "Give forward the tensors themselves.",
            )
    return constants or None


def _ordered(
    inputs: Iterable[fx.Node], arguments: dict[str, Any], example: ModelInput
) -> tuple[fx.Node | None, ...]:
    """The placeholders in the order of `given.tensors`: that of the call, not of the signature."""
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    left = list(zip(tensors, inputs, strict=True))
    ordered: list[fx.Node | None] = []
    for tensor in example.tensors:
        index = next(index for index, (other, _) in enumerate(left) if other is tensor)
        ordered.append(left.pop(index)[1])
    return tuple(ordered)


def _lacking(graph: fx.Graph, traced: nn.Module, model: nn.Module) -> nn.Module:
    """What the graph reads and `model` lacks, without the weights of the traced copy."""
    module = nn.Module()
    for node in graph.nodes:
        top = str(node.target).partition(".")[0]
        if node.op in ("get_attr", "call_module") and not hasattr(model, top):
            setattr(module, top, getattr(traced, top))
    return module


def _erase(graph: fx.Graph, placeholders: Iterable[fx.Node]) -> None:
    """Takes away the arguments that are constants, and what fx added to check that they keep their values."""
    doomed = set(placeholders)
    for node in graph.nodes:
        if doomed.intersection(node.all_input_nodes):
            doomed.add(node)
    for node in reversed(list(graph.nodes)):
        if node in doomed and not node.users:
            graph.erase_node(node)


def _innermost(node: fx.Node) -> str:
    return next(reversed(node.meta.get("nn_module_stack", {})), "")


# A model that calls modules of the user's choice one after another, cut at these calls without tracing.
#
# Nothing of its forward is written down but what those modules are handed. Its own code runs in parts: up to
# the first of them; each of them; and from what the last one returned on. For the last part forward runs from
# its start once more, without gradients and leaving the random state alone, and none of the modules in the
# row
# computes anything. Whether that is the model is seen by comparing both, as always.

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
    with (
        failing_as(
            lambda error: ModelError(f"{name} cannot be cut by {IN_A_ROW}: {first_line(error)}", _HINT)
        ),
        torch.no_grad(),
        fixed_seed(0),
    ):
        example.to(device).clone().call(own)
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


# Which tool traces a model: none for a plain nn.Sequential, else torch.fx, else torch.export.

_Frontend = Callable[[nn.Module, ModelInput, str], TracedGraph]
_Result = TypeVar("_Result")


_HIGHER = 2
"""Modules around those that cannot be traced that are tried, where what these keep is changed from there."""
MANY = 6
"""From so many blocks on, to look into each takes too long."""
_CACHE = "Cache'> in output"
"""What torch.export says of a model of transformers that returns its keys and values."""
ELEMENTS = "its elements"
"""The `tool` of a plain nn.Sequential's graph, which is not traced."""


def refuse_hooks(model: nn.Module, name: str) -> None:
    """Raises ModelError where the model has hooks."""
    if has_hooks(model):
        raise ModelError(
            f"{name} has hooks of its own, which running its layers one by one would leave out",
            "Remove the hook, or wrap the model: nn.Sequential(model) keeps it, as one layer.",
        )


def trace_model(
    model: nn.Module,
    example: ModelInput,
    name: str,
    granularity: Granularity,
    make: Callable[[TracedGraph, Trial], _Result],
    tool: str | None = None,
) -> _Result:
    """What `make` makes of the graph of `model` by the first tool whose graph runs as the model does.

    `make` is called with a graph and its trial, and raises NotTheModel where that is another model's. `tool`:
    the only one to be tried, as a graph of another copy of this model names it.

    Raises ModelError: no tool can draw it (with the lines of the model that stopped them), it fails on this
    input, a pattern matches no module, `example` does not fit forward, or the model has hooks; and what
    `make` raises.
    """
    refuse_hooks(model, name)
    modules = [path for path, _ in model.named_modules() if path]
    refuse_unmatched(granularity.patterns, modules, "module", name)
    failures: list[ModelError] = []
    if is_plain_sequential(model) and granularity.kind == "block":
        elements = sequential_graph(model, example, name)
        try:
            return make(elements, Trial(elements, model, example, name))
        except NotTheModel as error:
            failures.append(error)
    bind_example(model, example, name)
    suspects: list[str] = []
    around: list[str] = []
    for words, frontend in _frontends(model, granularity, tool, suspects, around):
        try:
            with notice_checkpoints() as noticed:
                traced = frontend(model, example, name)
            around[:] = _whole_modules(traced.tool) or around
            tool_used = traced.tool if traced.tool.startswith(AROUND) else words
            traced = dataclasses.replace(traced, recomputes=bool(noticed), tool=tool_used)
        except NoOtherGraph:
            continue
        except ModelError as error:
            failures.append(error)
            continue
        try:
            trial = Trial(traced, model, example, name)
            trial.check_against_model(name)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = _as_model_error(error, words, name)
            if not runs_on_meta(model, example, name):
                raise failure from error
            failures.append(failure)
            continue
        try:
            return make(traced, trial)
        except NoCuts as error:
            failures.append(error)
        except NotTheModel as error:
            failures.append(error)
            suspects += error.suspects
    refuse_failing(model, example, name)
    for failure in failures:
        if isinstance(failure, NoCuts):
            others = [other for other in failures if not isinstance(other, NoCuts)]
            why = f"; {_combined(others, name).what}" if others and failure.is_whole else ""
            raise ModelError(f"{failure.what}{why}", failure.hint)
    combined = _combined(failures, name)
    if not granularity.patterns and not any(isinstance(failure, NotTheModel) for failure in failures):
        combined.hint = _suggest_a_row(model, example, name) or combined.hint
    raise combined


def _as_model_error(error: Exception, words: str, name: str) -> ModelError:
    if isinstance(error, ModelError):
        return error
    return ModelError(f"{name} cannot be traced by {words}: {first_line(error)}", INSTEAD)


def _frontends(
    model: nn.Module,
    granularity: Granularity,
    only: str | None,
    suspects: Sequence[str],
    around: Sequence[str],
) -> Iterator[tuple[str, _Frontend]]:
    """Each with its name. Where there is none of the name `only`, as on the meta device, it is all.

    `suspects` grows meanwhile: modules for the later ones to take whole. `around`: those that were.
    """
    if only is None:
        yield from _all_frontends(model, granularity, suspects, around)
        return
    if only.startswith(AROUND):
        from .exporting import export_around

        yield AROUND, partial(export_around, whole=_whole_modules(only))
        return
    every = list(_all_frontends(model, granularity, suspects, around))
    yield from [pair for pair in every if pair[0] == only] or every


def _all_frontends(
    model: nn.Module, granularity: Granularity, suspects: Sequence[str], around: Sequence[str]
) -> Iterator[tuple[str, _Frontend]]:
    yield "torch.fx", trace_symbolically
    matched = [path for path, _ in model.named_modules() if path and granularity.outermost(path) == path]
    if matched:
        yield "torch.fx around these modules", _with_leaves(matched)
    if is_plain_sequential(model) and granularity.kind != "block":
        yield ELEMENTS, sequential_graph
        return

    from .exporting import export_around, export_graph, export_with_checks, export_with_whole_blocks

    blocks = _repeated(model, matched)
    if blocks:
        yield "torch.export with blocks taken whole", partial(export_with_whole_blocks, blocks=blocks)
    yield "torch.export", export_graph
    is_on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    if not is_on_meta:
        yield "torch.export on its device", partial(export_graph, for_real=True)
        yield "torch.export with checked numbers", export_with_checks
        yield AROUND, partial(export_around, whole=suspects)
        for _ in range(_HIGHER):
            wider = [_caller(model, path) or path for path in around]
            if set(wider) <= set(around):
                break
            yield AROUND, partial(export_around, whole=wider)
    if matched:
        yield IN_A_ROW, lambda model, example, name: call_in_a_row(model, example, name, matched)
    containers = container_paths(model)
    if containers:
        yield "torch.fx around modules of torch.nn", _with_leaves([*matched, *containers])
    for words, leaves in (("the entries of its lists", _entries(model)), ("its children", _children(model))):
        if leaves and not matched:
            yield f"torch.fx around {words}", _with_leaves(leaves)
    if not is_on_meta:
        checks = partial(export_with_checks, of_the_input=True)
        yield "torch.export with checked numbers of the input", checks


def _whole_modules(tool: str) -> list[str]:
    """The modules that a graph's tool names, which were taken whole."""
    return [path for path in tool.removeprefix(AROUND).split(", ") if path] if tool.startswith(AROUND) else []


_LISTS = nn.ModuleList | nn.ModuleDict | nn.Sequential


def _entries(model: nn.Module) -> list[str]:
    """Modules in a list, of the outermost lists, and what has none inside."""
    paths: list[str] = []
    parts = dict(model.named_modules(remove_duplicate=False))  # `get_submodule` is not there once scripted
    for path in _children(model):
        lists = [inner for inner, part in parts[path].named_modules() if isinstance(part, _LISTS)]
        outermost = [inner for inner in lists if not any(inner.startswith(f"{o}.") for o in lists)]
        inside = [f"{path}.{inner}" if inner else path for inner in outermost]
        for place in inside:
            paths += [f"{place}.{key}" for key in child_modules(parts[place])]
        paths += [] if inside else [path]
    return paths if paths != _children(model) else []


def _suggest_a_row(model: nn.Module, example: ModelInput, name: str) -> str:
    """A hint that names a list whose modules can be layers without a trace; empty where there is none.

    It is for the user to say that all of them are called each time: one that is dropped now and then shows
    in no comparison.
    """
    for path, module in model.named_modules():
        if path and isinstance(module, nn.ModuleList) and len(module) > 1:
            with contextlib.suppress(ModelError):
                call_in_a_row(model, example, name, [f"{path}.{key}" for key in child_modules(module)])
                return f"granularity='module:{path}.*' makes layers of {path}, if each is called every time."
    return ""


def _children(model: nn.Module) -> list[str]:
    """Of a list, its entries."""
    paths: list[str] = []
    for key, child in child_modules(model).items():
        if child is not None:
            inside = child_modules(child) if isinstance(child, _LISTS) else {}
            paths += [f"{key}.{inner}" for inner in inside] or [key]
    return paths


def _caller(model: nn.Module, path: str) -> str:
    """The module around it that calls it: no list; "" where that is the model."""
    parent = path.rpartition(".")[0]
    while parent and isinstance(model.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    return parent


def _repeated(model: nn.Module, paths: Sequence[str]) -> list[str]:
    """Those of the modules that have a class of which there are many."""
    classes = {path: type(model.get_submodule(path)) for path in paths}
    counts = Counter(classes.values())
    return [path for path in paths if counts[classes[path]] >= MANY]


def _with_leaves(leaves: list[str]) -> _Frontend:
    return lambda model, example, name: trace_symbolically(model, example, name, leaves)


def _combined(failures: list[ModelError], name: str) -> ModelError:
    """What stopped torch.fx, then the others where they say something else."""
    prefix = f"{name} cannot be traced by "
    tools: dict[str, list[str]] = {}
    for failure in failures:
        tool, _, why = failure.what.removeprefix(prefix).partition(": ")
        tools.setdefault(why, []).append(tool)
    parts = [", ".join(dict.fromkeys(which)) + (why and f": {why}") for why, which in tools.items()]
    parts[0] = (prefix if failures[0].what.startswith(prefix) else "") + parts[0]
    differs = next((failure for failure in failures if isinstance(failure, NotTheModel)), None)
    hint = INSTEAD if differs is None else differs.hint
    if any(_CACHE in failure.what for failure in failures):
        hint = "The output holds keys and values for generating text: set model.config.use_cache = False."
    return ModelError("; nor by ".join(parts), hint)


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether running the elements one after another is all that the module does."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and type(module).__iter__ is nn.Sequential.__iter__
        and type(module).__call__ is nn.Module.__call__
        and not has_hooks(module)
    )


def sequential_graph(model: nn.Module, example: ModelInput, name: str) -> TracedGraph:
    """The graph of a plain nn.Sequential, whose nested ones are taken apart too: nothing is traced.

    Several tensors of the input are handed to the first element as one tuple. Raises ModelError where there
    is no element.
    """
    paths = _elements(model, "")
    if not paths:
        raise ModelError(f"{name} has no layers", "Give a model that computes something.")
    graph = fx.Graph()
    count = len(example.tensors)
    inputs = tuple(graph.placeholder("input" if count == 1 else f"input_{i}") for i in range(count))
    value: fx.Node | tuple[fx.Node, ...] = inputs[0] if count == 1 else inputs
    placed: dict[fx.Node, str] = {}
    for path in paths:
        value = graph.call_module(path, (value,))
        placed[value] = path
    graph.output(value)
    return TracedGraph(graph, inputs, nn.Module(), placed, tool=ELEMENTS)


def _elements(module: nn.Module, prefix: str) -> list[str]:
    paths: list[str] = []
    for key, child in child_modules(module).items():
        if child is not None:
            path = prefix + key
            paths += _elements(child, path + ".") if is_plain_sequential(child) else [path]
    return paths
