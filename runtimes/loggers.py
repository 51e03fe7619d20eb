"""Scalars of checks and trainings for TensorBoard, Weights & Biases or MLflow, where installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..cost_models.errors import MachineError, UsageError

__all__ = ["Logger", "make_logger"]

Logger = Callable[[int, Mapping[str, float]], object]
"""Called with the number of a step and its scalars by name."""


def make_logger(name: str) -> Logger:
    """Make a logger.

    Args:
        name: "tensorboard:FOLDER", "wandb", "wandb:PROJECT" or "mlflow". Without a project, Weights & Biases
            and MLflow log to the run that is active.

    Returns:
        The logger.

    Raises:
        UsageError: The name is none of these.
        MachineError: The package is not installed.
    """
    kind, _, place = name.partition(":")
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    if kind not in makers or (kind == "tensorboard" and not place) or (kind == "mlflow" and place):
        raise UsageError(
            f"logger {name!r} is not known", "Use tensorboard:FOLDER, wandb, wandb:PROJECT or mlflow."
        )
    try:
        return makers[kind](place)
    except ImportError as error:
        raise MachineError(f"{kind} is not installed: {error}", f"Install it: pip install {kind}") from None


def _tensorboard(folder: str) -> Logger:
    from torch.utils.tensorboard import SummaryWriter

    make: Any = SummaryWriter
    writer = make(folder)

    def log(step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _wandb(project: str) -> Logger:
    import wandb

    run: Any = wandb.init(project=project) if project else wandb.run or wandb.init()
    return lambda step, scalars: run.log(dict(scalars), step=step)


def _mlflow(_: str) -> Logger:
    import mlflow

    return lambda step, scalars: mlflow.log_metrics(dict(scalars), step=step)
