"""The file of an answer by degrees: the fastest plans with what they take, as `pplan degrees` writes it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...cost_models.document import (
    DeviceCount,
    Document,
    JsonObject,
    LayerBound,
    MadeBy,
    MicroBatches,
    MiniBatch,
    PredictedSeconds,
    Ratio,
    Record,
)
from ...cost_models.quantities import MOST_BYTES, MOST_LAYERS, MOST_TOTAL_BYTES
from ...cost_models.transformer.parallel_degrees import ContextExchange
from ...cost_models.transformer.training_setting import Recomputation

SAME = 1e-6
"""Of a step's seconds: what is faster by less is not looked for."""
Count = Annotated[int, Field(ge=1, le=MOST_BYTES)]
"""Of parameters, say."""
LastBlock = Annotated[int, Field(ge=-1, lt=MOST_LAYERS)]
"""One before the first where a stage has none."""
Amount = Annotated[float, Field(ge=0, le=MOST_TOTAL_BYTES)]
"""Of bytes."""


class LedgerEntry(Record):
    """Bytes of a device by term, at its peak."""

    weights: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    workspace: Amount
    placeholders: Amount
    libraries: Amount


class StageEntry(Record):
    """One device of a stage. `blocks`: first and last of each virtual stage."""

    blocks: list[tuple[LayerBound, LastBlock]]
    forward_seconds: PredictedSeconds
    backward_seconds: PredictedSeconds
    update_seconds: PredictedSeconds
    ledger: LedgerEntry
    host_bytes: Amount = 0.0
    """Activations of the device in its host's memory, at the peak."""

    @property
    def bytes(self) -> float:
        """At the peak."""
        return float(sum(bytes for _, bytes in self.ledger))


class PlanEntry(Record):
    """A plan: its degrees, what a step takes, and the arguments of training programs.

    `degrees`: as a user reads them; `exchange`: what context devices do for attention. `blocks`: of
    each (virtual) stage, in the order of the model; `recompute_blocks`: how many of them run again where
    `recompute` is full; None: all; offload: none, activations are kept in the host's memory. `predictors` of
    further tokens are on the last (virtual) stage, or so many before it as `predictor_offset` says.
    `nemo_automodel`: sections of a recipe. `remarks`: where torchtitan and NeMo AutoModel do not train as the
    plan says, and what Megatron-LM needs.
    """

    degrees: str
    tensor: DeviceCount
    context: DeviceCount
    expert: DeviceCount
    pipeline: DeviceCount
    data: DeviceCount
    zero: Annotated[int, Field(ge=0, le=3)]
    exchange: ContextExchange = "all-to-all"
    micro_batch_size: MiniBatch
    micro_batches: MicroBatches
    recompute: Recomputation
    recompute_blocks: Count | None = None
    schedule: Literal["1f1b", "interleaved"]
    virtual_stages: Count
    predictors: LayerBound = 0
    predictor_offset: LayerBound = 0
    step_seconds: PredictedSeconds
    pipeline_seconds: PredictedSeconds
    update_seconds: PredictedSeconds
    peak_bytes: Amount
    blocks: list[LayerBound]
    stages: Annotated[list[StageEntry], Field(min_length=1)]
    megatron: list[str]
    megatron_bridge: list[str] = []
    torchtitan: list[str]
    nemo_automodel: JsonObject = {}
    remarks: list[str] = []


class BaselineEntry(Record):
    """What a rule of this name plans: degrees as a user reads them; without a plan the reason."""

    name: str
    degrees: str = ""
    recompute: str = ""
    micro_batch_size: MiniBatch | None = None
    step_seconds: PredictedSeconds | None = None
    reason: str = ""


class OwnStageEntry(Record):
    """A stage with degrees of its own, on `devices` from the rank `first_device` on; `degrees`: as a user
    reads them. Of a micro-batch each of its `data` replicas has an equal part."""

    first_device: LayerBound
    devices: DeviceCount
    degrees: str
    tensor: DeviceCount
    context: DeviceCount
    expert: DeviceCount
    data: DeviceCount
    zero: Annotated[int, Field(ge=0, le=1)]
    exchange: ContextExchange
    recompute: Recomputation
    recompute_blocks: Count | None
    costs: StageEntry


class StagePlanEntry(Record):
    """A 1F1B pipeline of such stages. `micro_batch_size`: sequences, of all replicas together;
    `transfer_seconds`: of a micro-batch over each cut."""

    micro_batch_size: MiniBatch
    micro_batches: MicroBatches
    step_seconds: PredictedSeconds
    pipeline_seconds: PredictedSeconds
    update_seconds: PredictedSeconds
    transfer_seconds: list[PredictedSeconds]
    peak_bytes: Amount
    stages: Annotated[list[OwnStageEntry], Field(min_length=2)]


class ByStageEntry(Record):
    """Where degrees by stage were searched: the `plan`, where one is faster than all of `plans`; else none.
    No pipeline that was searched takes less than `bound_seconds`."""

    plan: StagePlanEntry | None
    bound_seconds: PredictedSeconds


class DegreesFile(Document):
    """The plans, the fastest first, and how far from the best they may be.

    `layer_count`, `parameters`, `active_parameters` (those that a token uses): of the model; `mini_batch` and
    `sequence`: of a step. `bound_seconds`: proven for the `combinations` that were searched. `limit_bytes`:
    what a device's ledger may add up to. `kernels`: different products of the fastest, of which no table has
    the shape of `assumed_kernels`.
    """

    kind: ClassVar[str] = "degrees"

    model: str
    layer_count: Count
    parameters: Count
    active_parameters: Count
    devices: DeviceCount
    mini_batch: MiniBatch
    sequence: Count
    combinations: Count
    bound_seconds: PredictedSeconds
    gap: Ratio
    limit_bytes: Amount | None
    kernels: LayerBound
    assumed_kernels: LayerBound
    plans: Annotated[list[PlanEntry], Field(min_length=1)]
    baselines: list[BaselineEntry] = []
    by_stage: ByStageEntry | None = None
    notes: list[str] = []
    """What the figures rest on."""
    made_by: MadeBy = MadeBy()
