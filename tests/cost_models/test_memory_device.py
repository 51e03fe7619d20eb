"""The ledger of a device against a walk through its list that allocates and frees things one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.memory import (
    StageBytes,
    Training,
    bytes_by_action,
    device_ledger,
    ledger,
)
from pplan.cost_models.optimizers import MIXED, Precision, StepKernels
from pplan.cost_models.program import Action, Program
from pplan.cost_models.schedules import SCHEDULES, find_schedule, gpipe

MODES = ["never", "always", "except_last"]
SIZES = [(2, 4), (4, 8), (4, 12)]
"""Stages and micro-batches that every schedule runs."""


def chunk(number: int) -> StageBytes:
    """Bytes that tell chunks and terms apart: no two sums of them are the same by accident."""
    scale = 3**number
    return StageBytes(
        parameters=1000.0 * scale,
        trainable=800.0 * scale,
        buffers=10.0 * scale,
        saved=211.0 * scale,
        saved_input=31.0 * scale,
        input=47.0 * scale,
        received=41.0 * scale,
        sent=53.0 * scale,
        workspace=[170.0, 7.0][number % 2],
        gathered=300.0 * scale,
        largest=400.0 * scale,
        pending=131.0 * scale,
        output=59.0 * scale,
        released=(59.0 + 17.0) * scale,
        layer_workspace=[180.0, 19.0][number % 2],
    )


LOSS = 17.0
"""Of what a chunk saves, times its scale: what a B before a W frees besides the output."""


def chunks_of(program: Program) -> list[StageBytes]:
    return [chunk(number) for number in range(program.chunks)]


class Walk:
    """A device that runs its list: what is allocated, by name, during each action. Where some backward is in
    two parts, outputs stay, a B before a W leaves gradients, and frees the loss and the output at its end."""

    def __init__(self, program: Program, device: int, chunks: Sequence[StageBytes], recompute: str) -> None:
        self.program, self.chunks, self.recompute = program, chunks, recompute
        self.own = program.actions[device]
        self.live: dict[tuple[str, int, int], float] = {}
        self.is_split = any(action.kind == "W" for own in program.actions for action in own)

    def in_parts(self, action: Action) -> bool:
        """Whether the micro-batch has a W here."""
        return Action("W", *action[1:]) in self.own

    def workspace(self, action: Action) -> float:
        stage = self.chunks[action.chunk]
        last = action.kind != "F" and self.in_parts(action)
        return float(stage.layer_workspace if last else stage.workspace)

    def __iter__(self) -> Iterator[tuple[Action, dict[tuple[str, int, int], float]]]:
        for position, action in enumerate(self.own):
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                self._backward(action)
            yield action, dict(self.live)
            self._free(action, position)

    def _forward(self, action: Action) -> None:
        stage = self.chunks[action.chunk]
        is_last = action.micro_batch == self.program.micro_batches - 1
        if self.recompute == "never" or (self.recompute == "except_last" and is_last):
            self._allocate("saved", action, stage.saved)
            self._allocate("saved input", action, stage.saved_input)
        else:
            self._allocate("input", action, stage.input)
        if self.is_split:
            self._allocate("output", action, stage.output)

    def _backward(self, action: Action) -> None:
        stage = self.chunks[action.chunk]
        if ("input", *action[1:]) in self.live:
            self._allocate("saved", action, stage.saved)
            self._allocate("saved input", action, stage.saved_input)
        if self.in_parts(action):
            self._allocate("pending", action, stage.pending)

    def _allocate(self, what: str, action: Action, amount: object) -> None:
        name = (what, action.micro_batch, action.chunk)
        assert name not in self.live
        assert isinstance(amount, float)
        self.live[name] = amount * self.program.share(action.micro_batch)

    def _free(self, action: Action, position: int) -> None:
        later = self.own[position + 1 :]
        if action.kind != "F" and not any(other[1:] == action[1:] for other in later):
            for name in [name for name in self.live if name[1:] == action[1:]]:
                del self.live[name]
        elif action.kind == "B":
            del self.live["output", *action[1:]]
            loss = LOSS * 3**action.chunk * self.program.share(action.micro_batch)
            self.live["saved", *action[1:]] -= loss


TERMS = ("activations", "stage_inputs", "pending_gradients", "workspace")


def amount_of(live: dict[tuple[str, int, int], float], kind: str) -> float:
    return sum(amount for (what, *_), amount in live.items() if what == kind)


def peak_of(walk: Walk) -> tuple[list[float], Action]:
    """TERMS at the first action with the largest sum, and the action."""
    best: tuple[list[float], Action] = [-1.0], walk.own[0]
    for action, live in walk:
        inputs, pending = amount_of(live, "input"), amount_of(live, "pending")
        held = sum(live.values()) - inputs - pending
        amounts = [held, inputs, pending, walk.workspace(action)]
        if sum(amounts) > sum(best[0]):
            best = amounts, action
    return best


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_against_the_walk(name: str, recompute: str) -> None:
    for stages, micro_batches in SIZES:
        program = find_schedule(name).program(stages, micro_batches)
        chunks = chunks_of(program)
        for device in range(stages):
            found = device_ledger(program, device, chunks, Training("adam"), recompute=recompute)
            walk = Walk(program, device, chunks, recompute)
            amounts, action = peak_of(walk)
            assert [found.get(term, 0.0) for term in TERMS] == amounts
            assert ("pending_gradients" in found) == program.splits_backward
            usage = bytes_by_action(program, device, chunks, recompute).bytes
            assert program.actions[device][int(usage.argmax())] == action
            assert not walk.live, "all is free after the list"
            if program.splits_backward:
                crossing = micro_batches * sum(2 * own.received + own.sent for own in chunks)
                assert found["communication"] == crossing


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_against_the_walk(name: str, recompute: str) -> None:
    program = find_schedule(name).program(4, 8)
    chunks = chunks_of(program)
    for device in range(4):
        found = bytes_by_action(program, device, chunks, recompute)
        steps = list(Walk(program, device, chunks, recompute))
        walk = Walk(program, device, chunks, recompute)
        workspace = [walk.workspace(action) for action, _ in steps]
        assert (found.bytes - workspace).tolist() == [sum(live.values()) for _, live in steps]
        assert found.stage_inputs.tolist() == [amount_of(live, "input") for _, live in steps]
        assert found.pending_gradients.tolist() == [amount_of(live, "pending") for _, live in steps]
        assert found.workspace.tolist() == workspace
        assert found.in_flight.tolist() == [len({name[1:] for name in live}) for _, live in steps]
        assert found.bytes.max() > 0


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kernels", ["fused", "foreach", "for-loop"])
def test_straight_schedules_have_the_planners_ledger(
    kernels: StepKernels, name: str, micro_batches: int, recompute: str
) -> None:
    """Which knows `except_last` of GPipe's order only."""
    precision, versions = Precision(4, 4, kernels=kernels), 1 if recompute == "except_last" else 2
    schedule, training = find_schedule(name), Training("adam", precision, replicas=2)
    for stages in (2, 3):
        program = schedule.program(stages, micro_batches)
        for device in range(stages):
            own = chunk(0)
            own = replace(own, received=own.received if device else 0.0)
            own = replace(own, sent=own.sent if device < stages - 1 else 0.0)
            closed = ledger(
                own,
                in_flight=schedule.in_flight(device, stages, micro_batches),
                recompute=recompute,
                optimizer="adam",
                replicas=2,
                weight_versions=versions,
                precision=precision,
                context_bytes=512,
            )
            found = device_ledger(
                program,
                device,
                [own],
                training,
                recompute=recompute,
                weight_versions=versions,
                context_bytes=512,
            )
            if recompute != "except_last" or name == "gpipe":
                assert found == pytest.approx(closed)


