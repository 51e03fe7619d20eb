"""Checks of where a plan's layers are: files, layers, cuts, devices, micro-batches, the runtime."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase

from .documents import Table
from .report import LineCheck, ReportBuilder
from .stated_plan import OFFLOAD, RECOMPUTES, StatedPlan, StatedStage, first_layers
from .stated_training import read_training
from .verification_inputs import RULES, VerificationInputs, check_runtime_rules, one_process


def check_layout(builder: ReportBuilder, inputs: VerificationInputs) -> None:
    """Adds the lines."""
    _check_files(builder, inputs)
    with builder.line("layers", "every layer once and in order; balance and stages say the same") as check:
        _layers(check, inputs)
    with builder.line(
        "cuts", "the profile and the options allow every cut, and each one asked for is made"
    ) as check:
        _cuts(check, inputs)
    with builder.line("devices", "each is in the machine, and used by the replicas of one stage") as check:
        _devices(check, inputs)
    with builder.line(
        "micro-batches", "sizes divide; every replica has a sample; as the options say"
    ) as check:
        _micro_batches(check, inputs)
    with builder.line("recomputation", "known words; as the options say") as check:
        _recompute(check, inputs)
    with builder.line(
        "training", "the optimizer, the precision and ZeRO's stage, of this profile; as the options say"
    ) as check:
        _training(check, inputs)
    with builder.line("runtime", "it runs this schedule, recomputation and these replicas") as check:
        _runtime(check, inputs)


def _check_files(builder: ReportBuilder, inputs: VerificationInputs) -> None:
    stated, profile = inputs.plan.profile, inputs.profile
    with builder.line(
        "profile", "the file's SHA-256, its dtype, device and kind are those of the plan"
    ) as check:
        if profile is None:
            check.skip(inputs.no_profile)
        else:
            for key, default in (("dtype", "float32"), ("granularity", "block")):
                check.same(key, stated.text(key, default), profile.text(key, default))
            name = profile.text("device_name", "") or profile.text("device", "cpu")
            check.same("device_name", stated.text("device_name", name), name)
            device = profile.text("device", "cpu")
            check.same("device", stated.text("device", "") or device, device)
            check.same("estimated", stated.flag("estimated", False), profile.flag("estimated", False))
            check.same("model", inputs.plan.whole.text("model"), profile.text("model"))
            plan_value = stated.text("sha256", "")
            if plan_value != inputs.profile_sha256 and not inputs.is_file:
                check.skip("the profile was not given as the file that the plan names: no SHA-256 to compare")
            check.same("SHA-256 of the profile file", plan_value, inputs.profile_sha256)
    with builder.line("layer names", "the plan's, their SHA-256, and the profile's") as check:
        names = inputs.plan.layer_names
        if profile is None and not names:
            check.skip(inputs.no_profile)
        measured = names if inputs.layers is None else list(inputs.layers.names)
        plan_value = stated.text("layers_sha256", "")
        check.require("layer names", not names or names == measured, names, measured)
        digest = hashlib.sha256("\n".join(measured).encode("utf-8", "surrogatepass")).hexdigest()
        check.require("SHA-256 of the layer names", plan_value in ("", digest), plan_value, digest)


def _layers(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, after = inputs.plan, 0
    for number, stage in enumerate(plan.stages):
        check.same(f"first layer of stage {number}", stage.first_layer, after)
        check.require(
            f"stage {number} ends before it begins", stage.last_layer >= after, stage.last_layer, after
        )
        after = stage.last_layer + 1
    check.same("balance", plan.balance, [own.last_layer - own.first_layer + 1 for own in plan.stages])
    if inputs.layers is not None:
        check.same("number of layers", after, len(inputs.layers))
    elif plan.layer_names:
        check.same("number of layers", after, len(plan.layer_names))


def _cuts(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, layers, options = inputs.plan, inputs.layers, inputs.plan.options
    names = plan.layer_names if layers is None else list(layers.names)
    ends = [end for end in plan.ends[:-1] if 0 < end < len(names)]
    check.require("a cut behind the last layer", layers is None or len(ends) == len(plan.ends) - 1)
    for end in ends:
        allowed = layers is None or layers.cut_after[end - 1]
        check.require(f"the profile allows no cut after layer {end - 1}, {names[end - 1]}", allowed)
        for pattern in options.texts("keep_together"):
            parted = fnmatchcase(names[end - 1], pattern) and fnmatchcase(names[end], pattern)
            check.require(f"{pattern} was to be kept together, layer {end - 1} ends a stage", not parted)
    for name in options.texts("cut_after") if names else []:
        check.require(f"no layer is named {name}", name in names)
        check.require(f"a stage was to end after {name}", names.index(name) + 1 in plan.ends)
    for pin in options.lists("pins") if names else []:
        _check_pin(check, inputs, names, pin)
    most, stages = options.optional_count("max_stages"), len(plan.stages) // plan.virtual_stages
    check.require("more stages than requested", most is None or stages <= most, stages, most)
    if layers is None:
        check.skip(inputs.no_profile)


def _check_pin(check: LineCheck, inputs: VerificationInputs, names: list[str], pin: list[object]) -> None:
    fine = len(pin) == 2 and isinstance(pin[0], str) and isinstance(pin[1], int) and pin[0] in names
    check.require("a pin of no layer", fine, str(pin)[:60])
    layer, number = names.index(str(pin[0])), int(str(pin[1]))
    own = inputs.plan.stages[number] if 0 <= number < len(inputs.plan.stages) else None
    inside = own is not None and own.first_layer <= layer <= own.last_layer
    check.require(f"{pin[0]} was to be in stage {number}", inside)


def _devices(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, machine, options = inputs.plan, inputs.machine, inputs.plan.options
    for number, stage in enumerate(plan.stages):
        check.same(f"replicas of stage {number}", stage.replicas, len(stage.devices))
        check.require(f"stage {number} has a device twice", len(set(stage.devices)) == len(stage.devices))
    groups = list(dict.fromkeys(frozenset(stage.devices) for stage in plan.stages))
    used = [device for group in groups for device in group]
    check.require("a device is used by different stages", len(set(used)) == len(used))
    check.require(
        "parts on as many devices", len(groups) * plan.virtual_stages == len(plan.stages), len(groups)
    )
    if machine is None:
        check.skip("the plan does not say what machine it was made for")
    else:
        check.require(
            "a device that the machine does not have", max(used) < machine.gpus, max(used), machine.gpus
        )
        check.require("gpus", plan.gpus in (None, machine.gpus), plan.gpus, machine.gpus)
        node = machine.gpus_per_node
        check.require("gpus_per_node", plan.gpus_per_node in (None, node), plan.gpus_per_node, node)
        reachable = min(node, machine.gpus) if one_process(plan.runtime) else machine.gpus
        check.require(
            "devices of other nodes than one process has", max(used) < reachable, max(used), reachable
        )
        if options.flag("use_all", False) and not (plan.is_fixed_partition or plan.is_replanned):
            check.same("devices in use, where all were requested", len(used), reachable)


def _micro_batches(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, options = inputs.plan, inputs.plan.options
    product = plan.micro_batches * plan.micro_batch_size
    check.same("mini_batch, of micro_batches times micro_batch_size", plan.mini_batch, product)
    most = max(stage.replicas for stage in plan.stages)
    check.at_most("replicas of a micro-batch", most, plan.micro_batch_size)
    for key, own in (("mini_batch", plan.mini_batch), ("micro_batches", plan.micro_batches)):
        requested = options.optional_count(key)
        check.require(f"{key} is not the requested one", requested in (None, own), own, requested)
    for key, word, default in (("schedule", plan.schedule, "auto"), ("optimizer", plan.optimizer, None)):
        name = options.text(key, default or word)
        is_requested = name in ("auto", word) or (key == "schedule" and name in ("any", "synthesized"))
        check.require(f"{key} is not the requested one", is_requested, word, name)


def _recompute(check: LineCheck, inputs: VerificationInputs) -> None:
    plan = inputs.plan
    for number, stage in enumerate(plan.stages):
        mixed = plan.recompute == "selective"
        may_be = stage.recompute in RECOMPUTES[:3] or _runs_first(inputs, stage) or _offloads(inputs, stage)
        fine = may_be if mixed else stage.recompute in (None, plan.recompute)
        check.require(f"recomputation of stage {number}", fine, stage.recompute, plan.recompute)
    mode = plan.options.text("recompute", "auto")
    check.require(
        "it is not the requested one",
        mode in ("auto", plan.recompute, "first_layers", OFFLOAD),
        plan.recompute,
        mode,
    )
    last = plan.schedule == "gpipe" or "except_last" not in plan.modes
    check.require(
        "except_last is of gpipe, whose backwards begin with the last micro-batch", last, plan.schedule
    )


def _runs_first(inputs: VerificationInputs, stage: StatedStage) -> bool:
    """Whether it runs some first layers again, behind which it may be cut, in a schedule of whole stages."""
    plan, first = inputs.plan, first_layers(stage.recompute or "")
    if (
        first is None
        or plan.schedule not in ("1f1b", "gpipe")
        or inputs.plan.options.text("recompute", "auto") == "auto"
    ):
        return False
    place = stage.first_layer + first - 1
    return place < stage.last_layer and (inputs.layers is None or inputs.layers.cut_after[place])


def _offloads(inputs: VerificationInputs, stage: StatedStage) -> bool:
    """Whether it offloads, in a schedule of whole stages, as was asked for, at a bandwidth that is said."""
    options = inputs.plan.options
    is_requested = options.text("recompute", "auto") == OFFLOAD and options.has("host_bandwidth")
    return stage.recompute == OFFLOAD and is_requested and inputs.plan.schedule in ("1f1b", "gpipe")


def _training(check: LineCheck, inputs: VerificationInputs) -> None:
    plan, options = inputs.plan, inputs.plan.options
    training = read_training(plan)
    if inputs.profile is not None:
        check.same("amp", plan.profile.optional_text("amp"), _profile_text(plan, "amp", inputs.profile))
        shared, measured = (own.count("tensor_parallel", 1) for own in (plan.profile, inputs.profile))
        check.same("tensor_parallel", shared, measured)
    sharers, allowed = plan.profile.count("tensor_parallel", 1), options.counts("tp", least=1)
    check.require("tp is not a requested one", not allowed or sharers in allowed, sharers, allowed)
    for key, default in (("precision", "auto"), ("gradient_dtype", "auto")):
        own, requested = plan.whole.optional_text(key), options.text(key, default)
        check.require(f"{key} is not the requested one", requested in ("auto", own), own, requested)
    check.same("zero, and the requested one", training.zero, options.count("zero", training.zero))
    if plan.runtime in RULES:
        runs_zero = training.zero in RULES[plan.runtime].zero
        check.require(f"{plan.runtime} does not run this stage of ZeRO", runs_zero, training.zero)


def _profile_text(plan: StatedPlan, key: str, profile: Table) -> str | None:
    """What the profile says, where the plan is of those that say it."""
    return profile.optional_text(key) if plan.whole.has("precision") else None


def _check_shared(check: LineCheck, inputs: VerificationInputs, allowed: str) -> None:
    """The weights that several stages use are those that the runtime keeps copies of."""
    bounds = [(own.first_layer, own.last_layer + 1) for own in inputs.plan.stages]
    for weight in () if inputs.layers is None else inputs.layers.shared:
        users = [stage for stage, own in enumerate(bounds) if weight.is_used(*own)]
        fine = len(users) == 1 or allowed == "any" or (allowed == "ends" and users == [0, len(bounds) - 1])
        check.require(f"{inputs.plan.runtime} keeps no copies of {weight.name}", fine, users)


def _runtime(check: LineCheck, inputs: VerificationInputs) -> None:
    plan = inputs.plan
    requested = plan.options.optional_text("runtime")
    check.same("runtime, and the requested one", plan.runtime, requested)
    if plan.runtime is None:
        return
    check_runtime_rules(
        check,
        plan.runtime,
        schedule=plan.schedule,
        modes=plan.modes,
        replicas=[stage.replicas for stage in plan.stages],
        virtual_stages=plan.virtual_stages,
        size=plan.micro_batch_size,
    )
    _check_shared(check, inputs, RULES[plan.runtime].shares)
    if RULES[plan.runtime].trains_all and inputs.layers is not None:
        for number, stage in enumerate(plan.stages):
            own = stage.first_layer, stage.last_layer + 1
            shared = any(weight.trains and weight.is_used(*own) for weight in inputs.layers.shared)
            trained = shared or inputs.layers.trainable[slice(*own)].sum() > 0
            check.require(f"stage {number} has nothing to train, which {plan.runtime} refuses", bool(trained))
