"""The main job on the real VGG-19, through the command line: measured, solved, exported, trained, checked."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from two_processes import KEEPS_MEMORY

import pplan
from pplan.planner.planners import BASELINES

SHAPE = (3, 32, 32)
MINI_BATCH = 4
SOLVED = ("--gpus", "6", "--mini-batch", str(MINI_BATCH), "--micro-batches", "2")
FORBIDDEN = 16 + 2
"""Cuts of VGG-19 before an in-place ReLU: after every convolution and two of the three linear layers."""


def pplan_command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the console script, in a process that keeps the gigabytes of copies of VGG-19 that it frees."""
    script = Path(sys.executable).with_name("pplan")
    environment = os.environ | KEEPS_MEMORY
    return subprocess.run(
        [str(script), *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the main job ran: `profile`, `solve --gpus 6`, `export` for every runtime."""
    folder = tmp_path_factory.mktemp("main_job")
    # The smallest size is measured however slow the machine is.
    measured = ("--input", "3x32x32", "--micro-batch-sizes", "2", "--budget", "4s")
    pplan_command("profile", "vgg19", *measured, "--device", "cpu", folder=folder)
    pplan_command("solve", *SOLVED, folder=folder)
    for runtime in ("torchgpipe", "fairscale"):
        pplan_command("export", runtime, "--device", "cpu", folder=folder)
    pplan_command("export", "deepspeed", folder=folder)
    return folder


def read(folder: Path, name: str) -> dict[str, Any]:
    content = json.loads((folder / name).read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.slow
def test_the_profile_is_of_the_real_vgg19(folder: Path) -> None:
    profile = pplan.load_profile(folder / "vgg19.profile.json")
    model = torchvision.models.vgg19()
    assert len(profile.layers) == 46
    assert sum(layer.parameter_bytes for layer in profile.layers) == 4 * sum(
        parameter.numel() for parameter in model.parameters()
    )
    assert profile.micro_batch_sizes == [2]
    assert sum(not layer.cut_after for layer in profile.layers[:-1]) == FORBIDDEN
    assert all(
        cost.forward_seconds > 0 and cost.backward_seconds >= 0
        for layer in profile.layers
        for cost in layer.costs
    )
    convolution = profile.layers[0].costs[0]
    assert convolution.output_bytes == 2 * 4 * 64 * 32 * 32
    assert profile.made_by.torch == torch.__version__
    assert profile.made_by.command.startswith("pplan profile vgg19 --input 3x32x32")


@pytest.mark.slow
def test_the_plan_is_for_these_layers(folder: Path) -> None:
    profile = pplan.load_profile(folder / "vgg19.profile.json")
    plan = pplan.load_plan(folder / "vgg19.plan.json")
    assert sum(plan.balance) == 46
    assert plan.layer_names == [layer.name for layer in profile.layers]
    assert plan.profile.layers_sha256 == profile.layers_sha256
    assert plan.prediction.exact == (plan.prediction.gap <= 1e-9)
    assert plan.prediction.lower_bound_seconds <= plan.prediction.step_seconds * (1 + 1e-12)
    assert [base.name for base in plan.baselines] == list(BASELINES)
    for base in plan.baselines:
        assert base.step_seconds is None or base.step_seconds >= plan.prediction.step_seconds * (1 - 1e-9)
    assert {other.schedule for other in plan.alternatives} >= {"gpipe", "1f1b"}
    assert {name for other in plan.alternatives for name in other.runtimes} >= {"torchgpipe", "deepspeed"}


@pytest.mark.slow
def test_deepspeed_is_given_its_partition(folder: Path) -> None:
    document = read(folder, "vgg19.deepspeed.json")
    config = document["config"]
    assert document["parts"][0] == 0
    assert document["parts"][-1] == 46
    assert (
        config["train_batch_size"]
        == MINI_BATCH
        == (
            config["train_micro_batch_size_per_gpu"]
            * config["gradient_accumulation_steps"]
            * document["replicas"]
        )
    )


def vgg19_without_chance() -> nn.Module:
    """VGG-19 in double precision whose dropout drops nothing, so that runs can be compared.

    Its hidden linear layers are narrow: they are 120 of its 144 million parameters.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model: nn.Module = torchvision.models.vgg19(dropout=0.0)
        for name, shape in {"0": (512 * 7 * 7, 32), "3": (32, 32), "6": (32, 1000)}.items():
            setattr(model.classifier, name, nn.Linear(*shape))
    model = model.double().to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.reset_parameters()
    return model


def two_steps(model: nn.Module, parameters: list[nn.Parameter]) -> tuple[list[float], list[Tensor]]:
    """Losses of two optimizer steps, and the gradients of the second."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    losses = []
    for _ in range(2):
        images = torch.randn(MINI_BATCH, *SHAPE, generator=generator, dtype=torch.float64)
        labels = torch.randint(1000, (MINI_BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[Tensor]]:
    """Losses and gradients of the untouched model."""
    model = vgg19_without_chance()
    return two_steps(model, list(model.parameters()))


def torchgpipe(layers: nn.Sequential, arguments: dict[str, Any]) -> nn.Module:
    from torchgpipe import GPipe

    pipe: nn.Module = GPipe(layers, **arguments)
    return pipe


def fairscale(layers: nn.Sequential, arguments: dict[str, Any]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from fairscale.nn import Pipe

        pipe: nn.Module = Pipe(layers, **arguments)
    return pipe


@pytest.fixture(autouse=True)
def _no_pipe_stays_alive() -> Iterator[None]:
    yield
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("build", [torchgpipe, fairscale])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:fairscale", "ignore::FutureWarning")
def test_the_exported_plan_trains_as_the_plain_model_does(
    folder: Path,
    plain: tuple[list[float], list[Tensor]],
    build: Callable[[nn.Sequential, dict[str, Any]], nn.Module],
) -> None:
    document = read(folder, f"vgg19.{build.__name__}.json")
    assert MINI_BATCH % document["chunks"] == 0
    model = vgg19_without_chance()
    names = list(model.state_dict())
    example = torch.randn(1, *SHAPE, dtype=torch.float64)
    layers = pplan.sequential(model, example, verify=build is torchgpipe)  # compared once
    assert len(layers) == sum(document["balance"])
    pipe = build(layers, {key: document[key] for key in ("balance", "devices", "chunks", "checkpoint")})
    losses, gradients = two_steps(pipe, list(pipe.parameters()))
    assert losses == pytest.approx(plain[0], rel=1e-12)
    assert len(gradients) == len(plain[1]) == len(names)
    for own, expected in zip(gradients, plain[1], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-12)
