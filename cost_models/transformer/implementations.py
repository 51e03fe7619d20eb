"""Training code of a transformer: what its kernels read and write, what it saves, which degrees it allows.

`megatron`: Megatron-LM with Transformer Engine, the code that the 18 published steps of `published_gpu.py`
ran. Norms, activations and the loss are fused, and so are queries, keys and values, and both matrices up.

`torchtitan`: torchtitan 0.3.0 with `compile.enable` (blocks and loss) and its fused queries, keys and
values. What a block keeps is what torch 2.14's partitioner chose to keep of such a block; its rotary
positions are complex numbers in float32, which Inductor does not fuse (`models/common/rope.py`). FSDP
(`distributed/fsdp.py`) reduces in every backward, but in a pipeline only after the last.

`transformers`: transformers 5.24's own modules, uncompiled, as NeMo AutoModel trains them with FSDP2. Bytes
of passes and of what autograd keeps were counted, operation by operation, on `LlamaDecoderLayer` in bfloat16
(`tests/cost_models/transformer/test_implementations.py` counts them again).

Estimated, not measured: seconds. Gaps between kernels are those fitted to Megatron-LM (`Overheads`), one for
each pass and none between the operations of an uncompiled norm; kernels for experts are Megatron-LM's;
copies into and out of FSDP's buffers are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parallel_degrees import ContextExchange, ParallelDegrees
    from .training_setting import Recomputation, TrainingSetting


@dataclass(frozen=True)
class Implementation:
    """Kernels, saved tensors and ways of sharing of one implementation.

    Pairs of passes are of forward and backward: bytes that they read and write, over the bytes of a tensor.

    Attributes:
        name: As `solve` takes it.
        runtimes: Runtimes that run this code.
        norm: Passes of a norm over hidden states.
        norm_saved: Hidden states that a norm and the product after it keep, the product's input included.
        activation: Passes of an activation besides reading its inputs and writing its result, over its width.
        activation_saved: Widths that are kept besides the activation's inputs and its result.
        rotary: Passes of rotary positions over queries and keys.
        keeps_projection: Whether queries and keys are kept without rotary positions, too: the kept values are
            a view of the fused projection.
        loss: Passes of the loss over bfloat16 logits.
        loss_saved: Logits in bfloat16 (two for one in float32) at the peak of the loss. Transformer Engine's
            writes its gradient over them (1); megatron-core's fused one has the scores in float32, too.
        products: Products that give queries, keys and values, and that give gate and up.
        join: Passes over hidden states that add up the input gradients of one more of these products.
        gathers_again: Whether backward gathers the input of a product again among tensor-parallel devices,
            which keep their share of it (Korthikanti et al., MLSys 2023); else each keeps all of it.
        keeps_gathered_keys: Whether context-parallel devices keep all keys and values for backward.
        accumulation: Bytes of each parameter that a backward reads and writes to add up its gradient.
        vocabulary_multiple: Rows of embedding and head that the share of a device is a multiple of.
        checkpointed: Hidden states that a block keeps whose forward runs again.
        keeps_half: Whether selective recomputation keeps the results of attention, collectives and every
            second product, and runs all else again; else it runs attention alone again.
        has_placeholders: Whether there is an empty tensor for each shape of weight (Transformer Engine).
        recompute: Ways of recomputation. The first blocks of a stage alone run again only in Megatron-LM.
        exchanges: What context-parallel devices may exchange.
        uses_fsdp: Whether replicas share states by torch's FSDP2, in pipelines with torch's schedules.
        reduces_in_pipelines: Whether every backward in a pipeline can reduce gradients.
    """

    name: str
    runtimes: tuple[str, ...]
    norm: tuple[float, float] = (2, 3)
    norm_saved: float = 2
    activation: tuple[float, float] = (0, 0)
    activation_saved: float = 0
    rotary: tuple[float, float] = (2, 2)
    keeps_projection: bool = False
    loss: tuple[float, float] = (2, 2)
    loss_saved: float = 3
    products: tuple[int, int] = (1, 1)
    join: float = 0
    gathers_again: bool = False
    keeps_gathered_keys: bool = False
    accumulation: float = 0
    vocabulary_multiple: int = 1
    checkpointed: float = 1
    keeps_half: bool = False
    has_placeholders: bool = False
    recompute: tuple[Recomputation, ...] = ("none", "full")
    exchanges: tuple[ContextExchange, ...] = ("all-gather",)
    uses_fsdp: bool = True
    reduces_in_pipelines: bool = False

    def zero_stages(self, pipeline: int, *, has_replicas: bool) -> tuple[int, ...]:
        """Stages of ZeRO that are worth a try; with FSDP 3 in a pipeline where some weights are resharded."""
        if not has_replicas:
            return (1,)
        if pipeline > 1:
            return (1, 3) if self.uses_fsdp else (1,)
        return (2, 3) if self.uses_fsdp else (0, 1, 2, 3)

    def problem_with(self, degrees: ParallelDegrees, setting: TrainingSetting) -> str:
        """Why this code does not train so, in words; empty where it does."""
        if problem := virtual_stages_problem(degrees, setting):
            return problem
        stages, zero = degrees.pipeline, degrees.zero
        shares = degrees.gradient_group > 1 or (degrees.expert > 1 and degrees.expert_gradient_group > 1)
        if stages > 1 and zero > 1 and not self.uses_fsdp:
            return f"zero={zero}: is of one pipeline stage, not of {stages}"
        virtual, gathered = setting.virtual_stages, degrees.max_param_unsharded_stages
        if stages > 1 and zero == 3 and virtual <= gathered:
            return f"zero=3: no weights of {virtual} virtual stages are resharded, {gathered} may be gathered"
        if stages > 1 and zero == 2 and not self.reduces_in_pipelines:
            return f"zero=2: {self.name} reduces gradients after the last backward of a pipeline's stage"
        if stages > 1 and zero in (1, 2) and shares and virtual > gathered and self.uses_fsdp:
            return f"zero={zero}: of {virtual} virtual stages only {gathered} keep their weights gathered (3)"
        if stages == 1 and zero < 2 and shares and self.uses_fsdp:
            return f"zero={zero}: {self.name} spreads gradients over replicas, too (2), or also weights (3)"
        if setting.recompute not in self.recompute:
            return f"recompute {setting.recompute}: {self.name} has {', '.join(self.recompute)}"
        if setting.recompute_blocks is not None and self.uses_fsdp:
            return f"{self.name} runs every block again or none, not the first ones of a stage"
        if degrees.context > 1 and degrees.exchange not in self.exchanges:
            return f"context_exchange={degrees.exchange}: {self.name} has {', '.join(self.exchanges)}"
        if setting.predictors and self.uses_fsdp:
            return f"{self.name} trains no predictors of further tokens"
        return ""


MEGATRON = Implementation(
    "megatron",
    ("megatron", "megatron-bridge"),
    gathers_again=True,
    vocabulary_multiple=128,
    has_placeholders=True,
    recompute=("none", "selective", "full", "offload"),
    exchanges=("all-to-all", "ring", "all-gather"),
    uses_fsdp=False,
)
TORCHTITAN = Implementation(
    "torchtitan",
    ("torchtitan",),
    rotary=(10, 10),
    keeps_projection=True,
    loss_saved=4,
    products=(1, 2),
    join=1,
    keeps_gathered_keys=True,
    accumulation=10,
    keeps_half=True,
    recompute=("none", "selective", "full"),
)
TRANSFORMERS = Implementation(
    "transformers",
    ("nemo-automodel", "torch", "torchgpipe", "fairscale", "deepspeed", "huggingface"),
    norm=(18, 46),
    norm_saved=4,
    activation=(2, 4),
    activation_saved=1,
    rotary=(10, 16),
    loss=(9, 13),
    loss_saved=7,
    products=(3, 2),
    join=3,
    accumulation=10,
    checkpointed=4,
    reduces_in_pipelines=True,
)
IMPLEMENTATIONS = {own.name: own for own in (MEGATRON, TORCHTITAN, TRANSFORMERS)}


def virtual_stages_problem(degrees: ParallelDegrees, setting: TrainingSetting) -> str:
    """Why the pipeline cannot be interleaved so, in words; empty where it can, or is not."""
    virtual, stages = setting.virtual_stages, degrees.pipeline
    if virtual == 1:
        return ""
    if stages == 1 or virtual < 1:
        return f"virtual_stages={virtual}: they are of a pipeline of at least 2 stages, which has {stages}"
    if setting.micro_batches % stages:
        return f"{setting.micro_batches} micro-batches are no multiple of {stages} stages, interleaved"
    return ""
