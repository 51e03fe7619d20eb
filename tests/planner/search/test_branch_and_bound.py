"""The search against brute force over every plan of small spaces."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.layer import Chain
from pplan.cost_models.optimizers import Precision, StepKernels
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, Proposal, ScoredPlan, pipeline_configs
from pplan.planner.scoring import fastest
from pplan.planner.search.branch_and_bound import SearchResult, search
from pplan.planner.search.budget import SearchBudget
from pplan.planner.search.family import Family
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
FamiliesOf = Callable[..., list[Family]]
BruteForce = Callable[..., Any]

BY_STAGE = pipeline_configs(4, ("1f1b", "gpipe"), ("by_stage",), [1, 2, 4])
WHOLE = pipeline_configs(4, ("1f1b", "gpipe"), ("never", "except_last", "always"), [1, 2, 4])


@dataclass
class Seen:
    """What was among the best plans of several spaces."""

    infeasible: int = 0
    biting: int = 0
    replicated_pipeline: int = 0
    selective: int = 0
    pipelines: int = 0
    partly: int = 0

    def add(self, space: Space, best: Any) -> None:
        """One more space, and its best plan."""
        if best is None:
            self.infeasible += 1
            return
        self.biting += best.plans < best.unlimited
        self.replicated_pipeline += max(best.proposal.replicas) > 1
        self.selective += len(set(best.modes)) > 1
        self.pipelines += len(best.modes) > 1
        self.partly += best.proposal.device_count < space.topology.gpus


@pytest.fixture
def checked(brute_force: BruteForce) -> Callable[..., Any]:
    """A function of (space, families, seen): the search's answer is held against every plan."""

    def check(
        space: Space, families: Sequence[Family], seen: Seen | None = None, **options: Any
    ) -> SearchResult:
        counts = range(1, min(space.topology.gpus, options.get("most_stages") or 99) + 1)
        found = search(space, families, counts)
        best = brute_force(space, families, **options).fastest()
        if seen is not None:
            seen.add(space, best)
        assert found.exact
        if best is None:
            assert found.best is None
            return found
        assert found.best is not None
        assert found.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
        assert found.root_bound_seconds <= best.step_seconds * (1 + 1e-12)
        assert found.bound_seconds == pytest.approx(best.step_seconds, rel=1e-9)
        assert fastest(space, [found.best.proposal]) == found.best
        recompute = fastest(space, [best.proposal])
        assert recompute is not None
        assert recompute.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
        return found

    return check


def some_configs(
    rng: np.random.Generator, given: Sequence[PipelineConfig], count: int
) -> list[PipelineConfig]:
    chosen = rng.choice(len(given), min(count, len(given)), replace=False)
    return [given[index] for index in sorted(chosen)]


MEMORIES = (None, 400, 700, 850, 1000, 1200, 1500, 2500)


def with_hosts(chain: Chain, times: float) -> Chain:
    """Layers that take so many times as long to launch: from 5 times on hosts may decide."""
    return replace(
        chain,
        forward_host_seconds=times * chain.forward_host_seconds,
        backward_host_seconds=times * chain.backward_host_seconds,
    )


