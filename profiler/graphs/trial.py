"""Trial runs of a traced graph: on the meta device, at no cost, or where that fails for real, on a copy.

They also find the smallest pictures, or clips, that a model takes, for the hint of an error.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from ...cost_models.errors import ModelError
from ..memory.meta_results import MetaResults
from ..torch_internals import tree_leaves
from ..user_model.failures import OTHER_INPUT, OTHER_SHAPE, at_user_line, first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput, copy_model, copy_to_meta
from ..user_model.seeding import fixed_seed
from .graph import TracedGraph, find_attribute
from .graph_run import GraphRun, run_graph
from .size_recovery import TensorMeta, TrialValues, describe_tensors
from .tracing_patches import leave_vmap

_MORE_SAMPLES = (1, 3)
"""Of further runs, above the first's: two tell what moves with the batch, three that it does so evenly."""


_KEEPING_STATISTICS = ("batch_norm", "instance_norm")
_LARGEST_SIDE = 1024
_LONGEST = 64
"""Frames of a clip."""


class NotTheModel(ModelError):
    """A graph that runs, and does other than the model it was made of."""

    suspects: tuple[str, ...] = ()
    """Modules that may be why: where they are taken whole, the rest may be the model."""


class Trial:
    """Runs of a graph with the modules of a copy of `model`: the first at once, others when needed."""

    def __init__(self, traced: TracedGraph, model: nn.Module, example: ModelInput, name: str) -> None:
        """Raises ModelError where the model fails on this input; what the allocator raises, as it is."""
        self._traced = traced
        self.writes: frozenset[str] = frozenset()
        """Buffers that a run changed, and attributes of the model that its graph overwrites."""
        samples = [example]
        if example.batch == 1:
            # Batch norm in training refuses one value a channel, whatever the model.
            samples.append(example.repeated(2))
        failures: list[Exception] = []
        # With gradients only where it has to be: a model may put hooks on what needs one.
        for self._gradients, place, some in itertools.product((False, True), (_on_meta, _for_real), samples):
            try:
                self._copy, self._example = place(model, some, name)
                self.first: GraphRun = self._run(self._example)
                self._runs: dict[int, GraphRun | None] = {self._example.batch: self.first}
                return
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                failures.append(error)
        raise failures[len(samples)]

    @cached_property
    def values(self) -> TrialValues:
        """What each node's value was at several batch sizes; empty where the model takes only one."""
        runs = [self.run_at(self._example.batch + more) for more in (0, *_MORE_SAMPLES)]
        if None in runs:
            return {}
        return {
            node: tuple(run.values[node] for run in runs if run is not None) for node in self.first.values
        }

    @property
    def several_samples(self) -> list[int]:
        """Batch sizes of more than one sample at which runs show what moves with the batch."""
        sizes = (self._example.batch + more for more in (0, *_MORE_SAMPLES))
        return [size for size in sizes if size > 1]

    def run_at(self, samples: int) -> GraphRun | None:
        """The run of so many samples; None where the model does not take them."""
        if samples not in self._runs:
            try:
                self._runs[samples] = self._run(self._example.repeated(samples).clone())
            except ModelError:
                self._runs[samples] = None
        return self._runs[samples]

    @cached_property
    def _constants(self) -> nn.Module:
        return self._traced.constants_of(self._copy)

    @cached_property
    def flops(self) -> dict[fx.Node, int]:
        """Of each node; empty where the run does not bear counting."""
        try:
            return self._run(self._example.clone(), count_flops=True).flops
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return {}

    def module(self, path: str) -> nn.Module:
        """A module of the model, or one that the graph calls."""
        submodule: nn.Module = find_attribute(path, self._copy, self._constants)
        return submodule

    @cached_property
    def parameter_bytes(self) -> dict[fx.Node, int]:
        """Of what each node calls or reads."""
        bytes_by_node = dict[fx.Node, int]()
        for node in self._traced.graph.nodes:
            used = [
                find_attribute(str(source.target), self._copy, self._constants)
                for source in (node, *node.all_input_nodes)
                if source.op == "get_attr" or (source is node and node.op == "call_module")
            ]
            parameters = [list(own.parameters()) if isinstance(own, nn.Module) else [own] for own in used]
            bytes_by_node[node] = sum(
                p.nbytes for own in parameters for p in own if isinstance(p, nn.Parameter)
            )
        return bytes_by_node

    def trains(self, node: fx.Node) -> bool:
        """Whether it reads an attribute of the model that is a parameter, or needs a gradient."""
        if node.op != "get_attr":
            return False
        value = find_attribute(str(node.target), self._copy, self._constants)
        return isinstance(value, nn.Parameter) or bool(getattr(value, "requires_grad", False))

    @property
    def module_names(self) -> Iterator[str]:
        """Of all modules of the model, from the outermost on."""
        return (name for name, _ in self._copy.named_modules() if name)

    def check_against_model(self, name: str) -> None:
        """Raises NotTheModel where the model itself runs there, and returns other tensors than the graph."""
        try:
            with trial_run(self._example, gradients=self._gradients):
                own = describe_tensors(self._example.clone().call(self._copy))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # The graph may run on the meta device where the model's own code does not.
            return
        if _tensors(own) != _tensors(self.first.output):
            raise NotTheModel(
                f"{name} cannot be traced by torch.fx: the traced graph returns other tensors than the model",
                "Its forward may ask for isinstance(x, Tensor), which is not so while it is traced.",
            )

    def _run(self, example: ModelInput, *, count_flops: bool = False) -> GraphRun:
        with trial_run(example, gradients=self._gradients):
            run = run_graph(self._traced, self._copy, example, count_flops=count_flops)
        self.writes |= run.writes | _overwritten_attributes(run) | _statistics(self._copy)
        return run


