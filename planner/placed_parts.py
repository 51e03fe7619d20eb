"""The parts of a chain on their devices: their tables, and the memory that each device needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import inf

from ..cost_models.device_memory import device_ledger
from ..cost_models.errors import UsageError
from ..cost_models.first_layers import whole_word
from ..cost_models.layer import Chain
from ..cost_models.memory import LedgerOptions, Training
from ..cost_models.optimizers import Precision
from ..cost_models.precision import training_precision
from ..cost_models.runtime import OFFLOAD
from ..cost_models.schedules import Program, Schedule, StageSlot
from ..cost_models.simulator.costs import Hosts
from ..cost_models.stage_bytes import StageBytes, offload_saved, receive_ahead
from ..cost_models.topology import Device, Topology
from .search.space import divide_batch
from .stage_table import StageTable, fullest_kind, ledger_options


@dataclass(frozen=True, eq=False)
class PlacedParts:
    """The parts of a chain, and the devices that a program runs them on.

    `size`: samples of a micro-batch. `bounds`: by part of the layers, in the order in which a micro-batch
    passes them, the places that it lies between. `ranks`: by device of the program, the ranks of its
    replicas, which share every micro-batch. `recompute`: by device of the program. `hosts` and `transfers`:
    as of `Costs`. `profiles`: the same layers as measured on the kinds of devices that have a profile of
    their own, by its name in the topology.
    """

    schedule: Schedule
    program: Program
    chain: Chain
    topology: Topology
    size: int
    bounds: Sequence[tuple[int, int]]
    ranks: Sequence[Sequence[int]]
    recompute: Sequence[str]
    optimizer: str
    dtype: str
    precision: Precision | None = None
    """Bytes of a parameter; None: as usual for the dtype."""
    zero: int = 0
    hosts: Hosts = "each"
    transfers: str = "overlapped"
    receives_ahead: bool = False
    """Whether the runtime has buffers of all micro-batches, as of `Runtime`."""
    profiles: Mapping[str, Chain] = field(default_factory=dict)
    host_bandwidth: float | None = None
    """Bytes per second of a device's copies to its host's memory, and back, where stages offload."""

    def part_ranks(self, part: int) -> list[int]:
        """All devices that hold a part of the layers, and so add up its gradients."""
        places = {pipe[part] for pipe in self.program.pipes}
        return sorted({rank for place in places for rank in self.ranks[place.device]})

    def per_replica_batch(self, device: int) -> int:
        """Samples of a micro-batch that a replica of this device computes, at the most."""
        return divide_batch(self.size, len(self.ranks[device]))

    def table(self, device: int) -> StageTable:
        """All stages at the size that a replica of this stage computes."""
        return _table(self.chain, self.per_replica_batch(device))

    @cached_property
    def timing_tables(self) -> list[list[tuple[StageTable, float]]]:
        """By device, for each kind among its replicas: the stages as profiled, and what their seconds are
        multiplied by. The slowest counts."""
        return [
            [
                (_table(self._profile_chain(kind), self.per_replica_batch(device)), kind.seconds_scale)
                for kind in self.topology.count_kinds(ranks)
            ]
            for device, ranks in enumerate(self.ranks)
        ]

    def _profile_chain(self, kind: Device) -> Chain:
        if kind.profile is None:
            return self.chain
        if kind.profile not in self.profiles:
            raise UsageError(
                f"the topology says that {kind.name} has a profile of its own, {kind.profile}: it is missing",
                "Give that profile, or the device's speed relative to the profiled one.",
            )
        return self.profiles[kind.profile]

    @cached_property
    def number_bytes(self) -> Precision:
        """Bytes of a weight, a gradient and a master weight."""
        return self.precision or training_precision(self.dtype).bytes

    def ledger(self, device: int, recompute: str | None = None) -> dict[str, float]:
        """Bytes by term of a device with all its chunks, as it holds most; under another recomputation, where
        it is given."""
        options = self.ledger_options(device)
        result = device_ledger(
            self.program,
            device,
            self.chunk_bytes(device, recompute),
            Training(
                self.optimizer,
                options["precision"],
                len(self.part_ranks(self.program.parts_by_slot[StageSlot(device)])),
                self.zero,
            ),
            recompute=whole_word(recompute or self.recompute[device]),
            weight_versions=self.schedule.chunk_versions
            or self.schedule.weight_versions(device, self.program.devices, self.program.micro_batches),
            copies=self.schedule.copies,
            context_bytes=options["context_bytes"],
            ahead=self._is_ahead,
        )
        return result.terms

    @property
    def _is_ahead(self) -> bool:
        """A backward in two parts, which PyTorch alone runs, is counted with its buffers always."""
        return self.receives_ahead and not self.program.splits_backward

    def ledger_options(self, device: int) -> LedgerOptions:
        """Of replicas of several kinds those of the one that takes most by itself."""
        kind = fullest_kind(map(self.topology.device, self.ranks[device]))
        return ledger_options(kind, self.dtype, self.number_bytes, self.zero)

    def smallest_device(self, device: int) -> Device:
        """Of replicas of several kinds the one with the least memory, whose limit holds for all."""
        kinds = map(self.topology.device, self.ranks[device])
        return min(kinds, key=lambda kind: inf if kind.memory_bytes is None else kind.memory_bytes)

    def chunk_bytes(self, device: int, recompute: str | None = None) -> list[StageBytes]:
        """Of each chunk of a device; under another recomputation, where it is given."""
        parts = [self.program.parts_by_slot[StageSlot(device, chunk)] for chunk in range(self.program.chunks)]
        table, word = self.table(device), recompute or self.recompute[device]
        each = [table.bytes_between(*self.bounds[part], zero=self.zero, recompute=word) for part in parts]
        if self._is_ahead:
            each = [receive_ahead(own, self.program.micro_batches) for own in each]
        return [offload_saved(own) for own in each] if word == OFFLOAD else each

    def offloaded_bytes(self, part: int) -> float:
        """What a micro-batch of a part keeps on the host of each replica; 0 where its device does not
        offload."""
        device, (start, end) = self.program.pipes[0][part].device, self.bounds[part]
        if self.recompute[device] != OFFLOAD:
            return 0.0
        return float(self.table(device).bytes_between(start, end).offloaded)

    def copy_seconds(self, part: int) -> float:
        """Of that to the host, in every forward; and back, in every backward."""
        copied = self.offloaded_bytes(part)
        if not copied:
            return 0.0
        if self.host_bandwidth is None:
            raise UsageError(
                "a stage offloads, and it is not said how fast its device copies to the host's memory",
                "Make the plan again with pplan solve.",
            )
        return copied / self.host_bandwidth


@lru_cache(maxsize=16)
def _table(chain: Chain, size: int) -> StageTable:
    return StageTable.of(chain, size, past_largest=True)
