"""What the two parts of a backward hold: python benchmarks/split_backward_memory.py

Stages of four kinds on the processor: bytes of live tensors that a forward leaves, and by how much the
gradient of the inputs (B, without that of the stage's own input) and that of the weights (W) change them, as
PyTorch's pipelining runs the two (`stage_backward_input`, `stage_backward_weight`), by the allocations that
torch.profiler sees.
"""

from __future__ import annotations

import argparse

import torch
import torchvision
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.profiler import ProfilerActivity, profile, record_function

PASSES = ("pass F", "pass B", "pass W")


def stages() -> dict[str, tuple[nn.Module, Tensor]]:
    """Modules by name, each with an input; nothing overwrites its input."""
    encoder = [nn.TransformerEncoderLayer(256, 8, 1024, 0.0, batch_first=True) for _ in range(3)]
    vgg, resnet = torchvision.models.vgg19(), torchvision.models.resnet18()
    for module in (*vgg.modules(), *resnet.modules()):
        if isinstance(module, nn.ReLU):
            module.inplace = False
    linear = [layer for _ in range(4) for layer in (nn.Linear(1024, 1024), nn.GELU())]
    return {
        "three transformer blocks": (nn.Sequential(*encoder), torch.randn(4, 128, 256)),
        "VGG-19, features 5 to 18": (vgg.features[5:19], torch.randn(4, 64, 112, 112)),
        "ResNet-18, layer2": (resnet.layer2, torch.randn(4, 64, 56, 56)),
        "four linear layers, GELU": (nn.Sequential(*linear), torch.randn(512, 1024)),
    }


def measure(stage: nn.Module, example: Tensor) -> list[float]:
    """Bytes that F, B and W each leave more, or, where negative, less."""
    inputs = example.requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with record_function(PASSES[0]):
            output = stage(inputs)
        gradient = torch.ones_like(output)
        with record_function(PASSES[1]):
            _, groups = stage_backward_input([output], [gradient], [inputs], iter(stage.parameters()))
        with record_function(PASSES[2]):
            stage_backward_weight(iter(stage.parameters()), groups)
    events = recorded.profiler.kineto_results.events()
    spans = {own.name(): (own.start_ns(), own.start_ns() + own.duration_ns()) for own in events}
    changes = [(own.start_ns(), own.nbytes()) for own in events if own.name() == "[memory]"]
    return [
        float(sum(size for moment, size in changes if spans[name][0] <= moment <= spans[name][1]))
        for name in PASSES
    ]


def main() -> None:
    """Prints a table."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{'stage':<28}{'F keeps':>12}{'B adds':>12}{'share':>8}{'W changes':>12}{'weights':>12}")
    for name, (stage, example) in stages().items():
        forward, backward, weights = measure(stage, example)
        own = sum(one.numel() * one.element_size() for one in stage.parameters())
        added = backward - example.nbytes  # the gradient of the input is sent on
        kept, more, *rest = (f"{size / 2**20:>8.1f} MiB" for size in (forward, added, weights, own))
        print(f"{name:<28}{kept}{more}{added / forward:>8.0%}{''.join(rest)}")


if __name__ == "__main__":
    main()