def _overwritten_attributes(run: GraphRun) -> frozenset[str]:
    changed = frozenset[int]().union(*run.overwrites.values())
    read = [(node, stored) for node, stored in run.storages.items() if node.op == "get_attr"]
    norms = {node for node in run.values if any(word in str(node.target) for word in _KEEPING_STATISTICS)}
    return frozenset(
        str(node.target) for node, stored in read if stored & changed or not norms.isdisjoint(node.users)
    )


def _statistics(model: nn.Module) -> frozenset[str]:
    """Buffers of batch norms in training. On the meta device nothing tells that they change."""
    return frozenset(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        if getattr(module, "track_running_stats", False) and module.training
        for name, _ in module.named_buffers(recurse=False)
    )


def runs_on_meta(model: nn.Module, example: ModelInput, name: str) -> bool:
    """Whether the model, as it is, takes this input."""
    copy, some = _on_meta(model, example, name)
    try:
        with trial_run(some):
            some.call(copy)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    return True


def refuse_failing(model: nn.Module, example: ModelInput, name: str) -> None:
    """Raises ModelError where the model itself fails on this input, which no tool can help."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers(), *example.tensors)):
        return
    failures = []
    for gradients in (False, True):
        copy, some = _for_real(model, example, name)
        try:
            with trial_run(some, gradients=gradients):
                some.call(copy)
            return
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failures.append(error)
    first = example.tensors[0]
    raise ModelError(
        f"{name} fails on its example input of shape {'x'.join(map(str, first.shape))} "
        f"({str(first.dtype).removeprefix('torch.')}), batch first: {first_line(failures[0])}"
        f"{at_user_line(failures[0])}",
        OTHER_INPUT,
    ) from failures[0]


@contextlib.contextmanager
def trial_run(example: ModelInput, *, gradients: bool = False) -> Iterator[None]:
    """One seed; what is made without naming a device is on meta where the input is."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(gradients))
        stack.enter_context(fixed_seed(0))
        stack.enter_context(leave_vmap())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if example.tensors[0].is_meta:
            stack.enter_context(torch.device("meta"))
            stack.enter_context(MetaResults())  # type: ignore[no-untyped-call]
        yield


def _tensors(value: Any) -> list[TensorMeta]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorMeta)]


def _on_meta(model: nn.Module, example: ModelInput, name: str) -> tuple[nn.Module, ModelInput]:
    return copy_to_meta(model, name), example.to("meta")


def _for_real(model: nn.Module, example: ModelInput, name: str) -> tuple[nn.Module, ModelInput]:
    device = next((tensor.device for tensor in model.parameters()), example.tensors[0].device)
    return copy_model(model, name), example.to(device).clone()


@contextmanager
def suggest_larger_pictures(model: nn.Module, example: ModelInput, name: str) -> Iterator[None]:
    """Where the model fails on its input, the error's hint names pictures that are large enough, if that is
    it."""
    try:
        yield
    except ModelError as error:
        larger = larger_pictures(model, example, name) if error.hint in (OTHER_SHAPE, OTHER_INPUT) else ""
        if larger:
            raise ModelError(error.what, larger) from error
        raise


def larger_pictures(model: nn.Module, example: ModelInput, name: str) -> str:
    """A hint that names the smallest square pictures that the model runs on, tried on the meta device; empty
    where the input is no picture, or where its size does not help."""
    shape = tuple(example.tensors[0].shape)
    if len(example.tensors) != 1 or len(shape) not in (4, 5) or example.is_token_ids:
        return ""
    before, side = shape[1:-2], min(shape[-2:])
    frames = [before]
    while len(shape) == 5 and frames[-1][-1] < _LONGEST:
        frames.append((*before[:-1], 2 * frames[-1][-1]))
    for start in frames:

        def runs(side: int, start: tuple[int, ...] = start) -> bool:
            return runs_on_meta(model, _resized(example, (*start, side, side)), name)

        smallest = _smallest(side, runs)
        if smallest is not None:
            return f"Give larger ones: it runs from input_shape={(*start, smallest, smallest)} on."
    return ""


def _smallest(side: int, runs: Callable[[int], bool]) -> int | None:
    """The first side, from `side` on, that runs; taken that all larger ones do."""
    fails, works = side - 1, side
    while not runs(works):
        fails, works = works, 2 * works
        if works > _LARGEST_SIDE:
            return None
    while works - fails > 1:
        middle = (fails + works) // 2
        fails, works = (fails, middle) if runs(middle) else (middle, works)
    return works


def _resized(example: ModelInput, shape: tuple[int, ...]) -> ModelInput:
    return example.mapped(lambda tensor: tensor.new_empty((max(2, len(tensor)), *shape), device="meta"))
