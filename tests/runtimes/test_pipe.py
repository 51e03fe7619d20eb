"""torchgpipe and FairScale, really run on the CPU with exported files, against the model trained plainly."""

from __future__ import annotations

import copy
import gc
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, linear

from pplan.cost_models.errors import ExportError, FileError, MachineError, UsageError
from pplan.planner.plan_file import Plan
from pplan.profiler.layer import LayerChain, TensorUsers, find_tensor_users
from pplan.profiler.layers import build_chain, sequential
from pplan.runtimes import fairscale, torchgpipe
from pplan.runtimes.exports import export

MakePlan = Callable[..., Plan]
BUILDERS: dict[str, Callable[..., Any]] = {
    "torchgpipe": torchgpipe.build,
    "fairscale": fairscale.build,
}
STEPS = 2


@dataclass
class Training:
    """Losses of the steps, and the gradients of the last one by the parameter's place."""

    losses: list[float]
    gradients: list[Tensor]


def train(
    model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], batch: tuple[Tensor, Tensor]
) -> Training:
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[0]), batch[1])
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    gradients = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(parameters)
    return Training(losses, gradients)


def assert_same(run: Training, plain: Training, tolerance: float) -> None:
    assert run.losses == pytest.approx(plain.losses, rel=tolerance)
    assert len(run.gradients) == len(plain.gradients) > 0
    for gradient, expected in zip(run.gradients, plain.gradients, strict=True):
        assert expected.norm() > 0
        assert (gradient - expected).norm() <= tolerance * expected.norm()


def small_model() -> nn.Sequential:
    """Ten layers in the manner of VGG, in float64. In-place layers follow a convolution."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    ).double()


def small_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.randint(10, (4,))


@pytest.fixture(params=["torchgpipe", "fairscale"])
def runtime(request: pytest.FixtureRequest) -> Iterator[str]:
    """A runtime that is installed. FairScale's threads must be gone when the interpreter ends."""
    yield str(request.param)
    gc.collect()


def construct(runtime: str, model: nn.Sequential, arguments: dict[str, Any]) -> Any:
    """The runtime's own class, called as a user's script does."""
    if runtime == "torchgpipe":
        from torchgpipe import GPipe

        return GPipe(model, **arguments)
    from fairscale.nn import Pipe

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fairscale.nn.Pipe has been upstreamed", DeprecationWarning)
        return Pipe(model, **arguments)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["never", "always", "except_last"])
