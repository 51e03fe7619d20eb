"""`pplan profile`: measures a model layer by layer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import AsJson, Force, Output, shape, sizes, whole_number, word
from .streams import console, printable, remark, watched

if TYPE_CHECKING:
    from ..profiler.profile_file import Profile
    from ..profiler.size_sweep import Progress

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A torchvision model, hf:NAME or a config.json of transformers, or package.module:factory.",
        show_default=False,
    ),
]
Input = Annotated[
    str | None,
    typer.Option("--input", metavar="3x224x224", help="Shape of one sample, without the batch."),
]
Classes = Annotated[
    int | None,
    typer.Option(
        "--classes",
        parser=whole_number("--classes", at_least=1),
        metavar="N",
        help="How many classes a torchvision model tells apart.",
    ),
]
MicroBatchSizes = Annotated[
    str | None,
    typer.Option(
        "--micro-batch-sizes",
        metavar="1,2,4,8",
        help="Micro-batch sizes to measure; default: powers of two.",
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="float32",
        help="Or float16, bfloat16, float64: of weights and input; default: the model's own.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda|cuda:N|meta|analytic:GPU",
        help="Where to measure; default: CUDA where there is one. meta: layers and bytes only; analytic:h100 "
        "or analytic:my.toml: estimated from FLOPs and bytes.",
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        "--calibrate",
        metavar="FILE",
        help="A measured profile of the same model, whose efficiencies an analytic one takes.",
    ),
]
Granularity = Annotated[
    str | None,
    typer.Option(
        "--granularity",
        metavar="NAME",
        help="block: layers between all places that one tensor crosses; fine: any number; or your own "
        "modules, as in module:layers.*,head.",
    ),
]
KeepTogether = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-together",
        metavar="PATTERN",
        help="Forbid cuts between layers that match; may be repeated.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A keyword of the factory, or a key of the transformers configuration; repeatable.",
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="NAME",
        help="cross-entropy, mse, none or package.module:function, computed by the last stage; default: what "
        "is usual for such a model.",
    ),
]
Compile = Annotated[bool, typer.Option("--compile", help="Measure each layer under torch.compile.")]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Measure images as channels last.")]
Amp = Annotated[
    Any,
    typer.Option(
        "--amp", parser=word("--amp", ("bf16", "fp16")), metavar="bf16|fp16", help="Measure under autocast."
    ),
]
Tf32 = Annotated[
    bool, typer.Option("--tf32", help="Allow TensorFloat-32 for float32 products on an NVIDIA GPU.")
]


def _size(name: str, text: str) -> Any:
    """An option for one of the sizes that a transformers model is named by."""
    parser = whole_number(name, at_least=1)
    return typer.Option(name, parser=parser, metavar="N", help=text, rich_help_panel="Transformers models")


Layers = Annotated[int | None, _size("--layers", "Blocks (of encoder and decoder each).")]
Hidden = Annotated[int | None, _size("--hidden", "Width of the blocks.")]
Heads = Annotated[int | None, _size("--heads", "Attention heads.")]
Sequence = Annotated[int | None, _size("--sequence", "Tokens of a sample.")]
Vocabulary = Annotated[int | None, _size("--vocabulary", "Size of the vocabulary.")]

Budget = Annotated[
    str, typer.Option("--budget", metavar="60s", help="How long to measure, over all sizes together.")
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        parser=whole_number("--seed", at_least=0),
        metavar="N",
        help="Random seed, of weights and inputs.",
    ),
]

Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with a profile of the same that was interrupted.")
]
NoCache = Annotated[
    bool,
    typer.Option("--no-cache", help="Measure anew, and keep nothing for later runs of the same."),
]


def profile_command(
    model: ModelName,
    input_shape: Input = None,
    classes: Classes = None,
    micro_batch_sizes: MicroBatchSizes = None,
    dtype: Dtype = None,
    device: Device = None,
    calibrate: Calibrate = None,
    granularity: Granularity = None,
    keep_together: KeepTogether = None,
    setting: Settings = None,
    loss: Loss = None,
    compile: Compile = False,
    channels_last: ChannelsLast = False,
    amp: Amp = None,
    tf32: Tf32 = False,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    sequence: Sequence = None,
    vocabulary: Vocabulary = None,
    budget: Budget = "60s",
    seed: Seed = 0,
    resume: Resume = False,
    no_cache: NoCache = False,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model layer by layer, forward and backward, at several micro-batch sizes.

    What was measured before is taken from the cache. Ctrl-C writes what there is; --resume continues it.
    """
    from ..api.profiles import profile as measure
    from ..api.provenance import made_by
    from ..cost_models.errors import UsageError
    from ..cost_models.quantities import parse_seconds
    from ..profiler.profile_file import Interrupted
    from .invocation import command_line
    from .output import chosen_target, file_stem
    from .settings import parse_settings

    sample = None if input_shape is None else shape(input_shape, "--input")
    wanted = None if micro_batch_sizes is None else sizes(micro_batch_sizes, "--micro-batch-sizes")
    budget_seconds = parse_seconds(budget, name="--budget")
    if budget_seconds == 0:
        raise UsageError(f"--budget {budget}: must be above 0", "For example: --budget 60s")
    if resume and no_cache:
        raise UsageError("--resume and --no-cache: there is nothing to resume without a cache", "Give one.")
    sizes_of_model = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "sequence": sequence,
        "vocabulary": vocabulary,
    }
    settings = parse_settings(setting or ())
    settings |= {name: value for name, value in sizes_of_model.items() if value is not None}
    target = chosen_target(output, f"{file_stem(model)}.profile.json", force=force)
    target.check()

    def write(profile: Profile) -> None:
        place = target
        if output is None:
            name = f"{file_stem(profile.model)}.profile.json"
            place = chosen_target(None, name, force=force, about={"model": profile.model})
        profile = profile.model_copy(update={"made_by": made_by(profile.made_by, command=command_line())})
        place.write(profile, as_json=as_json, show=lambda: _show(profile))

    try:
        with _progress() as progress:
            profile = measure(
                model,
                input_shape=sample,
                classes=classes,
                micro_batch_sizes=wanted,
                dtype=dtype,
                device=device,
                calibrate=calibrate,
                granularity=granularity,
                keep_together=tuple(keep_together or ()),
                settings=settings or None,
                loss=loss,
                compile=compile,
                channels_last=channels_last,
                amp=amp,
                tf32=tf32,
                budget_seconds=budget_seconds,
                seed=seed,
                progress=progress,
                cache=not no_cache,
                resume=resume,
                remark=remark,
            )
    except Interrupted as interruption:
        write(interruption.profile)
        raise
    write(profile)


def _show(profile: Profile) -> None:
    from .profile_tables import print_profile

    print_profile(profile, console())


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None] | None]:
    """A bar on standard error with the layer in hand; None where nobody watches."""
    if not watched():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
    )
    screen = Console(file=sys.stderr)
    # Drawn between passes only: a thread that draws at its own pace would disturb what is timed.
    with rich_progress.Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("loading the model", total=1.0)
        bar.refresh()

        def tell(now: Progress) -> None:
            layer = f", {now.layer}" if now.layer else ""
            text = f"micro-batch size {now.micro_batch_size}: {now.doing}{layer}"
            bar.update(task, description=printable(text), completed=now.fraction, refresh=True)

        yield tell