def a_space(
    rng: np.random.Generator,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    *,
    layers: int = 8,
    gpus: int = 6,
    **more: Any,
) -> Space:
    """Up to so many layers on up to so many GPUs, with slow links and fast, memory that bites, and hosts that
    devices wait for."""
    chain = make_chain(
        int(rng.integers(2**31)),
        int(rng.integers(1, layers + 1)),
        traffic=float(rng.choice([0, 0.1, 1, 10])),
        cuts=float(rng.choice([0.5, 0.9, 1.1])),
        adding=float(rng.spawn(1)[0].choice([0, 0.3, 1])),
    )
    chain = with_hosts(chain, float(rng.spawn(1)[0].choice([1, 1, 6, 25])))
    topology = make_topology(
        int(rng.integers(1, gpus + 1)),
        per_node=int(rng.choice([2, 3, 8])),
        latency=float(rng.choice([0, 0.05, 0.5])),
        memory=[*MEMORIES][int(rng.integers(len(MEMORIES)))],
    )
    kernels: StepKernels = ("fused", "foreach", "for-loop")[int(rng.spawn(1)[0].integers(3))]
    precision = Precision(weight=4, gradient=4, kernels=kernels)
    return Space(chain, topology, str(rng.choice(["adam", "sgd"])), precision=precision, **more)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_best_of_all_plans(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    """Cuts, replicas, placements, micro-batches, schedules and recomputation by stage: 24 spaces each."""
    rng, seen = np.random.default_rng(seed), Seen()
    for _ in range(24):
        space = a_space(rng, make_chain, make_topology)
        small = len(space.chain) * space.topology.gpus <= 16
        chosen = some_configs(rng, BY_STAGE, 3 if small else 1) + some_configs(rng, WHOLE, 2)
        checked(space, families_of(space, chosen, range(1, 7)), seen)
    assert min(seen.infeasible, seen.biting, seen.replicated_pipeline, seen.pipelines, seen.partly) > 0, seen


def test_best_where_some_stages_recompute(
    make_chain: MakeChain, make_topology: MakeTopology, families_of: FamiliesOf, checked: Callable[..., Any]
) -> None:
    """With more and more memory, fewer and fewer stages recompute."""
    seen = Seen()
    for memory in range(400, 1000, 50):
        chain = make_chain(4, 6, traffic=0.1, cuts=1.1)
        space = Space(chain, make_topology(3, memory=memory), "sgd")
        config = pipeline_configs(8, ("1f1b", "gpipe"), ("by_stage",), [2])
        checked(space, families_of(space, config, (1, 2)), seen)
    assert min(seen.infeasible, seen.biting, seen.selective, seen.pipelines) > 0, seen


def runtime_of(rng: np.random.Generator, name: str) -> dict[str, Any]:
    """A runtime, or one that, besides, trains every stage, or leaves some untrained."""
    return {"runtime": replace(RUNTIMES[name], trains_every_stage=bool(rng.integers(2)))}


def trained(space: Space) -> Callable[..., bool]:
    """Whether every stage has something to train, where the runtime asks for it."""

    def keep(ends: tuple[int, ...], devices: object) -> bool:
        del devices
        asks = space.runtime is not None and space.runtime.trains_every_stage
        bounds = zip((0, *ends), ends, strict=False)
        return not asks or all(space.chain.trainable_bytes[a:b].sum() > 0 for a, b in bounds)

    return keep


@pytest.mark.parametrize("name", ["torchgpipe", "deepspeed"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 2))])
def test_best_that_a_runtime_runs(
    name: str,
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    """One process that launches all stages, without replicas; as many replicas on every stage."""
    rng, seen = np.random.default_rng(100 + seed), Seen()
    for _ in range(20):
        space = a_space(rng, make_chain, make_topology, gpus=5, **runtime_of(rng, name))
        own = [s for s in WHOLE if s.schedule in RUNTIMES[name].schedules]
        replicas = (1,) if name == "torchgpipe" else (1, 2, 4)
        families = families_of(space, some_configs(rng, own, 3), replicas, equal=True)
        checked(space, families, seen, keep=trained(space))
    assert min(seen.infeasible, seen.biting, seen.pipelines, seen.partly) > 0, seen
    assert (seen.replicated_pipeline > 0) is (name == "deepspeed")


@pytest.mark.parametrize("runtime", ["torchgpipe", "torch"])
def test_launches_count_where_nothing_else_takes_time(
    runtime: str,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    """Layers without forward seconds are launched again, too, where they recompute."""
    chain = make_chain(5, 4, traffic=0.1, cuts=1.1)
    half = np.array([1.0, 0.0, 1.0, 0.0])[:, None]
    chain = replace(chain, forward_seconds=chain.forward_seconds * half)
    space = Space(chain, make_topology(3, memory=900), "sgd", runtime=RUNTIMES[runtime])
    own = [config for config in WHOLE if config.schedule == "gpipe" or runtime == "torch"]
    for config in own:
        checked(space, families_of(space, [config], (1,) if runtime == "torchgpipe" else (1, 2)))


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_one_late_process_launches(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    """Forwards one after another, backwards beside each other, what they run again in turn."""
    chain = with_hosts(make_chain(seed, 6, traffic=0.3, cuts=1.1, adding=0.5), [4, 8, 25, 100][seed])
    runtime = RUNTIMES["torchgpipe"]
    space = Space(chain, make_topology(4, latency=0.05, memory=[None, 800][seed % 2]), "sgd", runtime=runtime)
    own = [config for config in WHOLE if config.micro_batches > 1 and config.schedule == "gpipe"]
    checked(space, families_of(space, own, (1,)))


@pytest.mark.parametrize("seed", range(6))
def test_plans_whose_hosts_are_late(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    chain = with_hosts(make_chain(seed, 5, traffic=0.3, cuts=1.1, adding=0.5), [4, 8, 25][seed % 3])
    space = Space(chain, make_topology(4, latency=0.05, memory=[None, 800][seed % 2]), "sgd")
    own = [config for config in WHOLE if config.micro_batches > 1]
    checked(space, families_of(space, own[seed::6], (1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_best_on_several_kinds_of_devices(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
    mixed: Callable[..., Any],
) -> None:
    """Faster and slower ones, and one with a profile of its own: by every order of their runs."""
    rng, seen = np.random.default_rng(200 + seed), Seen()
    for _ in range(10):
        space = a_space(rng, make_chain, make_topology, layers=6)
        if space.topology.gpus == 1:
            continue
        topology, profiles = mixed(rng, space.chain, space.topology)
        assert len(topology.kinds) > 1
        space = Space(space.chain, topology, space.optimizer, profiles=profiles)
        checked(space, families_of(space, some_configs(rng, BY_STAGE, 1), range(1, 5)), seen)
    assert min(seen.pipelines, seen.partly, seen.replicated_pipeline) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_best_where_gradients_fill_several_buckets(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
    heavier: Callable[..., tuple[Chain, Topology]],
) -> None:
    rng, seen = np.random.default_rng(300 + seed), Seen()
    for _ in range(6):
        space = a_space(rng, make_chain, make_topology)
        topology = make_topology(space.topology.gpus, per_node=3)
        chain, topology = heavier(space.chain, topology)
        space = Space(chain, topology, "sgd")
        checked(space, families_of(space, some_configs(rng, BY_STAGE, 2), range(1, 7)), seen)
    assert min(seen.pipelines, seen.replicated_pipeline) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_best_on_all_devices_and_of_few_stages(
    seed: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    checked: Callable[..., Any],
) -> None:
    rng, seen = np.random.default_rng(400 + seed), Seen()
    for _ in range(20):
        space = a_space(rng, make_chain, make_topology)
        families = families_of(space, some_configs(rng, BY_STAGE, 2), range(1, 7))
        on_all = [replace(family, on_all=True) for family in families]
        checked(space, on_all, seen)
        checked(space, families, most_stages=2)
    assert seen.partly == 0
    assert min(seen.infeasible, seen.biting, seen.pipelines, seen.replicated_pipeline) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [(1, 0, 3e9), (1, 400_000, 0.0), (1, 400_000, 1e6)])
def test_a_narrow_search_still_proves_its_bound(
    narrow: tuple[int, int, float],
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With room or work for few plans the best may be missed, but the bound must hold and be honest."""
    found = list(searched_twice(narrow, make_chain, make_topology, families_of, monkeypatch))
    for whole, own in found:
        assert whole.exact
        assert own.best is not None
        best = whole.best.step_seconds
        assert own.bound_seconds <= best * (1 + 1e-9) <= own.best.step_seconds * (1 + 2e-9)
        assert own.root_bound_seconds <= best * (1 + 1e-9)
        if own.exact:
            assert own.best.step_seconds == pytest.approx(best, rel=1e-8)
    assert False in {own.exact for _, own in found}


def searched_twice(
    narrow: tuple[int, int, float],
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Any, SearchResult]]:
    """Found with all the room, and with a beam, the plans that are kept and the work of `narrow`."""
    module = "pplan.planner.search"
    for seed in range(25):
        topology = make_topology(5, latency=[0.5, 0.05][seed % 2], per_node=[2, 8][seed % 2])
        space = Space(make_chain(seed, 8, cuts=1.1, traffic=[1.0, 0.1][seed % 2]), topology, "sgd")
        families = families_of(space, [BY_STAGE[seed % 6], WHOLE[seed % 7]], (1, 2, 3, 4, 5))
        whole = search(space, families, range(1, 6))
        with monkeypatch.context() as patched:
            patched.setattr(f"{module}.subproblem.BEAM", narrow[0])
            patched.setattr(f"{module}.subproblem.CHUNK", 8)
            patched.setattr(f"{module}.branch_and_bound.MOST_UNFINISHED", narrow[1])
            yield whole, search(space, families, range(1, 6), work=narrow[2])


def test_a_bound_holds_wherever_the_search_ends(
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any look at the clock, at any work, and with room for no unfinished plan."""
    space = Space(make_chain(2, 6, cuts=1.1, traffic=0.3), make_topology(3, latency=0.3), "sgd")
    families = families_of(space, [BY_STAGE[0], BY_STAGE[3], WHOLE[2]], (1, 2, 3))
    whole = search(space, families, range(1, 4))
    assert whole.exact
    best, bounds = whole.bound_seconds, set()
    for looks in (1, 2, 4, 8, 12, 16, 24, 40, 60, 90):
        budget = SearchBudget(seconds=looks, clock=itertools.count().__next__)
        bounds.add(search(replace(space, budget=budget), families, range(1, 4)).bound_seconds)
    for module, value in (("branch_and_bound.FOR_BOUND", 0.0), ("subproblem.CHUNK", 2)):
        monkeypatch.setattr(f"pplan.planner.search.{module}", value)
    for work in (0, 1e4, 1e6, 3e6):
        bounds.add(search(space, families, range(1, 4), work=work).bound_seconds)
    monkeypatch.setattr("pplan.planner.search.branch_and_bound.MOST_UNFINISHED", 0)
    bounds.add(search(space, families, range(1, 4), work=1e6).bound_seconds)
    assert max(bounds) <= best * (1 + 1e-9)
    assert len(bounds) > 2


def test_a_proposal_is_never_lost(
    make_chain: MakeChain, make_topology: MakeTopology, families_of: FamiliesOf
) -> None:
    """A seed that is not of the families is the answer where it is faster."""
    space = Space(make_chain(3, 8, cuts=1.1, traffic=0.01), make_topology(4, memory=1500), "sgd")
    config = PipelineConfig("1f1b", "by_stage", 4, 1)
    best = search(space, families_of(space, [config], (1, 2, 3)), range(1, 5)).best
    assert best is not None
    assert len(best.proposal.ends) > 1
    few = search(space, families_of(space, [config], (1,)), [1], [best])
    assert few.best == best
    slow = fastest(space, [Proposal(config, (8,), ((0,),))])
    assert slow is not None
    assert search(space, families_of(space, [config], (1, 2, 3)), range(1, 5), [slow]).best == best
    tight = Space(space.chain, space.topology, "sgd", memory_limit=100)
    assert fastest(tight, [best.proposal]) is None


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 4, 8])
def test_one_heavy_layer_leaves_no_gap(
    micro_batches: int,
    make_chain: MakeChain,
    make_topology: MakeTopology,
    families_of: FamiliesOf,
) -> None:
    """Many cuts are then almost equally fast; the bounds must part them, those of `except_last` too."""
    chain = make_chain(8, 28, traffic=0.001, cuts=1.1)
    heavy = np.where(np.arange(28) == 23, 40.0, 1.0)[:, None]
    chain = replace(chain, backward_seconds=chain.backward_seconds * heavy)
    every = pipeline_configs(8, ("1f1b", "gpipe"), ("never", "except_last", "always"), [8 // micro_batches])
    space = Space(chain, make_topology(8), "sgd")
    assert search(space, families_of(space, every, (1,)), range(1, 9)).exact


def test_ties_take_the_fewest_stages_and_the_first_setting(
    make_topology: MakeTopology, make_chain: MakeChain, families_of: FamiliesOf
) -> None:
    """One layer does all the work and transfers are free: any cut is as fast as none."""
    chain = make_chain(0, 4, traffic=0.0, cuts=1.1)
    alone = np.array([[0.0], [1.0], [0.0], [0.0]]) * np.array([[1.0, 2.0, 4.0]])
    free = replace(chain, forward_seconds=alone, backward_seconds=alone)
    space = Space(free, make_topology(3), "sgd")
    every = pipeline_configs(8, ("1f1b", "gpipe"), ("never", "always"), [1, 2, 4])
    found = search(space, families_of(space, every, (1,)), range(1, 4))
    proposal = Proposal(PipelineConfig("1f1b", "never", 2, 4), (4,), ((0,),))
    assert found.best == ScoredPlan(proposal, ("never",), 16.0)


def test_same_input_same_answer(
    make_chain: MakeChain, make_topology: MakeTopology, families_of: FamiliesOf
) -> None:
    spaces = [Space(make_chain(3, 12), make_topology(6, per_node=2), "adam", 2000) for _ in range(2)]
    one, two = (search(space, families_of(space, BY_STAGE, range(1, 7)), range(1, 7)) for space in spaces)
    assert one == two