def test_training_is_the_plain_models(
    make_plan: MakePlan, tmp_path: Path, runtime: str, recompute: str, chunks: int
) -> None:
    plan = make_plan([2, 5, 3], micro_batches=chunks, micro_batch_size=4 // chunks, recompute=recompute)
    path = tmp_path / f"small.{runtime}.json"
    export(runtime, plan, device="cpu")[0].save(path, force=False)
    written = json.loads(path.read_text())
    arguments = {key: written[key] for key in ("balance", "devices", "chunks", "checkpoint")}

    plain, model = small_model(), small_model()
    fed: list[int] = []
    model[0].register_forward_hook(lambda _module, inputs, _output: fed.append(len(inputs[0])))
    pipe = construct(runtime, model, arguments)
    run = train(pipe, list(pipe.parameters()), small_batch())
    balance = [len(part) for part in pipe.partitions]
    del pipe  # before anything can fail: a living Pipe would keep the interpreter from ending

    assert balance == [2, 5, 3]
    again = {"never": 0, "always": chunks, "except_last": chunks - 1}[recompute]
    assert fed == [4 // chunks] * STEPS * (chunks + again)
    assert_same(run, train(plain, list(plain.parameters()), small_batch()), tolerance=1e-12)


class Reused(nn.Module):
    """One linear layer and one activation used twice; layers 2 to 5 of its chain belong together."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.same, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.activation = nn.ReLU()
        self.norm = norm or nn.Identity()

    def forward(self, given: Tensor) -> Tensor:
        value = torch.tanh(self.first(given))
        value = self.norm(self.activation(self.same(value)))
        value = self.norm(self.activation(self.same(value)))
        return self.last(value)  # type: ignore[no-any-return]


def tied() -> nn.Sequential:
    """Layers 2 and 4 share a weight; the second has a bias of its own. Layer 0 works in place."""
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Hardtanh(),
        nn.Linear(6, 6, bias=False),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Linear(6, 3),
    )
    model[4].weight = model[2].weight
    return model


class TiedFunctions(nn.Module):
    """A weight that several layers of several operations share, one of them as a function's argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.embed, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(6, 3)

    def forward(self, given: Tensor) -> Tensor:
        value = torch.tanh(self.first(given))
        value = torch.tanh(value + self.embed(value))
        value = torch.tanh(value + self.head(value))
        value = torch.tanh(value + linear(value, self.embed.weight))
        return self.last(value)  # type: ignore[no-any-return]


SHARING: dict[str, Callable[[], nn.Module]] = {
    "reused": Reused,
    "tied": tied,
    "functions": TiedFunctions,
    "norm": lambda: Reused(nn.BatchNorm1d(6)),
}


def sharing_model(name: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(5)
    return SHARING[name]().double(), (torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,)))


def tied_weights(model: nn.Module, chain: LayerChain) -> list[TensorUsers]:
    """Whose users these runtimes keep on one stage."""
    users = find_tensor_users(model, [layer.module for layer in chain.layers], chain.aliases)
    return [own for own in users if own.is_tied]


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("name", SHARING)
def test_shared_parameters(make_plan: MakePlan, runtime: str, name: str, recompute: str) -> None:
    """Cut as the profile allows. Batch norm sees whole mini-batches, as the plain model's does."""
    plain, batch = sharing_model(name)
    model = copy.deepcopy(plain)
    chain = build_chain(model, batch[0])
    users = [own.layers for own in tied_weights(model, chain)]
    ends = [
        index + 1
        for index, layer in enumerate(chain.layers)
        if layer.cut_reason is None and not any(own[0] <= index < own[-1] for own in users)
    ]
    balance = [b - a for a, b in pairwise([0, *ends])]
    assert 1 < len(balance) < len(chain)
    chunks = 1 if name == "norm" else 4
    plan = make_plan(balance, micro_batches=chunks, micro_batch_size=8 // chunks, recompute=recompute)
    document, _ = export(runtime, plan, device="cpu")
    pipe = BUILDERS[runtime](document, sequential(model, batch[0]))
    own = {id(parameter) for parameter in pipe.parameters()}
    run = train(pipe, list(model.parameters()), batch)
    del pipe

    assert own == {id(parameter) for parameter in model.parameters()}
    assert_same(run, train(lambda given: plain(given.clone()), list(plain.parameters()), batch), 1e-11)
    if name == "norm":  # also where layers run again: their statistics count each sample once
        for value, expected in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


class Unet(nn.Module):
    """Two levels down and up, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.bottom = (
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 4), (4, 6), (6, 6))
        )
        self.up, self.leave = nn.Conv2d(12, 4, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(4, 3)

    def forward(self, given: Tensor) -> Tensor:
        high = functional.relu(self.enter(given))
        low = functional.relu(self.down(functional.max_pool2d(high, 2)))
        value = functional.interpolate(self.bottom(functional.max_pool2d(low, 2)), scale_factor=2)
        value = functional.interpolate(self.up(torch.cat([value, low], 1)), scale_factor=2)
        value = self.leave(torch.cat([value, high], 1))
        result: Tensor = self.head(value.mean((2, 3)))
        return result


class Encoder(nn.Module):
    """A transformer of two blocks, every one of which hands on the residual stream beside its own value."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.attentions = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wide, self.narrow = (
            nn.ModuleList(nn.Linear(a, b) for _ in range(2)) for a, b in ((8, 16), (16, 8))
        )
        self.head = nn.Linear(8, 3)

    def forward(self, given: Tensor) -> Tensor:
        value = self.enter(given.flatten(2).transpose(1, 2))
        for block in range(2):
            heads = self.attentions[block](self.norms[2 * block](value)).unflatten(-1, (2, 4)).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(heads, heads, heads)
            value = value + mixed.transpose(1, 2).flatten(2)
            wide = functional.gelu(self.wide[block](self.norms[2 * block + 1](value)))
            value = value + self.narrow[block](wide)
        result: Tensor = self.head(value.mean(1))
        return result


class Residual(torchvision.models.ResNet):  # type: ignore[misc]
    """ResNet with a block a stage, in float64, and without batch norm, which micro-batches change."""

    def __init__(self) -> None:
        super().__init__(
            torchvision.models.resnet.BasicBlock,
            [1, 1, 1, 1],
            num_classes=3,
            norm_layer=lambda _: nn.Identity(),
        )


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("make", [Unet, Encoder, Residual])
def test_cuts_that_several_tensors_cross(
    make_plan: MakePlan, runtime: str, make: Callable[[], nn.Module], recompute: str
) -> None:
    torch.manual_seed(7)
    plain = make().double()
    batch = torch.randn(8, 3, 16, 16, dtype=torch.float64), torch.randint(3, (8,))
    model = copy.deepcopy(plain)
    chain = build_chain(model, batch[0], granularity="fine")
    ends = [
        index + 1 for index, layer in enumerate(chain.layers) if layer.crossing > 1 and not layer.cut_reason
    ]
    balance = [b - a for a, b in pairwise([0, *ends, len(chain)])]
    assert len(balance) > 3
    plan = make_plan(balance, micro_batches=4, micro_batch_size=2, recompute=recompute)
    document, _ = export(runtime, plan, device="cpu")
    pipe = BUILDERS[runtime](document, sequential(model, batch[0], granularity="fine"))
    run = train(pipe, list(model.parameters()), batch)
    sizes = [len(part) for part in pipe.partitions]
    del pipe
    assert sizes == balance
    assert_same(run, train(plain, list(plain.parameters()), batch), 1e-11)


@pytest.mark.parametrize(
    ("recompute", "with_example"), [("never", True), ("always", False), ("except_last", True)]
)
def test_cuts_before_operations_in_place(
    make_plan: MakePlan, runtime: str, recompute: str, with_example: bool
) -> None:
    """Stages begin with layers 0, 1, 4 and 8; the last three overwrite what they are handed, on a clone."""
    model, plain, batch = small_model(), small_model(), small_batch()
    plan = make_plan([1, 3, 4, 2], micro_batches=4, micro_batch_size=1, recompute=recompute)
    pipe = BUILDERS[runtime](plan, model, batch[0][:3] if with_example else None, devices=["cpu"] * 4)
    run = train(pipe, list(pipe.parameters()), batch)
    sizes, names = [len(part) for part in pipe.partitions], sorted(pipe.state_dict())
    del pipe
    assert sizes == [1, 3, 4, 2]
    assert [name.split(".", 2)[2] for name in names] == sorted(plain.state_dict())
    assert not any(layer._forward_pre_hooks for layer in model)
    assert_same(run, train(plain, list(plain.parameters()), batch), 1e-12)


class Masked(nn.Module):
    """A transformer with a mask and a table of floats, without gradients, beside the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.mixers = nn.ModuleList(nn.Linear(6, 18) for _ in range(3))
        self.head = nn.Linear(6, 5)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        mask, table = (ids != 0)[:, None, :], torch.sin(ids.double())[:, :, None]
        value = self.embedding(ids)
        for mixer in self.mixers:
            q, k, v = mixer(value + table).chunk(3, -1)
            value = value + functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return {"logits": self.head(value.mean(1)), "aside": None}


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_tensors_without_gradients_at_cuts(make_plan: MakePlan, runtime: str, recompute: str) -> None:
    """Of any model, with another example than is trained on. What it returns in a dict comes as a tensor."""
    torch.manual_seed(4)
    plain = Masked().double()
    ids = torch.randint(11, (8, 7))
    ids[:, 0] = 1
    batch = ids, torch.randint(5, (8,))
    model = copy.deepcopy(plain)
    count = len(build_chain(model, ids[:2], granularity="fine"))
    plan = make_plan(
        [6, 6, count - 12],
        micro_batches=4,
        recompute=recompute,
        profile={"file": "f", "sha256": "0", "granularity": "fine"},
    )
    pipe = BUILDERS[runtime](export(runtime, plan, device="cpu")[0], model, ids[:2])
    run = train(pipe, list(model.parameters()), batch)
    del pipe
    expected = train(lambda given: plain(given)["logits"], list(plain.parameters()), batch)
    assert_same(run, expected, 1e-11)


def test_the_lines_of_the_readme_train_where_a_mask_crosses_a_cut(
    make_plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recomputation, which fails in torchgpipe's own constructor."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(4)
    plain = Masked().double()
    ids = torch.randint(1, 11, (8, 7))
    model = copy.deepcopy(plain)
    count = len(build_chain(model, ids[:2], granularity="fine"))
    own = {"file": "f", "sha256": "0", "granularity": "fine"}
    plan = make_plan([6, count - 6], micro_batches=4, recompute="always", profile=own)
    export("torchgpipe", plan, device="cpu")[0].save(Path("vgg19.torchgpipe.json"), force=False)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (lines,) = re.findall(r"## In your training script\n.*?```python\n(.*?)```", readme, re.DOTALL)
    names: dict[str, Any] = {"model": model, "example_input": ids[:2]}
    exec(lines, names)
    batch = ids, torch.randint(5, (8,))
    run = train(names["pipe"], list(model.parameters()), batch)
    expected = train(lambda given: plain(given)["logits"], list(plain.parameters()), batch)
    assert_same(run, expected, 1e-11)


class Scored(nn.Module):
    """Returns its loss beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(given))
        return logits, logits.square().mean()


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_an_output_without_samples_is_refused(make_plan: MakePlan, runtime: str, recompute: str) -> None:
    """A plan from a file that does not know the model's outputs."""
    given = torch.randn(8, 6)
    count = len(build_chain(Scored(), given))
    document, _ = export(runtime, make_plan([1, count - 1], recompute=recompute), device="cpu")
    with pytest.raises(ExportError, match=f"returns tensor 1 of its output, a scalar: {runtime} joins"):
        BUILDERS[runtime](document, Scored(), given)


