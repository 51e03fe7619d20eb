"""Options of a plan."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from ..cost_models import arguments
from ..cost_models.arguments import (
    Converted,
    Options,
    option,
    options_class,
    read_choice,
    read_number_or_auto,
    read_sizes,
    read_slow_devices,
)
from ..cost_models.errors import UsageError
from ..cost_models.optimizers import OPTIMIZERS, ZERO_STAGES
from ..cost_models.precision import GRADIENT_DTYPES, PRECISIONS, check_word
from ..cost_models.quantities import (
    MOST_DEVICES,
    MOST_MINI_BATCH,
    MOST_SECONDS,
    MOST_TOTAL_BYTES,
    parse_bytes,
    parse_rate,
    parse_time,
)
from ..cost_models.runtime import OFFLOAD, RUNTIMES, find_runtime
from ..cost_models.schedule_text import optional_schedule, schedule_word
from ..cost_models.schedules import SCHEDULES
from .candidate import (
    ANY_SCHEDULE,
    LIMITED_RECOMPUTE,
    MODES,
    MOST_MICRO_BATCHES,
    SYNTHESIZED,
    UNPROPOSED,
)

ASYNCHRONOUS = tuple(name for name, schedule in SCHEDULES.items() if not schedule.synchronous)


def _training(default: Any, check: Any, form: str, help: str, **more: Any) -> Any:
    return option(default, check, help, form, panel="The training", **more)


def _search(default: Any, check: Any, form: str | None, help: str, **more: Any) -> Any:
    return option(default, check, help, form, panel="The search", **more)


def _stage_of_zero(name: str, value: Any) -> int:
    return arguments.whole(name, value, at_least=0)


def _time_limit(name: str, value: Any) -> float:
    return parse_time(value, name) if isinstance(value, str) else arguments.number(name, value)


def _sharers(name: str, value: Any) -> tuple[int, ...] | None:
    numbers = arguments.wholes(name, [value] if isinstance(value, int) else value)
    return tuple(sorted(set(numbers))) if numbers else None


def _recompute(name: str, value: Any) -> str:
    return arguments.word(name, value).replace("-", "_")


def _read_recompute(text: str, name: str) -> str:
    words = ("never", "always", "except-last", "first-layers", OFFLOAD, "auto")
    return read_choice(words)(text, name).replace("-", "_")


def read_pins(texts: Sequence[str], name: str) -> tuple[tuple[str, int], ...]:
    """Read `features.10=stage1` as a layer and a stage, from each text.

    Raises:
        UsageError: A text has another form.
    """
    return tuple(_read_pin(text, name) for text in texts)


def _read_pin(text: str, name: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.+)=(?:stage)?(\d{1,18})", text)
    if not match:
        raise UsageError(
            f"{name} {text}: is not of the form LAYER=stageN", f"Write {name} features.10=stage1."
        )
    return match[1], int(match[2])


def seconds_option() -> Any:
    """Return the field that names the device whose seconds are used, for all plans from a profile."""
    return option(
        None,
        arguments.optional_word,
        "Plan GPUs with the seconds of a processor's profile, which is refused otherwise.",
        "cpu",
        panel="The machine",
    )


@options_class
class TrainingOptions(Options):
    """How a plan is trained. None and "auto" leave the choice to the search.

    Attributes:
        runtime: Runtime that must be able to run the plan.
        mini_batch: Samples of a step. None for 32 per GPU, rounded to what micro-batches make.
        micro_batches: Number of micro-batches.
        schedule: Name of a schedule, or a group of schedules.
        recompute: Recomputation mode.
        host_bandwidth: Bytes per second of copies from a device to its host, and as many back. None for that
            of a known GPU's link.
        host_memory_bytes: Bytes of host memory for the activations that each GPU offloads.
        optimizer: Name of the optimizer.
        precision: Precision of weights and states. auto is mixed for a profile in 16 bits or under autocast.
        gradient_dtype: Data type in which micro-batches accumulate gradients.
        zero: What the replicas of a stage shard: 1 optimizer states, 2 gradients too, 3 weights too.
        tp: Allowed numbers of devices that share every layer, of those for which the profile has costs.
    """

    runtime: str | None = _training(
        None, arguments.optional_word, "NAME", f"Only plans that it can run: {', '.join(RUNTIMES)}."
    )
    mini_batch: int | None = _training(
        None,
        arguments.optional_whole,
        "B",
        "Global batch: samples of one optimizer step; default: about 32 for each GPU.",
        least=1,
        aliases=("--batch-size", "--global-batch-size"),
    )
    micro_batches: Converted[int | Literal["auto"] | None, int | None] = _training(
        None,
        arguments.whole_or_auto,
        "M|auto",
        "How many equal parts the global batch is cut into.",
        least=1,
        read=read_number_or_auto,
        default_text="auto",
        aliases=("--chunks",),
    )
    schedule: str = _training(
        "auto",
        schedule_word,
        "1f1b|gpipe|...|FILE|any|auto",
        "Order of each stage's forwards and backwards: a name of pplan.schedules(), your own in "
        "FILE.schedule; any: the best of all; synthesized: of those and an order made for the plan; auto: of "
        "what the runtime runs, or of gpipe and 1f1b.",
    )
    recompute: str = _training(
        "auto",
        _recompute,
        "never|always|except-last|first-layers|offload|auto",
        "Whether to run forward again in backward, which saves memory; first-layers: of as few as must; "
        "offload: or to keep what is saved in the host's memory, where that is faster.",
        read=_read_recompute,
    )
    host_bandwidth: float | None = _training(
        None,
        arguments.optional_rate,
        "50GB/s",
        "Of a GPU's copies to the host's memory, and back; default: 85 % of its link to the host.",
        read=parse_rate,
    )
    host_memory_bytes: int | None = _training(
        None,
        arguments.optional_whole,
        "64GiB",
        "Of the host's memory, for what each GPU offloads; default: any.",
        flag="host-memory",
        read=parse_bytes,
    )
    optimizer: str = _training(
        "sgd",
        arguments.word,
        "|".join(OPTIMIZERS),
        "Optimizer (sets state memory).",
        words=tuple(OPTIMIZERS),
    )
    precision: Converted[Literal["auto", "fp32", "mixed", "bf16"] | str, str] = _training(
        "auto",
        arguments.word,
        "|".join(PRECISIONS),
        "Of weights and states; default: mixed if the profile is 16-bit or of autocast, else fp32.",
        words=("auto", *PRECISIONS),
    )
    gradient_dtype: Converted[Literal["auto", "fp32", "bf16", "fp16"] | str, str] = _training(
        "auto",
        arguments.word,
        "|".join(GRADIENT_DTYPES),
        "Type of accumulated gradients; default: that of the weights (Megatron, DeepSpeed: fp32 for bf16).",
        words=("auto", *GRADIENT_DTYPES),
    )
    zero: Converted[int | Sequence[int] | None, int] = _training(
        0,
        _stage_of_zero,
        "0|1|2|3",
        "What replicas of a stage spread: 1 optimizer states, 2 gradients too, 3 weights too.",
        least=0,
    )
    tp: Converted[Sequence[int] | int | None, tuple[int, ...] | None] = _training(
        None,
        _sharers,
        "N[,N]",
        "How many devices may share every layer; default: as many as the profile has costs for.",
        read=read_sizes,
    )


@options_class
class PlanOptions(TrainingOptions):
    """Options of a plan. None and "auto" leave the choice to the search.

    Attributes:
        planner: "best" for the joint search, or a named planner.
        time_limit: Seconds of processor time for the whole answer. Work is counted, so answers seldom vary.
        use_all: Whether every device must be used.
        max_stages: Most stages.
        cut_after: Names of layers after which a stage must end.
        keep_together: Patterns of names. Neighbours that match the same pattern are not separated.
        pins: (name of a layer, number of its stage from 0).
        robust: Whether to choose, of plans near the fastest, the one with the shortest step at the 90th
            percentile.
        slow_devices: (probability, factor): each device independently takes `factor` times as long with that
            probability. The plan is then `robust`, with the shortest mean step.
        memory_limit: Bytes that no device may exceed, in addition to its own limit.
        seconds_of: "cpu" to plan GPUs with a processor's seconds on purpose.
    """

    planner: str = _search(
        "best",
        arguments.word,
        "NAME",
        "best: the joint search; or what a known tool would do: pplan compare.",
    )
    time_limit: Converted[float | str, float] = _search(
        30.0,
        _time_limit,
        "30s",
        "Processor time for the whole answer; the search counts its work.",
        read=parse_time,
        default_text="30s",
    )
    use_all: bool = _search(False, arguments.flag, None, "No GPU may stay free, even where fewer are faster.")
    max_stages: int | None = _search(None, arguments.optional_whole, "N", "At most so many stages.", least=1)
    min_micro_batch: int | None = _search(
        None,
        arguments.optional_whole,
        "N",
        "Samples of a micro-batch on a replica, at the least: 8 for models with batch norms, say.",
        least=1,
    )
    cut_after: Converted[Sequence[str], tuple[str, ...]] = _search(
        (), arguments.words, "LAYER", "A stage must end there. Can be repeated.", repeats=True
    )
    keep_together: Converted[Sequence[str], tuple[str, ...]] = _search(
        (),
        arguments.words,
        "PATTERN",
        "No cut between layers of such names: layer1.*. Can be repeated.",
        repeats=True,
    )
    pins: Converted[Sequence[tuple[str, int]], tuple[tuple[str, int], ...]] = _search(
        (),
        arguments.pins,
        "LAYER=stageN",
        "The stage of a layer, from 0. Can be repeated.",
        flag="pin",
        read=read_pins,
        repeats=True,
    )
    robust: bool = _search(
        False, arguments.flag, None, "The fastest at the 90th percentile, as the layers' seconds vary."
    )
    slow_devices: Converted[tuple[float, float] | str | None, tuple[float, float] | None] = _search(
        None,
        arguments.slow_devices,
        "5%:1.5",
        "The shortest mean step where each device takes 1.5 times as long with a probability of 5 %.",
        read=read_slow_devices,
    )
    memory_limit: float | None = option(None, arguments.optional_number)
    seconds_of: Converted[Literal["cpu"] | str | None, str | None] = seconds_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slow_devices is not None:
            object.__setattr__(self, "robust", True)
        if self.micro_batches is not None and self.micro_batches > MOST_MICRO_BATCHES:
            raise UsageError(
                f"micro_batches={self.micro_batches}: at most {MOST_MICRO_BATCHES} are simulated",
                "Use fewer, larger micro-batches: the bubble is negligible long before.",
            )
        if self.mini_batch is not None and self.mini_batch > MOST_MINI_BATCH:
            raise UsageError(
                f"mini_batch={self.mini_batch}: must be at most {MOST_MINI_BATCH}",
                "Give the samples of one optimizer step.",
            )
        if not 0 < self.time_limit <= MOST_SECONDS:
            raise UsageError(
                f"time_limit={self.time_limit:g}: must be above 0, and at most {MOST_SECONDS:g} seconds",
                "Use for example 30s.",
            )
        if self.max_stages is not None:
            arguments.whole("max_stages", self.max_stages, at_most=MOST_DEVICES)
        if self.memory_limit is not None and not 0 <= self.memory_limit <= MOST_TOTAL_BYTES:
            raise UsageError(f"memory_limit={self.memory_limit:g}: is not a number of bytes", "Omit it.")
        if self.robust and self.planner != "best":
            raise UsageError(
                f"`{self.robust_field}` with planner={self.planner!r}: a tool's own plan leaves nothing to "
                "choose",
                "Omit one of the two.",
            )
        self._check_words()

    @property
    def robust_field(self) -> str:
        """Field by which a robust plan was asked for."""
        return "robust" if self.slow_devices is None else "slow_devices"

    def _check_words(self) -> None:
        if self.schedule in ASYNCHRONOUS:
            raise UsageError(
                f"schedule={self.schedule!r}: it is asynchronous, with late gradients and without a step",
                "Omit it: objective='throughput' chooses the best of pipedream, pipedream-2bw, xpipe, wpipe "
                "and the synchronous ones.",
            )
        modes = tuple(mode for mode in MODES if mode != "by_stage")
        for field, word, words in (
            ("recompute", self.recompute, ("auto", *modes)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
            ("precision", self.precision, ("auto", *PRECISIONS)),
            ("gradient_dtype", self.gradient_dtype, ("auto", *GRADIENT_DTYPES)),
        ):
            check_word(field, word, words, also="fp64")
        if self.zero not in ZERO_STAGES:
            raise UsageError(
                f"zero={self.zero}: there is no such stage",
                "Use 0 (nothing is spread over the replicas of a stage), 1, 2 or 3.",
            )
        if self.runtime is not None:
            find_runtime(self.runtime).check_states(self.precision, self.zero)
        limited = LIMITED_RECOMPUTE.get(self.recompute, ())
        if limited and self.schedule not in ("auto", ANY_SCHEDULE, SYNTHESIZED, *limited):
            is_last = self.recompute == "except_last"
            why = "only GPipe's backward begins with the last one" if is_last else "not searched"
            raise UsageError(
                f"recompute={self.recompute!r} with schedule={self.schedule!r}: {why}",
                "Use schedule='gpipe', or recompute='always'."
                if is_last
                else f"Use schedule={ANY_SCHEDULE!r}, 1f1b or gpipe, or recompute='auto'.",
            )
        if self.recompute in UNPROPOSED and self.zero > 1:
            raise UsageError(
                f"recompute={self.recompute!r} with zero={self.zero}: ZeRO {self.zero} gathers whole stages",
                "Use zero=1, or recompute='auto'.",
            )


TRANSFERS = ("overlapped", "blocking", "blocking-receive", "rendezvous")
"""Values of `Costs.transfers`. They are repeated here because importing numpy would slow down the help."""


def _number(form: str, help: str) -> Any:
    return option(None, arguments.optional_whole, help, form, least=1)


@options_class
class StepOptions(Options):
    """Options of a simulated step.

    Attributes:
        schedule: Schedule instead of the plan's.
        stages: Devices of the pipeline.
        micro_batches: Micro-batches of a step.
        virtual_stages: Parts of the layers per device.
        transfers: How transfers overlap with compute. The planner lets all overlap.
    """

    schedule: str | None = option(
        None,
        optional_schedule,
        "Another schedule than the plan's: a name, or your own in FILE.schedule; "
        "the cuts stay where it has as many stages.",
        "NAME|FILE",
    )
    stages: int | None = _number("N", "Devices of the pipeline; for a plan it cuts the layers anew.")
    micro_batches: int | None = _number("M", "Of a step; a plan's global batch is cut into so many.")
    virtual_stages: int | None = _number(
        "V", "Parts of the layers on each device; costs of a stage are shared by its parts equally."
    )
    transfers: Literal["overlapped", "blocking", "blocking-receive", "rendezvous"] | str = option(
        "overlapped",
        arguments.word,
        "Whether communication overlaps computation, or a stage waits for its sends, receives or both.",
        "|".join(TRANSFERS),
        words=TRANSFERS,
    )


@options_class
class Overrides(StepOptions):
    """Numbers that replace those of the plan in a simulation. None keeps the plan's.

    Attributes:
        replicas: Replicas of every stage. With another number of stages than the plan's, each has one device
            by default.
    """

    replicas: int | None = _number(
        "R", "Devices that share each stage of a plan whose layers are cut anew; default: as many as now."
    )
