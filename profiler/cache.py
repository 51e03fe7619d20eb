"""The cache of finished profiles and journals, found by a key of the model and its conditions."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar

import filelock
import platformdirs
import torch
from torch import Tensor, fx, nn

from ..cost_models.document import Record
from ..cost_models.errors import FileError
from ..cost_models.text_files import is_unchanged, read_text, sha256, write_whole
from .journal import Journal
from .layer_sequential import modules_used, tensors_used
from .layers import Layer, LayerChain
from .local_machine import device_memory_bytes, device_name, versions
from .measurement_target import MeasurementTarget
from .profile_file import Profile
from .profile_warnings import misses_whole
from .torch_private import tree_flatten

# A key of a model and of the conditions it is measured under, whatever the model's name.
#
# Part of the key are the user's own source files, which decide how the model computes.

_SIMPLE = (bool, int, float, str, type(None), torch.dtype)


_VARIABLES = (
    *("ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "BLIS_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32", "NCCL_", "TORCH", "PYTORCH_", "LD_PRELOAD"),
)
"""How names of environment variables begin that decide which kernels run, on how many threads."""
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_OF_NO_SPEED = ("TORCH_HOME", "TORCH_HUB", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "CUDA_CACHE_PATH")


_HERE = Path(__file__).resolve().parents[1]
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, whichever environments are stacked."""
_VERSIONED = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    *(_HERE / folder for folder in ("pplan", "profiler", "runtimes", "planner", "cost_models", "cli")),
)
"""Python's own files and pplan's."""


def fingerprint(subject: MeasurementTarget) -> str:
    """Hexadecimal SHA-256 of all that decides what a profile holds, but for chance.

    Of the layers: names, kinds, cuts, modules with their settings and source code, parameters and buffers by
    shape and dtype. Of the conditions: input, dtype, device, modes, loss, seed, threads, versions. Neither
    the model's name nor any value of its weights or of its input is in it. Of code, the files of the model's
    classes and functions count, and all files of the user's that these import.
    """
    content = {"layers": _chain(subject.chain), **_input(subject), **_conditions(subject), **_code(subject)}
    # Addresses are others in every process.
    return sha256(re.sub("0x[0-9a-fA-F]+", "", json.dumps(content, sort_keys=True)))


def _chain(chain: LayerChain) -> dict[str, Any]:
    numbers: dict[int, int] = {}
    return {
        "granularity": chain.granularity,
        "keep_together": chain.keep_together,
        "edges": chain.edges,
        "overwrites_input": chain.overwrites_input,
        "each": [_layer(layer, numbers) for layer in chain.layers],
    }


def _layer(layer: Layer, numbers: dict[int, int]) -> dict[str, Any]:
    """`numbers`: of the tensors of the layers so far, so that one that is shared is told from two alike."""
    tensors = list(tensors_used(layer.module))
    return {
        "name": layer.name,
        "kind": layer.kind,
        "cut": layer.cut_reason,
        "crossing": layer.crossing,
        "modules": [_module(module) for module in modules_used(layer.module)],
        "tensors": [[numbers.setdefault(id(each), len(numbers)), *_tensor(each)] for each in tensors],
    }


def _module(module: nn.Module) -> dict[str, Any]:
    """How a module computes. That of a traced one is its graph; torch's own are of torch's version."""
    kind = type(module)
    if isinstance(module, fx.GraphModule):
        return {"training": module.training, "code": module.code, "functions": list(_functions(module))}
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "told": module.extra_repr(),
        "settings": {name: _setting(value) for name, value in vars(module).items()},
        "source": _source(kind),
    }


def _code(subject: MeasurementTarget) -> dict[str, Any]:
    """Files of the user's, and versions of the installed packages."""
    modules = {part for layer in subject.chain.layers for part in modules_used(layer.module)}
    classes = {kind for part in modules for kind in type(part).__mro__}
    settings = [value for part in modules for value in vars(part).values()]
    functions = [
        node.target for part in modules if isinstance(part, fx.GraphModule) for node in part.graph.nodes
    ]
    loss = [] if subject.loss is None else [subject.loss.function]
    sources = (*classes, *settings, *(type(value) for value in settings), *functions, *loss)
    names = {name for one in sources if isinstance(name := getattr(one, "__module__", None), str)}
    return {"sources": hash_sources(names), "packages": list_versions(names)}


def _functions(module: fx.GraphModule) -> Iterator[tuple[str, str]]:
    """Those that the graph calls and that are not torch's."""
    for node in module.graph.nodes:
        if node.op == "call_function":
            yield getattr(node.target, "__qualname__", str(node.name)), _source(node.target)


def _setting(value: object) -> object:
    """Plain values as they are, and functions by their code; of other things, only that they are there."""
    if isinstance(value, _SIMPLE):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_setting(one) for one in value]
    if callable(value) and not isinstance(value, nn.Module):
        return [getattr(value, "__qualname__", ""), _source(value)]
    return type(value).__qualname__


