"""Problems by which the attack found false proofs, once each was understood."""

from __future__ import annotations

import pytest
from attack import terms
from attack.attack import REFERENCE, attacked, quickly_solved
from attack.problems import case_of
from attack.results import Result

from pplan.planner.solve import problem_of


@pytest.mark.parametrize(("seed", "kind"), [(63, "kinds"), (54, "ports"), (56, "ports")])
def test_relaxed_bound_where_a_cut_is_asked_for(seed: int, kind: str) -> None:
    """No stage of all layers may be: the prices of the devices were no numbers, and all plans left out."""
    case, result = case_of(seed, kind), Result(seed, kind)
    assert case.wishes.cut_after
    terms.relaxed(problem_of(case.chain, case.topology, case.wishes, REFERENCE, case.profiles), result)
    assert result.checks["relaxed"] == 1
    assert not result.violations


def test_many_devices_for_layers_that_no_cut_may_part() -> None:
    """There is nothing to spread over the layers: `solve` ended with a defect."""
    result = attacked(case_of(10017, "many"), quickly_solved)
    assert result.checks["bound"] == 1
    assert not result.violations
