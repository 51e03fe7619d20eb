"""What is verified (a plan with its profile and machine as read), and what each training runtime can run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .documents import Table
from .layer_costs import Layers
from .orders import ASYNCHRONOUS, SYNCHRONOUS, ScheduleOrder, make_order, read_written_order
from .report import ImpossiblePlan, LineCheck
from .stated_machine import StatedMachine
from .stated_plan import StatedPlan, first_layers
from .stated_training import read_training
from .step_events import SimulatedFigures

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
    any, those of the first and the last stage ("ends"), or none. `lists`: it runs any lists of actions, as
    PyTorch's pipelining does, which has buffers for what a stage receives in a whole step."""

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
    "torch": Rules(_TORCH, _WHOLE | {"first_layers", "offload"}, by_stage=True, shares="any", lists=True),
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


def receives_ahead(runtime: str | None) -> bool:
    """Whether it is PyTorch's pipelining that runs the stages."""
    return runtime in RULES and RULES[runtime].lists


def check_runtime_rules(
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
    check.require(f"runtime {runtime} is unknown", runtime in RULES)
    rules = RULES[runtime]
    own = schedule not in {*SYNCHRONOUS, *ASYNCHRONOUS}
    runs = schedule in rules.schedules or (own and rules.lists)
    check.require(f"{runtime} does not run it", runs, schedule, sorted(rules.schedules))
    check.require(
        f"{runtime} recomputes all stages in one way", rules.by_stage or len(set(modes)) == 1, list(modes)
    )
    recomputes_so = {"first_layers" if first_layers(own) else own for own in modes} <= rules.recompute
    check.require(f"{runtime} does not recompute so", recomputes_so, list(modes), sorted(rules.recompute))
    check.require(f"{runtime} has as many replicas of every stage", len(set(replicas)) == 1, replicas)
    check.require(f"{runtime} has no replicas", rules.replicas or replicas[0] == 1, replicas)
    check.require(f"{runtime} has one stage on a device", rules.parts or virtual_stages == 1, virtual_stages)
    check.require(
        "a micro-batch does not divide by the replicas",
        all(size % own == 0 for own in replicas),
        size,
        replicas,
    )


@dataclass(frozen=True, eq=False)
class VerificationInputs:
    """A plan, and what its profile and its machine say; None where there is no profile (`no_profile` says
    why), or no machine in the plan. `is_file`: whether the profile is the very file, whose SHA-256 counts.
    `profiles`: of the kinds of devices that have their own, as far as they are there."""

    plan: StatedPlan
    profile: Table | None
    profile_sha256: str
    is_file: bool
    no_profile: str
    layers: Layers | None
    machine: StatedMachine | None
    profiles: dict[str, Layers]
    shared_ports: bool = True

    def figures(self, check: LineCheck) -> SimulatedFigures:
        """The figures computed from the plan; the line is skipped where the files do not have enough for
        them."""
        if isinstance(self._figures, str):
            check.skip(self._figures)
        return self._figures

    @cached_property
    def _figures(self) -> SimulatedFigures | str:
        plan, layers, machine = self.plan, self.layers, self.machine
        if layers is None or machine is None:
            return self.no_profile if layers is None else "the plan does not say what machine it was made for"
        if not _is_sound(plan, layers, machine):
            return "its layers or devices cannot be: see the lines above"
        return SimulatedFigures(
            schedule=plan.schedule,
            order=planned_order(plan),
            size=plan.micro_batch_size,
            ends=plan.ends,
            devices=tuple(stage.devices for stage in plan.stages),
            modes=plan.modes,
            one_process=one_process(plan.runtime),
            receives_ahead=receives_ahead(plan.runtime),
            layers=layers,
            profiles=self.profiles,
            machine=machine,
            training=read_training(plan),
            shared_ports=self.shared_ports,
            host_bandwidth=plan.options.optional_number("host_bandwidth"),
        )


def _is_sound(plan: StatedPlan, layers: Layers, machine: StatedMachine) -> bool:
    """Whether the layers follow one another to the last, on devices that there are."""
    firsts = [0, *plan.ends[:-1]]
    chained = [stage.first_layer for stage in plan.stages] == firsts and plan.ends[-1] == len(layers)
    placed = all(own.devices and max(own.devices) < machine.gpus for own in plan.stages)
    return (
        chained
        and placed
        and all(own.first_layer <= own.last_layer for own in plan.stages)
        and "selective" not in plan.modes
    )


def planned_order(plan: StatedPlan) -> ScheduleOrder:
    """The order of the plan's schedule; of an asynchronous one the start of it, for the memory alone.

    Raises NotLegal, NotChecked."""
    devices, left = divmod(len(plan.stages), plan.virtual_stages)
    if left:
        raise ImpossiblePlan(
            f"{len(plan.stages)} parts do not divide into {plan.virtual_stages} on every device"
        )
    if plan.schedule == "wpipe":
        return make_order("wpipe", devices, 4 * devices, plan.virtual_stages)
    if plan.schedule in ASYNCHRONOUS:
        return make_order("1f1b", devices, 2 * devices + 2, plan.virtual_stages)
    if plan.order:
        return read_written_order(plan.order, devices, plan.micro_batches, plan.virtual_stages)
    return make_order(plan.schedule, devices, plan.micro_batches, plan.virtual_stages)
