"""The options of what makes a profile: what is measured of a model, of links, and how a file is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..cost_models import arguments
from ..cost_models.arguments import (
    Converted,
    Options,
    option,
    options_class,
    read_module_styles,
    read_sizes,
    settings_option,
)
from ..cost_models.errors import UsageError
from ..cost_models.precision import training_precision
from ..cost_models.quantities import parse_bytes, parse_time

if TYPE_CHECKING:
    from .profile_file import Profile


# The options of what makes a profile: what is measured of a model, of links, and how a file is read.

AMP = ("bf16", "fp16")
SIZES_OF_MODEL = ("layers", "hidden", "heads", "sequence", "vocabulary")


def read_shape(text: str, name: str) -> tuple[int, ...]:
    """`3x224x224` as numbers. Raises UsageError."""
    if not re.fullmatch(r"[1-9]\d{0,17}(x[1-9]\d{0,17})*", text):
        raise UsageError(
            f"{name} {text}: is not the shape of one sample",
            f"Give its sizes without the batch, with an x between: {name} 3x224x224",
        )
    return tuple(int(part) for part in text.split("x"))


def _profile_or_path(name: str, value: Any) -> Path | Profile | None:
    if value is None or isinstance(value, str | Path):
        return None if value is None else Path(value)
    from .profile_file import Profile

    return value if isinstance(value, Profile) else arguments.path(name, value)


def _seed(name: str, value: Any) -> int:
    return arguments.whole(name, value, at_least=0, at_most=2**63 - 1)


def _flag(help: str, flag: str = "") -> Any:
    return option(False, arguments.flag, help, flag=flag)


def _number(help: str, panel: str | None = None) -> Any:
    return option(None, arguments.optional_whole, help, "N", least=1, panel=panel)


def _text(form: str, help: str) -> Any:
    return option(None, arguments.optional_word, help, form)


@options_class
class ProfileOptions(Options):
    """How a model is built and measured; None: as is usual for it. Raises UsageError.

    `input_shape` is that of one sample. `input_like`: "package.module:function", of yours, called without
    arguments, returns an example batch (dimension 0 of its tensors), of which the sizes are made. `dtype`
    defaults to the model's own, or float32 where it has several
    or none; `device` to CUDA where there is one. On "meta" nothing is timed: layers and bytes are counted;
    "analytic:h100", any preset or a TOML file: seconds estimated from FLOPs and bytes, with the efficiencies
    of `calibrate`, a measured profile of the same model, where it is given. `granularity`: "block" (cuts that
    one tensor crosses; heavy layers are opened where few do), "fine" (any number), or
    "module:PATTERN[,PATTERN]"; no cut is allowed between layers that match a pattern of `keep_together`.
    `settings` are the factory's keyword arguments, or keys of the
    transformers configuration. `loss`: "cross-entropy", "mse", "none" or "package.module:function" of the
    model's output. `compile`, `channels_last`, `amp`, `tf32` and
    `cudnn_benchmark`: as the training will run.
    `micro_batch_sizes`: those, else 1, 2, 4, ..., the smallest first and as far as `budget_seconds`, over all
    sizes together, and memory reach. `cache`: the profile of an earlier run of the same is taken, and this
    one is kept; `resume`: so are the passes of a run that was interrupted; implies `cache`.
    """

    input_shape: Sequence[int] | None = option(
        None,
        arguments.wholes,
        "Shape of one sample, without the batch.",
        "3x224x224",
        flag="input",
        read=read_shape,
        aliases=("--input-shape", "--input-size"),
    )
    input_like: str | None = _text(
        "MODULE:FUNCTION",
        "Your function that returns an example batch: a tensor, a tuple of forward's arguments, or a dict of "
        "its keyword arguments.",
    )
    classes: int | None = _number("How many classes a torchvision model tells apart.")
    micro_batch_sizes: Sequence[int] | None = option(
        None,
        arguments.wholes,
        "Micro-batch sizes to measure; default: powers of two.",
        "1,2,4,8",
        read=read_sizes,
    )
    dtype: str | None = _text(
        "float32", "Or float16, bfloat16, float64: of weights and input; default: the model's own."
    )
    device: str | None = _text(
        "cpu|cuda|cuda:N|meta|analytic:GPU",
        "Where to measure; default: CUDA where there is one. meta: layers and bytes only; analytic:h100 or "
        "analytic:my.toml: estimated from FLOPs and bytes.",
    )
    calibrate: Converted[str | Path | Profile | None, Path | Profile | None] = option(
        None,
        _profile_or_path,
        "A measured profile of the same model, whose efficiencies an analytic one takes.",
        "FILE",
    )
    granularity: str | None = _text(
        "NAME",
        "block: layers between all places that one tensor crosses, heavy ones opened; fine: any number; or "
        "your own modules, as in module:layers.*,head.",
    )
    keep_together: Sequence[str] = option(
        (),
        arguments.words,
        "Forbid cuts between layers that match; may be repeated.",
        "PATTERN",
        repeats=True,
    )
    settings: Mapping[str, object] | None = settings_option(
        "A keyword of the factory, or a key of the transformers configuration; repeatable."
    )
    loss: str | None = _text(
        "NAME",
        "cross-entropy, mse, none or package.module:function, computed by the last stage; default: what is "
        "usual for such a model.",
    )
    compile: bool = _flag("Measure each layer under torch.compile.")
    channels_last: bool = _flag("Measure images as channels last.")
    amp: Literal["bf16", "fp16"] | None = option(
        None, arguments.optional_word, "Measure under autocast.", "bf16|fp16", words=AMP
    )
    tf32: bool = _flag("Allow TensorFloat-32 for float32 products on an NVIDIA GPU.")
    cudnn_benchmark: bool = _flag("Let cuDNN look for its fastest kernels (torch.backends.cudnn.benchmark).")
    budget_seconds: float = option(
        60.0,
        arguments.number,
        "How long all may take, with loading and tracing; the smallest size is always measured.",
        "60s",
        flag="budget",
        read=parse_time,
        default_text="60s",
    )
    seed: int = option(0, _seed, "Random seed, of weights and inputs.", "N", least=0)
    resume: bool = _flag("Go on with a profile of the same that was interrupted.")
    cache: bool = _flag("Measure anew, and keep nothing for later runs of the same.", "no-cache")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget_seconds > 0 or self.budget_seconds == float("inf"):
            raise UsageError(
                f"budget_seconds={self.budget_seconds:g}: must be above 0", "As in budget_seconds=60."
            )


@options_class
class TensorParallelOptions(Options):
    """Layers that several processes share, which torchrun has started: how many, and which modules are split,
    by their names with wildcards, "colwise" or "rowwise"; None: as the transformers model says."""

    tensor_parallel: int | None = option(
        None,
        arguments.optional_whole,
        "Processes that share every layer (torchrun starts them); the profile is of one of them.",
        "N",
        flag="tp",
        least=2,
    )
    tensor_plan: Mapping[str, object] | None = option(
        None,
        arguments.settings,
        "Modules to split, colwise or rowwise; default: the plan of the transformers model; repeatable.",
        "NAME=STYLE",
        flag="tp-plan",
        read=read_module_styles,
        repeats=True,
    )


@options_class
class TransformerSizes(Options):
    """Keys of a transformers configuration that stand for themselves on the command line."""

    layers: int | None = _number("Blocks (of encoder and decoder each).", "Transformers models")
    hidden: int | None = _number("Width of the blocks.", "Transformers models")
    heads: int | None = _number("Attention heads.", "Transformers models")
    intermediate: int | None = _number("Width of the feed-forward layers.", "Transformers models")
    sequence: int | None = _number("Tokens of a sample.", "Transformers models")
    vocabulary: int | None = _number("Size of the vocabulary.", "Transformers models")


def _read_byte_sizes(text: str, name: str) -> tuple[int, ...]:
    """`1KiB,16MiB` in bytes. Raises UsageError."""
    sizes = tuple(sorted({parse_bytes(part.strip(), name) for part in text.split(",")}))
    if len(sizes) < 2:
        raise UsageError(
            f"{name} {text}: one size does not tell latency from bandwidth",
            f"Give two or more, as in {name} 1KiB,1MiB,16MiB.",
        )
    return sizes


@options_class
class KernelOptions(Options):
    """Of which shapes kernels are measured: of a transformer with these degrees, and how. `peak`: FLOP/s."""

    device: str | None = option(
        None, arguments.optional_word, "Where to measure; default: CUDA.", "cpu|cuda|cuda:N"
    )
    dtype: str = option("bfloat16", arguments.word, "Of the numbers: bfloat16, float16, float32.", "NAME")
    sequence: int = option(4096, arguments.whole, "Tokens of a sequence.", "T", least=1)
    micro_batch_size: tuple[int, ...] = option(
        (1,), arguments.wholes, "Sequences of a micro-batch.", "N[,N]", read=read_sizes, default_text="1"
    )
    tp: tuple[int, ...] = option(
        (1,), arguments.wholes, "Tensor-parallel degrees.", "N[,N]", read=read_sizes, default_text="1"
    )
    ep: tuple[int, ...] = option(
        (1,), arguments.wholes, "Expert-parallel degrees.", "N[,N]", read=read_sizes, default_text="1"
    )
    cp: tuple[int, ...] = option(
        (1,), arguments.wholes, "Context-parallel degrees.", "N[,N]", read=read_sizes, default_text="1"
    )
    repeats: int = option(10, arguments.whole, "Runs of a kernel, of which the median counts.", "N", least=1)


@options_class
class LinkOptions(Options):
    """How links are measured. `sizes`: bytes of a transfer."""

    sizes: tuple[int, ...] | None = option(
        None,
        arguments.wholes,
        "Bytes of a transfer; default: from 1 KiB to 16 MiB.",
        "1KiB,16MiB",
        read=_read_byte_sizes,
    )
    repeats: int = option(
        20, arguments.whole, "Transfers of each size, of which the median counts.", "N", least=1
    )
    timeout_seconds: float = option(
        60.0,
        arguments.number,
        "How long to wait for a process that is silent.",
        "60s",
        flag="timeout",
        read=parse_time,
        default_text="60s",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timeout_seconds < 1:
            raise UsageError(
                f"timeout_seconds={self.timeout_seconds:g}: must be at least 1 s", "Give 60 s, say."
            )


@options_class
class MachineMeasureOptions(Options):
    """What is measured of a machine for a model's shapes, and how."""

    device: str | None = option(
        None, arguments.optional_word, "Where to measure without torchrun; default: CUDA.", "cpu|cuda|cuda:N"
    )
    sequence: int = option(4096, arguments.whole, "Tokens of a sequence.", "T", least=1)
    micro_batch_size: int = option(1, arguments.whole, "Sequences of a micro-batch.", "N", least=1)
    tp: tuple[int, ...] = option(
        (1, 2, 4, 8),
        arguments.wholes,
        "Tensor-parallel degrees.",
        "N[,N]",
        read=read_sizes,
        default_text="1,2,4,8",
    )
    cp: tuple[int, ...] = option(
        (1, 2), arguments.wholes, "Context-parallel degrees.", "N[,N]", read=read_sizes, default_text="1,2"
    )
    ep: tuple[int, ...] = option(
        (1, 2, 4, 8),
        arguments.wholes,
        "Expert-parallel degrees.",
        "N[,N]",
        read=read_sizes,
        default_text="1,2,4,8",
    )
    sizes: tuple[int, ...] | None = option(
        None,
        arguments.wholes,
        "Bytes of a transfer or a collective; default: from 1 KiB to 256 MiB.",
        "1KiB,16MiB",
        read=_read_byte_sizes,
    )
    repeats: int = option(10, arguments.whole, "Runs of each, of which the median counts.", "N", least=1)
    timeout_seconds: float = option(
        60.0,
        arguments.number,
        "How long to wait for a process that is silent.",
        "60s",
        flag="timeout",
        read=parse_time,
        default_text="60s",
    )

    @property
    def kernels(self) -> KernelOptions:
        """Options of the kernels."""
        return KernelOptions(
            device=self.device,
            sequence=self.sequence,
            micro_batch_size=(self.micro_batch_size,),
            tp=self.tp,
            ep=self.ep,
            cp=self.cp,
            repeats=self.repeats,
        )


