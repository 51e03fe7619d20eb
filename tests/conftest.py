"""What all tests share: a profile, a plan, caches of their own, signals as in a terminal, `gpu`."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import multiprocessing
import os
import runpy
import secrets
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from math import inf
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before PyTorch is imported: several workers share the cores, and threads that wait for small work spin.

if sys.dont_write_bytecode:
    # Containers set PYTHONDONTWRITEBYTECODE; rewriting all assertions takes each worker 10 s a run. Those of
    # hypothesis are rewritten, too: it is imported behind this.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")

FORKED_PYTHON = Path(__file__).with_name("forked_python.py")
"""What a process that is forked from the server runs."""
IMPORTED_ONCE = (
    *("torch._dynamo", "torch.export._trace", "torch.distributed.run", "torchgpipe", "fairscale.nn"),
    *("transformers.models.gpt2.modeling_gpt2", "pplan.cli.verbs", "pplan.api.check"),
    *("pplan.profiler.measure", "pplan.runtimes.torch_pipelining"),
)
"""By the server."""
MOST_ACTIONS = 8_000
"""Micro-batches times stages: plans of more are not attacked in every test, which takes long."""


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


@pytest.fixture(autouse=True)
def plans_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan that `pplan.solve`, or the command line in this process, makes in a test is attacked, unless
    it is very large."""
    import pplan
    import pplan.api.solve as solve_module

    solve: Callable[..., Plan] = solve_module.solve

    @functools.wraps(solve)
    def solve_and_attack(profile: Any, **options: Any) -> Plan:
        plan = solve(profile, **options)
        topology = options.get("topology")
        attack_plan(plan, profile, Path() if topology is None else Path(topology).parent)
        return plan

    monkeypatch.setattr(solve_module, "solve", solve_and_attack)
    monkeypatch.setattr(pplan, "solve", solve_and_attack)


@pytest.fixture(autouse=True)
def published_schedules_alone() -> Iterator[None]:
    """A schedule that a test registers is known to no other."""
    from pplan.cost_models.schedules import PUBLISHED, SCHEDULES

    yield
    for name in SCHEDULES.keys() - PUBLISHED:
        del SCHEDULES[name]


@pytest.fixture(scope="session", autouse=True)
def explanations_without_a_clock() -> Iterator[None]:
    """Explanations in full, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pplan.planner.explanation.explain_context.MOST_SECONDS", inf)
        yield


@pytest.fixture(scope="session")
def solve_once() -> Callable[..., Plan]:
    """`pplan.solve`, once for the same profile and options: for tests of what is done with a plan."""
    known: dict[tuple[str, str], Plan] = {}

    def solve(profile: Profile | Path, **options: Any) -> Plan:
        import pplan

        text = profile.read_text(encoding="utf-8") if isinstance(profile, Path) else profile.to_json()
        key = (text, repr((type(profile), sorted(options.items()))))
        if key not in known:
            known[key] = pplan.solve(profile, **options)
        return known[key]

    return solve


def attack_plan(plan: Plan, profile: Any, folder: Path) -> None:
    """Fail with what `pplan.lint` and the oracle find wrong. `profile`: a Profile, or its file."""
    import pplan
    from tests.oracle import attack

    if plan.training is not None:  # from a configuration: there is no profile
        assert pplan.lint(plan).differing == []
        return
    if len(plan.stages) * plan.micro_batches > MOST_ACTIONS:
        return
    if isinstance(profile, list):  # one for each number of devices that share the layers
        profile = next(own for own in profile if Path(own).name == plan.profile.file)
    content = Path(profile).read_bytes() if isinstance(profile, str | Path) else profile.to_json()
    assert attack(plan.to_json(), content, folder) == []
    assert pplan.lint(plan, profile).differing == []


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


def pytest_configure(config: pytest.Config) -> None:
    """Examples of hypothesis may take long. xdist hands out files in the order of
    `pytest_collection_modifyitems`: its own ends with those of the fewest tests, some of which take a minute.
    Tests measure on the CPU, where there is a CUDA device too, unless `-m gpu` asks for that."""
    from hypothesis import HealthCheck, settings

    # The same examples in every run, so that none fails by chance; --hypothesis-profile=random draws others.
    slow = [HealthCheck.too_slow]
    settings.register_profile("untimed", deadline=None, suppress_health_check=slow, derandomize=True)
    settings.register_profile("random", deadline=None, suppress_health_check=slow)
    settings.load_profile(config.getoption("--hypothesis-profile") or "untimed")
    if "gpu" not in str(config.getoption("markexpr")).split():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is looked for while all modules are imported and tests listed: nothing of it is any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, a slow test taken for a hundred others: workers then end together."""
    tests = Counter(item.path for item in items)
    for item in items:
        tests[item.path] += 99 * (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -tests[item.path])
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class ForkedPython:
    """`python COMMAND...` in a folder on one thread, forked from a server that has imported PyTorch.

    Each process would take seconds to import it. Its outputs go to OUTPUT.out and OUTPUT.err.
    """

    def __init__(self, output: Path, folder: Path, *command: str | Path, **environment: str) -> None:
        self.command, self._out, self._err = [str(word) for word in command], f"{output}.out", f"{output}.err"
        job = {
            "FOLDER": str(folder),
            "COMMAND": self.command,
            "ENVIRONMENT": os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | environment,
            "OUTPUTS": (self._out, self._err),
        }
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=runpy.run_path, args=(str(FORKED_PYTHON), job))
        self.process.start()

    def wait(self, seconds: float) -> subprocess.CompletedProcess[str]:
        """What it printed; it is killed where it takes longer."""
        self.process.join(seconds)
        self.process.kill()
        self.process.join()
        status, texts = self.process.exitcode, [Path(file).read_text() for file in (self._out, self._err)]
        assert status is not None
        return subprocess.CompletedProcess(self.command, status, *texts)


