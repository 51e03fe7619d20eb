"""The parts of a process of torch.distributed.pipelining, each in this one process; and split_spec."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from pplan.cost_models.errors import ExportError, FileError, MachineError, UsageError
from pplan.cost_models.text_files import sha256
from pplan.planner.plan_file import Plan
from pplan.profiler.layers import build_chain
from pplan.profiler.torch_private import backward_parts
from pplan.profiler.user_model import ModelInput
from pplan.runtimes.documents import TorchExport
from pplan.runtimes.exports import export
from pplan.runtimes.pipelining.plan_layers import check_groups
from pplan.runtimes.pipelining.process import PipelineProcess
from pplan.runtimes.pipelining.stage import (
    CutTensor,
    InputForm,
    StageLoss,
    StageModule,
    add_zero_gradients,
    pack_tensor,
    pass_on,
    trace_shapes,
)
from pplan.runtimes.torch_pipelining import build, split_spec

MakePlan = Callable[..., Plan]


def backward(tensor: Tensor) -> None:
    torch.autograd.backward(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False, True]),
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([-(2**15), 2**15 - 1], dtype=torch.int16),
        torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32),
        torch.tensor([[-(2**63), 2**63 - 1], [-1, 5]]).t(),
        torch.randn(2, 3).t(),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_what_has_no_gradient_arrives_as_it_was(tensor: Tensor) -> None:
    """PyTorch 2.11 receives into a leaf that requires a gradient, which only floating-point numbers do."""
    carrier = pack_tensor(tensor)
    assert carrier.is_floating_point()
    assert carrier.is_contiguous()
    received = CutTensor.of(tensor).receive(carrier.clone().requires_grad_(True))
    assert received.dtype == tensor.dtype
    assert not received.requires_grad
    assert torch.equal(received, tensor)


def test_what_has_a_gradient_is_handed_on_in_place() -> None:
    """No view and no leaf, so that it may be detached in place; the gradient that goes back is contiguous."""
    buffer = torch.randn(3, 2, requires_grad=True)
    received = CutTensor(torch.float32, True).receive(buffer)
    assert received.data_ptr() == buffer.data_ptr()
    assert not received._is_view()
    assert not received.is_leaf
    (gradient,) = torch.autograd.grad(received.t(), buffer, torch.randn(3, 2).t())
    assert gradient.is_contiguous()


def test_outputs_may_be_detached_before_the_weight_gradient() -> None:
    """PyTorch does so in schedules that split the backward; a ReLU keeps its own output."""
    weight = torch.randn(4, requires_grad=True)
    output = pack_tensor(torch.relu(weight * 2))
    (edge,) = (torch.autograd.graph.get_gradient_edge(output),)
    output.detach_()
    (gradient,) = torch.autograd.grad([edge], [weight], [torch.ones(4)])
    assert torch.equal(gradient, 2.0 * (weight > 0))


def test_gradients_of_zero() -> None:
    output, carried = torch.randn(3, requires_grad=True) * 2, torch.randn(2, requires_grad=True)
    tied = add_zero_gradients(output, (carried,))
    assert torch.equal(tied, output)
    backward(tied.sum())
    assert carried.grad is not None
    assert torch.equal(carried.grad, torch.zeros(2))


class Doubling(nn.Module):
    """Overwrites the second of two tensors."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return given[0], given[1].mul_(2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(given), given > 0


class Sum(nn.Module):
    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        return given[0] + given[1]


def test_shapes_and_what_is_overwritten() -> None:
    layers = nn.Sequential(Two(), Sum(), nn.ReLU(inplace=True), nn.BatchNorm1d(3))
    form = InputForm(("[0]",), (False,))
    shapes = trace_shapes(layers, [0, 1, 2, 4], (torch.randn(5, 3),), form)
    assert shapes is not None
    assert [tuple(tensor.shape) for tensor in shapes[1].inputs] == [(5, 3), (5, 3)]
    assert shapes[1].inputs[0].requires_grad
    assert shapes[1].crossings == (CutTensor(torch.float32, True), CutTensor(torch.bool, False))
    assert shapes[2].crossings == (CutTensor(torch.float32, True, is_overwritten=True),)
    assert all(tensor.is_meta for stage in shapes for tensor in (*stage.inputs, *stage.outputs))
    assert layers.state_dict()["3.num_batches_tracked"] == 0
    own = trace_shapes(nn.Sequential(nn.ReLU(inplace=True)), [0, 1], (torch.randn(5, 3),), form)
    assert own is not None
    assert own[0].crossings[0].is_overwritten


