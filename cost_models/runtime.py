"""What each training runtime can run: the facts the planner restricts its search by, and the exporters obey.

Sources: torchgpipe (Kim et al., "torchgpipe", arXiv:2004.09910; version 0.0.7), FairScale 0.4.13 (its
`nn.Pipe` is a fork of torchgpipe), DeepSpeed 0.19.8 (`runtime/pipe/schedule.py`: TrainSchedule is 1F1B;
`PipeDataParallelTopology`: the same number of replicas on every stage), torch.distributed.pipelining of
PyTorch 2.11 to 2.15 (`schedules.py`: its classes, and a runtime for any list of actions; a device mesh of
stages and replicas has the same number of them on every stage), Hugging Face transformers 5 (`device_map`:
one device after another), megatron-core 0.16.1 (`pipeline_parallel/schedules.py`), torchtitan 0.3.0 and NeMo
Automodel 0.7 (torch.distributed.pipelining's classes, or a file of actions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from .errors import UsageError


@dataclass(frozen=True)
class Runtime:
    """A training runtime.

    `schedules` and `recompute` are the words of the plan file. `replicas`: "none", or "equal" where every
    stage has the same number. `one_process`: one Python process launches the work of all stages, so that
    their host times add up, and the devices must be those of one machine. `transfers`: what its devices do
    meanwhile, a word of the simulator's `Costs`.
    """

    name: str
    schedules: frozenset[str]
    recompute: frozenset[str]
    replicas: Literal["none", "equal"]
    one_process: bool
    trains_every_stage: bool
    """Whether a stage without parameters is refused."""
    recompute_by_stage: bool = False
    """Whether each stage may recompute or not, for itself."""
    transfers: str = "overlapped"
    virtual_stages: bool = False
    """Whether a device may hold several stages."""

    def runs_replicas(self, replicas: Sequence[int]) -> bool:
        """Whether the stages may have these numbers of replicas."""
        return len(set(replicas)) == 1 and (self.replicas == "equal" or replicas[0] == 1)


def _one_process_gpipe(name: str) -> Runtime:
    return Runtime(
        name,
        frozenset({"gpipe"}),
        frozenset({"never", "always", "except_last"}),
        replicas="none",
        one_process=True,
        trains_every_stage=False,
    )


def _of_transformers(name: str, schedules: frozenset[str]) -> Runtime:
    return Runtime(
        name,
        schedules,
        frozenset({"never", "always"}),
        replicas="equal",
        one_process=False,
        trains_every_stage=False,
        virtual_stages=True,
    )


_TORCH = frozenset({"naive", "gpipe", "1f1b", "dapple", "interleaved", "looped-bfs"}) | {
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe-v",
}
"""What torch.distributed.pipelining has classes for, and what it is given as lists of actions."""

RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime
    for runtime in (
        _one_process_gpipe("torchgpipe"),
        _one_process_gpipe("fairscale"),
        Runtime(
            "deepspeed",
            frozenset({"1f1b"}),
            frozenset({"never", "always"}),
            replicas="equal",
            one_process=False,
            trains_every_stage=True,
        ),
        Runtime(
            "torch",
            _TORCH,
            frozenset({"never", "always"}),
            replicas="equal",
            one_process=False,
            trains_every_stage=False,
            recompute_by_stage=True,
            virtual_stages=True,
        ),
        Runtime(
            "huggingface",
            frozenset({"naive"}),
            frozenset({"never", "always"}),
            replicas="none",
            one_process=True,
            trains_every_stage=False,
        ),
        _of_transformers("megatron", frozenset({"1f1b", "interleaved"})),
        _of_transformers("megatron-bridge", frozenset({"1f1b", "interleaved"})),
        _of_transformers("torchtitan", _TORCH),
        _of_transformers("nemo-automodel", _TORCH - {"dualpipe-v"}),
    )
}


def runtime_named(name: str) -> Runtime:
    """The runtime of that name. Raises UsageError naming the known ones."""
    if name not in RUNTIMES:
        raise UsageError(f"unknown runtime {name!r}", f"Known runtimes: {', '.join(RUNTIMES)}.")
    return RUNTIMES[name]
