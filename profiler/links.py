"""Measures the links between the devices of the processes that torchrun started."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ..cost_models.errors import MachineError
from ..cost_models.transformer.kernel_table import CollectiveName
from .local_machine import device_memory_bytes, device_name, versions
from .measured_links import MeasuredLinks, Member, PairTimes
from .torchrun_env import TorchrunEnv

KIB = 2**10
SIZES = {
    "nccl": tuple(KIB * 4**power for power in range(8)),
    "gloo": (KIB, 16 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB, 16384 * KIB),
}
"""Bytes, up to 16 MiB; fewer where the processor moves them."""
REPEATS = 20
TIMEOUT_SECONDS = 60.0
WARM_UPS = 3
EVERY_PAIR_UP_TO = 8
"""Processes: 28 pairs. With more, one pair of each level stands for the others."""
ELEMENT = 4
"""Bytes of a float32: what is summed by an all-reduce."""


def measure_links(
    process: TorchrunEnv,
    *,
    sizes: Sequence[int] | None = None,
    repeats: int = REPEATS,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> MeasuredLinks:
    """Measures pairs of processes, both ways, and the all-reduce over all, by `sizes` in bytes.

    Called by every process that torchrun started; each returns the same. Sizes are rounded up to whole
    float32 elements. Raises UsageError, and MachineError where devices are missing or where a process is
    gone or does not answer within `timeout_seconds`.
    """
    with meeting(process, timeout_seconds) as world:
        return measure_pairs(world, sizes, repeats)


@dataclass(frozen=True)
class World:
    """The processes of torchrun, each with one device, as they meet.

    Attributes:
        process: This process.
        members: All processes.
        backend: `nccl` between GPUs, `gloo` between processors.
        device: Device of this process.
        timeout: How long to wait for a process that is silent.
        group: All processes, by the backend; None for the default group, which is one of gloo.
    """

    process: TorchrunEnv
    members: list[Member]
    backend: str
    device: torch.device
    timeout: timedelta
    group: dist.ProcessGroup | None


@contextmanager
def meeting(process: TorchrunEnv, timeout_seconds: float) -> Iterator[World]:
    """Let all processes of torchrun meet; afterwards they part.

    Raises:
        MachineError: Devices are missing, or a process is gone or does not answer within `timeout_seconds`.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise MachineError("this torch is built without gloo", "Install torch from pytorch.org.")
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout_seconds)
    with _listening("meeting the others", timeout_seconds):
        dist.init_process_group(
            "gloo", rank=process.rank, world_size=process.world_size, init_method="env://", timeout=wait
        )
    try:
        with _listening("measuring", timeout_seconds):
            yield _meet(process, wait)
    except BaseException:
        # NCCL waits for what hangs when it is taken down; the process ends with this error anyway.
        if not torch.cuda.is_available():
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def _listening(doing: str, timeout_seconds: float) -> Iterator[None]:
    """Turns what torch.distributed raises for a process that is gone or silent into a MachineError."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MachineError(
            "machine measure links: the transfers do not fit in the GPU's memory",
            "Give smaller ones, as in sizes=(1024, 1048576), or end what else uses the GPU.",
        ) from error
    except RuntimeError as error:  # gloo's are plain ones, the others derive from it
        first = re.sub(r"^\[\S*\] *", "", (str(error).splitlines() or [""])[0])  # gloo's line of C++
        raise MachineError(
            f"machine measure links: lost another process while {doing}: {first[:200]}",
            f"It has failed, or did not answer within {timeout_seconds:g} s (`timeout_seconds`): see what it "
            "printed, and whether the machines reach one another.",
        ) from error


@dataclass(frozen=True)
class _Own:
    """What a process tells the others about itself."""

    host: tuple[str, int]
    device: torch.device
    identity: str
    """Two processes with the same one share a GPU."""
    name: str
    memory_bytes: int | None


def _meet(process: TorchrunEnv, wait: timedelta) -> World:
    own = _own(process)
    everyone: list[_Own] = gather_from_all(own)
    backend = _backend(everyone)
    group: dist.ProcessGroup | None = None
    if backend == "nccl":
        torch.cuda.set_device(own.device)
        nccl_group = dist.new_group(backend="nccl", timeout=wait)
        group = (
            nccl_group if isinstance(nccl_group, dist.ProcessGroup) else None
        )  # it is a number for who is not in it
    return World(process, _members(everyone), backend, own.device, wait, group)


def measure_pairs(world: World, sizes: Sequence[int] | None, repeats: int) -> MeasuredLinks:
    """Measure pairs of processes, both ways, and the all-reduce over all."""
    members, process = world.members, world.process
    whole_sizes = sorted({-(-size // ELEMENT) * ELEMENT for size in sizes or SIZES[world.backend]})
    bench = LinkBench(process.rank, world.device, world.group, repeats, world.timeout.total_seconds())
    seconds: dict[tuple[int, int], list[float]] = {}
    pairs = choose_pairs([member.node for member in members])
    for first, second in pairs:
        for way in ((first, second), (second, first)):
            seconds[way] = bench.transfers(*way, whole_sizes)
    reduced = [bench.all_reduce(size) for size in whole_sizes]
    everywhere: list[dict[tuple[int, int], list[float]]] = gather_from_all(seconds)
    slowest: list[list[float]] = gather_from_all(reduced)
    return MeasuredLinks(
        backend=world.backend,
        members=members,
        sizes=whole_sizes,
        repeats=repeats,
        pairs=[
            PairTimes(
                first=first,
                second=second,
                there_seconds=everywhere[first][first, second],
                back_seconds=everywhere[second][second, first],
            )
            for first, second in pairs
        ],
        all_reduce_seconds=[max(each) for each in zip(*slowest, strict=True)],
        made_by=versions(),
    )


def choose_pairs(nodes: Sequence[int]) -> list[tuple[int, int]]:
    """The pairs of ranks to measure, of processes on these nodes: all, or of many one for each level."""
    every = list(combinations(range(len(nodes)), 2))
    if len(nodes) <= EVERY_PAIR_UP_TO:
        return every
    inside = next((pair for pair in every if nodes[pair[0]] == nodes[pair[1]]), None)
    between = next((pair for pair in every if nodes[pair[0]] != nodes[pair[1]]), None)
    return [pair for pair in (inside, between) if pair is not None]


def gather_from_all(own: Any) -> list[Any]:
    """Gather what every process has, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return everyone


