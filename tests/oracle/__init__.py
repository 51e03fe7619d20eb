"""The oracle: pplan's costs a second time, to attack the plans that tests and benchmarks make.

Costs, ledgers, orders and steps are worked out from the two JSON files alone. No module here imports anything
of pplan, so that an error on one side shows as a difference. Structure, sums and limits are left to
`pplan.lint`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, combinations
from math import ceil, comb, inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

from .layers import Layers, read_layers
from .ledger import find_kernels, read_training
from .machine import Machine, read_machine
from .orders import ASYNCHRONOUS, ImpossiblePlanError, Order, make_order, read_order
from .pipeline import Pipeline

TOLERANCE = 1e-9
"""Share by which a figure may differ: both sides add floats up, in another order."""
LOST = 1e-3
"""Share of the longest stage, to which tolerances of seconds refer: differences of long sums lose digits."""
MOVING = ("activations", "stage_inputs", "pending_gradients", "workspace")
UNCONSTRAINED = ("one-gpu", "data-parallel")
"""Baselines that do their best whatever was requested."""
MOST_CHOICES = 70
"""Choices of devices for a baseline of one stage that are all simulated."""
ONE_STAGE = re.compile(
    r"(?:1 stage, replicas (\d+); )?(\d+) micro-batch(?:es)? x (\d+), ([\w-]+), recompute ([a-z ]+\d*)"
)
"""How a baseline of one stage runs, in its `detail`."""
ONE_PROCESS = ("torchgpipe", "fairscale", "huggingface")
"""Runtimes in which one process launches the work of all stages."""
RECEIVES_AHEAD = ("torch", "torchtitan", "nemo-automodel")
"""Runtimes of PyTorch's pipelining, which has buffers for what a stage receives in a whole step."""


class Difference(NamedTuple):
    """What of a plan differs, with the two values where there are any."""

    check: str
    what: str
    plan_value: object = None
    expected: object = None


class Findings(list[Difference]):
    """The differences so far."""

    check = ""

    def require(self, what: str, fine: bool, plan_value: object = None, expected: object = None) -> None:
        """A condition; `what` says what is wrong."""
        if not fine:
            self.append(Difference(self.check, what, plan_value, expected))

    def same(self, what: str, plan_value: object, expected: object) -> None:
        """Two equal values."""
        self.require(what, plan_value == expected, plan_value, expected)

    def near(self, what: str, plan_value: float | None, expected: float | None, around: float = 0.0) -> None:
        """Equal within `TOLERANCE` of the larger, or of `around`; or both None."""
        if plan_value is None or expected is None:
            return self.same(what, plan_value, expected)
        limit = TOLERANCE * max(abs(plan_value), abs(expected), around)
        fine = isfinite(expected) and abs(plan_value - expected) <= limit
        return self.require(what, fine, plan_value, expected)

    def bytes(self, what: str, plan_value: float, expected: float) -> None:
        """Equal within rounding: terms are rounded to bytes."""
        fine = abs(plan_value - expected) <= max(1.0, TOLERANCE * abs(expected))
        self.require(what, fine, plan_value, expected)

    def at_most(self, what: str, plan_value: float, limit: float) -> None:
        """Not above a limit, but for rounding."""
        self.require(what, plan_value <= limit + TOLERANCE * abs(limit), plan_value, limit)


