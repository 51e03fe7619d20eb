"""What planners of replicated stages begin with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pplan.cost_models.layer import Chain, list_cut_points
from pplan.cost_models.topology import Topology
from pplan.planner.candidate import PipelineConfig, pipeline_configs
from pplan.planner.cut_limits import CutLimits
from pplan.planner.planners.replica_groups import (
    MicroBatchChoice,
    cost_replicas,
    micro_batch_choices,
    thin_cuts,
)
from pplan.planner.search.space import Space


def test_a_trial_for_every_size_of_the_preferred_schedule() -> None:
    every = pipeline_configs(8, ("gpipe", "1f1b"), ("never", "except_last", "always"), [2, 8])
    assert micro_batch_choices(every) == [
        MicroBatchChoice("1f1b", 1, 8, ("never", "always")),
        MicroBatchChoice("1f1b", 4, 2, ("never", "always")),
    ]
    assert micro_batch_choices([s for s in every if s.schedule == "gpipe"]) == [
        MicroBatchChoice("gpipe", 1, 8, ("never", "always")),
        MicroBatchChoice("gpipe", 4, 2, ("never", "except_last", "always")),
    ]
    assert micro_batch_choices([replace(s, schedule="zb-v") for s in every]) == []


def test_micro_batches_held() -> None:
    assert [MicroBatchChoice("1f1b", 3, 1, ("never",)).in_flight(to_last) for to_last in (1, 2, 3, 4)] == [
        1,
        2,
        3,
        3,
    ]
    assert MicroBatchChoice("gpipe", 3, 1, ("never",)).in_flight(1) == 3


@pytest.mark.parametrize(
    ("modes", "recomputes", "mode"),
    [
        (("never", "always"), True, "always"),
        (("never", "always"), False, "never"),
        (("never", "except_last"), True, "except_last"),
        (("always",), False, "always"),
        (("by_stage", "never"), True, "by_stage"),
    ],
)
def test_the_setting_says_what_recomputes(modes: tuple[str, ...], recomputes: bool, mode: str) -> None:
    choice = MicroBatchChoice("gpipe", 4, 2, modes)  # type: ignore[arg-type]
    assert choice.config(recomputes) == PipelineConfig("gpipe", mode, 4, 2)  # type: ignore[arg-type]


def test_a_stage_recomputes_where_it_must(
    make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]
) -> None:
    """More micro-batches take more memory: first the forward runs again, then nothing fits."""
    space = Space(make_chain(1, 4, cuts=1.0), make_topology(1), "sgd", 900.0)
    team = space.replica_group(2, (0,))
    costs = cost_replicas(space, MicroBatchChoice("1f1b", 1, 2, ("by_stage",)), (0,))
    plain = costs.forward + costs.backward
    seen = set()
    for in_flight in range(1, 40):
        work = costs.work(in_flight)
        for i, j in ((0, 1), (0, 2), (0, 4), (2, 4)):
            fits = [team.bytes(in_flight, mode)[i, j] <= 900 for mode in ("never", "always")]
            recompute = costs.forward[i, j] if not fits[0] else 0.0
            assert work[i, j] == (plain[i, j] + recompute if any(fits) else np.inf)
            seen.add((*fits,))
    assert seen == {(True, True), (False, True), (False, False)}


def test_thinned_cuts_lie_at_equal_seconds(
    make_chain: Callable[..., Chain], make_topology: Callable[..., Topology]
) -> None:
    chain = make_chain(0, 60, cuts=0.7)
    space = Space(
        chain, make_topology(2), "sgd", limits=CutLimits(must_cut=(int(list_cut_points(chain)[3]) - 1,))
    )
    coarse = thin_cuts(space, 10)
    cut_points = list_cut_points(coarse.chain)
    assert set(cut_points) <= set(list_cut_points(chain))
    assert list_cut_points(chain)[3] in cut_points
    assert 9 <= len(cut_points) - 1 <= 11
    table = coarse.table(4)
    seconds = np.diagonal(table.forward + table.backward, 1)
    assert seconds.max() < 2.5 * seconds.sum() / 10
    assert thin_cuts(space, 60) is space
