"""In which numbers a profile is trained: the defaults, the bytes of a parameter, and what is refused."""

from __future__ import annotations

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import StageBytes, Training
from pplan.cost_models.optimizers import OPTIMIZERS, find_optimizer
from pplan.cost_models.precision import training_precision


@pytest.mark.parametrize(
    ("dtype", "amp", "asked", "name", "bytes_with_adamw"),
    [
        ("float32", None, {}, "fp32", 16),
        ("float64", None, {}, "fp64", 32),
        ("float32", "bf16", {}, "mixed", 16),
        ("bfloat16", None, {}, "mixed", 16),
        ("bfloat16", None, {"gradient_dtype": "fp32"}, "mixed", 18),
        ("bfloat16", None, {"runtime": "megatron"}, "mixed", 18),
        ("bfloat16", None, {"runtime": "megatron", "gradient_dtype": "bf16"}, "mixed", 16),
        ("bfloat16", None, {"precision": "bf16"}, "bf16", 8),
        ("float16", None, {}, "mixed", 16),
        ("float16", None, {"runtime": "megatron"}, "mixed", 16),
    ],
)
def test_the_bytes_of_a_parameter(
    dtype: str, amp: str | None, asked: dict[str, str], name: str, bytes_with_adamw: float
) -> None:
    made = training_precision(dtype, amp, **asked)
    assert (made.name, made.bytes_per_parameter(find_optimizer("adamw"))) == (name, bytes_with_adamw)
    assert (made.limitation is not None) == (name == "bf16")


@pytest.mark.parametrize(
    ("dtype", "amp", "asked", "says"),
    [
        ("float32", None, {"precision": "mixed"}, "precision='mixed': the profile was measured in float32"),
        ("float32", None, {"precision": "bf16"}, "precision='bf16': the profile was measured in float32"),
        ("float32", "bf16", {"precision": "fp32"}, "measured under autocast to bf16"),
        ("bfloat16", None, {"precision": "fp32"}, "measured in bfloat16"),
        ("float16", None, {"precision": "bf16"}, "float16 loses small gradients"),
        ("bfloat16", None, {"gradient_dtype": "fp16"}, "gradient_dtype='fp16': the gradients of bf16"),
        ("bfloat16", None, {"precision": "bf16", "gradient_dtype": "fp32"}, "gradient_dtype='fp32'"),
        ("float32", "bf16", {"gradient_dtype": "bf16"}, "float32 weights under autocast are fp32"),
        ("bfloat16", None, {"precision": "mixt"}, "precision='mixt': not known"),
        ("int8", None, {}, "dtype 'int8' is unknown"),
    ],
)
def test_what_was_not_profiled_is_refused(
    dtype: str, amp: str | None, asked: dict[str, str], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        training_precision(dtype, amp, **asked)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_ledgers_lines_add_up_to_the_bytes_of_a_parameter(optimizer: str) -> None:
    """A million parameters in bfloat16, 900,000 of which are trained."""
    made = training_precision("bfloat16", gradient_dtype="fp32")
    stage = StageBytes(2e6, 1.8e6, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    terms = Training(optimizer, made.bytes).states(stage)
    whole = made.bytes_per_parameter(find_optimizer(optimizer))
    assert sum(float(amount) for amount in terms.values()) == pytest.approx(0.9e6 * whole + 0.2e6 + 7)
    assert terms["master_weights"] == 0.9e6 * 4
