"""Steps of pipelines side by side against each simulated alone."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.schedules import cached_program
from pplan.cost_models.step_costs import linear_costs
from pplan.cost_models.timeline import simulate
from pplan.planner.candidate import PipelineConfig
from pplan.planner.search import pipelines
from pplan.planner.search.pipelines import Pipelines

Patch = pytest.MonkeyPatch


def make_pipelines(seed: int, **more: Any) -> Pipelines:
    """Of three stages, in eighths."""
    random = np.random.default_rng(seed)

    def seconds(low: int, high: int, width: int = 3) -> Any:
        return random.integers(low, high, (5, width)) / 8

    plain = seconds(4, 30)
    again = seconds(0, 9)
    launch = seconds(0, 30)
    known = {
        "config": PipelineConfig("1f1b", "never", 6, 1),
        "forward": seconds(2, 20),
        "backward": plain + again,
        "plain": plain,
        "accumulation": seconds(0, 4),
        "exposed_allreduce": seconds(0, 40),
        "occupancy": seconds(0, 3, 2),
        "latency": seconds(0, 9, 2),
        "forward_launch": launch,
        "backward_launch": launch + seconds(0, 5),
        "plain_launch": launch,
    }
    return Pipelines(**(known | more))


def alone(own: Pipelines, row: int) -> float:
    """A step of one of them: the last micro-batch differs where all but it run again."""
    count = own.config.micro_batches

    def each(usual: Any, last: Any) -> Any:
        table = np.repeat(usual[row][:, None], count, axis=1)
        if own.config.recompute == "except_last":
            table[:, -1] = last[row]
        return table

    again = own.backward_launch - own.plain_launch
    costs = linear_costs(
        forward=each(own.forward, own.forward),
        backward=each(own.backward, own.plain),
        occupancy=own.occupancy[row],
        latency=own.latency[row],
        forward_launch=each(own.forward_launch, own.forward_launch),
        backward_launch=each(own.backward_launch, own.plain_launch),
        recompute_launch=each(again, 0 * again) if own.hosts == "one" else None,
        all_reduce=own.exposed_allreduce[row],
        accumulation=own.accumulation[row],
        hosts=own.hosts,
    )
    program = cached_program(own.config.schedule, own.stages, count)
    return simulate(program, costs).step_seconds


@pytest.mark.parametrize("hosts", ["one", "each"])
@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("most", [0, 10**6])
def test_pipelines_side_by_side(
    most: int, schedule: Any, recompute: Any, hosts: Any, monkeypatch: Patch
) -> None:
    """`most`: actions up to which each is simulated by itself."""
    monkeypatch.setattr(pipelines, "MANY_ACTIONS", most)
    monkeypatch.setattr(pipelines, "MANY_STAGES", 2)
    config = PipelineConfig(schedule, recompute, 6, 1)
    for seed in range(3):
        for launched in (0.0, 0.05, 1.0):
            own = make_pipelines(seed, config=config, hosts=hosts)
            launches = {
                name: launched * getattr(own, name)
                for name in ("forward_launch", "backward_launch", "plain_launch")
            }
            own = make_pipelines(seed, config=config, hosts=hosts, **launches)
            expected = [alone(own, row) for row in range(len(own))]
            assert own.step_seconds().tolist() == pytest.approx(expected)
            few = own.select(np.array([3, 1]))
            assert few.step_seconds().tolist() == pytest.approx([expected[3], expected[1]])


def test_when_a_stage_may_wait_for_its_host() -> None:
    """Where a launch takes longer than the shortest such pass; of one process, where there is any."""
    zero = np.zeros((5, 3))
    none: dict[str, Any] = {"forward_launch": zero, "backward_launch": zero, "plain_launch": zero}
    for name, base in (
        ("forward_launch", "forward"),
        ("backward_launch", "backward"),
        ("plain_launch", "plain"),
    ):
        for mode in ("never", "except_last"):
            config = PipelineConfig("1f1b", mode, 6, 1)
            own = make_pipelines(1, config=config, **none)
            assert not own._is_late
            launch = zero.copy()
            launch[2, 1] = (getattr(own, base) - own.accumulation)[2, 1]
            assert not make_pipelines(1, config=config, **(none | {name: launch}))._is_late
            launch[2, 1] += 0.125
            late = make_pipelines(1, config=config, **(none | {name: launch}))._is_late
            assert late == (name != "plain_launch" or mode == "except_last")
    launch = zero.copy()
    launch[0, 0] = 0.001
    assert make_pipelines(1, hosts="one", **(none | {"forward_launch": launch}))._is_late
    assert make_pipelines(1, hosts="one", **(none | {"backward_launch": launch}))._is_late
    assert not make_pipelines(1, hosts="one", **(none | {"plain_launch": launch}))._is_late


def test_where_all_stages_are_looked_at_side_by_side(monkeypatch: Patch) -> None:
    """Of a step of more than so many actions, of passes that are all alike, with transfers that block
    nothing and no host for all that is late."""
    monkeypatch.setattr(pipelines, "MANY_ACTIONS", 2 * 3 * 6 - 1)
    assert make_pipelines(1)._linear_ends(None) is None
    monkeypatch.setattr(pipelines, "MANY_STAGES", 3)
    zero = np.zeros((5, 3))
    none: dict[str, Any] = {"forward_launch": zero, "backward_launch": zero, "plain_launch": zero}
    assert make_pipelines(1)._linear_ends(None) is not None
    assert make_pipelines(1, hosts="one")._linear_ends(None) is None
    assert make_pipelines(1, hosts="one", **none)._linear_ends(None) is not None
    config = PipelineConfig("1f1b", "except_last", 6, 1)
    assert make_pipelines(1, config=config)._linear_ends(None) is None
    monkeypatch.setattr(pipelines, "MANY_ACTIONS", 2 * 3 * 6)
    assert make_pipelines(1)._linear_ends(None) is None


class Ports:
    """Each pipeline shares ports of its own for so long, in one of two patterns."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)
        self.asked = list[Any]()

    def sharing(self, devices: Any, hops: Any, reduced: Any) -> Any:
        self.asked.append((devices, [tuple(own) for own in hops], reduced))
        return SimpleNamespace(
            port_seconds=next(self.seconds), pattern=bytes([len(self.asked) % 2]), links=None, reduce_loads=()
        )