def _own(process: TorchrunEnv) -> _Own:
    """The device of this process: its own by number, or the only one that it is shown."""
    # Two machines may have one name (containers): torchrun's number of the node tells them apart.
    host = socket.gethostname(), -1 if process.node is None else process.node
    if not torch.cuda.is_available():
        cpu = torch.device("cpu")
        return _Own(host, cpu, "", device_name(cpu), None)
    device = torch.device("cuda", process.local_rank % torch.cuda.device_count())
    identity = str(torch.cuda.get_device_properties(device).uuid)
    return _Own(host, device, identity, device_name(device), device_memory_bytes(device))


def _backend(everyone: Sequence[_Own]) -> str:
    """Raises MachineError where the processes' devices do not go together."""
    kinds = {one.device.type for one in everyone}
    if kinds == {"cpu"}:
        return "gloo"
    if len(kinds) > 1:
        without = [rank for rank, one in enumerate(everyone) if one.device.type == "cpu"]
        raise MachineError(
            f"machine measure links: rank {without[0]} has no CUDA device, others have one",
            "Start it on machines of one kind, or everywhere with CUDA_VISIBLE_DEVICES= for the processors.",
        )
    counts: dict[str, int] = {}
    for rank, one in enumerate(everyone):
        if one.identity in counts:
            raise MachineError(
                f"machine measure links: ranks {counts[one.identity]} and {rank} share one GPU ({one.name})",
                "Start as many processes on a machine as it has GPUs: torchrun --nproc-per-node gpu.",
            )
        counts[one.identity] = rank
    if not dist.is_nccl_available():
        raise MachineError("this torch is built without NCCL", "Install torch for CUDA from pytorch.org.")
    return "nccl"


