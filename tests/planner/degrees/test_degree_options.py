"""What options of degrees may be, at the ends of their ranges, and what they leave of degrees by stage."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pplan.cost_models.arguments import list_declarations
from pplan.cost_models.errors import UsageError
from pplan.planner.degrees.degree_options import DegreeOptions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"tp": 2}, {"tp": (2,)}),
        ({"pp": [4, 1, 4]}, {"pp": (1, 4)}),
        ({"cp": (np.int64(2), 1)}, {"cp": (1, 2)}),
        ({"ep": None}, {"ep": None}),
        ({"zero": 3}, {"zero": (3,)}),
        ({"zero": [2, 0, 2]}, {"zero": (0, 2)}),
        ({"predictors": 0}, {"predictors": 0}),
        ({"predictors": 8}, {"predictors": 8}),
        ({"host_bandwidth": 1}, {"host_bandwidth": 1.0}),
        ({"host_bandwidth": 1e18}, {"host_bandwidth": 1e18}),
        ({"recompute": "partial"}, {"recompute": "partial"}),
        ({"context_exchange": "ring"}, {"context_exchange": "ring"}),
        ({"mini_batch": 1, "sequence": 1, "layers": 1}, {"mini_batch": 1, "sequence": 1, "layers": 1}),
    ],
)
def test_what_is_taken(given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = DegreeOptions(**given)
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp": 0}, "tp=0: must be at least 1"),
        ({"tp": ()}, "tp=(): must be whole numbers"),
        ({"pp": "12"}, "pp='12': must be whole numbers"),
        ({"cp": 1.5}, "cp=1.5: must be whole numbers"),
        ({"ep": (1, 0)}, "ep=0: must be at least 1"),
        ({"zero": 4}, "zero=4: must be 0, 1, 2 or 3"),
        ({"zero": ()}, "zero=(): must be"),
        ({"zero": True}, "zero=True: must be"),
        ({"zero": (1, 5)}, "must be 0, 1, 2 or 3"),
        ({"predictors": 9}, "predictors=9: must be at most 8"),
        ({"predictors": -1}, "predictors=-1: must be at least 0"),
        ({"host_bandwidth": 0.5}, "host_bandwidth=0.5: must be from 1"),
        ({"host_bandwidth": 2e18}, "host_bandwidth=2e+18: must be from 1"),
        ({"recompute": "some"}, "recompute='some': not known"),
        ({"context_exchange": "swap"}, "context_exchange='swap': not known"),
        ({"mini_batch": 0}, "must be at least 1"),
        ({"sequence": 0}, "must be at least 1"),
        ({"layers": 0}, "must be at least 1"),
    ],
)
def test_what_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        DegreeOptions(**given)
    assert refused.value.hint


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"pp": (1, 2), "virtual_stages": (1, 2), "zero": (1, 2)},
        {"pp": 2**20 - 1, "virtual_stages": 1, "zero": 0},
        {"zero": (1,)},
    ],
)
def test_what_leaves_degrees_by_stage(given: dict[str, Any]) -> None:
    DegreeOptions(**given).check_by_stage()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"pp": 1}, "pp=1: leaves no degrees by stage"),
        ({"pp": 2**20}, "leaves no degrees by stage"),
        ({"virtual_stages": (2, 4)}, "virtual_stages=2,4: leaves no degrees by stage"),
        ({"zero": (2, 3)}, "zero=2,3: leaves no degrees by stage"),
        ({"zero": 2}, "zero=2: leaves no degrees by stage"),
        ({"offload": True}, "offload: does not combine with degrees by stage"),
    ],
)
def test_what_leaves_none_by_stage(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        DegreeOptions(**given).check_by_stage()
    assert "`by_stage`" in refused.value.hint


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"fix": {"tp": 8, "zero": 3}}, {"tp": (8,), "zero": (3,), "pp": None, "fix": None}),
        ({"fix": {"micro_batch_size": 2}, "micro_batch_size": (1, 2)}, {"micro_batch_size": (2,)}),
        ({"fix": {}}, {"tp": None}),
    ],
)
def test_one_value_by_name(given: dict[str, Any], expected: dict[str, Any]) -> None:
    options = DegreeOptions(**given)
    assert {name: getattr(options, name) for name in expected} == expected
    assert replace(options, tp=(1, 2)).tp == (1, 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fix": {"tp": 0}}, "tp=0: must be at least 1"),
        ({"fix": {"zero": 4}}, "zero=4: must be 0, 1, 2 or 3"),
        ({"fix": {"dp": 2}}, "fix=dp: is not a degree"),
        ({"fix": 8}, "fix=8: must be degrees by their names"),
        ({"fix": {"tp": 8}, "tp": (2, 4)}, "tp=2,4: contradicts the 8 of `fix`"),
    ],
)
def test_values_by_name_that_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)) as refused:
        DegreeOptions(**given)
    assert refused.value.hint


def test_values_by_name_as_they_are_typed() -> None:
    read = list_declarations(DegreeOptions)["fix"].value
    assert read(["tp=8,pp=2", "--micro-batch-size = 1"], "--fix") == {"tp": 8, "pp": 2, "micro_batch_size": 1}
    with pytest.raises(UsageError, match="--fix virtual-stages: is both 2 and 4"):
        read(["virtual-stages=2", "virtual-stages=4"], "--fix")
    for wrong in (["tp"], ["tp=x"], ["dp=2"], ["tp=1", "tp=2"], [""]):
        with pytest.raises(UsageError, match="--fix"):
            read(wrong, "--fix")
