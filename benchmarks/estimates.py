"""Estimates for GPUs (`device="analytic:..."`) against published rates of training on one GPU.

    python benchmarks/estimates.py
    python benchmarks/estimates.py --measure     # on the CUDA device here: measured against its own estimate

Published rates are those of whole steps, with the optimizer and the reading of the data, of the software of
their year; an estimate is forward and backward alone. Exit status 1 where one is off by more than 30 %,
those aside whose note says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import Bottleneck, ResNet

import pplan
from pplan.cost_models.machines import match_device
from pplan.profiler.profile_file import Profile

RESNET = "NVIDIA DeepLearningExamples, PyTorch ResNet50 v1.5"
RESNEXT = "NVIDIA DeepLearningExamples, PyTorch ResNeXt101-32x4d"
BERT = "NVIDIA DeepLearningExamples, PyTorch BERT, pre-training, 2019"
TORCHVISION = "github.com/sandeepkumar-skb/pytorch_experiments, torchvision_exp"


@dataclass(frozen=True)
class Published:
    """Samples a second of one GPU. `note`: why a greater error is no surprise."""

    model: Callable[..., Profile]
    name: str
    gpu: str
    size: int
    rate: float
    source: str
    amp: bool = False
    channels_last: bool = False
    note: str = ""

    def estimate(self) -> float:
        profile = self.model(
            device=f"analytic:{self.gpu}",
            micro_batch_sizes=[self.size],
            amp="fp16" if self.amp else None,
            channels_last=self.channels_last,
        )
        costs = [layer.costs[0] for layer in profile.layers]
        return self.size / sum(cost.forward_seconds + cost.backward_seconds for cost in costs)


def resnet50(**options: Any) -> Profile:
    return pplan.profile("resnet50", **options)


def resnext101(**options: Any) -> Profile:
    model: nn.Module = ResNet(Bottleneck, [3, 4, 23, 3], groups=32, width_per_group=4)
    return pplan.profile(model, torch.empty(2, 3, 224, 224), **options)


def bert(sequence: int, attention: str) -> Callable[..., Profile]:
    sizes = {"layers": 24, "hidden": 1024, "heads": 16, "sequence": sequence}

    def make(**options: Any) -> Profile:
        return pplan.profile("hf:bert", settings={**sizes, "attn_implementation": attention}, **options)

    return make


TABLE = (
    Published(resnet50, "resnet50", "v100-16gb", 128, 367.4, RESNET),
    Published(resnet50, "resnet50", "v100-16gb", 128, 128 / 0.34237, TORCHVISION),
    Published(resnet50, "resnet50", "v100-16gb", 128, 128 / 0.41284, TORCHVISION, channels_last=True),
    Published(resnet50, "resnet50", "v100-16gb", 128, 128 / 0.15220, TORCHVISION, amp=True),
    Published(
        resnet50, "resnet50", "v100-16gb", 128, 128 / 0.11093, TORCHVISION, amp=True, channels_last=True
    ),
    Published(resnet50, "resnet50", "v100-16gb", 256, 1200.9, RESNET, amp=True, channels_last=True),
    Published(resnet50, "resnet50", "a100-80gb", 256, 938.4, RESNET),
    Published(resnet50, "resnet50", "a100-80gb", 256, 2470.5, RESNET, amp=True, channels_last=True),
    Published(resnext101, "resnext101_32x4d", "v100-16gb", 64, 150.05, RESNEXT),
    Published(resnext101, "resnext101_32x4d", "v100-16gb", 128, 534.9, RESNEXT, amp=True, channels_last=True),
    Published(
        resnext101, "resnext101_32x4d", "a100-40gb", 128, 300.4, RESNEXT, note="grouped convolutions in TF32"
    ),
    Published(resnext101, "resnext101_32x4d", "a100-40gb", 128, 908.4, RESNEXT, amp=True, channels_last=True),
    Published(bert(128, "sdpa"), "bert-large, 128 tokens", "v100-32gb", 32, 40.32, BERT),
    Published(bert(512, "sdpa"), "bert-large, 512 tokens", "v100-32gb", 4, 8.36, BERT),
    Published(bert(128, "eager"), "bert-large, 128 tokens", "v100-32gb", 64, 171.52, BERT, amp=True),
    Published(bert(512, "eager"), "bert-large, 512 tokens", "v100-32gb", 8, 30.08, BERT, amp=True),
)


MEASURED: tuple[tuple[str, Callable[..., Profile], list[int], dict[str, Any]], ...] = (
    ("resnet50 tf32", resnet50, [1, 64], {}),
    ("resnet50 fp16", resnet50, [1, 64], {"amp": "fp16"}),
    ("resnet50 fp16 channels-last", resnet50, [1, 64], {"amp": "fp16", "channels_last": True}),
    ("bert-large 128 fp16", bert(128, "sdpa"), [1, 32], {"amp": "fp16"}),
    ("bert-large 512 bf16", bert(512, "sdpa"), [1, 8], {"amp": "bf16"}),
)


def print_measured() -> None:
    """Layers' milliseconds, forward and backward, of the device and of the host, measured and estimated."""
    gpu = match_device(torch.cuda.get_device_name())
    if gpu is None:
        raise SystemExit(f"There are no figures of {torch.cuda.get_device_name()}.")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms, measured / estimated\n")
    print("{:<28} {:>4} {:>17} {:>17} {:>17} {:>17} {:>8}".format(*_HEADS))
    for name, make, sizes, options in MEASURED:
        asked = {"micro_batch_sizes": sizes, **options}
        real = make(device="cuda", budget_seconds=40, **asked)
        estimate = make(device=f"analytic:{gpu.name}", **asked)
        for position, size in enumerate(real.micro_batch_sizes):
            pairs = [
                [
                    1e3 * sum(getattr(layer.costs[position], figure) for layer in one.layers)
                    for one in (real, estimate)
                ]
                for figure in _FIGURES
            ]
            shown = " ".join(f"{measured:>8.2f}/{estimated:>8.2f}" for measured, estimated in pairs)
            closing = real.whole[position].closing_ratio or 0.0
            print(f"{name:<28} {size:>4} {shown} {closing:>8.3f}", flush=True)


def _milliseconds(profile: Profile, position: int, figure: str) -> float:
    return 1e3 * sum(float(getattr(layer.costs[position], figure)) for layer in profile.layers)


_FIGURES = ("forward_seconds", "backward_seconds", "forward_host_seconds", "backward_host_seconds")
_HEADS = ("model", "size", "forward", "backward", "host forward", "host backward", "coverage")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="the CUDA device here, against its estimate")
    if parser.parse_args().measure:
        print_measured()
        return 0
    heads = ("model", "GPU", "precision", "estimated/s", "published/s", "error", "source")
    print("{:<24} {:<10} {:<22} {:>11} {:>11} {:>6}  {}".format(*heads))
    wrong = 0
    for row in TABLE:
        estimated = row.estimate()
        error = estimated / row.rate - 1
        wrong += abs(error) > 0.3 and not row.note
        precision = ("amp fp16" if row.amp else "float32") + (" channels-last" if row.channels_last else "")
        rates = f"{estimated:>11.1f} {row.rate:>11.1f} {error:>+6.0%}"
        source = f"{row.source} ({row.note})" if row.note else row.source
        print(f"{row.name:<24} {row.gpu:<10} {precision:<22} {rates}  {source}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
