"""What options leave of the plans: pins, cuts and stages, against brute force with the same filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.cost_models.runtime import RUNTIMES
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import pipeline_configs, replicated_pipeline
from pplan.planner.joint_search import find_best_plan
from pplan.planner.plan_options import PlanOptions
from pplan.planner.problem import Problem
from pplan.planner.scoring import fastest
from pplan.planner.search import space as space_module
from pplan.planner.search.family import Family
from pplan.planner.search.placements import list_placements, place_anywhere
from pplan.planner.search.space import Space

MakeChain = Callable[..., Chain]
MakeTopology = Callable[..., Topology]
BruteForce = Callable[..., Any]


@dataclass(frozen=True)
class Wanted:
    """Whether stages with these ends and devices are what was requested, told from the options' own words."""

    options: PlanOptions
    chain: Chain
    gpus: int

    def __call__(self, ends: tuple[int, ...], devices: Sequence[Sequence[int]]) -> bool:
        names, options = self.chain.names, self.options
        stages = [names[a:b] for a, b in pairwise((0, *ends))]
        return (
            len(stages) <= (options.max_stages or len(stages))
            and (not options.use_all or sum(map(len, devices)) == self.gpus)
            and all(any(own[-1] == name for own in stages) for name in options.cut_after)
            and all(stage < len(stages) and name in stages[stage] for name, stage in options.pins)
            and not any(self._parted(before[-1], after[0]) for before, after in pairwise(stages))
        )

    def _parted(self, last: str, first: str) -> bool:
        """Whether these layers are to be kept together."""
        return any(fnmatchcase(last, p) and fnmatchcase(first, p) for p in self.options.keep_together)


def some_wishes(rng: np.random.Generator, layers: int, gpus: int, cuts: Sequence[int]) -> dict[str, Any]:
    """One or two of them, such as one chain and machine can have."""
    first, second = sorted(int(layer) for layer in rng.integers(0, layers, 2))
    low, high = sorted(int(stage) for stage in rng.integers(0, max(gpus - 1, 1), 2))
    pins = {f"layer{first}": low, f"layer{second}": max(high, low) if second > first else low}
    known: list[dict[str, Any]] = [
        {"pins": tuple(pins.items())},
        {"max_stages": int(rng.integers(1, 4))},
        {"use_all": True},
        {"keep_together": (f"layer[{first}-{second}]",)},
        {"cut_after": tuple(f"layer{cut}" for cut in rng.choice(cuts, min(2, len(cuts)), replace=False))},
    ]
    chosen = rng.choice(len(known), int(rng.integers(1, 3)), replace=False)
    made = {name: value for index in chosen for name, value in known[index].items()}
    if {"keep_together", "cut_after"} <= set(made):
        made.pop("cut_after")  # of layers that are to be kept together, maybe
    return made


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 24))]
)
def test_wishes_against_brute_force(
    seed: int, make_chain: MakeChain, make_topology: MakeTopology, brute_force: BruteForce
) -> None:
    rng = np.random.default_rng(seed)
    chain = make_chain(seed, 7, cuts=0.9, traffic=[0.1, 1][seed % 2])
    gpus, layers = int(rng.integers(2, 6)), len(chain)
    gpus = gpus if seed % 2 else min(gpus, 4)
    topology = make_topology(gpus, per_node=[2, 8][seed % 2], memory=[None, 900, 1500][seed % 3])
    cuts = [int(layer) for layer in np.flatnonzero(chain.cut_after)]
    options = PlanOptions(mini_batch=4, recompute="never", **some_wishes(rng, layers, gpus, cuts))
    answer = find_best_plan(Problem(chain, topology, options), [])
    space = Space(chain, topology, "sgd")
    own = pipeline_configs(4, ("1f1b", "gpipe"), ("never",), [1, 2, 4])
    placement = list_placements(topology)[0] if gpus <= topology.gpus_per_node else place_anywhere(topology)
    families = [Family(config, placement, tuple(range(1, gpus + 1))) for config in own]
    best = brute_force(space, families, Wanted(options, chain, gpus)).fastest()
    if best is None:
        assert answer.best is None
        return
    assert answer.best is not None
    assert Wanted(options, chain, gpus)(answer.best.proposal.ends, answer.best.proposal.devices)
    assert answer.result.exact
    assert answer.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)