def held(program: Program, device: int, recompute: str) -> tuple[float, float]:
    """Whole micro-batches and stage inputs at the peak."""
    unit = replace(chunk(0), saved=1000.0, saved_input=0.0, input=1.0, workspace=0.0)
    unit = replace(unit, output=0.0, released=0.0, pending=0.0, layer_workspace=0.0)
    terms = device_ledger(program, device, [unit], Training(), recompute=recompute)
    return terms["activations"] / 1000, terms["stage_inputs"]


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_except_last_where_the_last_goes_back_first(micro_batches: int) -> None:
    """torchgpipe: the last micro-batch's activations, and the inputs of all others."""
    program = gpipe(2, micro_batches)
    assert held(program, 0, "except_last") == (1, micro_batches - 1)
    assert held(program, 0, "always") == (1, micro_batches)


def test_except_last_where_the_first_goes_back_first() -> None:
    """The last one's activations wait until all others were built again, one after another."""
    program = gpipe(2, 5, backwards="first_to_last")
    assert held(program, 0, "except_last") == (2, 4)
    assert held(program, 0, "always") == (1, 5)


def test_except_last_in_1f1b() -> None:
    """As soon as the last micro-batch is there, it stays beside the one that is built again; on the last
    stage it never waits."""
    program = find_schedule("1f1b").program(4, 8)
    # Stage 0 holds 4: the last whole, and 3 that recompute, one of them built again.
    assert held(program, 0, "except_last") == (2, 3)
    assert held(program, 2, "except_last") == (2, 1)
    assert held(program, 3, "except_last") == (1, 1)


