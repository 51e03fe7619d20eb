"""Checks of a plan's figures: the order of actions, seconds, memory, the step, and what was proven of it."""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

from .orders import ASYNCHRONOUS
from .report import EXACT, LineCheck, ReportBuilder
from .stated_plan import OFFLOAD, StatedStage
from .verification_inputs import VerificationInputs, planned_order
from .wiring import check_order, most_in_flight

if TYPE_CHECKING:
    from .device_ledger import Ledger
    from .documents import Table

MOVING = ("activations", "stage_inputs", "pending_gradients", "workspace")


def check_figures(builder: ReportBuilder, inputs: VerificationInputs) -> None:
    """Adds the lines."""
    plan = inputs.plan
    with builder.line("order of actions", "") as check:
        if plan.schedule in ASYNCHRONOUS:
            check.skip(f"{plan.schedule} is asynchronous: it is never flushed")
        order = planned_order(plan)
        check_order(order)
        in_flight = ", ".join(f"{most:g}" for most in most_in_flight(order)[:8])
        check.detail = f"{order.rule}; each F and B once, none waits for ever; in flight {in_flight}"
    with builder.line(
        "seconds of stages", "forward and backward with what is run again, from the profile"
    ) as check:
        _seconds(check, inputs)
    with builder.line(
        "memory of stages", "every term from the profile, their sums, and each under its limit"
    ) as check:
        _memory(check, inputs)
    with builder.line("step", "the event loop's") as check:
        _step(check, inputs)
    with builder.line("ports", "the step is not below what the bytes through a port need") as check:
        _ports(check, inputs)
    _check_prediction(builder, inputs)


_LOST = 1e-3
"""Of the largest stage's seconds: of so many the tolerance of a stage is that of rounding."""


def _seconds(check: LineCheck, inputs: VerificationInputs) -> None:
    figures = inputs.figures(check)
    # A stage's sum is a difference of sums from the first layer on, which lose the last digits of long ones.
    rounding = _LOST * max(sum(figures.part_seconds(part)) for part in range(len(inputs.plan.stages)))
    for part, stage in enumerate(inputs.plan.stages):
        forward, backward = figures.part_seconds(part)
        for name, stated, expected in (
            ("forward_seconds", stage.forward_seconds, forward),
            ("backward_seconds", stage.backward_seconds, backward),
        ):
            check.near(f"{name} of stage {part}", stated, expected, around=rounding)


