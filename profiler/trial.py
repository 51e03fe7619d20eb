"""Trial runs of a traced graph, and what is replaced in torch and transformers while a model is traced."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from types import FrameType, FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.utils import checkpoint

from ..cost_models.errors import ModelError
from .graph import GraphRun, TensorMeta, TracedGraph, TrialValues, describe_tensors, find_attribute, run_graph
from .meta_device import MetaResults
from .torch_private import checkpoint_functions, count_transforms, leave_transforms, tree_leaves
from .user_model import (
    OTHER_INPUT,
    OTHER_SHAPE,
    ModelInput,
    at_user_line,
    copy_model,
    copy_to_meta,
    failing_as,
    first_line,
    fixed_seed,
    ignoring_failures,
    is_out_of_memory,
    short_filename,
)

# What is replaced in torch and transformers while a model is traced.
#
# Calls of torch.autograd.Function: a tracer that looked through them would lose their backward.
# torch.utils.checkpoint: whether a model recomputes parts of itself, which tracing looks through. The masks
# of
# transformers, which under torch.export are other ones than in training. `len` of a tensor. torch.vmap,
# which a
# graph that fails inside does not leave. And `training`, whose readers compute differently in the other mode.


class CustomFunction(nn.Module):
    """Applies a function that has a backward of its own."""

    def __init__(self, function: type[Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)


@contextlib.contextmanager
def keep_custom_functions() -> Iterator[None]:
    """While torch.fx traces, a function is one call of a `CustomFunction`, added to the traced module."""

    def applied(apply: Callable[..., Any], function: type[Function], args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        proxy = next((leaf for leaf in leaves if isinstance(leaf, fx.Proxy)), None)
        if proxy is None:
            return apply(*args, **kwargs)
        root: nn.Module = proxy.tracer.root  # type: ignore[attr-defined]  # TracerBase does not tell of it
        name = f"{function.__name__}_{sum(isinstance(m, CustomFunction) for m in root.modules())}"
        root.add_module(name, CustomFunction(function))
        return proxy.tracer.create_proxy("call_module", name, args, kwargs)

    with _instead_of_apply(applied):
        yield


@contextlib.contextmanager
def refuse_custom_functions() -> Iterator[None]:
    """While torch.export traces: raises NotImplementedError at a function that is not of torch's own."""

    def applied(apply: Callable[..., Any], function: type[Function], args: Any, kwargs: Any) -> Any:
        if function.__module__.partition(".")[0] == "torch":
            return apply(*args, **kwargs)
        raise NotImplementedError(f"{function.__name__} has a backward of its own, which would be lost")

    with _instead_of_apply(applied):
        yield


def _instead_of_apply(applied: Callable[..., Any]) -> Any:
    apply = Function.__dict__["apply"]

    def instead(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        return applied(apply.__get__(None, function), function, args, kwargs)

    return mock.patch.object(Function, "apply", classmethod(instead))


@contextlib.contextmanager
def notice_checkpoints() -> Iterator[list[bool]]:
    """Inside, every call of torch.utils.checkpoint adds to the list."""
    calls: list[bool] = []

    def noticed(plain: Callable[..., Any]) -> Callable[..., Any]:
        def instead(*args: Any, **options: Any) -> Any:
            calls.append(True)
            return plain(*args, **options)

        return instead

    with contextlib.ExitStack() as stack:
        for owner, name in (
            *((checkpoint, name) for name in checkpoint_functions()),
            (checkpoint.CheckpointFunction, "apply"),
        ):
            plain = getattr(owner, name, None)
            if plain is not None:
                stack.enter_context(mock.patch.object(owner, name, noticed(plain)))
        yield calls


@contextlib.contextmanager
def notice_modes(model: nn.Module) -> Iterator[dict[str, str]]:
    """Collect the modules of `model` whose `training` is read or whose forward reads one, with the line.

    The two differ in `if self.block.training:`, which is code of the module around the block.
    """
    paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}
    reads: dict[str, str] = {}

    def reader(frame: FrameType | None) -> str | None:
        """Return the path of the innermost module whose forward runs."""
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_argcount:
                module = frame.f_locals.get(code.co_varnames[0])
                if id(module) in paths:
                    return paths[id(module)]
            frame = frame.f_back
        return None

    def read(module: nn.Module) -> Any:
        if id(module) in paths:
            here = inspect.currentframe()
            frame = here.f_back if here is not None else None
            if frame is not None and not frame.f_globals.get("__name__", "").startswith(_NO_FORWARDS):
                line = f"{short_filename(frame.f_code.co_filename)}:{frame.f_lineno}"
                for path in (paths[id(module)], reader(frame)):
                    if path is not None:
                        reads.setdefault(path, line)
        # A ScriptModule keeps it elsewhere.
        own = vars(module)
        return own["training"] if "training" in own else module.__getattr__("training")

    def write(module: nn.Module, mode: Any) -> None:
        vars(module)["training"] = mode

    with mock.patch.object(nn.Module, "training", property(read, write), create=True):
        yield reads


