"""What all tests share: caches of their own, signals as in a terminal, quick garbage collections, `gpu`."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pplan.planner.plan_file import Plan

SHARED_PORTS = True
"""Whether the simulator lets transfers and sums of gradients wait at the ports that they share."""
MOST_ACTIONS = 2_000
"""Micro-batches times stages: plans of more are not verified in every test, which takes long."""


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


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Signals that the caller ignores are not ignored by the tests' child processes.

    Shells start background jobs with SIGINT ignored, and so do some CI runners; programs inherit it, and a
    child that is to be interrupted would go on for ever.
    """
    defaults: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    ignored = [number for number in defaults if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, defaults[number])
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, defaults)
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def shared_ports() -> bool:
    """As `verify` takes it."""
    return SHARED_PORTS


@pytest.fixture(autouse=True)
def plans_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan that `pplan.solve` makes in a test is verified, unless it is very large."""
    import pplan

    solve: Callable[..., Plan] = pplan.solve

    @functools.wraps(solve)
    def solve_and_verify(profile: Any, **options: Any) -> Plan:
        plan = solve(profile, **options)
        topology = options.get("topology")
        verify_plan(plan, profile, Path() if topology is None else Path(topology).parent)
        return plan

    monkeypatch.setattr(pplan, "solve", solve_and_verify)


def verify_plan(plan: Plan, profile: Any, folder: Path) -> None:
    """Fails with the lines that differ. `profile`: a Profile, or its file."""
    from pplan.verification.verify import Sources, verify

    if len(plan.stages) * plan.micro_batches > MOST_ACTIONS:
        return
    is_file = isinstance(profile, str | Path)
    content = Path(profile).read_bytes() if is_file else profile.to_json().encode()
    sources = Sources(plan.to_json().encode(), "plan", content, "profile", is_file, folder)
    report = verify(sources, shared_ports=SHARED_PORTS)
    assert report.agrees, report.differing


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
