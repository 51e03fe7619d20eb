"""Links that stages share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.step_costs import stage_costs
from pplan.cost_models.timeline import Timeline, simulate


def test_two_stages_on_one_card() -> None:
    """Stages 0 and 2 on one node, 1 and 3 on another: F of stage 0 and F of stage 2 leave by the same card.

    Forwards of 1 s, transfers of 4 s. F0 leaves stage 0 from 1 to 5 and stage 1 (the other card) from 6 to
    10; at 11, when it could leave stage 2, F2 of stage 0 is on the card from 9 to 13.
    """
    program = find_schedule("gpipe").program(4, 3)
    costs = replace(stage_costs(program, 1.0, 0.0), forward_occupancy=np.full((1, 1), 4.0))
    links = np.array([[5, 0, 6, 0], [1, 5, 1, 6], [6, 0, 5, 0], [1, 6, 1, 5]])
    shared = simulate(program, replace(costs, links=links))
    alone = simulate(program, costs)

    def sent(timeline: Timeline, stage: int) -> list[float]:
        transfers = timeline.transfers
        return [t.start for t in transfers if t.stage == stage and t.action.kind == "F"]

    assert sent(alone, 0) == sent(shared, 0) == [1, 5, 9]
    assert sent(alone, 1) == sent(shared, 1) == [6, 10, 14]
    assert sent(alone, 2) == [11, 15, 19]
    assert sent(shared, 2) == [13, 17, 21]
