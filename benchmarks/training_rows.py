"""The ledger's rows of models in training, against what `counted_training` counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from counted_training import Setup, held_bytes
from measured_models import built
from torch import nn

from pplan.cost_models.memory import ledger
from pplan.cost_models.precision import training_precision
from pplan.planner.stage_table import StageTable
from pplan.profiler.estimate import as_on_a_gpu, parse_analytic_device
from pplan.profiler.measure import profile_model
from pplan.profiler.modes import AutocastOnMeta
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.user_model import LoadedModel, ModelInput

TRAINED = ("vgg19", "resnet50", "densenet121", "vit_b_16", "transformer", "tied", "mlp")
Choice = tuple[str, str, bool, torch.dtype]
SETUPS: tuple[Choice, ...] = tuple(
    product(("fp32", "mixed", "autocast"), ("sgd", "adamw"), (False, True), (torch.float32, torch.bfloat16))
)
TERMS = ("weights", "gradients", "master_weights", "optimizer", "activations", "stage_inputs")


class Mlp(nn.Sequential):
    """Six layers, 1,024 wide."""

    def __init__(self) -> None:
        hidden = [layer for _ in range(5) for layer in (nn.Linear(1024, 1024), nn.GELU())]
        super().__init__(nn.Linear(256, 1024), nn.GELU(), *hidden, nn.Linear(1024, 64))


class Tied(nn.Module):
    """A GPT of four blocks, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        block = partial(nn.TransformerEncoderLayer, 256, 4, 1024, activation="gelu", batch_first=True)
        self.embedding = nn.Embedding(4096, 256)
        self.blocks = nn.ModuleList(block(norm_first=True) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def model_of(name: str) -> LoadedModel:
    """One of TRAINED, or of what `pplan profile` takes."""
    if name == "mlp":
        return LoadedModel(Mlp(), name, ModelInput.of(torch.zeros(2, 256, device="cpu")), loss="mse")
    if name == "tied":
        texts = torch.zeros(2, 64, dtype=torch.long, device="cpu")
        return LoadedModel(Tied(), name, ModelInput.of(texts), loss="cross-entropy")
    return built(name)


@dataclass(frozen=True)
class Row:
    """Bytes of a model in training: of the ledger, and counted."""

    name: str
    setup: Setup
    predicted: float
    counted: int

    @property
    def error(self) -> float:
        """Of the ledger, relative to what was counted."""
        return self.predicted / self.counted - 1


def rows_of(name: str, size: int, device: torch.device, setups: Sequence[Choice] = SETUPS) -> Iterator[Row]:
    """The model's rows: of precisions, optimizers, whether to recompute, and dtypes of gradients."""
    profiles: dict[str, Profile] = {}
    for precision, optimizer, recompute, gradient_dtype in setups:
        if precision != "mixed" and gradient_dtype is torch.bfloat16:
            continue  # gradients of float32 weights are float32
        setup = Setup(precision, optimizer, recompute, gradient_dtype)
        if precision not in profiles:
            profiles[precision] = _profile(name, size, precision)
        predicted = _predicted(profiles[precision], size, setup)
        yield Row(name, setup, predicted, _counted(name, size, device, setup))


def _profile(name: str, size: int, precision: str) -> Profile:
    amp: Literal["bf16"] | None = "bf16" if precision == "autocast" else None
    dtype = "bfloat16" if precision == "mixed" else None
    with torch.device("meta"):
        loaded = model_of(name)
    return profile_model(
        loaded,
        ProfileOptions(device="meta", dtype=dtype, amp=amp, micro_batch_sizes=[size], loss="none"),
        estimate_for=parse_analytic_device("analytic:h100"),
    )


def _predicted(profile: Profile, size: int, setup: Setup) -> float:
    """The ledger of one stage of all layers, with a micro-batch in flight, without workspace."""
    gradients = {torch.float32: "fp32", torch.bfloat16: "bf16"}[setup.gradient_dtype]
    trained = training_precision(profile.dtype, profile.amp, gradient_dtype=gradients)
    table = StageTable.of(profile.chain(), size)
    terms = ledger(
        table.bytes_between(0, table.blocks),
        in_flight=1,
        recompute="always" if setup.recompute else "never",
        optimizer=setup.optimizer,
        precision=trained.bytes,
    )
    return sum(float(terms.get(term, 0.0)) for term in TERMS)


def _counted(name: str, size: int, device: torch.device, setup: Setup) -> int:
    with device:
        loaded = model_of(name)
    given = loaded.example_input_for(size).to(device).tensors[0]
    model = loaded.module.train()
    if setup.precision == "mixed":
        model = model.to(torch.bfloat16)
        given = given.to(torch.bfloat16) if given.is_floating_point() else given
    if setup.precision == "autocast":
        setup = replace(setup, autocast=partial(_autocast, device))
    with as_on_a_gpu(flash=True) if device.type == "meta" else nullcontext():
        return held_bytes(model, given, setup)


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "meta":
        return AutocastOnMeta(torch.bfloat16)
    return torch.autocast(device.type, torch.bfloat16)


def print_training(names: Sequence[str], size: int, device: torch.device) -> bool:
    """The table; whether every row is within 1 %."""
    print(f"torch {torch.__version__}, {device}, micro-batch of {size}; MiB of 2^20 bytes\n")
    print(
        f"{'model':<12} {'precision':<9} {'gradients':<9} {'optimizer':<9} {'recompute':<9} "
        f"{'ledger':>8} {'counted':>8} {'error':>7}"
    )
    worst = 0.0
    for name in names:
        for row in rows_of(name, size, device):
            setup, worst = row.setup, max(worst, abs(row.error))
            print(
                f"{row.name:<12} {setup.precision:<9} {str(setup.gradient_dtype)[6:]:<9} "
                f"{setup.optimizer:<9} {'always' if setup.recompute else 'never':<9} "
                f"{row.predicted / 2**20:>8.1f} {row.counted / 2**20:>8.1f} {row.error:>+7.2%}",
                flush=True,
            )
    print(f"\nthe largest error: {worst:.2%}")
    return worst <= 0.01
