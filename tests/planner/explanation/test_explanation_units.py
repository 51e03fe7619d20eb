"""An explanation in other units of time says the same: every number stays, or is as many times as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

SHORT, FACTOR = 2.0**-10, 2.0**-20
"""The units that are compared: in neither is a bandwidth near the least that a topology may have."""
MakeChain = Callable[..., Any]
MakeTopology = Callable[..., Any]
Solve = Callable[..., Any]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """All numbers and words below a value, each with where it stands."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        yield f"{path}.length", len(value)
        for number, part in enumerate(value):
            yield from leaves(part, f"{path}[{number}]")
    else:
        yield path, value


def differs(path: str, first: Any, second: Any) -> bool:
    """Whether a leaf is neither the same nor, of seconds and rates, as many times as long or high."""
    if isinstance(first, float) and isinstance(second, float):
        factor = FACTOR if path.endswith("seconds") else 1.0
        factor = 1 / FACTOR if path.endswith("_per_second") else factor
        return second != pytest.approx(factor * first, rel=1e-6, abs=1e-9 * factor)
    return bool(first != second)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [{}, {"per_node": 2}, {"memory": 1500}, {"latency": 0.2}], ids=str)
@pytest.mark.parametrize("seed", [0])
def test_an_explanation_is_the_same_in_other_units_of_time(
    seed: int,
    machine: dict[str, Any],
    make_chain: MakeChain,
    make_topology: MakeTopology,
    in_units: Callable[..., Any],
    solved: Solve,
) -> None:
    chain, topology = make_chain(seed, 4), make_topology(3, **machine)
    now, other = (
        solved(*in_units(chain, topology, factor), mini_batch=6).explained()
        for factor in (SHORT, SHORT * FACTOR)
    )
    first, second = dict(leaves(now.model_dump())), dict(leaves(other.model_dump()))
    assert first.keys() == second.keys()
    wrong = {path: (own, second[path]) for path, own in first.items() if differs(path, own, second[path])}
    assert not wrong
