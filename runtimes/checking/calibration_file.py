"""The corrections of a machine, as a file (`NAME.calibration.json`). Needs no torch."""

from __future__ import annotations

from typing import ClassVar

from ...cost_models.document import Document, MadeBy
from .job import Corrections


class Calibration(Document):
    """What a check with `calibrate` fitted, for `calibration` of later checks on the same machine."""

    kind: ClassVar[str] = "calibration"

    backend: str
    device_name: str
    processes: int
    corrections: Corrections
    made_by: MadeBy = MadeBy()