@pytest.mark.parametrize("name", ["torchgpipe", "deepspeed", "torch", "megatron"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 2))])
def test_runtimes_against_brute_force(
    name: str, seed: int, make_chain: MakeChain, make_topology: MakeTopology, brute_force: BruteForce
) -> None:
    """One node of a process; as many replicas on every stage, with equal shares of every micro-batch."""
    runtime = RUNTIMES[name]
    chain = make_chain(seed, 7, cuts=0.9, traffic=[0.1, 1][seed % 2])
    topology = make_topology(6, per_node=[3, 8][seed % 2], memory=[None, 1200][seed // 2])
    schedule = "gpipe" if name == "torchgpipe" else "1f1b"
    options = PlanOptions(mini_batch=6, runtime=name, schedule=schedule)
    answer = find_best_plan(Problem(chain, topology, options), [])
    reached = topology.with_gpus(3) if runtime.one_process and seed % 2 == 0 else topology
    modes = ["by_stage"] if runtime.recompute_by_stage else sorted(runtime.recompute)
    own = pipeline_configs(6, (schedule,), modes, [1, 2, 3, 6])  # type: ignore[arg-type] # words of modes
    families = [
        Family(config, list_placements(reached)[0], (count,))
        for config in own
        for count in ((1,) if runtime.replicas == "none" else (1, 2, 3, 6))
        if config.micro_batch_size % count == 0
    ]
    trainable = chain.trainable_bytes

    def keep(ends: tuple[int, ...], devices: object) -> bool:
        del devices
        bounds = pairwise((0, *ends))
        return not runtime.trains_every_stage or all(trainable[a:b].sum() > 0 for a, b in bounds)

    best = brute_force(Space(chain, topology, "sgd", runtime=runtime), families, keep).fastest()
    if best is None:
        assert answer.best is None
        return
    assert answer.best is not None
    assert answer.result.exact
    assert answer.best.step_seconds == pytest.approx(best.step_seconds, rel=1e-9)
    size = answer.best.config.micro_batch_size
    assert all(size % count == 0 for count in answer.best.proposal.replicas)


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ({"pins": (("layer9", 0),)}, "pins='layer9': the model has no such layer", "Did you mean layer"),
        ({"pins": (("layer3", -1),)}, "pins[0][1]=-1: must be at least 0", "a whole number"),
        (
            {"pins": (("layer1", 1), ("layer4", 0))},
            "pins=('layer1', 1): the later layer layer4 is pinned to stage0",
            "in order",
        ),
        ({"pins": (("layer1", 1), ("layer1", 0))}, "it is pinned to stage0, too", "Omit one"),
        ({"cut_after": ("layer6",)}, "cut_after='layer6': it is the last layer", "the model ends there"),
        ({"cut_after": ("layer2",)}, "cut_after='layer2': no stage may end there", "pplan show"),
        ({"keep_together": ("conv*",)}, "keep_together='conv*': the model has no such layer", "layer0"),
        (
            {"keep_together": ("layer[0-4]",), "cut_after": ("layer3",)},
            "cut_after='layer3': `keep_together` keeps it with layer4",
            "Omit one",
        ),
        ({"time_limit": 0.0}, "time_limit=0: must be above 0", "30s"),
        ({"max_stages": 0}, "max_stages=0: must be at least 1", "a whole number"),
    ],
)
def test_wishes_that_cannot_be(
    options: dict[str, Any], what: str, hint: str, make_chain: MakeChain, make_topology: MakeTopology
) -> None:
    chain = make_chain(1, 7, cuts=1.1)
    chain.cut_after[2] = False
    with pytest.raises(UsageError) as caught:
        find_best_plan(Problem(chain, make_topology(3), PlanOptions(mini_batch=4, **options)), [])
    assert what in caught.value.what
    assert hint in caught.value.hint


@pytest.mark.slow
def test_pinned_neighbours_of_a_long_chain(
    make_chain: MakeChain, make_topology: MakeTopology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all cuts are searched, those that the pins need are."""
    monkeypatch.setattr(space_module, "MOST_BLOCKS", 44)
    monkeypatch.setattr("pplan.planner.search.branch_and_bound.FEW_CUTS", 20)
    chain, topology = make_chain(3, 46, cuts=1.1, traffic=0.05), make_topology(8)
    pins = (("layer30", 0), ("layer31", 1))
    options = PlanOptions(mini_batch=16, schedule="1f1b", micro_batches=4, pins=pins)
    problem = Problem(chain, topology, options)
    assert problem.space.is_long
    found = find_best_plan(problem, []).result
    own = [config for config in problem.configs if config.schedule == "1f1b"]
    simple = fastest(problem.space, [replicated_pipeline(config, (31, 46), (4, 4)) for config in own])
    assert found.best is not None
    assert simple is not None
    assert found.best.step_seconds <= simple.step_seconds
    assert found.best.proposal.ends[0] == 31
