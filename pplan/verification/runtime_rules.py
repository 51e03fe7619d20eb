"""What each training runtime runs, as its documentation says: the conditions that a plan for it must meet."""

from __future__ import annotations

from dataclasses import dataclass

from .orders import ASYNCHRONOUS, SYNCHRONOUS
from .report import LineCheck

_TORCH = frozenset(
    "naive gpipe 1f1b dapple interleaved looped-bfs zb-h1 zb-h2 zb-v dualpipe-v".split()  # noqa: SIM905
)
_WHOLE = frozenset({"never", "always"})


@dataclass(frozen=True)
class Rules:
    """`replicas`: whether stages may have some, the same number each. `one_process` launches the work of all
    stages, and has the devices of one machine. `by_stage`: each stage may recompute or not for itself.
    `trains_all`: a stage without anything to train is refused. `parts`: several of the layers on a device.
    `zero`: the stages of ZeRO over the replicas of a stage. `shares`: weights that several stages may use,
    any, those of the first and the last stage ("ends"), or none. `lists`: it runs any lists of actions."""

    schedules: frozenset[str]
    recompute: frozenset[str]
    replicas: bool = True
    one_process: bool = False
    by_stage: bool = False
    trains_all: bool = False
    parts: bool = True
    zero: tuple[int, ...] = (0, 1)
    shares: str = "nothing"
    lists: bool = False


_PIPE = Rules(
    frozenset({"gpipe"}), _WHOLE | {"except_last"}, replicas=False, one_process=True, parts=False, zero=(0,)
)
_MEGATRON = Rules(frozenset({"1f1b", "interleaved"}), _WHOLE, shares="ends")
RULES = {
    "torchgpipe": _PIPE,
    "fairscale": _PIPE,
    "deepspeed": Rules(frozenset({"1f1b"}), _WHOLE, trains_all=True, parts=False, shares="any"),
    "torch": Rules(_TORCH, _WHOLE, by_stage=True, shares="any", lists=True),
    "huggingface": Rules(
        frozenset({"naive"}), _WHOLE, replicas=False, one_process=True, parts=False, zero=(0,)
    ),
    "megatron": _MEGATRON,
    "megatron-bridge": _MEGATRON,
    "torchtitan": Rules(_TORCH, _WHOLE, lists=True),
    "nemo-automodel": Rules(_TORCH - {"dualpipe-v"}, _WHOLE, lists=True),
}


def one_process(runtime: str | None) -> bool:
    """Whether one process launches the work of all stages."""
    return runtime in RULES and RULES[runtime].one_process


def check_runtime(
    check: LineCheck,
    runtime: str,
    *,
    schedule: str,
    modes: tuple[str, ...],
    replicas: list[int],
    virtual_stages: int,
    size: int,
) -> None:
    """Whether a runtime runs a pipeline."""
    check.holds(f"runtime {runtime} is unknown", runtime in RULES)
    rules = RULES[runtime]
    own = schedule not in {*SYNCHRONOUS, *ASYNCHRONOUS}
    runs = schedule in rules.schedules or (own and rules.lists)
    check.holds(f"{runtime} does not run it", runs, schedule, sorted(rules.schedules))
    check.holds(
        f"{runtime} recomputes all stages in one way", rules.by_stage or len(set(modes)) == 1, list(modes)
    )
    known = set(modes) <= rules.recompute
    check.holds(f"{runtime} does not recompute so", known, list(modes), sorted(rules.recompute))
    check.holds(f"{runtime} has as many replicas of every stage", len(set(replicas)) == 1, replicas)
    check.holds(f"{runtime} has no replicas", rules.replicas or replicas[0] == 1, replicas)
    check.holds(f"{runtime} has one stage on a device", rules.parts or virtual_stages == 1, virtual_stages)
    check.holds(
        "a micro-batch does not divide by the replicas",
        all(size % own == 0 for own in replicas),
        size,
        replicas,
    )
