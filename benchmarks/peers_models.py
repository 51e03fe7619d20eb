"""Models of `peers.py`, estimated for an A100 from their FLOPs and bytes.

Most come by name; the U-Net and EAST are here. Profiles are kept in a folder, as an estimate takes seconds.
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


class East(nn.Module):
    """Zhou et al., "EAST: An Efficient and Accurate Scene Text Detector", CVPR 2017, on VGG-16: the features
    of four depths merged upwards; of the last the score, four distances and an angle, in one tensor."""

    DEPTHS = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))
    """Convolutions and channels before each halving of the image."""

    def __init__(self) -> None:
        super().__init__()
        before, depths = 3, list[nn.Module]()
        for count, width in self.DEPTHS:
            layers = list[nn.Module]()
            for _ in range(count):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                before = width
            depths.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.depths = nn.ModuleList(depths)
        self.merge = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, after, 1),
                nn.BatchNorm2d(after),
                nn.ReLU(),
                nn.Conv2d(after, after, 3, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            )
            for before, after in ((512 + 512, 128), (128 + 256, 64), (64 + 128, 32))
        )
        self.last = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.head = nn.Conv2d(32, 6, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """A map of six channels, a quarter of the image."""
        x, features = image, []
        for depth in self.depths:
            x = depth(x)
            features.append(x)
        for own, feature in zip(self.merge, (features[3], features[2], features[1]), strict=True):
            larger = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = own(torch.cat([larger, feature], dim=1))
        found: torch.Tensor = self.head(self.last(x)).sigmoid()
        return found


def _named(name: str, **settings: object) -> Callable[[], Profile]:
    return lambda: pplan.profile(name, device=DEVICE, micro_batch_sizes=SIZES, settings=settings or None)


def _of_class(made: type[nn.Module], width: int) -> Callable[[], Profile]:
    """Of a model of this file, for square images of so many pixels a side."""

    def make() -> Profile:
        with torch.device("meta"):
            model, image = made(), torch.zeros(1, 3, width, width)
        return pplan.profile(
            model, image, device=DEVICE, micro_batch_sizes=SIZES, granularity="fine", loss="none"
        )

    return make


_BERT_LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "intermediate_size": 4096}
_GPT2_MEDIUM = {"layers": 24, "hidden": 1024, "heads": 16}
_LLAMA_3 = {
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
_T5_LARGE = {"num_layers": 24, "num_decoder_layers": 24, "d_model": 1024, "num_heads": 16, "d_ff": 4096}
_EXPERTS = {"layers": 16, "hidden": 2048, "heads": 16, "intermediate_size": 5632}
"""With Mixtral's eight experts a block, of which each token takes two."""

MODELS: dict[str, Callable[[], Profile]] = {
    "vgg19": _named("vgg19"),
    "resnet50": _named("resnet50"),
    "resnet152": _named("resnet152"),
    "densenet121": _named("densenet121"),
    "inception_v3": _named("inception_v3"),
    "unet": _of_class(UNet, 256),
    "vit_b_16": _named("vit_b_16"),
    "convnext_base": _named("convnext_base"),
    "bert-large": _named("hf:bert", **_BERT_LARGE, sequence=512, tie_word_embeddings=False),
    "mixtral": _named("hf:mixtral", **_EXPERTS, sequence=1024),
    "resnet101": _named("resnet101"),
    "east": _of_class(East, 512),
    "vit_l_16": _named("vit_l_16"),
    "gpt2-medium": _named("hf:gpt2", **_GPT2_MEDIUM, sequence=1024, tie_word_embeddings=False),
    "llama-3-8b": _named("hf:llama", **_LLAMA_3, sequence=2048),
    "t5-large": _named("hf:t5", **_T5_LARGE, sequence=512, tie_word_embeddings=False),
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