_NO_FORWARDS = ("torch.fx", "torch.export", "torch._", "copy")
"""Modules of Python that read `training` of a module and are no part of what it computes."""


@contextlib.contextmanager
def masks_as_in_training(*, one_text_a_row: bool = True) -> Iterator[None]:
    """While it lasts, the models of transformers are traced on the path that eager code takes.

    Otherwise a mask of four dimensions would be made that eager code leaves to the is_causal kernel, and
    another attention would be measured than is trained. `one_text_a_row`: position ids are the model's own,
    and need not be searched for several texts packed into one row; eager code finds none and goes on, but
    traced code cannot look. Does nothing where transformers is not loaded, or has no such functions.
    """
    module = sys.modules.get("transformers.masking_utils")
    replaced: dict[str, Callable[..., Any]] = {"is_torchdynamo_exporting": lambda: False}
    is_tracing = getattr(module, "is_tracing", None)
    if is_tracing is not None:
        # transformers before 5.18 asks it of masks too that are not given (None).
        replaced["is_tracing"] = lambda tensor=None: tensor is not None and is_tracing(tensor)
    if one_text_a_row:
        replaced["find_packed_sequence_indices"] = lambda *_args, **_kwargs: None
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, replacement))
        yield


@contextlib.contextmanager
def experts_on_meta() -> Iterator[None]:
    """While it lasts, experts of transformers run on meta tensors of any dtype: torch's grouped product is
    there of 16 bits alone, on a GPU of float32, too. Does nothing where transformers is not loaded."""
    module = sys.modules.get("transformers.integrations.moe")
    can_use = getattr(module, "_can_use_grouped_mm", None)
    if can_use is None:
        yield
        return

    def instead(values: Tensor, weight: Tensor, offs: Tensor) -> bool:
        is_missing = weight.is_meta and weight.dtype not in (torch.float16, torch.bfloat16)
        return not is_missing and can_use(values, weight, offs)

    with mock.patch.object(module, "_can_use_grouped_mm", instead):
        yield


@contextlib.contextmanager
def lengths_that_vary(model: nn.Module) -> Iterator[None]:
    """While it lasts, `len(tensor)` in the code of `model` is `tensor.shape[0]`, which a trace can follow:
    Python makes a plain number of what `__len__` returns."""

    def length(value: Any) -> Any:
        is_tensor = isinstance(value, Tensor | fx.Proxy)
        return operator.getitem(value.shape, 0) if is_tensor else len(value)

    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    own = (vars(kind).get("forward") for kind in classes if not kind.__module__.startswith("torch."))
    forwards = (inspect.unwrap(forward) for forward in own if isinstance(forward, FunctionType))
    namespaces = {id(forward.__globals__): forward.__globals__ for forward in forwards}
    with contextlib.ExitStack() as stack:
        for namespace in namespaces.values():
            if "len" not in namespace:
                stack.enter_context(mock.patch.dict(namespace, {"len": length}))
        yield


@contextlib.contextmanager
def leave_vmap() -> Iterator[None]:
    """Afterwards no torch.vmap is entered that was not before.

    torch.export writes entering and leaving as operations: a graph that fails in between leaves torch.randn
    broken for the whole process.
    """
    before = count_transforms()
    try:
        yield
    finally:
        leave_transforms(before)


# Trial runs of a traced graph: on the meta device, at no cost, or where that fails for real, on a copy.
#
# They also find the smallest pictures, or clips, that a model takes, for the hint of an error.

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


class NoCuts(ModelError):
    """A graph that holds no call of the modules that are to be layers, or no place to cut beside them."""

    is_whole: bool = False
    """Whether they are inside a module that no tool looks into."""


class NoOtherGraph(ModelError):
    """A tool would draw the graph that another one drew before, or failed to draw."""


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
        with ignoring_failures():
            return self._run(self._example.clone(), count_flops=True).flops
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
    with ignoring_failures(), trial_run(some):
        some.call(copy)
        return True
    return False


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
            _refuse_batch_elsewhere(copy, some, name)
            return
        except ModelError:
            raise
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


def _refuse_batch_elsewhere(model: nn.Module, example: ModelInput, name: str) -> None:
    """Raises ModelError where the model does not take one sample more, and has inputs that stay as they are:
    those whose dimension 0 is not the batch."""
    others = [tensor for tensor in example.tensors if tensor.dim() and len(tensor) != example.batch]
    if not others:
        return

    def fails(error: Exception) -> ModelError:
        shapes = " and ".join("x".join(map(str, tensor.shape)) for tensor in others)
        return ModelError(
            f"{name} runs with {example.batch} samples and fails with {example.batch + 1}, while its inputs "
            f"of shape {shapes}, whose dimension 0 is not the batch, stay as they are: {first_line(error)}",
            "Wrap it in a module that takes every input with the samples in dimension 0, and arranges them.",
        )

    with failing_as(fails), trial_run(example):
        example.repeated(example.batch + 1).clone().call(model)


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
