"""Options at the ends of their ranges, and just beyond; what a problem makes of schedules and runtimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pplan.cost_models.errors import InfeasibleError, UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.schedules import device_actions
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.training_setting import chunks_in_flight
from pplan.planner.candidate import PipelineConfig, Proposal
from pplan.planner.mini_batch import smaller_defaults
from pplan.planner.objectives.objective import Objective, parse_objective
from pplan.planner.other_schedules import propose_parts
from pplan.planner.plan_options import PlanOptions, read_pins
from pplan.planner.problem import Problem

MakeChain = Callable[..., Chain]


@pytest.mark.parametrize(
    ("field", "allowed", "refused"),
    [
        ("memory_limit", (0, 1, 2.0**100), (-1, 2.0**101)),
        ("micro_batches", (1, 2**14), (0, 2**14 + 1)),
        ("mini_batch", (1, 2**40), (0, 2**40 + 1)),
        ("time_limit", (1e-9, 1e9), (0.0, -1.0, 1.0000001e9)),
        ("max_stages", (1, 65_536), (0, 65_537)),
        ("min_micro_batch", (1, 2**40), (0,)),
        ("zero", (0, 1, 2, 3), (-1, 4)),
    ],
)
def test_ranges_of_options(field: str, allowed: tuple[float, ...], refused: tuple[float, ...]) -> None:
    for value in allowed:
        assert getattr(PlanOptions(**{field: value}), field) == value  # type: ignore[arg-type]
    for value in refused:
        with pytest.raises(UsageError, match=f"{field}="):
            PlanOptions(**{field: value})  # type: ignore[arg-type]


def test_ranges_of_objectives() -> None:
    assert parse_objective("memory:1000000000%").slack == 1e7
    assert parse_objective("memory:0").slack == 0.0
    assert parse_objective("memory: .5 %").slack == 0.005
    with pytest.raises(UsageError, match="must be at most 1e\\+09 %"):
        parse_objective("memory:1000000001%")
    for price in (1e-9, 1e9):
        assert Objective("cost", prices={"": price}).prices == {"": price}
    for price in (0.9e-9, 1.1e9):
        with pytest.raises(UsageError, match="from 1e-09 to 1e\\+09"):
            Objective("cost", prices={"": price})


def nodes(gpus: int, per_node: int = 8) -> Topology:
    link = Link(1e6, 0.0)
    return two_level_topology(Device("toy", None), gpus, per_node, link, link)


@pytest.fixture
def problem(make_chain: MakeChain) -> Callable[..., Problem]:
    def make(gpus: int = 2, per_node: int = 8, layers: int = 8, **options: Any) -> Problem:
        return Problem(make_chain(1, layers, cuts=1.1), nodes(gpus, per_node), PlanOptions(**options))

    return make


@pytest.mark.parametrize(
    ("options", "ends", "devices", "allowed"),
    [
        ({}, (4, 8), ((0,), (1,)), True),
        ({}, (4, 8), ((1,), (0,)), True),
        ({}, (4, 8), ((0,), (4,)), False),  # there are four
        ({"max_stages": 2}, (4, 8), ((0,), (1,)), True),
        ({"max_stages": 2}, (2, 4, 8), ((0,), (1,), (2,)), False),
        ({"min_micro_batch": 2}, (4, 8), ((0,), (1,)), True),
        ({"min_micro_batch": 2}, (4, 8), ((0, 1), (2,)), False),
        ({"use_all": True}, (4, 8), ((0, 1), (2,)), False),
        ({"use_all": True}, (4, 8), ((0, 1), (2, 3)), True),
        ({"cut_after": ("layer3",)}, (4, 8), ((0,), (1,)), True),
        ({"cut_after": ("layer3",)}, (3, 8), ((0,), (1,)), False),
        ({"runtime": "deepspeed"}, (4, 8), ((0, 1), (2, 3)), True),
        ({"runtime": "deepspeed"}, (4, 8), ((0, 1), (2,)), False),
        ({"runtime": "torchgpipe", "schedule": "gpipe"}, (4, 8), ((0, 1), (2, 3)), False),
    ],
    ids=str,
)
def test_proposals_that_are_allowed(
    options: dict[str, Any],
    ends: tuple[int, ...],
    devices: tuple[tuple[int, ...], ...],
    allowed: bool,
    problem: Callable[..., Problem],
) -> None:
    schedule = options.get("schedule", "1f1b")
    own = problem(4, mini_batch=8, **options)
    assert own.allows(Proposal(PipelineConfig(schedule, "never", 4, 2), ends, devices)) == allowed


def test_smaller_batches_are_halves(problem: Callable[..., Problem]) -> None:
    """Of 32 samples on each of two devices; none where one was given."""
    assert [own.mini_batch for own in smaller_defaults(problem(2))] == [32, 16, 8, 4, 2]
    assert list(smaller_defaults(problem(2, mini_batch=64))) == []
    fixed = [own.mini_batch for own in smaller_defaults(problem(2, micro_batches=16))]
    assert fixed == [32, 16]


def test_balanced_parts_of_other_schedules(problem: Callable[..., Problem]) -> None:
    """Two parts a device; replicas of each that make all devices; none of one device, or of one part."""
    own = problem(4, mini_batch=8, micro_batches=4, schedule="any")
    made = list(propose_parts(own, ("interleaved", "1f1b")))
    assert {proposal.config.schedule for proposal in made} == {"interleaved"}
    shapes = {(len(proposal.ends) // 2, proposal.replicas[0]) for proposal in made}
    assert shapes == {(2, 1), (4, 1), (2, 2)}
    for proposal in made:
        assert proposal.config.virtual_stages == 2
        stages = len(proposal.ends) // 2
        assert proposal.devices[:stages] == proposal.devices[stages:]
        assert sorted(rank for devices in proposal.devices[:stages] for rank in devices) == list(
            range(proposal.device_count)
        )
    assert list(propose_parts(own, ("zb-v",)))
    assert {proposal.config.schedule for proposal in propose_parts(own, ("zb-v",))} == {"zb-v"}


def test_pins_as_they_are_written() -> None:
    assert read_pins(["features.10=stage1", "a=b=2"], "pin") == (("features.10", 1), ("a=b", 2))
    for text in ("x", "x=", "=1", "x=stage", "x=-1", "x=" + "9" * 19):
        with pytest.raises(UsageError, match="is not of the form LAYER=stageN"):
            read_pins([text], "pin")


def test_prices_are_refused_with_their_kind() -> None:
    for prices, text in (({"A100": 0.0}, "price='A100=0': must"), ({"": 0.0}, "price=0: must")):
        with pytest.raises(UsageError) as caught:
            Objective("cost", prices=prices)
        assert caught.value.what.startswith(text)


def test_degrees_are_in_their_range() -> None:
    assert ParallelDegrees(tensor=2**20).tensor == 2**20
    for value in (0, 2**20 + 1):
        with pytest.raises(UsageError, match=f"data={value}: must be from 1 to 1048576"):
            ParallelDegrees(data=value)
    with pytest.raises(UsageError, match="zero=4: not known"):
        ParallelDegrees(zero=4)


def test_an_error_says_its_details_to_programs() -> None:
    error = InfeasibleError("none fits", "Use more.", {"missing_bytes": 7})
    assert error.as_json == {
        "status": 3,
        "kind": "infeasible",
        "message": "none fits",
        "advice": "Use more.",
        "missing_bytes": 7,
    }


def test_replicas_that_any_plan_may_have(problem: Callable[..., Problem]) -> None:
    """Up to 64 devices every number; beyond, of those with shares of as many samples the fewest."""
    assert problem(64, 64, mini_batch=8, micro_batches=1).replica_choices(8) == [tuple(range(1, 9))]
    assert problem(65, 65, mini_batch=8, micro_batches=1).replica_choices(8) == [(1, 2, 3, 4, 8)]
    assert problem(4, mini_batch=8, runtime="deepspeed").replica_choices(4) == [(1,), (2,), (4,)]
    assert problem(4, mini_batch=8, runtime="torchgpipe").replica_choices(4) == [(1,)]
    assert not problem(64, 64, mini_batch=64).any_count
    assert problem(65, 65, mini_batch=65).any_count
    assert not problem(65, 65, mini_batch=65, runtime="deepspeed").any_count
    long = problem(2, layers=300, mini_batch=8)
    assert (long.space.is_long, long.any_count) == (True, True)


def test_peaks_of_interleaved_devices_by_hand() -> None:
    """Two devices with two virtual stages, two micro-batches, F0 F0 F1 F1 first: 2 and 2; the last holds one
    of the second part at a time. None that another holds as many or more of is kept."""
    assert chunks_in_flight(0, 1, 4, 1) == ((1,),)
    assert chunks_in_flight(0, 2, 4, 1) == ((2,),)
    for device in (0, 1):
        for micro_batches in (2, 4, 8):
            peaks = chunks_in_flight(device, 2, micro_batches, 2)
            held = set[tuple[int, ...]]()
            counts = [0, 0]
            for action in device_actions(device, 2, micro_batches, 2):
                counts[action.chunk] += 1 if action.kind == "F" else -1
                held.add(tuple(counts))
            assert all(
                any(all(a <= b for a, b in zip(own, peak, strict=True)) for peak in peaks) for own in held
            )
            assert set(peaks) <= held
            assert all(
                not all(a <= b for a, b in zip(one, other, strict=True))
                for one in peaks
                for other in peaks
                if one != other
            )
            assert len(set(peaks)) == len(peaks)
