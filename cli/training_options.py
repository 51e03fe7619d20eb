"""The options that say what is wished of a plan, which several verbs have, as `PlanOptions`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from ..cost_models.errors import UsageError
from ..cost_models.optimizers import OPTIMIZERS
from ..cost_models.precision import GRADIENT_DTYPES, PRECISIONS
from ..cost_models.quantities import parse_seconds
from ..cost_models.runtime import RUNTIMES
from ..planner.plan_options import PlanOptions
from .options import number_or_auto, whole_number, word


def _training(name: str, metavar: str, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="The training", **more)


def _search(name: str, metavar: str | None, text: str, **more: Any) -> Any:
    return typer.Option(name, metavar=metavar, help=text, rich_help_panel="The search", **more)


Runtime = Annotated[
    str | None, _training("--runtime", "NAME", f"Only plans that it can run: {', '.join(RUNTIMES)}.")
]
MiniBatch = Annotated[
    int | None,
    _training(
        "--mini-batch",
        "B",
        "Global batch: samples of one optimizer step; default: about 32 for each GPU.",
        parser=whole_number("--mini-batch", at_least=1),
    ),
]
MicroBatches = Annotated[
    str, _training("--micro-batches", "M|auto", "How many equal parts the global batch is cut into.")
]
Schedule = Annotated[
    str,
    _training(
        "--schedule",
        "1f1b|gpipe|...|auto",
        "Order of each stage's forwards and backwards, as of pplan schedules; auto: of gpipe and 1f1b.",
    ),
]
Recompute = Annotated[
    str,
    _training(
        "--recompute",
        "never|always|except-last|auto",
        "Whether to run forward again in backward, which saves memory.",
        parser=word("--recompute", ("never", "always", "except-last", "auto")),
    ),
]
Optimizer = Annotated[
    str,
    _training(
        "--optimizer",
        "|".join(OPTIMIZERS),
        "Optimizer (sets state memory).",
        parser=word("--optimizer", OPTIMIZERS),
    ),
]
Precision = Annotated[
    str,
    _training(
        "--precision",
        "|".join(PRECISIONS),
        "Of weights and states; default: mixed if the profile is 16-bit or of autocast, else fp32.",
        parser=word("--precision", ("auto", *PRECISIONS)),
    ),
]
GradientDtype = Annotated[
    str,
    _training(
        "--gradient-dtype",
        "|".join(GRADIENT_DTYPES),
        "Type of accumulated gradients; default: that of the weights (Megatron, DeepSpeed: fp32 for bf16).",
        parser=word("--gradient-dtype", ("auto", *GRADIENT_DTYPES)),
    ),
]
Zero = Annotated[
    int,
    _training(
        "--zero",
        "0|1|2|3",
        "What replicas of a stage spread: 1 optimizer states, 2 gradients too, 3 weights too.",
        parser=whole_number("--zero", at_least=0),
    ),
]
Planner = Annotated[
    str,
    _search("--planner", "NAME", "best: the joint search; or what a known tool would do: pplan compare."),
]
TimeLimit = Annotated[
    str, _search("--time-limit", "30s", "Processor time for the whole answer; the search counts its work.")
]
UseAll = Annotated[bool, _search("--use-all", None, "No GPU may stay free, even where fewer are faster.")]
MaxStages = Annotated[
    int | None,
    _search("--max-stages", "N", "At most so many stages.", parser=whole_number("--max-stages", at_least=1)),
]
Robust = Annotated[
    bool,
    _search("--robust", None, "The fastest at the 90th percentile, as the layers' seconds vary."),
]
CutAfter = Annotated[list[str], _search("--cut-after", "LAYER", "A stage must end there. Can be repeated.")]
KeepTogether = Annotated[
    list[str],
    _search("--keep-together", "PATTERN", "No cut between layers of such names: layer1.*. Can be repeated."),
]
Pin = Annotated[list[str], _search("--pin", "LAYER=stageN", "The stage of a layer, from 0. Can be repeated.")]


@dataclass(frozen=True)
class TrainingOptions:
    """What the options hold, as typed."""

    runtime: str | None
    mini_batch: int | None
    micro_batches: str
    schedule: str
    recompute: str
    optimizer: str
    planner: str = "best"
    time_limit: str = "30s"
    use_all: bool = False
    max_stages: int | None = None
    cut_after: Sequence[str] = ()
    keep_together: Sequence[str] = ()
    pin: Sequence[str] = ()
    robust: bool = False
    precision: str = "auto"
    gradient_dtype: str = "auto"
    zero: int = 0

    def wishes(self) -> PlanOptions:
        """Raises UsageError."""
        return PlanOptions(
            mini_batch=self.mini_batch,
            micro_batches=number_or_auto(self.micro_batches, "--micro-batches"),
            schedule=self.schedule,
            recompute=self.recompute.replace("-", "_"),
            optimizer=self.optimizer,
            precision=self.precision,
            gradient_dtype=self.gradient_dtype,
            zero=self.zero,
            runtime=self.runtime,
            planner=self.planner,
            time_limit=parse_seconds(self.time_limit, name="--time-limit"),
            use_all=self.use_all,
            max_stages=self.max_stages,
            cut_after=tuple(self.cut_after),
            keep_together=tuple(self.keep_together),
            pins=tuple(pinned(text) for text in self.pin),
            robust=self.robust,
        )


def pinned(text: str) -> tuple[str, int]:
    """`features.10=stage1` as a layer and a stage. Raises UsageError."""
    found = re.fullmatch(r"(.+)=(?:stage)?(\d+)", text)
    if not found:
        raise UsageError(f"--pin {text}: is not a layer and its stage", "Write --pin features.10=stage1.")
    return found[1], int(found[2])
