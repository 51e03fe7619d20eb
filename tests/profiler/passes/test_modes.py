"""What a training script would switch on: set, seen by the layers, and put back."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pplan.cost_models.errors import MachineError, UsageError
from pplan.profiler.layers import build_chain
from pplan.profiler.measure import profile_model
from pplan.profiler.modes import Modes, compiler_failure
from pplan.profiler.passes import CompositeWatcher, OutputGradients, run_layers
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.user_model import ModelInput

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_tf32_is_cudas() -> None:
    Modes(tf32=True).check(CUDA)
    with pytest.raises(UsageError, match="`tf32` on cpu"):
        Modes(tf32=True).check(CPU)
    Modes(compile=True, channels_last=True, amp="fp16").check(CPU)
    with pytest.raises(UsageError, match="amp 'fp8'"):
        Modes(amp="fp8").check(CPU)  # type: ignore[arg-type]


def test_cudnn_looks_for_kernels_while_it_is_measured() -> None:
    Modes(cudnn_benchmark=True).check(CUDA)
    with pytest.raises(UsageError, match="`cudnn_benchmark` on cpu"):
        Modes(cudnn_benchmark=True).check(CPU)
    before = torch.backends.cudnn.benchmark
    with Modes(cudnn_benchmark=True).process():
        assert torch.backends.cudnn.benchmark
    with Modes().process():
        assert torch.backends.cudnn.benchmark == before
    assert torch.backends.cudnn.benchmark == before


_FLAGS = """
import os, sys, torch
from pplan.profiler.modes import Modes
matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn

def old(one):
    try:
        return one.allow_tf32
    except RuntimeError:
        return "mixed"

def flags():
    new = [one.fp32_precision for one in (torch.backends, matmul, cudnn, cudnn.conv, cudnn.rnn)]
    return new, old(matmul), old(cudnn)

def check():
    before = flags()
    with Modes(tf32=True).process():
        inside = [matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision]
        assert inside == ["tf32"] * 3, inside
        assert old(matmul) == (True if before[1] != "mixed" else "mixed"), old(matmul)
    assert flags() == before, (before, flags())
    with Modes().process():
        assert flags() == before

for setting in sys.argv[1:]:
    if os.fork() == 0:
        print(setting, flush=True)
        exec(setting)
        check()
        os._exit(0)  # without the end of an interpreter that holds torch
    _, status = os.wait()
    assert status == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="asks for processes that are copies of each other")
def test_the_process_flags_are_put_back_exactly() -> None:
    # In processes of their own: torch cannot go back to how it was before one of these was set.
    settings = [
        "pass",
        "matmul.allow_tf32 = True",
        "matmul.allow_tf32 = False; cudnn.allow_tf32 = False",
        "matmul.fp32_precision = 'tf32'",
        "matmul.fp32_precision = 'ieee'; cudnn.conv.fp32_precision = 'ieee'",
        "torch.set_float32_matmul_precision('high')",
    ]
    done = subprocess.run(
        [sys.executable, "-c", _FLAGS, *settings], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == settings


def test_channels_last() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2))
    assert Modes().converted(model) is model
    assert Modes().memory_format is torch.preserve_format
    weight = Modes(channels_last=True).converted(model)[0].weight  # type: ignore[index]
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert Modes(channels_last=True).memory_format is torch.channels_last


