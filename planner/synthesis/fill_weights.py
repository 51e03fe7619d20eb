"""Weight gradients put where devices wait, between forwards and backwards whose order is given.

A device does the next F or B of its turns when what it needs has arrived. Until then it makes a weight
gradient, where nothing arrives within a share of what one takes; and it makes one where the next turn has no
room, or more micro-batches than are allowed wait for theirs. An F without room, with no weight gradient left
to make, lets the next B go first. So memory is used up before anything is slowed down.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from .compiled_loops import Loop, compile_loops
from .order_problem import KINDS, B, F, Lists, OrderProblem, W
from .rule_loops import RULE_LOOPS


def list_turns(lists: Lists) -> list[list[int]]:
    """By device, the kinds of its F's and B's in order."""
    return [[kind for kind, _ in own if kind != W] for own in lists]


def fill_weights(
    problem: OrderProblem, turns: Sequence[Sequence[int]], share: float, most_behind: int
) -> Lists | None:
    """The order of these turns, of parts on devices of their own, in which an arrival further off than
    `share` of a weight gradient's seconds lets one go first, and more than `most_behind` are never kept back;
    None where a device has no room, or they wait for each other for ever."""
    filler = WeightFiller(problem)
    filler.turns[:] = [kind for own in turns for kind in own]
    return None if filler.fill(share, most_behind) == inf else filler.lists()


class WeightFiller:
    """What the loops need of a problem, and the turns that they fill; a device's number is its part's."""

    def __init__(self, problem: OrderProblem, *, fast: bool = False) -> None:
        self.problem, self.fast = problem, fast
        parts, count = problem.parts, problem.micro_batches
        places = [(kind, part) for part in range(parts) for kind in range(len(KINDS))]
        waits = {F: problem.forward_wait, B: problem.backward_wait, W: (0.0,) * parts}
        self._numbers = [
            self.column([problem.duration(*place, False) for place in places]),
            self.column([problem.duration(*place, True) for place in places]),
            self.column([waits[kind][part] for kind, part in places]),
            self.column([sum(problem.level_change(*place)) for place in places]),
            self.column([problem.level_change(*own)[0] + problem.workspace_bytes(*own) for own in places]),
            self.column(list(problem.micro_batch_bytes)),
            self.column([problem.room[device] * (1 + 1e-12) for device in problem.device]),
            self.column([problem.end[device] for device in problem.device]),
        ]
        self.turns, self.own = self.column([0] * 2 * count * parts), self.column([0] * 3 * count * parts)
        self._scratch = [self.column([0.0] * 2 * parts * count), self.column([0] * 3 * parts)]
        self._scratch += [self.column([0.0] * parts) for _ in range(3)] + [self.column([0] * parts)]
        loops: tuple[Loop, ...] = compile_loops(RULE_LOOPS, len(RULE_LOOPS)) if fast else RULE_LOOPS
        self.make_turns, self._put_weights = loops

    def column(self, values: list[Any]) -> Any:
        """As the loops take it."""
        return np.array(values) if self.fast else values

    def fill(self, share: float, most_behind: int) -> float:
        """The step of the order that is made of the turns, with links that carry any number at a time;
        infinite where there is none."""
        problem = self.problem
        split, numbers, scratch = problem.split, self._numbers, self._scratch
        own = (*numbers, self.turns, *scratch, self.own)
        return float(self._put_weights(problem.micro_batches, split, share, most_behind, *own))

    def lists(self) -> Lists:
        """The order that was made last."""
        kinds = list(map(int, self.own))
        each = (3 if self.problem.split else 2) * self.problem.micro_batches
        room = 3 * self.problem.micro_batches
        return tuple(
            tuple((kind, part) for kind in kinds[room * part : room * part + each])
            for part in range(self.problem.parts)
        )
