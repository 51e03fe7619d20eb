"""Which models become layers: python benchmarks/coverage.py [NAME[@SHAPE] ...] [--values] [--write FILE]

Takes models apart on the meta device (no weights, no time), at granularity block and fine, and prints a
table of the layers, the allowed cuts and the most tensors that cross one, or the sentence that says why not.
Without names: all of torchvision's. `hf:NAME` are transformers' models, made small. `--write docs/models.md`
writes the table into that page.

`--values` trains model and layers side by side instead, as `pplan profile` does before it measures, and
prints what came of it: equal bit for bit, within rounding, or not compared. It takes seconds a model; a shape
keeps pictures small: resnet18@3x64x64. Without names: one of each of torchvision's families, some of
transformers'.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torchvision

import pplan
from pplan.profiler.chain.layers import build_chain
from pplan.profiler.comparison import model_check
from pplan.profiler.comparison.model_check import Comparison
from pplan.profiler.models import load_model

MARKS = "<!-- made by benchmarks/coverage.py -->", "<!-- end -->"
VALUE_MARKS = "<!-- made by benchmarks/coverage.py --values -->", "<!-- end of values -->"
GRANULARITIES = ("block", "fine")
SMALL = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 8, "vocabulary": 64}
"""Of transformers' models."""
FAMILIES = [
    "alexnet@3x96x96",
    "convnext_tiny@3x64x64",
    "deeplabv3_mobilenet_v3_large@3x64x64",
    "densenet121@3x64x64",
    "efficientnet_b0@3x64x64",
    "efficientnet_v2_s@3x64x64",
    "fcn_resnet50@3x64x64",
    "googlenet@3x96x96",
    "inception_v3",
    "lraspp_mobilenet_v3_large@3x64x64",
    "maxvit_t",
    "mc3_18@3x4x64x64",
    "mnasnet0_5@3x64x64",
    "mobilenet_v2@3x64x64",
    "mobilenet_v3_small@3x64x64",
    "mvit_v1_b",
    "quantized_resnet18@3x64x64",
    "quantized_mobilenet_v3_large@3x64x64",
    "r2plus1d_18@3x4x64x64",
    "raft_small",
    "regnet_x_400mf@3x64x64",
    "regnet_y_400mf@3x64x64",
    "resnet18@3x64x64",
    "resnext50_32x4d@3x64x64",
    "s3d",
    "shufflenet_v2_x0_5@3x64x64",
    "squeezenet1_0@3x96x96",
    "swin_t@3x64x64",
    "swin_v2_t@3x64x64",
    "swin3d_t",
    "vgg11_bn@3x64x64",
    "vit_b_32",
    "wide_resnet50_2@3x64x64",
    "hf:gpt2",
    "hf:bert",
    "hf:t5",
    "hf:llama",
    "hf:mistral",
    "hf:qwen2",
    "hf:gemma",
    "hf:gemma2",
    "hf:phi",
    "hf:opt",
    "hf:falcon",
    "hf:roberta",
    "hf:electra",
    "hf:bart",
    "hf:gpt_neox",
    "hf:distilbert",
    "hf:albert",
    "hf:deberta",
    "hf:mpt",
    "hf:xlnet",
    "hf:mixtral",
    "hf:qwen3_moe",
    "hf:olmoe",
    "hf:gpt_oss",
    "hf:jamba",
    "hf:bloom",
]


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--values", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.values:
        model_check.SECONDS = model_check.LONGEST_SECONDS = float("inf")
    names = options.names or (FAMILIES if options.values else torchvision.models.list_models())
    lines = head(values=options.values)
    print("\n".join(lines))
    able = 0
    for name in names:
        line, works = compared_row(name) if options.values else row(name)
        able += works
        lines.append(line)
        print(line, flush=True)
    lines += ["", told(able, len(names))]
    print(lines[-1])
    if options.write:
        write(options.write, lines, VALUE_MARKS if options.values else MARKS)


def head(*, values: bool) -> list[str]:
    """Of the table."""
    if values:
        return [
            "| model | layers | traced by | batches | layers and model |",
            "| --- | ---: | --- | --- | --- |",
        ]
    return [
        "| model | layers, block | cuts | layers, fine | cuts | tensors over a cut, at most |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]


def row(name: str) -> tuple[str, bool]:
    """The line of one model, and whether it can be taken apart."""
    model, shape = shape_of(name)
    settings = SMALL if model.startswith("hf:") else None
    try:
        profiles = [
            pplan.profile(
                model,
                device="meta",
                micro_batch_sizes=[2],
                granularity=granularity,
                input_shape=shape,
                settings=settings,
            )
            for granularity in GRANULARITIES
        ]
    except pplan.PplanError as error:
        return f"| {model} | {error.what} | | | | |", False
    cells = []
    for profile in profiles:
        cells += [str(len(profile.layers)), str(sum(layer.cut_after for layer in profile.layers[:-1]))]
    widest = max((layer.crossing or 0 for layer in profiles[-1].layers[:-1]), default=0)
    return f"| {model} | {' | '.join(cells)} | {widest} |", True


def compared_row(name: str) -> tuple[str, bool]:
    """The line of one model, and whether its layers were seen to be the model."""
    model, shape = shape_of(name)
    try:
        loaded = load_model(
            model, input_shape=shape, settings=SMALL if model.startswith("hf:") else None, seed=0
        )
        chain = build_chain(
            loaded.module,
            loaded.example_input_for(2),
            name=loaded.name,
            granularity=loaded.granularity,
            verify=True,
        )
    except pplan.PplanError as error:
        return f"| {model} | | | | {error.what} |", False
    comparison = chain.comparison or Comparison()
    batches = ", ".join(map(str, comparison.batches))
    found = "; ".join(comparison.notes) or ("equal, bit for bit" if batches else "equal by construction")
    return f"| {model} | {len(chain)} | {chain.tool} | {batches} | {found} |", not comparison.why_not


def shape_of(name: str) -> tuple[str, tuple[int, ...] | None]:
    """`resnet18@3x64x64`: the model, and the shape of a sample; None: its own."""
    model, _, shape = name.partition("@")
    return model, tuple(map(int, shape.split("x"))) if shape else None


def told(able: int, count: int) -> str:
    """The sum of it."""
    return f"{able} of {count} models; torch {torch.__version__}, torchvision {torchvision.__version__}."


def write(file: Path, lines: list[str], marks: tuple[str, str]) -> None:
    """Puts the lines between the marks of the page."""
    before, _, rest = file.read_text(encoding="utf-8").partition(marks[0])
    after = rest.partition(marks[1])[2]
    made = "\n".join([before + marks[0], "", *lines, "", marks[1]]) + after
    file.write_text(made, encoding="utf-8")
    print(f"Wrote {file}")


if __name__ == "__main__":
    main()
