"""Schedules by name: the order in which devices run forwards, backwards and weight gradients.

Each schedule is a short function below a drawing of its order. Recently used programs are cached.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import Literal

from .errors import UsageError, short_repr
from .program import (
    Action,
    Kind,
    Program,
    Schedule,
    StageSlot,
    check_at_least,
    check_multiple,
    linear_program,
    same_on_every_stage,
)


def naive(stages: int, micro_batches: int) -> Program:
    """Naive model parallelism: one micro-batch at a time, through all stages and back.

        stage 0  F0 .  .  .  .  B0 F1 .  .  .  .  B1
        stage 1  .  F0 .  .  B0 .  .  F1 .  .  B1 .
        stage 2  .  .  F0 B0 .  .  .  .  F1 B1 .  .

    What a plain model on several devices does: Huang et al., "GPipe", NeurIPS 2019, figure 2b. Idle (p-1)/p.
    Needs of the runtime: nothing but layers on several devices. Weight versions: 1. Staleness: 0.

    Every stage runs F and B of a micro-batch before the F of the next.
    """
    order = [Action(kind, m) for m in range(micro_batches) for kind in ("F", "B")]
    return linear_program([order] * stages)


Backwards = Literal["last_to_first", "first_to_last"]


def gpipe(stages: int, micro_batches: int, backwards: Backwards = "last_to_first") -> Program:
    """GPipe: all forwards, then all backwards, the last micro-batch first.

        stage 0  F0 F1 F2 .  .  .  .  B2 B1 B0
        stage 1  .  F0 F1 F2 .  .  B2 B1 B0
        stage 2  .  .  F0 F1 F2 B2 B1 B0

    Huang et al., "GPipe", NeurIPS 2019, section 2.3 and figure 2c; torchgpipe and FairScale run this order,
    torch.distributed.pipelining the backwards from the first to the last (`first_to_last`).
    Needs of the runtime: memory for all micro-batches, or recomputation. Weight versions: 1. Staleness: 0.

    All forwards, then the backwards in the order that `backwards` says.
    """
    forward = range(micro_batches)
    backward = reversed(forward) if backwards == "last_to_first" else forward
    order = [Action("F", m) for m in forward] + [Action("B", m) for m in backward]
    return linear_program([order] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Program:
    """1F1B (PipeDream-flush): a stage runs ahead by as many forwards as stages follow, then alternates.

        stage 0  F0 F1 F2 .  .  B0 F3 .  B1 .  .  B2 .  .  B3
        stage 1  .  F0 F1 .  B0 F2 .  B1 F3 .  B2 .  .  B3
        stage 2  .  .  F0 B0 .  F1 B1 .  F2 B2 .  F3 B3

    Narayanan et al., "PipeDream", SOSP 2019, section 3.2, with a flush every global batch as in "Memory-
    Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.2. Stage i of p (0-based) holds at most
    min(micro-batches, p - i). Needs of the runtime: a process or a queue for each stage. Weight versions: 1.
    Staleness: 0.

    Each stage's warm-up of forwards, then a backward before every forward.
    """
    return linear_program(stage_lists(stages, micro_batches))


def stage_lists(stages: int, micro_batches: int) -> list[list[Action]]:
    """Return the actions of each stage under 1F1B, in order."""
    return [
        alternate_passes(one_f_one_b_in_flight(stage, stages, micro_batches), micro_batches)
        for stage in range(stages)
    ]


def alternate_passes(ahead: int, micro_batches: int) -> list[Action]:
    """Return a stage's list: `ahead` forwards, then B and F in turn, then the remaining backwards."""
    order = [Action("F", m) for m in range(ahead)]
    for m in range(micro_batches - ahead):
        order += [Action("B", m), Action("F", m + ahead)]
    return order + [Action("B", m) for m in range(micro_batches - ahead, micro_batches)]


def one_f_one_b_in_flight(stage: int, stages: int, micro_batches: int) -> int:
    """Return the most micro-batches that `stage` (0-based) holds at a time under 1F1B."""
    return min(micro_batches, stages - stage)


Policy = Literal["PA", "PB"]


def dapple(stages: int, micro_batches: int, policy: Policy = "PA") -> Program:
    """DAPPLE's early backward scheduling: 1F1B, with as many forwards ahead as the transfers ask for.

        PA         stage 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        (p - i)    stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
                   stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

        PB         stage 0  F0 F1 F2 F3 .  B0 .  B1 .  B2 .  B3
        (2(p-i)-1) stage 1  .  F0 F1 F2 B0 F3 B1 .  B2 .  B3
                   stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3

    PA is 1F1B's order. PB keeps computing while activations and gradients travel, for nearly twice the
    memory. Use it if a transfer is long relative to a stage. Fan et al., "DAPPLE", PPoPP 2021, section 3.
    Needs of the runtime: as 1F1B. Weight versions: 1. Staleness: 0.

    1F1B with the warm-up of the policy: PA where transfers are short, PB where they are long.
    """
    return linear_program(
        [
            alternate_passes(dapple_in_flight(stage, stages, micro_batches, policy), micro_batches)
            for stage in range(stages)
        ]
    )


