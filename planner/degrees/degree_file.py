"""The file of an answer by degrees: the fastest plans with what they take, as `pplan degrees` writes it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ...cost_models.document import Document, MadeBy, Record

Count = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0)]


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

    blocks: list[tuple[int, int]]
    forward_seconds: Amount
    backward_seconds: Amount
    update_seconds: Amount
    ledger: LedgerEntry

    @property
    def bytes(self) -> float:
        """At the peak."""
        return float(sum(bytes for _, bytes in self.ledger))


class PlanEntry(Record):
    """A plan: its degrees, what a step takes, and the arguments of training programs.

    `degrees`: as a user reads them; `ring`: whether context devices pass keys and values round. `blocks`: of
    each (virtual) stage, in the order of the model; `recompute_blocks`: how many of them run again where
    `recompute` is full; None: all. `remarks`: where torchtitan does not train as the plan says.
    """

    degrees: str
    tensor: Count
    context: Count
    expert: Count
    pipeline: Count
    data: Count
    zero: Annotated[int, Field(ge=0, le=3)]
    ring: bool = False
    micro_batch_size: Count
    micro_batches: Count
    recompute: Literal["none", "selective", "full"]
    recompute_blocks: Count | None = None
    schedule: Literal["1f1b", "interleaved"]
    virtual_stages: Count
    step_seconds: Amount
    pipeline_seconds: Amount
    update_seconds: Amount
    peak_bytes: Amount
    blocks: list[int]
    stages: Annotated[list[StageEntry], Field(min_length=1)]
    megatron: list[str]
    megatron_bridge: list[str] = []
    torchtitan: list[str]
    remarks: list[str] = []


class BaselineEntry(Record):
    """What a rule of this name plans: degrees as a user reads them; without a plan the reason."""

    name: str
    degrees: str = ""
    recompute: str = ""
    micro_batch_size: Count | None = None
    step_seconds: Amount | None = None
    reason: str = ""


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
    devices: Count
    mini_batch: Count
    sequence: Count
    combinations: Count
    bound_seconds: Amount
    gap: float
    limit_bytes: Amount | None
    kernels: Annotated[int, Field(ge=0)]
    assumed_kernels: Annotated[int, Field(ge=0)]
    plans: Annotated[list[PlanEntry], Field(min_length=1)]
    baselines: list[BaselineEntry] = []
    notes: list[str] = []
    """What the figures rest on."""
    made_by: MadeBy = MadeBy()
