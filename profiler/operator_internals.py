"""The private names of PyTorch's operators (ATen) that pplan uses: see `torch_internals.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .torch_internals import Internal, check_internals, missing_import

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
    "Write the decomposition of scaled_dot_product_attention out in memory/meta_kernels.py.",
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