@pytest.fixture(scope="session")
def forked_python() -> type[ForkedPython]:
    """Processes that use PyTorch, where the start of Python is not what is tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(list(IMPORTED_ONCE))
        forkserver.ensure_running()
    return ForkedPython


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """A port at which nothing listens, below those that a system hands out by itself: nobody else is given it
    before it is used."""

    def choose() -> int:
        while True:
            port = 20_000 + secrets.randbelow(12_000)
            with socket.socket() as bound, contextlib.suppress(OSError):
                bound.bind(("127.0.0.1", port))
                return port

    return choose


@pytest.fixture
def layout_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """megatron-core's own, without the rest of megatron-core, which takes seconds to import."""
    spec = importlib.util.find_spec("megatron")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("megatron-core is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    for name in ("megatron.core", "megatron.core.transformer"):
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, package)
    state = ModuleType("megatron.core.parallel_state")
    monkeypatch.setitem(sys.modules, state.__name__, state)
    monkeypatch.setattr(sys.modules["megatron.core"], "parallel_state", state, raising=False)
    name = "megatron.core.transformer.pipeline_parallel_layer_layout"
    yield import_module(name).PipelineParallelLayerLayout
    for left in [name, "megatron.core.transformer.enums"]:
        sys.modules.pop(left, None)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPLAN_DEBUG", raising=False)
    monkeypatch.setenv("COLUMNS", "110")
    return tmp_path


COMMANDS: dict[str, tuple[str, ...]] = {}
"""Words of the command line by the verb that tests name. A verb that is renamed gets an entry here."""


@dataclass(frozen=True)
class Ran:
    """Result of a command line."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """Lines of standard error."""
        return self.err.splitlines()


@pytest.fixture
def run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Run pplan's `main` in an empty folder, as the console script does: `run("solve", "--gpus", "2")`."""
    del here
    from pplan.cli.app import main

    def run_main(*arguments: str) -> Ran:
        verb = COMMANDS.get(arguments[0], arguments[:1]) if arguments else ()
        monkeypatch.setattr(sys, "argv", ["pplan", *verb, *arguments[1:]])
        capsys.readouterr()
        status = main()
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run_main


@pytest.fixture
def profile() -> Profile:
    """Twelve layers at two sizes, on a GPU; one cut is forbidden, one size did not fit."""
    kinds = ("Conv2d", "ReLU", "MaxPool2d", "Linear")
    layers = [
        {
            "name": f"features.{index}" if index < 9 else f"classifier[{index - 9}]",
            "kind": kinds[index % 4],
            "parameter_bytes": 2**20 * (12 - index) if index % 4 in (0, 3) else 0,
            "cut_after": index != 4,
            "cut_reason": "in-place ReLU follows" if index == 4 else None,
            "costs": [
                {
                    "micro_batch_size": size,
                    "forward_seconds": 1e-3 * size * (12 - index),
                    "backward_seconds": 2e-3 * size * (12 - index),
                    "output_bytes": 2**18 * size,
                    "saved_bytes": 2**19 * size,
                    "spread": 0.01 * (index % 3),
                    "forward_host_seconds": 2e-5,
                    "backward_host_seconds": 4e-5,
                }
                for size in (4, 8)
            ],
        }
        for index in range(12)
    ]
    whole = [
        {
            "micro_batch_size": size,
            "forward_seconds": 78e-3 * size,
            "backward_seconds": 150e-3 * size,
            "closing_ratio": 234 / 228,
            "forward_closing_ratio": 1.0,
            "backward_closing_ratio": 156 / 150,
            "spread": 0.02,
        }
        for size in (4, 8)
    ]
    return Profile.model_validate(
        {
            "schema": 1,
            "model": "toy",
            "device": "cuda:0",
            "device_name": "Toy GPU",
            "device_memory_bytes": 16 * 2**30,
            "input_shape": [3, 32, 32],
            "layers": layers,
            "whole": whole,
            "unmeasured": [{"micro_batch_size": 16, "reason": "does not fit", "detail": "out of memory"}],
            "notes": [
                "micro-batch size 16 was not measured (does not fit): out of memory",
                "The machine was busy.",
            ],
            "made_by": {
                "pplan": "0.1.0",
                "torch": "2.15.0",
                "cuda": "13.0",
                "time": "2026-01-02T03:04:05+00:00",
            },
        }
    )


