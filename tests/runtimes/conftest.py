"""Plans made by hand, and a small model shaped like VGG."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pplan.planner.plan_file import Plan

MakePlan = Callable[..., Plan]
RunProcesses = Callable[..., None]
RunRanks = Callable[..., str]
SECONDS = 240
"""After which processes that hang are killed."""


@pytest.fixture(scope="session")
def run_processes(forked_python: Callable[..., Any]) -> RunProcesses:
    """Runs so many processes of `python WORKER... FOLDER RANK COUNT` side by side; all must succeed."""

    def run(folder: Path, count: int, *worker: str) -> None:
        started = [
            forked_python(folder / f"output.{rank}", folder, *worker, folder, str(rank), str(count))
            for rank in range(count)
        ]
        ended = [process.wait(SECONDS) for process in started]
        texts = "\n".join((own.stdout + own.stderr)[-3000:] for own in ended)
        assert [own.returncode for own in ended] == [0] * count, texts

    return run


@pytest.fixture(scope="session")
def run_ranks(forked_python: Callable[..., Any], free_port: Callable[[], int]) -> RunRanks:
    """What so many processes of `python COMMAND...` print whose ranks are told as torchrun tells them; all
    must succeed."""

    def run(command: Sequence[str], folder: Path, count: int, **environment: str) -> str:
        outputs = Path(tempfile.mkdtemp(dir=folder))
        ranks = [
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)} for rank in range(count)
        ]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = [
            forked_python(outputs / own["RANK"], folder, *command, **own, **meeting, **environment)
            for own in ranks
        ]
        ended = [process.wait(SECONDS) for process in started]
        texts = "\n".join((own.stdout + own.stderr)[-4000:] for own in ended)
        assert [own.returncode for own in ended] == [0] * count, texts
        return "".join(own.stdout for own in ended)

    return run


@pytest.fixture(scope="session")
def make_plan() -> MakePlan:
    """A plan of these layers a stage on devices 0, 1, ...; any key of the file may be given."""

    def make(
        balance: Sequence[int],
        *,
        micro_batches: int = 2,
        micro_batch_size: int = 2,
        replicas: Sequence[int] | None = None,
        limit: int | None = None,
        step_seconds: float = 0.5,
        dtype: str = "float32",
        **keys: Any,
    ) -> Plan:
        stages, layer, device = [], 0, 0
        for layers, copies in zip(balance, replicas or [1] * len(balance), strict=True):
            stages.append(
                {
                    "first_layer": layer,
                    "last_layer": layer + layers - 1,
                    "replicas": copies,
                    "devices": list(range(device, device + copies)),
                    "forward_seconds": 0.1,
                    "backward_seconds": 0.2,
                    "memory_bytes": 100,
                    "memory_limit_bytes": limit,
                }
            )
            layer, device = layer + layers, device + copies
        content = {
            "schema": 1,
            "model": "small",
            "balance": list(balance),
            "mini_batch": micro_batches * micro_batch_size,
            "micro_batches": micro_batches,
            "micro_batch_size": micro_batch_size,
            "schedule": "gpipe",
            "stages": stages,
            "prediction": {
                "step_seconds": step_seconds,
                "samples_per_second": 8.0,
                "bubble": 0.1,
                "lower_bound_seconds": step_seconds,
                "gap": 0.0,
                "exact": True,
            },
            "profile": {"file": "small.profile.json", "sha256": "0" * 64, "dtype": dtype},
        }
        return Plan.model_validate(content | keys)

    return make


@pytest.fixture(scope="session")
def alternative() -> Callable[..., dict[str, Any]]:
    """An alternative of a plan, as in the file; any key may be given."""

    def make(**keys: Any) -> dict[str, Any]:
        return {
            "runtimes": ["torchgpipe", "fairscale"],
            "balance": [4, 6],
            "schedule": "gpipe",
            "micro_batches": 4,
            "micro_batch_size": 1,
            "recompute": "never",
            "step_seconds": 0.6,
        } | keys

    return make


@pytest.fixture
def decoder() -> Callable[[int], list[str]]:
    """The names of the layers of a decoder with so many blocks, as in a profile of transformers' Llama."""

    def names(blocks: int) -> list[str]:
        inner = [f"model.layers.{block}" for block in range(blocks)]
        return ["model.embed_tokens", *inner, "model.norm", "lm_head"]

    return names


@pytest.fixture
def make_decoder_plan(make_plan: MakePlan, decoder: Callable[[int], list[str]]) -> MakePlan:
    """As `make_plan`, of a decoder; `virtual` stages go round the devices, V schedules fold them."""

    def make(balance: Sequence[int], *, virtual: int = 1, replicas: int = 1, **keys: Any) -> Plan:
        names = keys.pop("names", None) or decoder(sum(balance) - 3)
        schedule = keys.setdefault("schedule", "interleaved" if virtual > 1 else "1f1b")
        keys.setdefault("micro_batches", 8)
        keys.setdefault("micro_batch_size", 4)
        plan = make_plan(balance, layer_names=names, replicas=[replicas] * len(balance), **keys)
        if virtual == 1:
            return plan
        devices = len(balance) // virtual
        folded = schedule in ("zb-v", "dualpipe-v")
        order = [*range(devices), *range(devices - 1, -1, -1)] if folded else [*range(devices)] * virtual
        stages = [
            stage.model_copy(update={"devices": list(range(device * replicas, (device + 1) * replicas))})
            for stage, device in zip(plan.stages, order, strict=True)
        ]
        return plan.model_copy(update={"stages": stages, "virtual_stages": virtual})

    return make
