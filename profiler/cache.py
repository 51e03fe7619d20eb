"""The cache of finished profiles and journals, in a folder of the user's; found without torch."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import platformdirs

from ..cost_models.document import Record
from ..cost_models.errors import FileError, UsageError
from ..cost_models.quantities import is_positive
from ..cost_models.text_files import is_unchanged, read_text, sha256, write_whole
from .names import TRANSFORMERS, find_configuration, may_name
from .profile_file import Profile, misses_whole

if TYPE_CHECKING:
    from .journal import Journal
    from .profile_options import ProfileOptions
    from .user_model import LoadedModel

_VARIABLES = (
    *("ATEN_", "OMP_", "GOMP_", "KMP_", "MKL_", "DNNL_", "ONEDNN_", "OPENBLAS_", "BLIS_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_TF32", "NCCL_", "TORCH", "PYTORCH_", "LD_PRELOAD"),
)
"""How names of environment variables begin that decide which kernels run, on how many threads."""
_OF_NO_SPEED = (
    *("TORCH_HOME", "TORCH_HUB", "TORCH_LOGS", "TORCH_SHOW_CPP_STACKTRACES", "CUDA_CACHE_PATH"),
    "TORCHINDUCTOR_CACHE_DIR",
)
_SETTINGS = (
    *("get_num_threads", "get_num_interop_threads", "get_default_dtype", "backends.cpu.get_cpu_capability"),
    *("are_deterministic_algorithms_enabled", "get_float32_matmul_precision", "backends.fp32_precision"),
    *(f"backends.cudnn.{name}" for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(f"backends.cuda.{kind}_sdp_enabled" for kind in ("flash", "mem_efficient", "math", "cudnn")),
    *(f"backends.cudnn.{name}fp32_precision" for name in ("", "conv.", "rnn.")),
    *(f"backends.mkldnn.{name}fp32_precision" for name in ("", "matmul.", "conv.", "rnn.")),
    *("backends.mkldnn.enabled", "backends.cuda.matmul.fp32_precision", "backends.cuda.matmul.allow_tf32"),
    *(f"backends.cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
    "backends.cuda.matmul.allow_fp16_accumulation",
)
"""Settings of a process that select kernels, by their names under `torch`."""
_PACKAGES = ("pplan", "torch", "torchvision", "transformers", "huggingface-hub")
_NOT_OF_A_KEY = ("cache", "resume", "budget_seconds", "micro_batch_sizes", "calibrate")
"""Options that a request holds, or that change no measurement."""


def environment() -> list[Any]:
    """List what decides, outside of the process, which kernels run and how fast; and pplan's own files."""
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_VARIABLES) and not name.startswith(_OF_NO_SPEED)
    }
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return [variables, processors, platform.platform(), platform.python_version(), _stamps(_own_files())]


def process_state() -> list[Any] | None:
    """List what is set in this process besides the modes; None where torch is not loaded yet."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return None
    return [_setting(torch, name) for name in _SETTINGS]


def _setting(torch: Any, name: str) -> str | None:
    """None where this torch has none, or does not tell, since others were set by their new names."""
    with suppress(AttributeError, RuntimeError):
        value = attrgetter(name)(torch)
        return str(value() if callable(value) else value)
    return None


def name_key(name: str, options: ProfileOptions) -> str | None:
    """Compute the key of a model that its name and the options determine: of torchvision or transformers.

    Args:
        name: The model's name.
        options: How it is built and measured.

    Returns:
        64 hexadecimal digits; None for models, inputs and losses that are the user's code, and where nothing
        is timed.
    """
    kind = name.removeprefix(TRANSFORMERS)
    file = find_configuration(kind) if kind != name or name.endswith(".json") else None
    is_code = ":" in (options.loss or "") or options.input_like is not None
    is_timed = options.device is None or options.device.partition(":")[0] in ("cpu", "cuda")
    if is_code or not is_timed or not (file or may_name(name)):
        return None
    values = {key: value for key, value in vars(options).items() if key not in _NOT_OF_A_KEY}
    content = [
        name if file or kind != name else name.lower(),
        None if file is None else file.read_text(encoding="utf-8", errors="replace"),
        values,
        [_version(package) for package in _PACKAGES],
        environment(),
        _devices(),
        process_state(),
    ]
    return sha256(json.dumps(content, sort_keys=True, default=repr))


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _devices() -> list[str]:
    """The processor and all GPUs with their driver, as Linux tells without torch."""
    texts = []
    for file in (*Path("/proc/driver/nvidia").glob("gpus/*/information"), Path("/proc/cpuinfo")):
        with suppress(OSError):
            lines = file.read_text(errors="replace").splitlines()
            texts += [line for line in lines if re.match(r"(?i)model|(gpu|bus|gpu uuid)\b", line)]
    with suppress(OSError):
        texts.append(Path("/proc/driver/nvidia/version").read_text(errors="replace"))
    return sorted(set(texts))


def _own_files() -> list[str]:
    return sorted(map(str, Path(__file__).parent.rglob("*.py")))


def _stamps(files: Sequence[str]) -> dict[str, list[int]]:
    """Return modification time and size by file; leave out files that do not exist."""
    stamps = {}
    for file in files:
        with suppress(OSError):
            stat = Path(file).stat()
            stamps[file] = [stat.st_mtime_ns, stat.st_size]
    return stamps


def _library_files() -> list[str]:
    """The files that the libraries of models have loaded by now."""
    modules = [(name.partition(".")[0], module) for name, module in sys.modules.items()]
    files = [getattr(module, "__file__", None) for top, module in modules if top in _PACKAGES[2:4]]
    return sorted({file for file in files if isinstance(file, str)})


# Finished profiles and the journals of unfinished ones are found by what was measured (see `fingerprint`).
# A model that its name determines also has a link, from the key of its name to that key: with it a profile is
# found without the model. The link holds the files of the library, which may have been edited.

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


def check_micro_batch_sizes(sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    """Micro-batch sizes, ascending and each once; None where the user names none. Raises UsageError."""
    if sizes is None:
        return None
    several = not isinstance(sizes, str) and isinstance(sizes, Collection) and len(sizes) > 0
    if not several or not all(map(is_positive, sizes)):
        raise UsageError(
            f"micro_batch_sizes={sizes!r}: whole numbers of at least 1 are needed",
            "As in micro_batch_sizes=(1, 2, 4, 8).",
        )
    return tuple(sorted(set(map(int, sizes))))


class Request(Record):
    """How much of a model was to be measured."""

    sizes: tuple[int, ...] | None
    budget_seconds: float
    rounds: int | None
    parts: bool
    memory_bytes: int | None

    @classmethod
    def of(
        cls,
        options: ProfileOptions,
        rounds: int | None = None,
        *,
        parts: bool = True,
        memory_bytes: int | None = None,
    ) -> Self:
        """What the options ask for, and the limits that only Python's callers give."""
        return cls(
            sizes=check_micro_batch_sizes(options.micro_batch_sizes),
            budget_seconds=options.budget_seconds,
            rounds=rounds,
            parts=parts,
            memory_bytes=memory_bytes,
        )

    def answers(self, other: Request) -> bool:
        """Whether what was measured for this is good enough for `other`: the same, and no longer."""
        longer = other.budget_seconds > self.budget_seconds and other.rounds is None
        return not longer and self == other.model_copy(update={"budget_seconds": self.budget_seconds})


