"""Options of a check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..cost_models import arguments
from ..cost_models.arguments import Converted, Options, option, options_class, settings_option
from ..cost_models.errors import UsageError
from ..cost_models.quantities import parse_time
from ..cost_models.runtime import RUNNABLE


def _settings(name: str, value: Any) -> dict[str, object]:
    return arguments.settings(name, value) or {}


def _check_device(name: str, value: Any) -> str:
    if arguments.word(name, value) not in ("auto", "cpu", "cuda"):
        raise UsageError(f"device {value!r} is not known", "Use auto, cpu or cuda.")
    return str(value)


@options_class
class CheckOptions(Options):
    """The options of a check. Raises UsageError.

    `runtime`: torch (torch.distributed.pipelining), torchgpipe, fairscale or deepspeed. `model`, `loss` and
    `input_like` of yours, where the profile's are not taken (their code is imported then, and else never),
    with `settings`, what the model was profiled with. `device`: CUDA with a GPU each, "cpu" with one thread
    each, or what there is enough of. `emulate`: the stages wait as long as the plan says they compute.
    `even`: the even split of as many stages runs beside it. `calibrate`: other schedules run first,
    overhead, link and slowdown are fitted to them, and the fit is kept only if it improves the prediction of
    cases that were not fitted; `calibration`: a file of what was fitted before. `steps`: how many are timed.
    `log`: where scalars are written to. `timeout`: seconds after which a step that does not end is given up
    (None: 120, or several times what it is predicted to take).
    """

    model: str | None = option(
        None,
        arguments.optional_word,
        "The model, where it is your own: package.module:factory. A file's word runs no code.",
        "NAME",
    )
    settings: Converted[Mapping[str, object] | None, Mapping[str, Any]] = settings_option(
        "As the model was profiled with; repeatable.", _settings
    )
    loss: str | None = option(
        None,
        arguments.optional_word,
        "The loss, where it is your own: package.module:function.",
        "NAME",
    )
    input_like: str | None = option(
        None,
        arguments.optional_word,
        "The function that the example input is of, where the model was profiled with one.",
        "MODULE:FUNCTION",
    )
    runtime: str = option(
        "torch",
        arguments.word,
        f"What runs it: {', '.join(RUNNABLE)}.",
        "NAME",
        words=RUNNABLE,
    )
    device: Converted[Literal["auto", "cpu", "cuda"] | str, Literal["auto", "cpu", "cuda"]] = option(
        "auto",
        _check_device,
        "auto: CUDA where there are enough GPUs, else a core for each process.",
        "auto|cpu|cuda",
        words=("auto", "cpu", "cuda"),
    )
    emulate: bool = option(
        False,
        arguments.flag,
        "Stages wait as long as the plan says they compute: for more devices than this machine has.",
    )
    even: bool = option(True, arguments.flag, "Do not run the even split beside the plan.", flag="no-even")
    calibrate: bool = option(
        False,
        arguments.flag,
        "Run other schedules first and fit overhead, link and slowdown to them. Only if that improves the "
        "prediction of cases that were not fitted, write it beside the plan and solve again; else end with "
        "status 4.",
    )
    calibration: Converted[str | Path | None, Path | None] = option(
        None, arguments.optional_path, "Corrections that an earlier `calibrate` wrote.", "FILE"
    )
    log: str | None = option(
        None,
        arguments.optional_word,
        "Write the scalars to TensorBoard, W&B or MLflow: tensorboard:FOLDER, wandb[:PROJECT], mlflow.",
        "LOGGER",
    )
    steps: int = option(5, arguments.whole, "Steps that are timed.", "N", least=1)
    timeout: float | None = option(
        None,
        arguments.optional_number,
        "How long a step may take before the check gives up; default: 120 s, or more where the plan says so.",
        "120s",
        read=parse_time,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibrate and self.calibration is not None:
            raise UsageError("check: both `calibrate` and `calibration`", "Give one of them.")
        if self.timeout is not None and self.timeout < 1:
            raise UsageError(f"timeout={self.timeout:g}: must be at least 1 s", "For example: timeout=120.")
