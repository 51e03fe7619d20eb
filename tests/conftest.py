"""What all tests share: caches of their own, garbage collections that are quick, tests marked `gpu`."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Iterator[Path]]:
    """Caches that are not the user's: one for what modules share, and as many more as are asked for."""
    base = tmp_path_factory.mktemp("cache")
    before = os.environ.get("PPLAN_CACHE")
    os.environ["PPLAN_CACHE"] = str(base / "shared")
    yield (base / str(number) for number in itertools.count())
    del os.environ["PPLAN_CACHE"]
    if before is not None:
        os.environ["PPLAN_CACHE"] = before


@pytest.fixture(autouse=True)
def own_cache(cache_folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own cache, which is not made before it is used."""
    folder = next(cache_folders)
    monkeypatch.setenv("PPLAN_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module", autouse=True)
def no_collection_of_what_is_old() -> None:
    """What is there before a module's tests, such as all of torch, is left out of garbage collections.

    The profiler collects after every micro-batch size, which would go through all of it each time.
    """
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """For extensions that tell of what is left when Python ends."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()