@pytest.fixture
def plan(profile: Profile) -> Plan:
    """Three stages over six of eight GPUs, one with four replicas."""
    names = [layer.name for layer in profile.layers]
    bounds = [(0, 3, [0, 1, 2, 3]), (4, 8, [4]), (9, 11, [5])]
    stages = [
        {
            "first_layer": first,
            "last_layer": last,
            "replicas": len(devices),
            "devices": devices,
            "forward_seconds": 0.012,
            "backward_seconds": 0.024,
            "memory_bytes": 3 * 2**30,
            "memory_limit_bytes": 16 * 2**30,
            "memory": {"weights": 2**30, "gradients": 2**30, "optimizer": 0, "stage_inputs": 2**30},
        }
        for first, last, devices in bounds
    ]
    return Plan.model_validate(
        {
            "schema": 1,
            "model": "toy",
            "balance": [4, 5, 3],
            "mini_batch": 64,
            "micro_batches": 16,
            "micro_batch_size": 4,
            "schedule": "1f1b",
            "recompute": "never",
            "gpus": 8,
            "topology": "8 Toy GPUs of 16 GiB",
            "stages": stages,
            "prediction": {
                "step_seconds": 0.65,
                "samples_per_second": 64 / 0.65,
                "bubble": 0.11,
                "lower_bound_seconds": 0.65,
                "gap": 0.0,
                "exact": True,
            },
            "baselines": [
                {"name": "one-gpu", "step_seconds": None, "reason": "does not fit"},
                {"name": "data-parallel", "step_seconds": 0.7, "detail": "2 micro-batches"},
                {"name": "even", "step_seconds": 1.3},
            ],
            "alternatives": [
                {
                    "runtimes": ["torchgpipe", "fairscale"],
                    "balance": [1, 1, 1, 1, 2, 2, 2, 2],
                    "schedule": "gpipe",
                    "micro_batches": 16,
                    "micro_batch_size": 4,
                    "recompute": "except_last",
                    "step_seconds": 0.8,
                    "memory_bytes": [2**30] * 8,
                }
            ],
            "searched": "all straight and replicated pipelines",
            "notes": ["The mini-batch is 8 GPUs x 8."],
            "layer_names": names,
            "profile": {"file": "toy.profile.json", "sha256": "0" * 64},
            "made_by": {"pplan": "0.1.0"},
        }
    )


GOLDEN = Path(__file__).parent / "golden"
MOST_COLUMNS = 110
"""Of a line of a golden file that is one value."""


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with a file of tests/golden; PPLAN_UPDATE_GOLDEN=1 rewrites the file instead."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        if os.environ.get("PPLAN_UPDATE_GOLDEN") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def as_text() -> Callable[[object], str]:
    """A value in lines, a field or an entry each: numbers to seven digits, without what is empty."""
    return lambda value: "\n".join(_lines("", _plain(value)))


def _plain(value: Any) -> Any:
    """Of dictionaries, lists and words alone."""
    match value:
        case None | "":
            return None
        case str() | bool():
            return str(value)
        case float():
            return f"{value:.7g}"
        case np.generic() | np.ndarray():
            return _plain(value.tolist())
        case BaseModel():
            return _plain({name: getattr(value, name) for name in type(value).model_fields})
        case Mapping():
            rows = {str(key): _plain(each) for key, each in value.items()}
            return {key: each for key, each in rows.items() if each not in (None, [], {})}
        case _ if is_dataclass(value):
            return _plain({own.name: getattr(value, own.name) for own in fields(value) if own.compare})
        case Set():
            return sorted(map(str, map(_plain, value)))
        case Iterable():
            return ["-" if (own := _plain(each)) is None else own for each in value]
        case _:
            return getattr(value, "__name__", type(value).__name__ if " at 0x" in str(value) else str(value))


def _lines(name: str, value: Any) -> Iterator[str]:
    """Of a value that is called so."""
    line = f"{name}: {_in_line(value)}".removeprefix(": ")
    if isinstance(value, str) or (name and len(line) <= MOST_COLUMNS):
        yield line
        return
    rows = value.items() if isinstance(value, dict) else (("-", each) for each in value)
    if name:
        yield f"{name}:"
    for key, each in rows:
        yield from (f"{'  ' if name else ''}{own}" for own in _lines(key, each))


def _in_line(value: Any) -> str:
    match value:
        case dict():
            return "{" + ", ".join(f"{key}: {_in_line(each)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(_in_line, value)) + "]"
        case _:
            return str(value)
