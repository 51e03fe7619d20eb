"""The device's context and the profile's precision: in the plan, the refusal and the simulation alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.machines import device_context
from pplan.cost_models.quantities import format_bytes, parse_bytes
from pplan.cost_models.topology import Device, Group, Link, Topology, two_level_topology
from pplan.planner.build_plan import build_problem
from pplan.planner.objectives.objective import Objective
from pplan.planner.objectives.solve_objective import solve_objective
from pplan.planner.plan_file import Plan, ProfileReference
from pplan.planner.plan_options import PlanOptions
from pplan.planner.plan_simulation import simulate_plan

MakeChain = Callable[..., Chain]
CONTEXT = 426 * 2**20
"""Of an RTX 4090."""


@pytest.fixture
def chain(make_chain: MakeChain) -> Chain:
    """Twelve layers, every cut allowed, of a million parameters each."""
    chain = make_chain(4, 12, traffic=0.0, cuts=1.1)
    weights = np.full(12, 4e6)
    return replace(chain, parameter_bytes=weights, trainable_bytes=weights)


def _machine(name: str, memory: int | None = None) -> Topology:
    return two_level_topology(Device(name, memory), 4, 4, Link(20.0, 0.0), Link(5.0, 0.0))


def _solved(chain: Chain, topology: Topology, dtype: str = "float32", **options: Any) -> Plan:
    profile = ProfileReference(file="", sha256="", dtype=dtype)
    return solve_objective(
        Objective(),
        build_problem(chain, topology, PlanOptions(**options), profile, {}),
        model="toy",
        profile=profile,
    )


PIPELINE: dict[str, Any] = {"schedule": "1f1b", "mini_batch": 16}


@pytest.mark.slow
@pytest.mark.parametrize("options", [PIPELINE, {"mini_batch": 16}], ids=["pipeline", "replicas"])
@pytest.mark.parametrize("name", ["RTX 4090", "NVIDIA GeForce RTX 4090"])
def test_every_stage_has_the_context_of_its_gpu(chain: Chain, name: str, options: dict[str, Any]) -> None:
    light = replace(chain, trainable_bytes=np.zeros(12)) if "schedule" not in options else chain
    plan, bare = (_solved(light, _machine(device), **options) for device in (name, "CPU"))
    assert (plan.balance, plan.replicas) == (bare.balance, bare.replicas)
    assert max(plan.replicas) == (1 if "schedule" in options else 4)
    for stage, without in zip(plan.stages, bare.stages, strict=True):
        assert stage.memory == without.memory | {"context": CONTEXT}
        assert stage.memory_bytes == without.memory_bytes + CONTEXT
    for other, without_it in zip(plan.alternatives, bare.alternatives, strict=True):
        assert other.memory_bytes == [own + CONTEXT for own in without_it.memory_bytes]
    found = simulate_plan(plan, light, _machine(name))
    assert [own.terms for own in found.memory] == [stage.memory for stage in plan.stages]


@pytest.mark.slow
def test_the_context_counts_against_the_limit(chain: Chain) -> None:
    """With the memory that the best plan needs without its context, a GPU takes another plan or none."""
    needed = max(stage.memory_bytes for stage in _solved(chain, _machine("toy"), **PIPELINE).stages)
    assert _solved(chain, _machine("toy", needed), **PIPELINE)
    with pytest.raises(InfeasibleError, match=r"needs .*, context 426\.00 MiB\); .* are missing") as caught:
        _solved(chain, _machine("RTX 4090", needed), **PIPELINE)
    # What the error says would fit does, and a percent less does not.
    said = parse_bytes(caught.value.hint.split("memory='")[1].split("'")[0])
    plan = _solved(chain, _machine("RTX 4090", said), **PIPELINE)
    assert max(stage.memory_bytes for stage in plan.stages) <= said
    with pytest.raises(InfeasibleError):
        _solved(chain, _machine("RTX 4090", int(0.99 * said)), **PIPELINE)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_precision_is_the_profiles(chain: Chain, dtype: str, width: int) -> None:
    """The 8-bit states are two bytes and two scales for 256 parameters, however wide these are."""
    topology = _machine("toy")
    plan = _solved(chain, topology, dtype, optimizer="adamw-8bit", **PIPELINE)
    states = 4e6 / width * (2 + 2 * 4 / 256)
    assert [stage.memory["optimizer"] for stage in plan.stages] == [
        pytest.approx(states * stage.layers, abs=1) for stage in plan.stages
    ]
    found = simulate_plan(plan, chain, topology)
    assert [own.terms for own in found.memory] == [stage.memory for stage in plan.stages]


def test_a_dtype_without_precision_is_refused(chain: Chain) -> None:
    with pytest.raises(UsageError, match="dtype 'int8' is unknown"):
        _solved(chain, _machine("toy"), "int8", **PIPELINE)


def test_the_context_is_that_of_the_preset() -> None:
    figure = device_context("RTX 4090")
    assert figure is not None
    assert figure.value == CONTEXT


@pytest.mark.slow
def test_adamw_in_mixed_precision_takes_16_bytes_a_parameter(chain: Chain) -> None:
    """Seven thousand million parameters in bfloat16: 8 bytes each are 55 GiB and would fit into 79, the 16
    that they take are 110 and do not; with float32 gradients they are 18."""
    count = 7e9
    big = replace(chain, parameter_bytes=np.full(12, count / 6), trainable_bytes=np.full(12, count / 6))
    limit = int(79.18 * 2**30)
    alone = two_level_topology(Device("toy", limit), 1, 1, Link(20.0, 0.0), Link(5.0, 0.0))
    options: dict[str, Any] = {"optimizer": "adamw", "schedule": "1f1b", "mini_batch": 4}
    with pytest.raises(InfeasibleError, match=r"master.weights"):
        _solved(big, alone, "bfloat16", **options)
    pure = _solved(big, alone, "bfloat16", **options, precision="bf16")
    assert any("pure bf16" in note for note in pure.notes)
    for gradient_dtype, each in (("auto", 16), ("fp32", 18)):
        plan = _solved(big, _machine("toy", limit), "bfloat16", **options, gradient_dtype=gradient_dtype)
        names = ("weights", "gradients", "master_weights", "optimizer")
        in_flight = sum(stage.memory[name] for stage in plan.stages for name in names)
        buffers = float(big.buffer_bytes.sum())
        assert in_flight - buffers == pytest.approx(each * count, rel=1e-9)
        assert (plan.precision, plan.zero) == ("mixed", 0)
        read = Plan.parse(plan.to_json(), "toy.plan.json")
        found = simulate_plan(read, big, _machine("toy", limit))
        assert [own.terms for own in found.memory] == [stage.memory for stage in plan.stages]


@pytest.mark.parametrize("runtime", [None, "torch", "torchtitan", "megatron", "deepspeed"])
@pytest.mark.parametrize("recompute", ["never", "always"])
def test_buffers_of_a_whole_step(make_chain: MakeChain, runtime: str | None, recompute: str) -> None:
    """Of 1F1B's stage i of p by hand, where PyTorch runs it: M buffers of what it receives both ways, in
    which the p - i inputs in flight lie; of each of these an output and a gradient. Others have one of each.
    """
    chain, count = make_chain(3, 8, traffic=1e3, cuts=1.1), 32
    heavy = replace(chain, cut_after=np.arange(8) % 2 == 1)
    options: dict[str, Any] = {"mini_batch": count, "micro_batches": count, "schedule": "1f1b"}
    options |= {"cut_after": ("layer1", "layer3", "layer5"), "recompute": recompute}
    few = [
        stage.memory_bytes for stage in _solved(heavy, _machine("CPU"), runtime="megatron", **options).stages
    ]
    costs, many = heavy.at(1), []
    for number, own in enumerate(few):
        first, last = 2 * number, 2 * number + 1
        received = costs.output_bytes[first - 1] if number else 0.0
        sent = costs.output_bytes[last] if number < 3 else 0.0
        held = np.maximum(received - costs.saved_input_bytes[first], 0.0) + costs.output_bytes[last]
        waits = held if recompute == "never" else costs.output_bytes[last]
        again = 0.0 if recompute == "never" else held
        more = count * received + (count - 1) * sent + (4 - number) * waits + again
        many.append(own + 1.05 * more)
    plan = _solved(heavy, _machine("CPU"), runtime=runtime, **options)
    ahead = runtime in ("torch", "torchtitan")
    assert [own.memory_bytes for own in plan.stages] == pytest.approx(many if ahead else few, abs=8)
    limit = max(few) + 16
    assert max(many) > limit + 16
    if ahead:
        with pytest.raises(InfeasibleError):
            _solved(heavy, _machine("CPU"), runtime=runtime, memory_limit=round(max(many)) - 16, **options)
        return
    tight = _solved(heavy, _machine("CPU"), runtime=runtime, memory_limit=limit, **options)
    told = [text for text in tight.warnings if "PyTorch's pipelining" in text]
    assert bool(told) == (runtime is None)
    assert all(f"needs {format_bytes(round(max(many) - limit))} more" in text for text in told)


def test_a_stage_without_neighbours_has_no_buffers(make_chain: MakeChain) -> None:
    whole = replace(make_chain(3, 4, traffic=1e3), cut_after=np.zeros(4, dtype=np.bool_))
    plans = [_solved(whole, _machine("CPU"), runtime=name, mini_batch=16) for name in ("torch", "megatron")]
    assert plans[0].stages[0].memory == plans[1].stages[0].memory


@pytest.mark.parametrize("names", [("NVIDIA H100 80GB HBM3", "T4"), ("T4", "toy"), ("toy", "T4")])
def test_replicas_of_several_kinds_have_the_largest_context(chain: Chain, names: tuple[str, str]) -> None:
    """Under one limit for all the device of which a process takes most has least left."""
    kinds = tuple(Group(Device(name, None), 1) for name in names)
    topology = replace(_machine("toy"), groups=kinds)
    light = replace(chain, trainable_bytes=np.zeros(12), cut_after=np.zeros(12, dtype=bool))
    options: dict[str, Any] = {"mini_batch": 8, "micro_batches": 2, "recompute": "never", "use_all": True}
    plan = _solved(light, topology, memory_limit=4e9, **options)
    assert plan.replicas == [2]
    largest = max(0 if (own := device_context(name)) is None else own.value for name in names)
    assert plan.stages[0].memory["context"] == largest
    # What it needs is enough, and a byte less is not.
    needed = plan.stages[0].memory_bytes
    assert _solved(light, topology, memory_limit=needed + 1, **options)
    with pytest.raises(InfeasibleError):
        _solved(light, topology, memory_limit=needed - 2, **options)
