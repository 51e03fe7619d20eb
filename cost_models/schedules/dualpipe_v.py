"""DualPipeV: two chunks a device, laid out as a V; a forward goes with a backward of the other chunk.

Two devices, four micro-batches (lower case: the second chunk, which goes from the last device to the first; a
backward with its weight gradient takes two ticks):

    F0 F1 F2 f0 b0 w0 f1 F3 b1 -  f2 B0 -  b2 -  f3 .  B1 -  b3 -  B2 W2 B3 W3
    .  F0 f0 F1 f1 F2 b0 -  f2 B0 -  F3 b1 -  f3 B1 -  b2 -  B2 -  b3 B3 w3 W3

Device i of p (a B without a W is the whole backward, W included):
2(p-1-i) x F0 | (i+1) x F0 F1 | (p-1-i) x B1 W1 F1 | steady: F0 B1 F1 B0 | (p-1-i) x B1 F1 B0 |
(i+1) x B1 B0, the later half without their W | (p-1-i) x W B0 | (i+1) x W.
In the steady part a runtime that overlaps the transfers of one with the computing of the other runs F0 with
B1, and F1 with B0, as one; here they follow each other. It is DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical
Report", 2024, section 3.2.1 and figure 5) cut in half, so that the weights are held once (Qi et al., Sea AI
Lab, 2025); the order is that of torch.distributed.pipelining.
Needs of the runtime: two chunks a device, input and weight gradients computed apart where the order has W,
and overlapped all-to-all to gain from it. At least 2p micro-batches. Weight versions: 1. Staleness: 0.
"""

from __future__ import annotations

from .action import Action, Program, Schedule, check_at_least, check_virtual_stages
from .zb_v import B0, B1, F0, F1, W1, Turn, number_actions, v_pipe


def program(stages: int, micro_batches: int, virtual_stages: int = 2) -> Program:
    """The list of every device, fill to drain."""
    check_virtual_stages("dualpipe-v", virtual_stages, 2)
    check_at_least("dualpipe-v", "micro-batches", micro_batches, 2 * stages, "two a stage")
    actions = tuple(tuple(_device(device, stages, micro_batches)) for device in range(stages))
    return Program(actions, v_pipe(stages), (0,) * micro_batches)


def _device(device: int, stages: int, micro_batches: int) -> list[Action]:
    after, own = stages - 1 - device, device + 1
    turns: list[Turn] = [F0] * (2 * after) + [F0, F1] * own + [B1, W1, F1] * after
    turns += [F0, B1, F1, B0] * (micro_batches - 2 * stages + own) + [B1, F1, B0] * after
    drain = list(number_actions(turns + [B1, B0] * own + [B0] * after))[len(turns) :]
    return list(number_actions(turns)) + _with_weights(drain, own)


def _with_weights(drain: list[Action], own: int) -> list[Action]:
    """The drain: `own` whole backwards, `own` without W, a W before each of the others, then those left."""
    late = [Action("W", *action[1:]) for action in drain[own:]]
    order = drain[: 2 * own]
    for weight, backward in zip(late, drain[2 * own :], strict=False):
        order += [weight, backward]
    return order + late[len(drain) - 2 * own :]


SCHEDULE = Schedule(
    "dualpipe-v",
    program,
    source='DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 (DualPipe, cut in half)',
    needs="two chunks of layers on a device, a forward and a backward overlapped, input and weight gradients "
    "computed apart at the ends",
    bubble="t/(t+2m(F+B+W)), t = (p-1)(F+B-W), where F = B, of a chunk",
    in_flight_formula="p+1/2",
    default_virtual_stages=2,
    splits_backward=True,
)
