"""The plan: what to train with, and what to expect of it, as a file (`NAME.plan.json`)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..cost_models.document import Document, MadeBy, Record

Recompute = Literal["never", "always", "except_last", "selective"]
Count = Annotated[int, Field(ge=1)]


class PlannedStage(Record):
    """Layers `first_layer` to `last_layer` (0-based, inclusive) on `replicas` devices.

    Seconds are those of one micro-batch on one replica, backward with what it recomputes.
    """

    first_layer: Annotated[int, Field(ge=0)]
    last_layer: Annotated[int, Field(ge=0)]
    replicas: Count = 1
    devices: list[int]
    forward_seconds: float
    backward_seconds: float
    memory_bytes: int
    memory_limit_bytes: int | None = None
    memory: dict[str, int] = {}
    """The ledger: bytes by term."""


class Prediction(Record):
    """What the simulator says of the plan, and what was proven of all plans of the searched space.

    `gap` is step_seconds / lower_bound_seconds - 1. `exact`: every plan of the space was scored or excluded
    by the bound. `root_bound_seconds` is the bound before anything was searched.
    """

    step_seconds: float
    samples_per_second: float
    bubble: float
    lower_bound_seconds: float
    gap: float
    exact: bool
    root_bound_seconds: float | None = None


class Baseline(Record):
    """A plan that a simpler tool would make, under the same costs and limits."""

    name: str
    step_seconds: float | None
    reason: str | None = None
    """Why it has no step: it does not fit, or cannot be made."""
    detail: str = ""
    """The micro-batches, schedule and recomputation that were best for it."""


class Alternative(Record):
    """The best straight plan (no replicas) of one schedule, for the runtimes that run it."""

    runtimes: list[str]
    balance: list[Count]
    schedule: str
    micro_batches: Count
    micro_batch_size: Count
    recompute: Recompute
    step_seconds: float
    samples_per_second: float = 0.0
    memory_bytes: list[int] = []
    """By stage."""
    exact: bool = False
    reason: str = ""
    """Why it stands here, where that is not its runtimes: the fastest on all devices, say."""


class ProfileReference(Record):
    """The profile a plan was made from. `layers_sha256` is the hash of the layer names, one a line."""

    file: str
    sha256: str
    layers_sha256: str = ""
    dtype: str = "float32"
    device_name: str = ""


class Plan(Document):
    """A partition, its micro-batches, schedule and recomputation, with its prediction."""

    kind: ClassVar[str] = "plan"

    model: str
    balance: Annotated[list[Count], Field(min_length=1)]
    mini_batch: Count
    micro_batches: Count
    micro_batch_size: Count
    """Samples of a whole micro-batch; where r replicas share it, each computes micro_batch_size / r."""
    schedule: str
    virtual_stages: Count = 1
    optimizer: str = "sgd"
    recompute: Recompute = "never"
    runtime: str | None = None
    gpus: Count | None = None
    """Devices that were offered; a plan may use fewer."""
    topology: str = ""
    """The devices and links the plan was made for, in words."""
    stages: Annotated[list[PlannedStage], Field(min_length=1)]
    prediction: Prediction
    baselines: list[Baseline] = []
    alternatives: list[Alternative] = []
    searched: str = ""
    """The space that `exact` and the bound speak of."""
    notes: list[str] = []
    layer_names: list[str] = []
    profile: ProfileReference
    made_by: MadeBy = MadeBy()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batches * self.micro_batch_size != self.mini_batch:
            raise ValueError(
                f"{self.micro_batches} micro-batches of {self.micro_batch_size} "
                f"do not make a mini-batch of {self.mini_batch}"
            )
        counts = [stage.last_layer - stage.first_layer + 1 for stage in self.stages]
        if self.virtual_stages == 1 and counts != self.balance:
            raise ValueError(f"balance is {self.balance}, the stages hold {counts} layers")
        layers = len(self.layer_names)
        if layers and sum(self.balance) != layers:
            raise ValueError(
                f"balance {self.balance} adds up to {sum(self.balance)}, there are {layers} layers"
            )
        return self

    @property
    def replicas(self) -> list[int]:
        """Replicas of each stage."""
        return [stage.replicas for stage in self.stages]
