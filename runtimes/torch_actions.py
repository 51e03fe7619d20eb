"""Programs in the words of torch.distributed.pipelining: a class of its schedules, or lists of actions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from ..cost_models.errors import ExportError, UsageError, short_repr
from ..cost_models.program import Action, Program, StageSlot
from ..cost_models.quantities import MOST_ACTIONS
from ..cost_models.runtime import TORCH_CLASSES
from ..cost_models.schedules import find_schedule

OWN_ORDER = "_PipelineScheduleRuntime"
"""The class that runs any lists of actions."""


def schedule_class(schedule: str, program: Program) -> str:
    """The class that runs the program's order: torch's own, or the one that is given the actions.

    `Schedule1F1B` refuses fewer micro-batches than stages.
    """
    if schedule == "1f1b" and program.micro_batches < program.devices:
        return OWN_ORDER
    return TORCH_CLASSES.get(schedule, OWN_ORDER)


def build_program(schedule: str, devices: int, micro_batches: int, virtual_stages: int) -> Program:
    """The program of a schedule that one process a device can run, its micro-batches numbered for PyTorch.

    Raises UsageError for numbers that it cannot run, ExportError for one of several pipes or sliced
    micro-batches, or that updates weights meanwhile.
    """
    actions = 3 * devices * micro_batches * virtual_stages
    if actions > MOST_ACTIONS:
        raise ExportError(
            f"a step of {micro_batches} micro-batches on {devices} devices has up to {actions} actions, "
            f"at most {MOST_ACTIONS} are written out",
            "Make a plan with fewer micro-batches: pplan.solve(micro_batches=64), say.",
        )
    program = find_schedule(schedule).program(devices, micro_batches, virtual_stages)
    if len(program.pipes) > 1 or program.shares is not None or program.update_every is not None:
        raise ExportError(
            f"its schedule is {schedule}, which torch.distributed.pipelining does not run",
            "Make a plan for it: pplan.solve(runtime='torch')",
        )
    return _in_order_of_losses(program)


def _in_order_of_losses(program: Program) -> Program:
    """With the micro-batches numbered as their forwards run on the last stage: PyTorch takes the n-th loss
    there for that of micro-batch n (torch/distributed/pipelining/schedules.py: `_internal_losses`)."""
    device, chunk = program.pipes[0][-1]
    own = [action for action in program.actions[device] if (action.kind, action.chunk) == ("F", chunk)]
    number = {action.micro_batch: place for place, action in enumerate(own)}
    if all(before == after for before, after in number.items()):
        return program
    actions = (
        tuple(action._replace(micro_batch=number[action.micro_batch]) for action in row)
        for row in program.actions
    )
    return Program(tuple(actions), program.pipes, program.pipe_of)


def device_stages(program: Program) -> list[list[int]]:
    """The stages, counted as a micro-batch passes them, that each device holds, ascending."""
    stages: list[list[int]] = [[] for _ in range(program.devices)]
    for stage, place in enumerate(program.pipes[0]):
        stages[place.device].append(stage)
    return stages


def action_rows(program: Program) -> list[str]:
    """The actions of each device, as a line of the CSV that `_load_csv(path, format="compute_only")` reads.

    `2F0` is the forward of micro-batch 0 on stage 2, `B` the whole backward; where the program has weight
    gradients apart, `I` is the input's and `W` theirs.
    """
    stage_of = {place: stage for stage, place in enumerate(program.pipes[0])}
    rows = []
    for device, actions in enumerate(program.actions):
        split = {action[1:] for action in actions if action.kind == "W"}
        words = [
            f"{stage_of[StageSlot(device, action.chunk)]}"
            f"{'I' if action.kind == 'B' and action[1:] in split else action.kind}{action.micro_batch}"
            for action in actions
        ]
        rows.append(",".join(words))
    return rows


_CELL = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})")


def read_actions(rows: Sequence[str], stages: Sequence[Sequence[int]], micro_batches: int) -> Program:
    """The program of such lines, of devices that hold these stages. Raises UsageError for what is none."""
    slots = {
        stage: StageSlot(device, device_actions.index(stage))
        for device, device_actions in enumerate(stages)
        for stage in device_actions
    }
    actions = []
    for device, row in enumerate(rows):
        device_actions = []
        for word in filter(None, row.split(",")):
            cell = _CELL.fullmatch(word)
            slot = None if cell is None else slots.get(int(cell[1]))
            if cell is None or slot is None or slot.device != device:
                raise UsageError(
                    f"actions of device {device}: {short_repr(word)} is no action of its stages",
                    "Export the plan again.",
                )
            kind = {"F": "F", "B": "B", "I": "B", "W": "W"}[cell[2]]
            device_actions.append(Action(kind, int(cell[3]), slot.chunk))  # type: ignore[arg-type]  # one of F, B, W
        actions.append(tuple(device_actions))
    return Program(tuple(actions), (tuple(slots[stage] for stage in sorted(slots)),), (0,) * micro_batches)


def splits_backward(rows: list[str]) -> bool:
    """Whether some weight gradients are actions of their own."""
    return any("W" in row for row in rows)


def are_bounds(parts: list[int]) -> bool:
    """Whether parts[i] up to, not including, parts[i + 1] are layers of part i, none of which is empty."""
    return parts[:1] == [0] and all(first < end for first, end in pairwise(parts))
