"""Which models become layers: python benchmarks/model_coverage.py [NAME[@SHAPE] ...] [--values]

Takes models apart on the meta device (no weights, no time), at granularity fine, and prints a table of the
layers, the allowed cuts and the most tensors that cross one, or the sentence that says why not.
Without names: all of torchvision's. `--write docs/lab/models.md` writes the table into that page.

`--values` builds the models instead, each in a process of its own with a time limit, several side by side
(`--jobs`), and trains model and layers next to each other, as `pplan profile` does before it measures. Then
it does so once more itself: outputs, gradients and buffers of a copy of the model, and of its layers. Names
are torchvision's, `timm:NAME` (timm must be installed) and `hf:NAME`, transformers' models, made small; a
shape keeps pictures small: resnet18@3x64x64. Without names, those of `--library`: torchvision, timm, text,
others. `--results FILE` keeps the rows of earlier runs, and leaves out models that have one.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import multiprocessing
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import coverage_models
import torch
import torchvision
from torch import Tensor, nn

import pplan
from pplan.profiler import comparison
from pplan.profiler.layer import Comparison
from pplan.profiler.layers import as_sequential, build_chain
from pplan.profiler.user_model import flat, repeatable_seeds

MARKS = "<!-- made by benchmarks/model_coverage.py -->", "<!-- end -->"
VALUE_MARKS = "<!-- made by benchmarks/model_coverage.py --values -->", "<!-- end of values -->"
LIBRARIES = {
    "torchvision": "torchvision",
    "timm": "timm, a small model of each family",
    "text": "transformers, text",
    "others": "transformers, pictures, sound, series and several kinds at once",
}
ROUNDING = 1e-3
"""Largest difference, in parts of the largest value of its kind, that is called rounding."""
MOST_TWICE = 60e6
"""Parameters of models that are compared again."""
PRELOADED = [
    "coverage_models",
    "torchvision",
    "torch._dynamo",
    "torch.export._trace",
    "torch._functorch.aot_autograd",
    "torch.fx.experimental.proxy_tensor",
    "transformers.modeling_utils",
    "transformers.models.auto",
]
"""Importing them takes longer than many a model."""
SHOWN = 300
"""Characters of a reason."""
SHOWN_OF_TOOL = 60
Row = dict[str, Any]


def main() -> None:
    """Prints the table, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--values", action="store_true")
    parser.add_argument("--library", action="append", choices=LIBRARIES)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="of a model")
    parser.add_argument("--results", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.values:
        lines = value_tables(options)
    else:
        lines = structure_table(options.names or torchvision.models.list_models())
    if options.write:
        write(options.write, lines, VALUE_MARKS if options.values else MARKS)


def structure_table(names: list[str]) -> list[str]:
    """Printed line by line."""
    lines = [
        "| model | layers, fine | cuts | tensors over a cut, at most |",
        "| --- | ---: | ---: | ---: |",
    ]
    print("\n".join(lines))
    able = 0
    for name in names:
        line, works = row(name)
        able += works
        lines.append(line)
        print(line, flush=True)
    lines += ["", f"{able} of {len(names)} models; {versions('torch', 'torchvision')}."]
    print(lines[-1])
    return lines


def row(name: str) -> tuple[str, bool]:
    """The line of one model, and whether it can be taken apart."""
    model, shape = shape_of(name)
    settings = coverage_models.SMALL if model.startswith("hf:") else None
    try:
        profile = pplan.profile(
            model,
            device="meta",
            micro_batch_sizes=[2],
            granularity="fine",
            input_shape=shape,
            settings=settings,
        )
    except pplan.PplanError as error:
        return f"| {model} | {error.what} | | |", False
    cuts = sum(layer.cut_after for layer in profile.layers[:-1])
    widest = max((layer.crossing or 0 for layer in profile.layers[:-1]), default=0)
    return f"| {model} | {len(profile.layers)} | {cuts} | {widest} |", True


def value_tables(options: argparse.Namespace) -> list[str]:
    """A table for each library, of new and earlier rows."""
    rows = earlier(options.results)
    libraries = options.library or ([] if options.names else list(LIBRARIES))
    names = options.names or [name for library in libraries for name in coverage_models.names(library)]
    missing = [name for name in names if name not in rows]
    with ThreadPoolExecutor(options.jobs) as pool:
        for made in pool.map(partial(tried, limit=options.limit), missing):
            rows[made["name"]] = made
            print(line_of(made), flush=True)
            if options.results:
                with options.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(made) + "\n")
    tables = list(table_of_each(libraries, rows)) if libraries else [told([rows[name] for name in names])]
    print("\n".join(line for line in tables if not line.startswith("|")))
    return tables


def table_of_each(libraries: list[str], rows: dict[str, Row]) -> Iterator[str]:
    """The lines of the page."""
    for library in libraries:
        yield from (f"### {LIBRARIES[library]}", "")
        yield "| model | sample | layers | cuts | traced by | layers and model |"
        yield "| --- | --- | ---: | ---: | --- | --- |"
        found = [rows[name] for name in coverage_models.names(library) if name in rows]
        yield from map(line_of, found)
        yield from ("", told(found), "")


def earlier(file: Path | None) -> dict[str, Row]:
    """The rows of earlier runs, by name."""
    if file is None or not file.exists():
        return {}
    made = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in made}


