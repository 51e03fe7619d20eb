"""Where the default granularity cuts: python benchmarks/default_cuts.py [NAME ...] [--write FILE]

Takes models apart on the meta device (no weights, no time) and prints a table: the layers, how many of them
are entries of the model's own lists, the most tensors that cross a cut, the largest part of the FLOPs in one
layer, and layers of functions alone. `hf:NAME` are transformers' models, made small; `timm:NAME` are
timm's, the others torchvision's. `--write docs/lab/models.md` writes the table into that page.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from model_coverage import write
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import pplan
from pplan.profiler.layer import LayerChain
from pplan.profiler.layers import build_chain
from pplan.profiler.models import load_model

MARKS = "<!-- made by benchmarks/default_cuts.py -->", "<!-- end of default cuts -->"
SMALL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": 16, "vocabulary": 64}
"""Of transformers' models."""
TORCHVISION = [
    *("vit_b_16", "swin_t", "swin_v2_t", "swin3d_t", "maxvit_t", "mvit_v1_b", "convnext_tiny", "resnet50"),
    *("densenet121", "efficientnet_b0", "mobilenet_v3_large", "regnet_y_400mf", "googlenet", "inception_v3"),
    "lraspp_mobilenet_v3_large",
]
TIMM = [
    *("vit_tiny_patch16_224", "deit3_small_patch16_224", "beit_base_patch16_224", "cait_xxs24_224"),
    *("eva02_tiny_patch14_224", "vit_small_patch16_dinov3", "vit_srelpos_small_patch16_224"),
    *("vit_relpos_small_patch16_224", "tnt_s_legacy_patch16_224", "coat_tiny", "coat_lite_tiny"),
    *(
        "crossvit_9_240",
        "swin_tiny_patch4_window7_224",
        "swinv2_tiny_window8_256",
        "pvt_v2_b0",
        "twins_svt_small",
    ),
    *("levit_128", "mixer_s32_224", "gmlp_s16_224", "poolformer_s12", "xcit_nano_12_p16_224", "nest_tiny"),
    *("convit_tiny", "visformer_tiny", "mobilevit_xs", "efficientformer_l1", "edgenext_xx_small"),
    *("convnextv2_atto", "resnet26", "resmlp_12_224", "volo_d1_224", "davit_tiny", "hiera_tiny_224"),
]
TRANSFORMERS = [
    *(
        "hf:gpt2",
        "hf:llama",
        "hf:mistral",
        "hf:qwen2",
        "hf:gemma2",
        "hf:bert",
        "hf:roberta",
        "hf:t5",
        "hf:bart",
    ),
    *(
        "hf:opt",
        "hf:falcon",
        "hf:gpt_neox",
        "hf:vit",
        "hf:dinov2",
        "hf:cvt",
        "hf:swin",
        "hf:mixtral",
        "hf:jamba",
    ),
]
OF_PICTURES = ("hf:vit", "hf:dinov2", "hf:cvt", "hf:swin")
"""Those of transformers that have no such settings."""


@dataclass(frozen=True)
class Cuts:
    """What became of one model."""

    layers: int
    cuts: int
    blocks: int
    crossing: int
    largest: float
    """Part of the FLOPs."""
    heaviest: str
    functions: tuple[str, ...]
    """Layers that are no modules of the model."""

    @property
    def is_good(self) -> bool:
        """Whether no layer has more than half of the work, and cuts are allowed."""
        return self.largest <= 0.5 and self.cuts > 1

    def cells(self) -> str:
        """Of the table."""
        share = f"{self.largest:.0%} {self.heaviest}"
        more = f" and {len(self.functions) - 2} more" if len(self.functions) > 2 else ""
        functions = ", ".join(self.functions[:2]) + more
        return f"{self.layers} | {self.cuts} | {self.blocks} | {self.crossing} | {share} | {functions}"


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    names = options.names or [*TORCHVISION, *(f"timm:{name}" for name in TIMM), *TRANSFORMERS]
    lines = [
        "| model | layers | cuts | blocks | tensors over a cut | largest share of the FLOPs | functions |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
    ]
    print("\n".join(lines))
    good = 0
    for name in names:
        try:
            found = cuts_of(*chain_of(name))
            cells, is_good = found.cells(), found.is_good
        except pplan.PplanError as error:
            cells, is_good = f"{error.what} | | | | | ", False
        good += is_good
        lines.append(f"| {name} | {cells} |")
        print(lines[-1], flush=True)
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    lines += ["", f"{good} of {len(names)} with no layer over half of the FLOPs; {versions}."]
    print(lines[-1])
    if options.write:
        write(options.write, lines, MARKS)


def chain_of(name: str) -> tuple[nn.Module, LayerChain, Any]:
    """The model on the meta device, its layers, and an input for them."""
    if name.startswith("timm:"):
        import timm

        with torch.device("meta"):
            model: Any = timm.create_model(name.removeprefix("timm:"))
        given = torch.empty(2, *model.default_cfg["input_size"], device="meta")
        model.to("meta")
        return model, build_chain(model, given, name=name), given
    settings = SMALL if name.startswith("hf:") and name not in OF_PICTURES else None
    loaded = load_model(name, settings=settings, on_meta=True)
    example = loaded.example_input_for(2).to("meta")
    chain = build_chain(loaded.module.to("meta"), example, name=name, granularity=loaded.granularity)
    return loaded.module, chain, example.layer_input


def cuts_of(model: nn.Module, chain: LayerChain, given: Any) -> Cuts:
    """Counts them."""
    modules = dict(model.named_modules())
    flops = []
    with torch.device("meta"):
        for layer in chain.layers:
            with FlopCounterMode(display=False) as counter:
                given = layer.module(given)
            flops.append(counter.get_total_flops())
    heaviest = max(range(len(flops)), key=flops.__getitem__)
    names = [layer.name for layer in chain.layers]
    # A module that is called again has a number behind its name.
    own = [name if name in modules else re.sub(r"_\d+$", "", name) for name in names]
    return Cuts(
        len(names),
        sum(layer.cut_reason is None for layer in chain.layers[:-1]),
        sum(_is_block(name, modules) for name in names),
        max((layer.crossing for layer in chain.layers), default=0),
        flops[heaviest] / max(1, sum(flops)),
        names[heaviest],
        tuple(name for name, path in zip(names, own, strict=True) if path not in modules),
    )


def _is_block(name: str, modules: dict[str, nn.Module]) -> bool:
    parent = modules.get(name.rpartition(".")[0])
    return name in modules and isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)


if __name__ == "__main__":
    main()
