"""Checks of a plan's baselines, alternatives and objective, where the file has enough of their figures."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import accumulate, combinations
from math import comb

from .documents import Table
from .orders import SYNCHRONOUS, make_order
from .report import EXACT, ROUNDING, TOLERANCE, LineCheck, ReportBuilder
from .stated_training import optimizer_kernels
from .step_events import SimulatedFigures
from .verification_inputs import VerificationInputs, check_runtime_rules, one_process, receives_ahead

_ONE_STAGE = re.compile(
    r"(?:1 stage, replicas (\d{1,9}); )?(\d{1,9}) x (\d{1,9}), ([\w-]+), recompute ([a-z ]+\d{0,7})"
)
"""How a baseline of one stage runs, in its `detail`."""
_MOST_CHOICES = 70
"""Of devices for a baseline of one stage."""
UNCONSTRAINED = ("one-gpu", "data-parallel")
"""Baselines that do their best whatever was requested."""


def check_comparisons(builder: ReportBuilder, inputs: VerificationInputs) -> None:
    """Adds the lines."""
    if inputs.plan.objective is not None:
        with builder.line("objective", "the most that a device holds") as check:
            _objective(check, inputs, inputs.plan.objective)
    for table in inputs.plan.baselines:
        name = table.text("name")
        with builder.line(f"baseline {name}", "simulated again") as check:
            _baseline(check, inputs, name, table)
    for number, table in enumerate(inputs.plan.alternatives):
        names = table.texts("runtimes")
        with builder.line(
            f"alternative {number} ({', '.join(names[:2])})", "memory and step worked out again"
        ) as check:
            _alternative(check, inputs, names, table)


def _objective(check: LineCheck, inputs: VerificationInputs, table: Table) -> None:
    name = table.text("name")
    value, bound = table.number("value"), table.number("lower_bound")
    check.at_most("lower_bound of the objective", bound, value)
    least = bound * (1 + EXACT) + (ROUNDING if table.text("unit", "") == "bytes" else 0.0)
    check.require("exact, with a gap", not table.flag("exact") or value <= least, value, bound)
    if name != "memory":
        check.skip(f"{name}: the file does not say what it is worked out from")
    figures = inputs.figures(check)
    most = max(figures.ledger(device).bytes for device in range(figures.order.devices))
    check.bytes("value, the most that a device holds", value, most)


def _baseline(check: LineCheck, inputs: VerificationInputs, name: str, table: Table) -> None:
    plan, step = inputs.plan, table.optional_number("step_seconds")
    if step is None:
        check.require("neither a step nor a reason", bool(table.text("reason", "")))
        check.skip("it has no step")
        return
    check.require("a step of no seconds", step > 0, step)
    fastest = plan.prediction.number("step_seconds")
    best = plan.options.text("planner", "best") == "best" and plan.objective is None
    left_open = plan.runtime is None and plan.options.text("schedule", "auto") == "auto"
    beside = name in UNCONSTRAINED or (name == "interleaved" and left_open)  # not in the running
    if best and not beside and not plan.is_fixed_partition:
        check.require("it is faster than the plan", step >= fastest * (1 - TOLERANCE), step, fastest)
    match = _ONE_STAGE.fullmatch(table.text("detail", ""))
    if match is None:
        check.skip("the file does not say where its layers are")
    else:
        _one_stage(
            check, inputs, step, match, launches=name not in UNCONSTRAINED and one_process(plan.runtime)
        )


def _one_stage(
    check: LineCheck, inputs: VerificationInputs, step: float, match: re.Match[str], *, launches: bool
) -> None:
    """All layers on one device, the first of its kind, or on replicas: all devices, or some that are not
    named, of which every choice is worked out where there are few."""
    replicas, count, size = (int(text or 1) for text in match.groups()[:3])
    schedule, mode = match[4], match[5].replace(" ", "_")
    base, machine = inputs.figures(check), inputs.machine
    assert machine is not None
    check.same("its global batch", count * size, inputs.plan.mini_batch)
    check.require("schedule", schedule in SYNCHRONOUS, schedule)
    check.at_most("its replicas", replicas, machine.gpus)
    if replicas > 1 and comb(machine.gpus, replicas) > _MOST_CHOICES:
        check.skip("the file does not say on which devices it is")
    firsts = [(first,) for first in (0, *machine.ends[:-1])]
    steps = []
    for ranks in firsts if replicas == 1 else combinations(range(machine.gpus), replicas):
        figures = replace(
            base,
            schedule=schedule,
            order=make_order(schedule, 1, count, 1),
            size=size,
            ends=(len(base.layers),),
            devices=(ranks,),
            modes=(mode,),
            one_process=launches,
        )
        if (
            figures.ledger(0).bytes
            <= figures.limit(0, inputs.plan.options.optional_number("memory_limit")) + 1
        ):
            steps.append(figures.step.seconds)
    check.require("it does not fit", bool(steps))
    check.near("step_seconds", step, min(steps, key=lambda own: abs(own - step)))


def _alternative(check: LineCheck, inputs: VerificationInputs, names: list[str], table: Table) -> None:
    plan = inputs.plan
    balance, replicas = table.counts("balance", least=1), table.count("replicas", 1, least=1, most=2**20)
    count = table.count("micro_batches", plan.micro_batches, least=1)
    size = table.count("micro_batch_size", plan.micro_batch_size, least=1)
    schedule, parts = table.text("schedule"), table.count("virtual_stages", 1, least=1)
    word = table.text("recompute", plan.recompute)
    modes = tuple(table.texts("stage_recompute")) if word == "selective" else (word,) * len(balance)
    check.same("layers of its stages", sum(balance), sum(plan.balance))
    check.same("global batch", count * size, plan.mini_batch)
    check.same("stages, and what each recomputes", len(modes), len(balance))
    check.same("stages that are left over on some device", len(balance) % parts, 0)
    check.require("schedule", schedule in SYNCHRONOUS, schedule)
    check.require("it is for no runtime", bool(names))
    for name in names:
        check_runtime_rules(
            check, name, schedule=schedule, modes=modes, replicas=[replicas], virtual_stages=parts, size=size
        )
    step = table.number("step_seconds")
    check.require("a step of no seconds", step > 0, step)
    check.near(
        "samples_per_second",
        table.number("samples_per_second", plan.mini_batch / step),
        plan.mini_batch / step,
    )
    kernels = optimizer_kernels(plan.profile.text("device", ""), names[0])
    _alternative_figures(
        check,
        inputs,
        table,
        _Shape(
            schedule,
            balance,
            replicas,
            count,
            size,
            parts,
            modes,
            one_process(names[0]),
            receives_ahead(names[0]),
            kernels,
        ),
    )


class _Shape:
    """An alternative's pipeline: stage s on the devices from rank s times its replicas on."""

    def __init__(
        self,
        schedule: str,
        balance: list[int],
        replicas: int,
        count: int,
        size: int,
        parts: int,
        modes: tuple[str, ...],
        launches: bool,
        ahead: bool,
        kernels: str,
    ) -> None:
        self.ahead = ahead
        self.schedule, self.replicas, self.size, self.modes = schedule, replicas, size, modes
        self.ends, self.launches, self.kernels = tuple(accumulate(balance)), launches, kernels
        self.order = make_order(schedule, len(balance) // parts, count, parts)

    def figures(self, base: SimulatedFigures) -> SimulatedFigures:
        """On the plan's machine."""
        places = [device for device, _ in self.order.routes[0]]
        return replace(
            base,
            schedule=self.schedule,
            order=self.order,
            size=self.size,
            ends=self.ends,
            devices=tuple(tuple(range(own * self.replicas, (own + 1) * self.replicas)) for own in places),
            modes=self.modes,
            one_process=self.launches,
            receives_ahead=self.ahead,
            training=replace(base.training, kernels=self.kernels),
        )


def _alternative_figures(check: LineCheck, inputs: VerificationInputs, table: Table, shape: _Shape) -> None:
    base, machine = inputs.figures(check), inputs.machine
    assert machine is not None
    check.at_most("its devices", shape.order.devices * shape.replicas, machine.gpus)
    for end in shape.ends[:-1]:
        check.require(f"the profile allows no cut after layer {end - 1}", base.layers.cut_after[end - 1])
    figures = shape.figures(base)
    requested, plan_value = inputs.plan.options.optional_number("memory_limit"), table.counts("memory_bytes")
    check.require(
        "memory_bytes, by stage",
        not plan_value or len(plan_value) == len(shape.ends),
        len(plan_value),
        len(shape.ends),
    )
    for device in range(figures.order.devices):
        ledger = figures.ledger(device)
        check.at_most(
            f"memory of stage {device}, above its limit", ledger.bytes, figures.limit(device, requested) + 1
        )
        for part in figures.order.device_stages(device) if plan_value else []:
            check.bytes(f"memory_bytes of stage {part}", plan_value[part], ledger.stated(plan_value[part]))
    check.near("step_seconds", table.number("step_seconds"), figures.step.seconds)
