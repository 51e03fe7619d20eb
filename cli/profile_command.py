"""`pplan profile`: measures a model layer by layer."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.errors import FileError, UsageError
from ..profiler.profile_options import ProfileOptions, TensorParallelOptions, TransformerSizes
from .output import AsJson, Force, Output, choose_target, file_stem
from .streams import PACE, console, is_interactive, printable, remark

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


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", metavar="FILE", help="The config.json of an hf: model, in place of its defaults."
    ),
]


def profile_command(
    model: ModelName,
    *,
    options: ProfileOptions,
    sizes: TransformerSizes,
    sharing: TensorParallelOptions,
    config: ConfigFile = None,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model layer by layer.

    Forward and backward are timed at several micro-batch sizes. What was measured
    before is taken from the cache. Ctrl-C writes what there is; --resume continues it.
    """
    from ..profiler.names import refuse_unknown_name

    if options.resume and not options.cache:
        raise UsageError("--resume and --no-cache: there is nothing to resume without a cache", "Give one.")
    if config is not None:
        model = _configured_name(model, config)
    settings = dict(options.settings or {})
    settings |= {name: value for name, value in vars(sizes).items() if value is not None}
    # An estimate takes no measured profile's place.
    estimate = options.device.partition(":")[0] if options.device else ""
    device = {"device": estimate} if estimate in ("analytic", "meta") else {}
    name = f"{file_stem(model)}.profile.json"
    target = choose_target(output, name, force=force, about=device, kind="profile")
    target.check()
    refuse_unknown_name(model)
    from ..api.profiles import profile as measure
    from ..profiler.profile_file import Interrupted
    from .profile_tables import print_profile

    def write(profile: Profile) -> None:
        place = target
        if output is None:
            name = f"{file_stem(profile.model)}.profile.json"
            about = {"model": profile.model, **device}
            place = choose_target(None, name, force=force, about=about, kind="profile")
        place.write(profile, as_json=as_json, show=lambda: print_profile(profile, console()))

    try:
        with _progress(is_timed=not device) as progress:
            profile = measure(
                model,
                **{**vars(options), **vars(sharing), "settings": settings or None},
                progress=progress,
                remark=remark,
            )
    except Interrupted as interruption:
        write(interruption.profile)
        raise
    except FileError as error:
        # Of a hub's model whose configuration is not here: there is an option for it.
        own = "hf:./config.json"
        raise FileError(error.what, error.hint.replace(f"as {own}.", f"as {own} or by --config.")) from error
    if sharing.tensor_parallel is None or os.environ.get("RANK", "0") == "0":
        write(profile)


@contextmanager
def _progress(*, is_timed: bool) -> Iterator[Callable[[Progress], None] | None]:
    """A bar on standard error with the layer in hand; None where nobody watches.

    Its clock moves while the model is loaded and traced. From the first pass that is timed on it is drawn
    between passes only: a thread that draws at its own pace would disturb them.
    """
    if not is_interactive():
        yield None
        return
    from rich import progress as rich_progress
    from rich.console import Console

    columns = (
        rich_progress.BarColumn(),
        rich_progress.TaskProgressColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("left"),
        rich_progress.TimeRemainingColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
    )
    screen, still = Console(file=sys.stderr), threading.Event()
    with rich_progress.Progress(*columns, console=screen, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("loading the model", total=1.0)
        bar.refresh()

        def move() -> None:
            while not still.wait(PACE):
                bar.refresh()

        thread = threading.Thread(target=move, daemon=True)
        thread.start()

        def tell(now: Progress) -> None:
            if is_timed and now.layer:
                still.set()
            layer = f", {now.layer}" if now.layer else ""
            text = f"micro-batch size {now.micro_batch_size}: {now.doing}{layer}"
            bar.update(task, description=printable(text), completed=now.fraction, refresh=True)

        try:
            yield tell
        finally:
            still.set()
            thread.join()


def _configured_name(model: str, config: Path) -> str:
    """The model of that file, or of the config.json in that folder. It is of the model type that is named; a
    hub's name, `hf:owner/model`, names none. Raises UsageError, FileError."""
    from ..cost_models.text_files import read_text
    from ..cost_models.transformer.configuration import parse_configuration

    kind = model.removeprefix("hf:")
    if kind == model:
        raise UsageError(
            f"--config {config}: {model} is no model of transformers", "Name its model type, as in hf:llama."
        )
    file = config / "config.json" if config.is_dir() else config
    model_type = parse_configuration(read_text(file, "configuration"), file).get("model_type")
    if not isinstance(model_type, str):
        raise FileError(
            f"--config {config}: has no model_type, so it is no configuration of transformers",
            'Name the config.json of a model; "model_type": "llama" says which.',
        )
    if model_type != kind and "/" not in kind:
        raise UsageError(
            f"--config {config}: is of model type {model_type[:40]}, not of {kind}",
            f"Name the model hf:{model_type[:40]}.",
        )
    return f"hf:{file if file.is_absolute() or len(file.parts) > 1 else f'./{file}'}"
