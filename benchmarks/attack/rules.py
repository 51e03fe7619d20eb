"""What the options leave: cuts, micro-batch sizes, replicas, schedules and recomputation, worked out anew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import combinations, product

from pplan.cost_models.layer import Chain
from pplan.cost_models.memory import Recompute, count_first_layers, first_layers_word
from pplan.cost_models.runtime import OFFLOAD, Runtime, find_runtime
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import FIRST_LAYERS, UNPROPOSED
from pplan.planner.plan_options import PlanOptions

OPEN = ("1f1b", "gpipe")
"""In the running where neither a schedule nor a runtime is named."""
ANY = (
    *("naive", "gpipe", "1f1b", "dapple", "interleaved", "looped-bfs", "chimera", "zb-h1", "zb-h2", "zb-v"),
    *("dualpipe-v", "autopipe"),
)
"""Those that "any" stands for."""
SPLIT = ("zb-h1", "zb-h2", "zb-v", "dualpipe-v")
"""In which nothing recomputes that need not."""
Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Rules:
    """What the options leave of the plans of a chain on a topology. `mini_batch`: as it was settled."""

    chain: Chain
    topology: Topology
    options: PlanOptions
    mini_batch: int

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that was named."""
        return None if self.options.runtime is None else find_runtime(self.options.runtime)

    @cached_property
    def reached(self) -> int:
        """Devices of a pipeline: one process has those of one node."""
        one_process = self.runtime is not None and self.runtime.one_process
        gpus = self.topology.gpus
        return min(gpus, self.topology.gpus_per_node) if one_process else gpus

    @property
    def schedules(self) -> tuple[str, ...]:
        """In the running."""
        requested, runtime = self.options.schedule, self.runtime
        if requested == "any":
            return tuple(name for name in ANY if runtime is None or name in runtime.schedules)
        if requested != "auto":
            return (requested,) if runtime is None or requested in runtime.schedules else ()
        if runtime is None or self.options.recompute in UNPROPOSED:
            return OPEN
        return tuple(name for name in SCHEDULES if name in runtime.schedules)

    @property
    def most_stages(self) -> int:
        """Devices in a row, at the most."""
        return min(self.reached, len(self.cut_points) + 1, self.options.max_stages or self.reached)

    @cached_property
    def cut_points(self) -> tuple[int, ...]:
        """Layers before every allowed cut."""
        names, kept = self.chain.names, []
        for layer in range(len(names) - 1):
            together = any(
                fnmatchcase(names[layer], pattern) and fnmatchcase(names[layer + 1], pattern)
                for pattern in self.options.keep_together
            )
            if self.chain.cut_after[layer] and not together and not self._is_tied(layer):
                kept.append(layer + 1)
        return tuple(kept)

    def _is_tied(self, layer: int) -> bool:
        """Whether a weight has users up to this layer and after it that may not be parted."""
        runtime, tied = self.runtime, self.chain.tied
        refused = runtime is not None and (
            runtime.tied == "none" or (runtime.tied == "ends" and any(len(own.layers) != 2 for own in tied))
        )
        between = any(own.layers[0] <= layer < own.layers[-1] for own in tied)
        return between and (refused or self.options.zero > 1)

    def _trains(self, first: int, end: int) -> bool:
        """Whether there is something to train from layer `first` to before `end`."""
        copies = (own for own in self.chain.tied if any(first <= user < end for user in own.layers))
        own = float(self.chain.trainable_bytes[first:end].sum())
        return own + sum(copy.trainable_bytes for copy in copies) > 0

    def ends(self, parts: int) -> Iterator[tuple[int, ...]]:
        """All ways to cut the layers into so many parts."""
        names = self.chain.names
        needed = {names.index(name) + 1 for name in self.options.cut_after}
        pins = [(names.index(name), stage) for name, stage in self.options.pins]
        trains = self.runtime is not None and self.runtime.trains_every_stage
        for chosen in combinations(self.cut_points, parts - 1):
            ends = (*chosen, len(names))
            starts = (0, *chosen)
            if not needed.issubset(chosen):
                continue
            if any(s >= parts or not starts[s] <= layer < ends[s] for layer, s in pins):
                continue
            if trains and not all(map(self._trains, starts, ends)):
                continue
            yield ends

    @property
    def sizes(self) -> list[int]:
        """Micro-batch sizes that divide the mini-batch, or the requested one."""
        batch, requested = self.mini_batch, self.options.micro_batches
        if requested is not None:
            return [batch // requested]
        return [size for size in range(1, batch + 1) if batch % size == 0]

    def may_have(self, size: int, ranks: tuple[Ranks, ...]) -> bool:
        """Whether stages on these devices may share micro-batches of so many samples."""
        counts = [len(own) for own in ranks]
        if self.runtime is not None:
            if len(set(counts)) > 1 or (self.runtime.replicas == "none" and counts[0] > 1):
                return False
            if size % counts[0]:
                return False
        if self.options.use_all and sum(counts) != self.reached:
            return False
        extrapolated = self.options.micro_batches is not None
        return all(
            count <= size and self.chain.reaches(-(-size // count), past_largest=extrapolated)
            for count in set(counts)
        )

    def recomputations(self, schedule: str, devices: int, micro_batches: int) -> list[tuple[Recompute, ...]]:
        """By device, every way to recompute."""
        requested, runtime = self.options.recompute, self.runtime
        by_stage = runtime is None or runtime.recompute_by_stage
        whole: list[Recompute] = ["never", "always"]
        if schedule == "gpipe" and micro_batches > 1:
            whole.append("except_last")
        if runtime is not None:
            whole = [mode for mode in whole if mode in runtime.recompute]
        if requested == FIRST_LAYERS:
            first = [first_layers_word(count) for count in range(1, len(self.chain))]
            made = dict.fromkeys(product(["never", "always", *first], repeat=devices))
            return [*made, *((mode,) * devices for mode in whole if mode == "except_last")]
        if requested == OFFLOAD:
            made = dict.fromkeys(product(["never", "always", OFFLOAD], repeat=devices))
            return [*made, *((mode,) * devices for mode in whole if mode == "except_last")]
        if requested != "auto":
            return [(mode,) * devices for mode in whole if mode == requested]
        if schedule in SPLIT:
            whole, by_stage = ["never"], False
        made = {(mode,) * devices: None for mode in whole}
        if by_stage:
            mixed: list[Recompute] = ["never", "always"]
            made |= dict.fromkeys(product(mixed, repeat=devices))
        return list(made)

    def may_recompute(self, ends: tuple[int, ...], modes: tuple[Recompute, ...]) -> bool:
        """Whether stages of so many layers may: of first layers not all, and behind them there is a cut."""
        counts = [count_first_layers(mode) for mode in modes]
        return all(
            count is None or (start + count < end and start + count in self.cut_points)
            for start, end, count in zip((0, *ends), ends, counts, strict=False)
        )

    def virtual_stages(self, schedule: str) -> tuple[int, ...]:
        """Parts of the layers on each device."""
        usual = SCHEDULES[schedule].default_virtual_stages
        if schedule not in ("interleaved", "looped-bfs"):
            return (usual,)
        if self.runtime is not None and not self.runtime.virtual_stages:
            return (1,)
        return (2, 3, 4)
