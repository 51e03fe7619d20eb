"""`pplan.lint`: the structure, the sums and the feasibility of a plan file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from ..cost_models.errors import UsageError
from ..cost_models.memory import recompute_kind, recompute_kinds, repeat_word
from ..cost_models.program import Program
from ..cost_models.quantities import MOST_ACTIONS
from ..cost_models.runtime import OFFLOAD, Runtime, find_runtime
from ..cost_models.schedules import SCHEDULES, find_schedule
from ..cost_models.text_files import KEY, decode_text, is_unchanged, read_bytes
from ..cost_models.topology_file import ProfiledDevice, make_topology, parse_topology
from ..planner.cut_limits import limit_cuts
from ..planner.plan_degrees import SAME
from ..planner.plan_file import TIE, Baseline, Plan, PlanRow, ProfileReference, most_memory_bytes
from ..profiler.profile_file import Profile
from .load import check_is_plan, profile_and_reference, profile_next_to

if TYPE_CHECKING:
    from ..cost_models.layer import Chain
    from ..cost_models.topology import Topology

EXACT = 1e-8
"""The gap up to which a plan may be called exact."""
LOST = 1e-3
"""Share of the longest stage, to which tolerances of seconds refer: differences of long sums lose digits."""
UNCONSTRAINED = ("one-gpu", "data-parallel")
"""Baselines that may be faster than the plan: options and runtimes do not limit them."""

MOST_CHARACTERS = 200
"""Length of a list in a report."""
_NO_MACHINE = "the plan does not say what machine it was made for"

State = Literal["ok", "differs", "not checked"]
Value = float | int | str | None


@dataclass(frozen=True)
class Line:
    """One line of a report.

    `plan_value` is in the plan, `expected_value` follows from other values; both are None where there is
    nothing to compare. `detail` says what was checked, or why it was not.
    """

    name: str
    state: State
    detail: str
    plan_value: Value = None
    expected_value: Value = None


@dataclass(frozen=True)
class PlanReport:
    """All lines of a plan."""

    plan: str
    profile: str
    lines: tuple[Line, ...]

    @property
    def agrees(self) -> bool:
        """True if no line differs."""
        return not self.differing

    @property
    def differing(self) -> list[Line]:
        """The lines that differ."""
        return [line for line in self.lines if line.state == "differs"]

    @property
    def unchecked(self) -> list[Line]:
        """The lines that were not checked."""
        return [line for line in self.lines if line.state == "not checked"]

    def line(self, name: str) -> Line:
        """Return the line of that name. Raises KeyError."""
        return {line.name: line for line in self.lines}[name]

    def to_json(self) -> str:
        """Return the report as JSON."""
        lines = [asdict(line) for line in self.lines]
        document = {"plan": self.plan, "profile": self.profile, "agrees": self.agrees, "lines": lines}
        return json.dumps(document, indent=1) + "\n"


def lint(plan: Plan | str | Path, profile: Profile | str | Path | None = None) -> PlanReport:
    """Check the structure, the sums and the feasibility of a plan.

    Costs, memory terms, the order of actions and the step are not computed again: `pplan.simulate` does that.

    >>> import pplan
    >>> report = pplan.lint("gpt.plan.json")
    >>> report.agrees, report.differing
    (True, [])

    Args:
        plan: The plan, or the path of its file.
        profile: Its profile, or the path of its file. Defaults to the file that the plan names, next to the
            plan's.

    Returns:
        The report: `agrees`; `lines`, each with its `name`, its `state` ("ok", "differs" or "not checked"),
        `plan_value` and `expected_value`; `differing`; `to_json()`.

    Raises:
        UsageError: An argument is neither a plan or profile nor a path.
        FileError: A file cannot be read, or is broken.
    """
    inputs = _read(plan, profile)
    return PlanReport(inputs.name, inputs.profile_name, tuple(_check_lines(inputs)))


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What is checked. `text`: of the plan's file. `folder`: where profiles of kinds of devices are."""

    plan: Plan
    text: str | None
    name: str
    profile: Profile | None
    profile_name: str
    reference: ProfileReference | None
    is_profile_file: bool
    chain: Chain | None
    topology: Topology | None
    folder: Path

    @property
    def no_profile(self) -> str:
        """Why lines that need the profile are not checked."""
        if self.plan.training is not None:
            return "the plan is from a configuration, without a profile of its layers"
        file = self.plan.profile.file or "a profile without a name"
        return f"no profile was given, and {file[:80]} is not beside the plan"

    @property
    def runtime(self) -> Runtime | None:
        """The runtime that the plan is for."""
        return None if self.plan.runtime is None else find_runtime(self.plan.runtime)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The first layer of each stage, and the layer after its last."""
        return [(stage.first_layer, stage.last_layer + 1) for stage in self.plan.stages]

    @property
    def modes(self) -> list[str]:
        """What each stage recomputes."""
        return [stage.recompute or self.plan.recompute for stage in self.plan.stages]


def _read(plan: Plan | str | Path, profile: Profile | str | Path | None) -> _Inputs:
    text, name, folder = None, "plan", Path()
    if isinstance(plan, str | Path):
        path = Path(plan)
        text, name, folder = decode_text(read_bytes(path, "plan"), path, "plan"), str(path), path.parent
        plan = Plan.parse(text, name)
        file = profile_next_to(path, plan)
        finds = profile is None and plan.training is None and plan.profile.file and file.is_file()
        profile = file if finds else profile
    elif isinstance(profile, str | Path):
        folder = Path(profile).parent
    check_is_plan(plan)
    measured, reference = (None, None) if profile is None else profile_and_reference(profile, "", "", plan)
    is_file = isinstance(profile, str | Path)
    return _Inputs(
        plan=plan,
        text=text,
        name=name,
        profile=measured,
        profile_name=str(profile) if is_file else "profile" if measured else "",
        reference=reference,
        is_profile_file=is_file,
        chain=measured.chain() if measured else None,
        topology=_topology(plan, name),
        folder=folder,
    )


def _topology(plan: Plan, name: str) -> Topology | None:
    if not plan.machine:
        return None
    machine = parse_topology(plan.machine, Path(f"{name}: machine"))
    return make_topology(gpus=machine.gpus or 1, file=machine, profiled=ProfiledDevice("cpu", "", None))


class _LineDone(Exception):
    """Ends the checks of a line."""

    def __init__(self, state: State, detail: str, plan_value: Value = None, expected: Value = None) -> None:
        super().__init__(detail)
        self.state, self.detail, self.values = state, detail, (plan_value, expected)


class _Checks:
    """The checks of a line. The first difference ends it."""

    def require(self, what: str, fine: bool, plan_value: object = None, expected: object = None) -> None:
        """A condition; `what` says what is wrong."""
        if not fine:
            raise _LineDone("differs", what, _plain(plan_value), _plain(expected))

    def same(self, what: str, plan_value: object, expected: object) -> None:
        """Two equal values."""
        self.require(what, plan_value == expected, plan_value, expected)

    def near(self, what: str, plan_value: float, expected: float, around: float = 0.0) -> None:
        """Two values that are equal within 1e-9 of the larger, or of `around`."""
        difference = abs(plan_value - expected)
        fine = difference <= TIE * max(abs(plan_value), abs(expected), around)
        self.require(what, isfinite(expected) and fine, plan_value, expected)

    def at_most(self, what: str, plan_value: float, limit: float) -> None:
        """A value that is not above a limit."""
        self.require(what, plan_value <= limit * (1 + TIE), plan_value, limit)

    def skip(self, why: str) -> NoReturn:
        """A line that cannot be checked."""
        raise _LineDone("not checked", why)


def _plain(value: object) -> Value:
    return value if value is None or isinstance(value, int | float | str) else str(value)[:MOST_CHARACTERS]


_Check = Callable[[_Checks, _Inputs], None]


def _check_lines(inputs: _Inputs) -> Iterator[Line]:
    for name, detail, check in (*_LINES, *_comparison_lines(inputs.plan), _FILE):
        try:
            check(_Checks(), inputs)
        except _LineDone as done:
            yield Line(name, done.state, done.detail, *done.values)
        except UsageError as error:
            yield Line(name, "differs", error.what)
        except IndexError:
            yield Line(name, "differs", "it names layers or devices that do not exist")
        else:
            yield Line(name, "ok", detail)


def _check_hash(check: _Checks, inputs: _Inputs) -> None:
    if inputs.text is None or f'"{KEY}"' not in inputs.text:
        check.skip("the plan has no file with a hash of its content")
    check.require("the file was changed after pplan wrote it", is_unchanged(inputs.text))


def _check_profile(check: _Checks, inputs: _Inputs) -> None:
    plan, profile, reference = inputs.plan, inputs.profile, inputs.reference
    if profile is None or reference is None:
        check.skip(inputs.no_profile)
    check.same("model", plan.model, profile.model)
    for key in ("dtype", "granularity", "estimated", "tensor_parallel", "has_batch_norms"):
        check.same(key, getattr(plan.profile, key), getattr(reference, key))
    for key in ("device_name", "device"):
        check.same(key, getattr(plan.profile, key) or getattr(reference, key), getattr(reference, key))
    check.require("amp", plan.precision is None or plan.profile.amp == reference.amp, plan.profile.amp)
    if plan.profile.sha256 != reference.sha256 and not inputs.is_profile_file:
        check.skip("the profile was not given as the file that the plan names: no SHA-256 to compare")
    check.same("SHA-256 of the profile file", plan.profile.sha256, reference.sha256)


def _check_names(check: _Checks, inputs: _Inputs) -> None:
    plan = inputs.plan
    names = plan.layer_names if inputs.chain is None else list(inputs.chain.names)
    check.same("number of layers", sum(plan.balance), len(names) or sum(plan.balance))
    check.require("layer names", plan.layer_names in ([], names), plan.layer_names, names)
    if inputs.reference is None:
        check.skip(inputs.no_profile)
    expected = inputs.reference.layers_sha256
    check.same("SHA-256 of the layer names", plan.profile.layers_sha256 or expected, expected)


def _check_cuts(check: _Checks, inputs: _Inputs) -> None:
    plan, chain = inputs.plan, inputs.chain
    stages, most = len(plan.stages) // plan.virtual_stages, plan.options.max_stages
    check.at_most("more stages than requested", stages, most or stages)
    if chain is None:
        check.skip(inputs.no_profile)
    allowed, limits = limit_cuts(chain, plan.options)
    for _, end in inputs.bounds[:-1]:
        name = f"layer {end - 1}, {chain.names[end - 1]}"
        check.require(f"the profile allows no cut after {name}", bool(chain.cut_after[end - 1]))
        check.require(f"`keep_together` allows no cut after {name}", bool(allowed.cut_after[end - 1]))
    check.require("`cut_after` or `pins` ask for other stages", limits.allow(inputs.bounds))


def _check_devices(check: _Checks, inputs: _Inputs) -> None:
    plan, topology, runtime = inputs.plan, inputs.topology, inputs.runtime
    groups = list(dict.fromkeys(tuple(sorted(stage.devices)) for stage in plan.stages))
    used = [device for group in groups for device in group]
    check.require("a device is used by different stages", len(set(used)) == len(used))
    check.same("stages of each device", len(plan.stages), len(groups) * plan.virtual_stages)
    if topology is None:
        check.skip(_NO_MACHINE)
    reachable = topology.gpus
    if runtime is not None and runtime.one_process:
        reachable = min(reachable, topology.gpus_per_node)
    check.at_most("a device that the machine or the process does not have", max(used), reachable - 1)
    check.same("gpus", plan.gpus or topology.gpus, topology.gpus)
    check.same("gpus_per_node", plan.gpus_per_node or topology.gpus_per_node, topology.gpus_per_node)
    if plan.options.use_all and not (plan.is_fixed_partition or plan.is_replanned):
        check.same("devices in use, where all were requested", len(used), reachable)


def _check_options(check: _Checks, inputs: _Inputs) -> None:
    plan, options = inputs.plan, inputs.plan.options
    check.at_most("replicas of a micro-batch", max(plan.replicas), plan.micro_batch_size)
    free: tuple[object, ...] = (None, "auto", "any", "synthesized", "first_layers", OFFLOAD)
    for name in ("mini_batch", "micro_batches", "schedule", "recompute", "precision", "gradient_dtype"):
        requested = getattr(options, name)
        check.require(
            f"{name} is not the requested one", requested in (*free, getattr(plan, name)), requested
        )
    if "options" in plan.model_fields_set:  # files may leave them out
        for name in ("optimizer", "zero", "runtime"):
            check.same(f"{name}, and the requested one", getattr(plan, name), getattr(options, name))
    sharers = plan.profile.tensor_parallel
    check.require("tp is not a requested one", sharers in (options.tp or (sharers,)), sharers, options.tp)


def _check_recompute(check: _Checks, inputs: _Inputs) -> None:
    plan = inputs.plan
    if plan.training is not None:
        return  # its degrees say what runs again
    for number, stage in enumerate(plan.stages):
        mixed = plan.recompute == "by_stage" and stage.recompute is not None
        fine = mixed or (stage.recompute in (None, plan.recompute) and plan.recompute != "by_stage")
        check.require(f"recomputation of stage {number}", fine, stage.recompute, plan.recompute)
        partial = recompute_kind(inputs.modes[number]) in ("first_layers", OFFLOAD)
        fine = not partial or plan.schedule in ("1f1b", "gpipe")
        check.require(f"{stage.recompute} is for 1f1b and gpipe", fine, plan.schedule)
    last = plan.schedule == "gpipe" or "except_last" not in inputs.modes
    check.require("except_last is for gpipe", last, plan.schedule)


def _check_schedule(check: _Checks, inputs: _Inputs) -> None:
    devices: dict[int, list[int]] = {}
    for stage, place in zip(inputs.plan.stages, _program(check, inputs.plan).pipes[0], strict=True):
        check.same(
            "devices of stages that share them",
            stage.devices,
            devices.setdefault(place.device, stage.devices),
        )


def _program(check: _Checks, plan: Plan) -> Program:
    if not SCHEDULES[plan.schedule].synchronous:
        check.skip(f"{plan.schedule} is asynchronous: it is never flushed")
    if 3 * len(plan.stages) * plan.micro_batches > MOST_ACTIONS:
        check.skip(f"{plan.micro_batches} micro-batches on {len(plan.stages)} stages are too many actions")
    devices = len(plan.stages) // plan.virtual_stages
    return find_schedule(plan.schedule).program(devices, plan.micro_batches, plan.virtual_stages)


def _check_runtime(check: _Checks, inputs: _Inputs) -> None:
    plan, runtime, chain = inputs.plan, inputs.runtime, inputs.chain
    if runtime is None:
        return
    _check_runtime_runs(check, runtime, plan, inputs.modes, plan.replicas)
    check.require(f"{runtime.name} does not run this stage of ZeRO", plan.zero in runtime.zero, plan.zero)
    if chain is None:
        check.skip(inputs.no_profile)
    for weight in chain.tied:
        users = [stage for stage, bounds in enumerate(inputs.bounds) if weight.is_used(*bounds)]
        fine = len(users) == 1 or runtime.shares_weight(users, len(plan.stages) - 1)
        check.require(f"{runtime.name} keeps no copies of {weight.name}", fine, users)
    for number, (first, end) in enumerate(inputs.bounds if runtime.trains_every_stage else []):
        shared = any(weight.trainable_bytes and weight.is_used(first, end) for weight in chain.tied)
        trains = shared or bool(chain.trainable_bytes[first:end].any())
        check.require(f"stage {number} has nothing to train, which {runtime.name} refuses", trains)


def _check_runtime_runs(
    check: _Checks, runtime: Runtime, plan: Plan | PlanRow, modes: Sequence[str], replicas: Sequence[int]
) -> None:
    for problem in runtime.find_problems(
        plan.schedule,
        modes,
        recompute_kinds(modes),
        replicas,
        virtual_stages=plan.virtual_stages,
        micro_batch_size=plan.micro_batch_size,
    ):
        check.require(problem, False)


def _check_seconds(check: _Checks, inputs: _Inputs) -> None:
    """ZeRO's exchanges and copies to the host add to the seconds of the layers."""
    from .machine import own_profiles  # which loads much

    plan, chain, topology = inputs.plan, inputs.chain, inputs.topology
    if chain is None or topology is None:
        check.skip(inputs.no_profile if chain is None else _NO_MACHINE)
    if any(kind.profile and not (inputs.folder / kind.profile).is_file() for kind in topology.kinds):
        check.skip("the profile of a kind of devices is not next to the plan")
    chains = {None: chain} | own_profiles(topology, inputs.folder)
    longest = max(stage.forward_seconds + stage.backward_seconds for stage in plan.stages)
    rows = zip(plan.stages, inputs.bounds, inputs.modes, strict=True)
    for number, (stage, (first, end), mode) in enumerate(rows):
        repeats = repeat_word(mode) != "never"
        again = first + (stage.layers_again or stage.layers) if repeats else first
        sums = []
        for kind in dict.fromkeys(map(topology.device, stage.devices)):
            costs = chains[kind.profile].at(-(-plan.micro_batch_size // stage.replicas), past_largest=True)
            forward, backward = costs.forward_seconds / kind.speed, costs.backward_seconds / kind.speed
            sums.append(
                [
                    float(forward[first:end].sum()),
                    float(backward[first:end].sum()),
                    float(forward[first:again].sum()),
                ]
            )
        slowest = [max(column) for column in zip(*sums, strict=True)]
        adds = mode == OFFLOAD or (plan.zero > 1 and stage.replicas > 1)
        for name, seconds in (("forward_seconds", slowest[0]), ("backward_seconds", slowest[1] + slowest[2])):
            stated = min(getattr(stage, name), seconds) if adds else getattr(stage, name)
            check.near(f"{name} of stage {number}", stated, seconds, LOST * longest)


def _check_memory(check: _Checks, inputs: _Inputs) -> None:
    plan, topology = inputs.plan, inputs.topology
    lacking = plan.is_fixed_partition and _lacks_memory(plan)
    totals: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        total, limit, of_stage = stage.memory_bytes, stage.memory_limit_bytes, f"of stage {number}"
        check.same(f"memory_bytes {of_stage}", total, sum(stage.memory.values()) or total)
        expected = totals.setdefault(stage.devices[0], total)
        check.same(f"memory_bytes {of_stage}, which shares its device", total, expected)
        if topology is not None:
            kinds = {topology.device(device).memory_bytes for device in stage.devices}
            limits = [size for size in (*kinds, plan.options.memory_limit) if size is not None]
            check.same(f"memory_limit_bytes {of_stage}", limit, int(min(limits)) if limits else None)
        most = inf if lacking or limit is None else limit
        if plan.training is not None and not lacking:
            most = most_memory_bytes(stage)
        check.at_most(f"memory {of_stage}, above its limit", total, most)
        offloads, host = inputs.modes[number] == OFFLOAD, plan.options.host_memory_bytes
        check.require(f"host_bytes {of_stage}", (stage.host_bytes is not None) == offloads)
        check.at_most(
            f"host_bytes {of_stage}, above the limit", stage.host_bytes or 0, inf if host is None else host
        )


def _lacks_memory(plan: Plan) -> bool:
    from ..planner.scoring import UNFIT  # which loads the search

    return any(UNFIT in text for text in (*plan.warnings, *plan.notes))


def _check_step(check: _Checks, inputs: _Inputs) -> None:
    """The first backward of a step adds to no gradients, so it may be shorter."""
    plan, prediction = inputs.plan, inputs.plan.prediction
    check.near("samples_per_second", prediction.samples_per_second, plan.mini_batch / prediction.step_seconds)
    program = _program(check, plan)
    if program.splits_backward or len(program.pipes) > 1:
        return
    busy = dict[int, float]()
    for stage in plan.stages:
        count = plan.micro_batches
        seconds = count * stage.forward_seconds + (count - 1) * stage.backward_seconds
        busy[stage.devices[0]] = busy.get(stage.devices[0], 0.0) + seconds
    check.at_most("compute of a device, above step_seconds", max(busy.values()), prediction.step_seconds)


def _check_bound(check: _Checks, inputs: _Inputs) -> None:
    plan, prediction = inputs.plan, inputs.plan.prediction
    bound, root = prediction.lower_bound_seconds, prediction.root_bound_seconds
    check.at_most("root_bound_seconds, above the bound", root or 0.0, bound)
    check.require("a bound of no seconds", bound > 0, bound)
    check.near("gap", prediction.gap, prediction.step_seconds / bound - 1, 1.0)
    most = EXACT if plan.training is None else 1.1 * SAME
    check.require("exact, with a gap", not prediction.exact or prediction.gap <= most, prediction.gap, 0)
    check.require("exact, of a partition that was given", not (plan.is_fixed_partition and prediction.exact))


def _check_degrees(check: _Checks, inputs: _Inputs) -> None:
    plan, prediction = inputs.plan, inputs.plan.prediction
    used, numbers = plan.profile.tensor_parallel, [row.tensor_parallel for row in plan.sharing]
    check.same("each requested number once", numbers, sorted(set(numbers) & set(plan.options.tp or numbers)))
    check.require("the plan's number is none of them", used in numbers, used, numbers)
    for row in plan.sharing:
        step, bound, tp = row.step_seconds or inf, row.lower_bound_seconds, f"tp={row.tensor_parallel}"
        if row.tensor_parallel == used:
            check.near(f"step_seconds of {tp}", step, prediction.step_seconds)
        faster = step < prediction.step_seconds * (1 - EXACT)
        check.require(f"{tp} has a faster plan", not faster, prediction.step_seconds, step)
        limit = inf if bound is None else bound
        check.at_most(f"lower_bound_seconds, above that of {tp}", prediction.lower_bound_seconds, limit)


def _check_objective(check: _Checks, inputs: _Inputs) -> None:
    aim = inputs.plan.objective
    assert aim is not None
    check.at_most("lower_bound of the objective", aim.lower_bound, aim.value)
    rounding = 1.0 if aim.unit == "bytes" else 0.0
    fine = not aim.exact or aim.value <= aim.lower_bound * (1 + EXACT) + rounding
    check.require("exact, with a gap", fine, aim.value, aim.lower_bound)


_LINES: tuple[tuple[str, str, _Check], ...] = (
    ("profile", "its SHA-256, model, dtype and device are those of the plan", _check_profile),
    ("layers", "every layer once and in order, with the names of the profile", _check_names),
    ("cuts", "the profile and the options allow every cut; each requested one is made", _check_cuts),
    ("devices", "each is in the machine, and used by the replicas of one stage", _check_devices),
    ("options", "batches, schedule, optimizer, precision and runtime are the requested ones", _check_options),
    ("recomputation", "of the plan, of each stage, and with this schedule", _check_recompute),
    ("schedule", "it runs with these stages and micro-batches, on these devices", _check_schedule),
    ("runtime", "it runs this schedule, recomputation, ZeRO stage and these replicas", _check_runtime),
    ("seconds of stages", "the sums of their layers, with what runs again", _check_seconds),
    ("memory of stages", "the terms add up and fit the device, estimates to their error", _check_memory),
    ("step", "samples per second; not below the compute of a device", _check_step),
    ("bound", "not above the step; gap; exact only without a gap", _check_bound),
)
_FILE = ("file", "the SHA-256 of its content: nobody changed it", _check_hash)


def _comparison_lines(plan: Plan) -> Iterator[tuple[str, str, _Check]]:
    if plan.sharing:
        yield "sharing of layers", "the fastest number of devices that share them", _check_degrees
    if plan.objective is not None:
        yield "objective", "its bound, and exact only without a gap", _check_objective
    for baseline in plan.baselines:
        yield f"baseline {baseline.name}", "not faster than the plan", partial(_check_baseline, baseline)
    for number, alternative in enumerate(plan.alternatives):
        name = f"alternative {number} ({', '.join(alternative.runtimes[:2])})"
        yield name, "batches, throughput, and what its runtimes run", partial(_check_alternative, alternative)


def _check_baseline(baseline: Baseline, check: _Checks, inputs: _Inputs) -> None:
    plan, step = inputs.plan, baseline.step_seconds
    check.require("neither a step nor a reason", step is not None or bool(baseline.reason))
    is_free = plan.runtime is None and plan.options.schedule == "auto"
    free = (
        plan.training is not None
        or baseline.name in UNCONSTRAINED
        or (baseline.name == "interleaved" and is_free)
    )
    if step is None or free or plan.is_fixed_partition or plan.objective or plan.options.planner != "best":
        check.skip("it has no step, or may be faster than the plan")
    fastest = plan.prediction.step_seconds
    check.require("it is faster than the plan", step >= fastest * (1 - TIE), step, fastest)


def _check_alternative(alternative: PlanRow, check: _Checks, inputs: _Inputs) -> None:
    rate = inputs.plan.mini_batch / alternative.step_seconds
    check.near("samples_per_second", alternative.samples_per_second or rate, rate)
    modes = alternative.part_recompute
    for name in alternative.runtimes:
        _check_runtime_runs(check, find_runtime(name), alternative, modes, alternative.replicas)
    if inputs.chain is not None:
        for end in list(accumulate(alternative.balance))[:-1]:
            check.require(f"a cut after layer {end - 1}", bool(inputs.chain.cut_after[end - 1]))