@dataclass(frozen=True, eq=False)
class Target:
    """A plan with its layers and machine. `profiles`: of the kinds of devices that have one."""

    plan: dict[str, Any]
    layers: Layers
    machine: Machine
    profiles: dict[str, Layers]

    @property
    def stages(self) -> Any:
        """The parts of the layers."""
        return self.plan["stages"]

    @property
    def ends(self) -> list[int]:
        """By part, the layers before its end."""
        return [stage["last_layer"] + 1 for stage in self.stages]

    @property
    def modes(self) -> list[str]:
        """By part, what it recomputes."""
        return [stage.get("recompute") or self.plan["recompute"] for stage in self.stages]

    @property
    def is_late(self) -> bool:
        """True if the schedule is never flushed."""
        return self.plan["schedule"] in ASYNCHRONOUS

    def option(self, name: str, default: Any = None) -> Any:
        """An option that was given, or the default."""
        value = self.plan["options"].get(name)
        return default if value is None else value

    @cached_property
    def order(self) -> Order:
        """The order of the plan's schedule; of an asynchronous one the start of it, for the memory alone."""
        plan, v = self.plan, self.plan["virtual_stages"]
        p, m = len(self.stages) // v, plan["micro_batches"]
        if plan["order"]:
            return read_order(plan["order"], p, m, v)
        if not self.is_late:
            return make_order(plan["schedule"], p, m, v)
        return (
            make_order("wpipe", p, 4 * p, v)
            if plan["schedule"] == "wpipe"
            else make_order("1f1b", p, 2 * p + 2, v)
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        """The figures computed from the plan."""
        return Pipeline(
            schedule=self.plan["schedule"],
            order=self.order,
            size=self.plan["micro_batch_size"],
            ends=self.ends,
            devices=[tuple(stage["devices"]) for stage in self.stages],
            modes=self.modes,
            one_process=self.plan["runtime"] in ONE_PROCESS,
            receives_ahead=self.plan["runtime"] in RECEIVES_AHEAD,
            layers=self.layers,
            profiles=self.profiles,
            machine=self.machine,
            training=read_training(self.plan),
            host_bandwidth=self.option("host_bandwidth"),
        )


def attack(plan: str | bytes, profile: str | bytes, folder: Path = Path()) -> Findings:
    """Compute a plan a second time.

    Args:
        plan: The content of its file.
        profile: The content of its profile's file.
        folder: Where the profiles of kinds of devices are.

    Returns:
        All differences; none for a plan that is right.
    """
    found = Findings()
    try:
        target = _read(json.loads(plan), json.loads(profile), folder)
        for check in CHECKS:
            found.check = check.__name__
            check(found, target)
    except (ImpossiblePlanError, LookupError, ValueError, ArithmeticError) as error:
        found.require(f"cannot be computed: {error!r}", False)
    return found


def _read(plan: dict[str, Any], profile: dict[str, Any], folder: Path) -> Target:
    for shared in profile.get("shared_layers", []):
        if shared["tensor_parallel"] == plan["profile"].get("tensor_parallel", 1):
            profile = profile | shared
    machine = read_machine(plan["machine"])
    files = {kind.profile for kind in machine.kinds if kind.profile is not None}
    profiles = {file: read_layers(json.loads((folder / file).read_bytes())) for file in files}
    return Target(plan, read_layers(profile), machine, profiles)


def check_cuts(found: Findings, target: Target) -> None:
    """Cuts where the profile and the options allow them, and as requested."""
    stages, ends, names = target.stages, target.ends, target.layers.names
    found.same("layer names", target.plan["layer_names"], names)
    for end in ends[:-1]:
        found.require(f"a cut after layer {end - 1}", target.layers.cut_after[end - 1])
        for pattern in target.option("keep_together", []):
            together = all(fnmatchcase(name, pattern) for name in names[end - 1 : end + 1])
            found.require(f"{pattern} is not kept together", not together)
    for name in target.option("cut_after", []):
        found.require(f"no stage ends after {name}", names.index(name) + 1 in ends)
    for name, number in target.option("pins", []):
        first = stages[number]["first_layer"]
        found.require(f"{name} is not in stage {number}", name in names[first : ends[number]])
    for number, mode in enumerate(target.modes):
        if mode.startswith("first_"):
            end = stages[number]["first_layer"] + int(mode.removeprefix("first_"))
            fine = end < ends[number] and target.layers.cut_after[end - 1]
            found.require(f"recomputation of stage {number}", fine, mode)


def check_seconds(found: Findings, target: Target) -> None:
    """Forward and backward of every stage, with what runs again."""
    seconds = [target.pipeline.part_seconds(part) for part in range(len(target.stages))]
    for part, (stage, (forward, backward)) in enumerate(zip(target.stages, seconds, strict=True)):
        rounding = LOST * max(map(sum, seconds))
        found.near(f"forward_seconds of stage {part}", stage["forward_seconds"], forward, rounding)
        found.near(f"backward_seconds of stage {part}", stage["backward_seconds"], backward, rounding)


def check_memory(found: Findings, target: Target) -> None:
    """Every term, their sums, and each under its limit."""
    plan, pipeline, order = target.plan, target.pipeline, target.order
    texts = (*plan["warnings"], *plan["notes"])
    fixed = plan["searched"] == "this partition alone"
    lacking = fixed and any(text.startswith("it does not fit") for text in texts)
    p = order.devices
    for device in range(p):
        versions = {"pipedream": [p - device], "pipedream-2bw": [2], "xpipe": [3], "wpipe": [2, 1]}
        ledger = pipeline.ledger(device, versions.get(plan["schedule"], [1]))
        limit = pipeline.limit(device, target.option("memory_limit"))
        found.at_most(f"memory of device {device}", ledger.bytes, inf if lacking else limit)
        for part in (part for part, slot in enumerate(order.routes[0]) if slot[0] == device):
            stage = target.stages[part]
            stated = stage["memory"]
            found.same(f"terms of stage {part}", set(stated), set(ledger.terms))
            held = [stated.get(name, 0) for name in MOVING]
            alike = any(
                all(abs(a - b) <= 1 for a, b in zip(held, moment, strict=False))
                for moment in ledger.moments[1:]
            )
            for name, expected in ledger.terms.items():
                if not (alike and name in MOVING):
                    found.bytes(f"{name} of stage {part}", stated[name], expected)
            found.same(f"memory_bytes of stage {part}", stage["memory_bytes"], sum(stated.values()))
            _check_total(found, f"memory_bytes of stage {part}", stage["memory_bytes"], ledger.terms)
            limit_bytes = None if limit == inf else int(limit)
            found.same(f"memory_limit_bytes of stage {part}", stage["memory_limit_bytes"], limit_bytes)
            _check_host(found, target, part, device)


def _check_total(found: Findings, what: str, plan_value: int, terms: dict[str, float]) -> None:
    """All terms: rounded up together, or, in older plans, each rounded."""
    totals = [sum(terms.values()), float(sum(map(round, terms.values())))]
    found.bytes(what, plan_value, min(totals, key=lambda total: abs(total - plan_value)))


def _check_host(found: Findings, target: Target, part: int, device: int) -> None:
    """What of a part that offloads is on the host, of all micro-batches in flight."""
    stated, expected = target.stages[part].get("host_bytes"), None
    if target.modes[part] == "offload":
        expected = ceil(target.order.most_in_flight(device) * target.pipeline.host_bytes(part, device))
    found.same(f"host_bytes of stage {part}", stated, expected)
    found.at_most(f"host_bytes of stage {part}", expected or 0, target.option("host_memory_bytes", inf))


def check_step(found: Findings, target: Target) -> None:
    """The event loop's step and bubble, and no step below what the bytes through a port need."""
    prediction, pipeline = target.plan["prediction"], target.pipeline
    if not target.is_late:
        step, bubble = pipeline.step
        found.near("step_seconds", prediction["step_seconds"], step)
        found.near("bubble", prediction["bubble"], bubble, 1.0)
    stated, each = prediction.get("optimizer_seconds"), list[float]()
    for device, ranks in enumerate(pipeline.ranks):
        parts = target.order.device_parts(device)
        trainable = sum(pipeline.part_bytes(part, device).trainable for part in parts)
        amount = pipeline.training.spread(trainable * pipeline.training.update_bytes, len(ranks), 1)
        rates = {target.machine.kind(rank).known[1] for rank in ranks}
        each += [amount / rate for rate in rates if rate is not None]
    if not each or not (target.is_late or stated is None):
        found.near("optimizer_seconds", stated, max(each, default=None))


def check_uncertainty(found: Findings, target: Target) -> None:
    """How far the closing ratios around the sizes in use are from 1."""
    shares = {target.pipeline.share(device) for device in range(target.order.devices)}
    known = [off for share in shares if (off := target.layers.uncertainty(share)) is not None]
    stated = target.plan["prediction"].get("uncertainty")
    found.near("uncertainty", stated, max(known, default=None), 1e-3)


def check_objective(found: Findings, target: Target) -> None:
    """The value of the objective `memory`: the most that a device holds."""
    aim, pipeline = target.plan.get("objective"), target.pipeline
    if aim is not None and aim["name"] == "memory":
        most = max(pipeline.ledger(device).bytes for device in range(target.order.devices))
        found.bytes("value", aim["value"], most)


def check_baselines(found: Findings, target: Target) -> None:
    """Those of one stage, simulated."""
    for row in target.plan["baselines"]:
        match = ONE_STAGE.fullmatch(row["detail"])
        if match and row["step_seconds"] is not None:
            launches = row["name"] not in UNCONSTRAINED and target.plan["runtime"] in ONE_PROCESS
            _check_one_stage(found, target, row["step_seconds"], match, launches)


def _check_one_stage(
    found: Findings, target: Target, step: float, match: re.Match[str], launches: bool
) -> None:
    """All layers on one device, the first of its kind, or on replicas: all devices, or some that are not
    named, of which every choice is worked out where there are few."""
    machine, requested = target.machine, target.option("memory_limit")
    replicas, count, size = (int(text or 1) for text in match.groups()[:3])
    if replicas > 1 and comb(machine.gpus, replicas) > MOST_CHOICES:
        return
    firsts = [(first,) for first in (0, *machine.ends[:-1])]
    steps = []
    for ranks in firsts if replicas == 1 else combinations(range(machine.gpus), replicas):
        pipeline = replace(
            target.pipeline,
            schedule=match[4],
            order=make_order(match[4], 1, count, 1),
            size=size,
            ends=[len(target.layers)],
            devices=[ranks],
            modes=[match[5].replace(" ", "_")],
            one_process=launches,
        )
        if pipeline.ledger(0).bytes <= pipeline.limit(0, requested) + 1:
            steps.append(pipeline.step[0])
    found.near("step_seconds of one stage", step, min(steps, key=lambda own: abs(own - step), default=inf))


def check_alternatives(found: Findings, target: Target) -> None:
    """Memory and step of each, on the devices from rank 0 on."""
    plan = target.plan
    for number, row in enumerate(plan["alternatives"]):
        row = {key: plan[key] for key in ("micro_batches", "micro_batch_size", "recompute")} | row
        what, balance, replicas, names = (
            f"of alternative {number}",
            row["balance"],
            row["replicas"][0],
            row["runtimes"],
        )
        parts, size, step = row["virtual_stages"], row["micro_batch_size"], row["step_seconds"]
        mixed = row["recompute"] == "by_stage"
        modes = row["stage_recompute"] if mixed else [row["recompute"]] * len(balance)
        order = make_order(row["schedule"], len(balance) // parts, row["micro_batches"], parts)
        pipeline = replace(
            target.pipeline,
            schedule=row["schedule"],
            order=order,
            size=size,
            ends=list(accumulate(balance)),
            devices=[tuple(range(at * replicas, (at + 1) * replicas)) for at, _ in order.routes[0]],
            modes=modes,
            one_process=names[0] in ONE_PROCESS,
            receives_ahead=names[0] in RECEIVES_AHEAD,
            training=replace(
                target.pipeline.training,
                kernels=find_kernels(plan["profile"].get("device", ""), names[0]),
            ),
        )
        for end in pipeline.ends[:-1]:
            found.require(f"a cut after layer {end - 1} {what}", target.layers.cut_after[end - 1])
        for device in range(order.devices):
            terms, limit = (
                pipeline.ledger(device).terms,
                pipeline.limit(device, target.option("memory_limit")),
            )
            found.at_most(f"memory {what}", sum(terms.values()), limit + 1)
            for part in (part for part, slot in enumerate(order.routes[0]) if slot[0] == device):
                _check_total(found, f"memory_bytes.{part} {what}", row["memory_bytes"][part], terms)
        found.near(f"step_seconds {what}", step, pipeline.step[0])


CHECKS: tuple[Callable[[Findings, Target], None], ...] = (
    *(check_cuts, check_seconds, check_memory, check_step),
    *(check_uncertainty, check_objective, check_baselines, check_alternatives),
)
