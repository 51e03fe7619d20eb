"""The private names of PyTorch that pplan uses, which a release may take away without notice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from ..cost_models.errors import MachineError

# The private names of PyTorch that pplan uses, which a release may take away without notice.
#
# Each is an entry of `INTERNALS`: what it is needed for, and what to do when a release of PyTorch lacks it.
# All
# are in torch 2.11 and 2.14. Those that nothing works without are looked for when this module is imported,
# the
# rest where they are used. Operators are in `OPERATOR_INTERNALS`, the training runtimes' private names in
# `runtimes/pipelining/runtime_internals.py`; a test sees to it that no other file uses a private name.

TESTED = "2.14"
"""The latest release of PyTorch in which every name was found."""


def missing_import(error: ImportError) -> MachineError:
    """The error where a private module that nothing works without is missing."""
    return MachineError(
        f"torch {torch.__version__} lacks what pplan needs of it: {error}",
        f"Install torch {TESTED}, or a later version of pplan.",
    )


try:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils._pytree import keystr as _keystr
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_flatten_with_path as _tree_flatten_with_path
    from torch.utils._pytree import tree_leaves as _tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_map_only as tree_map_only
    from torch.utils._pytree import tree_unflatten as tree_unflatten
except ImportError as error:
    raise missing_import(error) from error

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
REGISTRIES = ("_parameters", "_buffers", "_modules")
"""Attributes in which a module registers others, parameters and buffers: no settings of its own."""
_REGISTRIES = (*REGISTRIES, "_forward_hooks", "_forward_pre_hooks")
_OF_MODULES = (*REGISTRIES, "_non_persistent_buffers_set", *_HOOKS)
_autograd: Any = torch.autograd


def _backward_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    return stage_backward_input, stage_backward_weight


@dataclass(frozen=True)
class Internal:
    """A private name of `package`, which a release may take away."""

    name: str
    find: Callable[[], object]
    """Raises AttributeError or ImportError where the name is gone."""
    purpose: str
    without: str
    """What whoever maintains pplan does when it is gone."""
    package: str = "torch"
    tested: str = TESTED
    """The latest release in which it was found."""
    is_required: bool = True

    @property
    def exists(self) -> bool:
        """In the installed package."""
        try:
            self.find()
        except (AttributeError, ImportError):
            return False
        return True


def check_internals(internals: Iterable[Internal], version: str) -> None:
    """Raises MachineError for the first that `version` of its package lacks."""
    for internal in internals:
        if not internal.exists:
            release = f"{internal.package} {internal.tested}"
            raise MachineError(
                f"{internal.package} {version} has no {internal.name}, needed for {internal.purpose}",
                f"Install {release}, or a later version of pplan.",
            )


SLEEP = Internal(
    "torch.cuda._sleep",
    lambda: torch.cuda._sleep,
    "timing a GPU: it is kept busy while the host launches what is timed",
    "Launch a kernel of known length instead: torch.cuda.jiterator with a loop over clock64().",
    is_required=False,
)
BACKWARD_PARTS = Internal(
    "torch.distributed.pipelining._backward.stage_backward_input and stage_backward_weight",
    lambda: _backward_parts(),
    "measuring a backward in two parts as the zero-bubble schedules run it",
    "Find what torch.distributed.pipelining.PipelineStage calls in backward_one_chunk by then.",
    is_required=False,
)
TRANSFORMS = Internal(
    "torch._C._functorch.peek_interpreter_stack",
    lambda: (torch._C._functorch.peek_interpreter_stack, torch._C._functorch.pop_dynamic_layer_stack),
    "leaving torch.vmap where a traced graph failed inside",
    "Without it torch.randn fails after such a graph: look how torch._functorch.vmap leaves its levels.",
    is_required=False,
)
ALLOCATION_RECORDS = Internal(
    "torch.autograd._enable_profiler_legacy",
    lambda: (
        _autograd._enable_profiler_legacy,
        _autograd._disable_profiler_legacy,
        torch._C._profiler._ExperimentalConfig,
    ),
    "memory on the CPU: what operators allocate for themselves, oneDNN's scratch memory say",
    "Without it only tensors are counted; torch.profiler.profile(profile_memory=True) has the same records.",
    is_required=False,
)
INTERNALS = (
    BACKWARD_PARTS,
    TRANSFORMS,
    ALLOCATION_RECORDS,
    SLEEP,
    Internal(
        "torch.utils._pytree.tree_map_only",
        lambda: tree_map_only,
        "tensors inside tuples, dicts and dataclasses of models",
        "torch.export names the same functions; else take those of the package optree.",
    ),
    Internal(
        "torch.utils._python_dispatch.TorchDispatchMode",
        lambda: TorchDispatchMode,
        "counting bytes and operations below autograd",
        "torch.utils.flop_counter and torch.distributed._tools.mem_tracker show what took its place.",
    ),
    Internal(
        "torch.Tensor._version",
        lambda: torch.empty(0)._version,
        "telling tensors that were changed in place",
        "torch.autograd.graph.allow_mutation_on_saved_tensors shows how torch tells them by then.",
    ),
    Internal(
        "torch.UntypedStorage._cdata",
        lambda: torch.UntypedStorage._cdata,
        "telling storages apart, on the meta device too",
        "id() of a storage that is kept alive: its Python object lives as long as the storage.",
    ),
    Internal(
        "torch.Tensor._make_subclass",
        lambda: torch.Tensor._make_subclass,
        "copies of parameters on another device, of the same class",
        "nn.Parameter(values, requires_grad) for parameters, and copy.copy with new data for others.",
    ),
    Internal(
        f"torch.nn.Module: {', '.join(_OF_MODULES)}",
        lambda: [getattr(nn.Module(), name) for name in _OF_MODULES],
        "copies of modules that share tensors, and whether a module has hooks",
        "Read nn.Module.__init__: it lists what took their place.",
    ),
    Internal(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        lambda: checkpoint._checkpoint_without_reentrant_generator,
        "noticing that a model recomputes parts of itself",
        "Without it a profile does not say so: find what torch.utils.checkpoint.checkpoint calls now.",
        is_required=False,
    ),
)


CONVERSION = "_to_copy"
"""torch.export's name for a conversion of dtype or device."""
EXPORT_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async")
EXPORT_GUARDS = "_guards_fn"
"""The module that torch.export adds for what it took for granted."""
EXPORT_NO_MODULE = "_empty_nn_module_stack"
"""What passes of torch.export leave instead of a module's path."""
COMPILER_ERRORS = ("torch._dynamo.exc", "torch._inductor.exc")
"""Modules of the errors that torch.compile itself raises."""


