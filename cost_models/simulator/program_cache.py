"""Programs of schedules, kept with what was worked out of them: a search asks for the same ones again."""

from __future__ import annotations

from collections import OrderedDict

from ..schedules import schedule_named
from ..schedules.action import Program

KEPT_ACTIONS = 500_000
"""Of all kept programs together: some 300 bytes each."""


class ProgramCache:
    """The programs used last, of at most so many actions together."""

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, 0
        self.programs: OrderedDict[tuple[str, int, int], Program] = OrderedDict()

    def program(self, schedule: str, stages: int, micro_batches: int) -> Program:
        """The program of a schedule by name."""
        key = (schedule, stages, micro_batches)
        if key in self.programs:
            self.programs.move_to_end(key)
            return self.programs[key]
        program = self.programs[key] = schedule_named(schedule).program(stages, micro_batches)
        self.actions += _actions(program)
        while self.actions > self.most:
            _, oldest = self.programs.popitem(last=False)
            self.actions -= _actions(oldest)
        return program


def _actions(program: Program) -> int:
    return sum(len(own) for own in program.actions)


cached_program = ProgramCache(KEPT_ACTIONS).program