@pytest.mark.parametrize("limit", [None, inf, 30.0, 60.0, 90.0])
def test_ports_that_are_shared_for_long(limit: float | None) -> None:
    """A step takes no less than its ports; below a limit the fastest is told, and no other is said to be
    faster."""
    seen = set()
    for seed in range(6):
        own = make_pipelines(seed, forward_launch=np.zeros((5, 3)), backward_launch=np.zeros((5, 3)))
        expected = [alone(own, row) for row in range(5)]
        seconds = [0.0, 1.2 * expected[1], 70.0, 0.5 * expected[3], 20.0]
        ports = Ports(seconds)
        devices = [((0, 1), (2,), (3,))] * 5
        ends = np.arange(15.0).reshape(5, 3)
        routes = pipelines.PipelineRoutes(ports, devices, ends, 2 * ends, [()] * 5)  # type: ignore[arg-type]
        routed = make_pipelines(
            seed, forward_launch=np.zeros((5, 3)), backward_launch=np.zeros((5, 3)), routes=routes
        )
        steps = routed.step_seconds(limit)
        true = [max(pair) for pair in zip(expected, seconds, strict=True)]
        if limit is None:
            assert steps.tolist() == pytest.approx(true)
        else:
            least = min(true)
            if least < limit:
                assert steps.min() == pytest.approx(least)
                assert int(steps.argmin()) == true.index(least)
            assert all(own >= min(least, limit) * (1 - 1e-12) for own in steps)
            assert all(own <= real * (1 + 1e-12) for own, real in zip(steps, true, strict=True))
            seen.add(least < limit)
        asked, hops, reduced = ports.asked[2]
        assert asked == devices[2]
        occupied = (6 * own.occupancy[2]).tolist()
        assert hops == [(0, 1, occupied[0]), (1, 0, occupied[0]), (1, 2, occupied[1]), (2, 1, occupied[1])]
        assert [tuple(each) for each in reduced] == [(0, (0, 1), 6.0, 1, 12.0)]
    assert seen or limit is None
