"""Cases of a check made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pplan.runtimes.checking.job import Case, Link, StageSeconds, Waits
from pplan.runtimes.torch_actions import action_rows, class_of, program_of, stages_of
from pplan.runtimes.torch_pipelining import TorchExport

MakeCase = Callable[..., Case]


@pytest.fixture(scope="session")
def make_case() -> MakeCase:
    """A case of `parts` layers (else one a stage); with `seconds` its stages wait so long."""

    def make(
        schedule: str,
        devices: int = 2,
        micro_batches: int = 4,
        *,
        virtual_stages: int = 1,
        parts: Sequence[int] | None = None,
        size: int = 2,
        replicas: int = 1,
        link: Link | None = None,
        sent: int = 64,
        seconds: StageSeconds | None = None,
        model: str = "small",
    ) -> Case:
        program = program_of(schedule, devices, micro_batches, virtual_stages)
        count = program.places
        document = TorchExport(
            runtime="torch",
            model=model,
            mini_batch=micro_batches * size * replicas,
            micro_batch_size=size * replicas,
            step_seconds=1.0,
            micro_batches=micro_batches,
            order=schedule,
            schedule=class_of(schedule, program),
            parts=list(parts or range(count + 1)),
            stages=stages_of(program),
            replicas=replicas,
            devices=list(range(devices * replicas)),
            recompute=["never"] * count,
            actions=action_rows(program),
        )
        crossing = [sent] * (count - 1)
        waits = None if seconds is None else Waits(stages=[seconds] * count, crossing_bytes=crossing)
        return Case(
            name=f"{schedule} x {micro_batches}",
            document=document,
            links=[link or Link(latency=0.0, occupancy=0.0)] * (count - 1),
            crossing_bytes=crossing,
            waits=waits,
        )

    return make