def test_devices_of_ones_own(make_plan: MakePlan, runtime: str) -> None:
    plan = make_plan([4, 6])
    given = small_batch()[0]
    with pytest.raises(UsageError, match="the plan has 2 stages"):
        BUILDERS[runtime](plan, small_model(), given, devices=["cpu"])
    with pytest.raises(MachineError, match="a stage on cuda:"):
        BUILDERS[runtime](plan, small_model(), given, devices=["cpu", 99])


def test_the_best_alternative_is_told_of(
    make_plan: MakePlan, alternative: Callable[..., dict[str, Any]], runtime: str
) -> None:
    plan = make_plan([4, 6], schedule="1f1b", alternatives=[alternative(balance=[3, 7])])
    with pytest.warns(UserWarning, match="balance 3,7"):
        pipe = BUILDERS[runtime](plan, small_model(), small_batch()[0], devices=["cpu", "cpu"])
    assert [len(part) for part in pipe.partitions] == [3, 7]
    assert pipe.chunks == 4


class Adding(nn.Module):
    def forward(self, given: Tensor, table: Tensor) -> Tensor:
        return given + table


def test_what_all_samples_share_is_refused(make_plan: MakePlan, runtime: str) -> None:
    document, _ = export(runtime, make_plan([1, 1]), device="cpu")
    with pytest.raises(ExportError, match=r"a tensor of shape \(7, 6\) that all samples share"):
        BUILDERS[runtime](document, Adding(), (torch.randn(2, 7, 6), torch.randn(7, 6)))