def backward_parts() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """stage_backward_input and stage_backward_weight of PyTorch's pipelining. Raises MachineError."""
    check_internals([BACKWARD_PARTS], torch.__version__)
    return _backward_parts()


def alias(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor that autograd does not take for a view.

    It may be overwritten and detached.
    """
    result: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return result


def sleep_on_gpu(cycles: int) -> None:
    """Keeps the current CUDA stream busy for so many cycles. Raises MachineError."""
    check_internals([SLEEP], torch.__version__)
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def start_allocation_records() -> None:
    """Has the CPU's allocator report to this thread. Raises RuntimeError while a profiler of PyTorch runs."""
    settings = torch._C._profiler._ExperimentalConfig()
    config = _autograd.ProfilerConfig(
        _autograd.ProfilerState.CPU,
        False,  # shapes
        True,  # memory
        *(False, False, False),  # stacks, FLOPs, modules
        settings,
    )
    _autograd._enable_profiler_legacy(config)


def stop_allocation_records(mark: str) -> list[int | None]:
    """Bytes allocated (above 0) and freed (below) on the CPU since then, in their order; None stands where
    torch.autograd.profiler.record_function(mark) was entered."""
    threads = _autograd._disable_profiler_legacy()
    own: list[Any] = next((events for events in threads if any(event.name() == mark for event in events)), [])
    return [
        event.cpu_memory_usage() if event.kind() == "memory_alloc" else None
        for event in own
        if event.kind() == "memory_alloc" or (event.kind() == "push" and event.name() == mark)
    ]


def count_transforms() -> int:
    """How many of torch.vmap and the like are entered."""
    top = torch._C._functorch.peek_interpreter_stack() if TRANSFORMS.exists else None
    return 0 if top is None else int(top.level())


def leave_transforms(but: int) -> None:
    """Leaves the latest, until so many are left."""
    while count_transforms() > but:
        torch._C._functorch.pop_dynamic_layer_stack()


def checkpoint_functions() -> list[str]:
    """What torch.utils.checkpoint.checkpoint looks up when it is called, by torch's version."""
    names = ("_checkpoint_impl", "_checkpoint_without_reentrant_generator")
    return [name for name in names if hasattr(checkpoint, name)]


def tensor_version(tensor: Tensor) -> int:
    """A number that grows with every in-place change."""
    return tensor._version


def tree_leaves(tree: object) -> list[Any]:
    """As torch's own, in a fifth of its time for the tuples, lists and dicts that operations are given."""
    leaves: list[Any] = []
    pending = [tree]
    while pending:
        value = pending.pop()
        kind = type(value)
        if kind is tuple or kind is list:
            pending += reversed(value)  # type: ignore[call-overload]
        elif kind is dict:
            pending += reversed(value.values())  # type: ignore[attr-defined]
        elif kind in _LEAVES:
            leaves.append(value)
        else:
            leaves += _tree_leaves(value)
    return leaves


def name_leaves(tree: object) -> tuple[list[tuple[str, Any]], TreeSpec]:
    """The leaves, each with its place as in Python (`[0]['mask']`), and what `tree_unflatten` takes."""
    leaves, spec = _tree_flatten_with_path(tree)
    return [(_keystr(path), leaf) for path, leaf in leaves], spec


_LEAVES = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None), torch.dtype, torch.device))


