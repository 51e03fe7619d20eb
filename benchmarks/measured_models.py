"""The models of the benchmarks: torchvision's, and a transformer of twelve blocks."""

from __future__ import annotations

import torch
from torch import nn

from pplan.profiler.models import load_model
from pplan.profiler.user_model import LoadedModel, ModelInput

MODELS = ("vgg19", "resnet50", "vit_b_16", "densenet121", "transformer")


class Transformer(nn.Sequential):
    """Twelve pre-norm blocks, 512 wide, between an embedding of 8,192 words and its head; texts of 256."""

    def __init__(self) -> None:
        blocks = (
            nn.TransformerEncoderLayer(512, 8, 2048, activation="gelu", batch_first=True, norm_first=True)
            for _ in range(12)
        )
        super().__init__(nn.Embedding(8192, 512), *blocks, nn.LayerNorm(512), nn.Linear(512, 8192))


def built(name: str) -> LoadedModel:
    """One of MODELS, or of what `pplan profile` takes."""
    if name != "transformer":
        return load_model(name)
    texts = torch.randint(8192, (2, 256), device="cpu")
    return LoadedModel(Transformer(), name, ModelInput.of(texts), loss="cross-entropy")
