"""Twelve models for the planner's benchmarks, estimated for an A100 from their FLOPs and bytes.

Ten come by name; the U-Net is here. Profiles are kept in a folder, since an estimate takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

import pplan
from pplan import Profile

DEVICE = "analytic:a100-80gb"
SIZES = (2, 4, 8, 16)


class Double(nn.Sequential):
    """Two convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        )


class UNet(nn.Module):
    """Ronneberger et al., "U-Net", MICCAI 2015, with padding, so that every skip crosses as it is."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.first = Double(3, width)
        self.down = nn.ModuleList(Double(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * own, own, 2, stride=2) for own in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(Double(2 * own, own) for own in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """A map of two classes."""
        x, skips = self.first(image), []
        for own in self.down:
            skips.append(x)
            x = own(nn.functional.max_pool2d(x, 2))
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], dim=1))
        scores: torch.Tensor = self.head(x)
        return scores


def _named(name: str, **settings: object) -> Callable[[], Profile]:
    return lambda: pplan.profile(name, device=DEVICE, micro_batch_sizes=SIZES, settings=settings or None)


def _unet() -> Profile:
    with torch.device("meta"):
        model, image = UNet(), torch.zeros(1, 3, 256, 256)
    return pplan.profile(
        model, image, device=DEVICE, micro_batch_sizes=SIZES, granularity="fine", loss="none"
    )


_BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "intermediate_size": 4096}
_LLAMA_7B = {"layers": 32, "hidden": 4096, "heads": 32, "intermediate_size": 11008}
_EXPERTS = {"layers": 16, "hidden": 2048, "heads": 16, "intermediate_size": 5632}
"""With Mixtral's eight experts a block, of which each token takes two."""

MODELS: dict[str, Callable[[], Profile]] = {
    "vgg19": _named("vgg19"),
    "resnet50": _named("resnet50"),
    "resnet152": _named("resnet152"),
    "densenet121": _named("densenet121"),
    "inception_v3": _named("inception_v3"),
    "unet": _unet,
    "vit_b_16": _named("vit_b_16"),
    "convnext_base": _named("convnext_base"),
    "gpt2": _named("hf:gpt2", sequence=1024, tie_word_embeddings=False),
    "bert-large": _named("hf:bert", **_BERT_LARGE, sequence=512, tie_word_embeddings=False),
    "llama-7b": _named("hf:llama", **_LLAMA_7B, sequence=2048),
    "mixtral": _named("hf:mixtral", **_EXPERTS, sequence=1024),
}


def profile_of(name: str, folder: Path) -> Profile:
    """The estimate of a model, from the folder where it is there."""
    path = folder / f"{name}.profile.json"
    if path.exists():
        return Profile.load(path)
    profile = MODELS[name]()
    folder.mkdir(parents=True, exist_ok=True)
    profile.save(path, force=True)
    return profile
