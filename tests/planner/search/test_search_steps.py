"""The steps of branch and bound on trees of random numbers, of which all leaves are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pplan.planner.plan_file import TIE
from pplan.planner.search import branch_and_bound as module
from pplan.planner.search.branch_and_bound import _BranchAndBound
from pplan.planner.search.budget import SearchBudget
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


def problem(name: str, quick: float, batches: int = 1, **more: Any) -> Any:
    config = SimpleNamespace(name=name, micro_batches=batches)
    family: Any = SimpleNamespace(config=config, replicas=(1,), on_all=False)
    return SimpleNamespace(family=family, quick_bound=quick, **more)