# The options of how a file of costs is read.

FORMATS = ("pipedream", "csv", "json")
GRANULARITIES = ("block", "fine")


_COSTS = "The costs"


@options_class
class ProfileImportOptions(Options):
    """What a file of costs does not say; None: as is usual for its format.

    `granularity` is for graphs: a table's rows are its layers.
    """

    format: Literal["pipedream", "csv", "json"] | str | None = option(
        None,
        arguments.optional_word,
        "Format of the file; default: detected from its content.",
        "|".join(FORMATS),
        words=FORMATS,
        panel=_COSTS,
    )
    model: str | None = option(
        None, arguments.optional_word, "The model's name; default: the file's.", "NAME", panel=_COSTS
    )
    micro_batch_size: int | None = option(
        None,
        arguments.optional_whole,
        "Samples that the costs are for, where the file does not say it; default: 128 of a graph, 1 of a "
        "table.",
        "N",
        least=1,
        panel=_COSTS,
    )
    granularity: Literal["block", "fine"] | str | None = option(
        None,
        arguments.optional_word,
        "Layers of a graph: what lies between all places that one tensor crosses, or each operation.",
        "|".join(GRANULARITIES),
        words=GRANULARITIES,
        panel=_COSTS,
    )
    tensor_parallel: int = option(
        1,
        arguments.whole,
        "Devices that share every layer, where the costs are those of one of them.",
        "N",
        flag="tp",
        least=1,
    )
    dtype: str = option(
        "float32",
        arguments.word,
        "Or float16, bfloat16, float64: of the weights.",
        "float32",
        panel=_COSTS,
    )

    def check(self) -> None:
        """Raises UsageError for words that are not known."""
        for field, word, allowed in (
            ("format", self.format, FORMATS),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if word is not None and word not in allowed:
                raise UsageError(f"{field}={word!r}: not known", f"Use one of: {', '.join(allowed)}.")
        training_precision(self.dtype)