def _source(definition: Any) -> str:
    """Source of the file that a class or a function is from, with what it calls there; else its own.

    None of torch, which has a version.
    """
    target = definition.__func__ if isinstance(definition, MethodType) else definition
    if str(getattr(target, "__module__", "")).split(".")[0] in ("torch", "_operator", "math", "builtins"):
        return ""
    for one in (inspect.getmodule(target), target):
        with suppress(OSError, TypeError):
            return sha256(inspect.getsource(one))  # type: ignore[arg-type]
    return target.__code__.co_code.hex() if isinstance(target, FunctionType) else ""


def _tensor(tensor: Tensor) -> list[Any]:
    return [list(tensor.shape), str(tensor.dtype), tensor.requires_grad, list(tensor.stride())]


def _input(subject: MeasurementTarget) -> dict[str, Any]:
    """Shapes of two samples, dtypes, and what else forward is given."""
    example = subject.loaded.example_input_for(2).to(dtype=subject.dtype)
    leaves, form = tree_flatten((example.args, example.kwargs))
    tensors = [
        [list(leaf.shape), str(leaf.dtype)] if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    ]
    return {"input": tensors, "form": str(form)}


def _conditions(subject: MeasurementTarget) -> dict[str, Any]:
    device, modes, loss, packages = subject.device, subject.modes, subject.loss, versions()
    return {
        "dtype": str(subject.dtype),
        "training": subject.loaded.module.training,
        "device": [device.type, device_name(device), device_memory_bytes(device)],
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "modes": [modes.compile, modes.channels_last, modes.amp, modes.tf32, modes.cudnn_benchmark],
        "environment": _environment(),
        "process": _kernel_choices(),
        "loss": None if loss is None else [loss.name, _source(loss.function)],
        "seed": subject.seed,
        "versions": [
            packages.pplan,
            packages.python,
            packages.torch,
            packages.cuda,
            packages.driver,
            platform.platform(),
        ],
    }


def _kernel_choices() -> list[bool]:
    """What is set in the process, besides the modes."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    return [
        *(cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        torch.are_deterministic_algorithms_enabled(),
        *(
            bool(getattr(cuda, f"{kind}_sdp_enabled")())
            for kind in ("flash", "mem_efficient", "math", "cudnn")
        ),
        bool(cuda.matmul.allow_fp16_reduced_precision_reduction),
    ]


def _environment() -> dict[str, Any]:
    """What decides, besides the threads, which kernels run and how fast."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_OF_NO_SPEED)
    }
    return {
        "variables": variables,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "onednn": torch.backends.mkldnn.enabled,
        "interop_threads": torch.get_num_interop_threads(),
        "matmul": torch.get_float32_matmul_precision(),
    }


def hash_sources(modules: Iterable[str]) -> dict[str, str]:
    """SHA-256 by the name of each of these Python modules, and of all that they import, that is the user's.

    Imports inside functions count where they have been run. Installed packages and Python's own modules
    have versions, and are left out with what they import.
    """
    hashes: dict[str, str] = {}
    pending = list(modules)
    while pending:
        name = pending.pop()
        module = sys.modules.get(name)
        file = None if module is None or name in hashes else _own_file(module)
        if module is None or file is None:
            continue
        with suppress(OSError, ValueError, SyntaxError):
            text = file.read_bytes()
            hashes[name] = sha256(text.decode("utf-8", errors="replace"))
            pending += _imported(ast.parse(text), module)
    return hashes


def list_versions(modules: Iterable[str]) -> dict[str, str]:
    """What the installed packages of these modules call their versions."""
    packages = {name.partition(".")[0] for name in modules}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: version for name, version in versions.items() if isinstance(version, str)}


def _own_file(module: ModuleType) -> Path | None:
    """None for what is installed, and for what has no source."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith(".py"):
        return None
    file = Path(path).resolve()
    if _INSTALLED.intersection(file.parts) or any(file.is_relative_to(folder) for folder in _VERSIONED):
        return None
    return file


def _imported(tree: ast.Module, module: ModuleType) -> Iterator[str]:
    """Names of what a file imports anywhere, modules and what may be one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):
                relative = "." * node.level + (node.module or "")
                base = importlib.util.resolve_name(relative, getattr(module, "__package__", None))
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


# The cache: finished profiles and the journals of unfinished ones, in a folder of the user's.
#
# Both are found by what was measured (see `fingerprint`), never by a name.

SUPERUSER = 0


def cache_folder() -> Path:
    """$PPLAN_CACHE, else where the platform keeps caches: ~/.cache/pplan or in $XDG_CACHE_HOME on Linux.

    Raises RuntimeError without a home.
    """
    folder = os.environ.get("PPLAN_CACHE")
    if folder:
        return Path(folder)
    cache = platformdirs.user_cache_path("pplan", appauthor=False)
    if not cache.is_absolute():
        raise RuntimeError("the user has no home directory")
    return cache