class Stubborn(nn.Module):
    """Looks at values, which a tensor on the meta device has not."""

    def forward(self, given: Tensor) -> Tensor:
        return given if float(given.sum()) > 0 else -given


def test_a_model_that_the_meta_device_cannot_run() -> None:
    """A copy of it runs for real: the model's statistics and the random numbers stay as they were."""
    layers = nn.Sequential(nn.BatchNorm1d(3), Stubborn(), nn.Dropout(), Two(), Sum(), nn.ReLU(inplace=True))
    given, state = torch.randn(5, 3), torch.get_rng_state()
    shapes = trace_shapes(layers, [0, 2, 4, 5, 6], (given,), InputForm(("[0]",), (False,)))
    assert shapes is not None
    assert shapes[2].crossings == (CutTensor(torch.float32, True), CutTensor(torch.bool, False))
    assert shapes[3].crossings == (CutTensor(torch.float32, True, is_overwritten=True),)
    assert all(tensor.is_meta for stage in shapes for tensor in (*stage.inputs, *stage.outputs))
    assert layers.state_dict()["0.num_batches_tracked"] == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_fails_on_its_example_input() -> None:
    layers = nn.Sequential(nn.Linear(4, 4))
    assert trace_shapes(layers, [0, 1], (torch.ones(2, 3),), InputForm(("[0]",), (False,))) is None


def test_without_shapes_stages_work_on_clones() -> None:
    given = torch.ones(2, 3)
    stage = StageModule(nn.Sequential(nn.ReLU(inplace=True), Stubborn()))
    stage(-given)
    assert torch.equal(given, torch.ones(2, 3))


class Transposing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) @ torch.ones(3, 2)


def test_gradients_that_are_sent_back_are_contiguous_where_shapes_are_not_known() -> None:
    """gloo takes no others: an encoder and decoder on two stages failed in their first step."""
    received = torch.randn(4, 3, 5, requires_grad=True)
    outputs = StageModule(nn.Sequential(Transposing()), None)(received)
    assert isinstance(outputs, Tensor)
    (gradient,) = torch.autograd.grad(outputs.sum(), received)
    assert gradient.is_contiguous()
    (own,) = torch.autograd.grad(Transposing()(received).sum(), received)
    assert not own.is_contiguous()
    assert torch.equal(gradient, own)


def test_a_stage_overwrites_nothing_of_others() -> None:
    about = (CutTensor(torch.float32, True), CutTensor(torch.float32, True, is_overwritten=True))
    given = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    first, second = StageModule(nn.Sequential(Doubling()), about, recompute=1)(*given)
    assert torch.equal(second, torch.full((3,), 2.0))
    assert torch.equal(given[1], torch.ones(3))
    backward((first + second).sum())
    assert [tensor.grad.tolist() for tensor in given if tensor.grad is not None] == [[1.0] * 3, [2.0] * 3]


class Dictionary(nn.Module):
    def forward(self, given: Tensor) -> dict[str, Any]:
        return {"logits": given * 2, "nothing": None, "all": [given, 3]}


def test_the_loss_is_given_the_models_output() -> None:
    seen: list[Any] = []

    def loss_fn(output: dict[str, Any], target: Tensor) -> Tensor:
        seen.append(output)
        loss: Tensor = (output["logits"] - target).sum().exp()
        return loss

    last = StageModule(nn.Sequential(Dictionary()), (CutTensor(torch.float32, True),), is_last=True)
    output = last(torch.zeros(2, requires_grad=True))
    assert [type(tensor) for tensor in output] == [Tensor, Tensor]
    loss = StageLoss(last.output_form, loss_fn)(output, torch.zeros(2))
    assert loss.item() == 1.0
    assert not pass_on(loss)._is_view()
    assert list(seen[0]) == ["logits", "nothing", "all"]
    assert seen[0]["nothing"] is None
    assert seen[0]["all"][1] == 3


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_a_share_of_the_loss_counts_in_gradients_alone(share: float) -> None:
    last = StageModule(nn.Sequential(nn.Identity()), (CutTensor(torch.float32, True),), is_last=True)
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    loss = StageLoss(last.output_form, lambda output, target: (output * target).sum(), share)(
        last(given), torch.ones(2)
    )
    assert loss.item() == 3.0
    loss.backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    assert given.grad.tolist() == [share, share]


