"""Cases of a check made by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest

from pplan.runtimes.checking.records import Case, CutLink, StageSeconds, StageWaits
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.torch_actions import action_rows, build_program, device_stages, schedule_class

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
        link: CutLink | None = None,
        sent: int = 64,
        seconds: StageSeconds | None = None,
        model: str = "small",
    ) -> Case:
        program = build_program(schedule, devices, micro_batches, virtual_stages)
        count = program.slots
        document = TorchExport(
            runtime="torch",
            model=model,
            mini_batch=micro_batches * size * replicas,
            micro_batch_size=size * replicas,
            step_seconds=1.0,
            micro_batches=micro_batches,
            order=schedule,
            schedule=schedule_class(schedule, program),
            parts=list(parts or range(count + 1)),
            stages=device_stages(program),
            replicas=replicas,
            devices=list(range(devices * replicas)),
            recompute=["never"] * count,
            actions=action_rows(program),
        )
        crossing = [sent] * (count - 1)
        waits = None if seconds is None else StageWaits(stages=[seconds] * count, crossing_bytes=crossing)
        return Case(
            name=f"{schedule} x {micro_batches}",
            document=document,
            links=[link or CutLink(latency=0.0, occupancy=0.0)] * (count - 1),
            crossing_bytes=crossing,
            waits=waits,
        )

    return make


@pytest.fixture(scope="session")
def make_runtime_case() -> Callable[..., Case]:
    """A case of another runtime, of transfers that take no time."""

    def make(
        runtime: str,
        balance: Sequence[int],
        micro_batches: int = 4,
        *,
        checkpoint: str = "never",
        device: str = "cpu",
        size: int = 2,
        replicas: int = 1,
    ) -> Case:
        count = len(balance)
        document: dict[str, Any] = {
            "schema": 1,
            "runtime": runtime,
            "model": "small",
            "mini_batch": micro_batches * size,
            "micro_batch_size": size,
            "step_seconds": 1.0,
        }
        if runtime == "deepspeed":
            document |= {
                "num_stages": count,
                "replicas": replicas,
                "parts": [0, *accumulate(balance)],
                "devices": list(range(count * replicas)),
                "config": {
                    "train_batch_size": micro_batches * size,
                    "train_micro_batch_size_per_gpu": size // replicas,
                    "gradient_accumulation_steps": micro_batches,
                    "gradient_clipping": 0.0,
                    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
                    "pipeline": {"use_reentrant": False, "activation_checkpoint_interval": 0},
                },
            }
        else:
            document |= {
                "balance": list(balance),
                "devices": [device if device == "cpu" else f"cuda:{i}" for i in range(count)],
                "chunks": micro_batches,
                "checkpoint": checkpoint,
            }
        links = [CutLink(latency=0.0, occupancy=0.0)] * (count - 1)
        return Case.model_validate(
            {"name": f"{runtime} {list(balance)} {checkpoint}", "document": document, "links": links}
        )

    return make