class Request(Record):
    """How much of a model was to be measured."""

    sizes: tuple[int, ...] | None
    budget_seconds: float
    rounds: int | None
    parts: bool
    memory_bytes: int | None

    def answers(self, other: Request) -> bool:
        """Whether what was measured for this is good enough for `other`: the same, and no longer."""
        longer = other.budget_seconds > self.budget_seconds and other.rounds is None
        return not longer and self == other.model_copy(update={"budget_seconds": self.budget_seconds})


class StoredProfile(Profile):
    """A profile in the cache."""

    kind: ClassVar[str] = "profile"

    request: Request


@dataclass(frozen=True)
class ProfileCache:
    """Takes profiles from the folder and puts them there. `folder` None: nothing is stored.

    `resume`: an interrupted profile is continued. `remark` is told what a user should know.
    """

    folder: Path | None
    resume: bool = False
    remark: Callable[[str], None] = lambda _: None

    @classmethod
    def of_user(cls, *, cache: bool, resume: bool, remark: Callable[[str], None] | None) -> ProfileCache:
        """In the user's folder, which is made; to resume is to keep."""
        tell = remark or (lambda _: None)
        if not (cache or resume):
            return cls(None)
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError) as error:
            tell(f"Nothing is kept for a later run: {error}")
            return cls(None)
        return cls(folder, resume, tell)

    def profile(
        self,
        subject: MeasurementTarget,
        request: Request,
        measure: Callable[[Journal | None], Profile],
        *,
        way: str = "",
    ) -> Profile:
        """The one that is kept, or what `measure` makes.

        `way`: another way of measuring the same, of which there is no journal.
        """
        if self.folder is None:
            return measure(None)
        key = fingerprint(subject) + way
        path = self.folder / f"{key}.profile.json"
        stored = self._stored(path, request)
        if stored is not None:
            loaded = subject.loaded
            entry = {
                "model": loaded.name,
                "classes": loaded.classes,
                "settings": loaded.settings_in_json,
            }
            return stored.model_copy(update=entry)
        if way:
            profile = measure(None)
            self._store(path, profile, request)
            return profile
        journal = self._journal(self.folder / f"{key}.journal", key, len(subject.chain))
        done = False
        try:
            profile = measure(journal)
            self._store(path, profile, request)
            done = True
        finally:
            if journal is not None and (done or not journal.is_worth_keeping):
                journal.remove()
            elif journal is not None:
                journal.close()
        return profile

    def _stored(self, path: Path, request: Request) -> Profile | None:
        """What cannot be read, was edited, or is of another user, counts as not there."""
        try:
            text = read_text(path, "profile")
            if not is_unchanged(text) or not _is_own(path):
                return None
            stored = StoredProfile.parse(text, str(path))
            profile = Profile.parse(text, str(path))
        except (FileError, OSError):
            return None
        if not stored.request.answers(request) or misses_whole(profile):
            return None
        self.remark(f"Taken from the cache of {profile.made_by.time}; `cache=False` measures anew")
        return profile

    def _journal(self, path: Path, key: str, layers: int) -> Journal | None:
        try:
            journal = Journal.open(path, key, layers, resume=self.resume)
        except filelock.Timeout:
            self.remark("Another process measures the same: this one keeps no journal for `resume`")
            return None
        except OSError as error:
            self.remark(f"No journal is kept for `resume`: {error}")
            return None
        if journal.passes:
            self.remark(f"Continuing an interrupted profile: {journal.passes} passes of it are kept")
        elif self.resume:
            self.remark("There is no interrupted profile of this to resume: measuring from the beginning")
        elif journal.passes_in_file:
            self.remark(
                f"An interrupted profile of this, of {journal.passes_in_file} passes, is begun anew; "
                "`resume` would have continued it"
            )
        return journal

    def _store(self, path: Path, profile: Profile, request: Request) -> None:
        """Not where the layers do not add up to the model: measuring again may do better."""
        if misses_whole(profile):
            self.remark(
                "Not put into the cache, a later run measures anew: the layers do not add up to the model"
            )
            return
        stored = StoredProfile.model_validate({**profile.model_dump(by_alias=True), "request": request})
        with suppress(OSError):
            path.unlink()  # It was no profile that could be taken.
        try:
            write_whole(path, stored.to_json(), force=True)
        except FileError as error:
            self.remark(f"Not put into the cache: {error.what}")


def _is_own(path: Path) -> bool:
    """Whether the file is this user's. Raises OSError."""
    return not hasattr(os, "geteuid") or path.stat().st_uid in (os.geteuid(), SUPERUSER)