def _members(everyone: Sequence[_Own]) -> list[Member]:
    hosts = list(dict.fromkeys(one.host for one in everyone))
    return [
        Member(rank=rank, node=hosts.index(one.host), device_name=one.name, memory_bytes=one.memory_bytes)
        for rank, one in enumerate(everyone)
    ]


@dataclass(frozen=True)
class LinkBench:
    """Times what this process takes part in. `group`: None for the gloo group of all."""

    rank: int
    device: torch.device
    group: dist.ProcessGroup | None
    repeats: int
    timeout_seconds: float

    def transfers(self, sender: int, receiver: int, sizes: Sequence[int]) -> list[float]:
        """Seconds of one transfer by size, on the sender; nothing on the others."""
        empty = self._round_trip(sender, receiver, ELEMENT)
        trips = [self._round_trip(sender, receiver, size) for size in sizes]
        # The larger way takes at least half of the round trip, whatever the noise.
        return [max(trip - empty / 2, trip / 2) for trip in trips] if self.rank == sender else []

    def all_reduce(self, size: int) -> float:
        """Seconds to sum `size` bytes over all processes."""
        tensor = self._tensor(size)
        dist.barrier()
        return self._median(lambda: dist.all_reduce(tensor, group=self.group))

    def collective(self, name: CollectiveName, size: int, group: dist.ProcessGroup) -> float:
        """Seconds of a collective of `size` bytes (as `Collective` counts them) in this process's group."""
        devices, rank = group.size(), dist.get_rank(group)
        whole = self._tensor(-(-size // (ELEMENT * devices)) * ELEMENT * devices)
        part = self._tensor(whole.nbytes // devices)
        ranks = dist.get_process_group_ranks(group)
        following, before = ranks[(rank + 1) % devices], ranks[rank - 1]
        arriving = torch.empty_like(whole)

        def ring() -> None:
            sends = dist.P2POp(dist.isend, whole, following, group)
            receives = dist.P2POp(dist.irecv, arriving, before, group)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()

        runs: dict[CollectiveName, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_to_all": lambda: dist.all_to_all_single(arriving, whole, group=group),
            "ring": ring,
        }
        dist.barrier()
        return self._median(runs[name])

    def _round_trip(self, sender: int, receiver: int, size: int) -> float:
        """Seconds of `size` bytes there and one element back; 0 for a process that only waits."""
        seconds = 0.0
        if self.rank in (sender, receiver):
            sent, answer = self._tensor(size), self._tensor(ELEMENT)

            def ask() -> None:
                dist.send(sent, receiver, group=self.group)
                dist.recv(answer, receiver, group=self.group)

            def reply() -> None:
                dist.recv(sent, sender, group=self.group)
                dist.send(answer, sender, group=self.group)

            seconds = self._median(ask if self.rank == sender else reply)
        dist.barrier()
        return seconds

    def _tensor(self, size: int) -> torch.Tensor:
        return torch.zeros(size // ELEMENT, dtype=torch.float32, device=self.device)

    def _median(self, run: Callable[[], object]) -> float:
        """Seconds of one run, after some that do not count."""
        samples = []
        for _ in range(WARM_UPS + self.repeats):
            start = time.perf_counter()
            run()
            self._settle()
            samples.append(time.perf_counter() - start)
        return median(samples[WARM_UPS:])

    def _settle(self) -> None:
        """Waits for the device, not for ever: a synchronization with a process that is gone has no end."""
        if self.device.type != "cuda":
            return
        event: Any = torch.cuda.Event  # has no annotations
        done, end = event(), time.monotonic() + self.timeout_seconds
        done.record()
        while not done.query():
            if time.monotonic() > end:
                raise RuntimeError("NCCL did not finish")
