"""How transformers is used here: imported late, without the network and without a word."""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from ...cost_models.errors import MachineError
from ..user_model.failures import first_line


@contextlib.contextmanager
def transformers_session() -> Iterator[Any]:
    """The module `transformers`. Inside: no network, no log, no warning, float32; afterwards all as before.

    Raises MachineError where it is not installed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        transformers = _imported()
        stack.enter_context(_silent(transformers))
        stack.enter_context(_offline())
        stack.enter_context(_float32())
        yield transformers


def _imported() -> Any:
    # By name, and not by `import`: its types are its own affair, and reading them takes mypy a minute.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MachineError(
            f"models named hf: need transformers, which cannot be imported: {first_line(error)}",
            'pip install "pplan[transformers]"',
        ) from error


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        log.set_verbosity(before)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, which is read only once, when the package is imported."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