def storage_key(of: Tensor | torch.UntypedStorage) -> int:
    """The identity of a storage while it lives."""
    key: int = (of.untyped_storage() if isinstance(of, Tensor) else of)._cdata
    return key


def copy_as(tensor: Tensor, values: Tensor) -> Tensor:
    """`values`, of the class of `tensor` and with its attributes."""
    twin = torch.Tensor._make_subclass(type(tensor), values, tensor.requires_grad)
    twin.__dict__.update(tensor.__dict__)
    return twin


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward."""
    return any(getattr(module, name) for name in _HOOKS)


def list_forward_pre_hooks(module: nn.Module) -> list[object]:
    """In the order in which they run."""
    return list(module._forward_pre_hooks.values())


def child_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """By name; unlike `named_children` also None, and a module each time that it is registered."""
    return module._modules


def copy_registries(module: nn.Module, *, hooks_only: bool = False) -> None:
    """Copies what a shallow copy of a module shares with it: parameters, buffers, children, forward hooks."""
    for name in _REGISTRIES[3:] if hooks_only else _REGISTRIES:
        module.__dict__[name] = copy.copy(module.__dict__[name])


def is_persistent(module: nn.Module, field: str) -> bool:
    """Whether it is a buffer of the state."""
    return field in module._buffers and field not in module._non_persistent_buffers_set


def make_transient(module: nn.Module, field: str) -> None:
    """A buffer is no part of the state any more."""
    if field in module._buffers:
        module._non_persistent_buffers_set.add(field)


check_internals((internal for internal in INTERNALS if internal.is_required), torch.__version__)


# The private names of PyTorch's operators (ATen) that pplan uses.

try:
    from torch._ops import OpOverload as OpOverload
    from torch._prims_common import suggest_memory_format as suggest_memory_format
except ImportError as error:
    raise missing_import(error) from error

_aten: Any = torch.ops.aten

FUSED_CHOICE = Internal(
    "torch._fused_sdp_choice",
    lambda: torch._fused_sdp_choice,
    "attention on the meta device: which kernel the CPU takes",
    "Without it attention is counted as unfused, which the profile says; ask torch.nn.attention instead.",
    is_required=False,
)
CPU_FLASH = Internal(
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
    lambda: _aten._scaled_dot_product_flash_attention_for_cpu,
    "attention on the meta device: the CPU's fused kernel",
    "Without it attention is counted as unfused, which the profile says; look for the kernel's new name.",
    is_required=False,
)
GPU_ATTENTION = Internal(
    "torch.ops.aten._scaled_dot_product_flash_attention, _scaled_dot_product_efficient_attention",
    lambda: (_aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention),
    "attention on the meta device: a GPU's fused kernels",
    "Without them attention is counted as unfused, which the profile says; look for the kernels' new names.",
    is_required=False,
)
DECOMPOSE = Internal(
    "torch._ops.OpOverload.decompose",
    lambda: OpOverload.decompose,
    "attention on the meta device: the unfused path",
    "Write the decomposition of scaled_dot_product_attention out in meta_device.py.",
    is_required=False,
)
DESTROY = Internal(
    "torch.library.Library._destroy",
    lambda: torch.library.Library._destroy,
    "attention on the meta device: taking pplan's kernel back",
    "Keep one Library for the whole process, whose kernel asks whether it is wanted.",
    is_required=False,
)
OPERATOR_INTERNALS = (
    FUSED_CHOICE,
    CPU_FLASH,
    GPU_ATTENTION,
    DECOMPOSE,
    DESTROY,
    Internal(
        "torch._ops.OpOverload",
        lambda: OpOverload,
        "telling operators of ATen from Python functions",
        "Take type(torch.ops.aten.add.Tensor).",
    ),
    Internal(
        "torch._prims_common.suggest_memory_format",
        lambda: suggest_memory_format,
        "layouts of convolutions on the meta device",
        "Compare the strides: channels last where the channel's is 1 and no dimension of 1 decides.",
    ),
    Internal(
        "torch.ops.aten.add.Tensor._schema",
        lambda: _aten.add.Tensor._schema,
        "the names of what an operator was given",
        "torch._C._jit_get_schemas_for_operator, or torch.library's infer_schema.",
    ),
    Internal(
        "torch.ops.aten._unsafe_view, _reshape_alias, _embedding_bag, _native_batch_norm_legit",
        lambda: [
            getattr(_aten, name)
            for name in ("_unsafe_view", "_reshape_alias", "_embedding_bag", "_native_batch_norm_legit")
        ],
        "operators that move no bytes, bags of embeddings, batch norm on the meta device",
        "They are left out by themselves; look for what counts instead in torch/_meta_registrations.py.",
        is_required=False,
    ),
)


def _packets(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(_aten, name) for name in names if hasattr(_aten, name))


FREE_OPERATORS = _packets("_unsafe_view", "_reshape_alias")
"""They move no bytes."""
EMBEDDING_BAGS = tuple(packet.default for packet in _packets("_embedding_bag"))
BATCH_NORMS = (_aten.native_batch_norm, *_packets("_native_batch_norm_legit"))
CPU_FLASH_FORWARDS = _packets("_scaled_dot_product_flash_attention_for_cpu")
CPU_FLASH_BACKWARDS = _packets("_scaled_dot_product_flash_attention_for_cpu_backward")


def missing_for_attention() -> Internal | None:
    """The first that attention on the meta device lacks."""
    needed = (FUSED_CHOICE, CPU_FLASH, GPU_ATTENTION, DECOMPOSE, DESTROY)
    return next((internal for internal in needed if not internal.exists), None)


def choose_attention(*args: Any, **options: Any) -> int:
    """The number of the SDPBackend that torch takes for such tensors."""
    backend: int = torch._fused_sdp_choice(*args, **options)
    return backend


def flash_attention_on_cpu(*args: Any, **options: Any) -> Tensor:
    attended: Tensor = _aten._scaled_dot_product_flash_attention_for_cpu.default(*args, **options)[0]
    return attended


def flash_attention_on_gpu(*args: Any, **options: Any) -> Tensor:
    attended: Tensor = _aten._scaled_dot_product_flash_attention.default(*args, **options)[0]
    return attended


def efficient_attention_on_gpu(*args: Any, **options: Any) -> Tensor:
    attended: Tensor = _aten._scaled_dot_product_efficient_attention.default(*args, **options)[0]
    return attended


def remove_library(library: torch.library.Library) -> None:
    """Takes back the kernels that were registered with it."""
    library._destroy()  # type: ignore[no-untyped-call]


def schema_arguments(operator: Any) -> Sequence[Any]:
    """The arguments of an operator: each has a `name` and a `default_value`."""
    arguments: Sequence[Any] = operator._schema.arguments
    return arguments


def writes_arguments(operator: Any) -> bool:
    """Whether an operator changes what it is given."""
    return bool(operator._schema.is_mutable)


check_internals((internal for internal in OPERATOR_INTERNALS if internal.is_required), torch.__version__)
