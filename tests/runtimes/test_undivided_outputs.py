"""Outputs without samples, such as a loss: refused for the runtimes that join micro-batches by torch.cat."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pplan
from pplan.profiler.layers import build_chain
from pplan.profiler.profile_file import OutputTensor, Profile

Run = Callable[..., Any]
LOSS = OutputTensor(name="[1]", shape=[], dtype="float32", has_samples=False)
LOGITS = OutputTensor(name="[0]", shape=[5], dtype="float32", has_samples=True)
WORDS = r"the model returns output\[1\], a scalar: {runtime} joins the outputs of the micro-batches"
JOINING = ["torchgpipe", "fairscale"]


@dataclass
class Result:
    logits: Tensor
    loss: Tensor


class Returns(nn.Module):
    """A model that returns what `make` makes of its logits (samples, 7, 5)."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body, self.head, self.make = nn.Linear(6, 6), nn.Linear(6, 5), make

    def forward(self, given: Tensor) -> Any:
        return self.make(self.head(torch.relu(self.body(given))))


@pytest.mark.parametrize("samples", [1, 2, 7])
@pytest.mark.parametrize(
    ("make", "forms"),
    [
        (lambda x: x, {"": (7, 5)}),
        (lambda x: (x, x.mean()), {"[0]": (7, 5), "[1]": None}),
        (lambda x: {"logits": x, "aside": [None, x.sum((1, 2))]}, {"['logits']": (7, 5), "['aside'][1]": ()}),
        (lambda x: Result(x, x.mean()), {".logits": (7, 5), ".loss": None}),
        (lambda x: x.mean().reshape(1), {"": None}),
        (lambda x: x.transpose(0, 1), {"": None}),
        (lambda x: x.flatten(0, 1), {"": (5,)}),
    ],
)
def test_the_form_of_each_output(samples: int, make: Callable[[Tensor], Any], forms: dict[str, Any]) -> None:
    """Dimension 0 holds the samples where it changes with their number, also at one sample."""
    chain = build_chain(Returns(make), torch.randn(samples, 7, 6))
    assert {own.name: own.shape if own.has_samples else None for own in chain.outputs} == forms
    assert {own.dtype for own in chain.outputs} == {"float32"}


def test_a_profile_has_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "returning.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Both(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 5)\n\n"
        "    def forward(self, x):\n        y = self.b(self.a(x))\n        return y, y.square().mean()\n\n\n"
        "def make():\n    return Both(), torch.randn(1, 6)\n"
    )
    monkeypatch.syspath_prepend(str(here))
    profile = pplan.profile("returning:make", device="meta", micro_batch_sizes=[1])
    monkeypatch.delitem(sys.modules, "returning")
    assert profile.outputs == [LOGITS, LOSS]


@pytest.fixture
def returning(profile: Profile) -> Profile:
    """The profile of a model that returns logits and a loss."""
    return profile.model_copy(update={"outputs": [LOGITS, LOSS]})


@pytest.mark.parametrize("runtime", JOINING)
def test_no_plan_is_made_for_them(returning: Profile, runtime: str) -> None:
    with pytest.raises(pplan.UsageError, match=WORDS.format(runtime=runtime)) as caught:
        pplan.solve(returning, gpus=2, mini_batch=16, runtime=runtime)
    assert "compute a loss outside the model" in caught.value.hint
    divided = returning.model_copy(update={"outputs": [LOGITS]})
    assert pplan.solve(divided, gpus=2, mini_batch=16, runtime=runtime).runtime == runtime


def test_no_plan_is_exported_to_them(returning: Profile, profile: Profile) -> None:
    plan = pplan.solve(returning, gpus=2, mini_batch=16)
    known = {name for own in plan.alternatives for name in own.runtimes}
    assert "torch" in known
    assert known.isdisjoint(JOINING)
    others = pplan.solve(profile, gpus=2, mini_batch=16)
    assert known.union(JOINING) == {name for own in others.alternatives for name in own.runtimes}
    gpipe = pplan.solve(returning, gpus=2, mini_batch=16, schedule="gpipe", micro_batches=4)
    for runtime in JOINING:
        with pytest.raises(pplan.ExportError, match=WORDS.format(runtime=runtime)):
            pplan.export(runtime, gpipe)
    for runtime in ("torch", "deepspeed"):
        assert pplan.export(runtime, plan).mini_batch == 16


def test_the_command_line_refuses_them(run: Run, returning: Profile) -> None:
    returning.save("toy.profile.json", force=False)
    solve = ("solve", "toy.profile.json", "--gpus", "2", "--mini-batch", "16")
    ran = run(*solve, "--runtime", "torchgpipe")
    assert ran.status == 2
    assert ran.lines[0].startswith("pplan: --runtime torchgpipe: the model returns output[1], a scalar: ")
    assert "--runtime torch," in ran.lines[1]
    assert run(*solve, "-o", "toy.plan.json").status == 0
    kept = json.loads(Path("toy.plan.json").read_text())["profile"]["undivided_outputs"]
    assert kept == ["output[1], a scalar"]
    ran = run("export", "torchgpipe", "toy.plan.json")
    assert (ran.status, ran.out) == (2, "")
    assert ran.lines[0].startswith("pplan: the model returns output[1], a scalar: torchgpipe joins ")
    assert not Path("toy.torchgpipe.json").exists()
