"""Random chains and topologies for the planner's tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, TiedWeight
from pplan.cost_models.topology import Device, Group, Link, Topology, two_level_topology
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.search.budget import SearchBudget

MakeChain = Callable[..., Chain]


@pytest.fixture
def make_chain() -> MakeChain:
    """A function of (seed, layers, *, sizes, traffic, cuts, adding): layers whose costs grow by lines with
    the micro-batch size; `traffic` scales what crosses cuts, `cuts` is the share of allowed ones, `adding`
    that of the shortest backward, at the most, which the first of a step does not take."""
    return _chain


def _chain(
    seed: int,
    layers: int,
    *,
    sizes: tuple[int, ...] = (1, 2, 4),
    traffic: float = 1.0,
    cuts: float = 0.8,
    adding: float = 0.0,
) -> Chain:
    rng = np.random.default_rng(seed)
    per_sample = np.array(sizes, dtype=np.float64)

    def line(slope: float, start: float = 0.0) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        return slope * rng.random((layers, 1)) * per_sample + start * rng.random((layers, 1))

    made = Chain(
        names=tuple(f"layer{i}" for i in range(layers)),
        sizes=sizes,
        parameter_bytes=(parameters := 100 * rng.random(layers)),
        trainable_bytes=parameters * (rng.random(layers) < 0.9),
        buffer_bytes=rng.random(layers),
        cut_after=np.append(rng.random(layers - 1) < cuts, False),
        input_bytes_per_sample=5.0,
        forward_seconds=line(1, 0.3),
        backward_seconds=line(2, 0.3),
        output_bytes=traffic * line(50),
        saved_bytes=line(100),
        saved_input_bytes=line(20),
        workspace_bytes=line(5),
        forward_host_seconds=line(0, 0.3),
        backward_host_seconds=line(0, 0.3),
    )
    return replace(made, accumulation_seconds=adding * rng.random(layers) * made.backward_seconds.min(axis=1))


@pytest.fixture
def make_topology() -> Callable[..., Topology]:
    """A function of (gpus, *, per_node, memory, latency): 20 B/s inside a node, 5 B/s between."""

    return _topology


def _topology(gpus: int, *, per_node: int = 8, memory: int | None = None, latency: float = 0.0) -> Topology:
    inside, between = Link(20.0, latency), Link(5.0, 4 * latency)
    return two_level_topology(Device("toy", memory), gpus, per_node, inside, between)


@pytest.fixture
def in_units() -> Callable[[Chain, Topology, float], tuple[Chain, Topology]]:
    """A function of (chain, topology, factor): all their seconds multiplied by it, and what is by second
    divided."""
    return _in_units


def _in_units(chain: Chain, topology: Topology, factor: float) -> tuple[Chain, Topology]:
    """The same problem with seconds that are 1 / `factor` of those before."""
    seconds: dict[str, Any] = {
        own.name: factor * getattr(chain, own.name)
        for own in fields(chain)
        if own.name.endswith("_seconds") and getattr(chain, own.name) is not None
    }
    assert len(seconds) >= 5
    levels = tuple(
        replace(
            level,
            link=replace(
                level.link,
                bandwidth_bytes_per_second=level.link.bandwidth_bytes_per_second / factor,
                latency_seconds=level.link.latency_seconds * factor,
            ),
        )
        for level in topology.levels
    )
    return replace(chain, **seconds), replace(topology, levels=levels)


@pytest.fixture
def toy_profile(tmp_path: Path) -> Path:
    """The file of a profile of ten layers at two sizes."""
    layers = [
        {
            "name": f"layers.{index}",
            "kind": "Linear",
            "parameter_bytes": 2**20 * (1 + index % 3),
            "buffer_bytes": 0,
            "cut_after": index != 4,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": 1e-3 * (size + 1) * (12 - index),
                    "backward_seconds": 2e-3 * (size + 1) * (12 - index),
                    "output_bytes": 2**18 * size,
                    "saved_bytes": 2**19 * size,
                }
                for size in (4, 8)
            ],
        }
        for index in range(10)
    ]
    path = tmp_path / "toy.profile.json"
    path.write_text(json.dumps({"schema": 1, "model": "toy", "device": "cuda:0", "layers": layers}))
    return path


@dataclass(frozen=True)
class Case:
    """A problem in a line: a chain, a machine and options. `machine`: what `two_level_topology` takes beside
    devices; `slow`: how fast the second half of the devices is; `chain`: what `make_chain` takes; `tied`: the
    layers that use one weight; `parts`: whether backwards were measured in two parts."""

    seed: int
    layers: int
    gpus: int
    options: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    chain: Mapping[str, Any] = field(default_factory=dict)
    slow: float | None = None
    tied: tuple[int, ...] = ()
    spread: float = 0.0
    parts: bool = False
    dtype: str = "float32"

    def problem(self, **more: Any) -> Problem:
        """With counted work alone to spend."""
        chain = _chain(self.seed, self.layers, **self.chain)
        if self.tied:
            weight = TiedWeight("shared", 60.0, 60.0, self.tied)
            parameters = chain.parameter_bytes + 60.0 * (np.arange(self.layers) == self.tied[0])
            chain = replace(chain, parameter_bytes=parameters, trainable_bytes=parameters, tied=(weight,))
        if self.spread:
            rows = self.spread * np.random.default_rng(self.seed).random((self.layers, 1))
            chain = replace(chain, spread=np.repeat(rows, len(chain.sizes), axis=1))
        if self.parts:
            whole = chain.backward_seconds
            chain = replace(chain, backward_input_seconds=0.7 * whole, backward_weight_seconds=0.4 * whole)
        topology = _topology(self.gpus, **self.machine)
        if self.slow is not None:
            own = topology.groups[0].device
            kinds = own, replace(own, name="slow", speed=self.slow)
            half = self.gpus // 2
            topology = replace(topology, groups=(Group(kinds[0], self.gpus - half), Group(kinds[1], half)))
        options = PlanOptions(**{"mini_batch": 8, **self.options, **more})
        return Problem(chain, topology, options, self.dtype, budget=SearchBudget(MOST_WORK))


MOST_WORK = 1e15
"""Of what a test's search may spend, so that it can be told what it spent."""
CASES: dict[str, Case] = {
    "one device": Case(20, 3, 1),
    "two devices": Case(1, 6, 2),
    "three devices and latency": Case(2, 7, 3, machine={"latency": 0.2}),
    "two nodes": Case(3, 6, 4, machine={"per_node": 2, "latency": 0.05}),
    "small nodes": Case(50, 4, 2, {"mini_batch": 4}, {"per_node": 1, "latency": 0.05}, {"cuts": 1.1}),
    "small memory": Case(51, 5, 2, {"mini_batch": 4, "optimizer": "adam"}, {"memory": 1000}),
    "small and launched": Case(52, 4, 2, {"mini_batch": 4, "runtime": "torchgpipe"}, chain={"cuts": 1.1}),
    "small and tied": Case(53, 4, 2, {"mini_batch": 4}, chain={"cuts": 1.1}, tied=(0, 3)),
    "small kinds": Case(54, 4, 3, {"mini_batch": 4}, chain={"cuts": 1.1}, slow=0.5),
    "fast links": Case(4, 7, 3, chain={"traffic": 0.02}),
    "slow links": Case(5, 6, 3, chain={"traffic": 20.0}),
    "few cuts": Case(6, 8, 3, chain={"cuts": 0.3}),
    "one size": Case(7, 6, 3, chain={"sizes": (2,)}),
    "gradients add up": Case(8, 6, 3, chain={"adding": 0.5}),
    "two kinds": Case(9, 6, 4, slow=0.5),
    "weight of both ends": Case(10, 6, 3, tied=(0, 5)),
    "little memory": Case(11, 6, 3, {"optimizer": "adam"}, {"memory": 1100}),
    "recompute": Case(12, 6, 3, {"recompute": "always"}),
    "gpipe without recomputing": Case(13, 6, 3, {"schedule": "gpipe", "recompute": "never"}),
    "torchgpipe's recomputing": Case(14, 6, 3, {"schedule": "gpipe", "recompute": "except_last"}),
    "1f1b of many": Case(15, 6, 3, {"schedule": "1f1b", "mini_batch": 24}),
    "micro-batches": Case(16, 6, 3, {"micro_batches": 4}),
    "all devices": Case(17, 6, 3, {"use_all": True}),
    "two stages": Case(18, 6, 4, {"max_stages": 2}),
    "a pinned layer": Case(19, 6, 3, {"pins": (("layer3", 1),)}, chain={"cuts": 1.1}),
    "a cut": Case(21, 6, 3, {"cut_after": ("layer2",)}, chain={"cuts": 1.1}),
    "layers together": Case(22, 6, 3, {"keep_together": ("layer[0-3]",)}, chain={"cuts": 1.1}),
    "zero 1": Case(23, 5, 3, {"zero": 1, "optimizer": "adam"}),
    "zero 2": Case(24, 5, 3, {"zero": 2, "optimizer": "adam"}),
    "zero 3": Case(25, 5, 3, {"zero": 3, "optimizer": "adam"}),
    "mixed": Case(26, 5, 3, {"optimizer": "adamw"}, dtype="bfloat16"),
    "torchgpipe": Case(27, 6, 3, {"runtime": "torchgpipe"}),
    "deepspeed": Case(28, 6, 4, {"runtime": "deepspeed"}),
    "torch": Case(29, 6, 3, {"runtime": "torch"}),
    "megatron": Case(30, 6, 4, {"runtime": "megatron"}),
    "interleaved": Case(31, 9, 2, {"schedule": "interleaved", "micro_batches": 4}),
    "zb-h1": Case(32, 6, 3, {"schedule": "zb-h1", "micro_batches": 8}),
    "zb-v": Case(33, 8, 2, {"schedule": "zb-v", "micro_batches": 8}),
    "looped-bfs": Case(36, 9, 2, {"schedule": "looped-bfs", "micro_batches": 4}),
    "dualpipe-v": Case(37, 8, 2, {"schedule": "dualpipe-v", "micro_batches": 8}, parts=True),
    "zb-h2 of replicas": Case(38, 5, 4, {"schedule": "zb-h2", "micro_batches": 4}, parts=True),
    "zb-h1 in little memory": Case(39, 6, 3, {"schedule": "zb-h1"}, {"memory": 1500}, parts=True),
    "chimera": Case(40, 6, 2, {"schedule": "chimera", "micro_batches": 4}),
    "dapple": Case(41, 6, 3, {"schedule": "dapple", "micro_batches": 4}, {"latency": 0.3}),
    "naive": Case(42, 6, 3, {"schedule": "naive"}),
    "two kinds of zb-h1": Case(43, 5, 3, {"schedule": "zb-h1", "micro_batches": 4}, slow=0.6),
    "any schedule": Case(34, 6, 2, {"schedule": "any", "micro_batches": 4}),
}


LONG = ("torch", "megatron", "any schedule", "two kinds")
"""Those that take longest."""


@pytest.fixture
def cases() -> dict[str, Case]:
    """Small problems of all kinds, by name."""
    return CASES


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case_name`: of each of the cases that are not for what takes longer than an answer."""
    if "case_name" in metafunc.fixturenames:
        names = [name for name in CASES if not name.startswith("small")]
        slow = pytest.mark.slow
        metafunc.parametrize(
            "case_name", [pytest.param(name, marks=[slow] * (name in LONG)) for name in names]
        )


@pytest.fixture
def make_problem(make_chain: MakeChain, make_topology: Callable[..., Topology]) -> Callable[..., Problem]:
    """A function of (gpus, **options): six layers that may be cut anywhere."""

    def make(gpus: int = 2, **options: Any) -> Problem:
        own = PlanOptions(**{"mini_batch": 8, **options})
        return Problem(make_chain(1, 6, cuts=1.1), make_topology(gpus), own)

    return make