class _Link(Record):
    """Return the path of the profile of a model that its name determines."""

    key: str
    files: dict[str, list[int]]
    entry: dict[str, Any]


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

    link: str | None = None
    """The key of the model's name, under which what is kept is found too."""

    @classmethod
    def of_user(cls, options: ProfileOptions, remark: Callable[[str], None] | None) -> Self:
        """In the user's folder, which is made; to resume is to keep."""
        tell = remark or (lambda _: None)
        if not (options.cache or options.resume):
            return cls(None)
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError) as error:
            tell(f"Nothing is kept for a later run: {error}")
            return cls(None)
        return cls(folder, options.resume, tell)

    def find_named(self, request: Request) -> Profile | None:
        """Return the profile that the link leads to, None where there is none that answers the request."""
        if self.folder is None or self.link is None:
            return None
        try:
            path = self._link_path
            link = _Link.model_validate_json(read_text(path, "profile"))
            is_same = _is_own(path) and _stamps([*link.files]) == link.files
        except (FileError, OSError, ValueError):
            return None
        return self._stored(link.key, request, link.entry) if is_same else None

    def find(self, key: str, request: Request, loaded: LoadedModel) -> Profile | None:
        """Return the profile of this key, with the model's name; None where none answers the request."""
        if self.folder is None:
            return None
        entry = {"model": loaded.name, "classes": loaded.classes, "settings": loaded.settings_in_json}
        profile = self._stored(key, request, entry)
        if profile is not None:
            self._write_link(key, profile)
        return profile

    def keep(
        self, key: str, request: Request, layers: int | None, measure: Callable[[Journal | None], Profile]
    ) -> Profile:
        """Return what `measure` makes, and keep it; `layers`: of the journal. None: there is no journal."""
        if self.folder is None:
            return measure(None)
        journal = None if layers is None else self._journal(self.folder / f"{key}.journal", key, layers)
        done = False
        try:
            profile = measure(journal)
            self._store(key, profile, request)
            done = True
        finally:
            if journal is not None and (done or not journal.is_worth_keeping):
                journal.remove()
            elif journal is not None:
                journal.close()
        return profile

    def _stored(self, key: str, request: Request, entry: dict[str, Any]) -> Profile | None:
        """What cannot be read, was edited, or is of another user, counts as not there."""
        path = self._path(key)
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
        return profile.model_copy(update=entry)

    def _journal(self, path: Path, key: str, layers: int) -> Journal | None:
        import filelock

        from .journal import Journal

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

    def _store(self, key: str, profile: Profile, request: Request) -> None:
        """Not where the layers do not add up to the model: measuring again may do better."""
        if misses_whole(profile):
            self.remark(
                "Not put into the cache, a later run measures anew: the layers do not add up to the model"
            )
            return
        stored = StoredProfile.model_validate({**profile.model_dump(by_alias=True), "request": request})
        if self._write(self._path(key), stored.to_json()):
            self._write_link(key, profile)

    def _write_link(self, key: str, profile: Profile) -> None:
        if self.link is not None:
            entry = {name: getattr(profile, name) for name in ("model", "classes", "settings")}
            link = _Link(key=key, files=_stamps(_library_files()), entry=entry)
            self._write(self._link_path, link.model_dump_json())

    def _write(self, path: Path, text: str) -> bool:
        with suppress(OSError):
            path.unlink()  # It was none that could be taken.
        try:
            write_whole(path, text, force=True)
        except FileError as error:
            self.remark(f"Not put into the cache: {error.what}")
            return False
        return True

    def _path(self, key: str) -> Path:
        return (self.folder or Path()) / f"{key}.profile.json"

    @property
    def _link_path(self) -> Path:
        return (self.folder or Path()) / f"{self.link}.link.json"


def _is_own(path: Path) -> bool:
    """Whether the file is this user's. Raises OSError."""
    return not hasattr(os, "geteuid") or path.stat().st_uid in (os.geteuid(), SUPERUSER)
