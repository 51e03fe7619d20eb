"""Degrees of parallelism and training setting of a plan from a transformer configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field

from ..cost_models.document import DeviceCount, LayerBound, LayerCount, Record, ZeroStage
from ..cost_models.memory import check_stage_word, count_first_layers
from ..cost_models.quantities import MOST_BYTES
from ..cost_models.runtime import OFFLOAD
from ..cost_models.transformer.implementations import IMPLEMENTATIONS
from ..cost_models.transformer.parallel_degrees import UNSHARDED_STAGES, ContextExchange, ParallelDegrees
from ..cost_models.transformer.pipeline_layout import layout_problems, stage_letters

if TYPE_CHECKING:
    from ..cost_models.transformer.training_setting import Recomputation

Count = Annotated[int, Field(ge=1, le=MOST_BYTES)]
"""Number of tokens or parameters."""
SAME = 1e-6
"""Share of a step below which differences are ignored."""
_WORDS: dict[Recomputation, str] = {
    "none": "never",
    "selective": "selective",
    "full": "always",
    "offload": OFFLOAD,
}


BlockRecompute = Annotated[
    str, AfterValidator(partial(check_stage_word, words=_WORDS.values(), unit="blocks"))
]


def block_recompute(kind: Recomputation, blocks: int | None) -> str:
    """Return the recomputation mode of the blocks of a stage.

    >>> block_recompute("full", None), block_recompute("full", 3), block_recompute("none", None)
    ('always', 'first_3', 'never')
    """
    return _WORDS[kind] if blocks is None else f"first_{blocks}"


class StageDegrees(Record):
    """Degrees of the devices of a stage (see `ParallelDegrees`) and the recomputation of its blocks.

    `recompute` is `never`, `always`, `selective` (attention only), `offload` (activations are kept in host
    memory instead) or `first_N` (the first N blocks of the stage).
    """

    tensor: DeviceCount = 1
    context: DeviceCount = 1
    expert: DeviceCount = 1
    data: DeviceCount = 1
    zero: ZeroStage = 1
    exchange: ContextExchange = "all-to-all"
    max_param_unsharded_stages: DeviceCount = UNSHARDED_STAGES
    recompute: BlockRecompute = "never"

    @property
    def sharers(self) -> int:
        """Number of devices of a replica."""
        return self.tensor * self.context

    @property
    def first_blocks(self) -> int | None:
        """Number of first blocks of a stage that are recomputed. None for all or none."""
        return count_first_layers(self.recompute)

    def shared(self, pipeline: int = 1) -> ParallelDegrees:
        """Return the degrees without recomputation, for a pipeline of `pipeline` stages."""
        names = (name for name in StageDegrees.model_fields if name != "recompute")
        return ParallelDegrees(**{name: getattr(self, name) for name in names}, pipeline=pipeline)

    def describe(self, pipeline: int = 1) -> str:
        """Return the degrees in words, such as `TP 4 x PP 2 x DP 4, EP 8`."""
        return self.shared(pipeline).describe()


class Degrees(StageDegrees):
    """Degrees that all stages have; the pipeline has `pipeline` times the virtual stages of a device.

    `predictor_offset` is the number of stages from that of the multi-token predictors to the last.
    """

    pipeline: DeviceCount = 1
    predictor_offset: LayerBound = 0

    def describe(self, pipeline: int | None = None) -> str:
        """Return the degrees in words."""
        return super().describe(pipeline or self.pipeline)

    def check(
        self, training: TransformerTraining, balance: Sequence[int], virtual_stages: int, samples: int
    ) -> None:
        """Check that parts with these numbers of layers are a legal layout of the degrees.

        Args:
            training: Model and training.
            balance: Number of layers by part.
            virtual_stages: Parts per device.
            samples: Samples of a micro-batch.

        Raises:
            ValueError: They are not.
        """
        blocks = self.blocks(balance, training)
        if len(balance) != self.pipeline * virtual_stages or min(blocks) < 0:
            raise ValueError(
                f"degrees: a pipeline of {self.pipeline} devices does not have balance {balance}"
            )
        letters = stage_letters(blocks, training.predictors, self.predictor_offset)
        if problems := layout_problems(letters, self.pipeline, training.blocks, training.predictors):
            raise ValueError(f"degrees: balance {balance}: {'; '.join(problems)}")
        if samples % self.data:
            raise ValueError(f"degrees: {self.data} replicas do not share {samples} samples")

    def blocks(self, balance: Sequence[int], training: TransformerTraining) -> tuple[int, ...]:
        """Return the number of blocks by part, without the embedding, predictors, norm and head.

        Raises:
            ValueError: The predictors lie before the first part.
        """
        counts = list(balance)
        if self.predictor_offset >= len(counts):
            raise ValueError(f"degrees: predictor_offset {self.predictor_offset} of {len(counts)} parts")
        counts[0] -= 1
        counts[-1] -= training.head_layers
        counts[-1 - self.predictor_offset] -= training.predictors
        return tuple(counts)


def _check_implementation(name: str) -> str:
    """Return the name of an implementation.

    Raises:
        ValueError: It is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation {name!r}: not one of {', '.join(IMPLEMENTATIONS)}")
    return name


class TransformerTraining(Record):
    """Model and training of a plan from a configuration.

    Attributes:
        implementation: Library whose code is costed.
        blocks: Blocks of the model. Its chain is the embedding, the blocks, the predictors and the head.
        predictors: Predictors of further tokens.
        head_layers: Layers of the head: norm, head, and what follows it.
        sequence: Tokens of a sample.
        parameters: Number of parameters.
        active_parameters: Number of parameters that a token uses.
        measured_share: Share of the busiest device's seconds that was measured on the machine, 0 to 1. None
            if no machine was measured.
    """

    implementation: Annotated[str, AfterValidator(_check_implementation)] = "megatron"
    blocks: LayerCount
    predictors: LayerBound = 0
    head_layers: LayerCount = 1
    sequence: Count
    parameters: Count
    active_parameters: Count
    measured_share: Annotated[float, Field(ge=0, le=1)] | None = None

    @property
    def has_experts(self) -> bool:
        """True if some blocks have experts."""
        return self.active_parameters < self.parameters
