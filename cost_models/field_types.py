"""Types of the fields of documents, which hold a value to its range where it is read."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from .ranges import (
    LEAST_PREDICTED_SECONDS,
    MOST_BYTES,
    MOST_DEVICES,
    MOST_LAYERS,
    MOST_MEMBERS,
    MOST_MICRO_BATCHES,
    MOST_MINI_BATCH,
    MOST_PREDICTED_SECONDS,
    MOST_RATIO,
    MOST_SAMPLES,
    MOST_SECONDS,
    MOST_TOTAL_BYTES,
)


def _not_too_short(seconds: float) -> float:
    if seconds < LEAST_PREDICTED_SECONDS:
        raise ValueError(f"Input should be at least {LEAST_PREDICTED_SECONDS:g}")
    return seconds


Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
PredictedSeconds = Annotated[float, Field(ge=0, le=MOST_PREDICTED_SECONDS)]
StepSeconds = Annotated[float, Field(gt=0, le=MOST_PREDICTED_SECONDS), AfterValidator(_not_too_short)]
Bytes = Annotated[int, Field(ge=0, le=MOST_BYTES)]
TotalBytes = Annotated[int, Field(ge=0, le=MOST_TOTAL_BYTES)]
Ratio = Annotated[float, Field(ge=-MOST_RATIO, le=MOST_RATIO)]
Rate = Annotated[float, Field(ge=0, le=MOST_RATIO)]
"""Of samples, say, per second."""
Samples = Annotated[int, Field(ge=1, le=MOST_SAMPLES)]
MiniBatch = Annotated[int, Field(ge=1, le=MOST_MINI_BATCH)]
"""Also of a micro-batch."""
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]
LayerCount = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
LayerIndex = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
LayerBound = Annotated[int, Field(ge=0, le=MOST_LAYERS)]
"""The layers before a place."""
DeviceCount = Annotated[int, Field(ge=1, le=MOST_DEVICES)]
MemberCount = Annotated[int, Field(ge=1, le=MOST_MEMBERS)]
"""Of a level of links: of a node, say."""
DeviceIndex = Annotated[int, Field(ge=0, lt=MOST_DEVICES)]
ZeroStage = Annotated[int, Field(ge=0, le=3)]