def dapple_in_flight(stage: int, stages: int, micro_batches: int, policy: Policy = "PA") -> int:
    """Return the most micro-batches that `stage` (0-based) holds: the forwards before its first backward."""
    ahead = stages - stage if policy == "PA" else 2 * (stages - stage) - 1
    return min(micro_batches, ahead)


Turn = tuple[int, int]
"""Micro-batch and chunk."""


def interleaved(
    stages: int, micro_batches: int, virtual_stages: int = 2, a_round: int | None = None
) -> Program:
    """Interleaved 1F1B: each device holds v chunks of layers, and 1F1B runs over all of them.

    Two devices, two chunks each (lower case: a device's second chunk), four micro-batches:

        F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
        .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3

    Micro-batches go in rounds of p: a round goes through chunk 0, then chunk 1, and so on; backwards in the
    same rounds from the last chunk. Stage i runs (v-1)p + 2(p-1-i) forwards ahead. The fill is v times
    shorter than 1F1B's, there are v times the transfers. Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", SC 2021, section 2.2 and figure 4. Needs of the
    runtime: several chunks a device, transfers from the last device to the first. Weight versions: 1.
    Staleness: 0.

    `a_round`: micro-batches of a round, which must divide all; None: the stages, as Megatron-LM has it.
    """
    size = stages if a_round is None else a_round
    check_at_least("interleaved", "micro-batches of a round", size, 1, "to make progress")
    check_multiple("interleaved", micro_batches, size, "the stages" if a_round is None else "a round")
    actions = tuple(
        tuple(device_actions(device, stages, micro_batches, virtual_stages, size)) for device in range(stages)
    )
    return Program(actions, looped_pipe(stages, virtual_stages), (0,) * micro_batches)


def device_actions(
    device: int, stages: int, micro_batches: int, virtual_stages: int, a_round: int | None = None
) -> list[Action]:
    """Return the actions of one device under interleaved 1F1B. Arguments are those of `interleaved`."""
    size = stages if a_round is None else a_round
    forwards = list_turns(range(virtual_stages), micro_batches, size)
    backwards = list_turns(range(virtual_stages - 1, -1, -1), micro_batches, size)
    return alternate_actions(forwards, backwards, (virtual_stages - 1) * size + 2 * (stages - 1 - device))


def list_turns(chunks: Iterable[int], micro_batches: int, size: int) -> list[Turn]:
    """Return the turns in order: a round of `size` micro-batches through all chunks, then the next round."""
    order = tuple(chunks)
    return [
        (first + m, chunk) for first in range(0, micro_batches, size) for chunk in order for m in range(size)
    ]


def alternate_actions(forwards: list[Turn], backwards: list[Turn], ahead: int) -> list[Action]:
    """Return a device's list: `ahead` forwards, then F and B in turn, then the other backwards."""
    order = [Action("F", *turn) for turn in forwards[:ahead]]
    together = len(forwards) - len(order)
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [Action("F", *forward), Action("B", *backward)]
    return order + [Action("B", *turn) for turn in backwards[together:]]


def looped_pipe(stages: int, virtual_stages: int) -> tuple[tuple[StageSlot, ...], ...]:
    """Return one pipe: all devices with their first chunk, then all with their second, and so on."""
    return (tuple(StageSlot(device, chunk) for chunk in range(virtual_stages) for device in range(stages)),)


def looped_bfs(stages: int, micro_batches: int, virtual_stages: int = 2) -> Program:
    """Looped breadth-first: each device holds v chunks, and all micro-batches go through one before the next.

    Two devices, two chunks each (lower case: a device's second chunk), two micro-batches:

        F0 F1 f0 f1 .  .  b1 b0 B1 B0
        .  F0 F1 f0 f1 b1 b0 B1 B0

    GPipe over v times as many stages, with a fill v times shorter. A chunk's weights are gathered once for
    all micro-batches (sharded data parallelism), which interleaved 1F1B cannot. Lamy-Poirier, "Breadth-First
    Pipeline Parallelism", MLSys 2023 (arXiv 2211.05953); the backwards run from the last micro-batch to the
    first, as in torch.distributed.pipelining. Needs of the runtime: several chunks a device, transfers from
    the last device to the first, memory for all micro-batches. Weight versions: 1. Staleness: 0.

    All forwards chunk by chunk, then all backwards the other way round.
    """
    forwards = [Action("F", m, chunk) for chunk in range(virtual_stages) for m in range(micro_batches)]
    backwards = [Action("B", m, chunk) for _, m, chunk in reversed(forwards)]
    return Program(
        (tuple(forwards + backwards),) * stages, looped_pipe(stages, virtual_stages), (0,) * micro_batches
    )