def _memory(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, figures = inputs.plan, inputs.figures(check)
    requested = plan.options.optional_number("memory_limit")
    notes = (*plan.warnings, *plan.notes)
    lacking = plan.is_fixed_partition and any(each.startswith("it does not fit") for each in notes)
    for device in range(figures.order.devices):
        ledger = figures.ledger(device, _weight_versions(plan.schedule, device, figures.order.devices))
        limit = figures.limit(device, requested)
        for part in figures.order.device_stages(device):
            _stage_memory(check, part, plan.stages[part], ledger, limit)
            _host_memory(check, inputs, part, device)
        check.at_most(f"memory of stage {device}, above its limit", ledger.bytes, inf if lacking else limit)


def _weight_versions(schedule: str, device: int, devices: int) -> list[int]:
    """Of a device's parts: PipeDream keeps one for each micro-batch in flight, 2BW two, XPipe two predicted
    ones besides, WPipe two of the first part and one of the second."""
    if schedule == "wpipe":
        return [2, 1]
    return [{"pipedream": devices - device, "pipedream-2bw": 2, "xpipe": 3}.get(schedule, 1)]


def _stage_memory(check: LineCheck, part: int, stage: StatedStage, ledger: Ledger, limit: float) -> None:
    if stage.memory:
        unknown = sorted(set(stage.memory) ^ set(ledger.terms))
        check.require(f"terms of stage {part}: {', '.join(unknown)}", not unknown)
        moving = tuple(stage.memory.get(name, 0) for name in MOVING)
        also = any(
            all(abs(a - b) <= 1 for a, b in zip(moving, other, strict=True)) for other in ledger.others
        )
        for name, expected in ledger.terms.items():
            if not (also and name in MOVING):
                check.bytes(f"{name} of stage {part}", stage.memory[name], expected)
        check.same(f"memory_bytes of stage {part}", stage.memory_bytes, sum(stage.memory.values()))
    check.bytes(f"memory_bytes of stage {part}", stage.memory_bytes, ledger.stated(stage.memory_bytes))
    own = None if limit == inf else int(limit)
    check.same(f"memory_limit_bytes of stage {part}", stage.memory_limit_bytes, own)


def _host_memory(check: LineCheck, inputs: VerificationInputs, part: int, device: int) -> None:
    """What of a part that offloads is on the host, of all micro-batches in flight."""
    stage, figures = inputs.plan.stages[part], inputs.figures(check)
    expected = None
    if figures.modes[part] == OFFLOAD:
        expected = ceil(most_in_flight(figures.order)[device] * figures.host_bytes(part, device))
    check.require(f"host_bytes of stage {part}", stage.host_bytes == expected, stage.host_bytes, expected)
    limit = inputs.plan.options.optional_number("host_memory_bytes")
    if expected is not None and limit is not None:
        check.at_most(f"host_bytes of stage {part}, above the limit", expected, limit)


def _step(check: LineCheck, inputs: VerificationInputs) -> None:
    plan_value = inputs.plan.prediction.number("step_seconds")
    check.require("a step of no seconds", plan_value > 0, plan_value)
    if inputs.plan.schedule in ASYNCHRONOUS:
        check.skip(f"{inputs.plan.schedule} is asynchronous: its step is that of a steady state")
    check.near("step_seconds", plan_value, inputs.figures(check).step.seconds)


def _ports(check: LineCheck, inputs: VerificationInputs) -> None:
    if inputs.plan.schedule in ASYNCHRONOUS:
        check.skip(f"{inputs.plan.schedule} is asynchronous: sums of gradients go on beside later steps")
    figures = inputs.figures(check)
    if not figures.shared_ports:
        check.skip("ports were not to be shared")
    needed, port = figures.port_seconds
    plan_value = inputs.plan.prediction.number("step_seconds")
    name = "" if port is None else f" through port {port[2]} of level {figures.machine.levels[port[0]].name}"
    check.require(
        f"the bytes{name} need more than the step", plan_value >= needed * (1 - 1e-9), plan_value, needed
    )


def _check_prediction(builder: ReportBuilder, inputs: VerificationInputs) -> None:
    plan, plan_value = inputs.plan, inputs.plan.prediction
    step, bound = plan_value.number("step_seconds"), plan_value.number("lower_bound_seconds")
    with builder.line("samples per second", "mini_batch / step_seconds") as check:
        check.require("a step of no seconds", step > 0, step)
        check.near("samples_per_second", plan_value.number("samples_per_second"), plan.mini_batch / step)
    with builder.line("bubble", "the idle share of the devices in the event loop") as check:
        if plan.schedule in ASYNCHRONOUS:
            check.skip(f"{plan.schedule} is asynchronous")
        check.near(
            "bubble", plan_value.number("bubble", least=-1), inputs.figures(check).step.bubble, around=1.0
        )
    with builder.line(
        "lower bound", "not above the step nor below the root's; that no plan is below it: not checked"
    ) as check:
        check.at_most("lower_bound_seconds, above the step", bound, step)
        root = plan_value.optional_number("root_bound_seconds")
        check.require(
            "root_bound_seconds, above the bound", root is None or root <= bound * (1 + 1e-9), root, bound
        )
        if plan.is_fixed_partition:
            check.require("exact, of a partition that was given", not plan_value.flag("exact"), step, bound)
    with builder.line("gap", "step_seconds / lower_bound_seconds - 1; exact only where it is 0") as check:
        gap = plan_value.number("gap", least=-1, most=1e300)
        check.require("a bound of no seconds", bound > 0, bound)
        check.near("gap", gap, step / bound - 1, around=1.0)
        check.require("exact, with a gap", not plan_value.flag("exact") or gap <= EXACT, gap, 0)
    with builder.line(
        "optimizer's step", "what it reads and writes of the largest stage, by the memory's bandwidth"
    ) as check:
        _optimizer(check, inputs)
    if rows := plan.whole.tables("degrees"):
        about = "of all numbers of devices that may share them the fastest; the bound holds for all"
        with builder.line("sharing of layers", about) as check:
            _check_degrees(check, inputs, rows)
    with builder.line(
        "uncertainty", "how far the layers' sum is from the whole model, by the profile"
    ) as check:
        _uncertainty(check, inputs)
    low, high = (plan_value.optional_number(f"{end}_seconds") for end in ("low", "high"))
    with builder.line("interval", "") as check:
        ordered = low is not None and high is not None and low <= high
        check.require("low_seconds and high_seconds", ordered or (low is None and high is None), low, high)
        check.skip(
            "low_seconds and high_seconds are percentiles of random draws" if ordered else "there is none"
        )


def _check_degrees(check: LineCheck, inputs: VerificationInputs, rows: list[Table]) -> None:
    plan, plan_value = inputs.plan, inputs.plan.prediction
    step, bound = plan_value.number("step_seconds"), plan_value.number("lower_bound_seconds")
    own = plan.profile.count("tensor_parallel", 1)
    numbers = [row.count("tensor_parallel", least=1) for row in rows]
    requested = plan.options.counts("tp", least=1)
    check.require("each number once, the fewest first", numbers == sorted(set(numbers)), numbers)
    check.require("the plan's number is none of them", own in numbers, own, numbers)
    fine = not requested or set(numbers) <= set(requested)
    check.require("one was not requested", fine, numbers, requested)
    for number, row in zip(numbers, rows, strict=True):
        other, other_bound = (row.optional_number(f"{key}_seconds") for key in ("step", "lower_bound"))
        if number == own:
            check.near(f"step_seconds of {number}", other or 0.0, step)
        faster = other is not None and other < step * (1 - EXACT)
        check.require(f"tp={number} has a faster plan", not faster, step, other)
        check.require(
            f"lower_bound_seconds, above that of tp={number}",
            other_bound is None or bound <= other_bound * (1 + 1e-9),
            bound,
            other_bound,
        )


def _optimizer(check: LineCheck, inputs: VerificationInputs) -> None:
    stated = inputs.plan.prediction.optional_number("optimizer_seconds")
    figures, each = inputs.figures(check), list[float]()
    for device, ranks in enumerate(figures.ranks):
        parts = figures.order.device_parts(device)
        trainable = sum(figures.part_bytes(part, device).trainable for part in parts)
        amount = figures.training.spread(trainable * figures.training.update_bytes, len(ranks), 1)
        rates = {figures.machine.kind(rank).memory_bandwidth for rank in ranks}
        each += [amount / rate for rate in rates if rate is not None]
    if not each:
        check.same("optimizer_seconds, of memory whose bandwidth is not known", stated, None)
    elif stated is None:
        check.skip("the plan does not state it")
    elif inputs.plan.schedule in ASYNCHRONOUS:
        check.skip(f"{inputs.plan.schedule} is asynchronous: it updates several times a step")
    else:
        check.near("optimizer_seconds", stated, max(each))


def _uncertainty(check: LineCheck, inputs: VerificationInputs) -> None:
    if inputs.layers is None:
        check.skip(inputs.no_profile)
    else:
        plan = inputs.plan
        shares = {-(-plan.micro_batch_size // stage.replicas) for stage in plan.stages}
        shares_off = [off for share in shares if (off := inputs.layers.uncertainty(share)) is not None]
        plan_value, expected = (
            plan.prediction.optional_number("uncertainty"),
            max(shares_off) if shares_off else None,
        )
        if plan_value is None or expected is None:
            check.same("uncertainty", plan_value, expected)
        else:
            check.near("uncertainty", plan_value, expected, around=1e-3)
