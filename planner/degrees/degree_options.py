"""Options of a plan by degrees of parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ...cost_models import arguments
from ...cost_models.arguments import Converted, Options, option, options_class, read_whole_number
from ...cost_models.errors import UsageError, short_repr
from ...cost_models.quantities import parse_rate
from ...cost_models.transformer.implementations import IMPLEMENTATIONS

RECOMPUTES = ("auto", "none", "selective", "partial", "full")
"""Recomputation modes of the search, and of files until 0.1."""
_RECOMPUTE_WORDS = {
    "never": "none",
    "first_layers": "partial",
    "always": "full",
    **{word: word for word in RECOMPUTES},
}
CONTEXT_EXCHANGES = ("auto", "all-to-all", "ring", "all-gather")


def _counts(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if not values or isinstance(value, str):
        raise UsageError(f"{name}={value!r}: must be whole numbers from 1", f"Give {name}=(1, 2, 4).")
    return tuple(sorted({arguments.whole(name, each, at_least=1) for each in values}))


def _read_counts(text: str, name: str) -> tuple[int, ...]:
    return tuple(read_whole_number(1)(part.strip(), name) for part in text.split(","))


PANEL = "Of a config.json alone"


def _option(default: Any, check: Any, what: str, form: str | None = None, **more: Any) -> Any:
    return option(default, check, what, form, panel=PANEL, **more)


def _degree_option(what: str) -> Any:
    return _option(None, _counts, what, "N[,N]", read=_read_counts)


def _mini_batch(name: str, value: Any) -> int:
    return 256 if value is None else arguments.whole(name, value, at_least=1)


def _recompute(name: str, value: Any) -> str:
    word = arguments.word(name, value).replace("-", "_")
    if word not in _RECOMPUTE_WORDS:
        raise UsageError(
            f"{name}={value!r}: not known for a configuration",
            "Use one of: auto, never, selective, first-layers, always; `offload` is an option.",
        )
    return _RECOMPUTE_WORDS[word]


def _predictors(name: str, value: Any) -> int:
    return arguments.whole(name, value, at_least=0, at_most=8)


def _zero(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    values = value if isinstance(value, list | tuple) else (value,)
    if not values or any(stage not in (0, 1, 2, 3) or isinstance(stage, bool) for stage in values):
        raise UsageError(
            f"{name}={value!r}: must be 0, 1, 2 or 3",
            "1 spreads the optimizer's states, 2 the gradients too, 3 the weights too.",
        )
    return tuple(sorted({int(stage) for stage in values}))


def _read_zero(text: str, name: str) -> tuple[int, ...]:
    return tuple(read_whole_number(0)(part.strip(), name) for part in text.split(","))


FIXED = ("tp", "pp", "cp", "ep", "zero", "micro_batch_size", "virtual_stages")
"""Names that `fix` accepts."""


def _fixed(name: str, value: Any) -> dict[str, int] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise UsageError(
            f"{name}={short_repr(value)}: must be degrees by their names", f"Give {name}={{'tp': 8}}."
        )
    if unknown := next((degree for degree in value if degree not in FIXED), None):
        raise UsageError(f"{name}={unknown}: is not a degree", f"Use one of: {', '.join(FIXED)}.")
    return {
        degree: arguments.whole(degree, number, at_least=int(degree != "zero"))
        for degree, number in value.items()
    }


def _read_fixed(texts: Sequence[str], name: str) -> dict[str, int]:
    """Read `tp=8` from each text, or several separated by commas."""
    fixed: dict[str, int] = {}
    for text in ",".join(texts).split(","):
        word, equals, number = (part.strip() for part in text.partition("="))
        word = word.lstrip("-").replace("-", "_")
        if not equals or word not in FIXED:
            raise UsageError(
                f"{name} {text}: is not of the form DEGREE=N",
                f"Write one of {', '.join(FIXED).replace('_', '-')}, an equals sign and the number.",
            )
        if fixed.setdefault(word, read_whole_number(0)(number, f"{name} {word}")) != int(number):
            twice = f"{name} {word.replace('_', '-')}: is both {fixed[word]} and {number}"
            raise UsageError(twice, "Give one number of each.")
    return fixed


def _one_word(words: Sequence[str]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in words:
            raise UsageError(f"{name}={value!r}: not known", f"Use one of: {', '.join(words)}.")
        return str(value)

    return check


@options_class
class ConfigurationOptions(Options):
    """Options of a configuration that a profile does not have. None allows all values.

    Attributes:
        implementation: Library whose code is costed.
        kernels: CSV file of measured kernels.
        sequence: Tokens of a sequence.
        layers: Layers of the model, if not all of the configuration's.
        predictors: Multi-token predictors.
        pp: Numbers of pipeline stages.
        cp: Context-parallel degrees.
        ep: Expert-parallel degrees.
        micro_batch_size: Sequences of a micro-batch.
        virtual_stages: Virtual stages per device.
        max_param_unsharded_stages: Virtual stages whose weights may be gathered at a time, with ZeRO 3 in a
            pipeline.
        offload: Whether to try offloading, too.
        context_exchange: Exchange between devices that share a sequence.
        by_stage: Whether to search pipelines whose stages have different degrees, too.
        fix: Degrees with a single value, by name. Each is set in its own field.
    """

    implementation: Literal["megatron", "torchtitan", "transformers"] | str = _option(
        "megatron",
        _one_word(tuple(IMPLEMENTATIONS)),
        "Whose code is costed: megatron (with Transformer Engine), torchtitan (compiled), or transformers "
        "(its modules, as NeMo AutoModel trains them).",
        "megatron|torchtitan|transformers",
        words=tuple(IMPLEMENTATIONS),
    )
    kernels: Converted[str | Path | None, Path | None] = _option(
        None, arguments.optional_path, "A CSV file of measured kernels; default: the GPU's limits.", "FILE"
    )
    machine: Converted[str | Path | None, Path | None] = _option(
        None,
        arguments.optional_path,
        "What pplan machine measure wrote: kernels, links and whole layers of your machine.",
        "FILE",
    )
    sequence: int = _option(4096, arguments.whole, "Tokens of a sequence.", "T", least=1)
    layers: int | None = _option(
        None,
        arguments.optional_whole,
        "Layers of the model, where not all of the configuration's.",
        "N",
        least=1,
    )
    predictors: int = _option(
        0,
        _predictors,
        "Multi-token predictors that are trained behind the layers (DeepSeek-V3 has 1).",
        "N",
        least=0,
        aliases=("--mtp-num-layers",),
    )
    pp: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Allowed numbers of pipeline stages; default: up to one for each layer, the embedding and the head."
    )
    cp: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Allowed context-parallel degrees; default: those that leave a device 4096 tokens."
    )
    ep: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Allowed expert-parallel degrees."
    )
    micro_batch_size: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Allowed sequences of a micro-batch."
    )
    virtual_stages: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Virtual stages of a device that may be; 1: 1F1B, more: interleaved 1F1B; default: 1 to 8, of all "
        "devices no more than layers, embedding and head."
    )
    max_param_unsharded_stages: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Virtual stages of a device whose weights may be gathered at a time, with ZeRO 3 in a pipeline; "
        "default: 3, as torch has it."
    )
    offload: bool = _option(
        False,
        arguments.flag,
        "Also try to keep what attention and experts save for backward in the host's memory, as "
        "megatron-core does it.",
    )
    context_exchange: str = _option(
        "auto",
        _one_word(CONTEXT_EXCHANGES),
        "How devices that share a sequence attend to all of it: all-to-all (each has some heads), ring (keys "
        "and values go round), all-gather (each has all keys and values), or auto (any of these).",
        "auto|all-to-all|ring|all-gather",
        words=CONTEXT_EXCHANGES,
    )
    by_stage: bool = _option(
        False,
        arguments.flag,
        "Also look for a 1F1B pipeline whose stages have numbers of devices, degrees and recomputation of "
        "their own.",
    )
    fix: Mapping[str, int] | None = _option(
        None,
        _fixed,
        "One value of a degree: micro-batch-size=2, as the option of that name has it. Can be repeated.",
        "NAME=N",
        read=_read_fixed,
        repeats=True,
    )


@options_class
class DegreeOptions(ConfigurationOptions):
    """Training setting, and the allowed degrees (None for all).

    Attributes:
        mini_batch: Sequences of one optimizer step.
        zero: Allowed ZeRO stages (2 and 3: FSDP). None for those of the implementation that may pay.
        tp: Tensor-parallel degrees.
        recompute: Recomputation mode.
        host_bandwidth: Bytes per second of copies to a GPU's host, and as many back.
    """

    mini_batch: Converted[int | None, int] = option(
        256,
        _mini_batch,
        "Global batch: sequences of one optimizer step.",
        "B",
        panel="The training",
        least=1,
        aliases=("--batch-size", "--global-batch-size"),
    )
    zero: Converted[int | Sequence[int] | None, Sequence[int] | None] = _option(
        None,
        _zero,
        "Allowed stages of ZeRO: 0 spreads nothing over the replicas, 1 the optimizer's states, 2 the "
        "gradients too, 3 the weights too (2 and 3: FSDP, which torchtitan and transformers have in a "
        "pipeline, too); default: those of the implementation that may pay.",
        "N[,N]",
        read=_read_zero,
    )
    tp: Converted[Sequence[int] | int | None, Sequence[int] | None] = _degree_option(
        "Allowed tensor-parallel degrees."
    )
    recompute: str = _option(
        "auto",
        _recompute,
        "What runs forward again before its backward: never, selective (attention), first-layers (the first "
        "blocks of each stage), always (every block), or auto (any of these).",
        "auto|never|selective|first-layers|always",
    )
    host_bandwidth: float | None = _option(
        None,
        arguments.optional_rate,
        "Of a GPU's copies to the host's memory, and as much back; default: 85 % of its link to the host.",
        "50GB/s",
        read=parse_rate,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (self.fix or {}).items():
            allowed = getattr(self, name)
            if allowed is not None and value not in allowed:
                several = ",".join(map(str, allowed))
                raise UsageError(f"{name}={several}: contradicts the {value} of `fix`", "Give one of them.")
            check = _zero if name == "zero" else _counts
            object.__setattr__(self, name, check(name, value))
        object.__setattr__(self, "fix", None)  # so that `replace` may allow others

    def check_by_stage(self) -> None:
        """Check that these options leave degrees by stage to search.

        Raises:
            UsageError: They do not.
        """
        for name, allowed, why in (
            ("pp", range(2, 2**20), "which need several pipeline stages"),
            ("virtual_stages", (1,), "which use 1F1B with one stage per device"),
            ("zero", (0, 1), "which do not shard gradients and weights"),
        ):
            values = getattr(self, name)
            if values is not None and not any(value in allowed for value in values):
                problem = f"{name}={','.join(map(str, values))}: leaves no degrees by stage, {why}"
                raise UsageError(problem, f"Omit `{name}`, or `by_stage`.")
        if self.implementation != "megatron":
            problem = f"implementation={self.implementation}: has no degrees by stage, only megatron does"
            raise UsageError(problem, "Omit `implementation`, or `by_stage`.")
        if self.offload:
            raise UsageError(
                "offload: does not combine with degrees by stage", "Omit `offload`, or `by_stage`."
            )
