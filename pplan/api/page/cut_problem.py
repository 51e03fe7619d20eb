"""The problem that the page's own simulator (`simulator.js`) takes: layers, devices and links, for any cuts.

It knows straight pipelines of GPipe and 1F1B with replicas, recomputation, launches and shared ports; where a
plan has more, the page draws its cuts and does not move them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...cost_models.collectives import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    Algorithm,
    Routes,
    all_reduce_loads,
    all_reduce_seconds_by_algorithm,
)
from ...cost_models.errors import UsageError
from ...cost_models.layer import Chain, LayerCosts
from ...cost_models.memory import FRAGMENTATION_RESERVE, RECOMPUTES, StageBytes, Training
from ...planner.assembly import Assembly

EDITED = ("1f1b", "gpipe")
"""The schedules that the page simulates."""
MOST_VALUES = 60_000
"""Figures of layers in a page: each takes about 12 bytes."""
DIGITS = 10
"""Of seconds, as the page has them."""
_FIGURES = {
    "forward": "forward_seconds",
    "backward": "backward_seconds",
    "accumulation": "accumulation",
    "forward_host": "forward_host_seconds",
    "backward_host": "backward_host_seconds",
    "output": "output_bytes",
    "saved": "saved_bytes",
    "saved_input": "saved_input_bytes",
    "workspace": "workspace_bytes",
}


def refuse_cuts(assembly: Assembly) -> str:
    """Why the page cannot simulate other cuts of such a pipeline; empty where it can."""
    if assembly.program.parts != 1 or len(assembly.program.pipes) != 1:
        return "each device has several parts of the layers"
    if assembly.program.devices < 2:
        return "there is one stage"
    if not set(assembly.recompute).issubset(RECOMPUTES):
        return "a stage offloads, or runs its first layers alone again"
    if assembly.zero:
        return f"ZeRO-{assembly.zero} spreads the weights over the replicas of a stage"
    if assembly.chain.tied:
        return "some weights are used on both sides of a cut"
    if assembly.transfers != "overlapped":
        return f"transfers are {assembly.transfers}"
    tables = len(_Tables(assembly).positions)
    if tables * len(assembly.chain) * len(_FIGURES) > MOST_VALUES:
        return f"the model has {len(assembly.chain)} layers"
    return ""


def cut_problem(assemblies: Mapping[str, Assembly]) -> dict[str, Any]:
    """What `simulator.js` takes. `assemblies`: the plan under each of the schedules `EDITED` that it allows.

    Raises UsageError where an all-reduce has seconds that the page cannot compute.
    """
    assembly = next(iter(assemblies.values()))
    tables = _Tables(assembly)
    costs = tables.costs[0]
    stages = range(assembly.program.devices)
    routes = Routes(assembly.topology)
    occupied = np.zeros((1, max(len(stages) - 1, 0)))
    return {
        "micro_batches": assembly.program.micro_batches,
        "mini_batch": assembly.program.micro_batches * assembly.size,
        "schedules": {
            name: {"recompute": list(own.recompute), "hosts": own.hosts, "ahead": own.receives_ahead}
            for name, own in assemblies.items()
        },
        "cut_after": [int(allowed) for allowed in assembly.chain.cut_after],
        "tables": [_layer_figures(own) for own in tables.costs],
        "parameters": _short(costs.parameter_bytes),
        "trainable": _short(costs.trainable_bytes),
        "buffers": _short(costs.buffer_bytes),
        "largest": _short(costs.largest_bytes),
        "shared_buffers": [[own.bytes, list(own.layers)] for own in costs.shared_buffers],
        "stages": [_stage(assembly, stage, tables) for stage in stages],
        "cuts": [_cut(assembly, stage, routes) for stage in stages[:-1]],
        "links": assembly.sharing(occupied).links.tolist(),
        "reserve": FRAGMENTATION_RESERVE,
        "bucket_bytes": BUCKET_BYTES,
        "first_bucket_bytes": FIRST_BUCKET_BYTES,
    }


@dataclass
class _Tables:
    """The costs of all layers that the stages need: of each profile, at the size of each stage's replicas."""

    assembly: Assembly
    costs: list[LayerCosts] = field(default_factory=list)
    positions: dict[tuple[str | None, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for device in range(self.assembly.program.devices):
            self.own(device)
            self.timings(device)

    def own(self, device: int) -> int:
        """The position of the costs that a stage's bytes are of."""
        return self._position(None, device)

    def timings(self, device: int) -> list[tuple[int, float]]:
        """For each kind among a stage's replicas: the position of its costs, and what its seconds are
        multiplied by."""
        ranks = self.assembly.ranks[device]
        kinds = dict.fromkeys(self.assembly.topology.device(rank) for rank in ranks)
        return [(self._position(kind.profile, device), kind.seconds_scale) for kind in kinds]

    def _position(self, profile: str | None, device: int) -> int:
        size = self.assembly.per_replica_batch(device)
        if (profile, size) not in self.positions:
            chain: Chain = self.assembly.chain if profile is None else self.assembly.profiles[profile]
            self.positions[profile, size] = len(self.costs)
            self.costs.append(chain.at(size, past_largest=True))
        return self.positions[profile, size]


def _layer_figures(costs: LayerCosts) -> dict[str, Any]:
    figures = {name: _short(getattr(costs, key)) for name, key in _FIGURES.items()}
    return {"input_bytes": costs.input_bytes, **figures}


def _short(values: Sequence[float] | Any) -> list[float]:
    """With so many digits as a page needs; whole numbers without a point."""
    short = (float(f"{value:.{DIGITS}g}") for value in values)
    return [int(value) if value.is_integer() else value for value in short]


def _stage(assembly: Assembly, device: int, tables: _Tables) -> dict[str, Any]:
    ranks = list(assembly.ranks[device])
    return {
        "replicas": len(ranks),
        "devices": ranks,
        "table": tables.own(device),
        "timings": tables.timings(device),
        "limit": assembly.smallest_device(device).memory_bytes,
        "memory": _memory_factors(assembly, device),
        "all_reduce": list(_all_reduce_lines(assembly, ranks)) if len(ranks) > 1 else [],
        "ports": [
            [f"{level}:{owner}", each]
            for (level, owner), each in all_reduce_loads(assembly.topology, ranks).items()
        ],
    }


def _memory_factors(assembly: Assembly, device: int) -> dict[str, float]:
    """Bytes of gradients, master weights, states and temporaries for each byte of trainable weights."""
    options = assembly.ledger_options(device)
    training = Training(assembly.optimizer, options["precision"], len(assembly.ranks[device]))
    states = training.states(_bytes_of_weights(trainable=1.0))
    step = [training.step_temporaries(_bytes_of_weights(**{name: 1.0})) for name in ("trainable", "largest")]
    return {
        "gradient": float(states["gradients"]),
        "master": float(states.get("master_weights", 0.0)),
        "state": float(states["optimizer"]),
        "step_trainable": float(step[0] or 0.0),
        "step_largest": float(step[1] or 0.0),
        "context": float(options["context_bytes"]),
    }


def _bytes_of_weights(*, trainable: float = 0.0, largest: float = 0.0) -> StageBytes:
    nothing = dict.fromkeys(
        (*("parameters", "buffers", "saved", "saved_input", "input", "received", "sent", "workspace"),), 0.0
    )
    return StageBytes(**nothing, trainable=trainable, largest=largest)


def _all_reduce_lines(assembly: Assembly, ranks: Sequence[int]) -> Iterator[list[list[float]]]:
    """By algorithm, the lines of which the highest gives the seconds of so many bytes: [start, a byte]."""
    topology = assembly.topology
    for name in all_reduce_seconds_by_algorithm(topology, ranks, 0.0):

        def seconds(size: float, name: Algorithm = name) -> float:
            return float(all_reduce_seconds_by_algorithm(topology, ranks, size)[name])

        yield _lines(seconds)


_PROBED = (1e2, 1e4, 1e5, 1e6, 1e7, 1e8, 1e10)


def _lines(seconds: Callable[[float], float]) -> list[list[float]]:
    """The two lines of a function that rises along the higher of them. Raises UsageError for another one."""
    lines = []
    for size in (10.0, 1e9):
        each = (seconds(2 * size) - seconds(size)) / size
        lines.append([max(seconds(size) - each * size, 0.0), each])
    for size in _PROBED:
        own = max(start + each * size for start, each in lines)
        if abs(own - seconds(size)) > 1e-7 * own:
            raise UsageError(
                "all-reduces go through links of three kinds", "Simulate it: pplan.simulate(plan)."
            )
    return lines


def _cut(assembly: Assembly, stage: int, routes: Routes) -> dict[str, Any]:
    """The way from a stage to the next, and back."""
    senders, receivers = tuple(assembly.ranks[stage]), tuple(assembly.ranks[stage + 1])
    latency, pace = routes.route(senders, receivers)
    ports: dict[str, float] = {}
    for way in ((senders, receivers), (receivers, senders)):
        loads = routes.loads(*way)
        highest = max(loads.values())
        for port, load in loads.items():
            if highest:
                name = f"{port.level}:{port.owner} {port.direction}"
                ports[name] = ports.get(name, 0.0) + load / highest
    return {
        "latency": latency,
        "pace": pace,
        "streams": min(len(senders), len(receivers)),
        "ports": list(ports.items()),
    }