def tried(name: str, *, limit: float) -> Row:
    """The row of one model, made in a process of its own, that need not import the libraries anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(name, theirs))
    begun = time.perf_counter()
    process.start()
    theirs.close()
    try:
        made: Row = ours.recv() if ours.poll(limit) else {"failed": f"takes more than {limit:.0f} s"}
    except EOFError:
        made = {"failed": "its process died, which the system does where memory runs out"}
    process.kill()
    process.join()
    return {"name": name, **made, "seconds": round(time.perf_counter() - begun, 1)}


def report(name: str, pipe: Any) -> None:
    """In the process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    comparison.SECONDS = comparison.LONGEST_SECONDS = 60
    try:
        made = compared(name)
    except pplan.PplanError as error:
        made = {"refused": error.what}
    except Exception:
        made = {"failed": traceback.format_exc(limit=-1)}
    pipe.send(made)


def compared(name: str) -> Row:
    """A model and its layers, by pplan's own comparison, and by another."""
    loaded = coverage_models.load(*shape_of(name))
    given = loaded.example_input_for(2)
    chain = build_chain(loaded.module, given, name=loaded.name, granularity=loaded.granularity, verify=True)
    comparison = chain.comparison or Comparison()
    found = {
        "sample": ", ".join("x".join(map(str, tensor.shape[1:])) or "1" for tensor in given.tensors[:2]),
        "layers": len(chain),
        "cuts": sum(layer.cut_reason is None for layer in chain.layers[:-1]),
        "tool": chain.tool,
        "batches": comparison.batches,
        "notes": comparison.notes,
        "rounding": comparison.rounding,
    }
    if sum(parameter.numel() for parameter in loaded.module.parameters()) > MOST_TWICE:
        return found
    apart, layers = copy.deepcopy(loaded.module), as_sequential(chain)
    own = trained(apart, lambda: given.clone().call(apart))
    theirs = trained(loaded.module, lambda: layers(given.clone().layer_input))
    return found | {"off": max(difference(*pair) for pair in zip(own, theirs, strict=True))}


def trained(model: nn.Module, run: Callable[[], Any]) -> list[Tensor | None]:
    """Outputs, gradients and buffers after a step, from the same random numbers each time."""
    torch.manual_seed(1)
    # Reformer asks the system for seeds.
    with repeatable_seeds():
        outputs = [leaf for leaf in flat(run())[0] if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        losses = [((leaf.double() - 0.3) ** 2).mean() for leaf in outputs if leaf.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    return [*outputs, *(parameter.grad for parameter in model.parameters()), *model.buffers()]


def difference(own: Tensor | None, other: Tensor | None) -> float:
    """The largest, in parts of the largest value; infinite where only one is there, or not a number."""
    if own is None or other is None or own.shape != other.shape:
        return 0.0 if own is other else float("inf")
    ours, theirs = own.detach().double(), other.detach().double()
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return float("inf")
    apart, largest = (ours - theirs).nan_to_num(0, 0, 0).abs(), ours.nan_to_num(0, 0, 0).abs()
    return float(apart.max() / largest.max().clamp(min=1e-6)) if ours.numel() else 0.0


def line_of(made: Row) -> str:
    """Of the table."""
    if "layers" not in made:
        why = " ".join((made.get("refused") or made["failed"]).split()).replace("|", "/")
        return f"| {made['name']} | | | | | {cut(why, SHOWN)} |"
    found = "; ".join(made["notes"])
    if is_wrong(made):
        found = f"WRONG: off by {made['off']:.1g}"
    elif not found:
        found = "equal, bit for bit" if made["batches"] else "equal by construction"
    if "off" in made and not is_wrong(made):
        found += "; again: " + ("equal" if made["off"] == 0 else f"off by {made['off']:.0e}")
    tool = cut(made["tool"], SHOWN_OF_TOOL)
    sizes = f"{made['sample']} | {made['layers']} | {made['cuts']}"
    return f"| {made['name']} | {sizes} | {tool} | {found} |"


def cut(text: str, length: int) -> str:
    """Of a long text the beginning."""
    return text if len(text) <= length else f"{text[:length]}…"


def is_wrong(made: Row) -> bool:
    """Whether layers were taken for the model that do otherwise."""
    return not made.get("off", 0) <= ROUNDING


def told(rows: list[Row]) -> str:
    """The sum of it."""
    able = [made for made in rows if "layers" in made and not is_wrong(made)]
    cut = sum(made["cuts"] > 0 for made in able)
    wrong = sum(map(is_wrong, rows))
    kinds = {"timm": "timm:", "transformers": "hf:"}
    used = [kind for kind, start in kinds.items() if any(made["name"].startswith(start) for made in rows)]
    return (
        f"{len(able)} of {len(rows)} models become layers that do the same, {cut} of them with cuts; {wrong} "
        f"wrong; {versions('torch', 'torchvision', *used)}."
    )


def versions(*packages: str) -> str:
    """As they are installed."""
    return ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)


def shape_of(name: str) -> tuple[str, tuple[int, ...] | None]:
    """`resnet18@3x64x64`: the model, and the shape of a sample; None: its own."""
    model, _, shape = name.partition("@")
    return model, tuple(map(int, shape.split("x"))) if shape else None


def write(file: Path, lines: list[str], marks: tuple[str, str]) -> None:
    """Puts the lines between the marks of the page."""
    before, _, rest = file.read_text(encoding="utf-8").partition(marks[0])
    after = rest.partition(marks[1])[2]
    made = "\n".join([before + marks[0], "", *lines, "", marks[1]]) + after
    file.write_text(made, encoding="utf-8")
    print(f"Wrote {file}")


if __name__ == "__main__":
    main()