def test_what_was_built_again_stays_until_its_weight_gradient() -> None:
    actions = [Action("F", 0), Action("F", 1), Action("B", 0), Action("B", 1), Action("W", 0), Action("W", 1)]
    program = replace(find_schedule("naive").program(1, 2), actions=(tuple(actions),))
    assert held(program, 0, "always") == (2, 2)


def test_halves_of_a_micro_batch_hold_half() -> None:
    program = find_schedule("autopipe").program(2, 1)
    assert program.micro_batches == 2
    assert held(program, 0, "never") == (1, 0)
    assert held(program, 1, "always") == (0.5, 1)


def everything(found: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in found.items() if name not in ("reserve", "workspace")}


def test_two_chunks_by_hand() -> None:
    """Interleaved, two devices, two micro-batches: device 0 holds both of either chunk before the first
    backward, that of chunk 1, whose workspace is the smaller one."""
    program = find_schedule("interleaved").program(2, 2)
    found = device_ledger(program, 0, [chunk(0), chunk(1)], Training("adam", MIXED), weight_versions=(2, 1))
    assert everything(found) == {
        "weights": 1010 + 3030,
        "gradients": 800 + 2400,
        "master_weights": (800 + 2400) / 2 * 4,
        "optimizer": (800 + 2400) / 2 * 8,
        "weight_versions": 1000,
        "activations": 2 * 242 + 2 * 726,
        "stage_inputs": 0,
        # The first device hands either chunk on, and gets the second one's input from device 1.
        "communication": 3 * 53 + 3 * 41,
    }
    assert found["workspace"] == 7
    assert sum(found.values()) == pytest.approx(sum(everything(found).values()) * 1.05 + 7 * 1.05)


def test_chunks_of_one_device_send_each_other_nothing() -> None:
    """The last device of a V hands its first chunk's output to its second: device 1 receives and sends at
    its two outer cuts only. With backwards in two parts it has PyTorch's buffers all the same."""
    split = find_schedule("zb-v").program(2, 4)
    whole = [tuple(action for action in own if action.kind != "W") for own in split.actions]
    program = Program(tuple(whole), split.pipes, split.pipe_of)
    found = device_ledger(program, 1, [chunk(0), chunk(1)], Training())
    assert found["communication"] == 41 + 3 * 53
    found = device_ledger(split, 1, [chunk(0), chunk(1)], Training())
    assert found["communication"] == 4 * (2 * (41 + 3 * 41) + 53 + 3 * 53)
    alone = find_schedule("interleaved").program(1, 4)
    assert device_ledger(alone, 0, [chunk(0), chunk(1)], Training())["communication"] == 0


def test_copies_of_the_weights() -> None:
    """Chimera's two are those of its chunks; AvgPipe has a reference besides those of its two pipelines."""
    for name, further in (("chimera", 0), ("avgpipe", 1000)):
        schedule = find_schedule(name)
        program = schedule.program(2, 4)
        found = device_ledger(program, 0, [chunk(0), chunk(0)], Training(), copies=schedule.copies)
        assert (found["weights"], found["weight_versions"]) == (2 * 1010, further)


def test_zero_gathers_the_largest_layers_of_any_chunk() -> None:
    program = find_schedule("interleaved").program(2, 2)
    chunks = [chunk(0), replace(chunk(1), received=0.0, sent=0.0)]
    found = device_ledger(program, 0, chunks, Training("adam", replicas=4, zero=3))
    assert found["weights"] == 1000 + 40
    assert found["communication"] == 53 + 2 * 900


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        ({"recompute": "often"}, "'often': not known"),
        ({"weight_versions": (1, 1, 2)}, "3 values for 2 chunks"),
        ({"weight_versions": 0}, "weight versions 0"),
        ({"recompute": "selective"}, "recompute 'selective': not known"),
    ],
)
def test_what_cannot_be_is_named(arguments: dict[str, object], seen: str) -> None:
    given = {
        "program": find_schedule("interleaved").program(2, 2),
        "device": 0,
        "chunk_bytes": [chunk(0), chunk(1)],
        "training": Training(),
    }
    with pytest.raises(UsageError, match=seen):
        device_ledger(**(given | arguments))  # type: ignore[arg-type]
