"""How many devices share a layer, and in which way: the degrees of parallelism of a training step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import UsageError

if TYPE_CHECKING:
    from .transformer_shape import TransformerShape

ContextExchange = Literal["all-to-all", "ring", "all-gather"]
UNSHARDED_STAGES = 3
"""Most virtual stages of a device that torch 2.14 keeps gathered (`max_active_stages`)."""


@dataclass(frozen=True)
class ParallelDegrees:
    """Devices by how they share the work, as Megatron-LM and torchtitan name them.

    `tensor` devices share every matrix (Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3); above 1
    with sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models", MLSys 2023, section 4.2.2). `context` devices share the sequence. Their `exchange` for attention
    is of heads for tokens by all-to-all (Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509), a ring in
    which keys and values go round (Liu et al., "Ring Attention", ICLR 2024), or an all-gather of keys and
    values (Dubey et al., "The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.2). `expert` devices, of
    those that would hold the same layers, share the routed experts; an expert is whole on its device.
    `pipeline` stages follow one another, of `data` replicas each.

    `zero`: what is spread over the devices that add up the same gradients (Rajbhandari et al., "ZeRO", SC
    2020). 0: nothing. 1: the optimizer's state. 2: gradients too, and 3: weights too, as torch's FSDP2 does
    it without and with `reshard_after_forward`: weights are gathered for every micro-batch, in forward (3: in
    backward again), and gradients reduced in every backward.

    In a pipeline torch's schedules (2.14, `distributed/pipelining`) turn FSDP's reduction off until a stage's
    last backward (`perform_reduce_grad`), so that gradients are whole until then. 1: weights are gathered for
    the step, as FSDP without resharding does it. 2: gradients are reduced in every backward (NeMo AutoModel's
    `defer_fsdp_grad_sync: false`). 3: looped schedules gather the weights of at most
    `max_param_unsharded_stages` virtual stages at a time, and reshard others (`_add_unshard_reshard`).
    """

    tensor: int = 1
    context: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    zero: int = 1
    exchange: ContextExchange = "all-to-all"
    max_param_unsharded_stages: int = UNSHARDED_STAGES

    def __post_init__(self) -> None:
        for field in ("tensor", "context", "expert", "pipeline", "data"):
            value = getattr(self, field)
            if not 1 <= value <= 2**20:
                raise UsageError(
                    f"{field}={value}: must be from 1 to {2**20}", "Give the devices that share."
                )
        if self.zero not in range(4):
            raise UsageError(f"zero={self.zero}: not known", "Use 0, 1, 2 or 3.")

    @property
    def devices(self) -> int:
        """In all."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def reduces_each(self) -> bool:
        """Return whether every backward reduces its gradients, because they are sharded."""
        return self.zero == 2 or (self.zero == 3 and self.pipeline == 1)

    @property
    def gradient_group(self) -> int:
        """Devices that add up the gradients of a dense weight."""
        return self.data * self.context

    @property
    def expert_gradient_group(self) -> int:
        """Devices that add up the gradients of a routed expert."""
        return self.tensor * self.context * self.data // self.expert

    def describe(self) -> str:
        """As `TP 4 x PP 2 x DP 4, EP 8`."""
        context = "CP" if self.exchange == "all-to-all" else f"CP by {self.exchange}"
        degrees = (("TP", self.tensor), (context, self.context), ("PP", self.pipeline), ("DP", self.data))
        text = " x ".join(f"{name} {degree}" for name, degree in degrees if degree > 1) or "one device"
        text += f", EP {self.expert}" if self.expert > 1 else ""
        return text if self.zero == 1 else f"{text}, ZeRO {self.zero}"

    def problem_with(self, shape: TransformerShape, sequence: int) -> str:
        """Why the model cannot be shared so, in words; empty where it can."""
        attention, tensor = shape.attention, self.tensor
        heads = tensor * self.context if self.exchange == "all-to-all" else tensor
        if attention.heads % heads or attention.key_value_heads % heads:
            return (
                f"{attention.heads} heads with {attention.key_value_heads} of keys and values cannot be "
                f"shared by {heads} devices (tensor={tensor}, context={self.context})"
            )
        if sequence % (tensor * self.context):
            pieces = tensor * self.context
            return f"a sequence of {sequence} tokens is no multiple of tensor x context = {pieces}"
        if self.context > 1 and sequence % (2 * self.context):
            return f"a sequence of {sequence} tokens is no multiple of 2 x context = {2 * self.context}"
        # Where all blocks have experts, no layer has the width of the dense ones.
        dense = [] if all(shape.routed) else [shape.feed_forward]
        widths = [*dense, *([shape.experts.shared_width] if shape.experts else [])]
        if any(width % tensor for width in widths):
            return f"a feed-forward layer of {max(widths)} cannot be shared by {tensor} devices"
        if self.expert > 1:
            if shape.experts is None or not any(shape.routed):
                return f"expert={self.expert}: the model has no experts"
            if shape.experts.number % self.expert:
                return f"{shape.experts.number} experts cannot be shared by {self.expert} devices"
            if (tensor * self.context * self.data) % self.expert:
                group = tensor * self.context * self.data
                return f"expert={self.expert} does not divide tensor x context x data = {group}"
        return ""

    def check(self, shape: TransformerShape, sequence: int) -> None:
        """Raises UsageError where the model cannot be shared so."""
        if problem := self.problem_with(shape, sequence):
            raise UsageError(problem, "Choose degrees that divide heads, widths, experts and tokens.")


def padded_vocabulary(shape: TransformerShape, tensor: int, multiple: int = 128) -> int:
    """Rows of embedding and head: a multiple for each device, as Megatron-LM pads them."""
    return math.ceil(shape.vocabulary / (multiple * tensor)) * multiple * tensor
