"""Every name that the runtimes do not promise to keep is there; else the message says what to do."""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from pplan.cost_models.errors import MachineError
from pplan.profiler.torch_private import Internal
from pplan.runtimes.pipelining import runtime_internals
from pplan.runtimes.pipelining.runtime_internals import DEEPSPEED_INTERNALS, TORCH_INTERNALS
from pplan.runtimes.torch_actions import OWN_ORDER


@pytest.mark.parametrize("internal", TORCH_INTERNALS, ids=lambda internal: internal.name)
def test_torch_has_it(internal: Internal) -> None:
    assert internal.exists, f"torch {torch.__version__} has no {internal.name}. {internal.without}"


@pytest.mark.parametrize("internal", DEEPSPEED_INTERNALS, ids=lambda internal: internal.name)
def test_deepspeed_has_it(internal: Internal) -> None:
    pytest.importorskip("deepspeed")
    assert internal.exists, f"deepspeed {version('deepspeed')} has no {internal.name}. {internal.without}"


def test_an_order_of_its_own_that_torch_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in getattr(schedules, OWN_ORDER).__mro__:
        if "_load_csv" in vars(kind):
            monkeypatch.delattr(kind, "_load_csv")
    with pytest.raises(MachineError, match=rf"has no .*{OWN_ORDER}\._load_csv, needed for schedules"):
        runtime_internals.load_order(SimpleNamespace(), __file__)  # type: ignore[arg-type]


def test_a_stage_greets_no_neighbour_of_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    greetings = [SimpleNamespace(group_peer=peer) for peer in (0, 1, 2)]

    def greet(stage: Any) -> list[Any]:  # noqa: ARG001
        return greetings

    monkeypatch.setattr(PipelineStage, "_get_init_p2p_neighbors_ops", greet)
    stage = object.__new__(runtime_internals.Stage)
    stage.group_rank = 1
    assert [one.group_peer for one in stage._get_init_p2p_neighbors_ops()] == [0, 2]


def test_deepspeeds_module_takes_the_bounds_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        global_rank = 1
        _topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))

        def __init__(self) -> None:
            self._partition_layers("uniform")

        def _partition_layers(self, method: str) -> None:
            raise NotImplementedError(method)

        def _set_bounds(self, first: int, end: int) -> None:
            self.bounds = first, end

    monkeypatch.setattr(runtime_internals, "check_internals", lambda *_: None)

    def tied_modules(module: Any, *, of: list[int]) -> dict[str, dict[str, Any]]:
        return {"tied_0": {"ranks": [module.global_rank, *of]}}

    named = partial(tied_modules, of=[2])
    made = runtime_internals.partitioned_module(Module, [0, 2, 5], "0.19.8", named)()
    assert (made.parts, made.bounds) == ([0, 2, 5], (2, 5))
    assert made._index_tied_modules() == {"tied_0": {"ranks": [1, 2]}}
