"""The steps of branch and bound on trees of random numbers, of which all leaves are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.plan_file import TIE
from pplan.planner.search import branch_and_bound as module
from pplan.planner.search.branch_and_bound import _BranchAndBound, _in_order
from pplan.planner.search.budget import OutOfTime, SearchBudget
from pplan.planner.search.near_plans import Incumbent

Patch = pytest.MonkeyPatch
DEPTH, BRANCHES = 3, 3


@dataclass
class Node:
    bound: float
    depth: int
    value: float = inf
    following: list[Node] = field(default_factory=list)


def grow(random: np.random.Generator, bound: float, depth: int = 0) -> Node:
    """Bounds that rise; of a leaf the value is no less."""
    node = Node(bound, depth, bound + float(random.integers(0, 5)))
    if depth < DEPTH:
        node.following = [
            grow(random, bound + float(random.integers(0, 4)), depth + 1) for _ in range(BRANCHES)
        ]
    return node


def leaves(node: Node) -> Iterator[Node]:
    if not node.following:
        yield node
    for own in node.following:
        yield from leaves(own)


class Chunk:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = sorted(nodes, key=lambda own: own.bound)
        self.bounds = np.array([own.bound for own in self.nodes])
        self.remaining = DEPTH - nodes[0].depth

    def __len__(self) -> int:
        return len(self.nodes)


class Tree:
    """A subproblem with one tree for each number of stages."""

    def __init__(self, seed: int, counts: tuple[int, ...]) -> None:
        random = np.random.default_rng(seed)
        self.trees = {count: grow(random, float(random.integers(1, 6))) for count in counts}
        self.roots = {count: tree.bound for count, tree in self.trees.items()}
        self.quick_bound = self.root = min(self.roots.values())
        self.scored = list[Node]()
        self.extended = 0

    def may_improve(self, step: float) -> bool:
        return self.root < step

    def start(self, stages: int, step: float) -> Chunk:
        assert self.roots[stages] < step
        return Chunk([self.trees[stages]])

    def extend(self, chunk: Chunk, step: float) -> Iterator[Chunk]:
        self.extended += 1
        nodes = [own for node in chunk.nodes for own in node.following if own.bound < step]
        for first in range(0, len(nodes), 2):
            yield Chunk(nodes[first : first + 2])

    def score_chunk(self, chunk: Chunk, step: float) -> tuple[Any, Chunk | None]:
        first, *others = chunk.nodes
        self.scored.append(first)
        plan = SimpleNamespace(step_seconds=first.value) if first.value < step else None
        return plan, Chunk(others) if others else None

    @property
    def leaves(self) -> list[Node]:
        return [leaf for tree in self.trees.values() for leaf in leaves(tree)]


def make_search(
    *problems: Any, counts: tuple[int, ...] = (1, 2), spent: int = 10**9, limit: float = inf
) -> Any:
    """The work is done when so many chunks were taken."""
    search = object.__new__(_BranchAndBound)
    left = iter(range(spent))

    class Work:
        @property
        def spent(self) -> bool:
            return next(left, None) is None

    vars(search).update({"counts": counts, "problems": problems, "whole": problems})
    space: Any = None
    search.incumbent = Incumbent(space, [], [], SearchBudget(), limit)
    search.work = Work()  # type: ignore[assignment]
    return search


def left_of(problems: tuple[Tree, ...]) -> list[float]:
    """Values of the leaves that were not scored."""
    seen = {id(own) for problem in problems for own in problem.scored}
    return [leaf.value for problem in problems for leaf in problem.leaves if id(leaf) not in seen]


@pytest.mark.parametrize("seed", range(12))
def test_the_best_leaf_is_found_and_no_other_is_better(seed: int) -> None:
    problems = Tree(seed, (1, 2)), Tree(seed + 100, (1, 2))
    least = min(leaf.value for problem in problems for leaf in problem.leaves)
    search = make_search(*problems)
    assert search._explore() == inf
    assert search.incumbent.best.step_seconds == least
    assert len(left_of(problems)) > 0
    limited = make_search(Tree(seed, (1, 2)), Tree(seed + 100, (1, 2)), limit=least)
    assert limited._explore() == inf
    assert limited.incumbent.best is None


@pytest.mark.parametrize("seed", range(6))
def test_what_is_left_when_it_ends(seed: int) -> None:
    """Wherever the work ends, or the time in the middle of a step: a bound on all that was not scored."""
    bounds = []
    for spent in range(40):
        problems = Tree(seed, (1, 2)), Tree(seed + 100, (1, 2))
        search = make_search(*problems, spent=spent)
        bound = search._explore()
        bounds.append(bound)
        assert bound <= min(left_of(problems)) or bound >= search.step * (1 - TIE)
        assert bound >= min(problem.root for problem in problems)
        if not spent:
            assert bound == min(problem.root for problem in problems)

        def late(*_: Any) -> Any:
            raise OutOfTime

        timed: Any = Tree(seed, (1, 2)), Tree(seed + 100, (1, 2))
        timed[seed % 2].extend = late
        assert make_search(*timed)._explore() <= min(left_of(timed))
    assert bounds == sorted(bounds)
    assert len(set(bounds)) > 2


@pytest.mark.parametrize("most", [1, 4, 9])
def test_too_many_open_plans_are_left_out(most: int, monkeypatch: Patch) -> None:
    """Those of the highest bounds, down to half as many; what they may take is said."""
    monkeypatch.setattr(module, "MOST_UNFINISHED", most)
    left = 0
    for seed in range(8):
        problems = Tree(seed, (1, 2)), Tree(seed + 100, (1, 2))
        search = make_search(*problems)
        bound = search._explore()
        least = min(leaf.value for problem in problems for leaf in problem.leaves)
        assert min(bound, search.step) <= least
        assert bound <= min(left_of(problems)) or bound >= search.step * (1 - TIE)
        left += bound < inf
    assert left > 0


def test_problems_that_were_not_begun_are_left() -> None:
    """Those that may have a plan: their quick bound is all that is known."""
    known, other = Tree(1, (1, 2)), Tree(2, (1, 2))
    other.roots, other.quick_bound = {}, 1.5
    search = make_search(known, other)
    assert search._explore() == 1.5
    assert (other.scored, known.scored, search.incumbent.best) == ([], [], None)  # none known is below that
    other.quick_bound = 99.0
    assert make_search(known, other, counts=(1, 2))._explore() == inf


def problem(name: str, quick: float, batches: int = 1, **more: Any) -> Any:
    config = SimpleNamespace(name=name, micro_batches=batches)
    family: Any = SimpleNamespace(config=config, replicas=(1,), on_all=False)
    return SimpleNamespace(family=family, quick_bound=quick, **more)


def test_the_order_in_which_problems_are_begun(monkeypatch: Patch) -> None:
    """Each configuration once before any a second time; then by least seconds, and fewer micro-batches."""
    monkeypatch.setattr(module, "_config_key", lambda own: (own.config.name,))
    rows = [("a", 3.0, 4), ("b", 3.0, 2), ("c", 2.0, 9), ("a", 1.0, 4), ("b", 5.0, 2), ("a", 0.5, 4)]
    own: Any = _in_order([problem(*row) for row in rows])
    assert [(each.family.config.name, each.quick_bound) for each in own] == [
        ("c", 2.0),
        ("b", 3.0),
        ("a", 3.0),
        ("a", 1.0),
        ("b", 5.0),
        ("a", 0.5),
    ]


@pytest.mark.parametrize("own", list(permutations([1, 2, 3], 2)))
def test_of_plans_as_fast_one_of_fewer_stages(own: tuple[int, int]) -> None:
    """The first number of stages, and of these the first family, with which a beam finds one; none that
    stands behind the best plan."""
    found, stages_of_best = own
    asked = list[tuple[str, int, float]]()

    def make(name: str, finds: int) -> Any:
        def beam(stages: int, limit: float) -> Any:
            asked.append((name, stages, limit))
            return f"{name}{stages}" if stages == finds else None

        tree = problem(name, 1.0, may_improve=lambda limit: limit > 1.0, roots=dict.fromkeys((1, 2, 3), 2.0))
        tree.beam = beam
        return tree

    first, second = make("a", 0), make("b", found)
    search = make_search(first, second, counts=(1, 2, 3))
    best: Any = SimpleNamespace(
        step_seconds=4.0,
        config=second.family.config,
        proposal=SimpleNamespace(ends=tuple(range(stages_of_best))),
    )
    search.incumbent.best = best
    search._prefer_simple()
    assert search.incumbent.best == (f"b{found}" if found < stages_of_best else best)
    limit = 4.0 * (1 + TIE)
    expected = [(name, n, limit) for n in range(1, min(found, stages_of_best) + 1) for name in "ab"]
    assert asked == [row for row in expected if row[:2] != ("b", stages_of_best)]
    asked.clear()
    search.incumbent.best, first.roots, second.roots = (
        best,
        {1: 4.1, 2: 4.1, 3: 4.1},
        {1: 5.0, 2: 5.0, 3: 5.0},
    )
    search._prefer_simple()
    assert (asked, search.incumbent.best) == ([], best)
    search.incumbent.best = None
    search._prefer_simple()
    assert search.incumbent.best is None
