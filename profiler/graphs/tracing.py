"""torch.fx: a model's forward is run on stand-ins for tensors, which write down what is done with them."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...cost_models.errors import ModelError
from ..torch_internals import tree_leaves
from ..user_model.failures import at_user_line, first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput, copy_model, copy_to_meta
from .graph import TracedGraph, find_attribute
from .tracing_patches import keep_custom_functions, lengths_that_vary, notice_modes

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