def chimera(stages: int, micro_batches: int) -> Program:
    """Chimera: two pipelines in opposite directions over the same devices, each with half the micro-batches.

    Four devices, four micro-batches; 2 and 3 go from the last device to the first (lower case: the other
    copy):

        F0 F1 .  f2 b2 f3 b3 B0 .  B1
        .  F0 f2 F1 f3 b2 B0 b3 B1
        .  f2 F0 f3 F1 B0 b2 B1 b3
        f2 f3 .  F0 B0 F1 B1 b2 .  b3

    With F = B the two fit without a collision: on a clock on which every action takes one tick, the forward
    of the j-th micro-batch of a direction runs on its stage s at tick s + 2j, its backward at 2p - 1 - s +
    2j, and p being even, one direction has the even ticks of a device where the other has the odd ones. That
    clock gives the order for any costs. Units of p micro-batches follow each other 2p ticks apart (direct
    concatenation). Li and Hoefler, "Chimera", SC 2021, section 3 and figure 3. Needs of the runtime: two
    stages a device, of two copies of the model, all-reduced between device d and p - 1 - d; transfers both
    ways at once. Weight versions: 1 (two copies). Staleness: 0.

    Of each unit of p micro-batches the first half goes down (chunk 0), the second up (chunk 1).
    """
    if stages % 2:
        raise UsageError(
            f"stages {stages}: chimera needs an even number",
            f"Use {stages - 1} or {stages + 1}." if stages > 1 else "Use 2 or more.",
        )
    check_multiple("chimera", micro_batches, stages, "the stages")
    down = tuple(StageSlot(device, 0) for device in range(stages))
    up = tuple(StageSlot(device, 1) for device in reversed(range(stages)))
    pipe_of = tuple(m % stages // (stages // 2) for m in range(micro_batches))
    return Program(tuple(_chimera_device(d, stages, pipe_of) for d in range(stages)), (down, up), pipe_of)


def _chimera_device(device: int, stages: int, pipe_of: tuple[int, ...]) -> tuple[Action, ...]:
    ticks: list[tuple[int, Action]] = []
    for m, pipe in enumerate(pipe_of):
        stage = stages - 1 - device if pipe else device
        start = m // stages * 2 * stages + m % (stages // 2) * 2
        ticks.append((start + stage, Action("F", m, pipe)))
        ticks.append((start + 2 * stages - 1 - stage, Action("B", m, pipe)))
    return tuple(action for _, action in sorted(ticks))


def zb_h1(stages: int, micro_batches: int) -> Program:
    """ZB-H1: 1F1B whose backward is split; the weight gradients fill what would be idle, in 1F1B's memory.

        stage 0  F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
        stage 1  .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
        stage 2  .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3

    The gradient of the input (B) goes on at once, that of the weights (W) waits: stage i runs p - i forwards
    ahead and keeps the W of i micro-batches back, so that every stage holds p of them.
    Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1 and figure 3.
    Needs of the runtime: input and weight gradients computed apart. Weight versions: 1. Staleness: 0.

    Each stage's warm-up of forwards, then B, the W that is due, and F in turn.
    """
    return linear_program([split_backwards(stages - stage, stage, micro_batches) for stage in range(stages)])


def split_backwards(ahead: int, delay: int, micro_batches: int) -> list[Action]:
    """Return a stage's list: `ahead` forwards, then B, W and F in turn, then the remaining W.

    Args:
        ahead: Forwards before the first backward.
        delay: Micro-batches by which a W follows its B.
        micro_batches: Number of micro-batches.
    """
    order = [Action("F", m) for m in range(min(ahead, micro_batches))]
    for m in range(micro_batches):
        order.append(Action("B", m))
        if m >= delay:
            order.append(Action("W", m - delay))
        if m + ahead < micro_batches:
            order.append(Action("F", m + ahead))
    return order + [Action("W", m) for m in range(max(micro_batches - delay, 0), micro_batches)]


def zb_h2(stages: int, micro_batches: int) -> Program:
    """ZB-H2: the weight gradients fill the drain, and twice the forwards ahead fill the start.

        stage 0  F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5
        stage 1  .  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5

    Stage i runs 2(p - i) - 1 forwards ahead and keeps the W of 2i micro-batches back, so that every stage
    holds 2p - 1 of them. With F = B = W no stage is idle from its first to its last action, though they end
    one after another: the next step's fill takes the place, if the optimizer's step needs no barrier. Qi et
    al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2 and figure 3. Needs of the runtime: input
    and weight gradients computed apart; an optimizer step that waits for no other stage (checked and rolled
    back afterwards, section 4). Weight versions: 1. Staleness: 0.

    ZB-H1's order with warm-ups of 2(p - i) - 1.
    """
    return linear_program(
        [split_backwards(2 * (stages - stage) - 1, 2 * stage, micro_batches) for stage in range(stages)]
    )


ChunkTurn = tuple[Kind, int]
"""A kind of action and its chunk, where two chunks are laid out as a V; its micro-batch is the next of the
chunk."""

F0: ChunkTurn = ("F", 0)
B0: ChunkTurn = ("B", 0)
W0: ChunkTurn = ("W", 0)
F1: ChunkTurn = ("F", 1)
B1: ChunkTurn = ("B", 1)
W1: ChunkTurn = ("W", 1)


def v_pipe(stages: int) -> tuple[tuple[StageSlot, ...], ...]:
    """One pipe: down the devices with their first chunk, back up with their second."""
    down = [StageSlot(device, 0) for device in range(stages)]
    up = [StageSlot(device, 1) for device in reversed(range(stages))]
    return (tuple(down + up),)


def number_actions(turns: Iterable[ChunkTurn]) -> Iterator[Action]:
    """The actions of the turns: each kind goes through the micro-batches of each chunk in order."""
    done: Counter[ChunkTurn] = Counter()
    for turn in turns:
        yield Action(turn[0], done[turn], turn[1])
        done[turn] += 1


def zb_v(stages: int, micro_batches: int) -> Program:
    """ZB-V: two chunks a device, laid out as a V, with weight gradients apart: no bubble, in 1F1B's memory.

    Two devices, three micro-batches (lower case: the second chunk, which goes from the last device to the
    first):

        F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2
        .  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2

    Device i runs 2(p - i) - 1 forwards of its first chunk and i of each, then the second chunk's F, B, W;
    steady: F B W of the first chunk and of the second; in the drain the weight gradients fill the waiting.
    Where F, B and W take the same time, no device waits from its first to its last action. Qi et al., "Zero
    Bubble Pipeline Parallelism", ICLR 2024, section 6; the order is that of torch.distributed.pipelining.
    Needs of the runtime: two chunks a device, input and weight gradients computed apart. Weight versions: 1.
    Staleness: 0.

    Fewer micro-batches than 2p - 1 run in the order of 2p - 1, from which the others are left out.
    """
    turns = (_zb_v_turns(device, stages, max(micro_batches, 2 * stages - 1)) for device in range(stages))
    actions = tuple(
        tuple(action for action in number_actions(device_turns) if action.micro_batch < micro_batches)
        for device_turns in turns
    )
    return Program(actions, v_pipe(stages), (0,) * micro_batches)


def _zb_v_turns(device: int, stages: int, micro_batches: int) -> list[ChunkTurn]:
    from_end = stages - device
    fill = [F0] * (2 * from_end - 1) + [F1, F0] * device + [F1, B1, W1] * from_end
    steady = [F0, B0, W0, F1, B1, W1] * (micro_batches - 2 * stages + device + 1)
    steady += [B0, W0, F1, B1, W1] * (from_end - 1)
    return fill + steady + [B0, B1] * device + [B0, W0] * from_end + [W1] * device + [W0] * device


def dualpipe_v(stages: int, micro_batches: int) -> Program:
    """DualPipeV: two chunks a device, laid out as a V; a forward goes with a backward of the other chunk.

    Two devices, four micro-batches (lower case: the second chunk, which goes from the last device to the
    first; a backward with its weight gradient takes two ticks):

        F0 F1 F2 f0 b0 w0 f1 F3 b1 -  f2 B0 -  b2 -  f3 .  B1 -  b3 -  B2 W2 B3 W3
        .  F0 f0 F1 f1 F2 b0 -  f2 B0 -  F3 b1 -  f3 B1 -  b2 -  B2 -  b3 B3 w3 W3

    Device i of p (a B without a W is the whole backward, W included): 2(p-1-i) x F0 | (i+1) x F0 F1 |
    (p-1-i) x B1 W1 F1 | steady: F0 B1 F1 B0 | (p-1-i) x B1 F1 B0 | (i+1) x B1 B0, the later half without
    their W | (p-1-i) x W B0 | (i+1) x W. In the steady part a runtime that overlaps the transfers of one
    with the computing of the other runs F0 with B1, and F1 with B0, as one; here they follow each other. It
    is DualPipe (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and figure 5) cut in half,
    so that the weights are held once (Qi et al., Sea AI Lab, 2025); the order is that of
    torch.distributed.pipelining. Needs of the runtime: two chunks a device, input and weight gradients
    computed apart where the order has W, and overlapped all-to-all to gain from it. At least 2p micro-
    batches. Weight versions: 1. Staleness: 0.

    The list of every device, fill to drain.
    """
    check_at_least("dualpipe-v", "micro-batches", micro_batches, 2 * stages, "two a stage")
    actions = tuple(tuple(_dualpipe_v_device(device, stages, micro_batches)) for device in range(stages))
    return Program(actions, v_pipe(stages), (0,) * micro_batches)


def _dualpipe_v_device(device: int, stages: int, micro_batches: int) -> list[Action]:
    later, whole = stages - 1 - device, device + 1
    turns: list[ChunkTurn] = [F0] * (2 * later) + [F0, F1] * whole + [B1, W1, F1] * later
    turns += [F0, B1, F1, B0] * (micro_batches - 2 * stages + whole) + [B1, F1, B0] * later
    drain = list(number_actions(turns + [B1, B0] * whole + [B0] * later))[len(turns) :]
    return list(number_actions(turns)) + _with_weights(drain, whole)


def _with_weights(drain: list[Action], whole: int) -> list[Action]:
    """Return the drain with its weight gradients.

    The order is `whole` backwards in one part, `whole` without W, a W before each other one, then the
    remaining W.
    """
    late = [Action("W", *action[1:]) for action in drain[whole:]]
    order = drain[: 2 * whole]
    for weight, backward in zip(late, drain[2 * whole :], strict=False):
        order += [weight, backward]
    return order + late[len(drain) - 2 * whole :]


def pipedream(stages: int, micro_batches: int) -> Program:
    """PipeDream: 1F1B without a flush; every micro-batch is a global batch and updates the weights.

        stage 0  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5
        stage 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

    A stage keeps the weights that each micro-batch in flight went forward with (weight stashing), so that
    its backward uses the same: stage i of p (0-based) p - i versions, and its gradients are p - 1 - i
    updates late. From the first backward of stage 0 to its last forward no stage waits. Narayanan et al.,
    "PipeDream", SOSP 2019, sections 3.2 and 3.3, figure 4. Needs of the runtime: an update after every
    backward, stashed weights. Weight versions: p - i. Staleness: p - 1 - i.

    1F1B's lists, `micro_batches` global batches in a row, with an update after each.
    """
    return linear_program(stage_lists(stages, micro_batches), update_every=1)


def pipedream_2bw(stages: int, micro_batches: int, update_every: int | None = None) -> Program:
    """PipeDream-2BW: 1F1B without a flush, gradients added up, two versions of the weights.

    Updates every three micro-batches (| marks where a stage's weights change):

        stage 0  F0 F1 F2 .  .  B0 F3 B1 F4 B2|F5 B3 .  B4 .  B5|
        stage 1  .  F0 F1 .  B0 F2 B1 F3 B2|F4 B3 F5 B4 .  B5|
        stage 2  .  .  F0 B0 F1 B1 F2 B2|F3 B3 F4 B4 F5 B5|

    With at least p micro-batches to an update, those in flight use two versions at most: a micro-batch runs
    everywhere on the version that was the newest on stage 0 when it entered, later ones on the next (double-
    buffered weights). Every gradient, on every stage, is applied one update late: W(t+1) = W(t) - lr *
    gradient(W(t-1)). Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section
    3.1 and figure 2. Needs of the runtime: two versions of the weights, updates during the running pipeline.
    Weight versions: 2. Staleness: 1, on all stages.

    1F1B's lists, `micro_batches` in a row, with an update after each `update_every` (None: the stages).
    """
    every = stages if update_every is None else update_every
    check_at_least("pipedream-2bw", "micro-batches an update", every, stages, "the stages")
    return linear_program(stage_lists(stages, micro_batches), update_every=every)


def wpipe(stages: int, micro_batches: int, update_every: int | None = None) -> Program:
    """WPipe: interleaved 1F1B of two groups of layers without a flush; only the first group is updated late.

    Two devices, two micro-batches to an update; lower case: the chunk of the second group; | where a
    chunk's weights change:

        F0 F1 f0 f1 .  b0 F2 b1|F3 B0 f2 B1|f3 b2 .  b3|B2 B3|
        .  F0 F1 f0 b0 f1 b1|F2 B0 F3 B1|f2 b2 f3 b3|B2 B3|

    Each device holds one chunk of either group. A period is the forwards and backwards of one group: the
    forwards of the next mini-batch's first group come before the backwards of this one's. So the second
    group finishes an update before it starts the next and needs one version of its weights; the first
    group's next forwards run between its backwards, on the newer of two versions, its gradients one update
    late: half of the versions and of the late gradients of 2BW. Yang et al., "Group-based Interleaved
    Pipeline Parallelism for Large-scale DNN Training", ICLR 2022. Needs of the runtime: two chunks a device,
    two versions of the first one's weights, an update of one chunk during the running pipeline. Weight
    versions: 2 of the first chunk, 1 of the second, 1.5 on average. Staleness: 1 in the first chunk, 0 in
    the second.

    `micro_batches` in a row, in rounds of `update_every` (None: the stages), which must divide them.
    """
    every = stages if update_every is None else update_every
    check_at_least("wpipe", "micro-batches an update", every, stages, "the stages")
    check_multiple("wpipe", micro_batches, every, "the stages" if update_every is None else "an update")
    forwards, backwards = list_turns((0, 1), micro_batches, every), list_turns((1, 0), micro_batches, every)
    # p - 1 - i forwards ahead of the second group's first backward, as in 1F1B: with more, those of a later
    # round would come before the group's update.
    ahead = [every + stages - 1 - stage for stage in range(stages)]
    actions = tuple(tuple(alternate_actions(forwards, backwards, count)) for count in ahead)
    return Program(actions, looped_pipe(stages, 2), (0,) * micro_batches, update_every=every)


def xpipe(stages: int, micro_batches: int, update_every: int | None = None) -> Program:
    """XPipe: 1F1B without a flush, on weights predicted for the time of the update instead of stashed ones.

    Global batches of T micro-batches, here two; the first of each (F0, F2, F4) predicts for the others:

        stage 0  F0 F1 F2 .  .  B0 F3 B1|F4 B2 F5 B3|.  B4 .  B5|
        stage 1  .  F0 F1 .  B0 F2 B1|F3 B2 F4 B3|F5 B4 .  B5|
        stage 2  .  .  F0 B0 F1 B1|F2 B2 F3 B3|F4 B4 F5 B5|

    A stage updates its weights after the last backward of a global batch (|). Between the forward of a
    global batch and its own update others come: the weights are predicted over that many with Adam's
    moments, for the forward and again for the backward, and no earlier version is kept. The first micro-
    batch of a global batch predicts and the others take its prediction, while forwards of one global batch
    and backwards of another take turns: so both predictions are held, and the weights that the update
    changes, for any T. Guan et al., "XPipe", arXiv 1911.04610. Needs of the runtime: Adam-like moments
    to predict with, a prediction per global batch and pass. Weight versions: 3, two of them predicted.
    Staleness: ceil((p - 1 - i) / T) updates on stage i, for which the prediction makes up.

    1F1B's lists, `micro_batches` in a row; `update_every`: T, those of a global batch (None: the
    stages).
    """
    every = stages if update_every is None else update_every
    check_at_least("xpipe", "micro-batches an update", every, 1, "one global batch")
    return linear_program(stage_lists(stages, micro_batches), update_every=every)


def xpipe_staleness(stage: int, stages: int, micro_batches: int, update_every: int | None = None) -> int:
    """Return the updates between the weights that a global batch reads and those that its gradient changes.

    In the list of stage i the forward of micro-batch n comes after the backward of n - (p - i). Global batch
    k starts with n = k T. So ceil((p - 1 - i) / T) of the k updates before its update are still to come.
    """
    every = stages if update_every is None else update_every
    return min(-(-(stages - 1 - stage) // every), (micro_batches - 1) // every)


PIPELINES = 2


def avgpipe(stages: int, micro_batches: int, pipelines: int = PIPELINES, advance: int = 0) -> Program:
    """AvgPipe: several pipelines on the same devices, each training its own model; an average ties them.

    Two pipelines (lower case: the second), two stages, two micro-batches each:

        F0 f1 F2 f3 B0 b1 .  .  B2 b3
        .  F0 f1 B0 b1 F2 f3 B2 b3

    Each pipeline runs 1F1B over its own global batch; a device takes the pipelines in turn, so that one
    computes where the other waits. With `advance` further forwards ahead a pipeline goes from 1F1B towards
    GPipe's order (advance forward propagation), for long transfers. After each global batch a pipeline pulls
    its weights towards a reference model, and the reference towards them (elastic averaging). Chen et al.,
    "Elastic Averaging for Efficient Pipelined DNN Training", PPoPP 2023. Needs of the runtime: a process for
    each pipeline on every device, weights of all pipelines and of the reference (`copies`). Weight versions:
    1 in each pipeline. Staleness: 0 within a pipeline, whose weights drift from the others' between
    averages.

    `micro_batches` of all pipelines together, dealt out in turn: a multiple of `pipelines`.
    """
    check_at_least("avgpipe", "pipelines", pipelines, 1, "one to train")
    check_at_least("avgpipe", "advance", advance, 0, "1F1B's own order")
    check_multiple("avgpipe", micro_batches, pipelines, "the pipelines")
    each = micro_batches // pipelines
    actions = tuple(
        tuple(
            Action(kind, m * pipelines + pipe, pipe)
            for kind, m, _ in alternate_passes(min(each, stages - stage + advance), each)
            for pipe in range(pipelines)
        )
        for stage in range(stages)
    )
    pipes = tuple(tuple(StageSlot(stage, pipe) for stage in range(stages)) for pipe in range(pipelines))
    return Program(actions, pipes, tuple(m % pipelines for m in range(micro_batches)))


def autopipe(stages: int, micro_batches: int, sliced: int = 1) -> Program:
    """AutoPipe: 1F1B whose first micro-batch is sliced into halves, so that the fill takes half as long.

    Micro-batch 0 in halves, here 0 and 1 (half a forward and half a backward each); a tick is half a
    forward, a backward takes two forwards:

        F0 F1 F2 -  F3 -  .  .  B0 -  B1 -  .  .  .  .  .  .  B2 -  -  -  .  .  B3 -  -  -
        .  F0 F1 .  F2 -  B0 -  B1 -  F3 -  .  .  B2 -  -  -  .  .  B3 -  -  -
        .  .  F0 F1 B0 -  B1 -  F2 -  B2 -  -  -  F3 -  B3 -  -  -

    The last stage starts after (p - 1) / 2 forwards instead of p - 1. For it not to wait after the halves
    until the next whole micro-batch has come down the pipeline, (p-1)F/2B micro-batches have to be sliced
    (`sliced`): one is enough for five stages where B = 2F. Liu et al., "AutoPipe: A Fast Pipeline
    Parallelism Approach with Balanced Partitioning and Micro-batch Slicing", CLUSTER 2022. Needs of the
    runtime: micro-batches of different size. Weight versions: 1. Staleness: 0.

    1F1B's lists with each of the first `sliced` micro-batches as two entries of half a micro-batch.

    Raises UsageError where `sliced` is negative or more than there are.
    """
    check_at_least("autopipe", "sliced micro-batches", sliced, 0, "none")
    check_at_least("autopipe", "micro-batches", micro_batches, sliced, "those that are sliced")
    halves = [(2 * m, 2 * m + 1) for m in range(sliced)]
    whole = [(m + sliced,) for m in range(sliced, micro_batches)]
    entries: list[tuple[int, ...]] = [*halves, *whole]
    actions = tuple(
        tuple(Action(kind, entry) for kind, m, _ in stage_actions for entry in entries[m])
        for stage_actions in stage_lists(stages, micro_batches)
    )
    pipe = tuple(StageSlot(stage) for stage in range(stages))
    shares = tuple(1 / len(parts) for parts in entries for _ in parts)
    return Program(actions, (pipe,), (0,) * len(shares), shares=shares)


_ALL = (
    Schedule(
        "naive",
        naive,
        source='Huang et al., "GPipe", NeurIPS 2019, figure 2b',
        needs="layers on several devices",
        bubble="(p-1)/p",
        in_flight_formula="1",
        closed_in_flight=same_on_every_stage(1),
    ),
    Schedule(
        "gpipe",
        gpipe,
        source='Huang et al., "GPipe", NeurIPS 2019, section 2.3',
        needs="memory for all micro-batches of a step, or recomputation",
        bubble="(p-1)/(m+p-1)",
        in_flight_formula="m",
        closed_in_flight=lambda _stage, _stages, micro_batches: micro_batches,
    ),
    Schedule(
        "1f1b",
        one_f_one_b,
        source='Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.2',
        needs="each stage working by itself: a process or a queue a stage",
        bubble="(p-1)/(m+p-1)",
        in_flight_formula="min(m, p-i)",
        closed_in_flight=one_f_one_b_in_flight,
    ),
    Schedule(
        "dapple",
        dapple,
        source='Fan et al., "DAPPLE", PPoPP 2021, section 3',
        needs="each stage working by itself: a process or a queue a stage",
        bubble="(p-1)/(m+p-1)",
        in_flight_formula="min(m, p-i), or min(m, 2(p-i)-1) for long transfers",
        closed_in_flight=dapple_in_flight,
    ),
    Schedule(
        "interleaved",
        interleaved,
        source='Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021',
        needs="several chunks of layers on a device, transfers from the last device to the first",
        bubble="(p-1)/(vm+p-1)",
        in_flight_formula="min(vm, 2(p-i-1)+(v-1)p+1)/v",
        default_virtual_stages=2,
        any_virtual_stages=True,
    ),
    Schedule(
        "looped-bfs",
        looped_bfs,
        source='Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023',
        needs="several chunks of layers on a device, transfers from the last device to the first, "
        "memory for all micro-batches of a step",
        bubble="(p-1)/(vm+p-1)",
        in_flight_formula="m",
        default_virtual_stages=2,
        any_virtual_stages=True,
        closed_in_flight=lambda _stage, _stages, micro_batches: micro_batches,
    ),
    Schedule(
        "chimera",
        chimera,
        source='Li and Hoefler, "Chimera", SC 2021, section 3',
        needs="two stages on a device, of two copies of the model all-reduced at the end; "
        "transfers both ways",
        bubble="(p-2)/(2m+p-2) where F = B",
        in_flight_formula="p/2+1 to p",
        copies=2,
    ),
    Schedule(
        "zb-h1",
        zb_h1,
        source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.1',
        needs="input and weight gradients computed apart",
        bubble="t/(t+m(F+B+W)), t = (p-1)(F+B-W), where W <= F and W <= B",
        in_flight_formula="min(m, p)",
        closed_in_flight=lambda _stage, stages, micro_batches: min(micro_batches, stages),
        splits_backward=True,
    ),
    Schedule(
        "zb-h2",
        zb_h2,
        source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2',
        needs="input and weight gradients computed apart; an optimizer step without a barrier between stages",
        bubble="t/(t+m(F+B+W)), t = (p-1)(F+B-2W), where W <= F and 2W <= F+B",
        in_flight_formula="min(m, 2p-1)",
        closed_in_flight=lambda _stage, stages, micro_batches: min(micro_batches, 2 * stages - 1),
        splits_backward=True,
    ),
    Schedule(
        "zb-v",
        zb_v,
        source='Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6',
        needs="two chunks of layers on a device, input and weight gradients computed apart",
        bubble="0 where F = B = W and m >= 2p-1",
        in_flight_formula="min(m, p)",
        default_virtual_stages=2,
        splits_backward=True,
    ),
    Schedule(
        "dualpipe-v",
        dualpipe_v,
        source='DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 (DualPipe, cut in half)',
        needs="two chunks of layers on a device, a forward and a backward overlapped, "
        "input and weight gradients computed apart at the ends",
        bubble="t/(t+2m(F+B+W)), t = (p-1)(F+B-W), where F = B, of a chunk",
        in_flight_formula="p+1/2",
        default_virtual_stages=2,
        splits_backward=True,
    ),
    Schedule(
        "pipedream",
        pipedream,
        source='Narayanan et al., "PipeDream", SOSP 2019, sections 3.2 and 3.3',
        needs="an update after every backward, stashed weights: one version for each micro-batch in flight",
        bubble="none in steady state",
        in_flight_formula="min(m, p-i)",
        synchronous=False,
        weight_versions=one_f_one_b_in_flight,
        staleness=lambda *numbers: one_f_one_b_in_flight(*numbers) - 1,
        closed_in_flight=one_f_one_b_in_flight,
    ),
    Schedule(
        "pipedream-2bw",
        pipedream_2bw,
        source='Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021, section 3.1',
        needs="two versions of the weights, an update every p micro-batches or more "
        "beside the running pipeline",
        bubble="none in steady state",
        in_flight_formula="min(m, p-i)",
        synchronous=False,
        weight_versions=same_on_every_stage(2),
        staleness=same_on_every_stage(1),
        closed_in_flight=one_f_one_b_in_flight,
    ),
    Schedule(
        "wpipe",
        wpipe,
        source='Yang et al., "Group-based Interleaved Pipeline Parallelism", ICLR 2022',
        needs="two chunks of layers on a device, updated apart; two versions of the first chunk's weights",
        bubble="none in steady state",
        in_flight_formula="p-i/2",
        synchronous=False,
        default_virtual_stages=2,
        weight_versions=same_on_every_stage(1.5),
        chunk_versions=(2, 1),
        staleness=same_on_every_stage(1),
    ),
    Schedule(
        "xpipe",
        xpipe,
        source='Guan et al., "XPipe", arXiv 1911.04610',
        needs="an optimizer with moments to predict weights with, for every global batch's forward "
        "and backward",
        bubble="none in steady state",
        in_flight_formula="min(m, p-i)",
        synchronous=False,
        weight_versions=same_on_every_stage(3),
        staleness=xpipe_staleness,
        closed_in_flight=one_f_one_b_in_flight,
    ),
    Schedule(
        "avgpipe",
        avgpipe,
        source='Chen et al., "Elastic Averaging for Efficient Pipelined DNN Training", PPoPP 2023',
        needs="a process for each of two pipelines on every device, a reference model to average with",
        bubble="(p-1)/(m+p-1), m of both pipelines",
        in_flight_formula="min(m, 2(p-i))",
        copies=PIPELINES + 1,
        trains_one_model=False,
    ),
    Schedule(
        "autopipe",
        autopipe,
        source='Liu et al., "AutoPipe", CLUSTER 2022',
        needs="micro-batches of different size: the first in halves",
        bubble="t/(t+m(F+B)), t = (p-1)(F/2+B), where F <= B and (p-1)F <= 2B",
        in_flight_formula="min(m, p-i)",
        closed_in_flight=one_f_one_b_in_flight,
    ),
)

SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}
"""Schedules by name: those of papers, and those that the user registered."""
PUBLISHED = frozenset(SCHEDULES)
MOST_COPIES = max(schedule.copies for schedule in _ALL)
"""Most copies of a layer's weights that a schedule holds."""


def find_schedule(name: str) -> Schedule:
    """Return the schedule of this name.

    Raises:
        UsageError: There is no such schedule. The message lists the known names.
    """
    try:
        return SCHEDULES[name]
    except KeyError:
        raise UsageError(
            f"schedule {short_repr(name)} is unknown", f"Use one of: {', '.join(sorted(SCHEDULES))}."
        ) from None


KEPT_ACTIONS = 500_000
"""Most actions of all cached programs together, of about 300 bytes each."""


class ProgramCache:
    """Cache of recently used programs.

    Args:
        most: Most actions of all programs together. The last program is always kept.
    """

    def __init__(self, most: int) -> None:
        self.most, self.actions = most, 0
        self.programs: OrderedDict[tuple[str, int, int], Program] = OrderedDict()

    def program(self, schedule: str, stages: int, micro_batches: int) -> Program:
        """Return the program of a schedule by name."""
        key = (schedule, stages, micro_batches)
        if key in self.programs:
            self.programs.move_to_end(key)
            return self.programs[key]
        program = self.programs[key] = find_schedule(schedule).program(stages, micro_batches)
        self.actions += _actions(program)
        while self.actions > self.most and len(self.programs) > 1:
            _, oldest = self.programs.popitem(last=False)
            self.actions -= _actions(oldest)
        return program

    def forget(self, schedule: str) -> None:
        """Remove the programs of a schedule."""
        for key in [key for key in self.programs if key[0] == schedule]:
            self.actions -= _actions(self.programs.pop(key))


def _actions(program: Program) -> int:
    return sum(len(device_actions) for device_actions in program.actions)


PROGRAMS = ProgramCache(KEPT_ACTIONS)
cached_program = PROGRAMS.program
