"""Steps of many micro-batches, of which only the first are simulated, against all of them.

Behind the first micro-batches each further one is taken to add what the last of these add. That is so of an
order of actions without end once its rhythm has settled; with slow transfers and unlike stages a rhythm may
be longer than what is simulated.
"""

from __future__ import annotations

from random import Random

import pytest

from pplan.cost_models.transformer import training_step
from pplan.cost_models.transformer.rank_costs import PassSeconds
from pplan.cost_models.transformer.training_step import pipeline_seconds

NO_LIMIT = 10**6


def random_pipeline(random: Random, virtual: int, stages: int) -> tuple[list[PassSeconds], list[float]]:
    """Unlike (virtual) stages, with transfers from none to longer than a forward."""
    slots = stages * virtual
    own = [PassSeconds(1 + random.random(), 2 + random.random()) for _ in range(slots)]
    return own, [random.choice((0.0, 0.1, 1.0, 3.0))] * (slots - 1)


def simulated_at_most(stages: int, virtual: int) -> int:
    """Micro-batches up to which all are simulated: as training_step.py has it."""
    return 2 * max(-(-64 // stages), 16 if virtual == 1 else 4) * stages


@pytest.mark.parametrize("seed", range(10))
def test_unlike_stages_to_half_a_per_cent(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = Random(seed)
    virtual, stages = random.choice(((1, 4), (2, 6), (2, 4), (3, 2)))
    own, transfers = random_pipeline(random, virtual, stages)
    count = simulated_at_most(stages, virtual) + stages * random.randint(1, 20)
    estimate = pipeline_seconds(own, transfers, count, virtual)
    monkeypatch.setattr(training_step, "_SIMULATED", NO_LIMIT)
    assert estimate == pytest.approx(pipeline_seconds(own, transfers, count, virtual), rel=5e-3)


@pytest.mark.parametrize(("stages", "virtual"), [(4, 1), (2, 2), (4, 2), (4, 3)])
def test_equal_stages_exactly(monkeypatch: pytest.MonkeyPatch, stages: int, virtual: int) -> None:
    """Without transfers it is also the closed form: v m + p - 1 times a virtual stage's forward and backward
    (Narayanan et al., SC 2021, section 2.2)."""
    count = simulated_at_most(stages, virtual) + 8 * stages
    own = [PassSeconds(1.0, 2.0)] * (stages * virtual)
    estimate = pipeline_seconds(own, [0.0] * (len(own) - 1), count, virtual)
    assert estimate == pytest.approx(3.0 * (virtual * count + stages - 1), rel=1e-12)
    monkeypatch.setattr(training_step, "_SIMULATED", NO_LIMIT)
    assert estimate == pytest.approx(pipeline_seconds(own, [0.0] * (len(own) - 1), count, virtual), rel=1e-12)


def test_up_to_there_all_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    own, transfers = random_pipeline(Random(1), 2, 4)
    count = simulated_at_most(4, 2)
    estimate = pipeline_seconds(own, transfers, count, 2)
    monkeypatch.setattr(training_step, "_SIMULATED", NO_LIMIT)
    assert estimate == pipeline_seconds(own, transfers, count, 2)
