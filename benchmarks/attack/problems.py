"""Random small problems, one from each seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from pplan.cost_models.layer import Chain
from pplan.cost_models.runtime import OFFLOAD
from pplan.cost_models.topology import Device, Group, Level, Link, Topology
from pplan.planner.candidate import FIRST_LAYERS
from pplan.planner.objectives.objective import Objective
from pplan.planner.plan_options import PlanOptions
from pplan.planner.search.space import MOST_BLOCKS

from .chains import one_that_scales, random_chain, slower_by_layer, tie
from .machines import MANY, random_topology

OWN = "own.profile.json"
KINDS: dict[str, int] = {
    "plain": 12,
    "levels": 14,
    "ports": 10,
    "kinds": 14,
    "options": 14,
    "memory": 14,
    "infeasible": 6,
    "runtimes": 18,
    "schedules": 12,
    "planners": 10,
    "many": 6,
    "long": 3,
    "throughput": 6,
    "least memory": 6,
    "cost": 6,
    "frontier": 5,
    "explain": 5,
    "states": 8,
    "tied": 10,
    "first layers": 8,
    "offload": 8,
}
"""Kinds of problems, and how often they come."""
RUNTIMES = (
    *("torchgpipe", "fairscale", "deepspeed", "torch", "huggingface", "megatron", "megatron-bridge"),
    *("torchtitan", "nemo-automodel"),
)
NAMED = (
    *("naive", "gpipe", "1f1b", "dapple", "interleaved", "looped-bfs", "chimera", "zb-h1", "zb-h2", "zb-v"),
    *("dualpipe-v", "avgpipe", "autopipe", "any", "any"),
)
PLANNERS = (
    *("one-gpu", "data-parallel", "even", "parameters", "deepspeed-type:layer.*", "torchgpipe-time"),
    *("torchgpipe-size", "gpipe", "megatron", "interleaved", "pipedream", "pipedream-published", "dapple"),
    "alpa",
)


@dataclass(frozen=True)
class Case:
    """A problem: what `solve` is asked, for which objective (or for a `frontier`, or to `explain`)."""

    seed: int
    kind: str
    chain: Chain
    topology: Topology
    options: PlanOptions
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    objective: Objective = field(default_factory=Objective)

    @property
    def dtype(self) -> str:
        """In which the chain was measured."""
        return "bfloat16" if self.options.precision in ("mixed", "bf16") else "float32"


def kind_of(seed: int) -> str:
    """The kind of the problem that a seed makes."""
    weights = np.array(list(KINDS.values()), dtype=np.float64)
    chosen = np.random.default_rng([seed, 1]).choice(len(weights), p=weights / weights.sum())
    return list(KINDS)[int(chosen)]


def case_of(seed: int, kind: str | None = None) -> Case:
    """The problem of a seed; of another kind than its own, where one is given."""
    kind = kind_of(seed) if kind is None else kind
    return _Maker(seed, kind, np.random.default_rng([seed, 2])).made()


@dataclass
class _Maker:
    """Draws a problem."""

    seed: int
    kind: str
    rng: np.random.Generator

    def made(self) -> Case:
        """The problem."""
        if self.kind == "many" and self.rng.random() < 0.3:
            return self._one_scales()
        layers = self._between(
            3, {"many": 6, "schedules": 6, "runtimes": 7, "first layers": 6, "offload": 6}.get(self.kind, 8)
        )
        if self.kind == "long":
            layers = self._between(MOST_BLOCKS + 2, MOST_BLOCKS + 30)
        topology = random_topology(self.rng, self.kind, self._gpus())
        chain = random_chain(self.rng, layers, topology.gpus)
        if self.kind == "long":
            chain = replace(chain, cut_after=np.arange(layers) < layers - 1)
        if self.kind == "offload":
            chain = self._saves_more(chain)
        if self.kind == "tied":
            chain = tie(self.rng, chain)
        options = self._plan_options(chain, topology)
        profiles = {OWN: slower_by_layer(self.rng, chain)} if _has_own(topology) else {}
        topology, options = self._with_memory(chain, topology, options)
        return Case(self.seed, self.kind, chain, topology, options, profiles, self._objective(topology))

    def _saves_more(self, chain: Chain) -> Chain:
        """With memory that is mostly what is saved for backward, at times in part by a loss."""
        saved = chain.saved_bytes * self.rng.uniform(2, 10)
        loss = np.zeros_like(saved)
        loss[-1] = self.rng.choice([0.0, 0.4]) * saved[-1]
        return replace(chain, saved_bytes=saved, loss_saved_bytes=loss)

    def _one_scales(self) -> Case:
        """Layers that take as long at any size, each as long as all devices that are left take for one that
        scales with the samples."""
        gpus, layers = self._between(MANY[0], 100), self._between(6, 8)
        wide = gpus - layers + 1
        count = int(self.rng.choice([128, 256]))
        chain = one_that_scales(layers, int(self.rng.integers(layers)), (1, wide))
        topology = Topology((Group(Device("toy", None), gpus),), (Level("node", None, Link(inf, 0.0)),))
        options = PlanOptions(
            mini_batch=count * wide,
            micro_batches=count,
            schedule="1f1b",
            recompute="never",
            time_limit=1.0,
        )
        return Case(self.seed, self.kind, chain, topology, options)

    def _gpus(self) -> int:
        if self.kind == "many":
            return self._between(*MANY)
        few = {
            "schedules": 4,
            "runtimes": 4,
            "kinds": 4,
            "explain": 3,
            "frontier": 3,
            "tied": 4,
            "long": 3,
            "first layers": 3,
            "offload": 3,
        }
        most = few.get(self.kind, 5)
        if self.kind in ("throughput", "least memory", "cost"):
            most = 4
        return self._between(1 if self.kind in ("plain", "memory") else 2, most + (self.rng.random() < 0.1))

    def _plan_options(self, chain: Chain, topology: Topology) -> PlanOptions:
        batches = (2, 3, 4, 5, 6, 8, 12) if self.kind != "explain" else (2, 3, 4, 6)
        made: dict[str, Any] = {
            "mini_batch": int(self.rng.choice(batches)),
            "optimizer": str(self.rng.choice(["sgd", "adam"])),
            "time_limit": 10.0,
        }
        if self.kind == "many":
            made["mini_batch"] = int(self.rng.choice([48, 64, 66, 96, 100, 130, 192]))
            made["max_stages"] = int(self.rng.choice([2, 3, 4, 6]))
            made["recompute"] = "never"
            made["time_limit"] = 1.0
            if self.rng.random() < 0.7:
                counts = [count for count in (1, 2, 4, 8, 16) if made["mini_batch"] % count == 0]
                made["micro_batches"] = int(self.rng.choice(counts))
            if self.rng.random() < 0.3 and made["max_stages"] > 1:
                cuts = [chain.names[i] for i in np.flatnonzero(chain.cut_after)]
                made["cut_after"] = tuple(str(name) for name in self.rng.permutation(cuts)[:1])
        if self.kind == "long":
            made |= {"max_stages": 2, "recompute": "never", "time_limit": 1.0}
            made["micro_batches"] = int(self.rng.choice([2, 4, 8]))
            made["mini_batch"] = made["micro_batches"] * int(self.rng.choice([1, 2, 4]))
        tied_runtime = self.kind == "tied" and self.rng.random() < 0.3
        if self.kind == "runtimes" or tied_runtime:
            made["runtime"] = str(self.rng.choice(list(RUNTIMES)))
        if self.kind == "first layers":
            made["recompute"] = FIRST_LAYERS
            if self.rng.random() < 0.2:
                made["runtime"] = "torch"
        if self.kind == "offload":
            made["recompute"] = OFFLOAD
            seconds = float(chain.at(chain.sizes[-1]).forward_seconds.mean())
            moved = float(chain.at(chain.sizes[-1]).saved_bytes.mean())
            made["host_bandwidth"] = float(
                np.clip(moved / seconds * 10 ** self.rng.uniform(-0.7, 1), 1, 1e17)
            )
            if self.rng.random() < 0.3:
                made["host_memory_bytes"] = int(moved * self.rng.uniform(0.5, 20)) + 1
            if self.rng.random() < 0.3:
                made["runtime"] = "torch"
        if self.kind == "schedules":
            made["schedule"] = str(self.rng.choice(NAMED))
        if self.kind == "planners":
            made["planner"] = str(self.rng.choice(PLANNERS))
        if self.kind == "states" or (self.kind == "tied" and not tied_runtime and self.rng.random() < 0.2):
            made |= self._states()
        if self.kind == "throughput" and self.rng.random() < 0.4:
            made["planner"] = "pipedream"
        if self.kind == "options" or (
            self.kind not in ("plain", "many", "long") and self.rng.random() < 0.25
        ):
            made |= self._options(chain, topology.gpus, made["mini_batch"])
        return PlanOptions(**made)

    def _states(self) -> dict[str, Any]:
        """In which numbers a plan trains, and what replicas spread over them."""
        made = {
            "precision": str(self.rng.choice(["fp32", "mixed", "bf16"])),
            "zero": self._between(0, 3),
            "optimizer": str(self.rng.choice(["momentum", "adamw", "adamw-8bit"])),
        }
        if made["precision"] != "fp32":
            made["gradient_dtype"] = str(self.rng.choice(["auto", "fp32", "bf16"]))
        return made

    def _options(self, chain: Chain, gpus: int, batch: int) -> dict[str, Any]:
        """Some of the options that leave plans out."""
        rng, made = self.rng, dict[str, Any]()
        if rng.random() < 0.3:
            made["use_all"] = True
        if rng.random() < 0.3:
            made["max_stages"] = self._between(1, max(1, gpus))
        cuts = [chain.names[i] for i in np.flatnonzero(chain.cut_after)]
        if cuts and gpus > 1 and rng.random() < 0.3:
            made["cut_after"] = (str(rng.choice(cuts)),)
        elif rng.random() < 0.2:
            made["keep_together"] = (f"layer[{self._between(0, 3)}-{self._between(4, 6)}]",)
        if gpus > 1 and rng.random() < 0.3:
            layer = self._between(0, len(chain) - 1)
            made["pins"] = ((chain.names[layer], min(self._between(0, gpus - 1), layer)),)
        if rng.random() < 0.3:
            made["micro_batches"] = int(rng.choice([n for n in range(1, batch + 1) if batch % n == 0]))
        if rng.random() < 0.3 and self.kind not in ("schedules", "first layers", "offload"):
            made["recompute"] = str(rng.choice(["never", "always"]))
        if rng.random() < 0.2 and self.kind not in ("schedules", "runtimes", "first layers", "offload"):
            made["schedule"] = str(rng.choice(["1f1b", "gpipe"]))
            if made["schedule"] == "gpipe" and rng.random() < 0.3 and made.get("micro_batches", 2) > 1:
                made["recompute"] = "except_last"
        return made

    def _with_memory(
        self, chain: Chain, topology: Topology, options: PlanOptions
    ) -> tuple[Topology, PlanOptions]:
        """Devices with little memory, or a limit besides it."""
        tight = {
            "plain": 0.0,
            "memory": 1.0,
            "infeasible": 1.0,
            "first layers": 1.0,
            "offload": 1.0,
            "states": 0.6,
            "tied": 0.5,
        }
        if self.rng.random() >= tight.get(self.kind, 0.3) or self.kind == "many":
            return topology, options
        costs = chain.at(chain.sizes[-1])
        weights = 3 * float(chain.parameter_bytes.sum())
        in_flight = float(costs.saved_bytes.sum()) * (options.mini_batch or 1) / chain.sizes[-1]
        share = self.rng.uniform(0.02, 0.25) if self.kind == "infeasible" else self.rng.uniform(0.1, 1)
        limit = max(1, round(share * (weights + in_flight)))
        if self.rng.random() < 0.2:
            return topology, replace(options, memory_limit=float(limit))
        groups = tuple(
            Group(replace(device, memory_bytes=round(limit * self.rng.choice([1, 1, 0.6, 1.5]))), number)
            for device, number in topology.groups
        )
        if len({device.name for device, _ in groups}) < len(groups):
            groups = tuple(
                Group(replace(device, memory_bytes=limit), number) for device, number in topology.groups
            )
        return replace(topology, groups=groups), options

    def _objective(self, topology: Topology) -> Objective:
        if self.kind == "throughput":
            return Objective("throughput")
        if self.kind == "least memory" or (self.kind == "offload" and self.rng.random() < 0.2):
            return Objective("memory", float(self.rng.choice([0.0, 0.05, 0.2, 1.0])))
        if self.kind == "cost":
            prices = {kind.name: float(self.rng.uniform(0.5, 4)) for kind in topology.kinds}
            return Objective("cost", prices=prices)
        return Objective()

    def _between(self, least: int, most: int) -> int:
        return int(self.rng.integers(least, max(most, least) + 1))


def _has_own(topology: Topology) -> bool:
    return any(kind.profile is not None for kind in topology.kinds)


__all__ = ["KINDS", "OWN", "Case", "Device", "Level", "Link", "case_of", "kind_of"]