def test_an_input_with_a_table_that_all_samples_share() -> None:
    table = torch.randn(7, 2)
    form = InputForm.of(ModelInput.of({"ids": torch.arange(3), "table": table}))
    assert form.shared == (False, True)
    ids, tables = form.repeat_shared({"ids": torch.arange(8), "table": table}, 8, 4)
    parts = list(zip(ids.tensor_split(4), tables.tensor_split(4), strict=True))
    for number, part in enumerate(parts):
        own, shared = form.drop_repeats(part)
        assert own.tolist() == [2 * number, 2 * number + 1]
        assert torch.equal(shared, table)
    example = form.micro_batch(ModelInput.of({"ids": torch.arange(3), "table": table}), 2)
    assert [(tensor.shape, tensor.stride()) for tensor in example] == [
        (tensor.shape, tensor.stride()) for tensor in parts[0]
    ]


def test_a_mini_batch_of_another_size_is_refused() -> None:
    form = InputForm(("[0]",), (False,))
    with pytest.raises(UsageError, match="the input holds 7 samples, a step of this process takes 8"):
        form.repeat_shared(torch.randn(7, 2), 8, 4)
    with pytest.raises(UsageError, match=r"the input's \[1\] is a tensor, in the example input it is not"):
        form.repeat_shared((torch.randn(8, 2), torch.randn(8)), 8, 4)


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())


def exported(plan: Plan) -> TorchExport:
    document, _ = export("torch", plan)
    assert isinstance(document, TorchExport)
    return document


def built(source: Any, model: nn.Module, **options: Any) -> Any:
    loss = nn.functional.mse_loss
    return build(source, model, example_input=torch.randn(2, 3), loss_fn=loss, device="cpu", **options)


def test_processes_that_do_not_know_each_other(make_plan: MakePlan, tmp_path: Path) -> None:
    path = tmp_path / "small.torch.json"
    plan = make_plan([2, 2], schedule="1f1b")
    exported(plan).save(path, force=False)
    for source in (plan, exported(plan), path, str(path)):
        with pytest.raises(MachineError, match=r"torch\.distributed is not initialized") as caught:
            built(source, small())
        assert "init_process_group()" in caught.value.hint


def test_another_number_of_processes_is_refused(make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    with pytest.raises(MachineError, match=r"3 processes, but 2 devices .* x 2 replicas") as caught:
        built(make_plan([2, 2], schedule="1f1b", replicas=[2, 2]), small())
    assert "--nproc-per-node 4" in caught.value.hint


def test_another_model_is_refused(make_plan: MakePlan) -> None:
    with pytest.raises(ExportError, match=r"for small with 5 layers, the model \(Sequential\) has 4"):
        built(make_plan([2, 3], schedule="1f1b"), small())
    plan = make_plan([2, 2], schedule="1f1b", layer_names=["a", "b", "c", "d"])
    with pytest.raises(ExportError, match="whose layers have the hash"):
        built(plan, small(), layer_names=["a", "b", "c", "e"])


class Counts(nn.Linear):
    """Counts what it sees in a buffer."""

    def forward(self, given: Tensor) -> Tensor:
        self.get_buffer("seen").add_(1)
        return super().forward(given)


def test_stages_that_share_a_buffer_that_is_written_are_refused(make_plan: MakePlan) -> None:
    model = nn.Sequential(Counts(3, 3), nn.Tanh(), Counts(3, 3), nn.Tanh())
    seen = torch.zeros(3)
    for layer in (model[0], model[2]):
        layer.register_buffer("seen", seen)
    with pytest.raises(ExportError, match=r"stages 0 and 1 share a buffer of shape \(3,\)"):
        built(make_plan([2, 2], schedule="1f1b"), model)


def test_batch_norm_that_waits_for_other_stages_is_refused(make_plan: MakePlan) -> None:
    """SyncBatchNorm gathers over all processes unless it has a group: those of the other stage never come."""
    model = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3), nn.Linear(3, 3), nn.Tanh())
    with pytest.raises(ExportError, match="1 is a SyncBatchNorm of all processes"):
        built(make_plan([2, 2], schedule="1f1b"), model)
    check_groups(model, stages=1)
    model[1] = nn.SyncBatchNorm(3, process_group="that of the replicas")
    check_groups(model, stages=2)