@pytest.mark.parametrize(("amp", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_autocast(amp: Any, dtype: torch.dtype) -> None:
    for _ in range(2):
        with Modes(amp=amp).forward_context(CPU):
            assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == dtype
    with Modes().forward_context(CPU):
        assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype == torch.float32


def test_what_is_not_compiled_is_run_as_it_is() -> None:
    layers = build_chain(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)).layers
    assert Modes().layers(layers) == layers
    assert Modes().whole(layers[0].module) is layers[0].module


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch.compile traces but leaves the code to Python; returns what was compiled, by operations."""
    compiled: list[int] = []
    plain = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:  # noqa: ARG001
        compiled.append(sum(node.op not in ("placeholder", "output") for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda code, **options: plain(code, backend=backend, **options))
    return compiled


@pytest.mark.slow
def test_layers_are_compiled_each_by_itself_and_once(eager: list[int]) -> None:
    modes, given = Modes(compile=True), torch.randn(2, 4)
    # More layers of one class than torch keeps compiled forms of one function.
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)), nn.Sequential(nn.ReLU(), nn.Tanh()))
    layers = build_chain(model, given).layers
    with modes.process():
        as_run = modes.layers(layers)
        assert [layer.name for layer in as_run] == [layer.name for layer in layers]
        for _ in range(2):
            run_layers(as_run, given.clone(), OutputGradients(0), CompositeWatcher())
        assert len(eager) == len(layers)
        ours = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        whole = modes.whole(model)
        assert torch.equal(whole(given), model(given))
        assert eager[len(layers) :] == [12 + 2]
    for _ in range(2):
        run_layers(layers, given.clone(), OutputGradients(0), CompositeWatcher())
    for one, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


def test_another_size_is_compiled_anew_after_the_first_is_forgotten(eager: list[int]) -> None:
    modes, layer = Modes(compile=True), nn.Linear(4, 4)
    with modes.process():
        for size in (1, 2, 3):
            modes.forget_compiled()
            whole = modes.whole(layer)
            for _ in range(2):
                whole(torch.randn(size, 4))
    assert len(eager) == 3


def test_a_missing_compiler_is_the_machines_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = pytest.importorskip("torch._inductor.exc")
    plain = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:  # noqa: ARG001
        raise inductor.InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", lambda code, **options: plain(code, backend=backend, **options))
    modes = Modes(compile=True)
    layers = modes.layers(build_chain(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4)).layers)
    with modes.process(), pytest.raises(MachineError, match=r"finds no C\+\+ compiler") as caught:
        run_layers(layers, torch.ones(1, 4), OutputGradients(0), CompositeWatcher())
    assert "`compile`" in caught.value.hint


def test_what_the_compiler_cannot_do_is_told_from_the_models_own_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:  # noqa: ARG001
        raise ValueError("no such kernel")

    monkeypatch.setattr(torch, "compile", lambda code, **options: plain(code, backend=backend, **options))
    modes = Modes(compile=True)
    with modes.process(), pytest.raises(MachineError, match=r"torch\.compile failed: ValueError: no such"):
        modes.whole(nn.Linear(4, 4))(torch.ones(1, 4))
    assert compiler_failure(ValueError("mine")) is None


def test_the_models_own_error_stays_its_own(eager: list[int]) -> None:
    class Breaks(nn.Module):
        def forward(self, given: Tensor) -> Tensor:
            if given.shape[0] == 1:
                raise ValueError("one sample is too few")
            return given

    with Modes(compile=True).process(), pytest.raises(ValueError, match="too few"):
        Modes(compile=True).whole(Breaks())(torch.ones(1, 4))
    assert eager == []


def test_channels_last_leaves_what_it_has_no_layout_for() -> None:
    """torch's own model.to(memory_format=...) fails on weights of five dimensions."""
    model = nn.Sequential(
        nn.Conv3d(3, 4, 3, bias=False), nn.Conv2d(3, 4, 3, bias=False), nn.Linear(4, 4, bias=False)
    )
    modes = Modes(channels_last=True)
    clip, image, vector = modes.converted(model).parameters()
    assert clip.is_contiguous(memory_format=torch.channels_last_3d)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert vector.is_contiguous()
    given = ModelInput.of((torch.ones(2, 3, 4, 4, 4), torch.ones(2, 3, 4, 4), torch.ones(2, 3)))
    moved = given.to(memory_format=modes.memory_format).tensors
    assert moved[0].is_contiguous(memory_format=torch.channels_last_3d)
    assert moved[1].is_contiguous(memory_format=torch.channels_last)
    assert modes.notes([vector, image]) == modes.notes([clip]) == Modes().notes([vector]) == ()
    (note,) = modes.notes([vector])
    assert "changed nothing" in note


def test_a_clip_is_profiled_in_channels_last() -> None:
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU())
    asked = ProfileOptions(device="cpu", micro_batch_sizes=[2], channels_last=True)
    assert profile_model((model, torch.ones(2, 3, 4, 8, 8)), asked, rounds=1).channels_last
    vectors = profile_model((nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)), asked, rounds=1)
    assert any("channels_last changed nothing" in note for note in vectors.notes)