class Labelled(nn.Module):
    """Returns integers beside what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, given: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(given))
        return logits, logits.argmax(1)


def test_an_output_without_a_gradient_is_refused(make_plan: MakePlan, runtime: str) -> None:
    """Both would fail in backward."""
    given, count = torch.randn(8, 6), len(build_chain(Labelled(), torch.randn(8, 6)))
    for recompute in ("always", "except_last"):
        document, _ = export(runtime, make_plan([1, count - 1], recompute=recompute), device="cpu")
        with pytest.raises(ExportError, match=rf"tensor 1 of the model's output, int64, .* {runtime}"):
            BUILDERS[runtime](document, Labelled(), given)
    pipe = BUILDERS[runtime](export(runtime, make_plan([1, count - 1]), device="cpu")[0], Labelled(), given)
    logits, labels = pipe(given)
    torch.autograd.backward(logits.sum())
    assert labels.dtype == torch.int64


def test_parameters_on_two_devices_are_refused(make_plan: MakePlan, runtime: str) -> None:
    """Stages on one device may share them."""
    model, (given, _) = sharing_model("tied")
    document, _ = export(runtime, make_plan([3, 3]), device="cpu")
    assert len(BUILDERS[runtime](document, model, given)) == 6
    with pytest.raises(ExportError, match="stages 0 and 1 share a parameter"):
        BUILDERS[runtime](document, model, given, devices=["cpu", "meta"])


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_first_layer_that_works_in_place(make_plan: MakePlan, runtime: str, recompute: str) -> None:
    torch.manual_seed(6)
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 5), nn.Linear(5, 3)).double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))
    kept = batch[0].clone()
    model = copy.deepcopy(plain)
    document, _ = export(
        runtime, make_plan([2, 1], micro_batches=4, micro_batch_size=2, recompute=recompute), device="cpu"
    )
    pipe = BUILDERS[runtime](document, sequential(model, batch[0]))
    run = train(pipe, list(pipe.parameters()), batch)
    del pipe
    assert torch.equal(batch[0], kept)
    assert_same(run, train(lambda given: plain(given.clone()), list(plain.parameters()), batch), 1e-12)


@pytest.fixture(scope="module")
def vgg11() -> tuple[nn.Sequential, dict[str, Tensor], tuple[Tensor, Tensor], Training]:
    """torchvision's VGG-11 as the profiler cuts it, its first weights, a batch, and its plain training.

    Its hidden linear layers are narrow: they are 120 of its 129 million parameters.
    """
    from torchvision.models import vgg11

    torch.manual_seed(3)
    with torch.device("meta"):
        model: nn.Module = vgg11(dropout=0.0)
        for name, shape in {"0": (512 * 7 * 7, 32), "3": (32, 32), "6": (32, 10)}.items():
            setattr(model.classifier, name, nn.Linear(*shape))
    model = model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    batch = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    layers = sequential(model, batch[0][:1])
    start = {name: value.clone() for name, value in layers.state_dict().items()}
    return layers, start, batch, train(model, list(model.parameters()), batch)


@pytest.mark.slow
def test_torchvisions_vgg11(
    make_plan: MakePlan,
    tmp_path: Path,
    runtime: str,
    vgg11: tuple[nn.Sequential, dict[str, Tensor], tuple[Tensor, Tensor], Training],
) -> None:
    layers, start, batch, plain = vgg11
    layers.load_state_dict(start)
    assert len(layers) == 30
    cut = next(i for i in range(12, 30) if not getattr(layers[i], "inplace", False))
    plan = make_plan([cut, 30 - cut], micro_batches=2, micro_batch_size=2, recompute="except_last")
    path = tmp_path / f"vgg11.{runtime}.json"
    export(runtime, plan, device="cpu")[0].save(path, force=False)
    pipe = BUILDERS[runtime](path, layers)
    run = train(pipe, list(pipe.parameters()), batch)
    balance = [len(part) for part in pipe.partitions]
    del pipe
    assert balance == [cut, 30 - cut]
    assert_same(run, plain, tolerance=1e-5)


def test_another_models_layers_are_refused(make_plan: MakePlan) -> None:
    document, _ = export("torchgpipe", make_plan([4, 7], model="vgg11"), device="cpu")
    assert isinstance(document, torchgpipe.TorchgpipeExport)
    with pytest.raises(ExportError, match=r"for vgg11 with 11 layers, the model \(Sequential\) has 10"):
        torchgpipe.build(document, small_model())


def test_what_is_no_sequential_is_refused(make_plan: MakePlan, runtime: str) -> None:
    document, _ = export(runtime, make_plan([4, 6]), device="cpu")
    whole: Any = Reused()
    with pytest.raises(ExportError, match="the model is of type Reused") as caught:
        BUILDERS[runtime](document, whole)
    assert "pplan.sequential(model, example_input)" in caught.value.hint


def test_a_file_is_named_by_a_text_too(make_plan: MakePlan, tmp_path: Path, runtime: str) -> None:
    path = str(tmp_path / f"small.{runtime}.json")
    export(runtime, make_plan([4, 6]), device="cpu")[0].save(path, force=False)
    assert [len(part) for part in BUILDERS[runtime](path, small_model()).partitions] == [4, 6]
    with pytest.raises(FileError, match=f"no such {runtime} file"):
        BUILDERS[runtime](f"{path}.gone", small_model())


def test_another_runtimes_document_is_refused(make_plan: MakePlan, runtime: str) -> None:
    other, _ = export("deepspeed", make_plan([4, 6], micro_batches=1))
    with pytest.raises(UsageError, match=f"source is of type DeepspeedExport, {runtime} takes a "):
        BUILDERS[runtime](other, small_model())


def test_other_layer_names_are_refused(make_plan: MakePlan) -> None:
    names = [f"layers.{i}" for i in range(10)]
    document, _ = export("torchgpipe", make_plan([4, 6], layer_names=names), device="cpu")
    assert isinstance(document, torchgpipe.TorchgpipeExport)
    assert len(torchgpipe.build(document, small_model(), layer_names=names)) == 10
    with pytest.raises(ExportError, match=r"for small, .* \(blocks.0 to layers.9\)"):
        torchgpipe.build(document, small_model(), layer_names=["blocks.0", *names[1:]])


def test_pplan_sequential_knows_whose_layers_it_has(make_plan: MakePlan, runtime: str) -> None:
    """Another model of as many layers is refused; its own is not, nor one without names."""
    given = torch.randn(2, 6)
    names = [layer.name for layer in build_chain(Reused(), given).layers]
    plan = make_plan([2, len(names) - 2], layer_names=names, model="reused")
    document, _ = export(runtime, plan, device="cpu")
    own = sequential(Reused(), given)
    plain = nn.Sequential(*(nn.Linear(6, 6) for _ in names))
    assert len(BUILDERS[runtime](document, own)) == len(names)
    assert len(BUILDERS[runtime](document, plain)) == len(names)
    refused = (
        r"file is for reused, whose layers have the hash \w{12}, those of the model \(Sequential\) have \w"
    )
    with pytest.raises(ExportError, match=refused):
        BUILDERS[runtime](document, sequential(plain, given))
    own.append(nn.Linear(3, 3))
    with pytest.raises(ExportError, match=rf"the model \(Reused\) has {len(names) + 1}"):
        BUILDERS[runtime](document, own)


def test_a_missing_package_names_its_extra(
    make_plan: MakePlan, tmp_path: Path, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"small.{runtime}.json"
    export(runtime, make_plan([4, 6]), device="cpu")[0].save(path, force=False)
    for module in ("torchgpipe", "fairscale", "fairscale.nn"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MachineError) as caught:
        BUILDERS[runtime](path, small_model())
    assert f'pip install "pplan[{runtime}]"' in caught.value.hint


def test_the_chunks_are_those_torch_makes(make_plan: MakePlan) -> None:
    """The count in the file is what torch.chunk makes of a mini-batch, for every way to cut 24 samples."""
    for chunks, size in [(1, 24), (2, 12), (3, 8), (4, 6), (8, 3), (24, 1)]:
        document, _ = export("torchgpipe", make_plan([4, 6], micro_batches=chunks, micro_batch_size=size))
        assert isinstance(document, torchgpipe.TorchgpipeExport)
        parts = torch.empty(document.mini_batch).chunk(document.chunks)
        assert [len(part) for part in parts] == [document.micro_batch_size] * document.chunks
    assert len(torch.empty(9).chunk(4)) == 3  # why other counts are not written


class ScalesInTraining(nn.Module):
    """Code that asks for its mode between layers, and a standard module that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = *(nn.Linear(8, 8) for _ in range(3)), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = functional.dropout(x, 0.5, self.training) if self.training else x + 1
        output: Tensor = self.c(self.drop(self.b(x)))
        return output


def test_evaluation_of_a_pipe_is_the_models(make_plan: MakePlan, runtime: str) -> None:
    model, given = ScalesInTraining(), torch.randn(4, 8)
    layers = sequential(model, given)
    plan = make_plan([2, len(layers) - 2], micro_batches=2, micro_batch_size=2)
    pipe = BUILDERS[runtime](export(runtime, plan, device="cpu")[0], layers, given, layer_names=None)
    pipe.eval()
    assert torch.equal(pipe(given), model.eval()(given))
    pipe.train()
    torch.manual_seed(1)
    trained = pipe(given)
    assert not torch.equal(trained, model(given))