def test_a_plan_of_other_words_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.torch.json"
    path.write_text('{"schema": 1, "runtime": "torchgpipe", "step_seconds": 1}')
    with pytest.raises(FileError, match="runtime: Input should be 'torch'"):
        built(path, small())


class Net(nn.Module):
    """Layers of its own, an operation between them, and one that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.act, self.head = nn.Tanh(), nn.Linear(4, 2)

    def forward(self, given: Tensor) -> Tensor:
        hidden = self.act(self.stem(given)) * 2
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.act(hidden))
        return logits


NET = ["stem", "act", "mul", "blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1", "act_1", "head"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export in PyTorch 2.11
def test_the_cuts_for_pipeline(make_plan: MakePlan) -> None:
    """`pipeline()` makes the plan's stages of them, with the model's output."""
    model, given = Net(), torch.randn(4, 3)
    assert [layer.name for layer in build_chain(model, given).layers] == NET
    plan = make_plan([3, 2, 3, 1], layer_names=NET)
    spec = split_spec(plan, model, given)
    assert spec == dict.fromkeys(("blocks.0.0", "blocks.1.0", "head"), SplitPoint.BEGINNING)
    cut = pipeline(model, (given[:2],), split_spec=spec)
    assert cut.num_stages == 4
    held = [sorted(name for name, _ in cut.get_stage_module(i).named_parameters()) for i in range(4)]
    assert [names[0].rsplit(".", 1)[0] for names in held] == ["stem", "blocks.0.0", "blocks.1.0", "head"]
    output = cut(given[:2])
    torch.testing.assert_close(output[0] if isinstance(output, tuple) else output, model(given[:2]))


@pytest.mark.parametrize(
    ("balance", "why"),
    [
        ([2, 7], "layer 2, mul, is no submodule of Net"),
        ([7, 2], "layer 7, act, is called 2 times in Net"),
    ],
)
def test_cuts_that_pipeline_cannot_be_told(make_plan: MakePlan, balance: list[int], why: str) -> None:
    with pytest.raises(ExportError) as caught:
        split_spec(make_plan(balance), Net(), torch.randn(4, 3))
    assert why in caught.value.what
    assert "module:PATTERN" in caught.value.hint


def test_the_cuts_of_another_model_are_refused(make_plan: MakePlan) -> None:
    told = {"file": "f", "sha256": "0", "layers_sha256": sha256("another")}
    with pytest.raises(ExportError, match="whose layers have the hash"):
        split_spec(make_plan([3, 6], profile=told), Net(), torch.randn(4, 3))


def test_scripts_of_earlier_versions_ask_for_their_seat() -> None:
    process = object.__new__(PipelineProcess)
    coordinates = object()
    object.__setattr__(process, "coordinates", coordinates)
    with pytest.warns(DeprecationWarning, match="coordinates"):
        assert process.seat is coordinates


class SharedTwice(nn.Module):
    """A weight of two operations, each with a weight of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = (nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.first * self.both).exp() * (self.second * self.both).exp()


def test_a_weight_that_pytorch_cannot_part_is_refused_before_training() -> None:
    """As T5's is, whose stages of decoder and encoder have the embedding in several places."""
    inputs, form = (torch.randn(5, 3),), InputForm(("[0]",), (False,))
    layers = nn.Sequential(nn.Linear(3, 3), SharedTwice())
    assert trace_shapes(layers, [0, 1, 2], inputs, form) is not None
    assert trace_shapes(layers, [0, 2], inputs, form, splits_backward=True) is not None, "W does all"
    with pytest.raises(ExportError, match="stage 1 uses a weight in several places") as error:
        trace_shapes(layers, [0, 1, 2], inputs, form, splits_backward=True)
    assert "1f1b" in error.value.hint
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    assert trace_shapes(plain, [0, 1, 2], inputs, form, splits_backward=True) is not None
    parameters = list(layers[1].parameters())
    received = torch.randn(5, 3, requires_grad=True)
    output = layers[1](received)
    input_part, weight_part = backward_parts()
    _, groups = input_part([output], [torch.ones_like(output)], [received], iter(parameters))
    with pytest.raises(RuntimeError, match="a second time"):
        weight_part(iter(parameters), groups)
