"""Checkpoints of a training by torch.distributed.checkpoint (DCP), for any number of stages.

Each process writes its part of the weights and of the optimizer's state, by the model's own names, in the
form of torch.distributed.checkpoint.state_dict with `flatten_optimizer_state_dict=True`: "model.NAME",
"optimizer.state.NAME.KEY" and "optimizer.param_groups.NAME.OPTION". DCP joins the parts, so another plan or
the plain model reads them. `pplan.json` beside them names the model.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ...cost_models.errors import FileError, PplanError
from ...cost_models.text_files import sha256
from .checkpoint_reader import METADATA, CheckpointPlanner, CheckpointReader

ABOUT = "pplan.json"
"""File of a checkpoint with its model and progress."""
TAG = "pplan"
"""Folder of a checkpoint with DeepSpeed's own files."""
ENDINGS = ("partial", "old")
"""Suffixes of the folders that `save` writes first and replaces last."""
_PARTS = {ABOUT, METADATA, f"{METADATA}.tmp", "latest", "zero_to_fp32.py", "zero_to_torch.py"}
"""Names of other files that DCP and DeepSpeed write."""


class ModelTensors:
    """The names of the model's tensors, and those that no layer uses."""

    def __init__(self, model: nn.Module, layers: nn.Sequential) -> None:
        self.model = getattr(layers, "model_name", "") or type(model).__name__
        state = model.state_dict(keep_vars=True)
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        self.shapes = {name: tuple(value.shape) for name, value in tensors.items()}
        self.names: dict[int, tuple[str, ...]] = {}
        for name, value in tensors.items():
            self.names[id(value)] = (*self.names.get(id(value), ()), name)
        used = {id(value) for value in layers.state_dict(keep_vars=True).values()}
        self.unused = {name: value.detach() for name, value in tensors.items() if id(value) not in used}


@dataclass(frozen=True, eq=False)
class TrainingState:
    """State of a training in a process: weights and buffers by the model's names, `parameters` by name (a
    weight that several of its stages share more than once), and the optimizer of these."""

    tensors: ModelTensors
    values: dict[str, Tensor]
    parameters: list[tuple[str, nn.Parameter]]
    optimizer: torch.optim.Optimizer | None
    is_main: bool


def write_checkpoint(training: TrainingState, path: Path, progress: Mapping[str, Any]) -> None:
    """Write weights and optimizer state to a folder, whole or not at all.

    Args:
        training: The state of this process. Every process of the job calls this.
        path: The folder, which all processes see. A checkpoint there is replaced.
        progress: What `read_checkpoint` returns: values of JSON.

    Raises:
        FileError: Something else is there, or a process cannot write.
    """
    state = {"model": training.values}
    if training.optimizer is not None:
        state["optimizer"] = _optimizer_state(training, training.optimizer)
    replace_folder(training, path, progress, lambda folder: _with_dcp(save, state, folder))


def replace_folder(
    training: TrainingState,
    path: Path,
    progress: Mapping[str, Any],
    write: Callable[[Path], object],
    layout: str = "",
) -> None:
    """Write a checkpoint next to `path` by all processes, and rename it when it is whole.

    Args:
        training: The state of this process.
        path: The folder, or a link to it.
        progress: Values of JSON.
        write: Writes the files of this process to a folder.
        layout: Stages and replicas, where these files are DeepSpeed's own, which no others read.

    Raises:
        FileError: In every process, where one of them cannot write, or something else is in the way.
    """
    whole = path.resolve()
    unfinished, old = (_beside(whole, ending) for ending in ENDINGS)
    about = {"model": training.tensors.model, "tensors_sha256": _digest(training)}

    def note(**more: Any) -> None:
        text = json.dumps(about | {"progress": dict(progress)} | more)
        (unfinished / ABOUT).write_text(text, encoding="utf-8")

    def begin() -> None:
        for folder in (whole, unfinished, old):
            _require_checkpoint(folder)
        if old.exists() and not whole.exists():  # a save was interrupted between its two renames
            old.rename(whole)
        for folder in (unfinished, old):
            if folder.exists():
                shutil.rmtree(folder)
        unfinished.mkdir(parents=True)
        note()

    def end() -> None:
        if layout:
            note(layout=layout, files=_count_own_files(unfinished))
        if whole.exists():
            whole.rename(old)
        unfinished.rename(whole)
        if old.exists():
            shutil.rmtree(old)

    _run_together(path, begin if training.is_main else None)
    _run_together(path, lambda: write(unfinished))
    _run_together(path, end if training.is_main else None)


def _beside(path: Path, ending: str) -> Path:
    return path.parent / f"{path.name}.{ending}"


def _count_own_files(path: Path) -> int:
    """The number of files that DeepSpeed wrote to a checkpoint."""
    return len(list((path / TAG).glob("*.pt")))


def _run_together(path: Path, run: Callable[[], object] | None) -> None:
    """Run something in this process or not, and wait for all; what one raises, all raise as a FileError."""
    own: tuple[str, str] | None = None
    cause: BaseException | None = None
    try:
        if run is not None:
            run()
    except PplanError as error:
        own, cause = (error.what, error.hint), error
    except (Exception, CheckpointException) as error:
        faults_inside = [fault for fault, _ in getattr(error, "failures", {}).values()]
        why = (faults_inside or [error])[0]
        own, cause = (f"{path}: the checkpoint cannot be written: {why}", _WHERE), error
    faults = [own]
    if dist.is_initialized():
        faults = [None] * dist.get_world_size()
        dist.all_gather_object(faults, own)
    for fault in faults:
        if fault is not None:
            raise FileError(*fault) from cause


_WHERE = "Name a folder that every process can write to."


def _require_checkpoint(path: Path) -> None:
    """Raise FileError where something is there that is neither a checkpoint nor an empty folder."""
    if path.is_dir() and not path.is_symlink():
        entries = list(path.iterdir())
        others = sorted(entry.name for entry in entries if not _is_part(entry))
        if not others and (not entries or any((path / name).is_file() for name in (ABOUT, METADATA))):
            return
        why = f": it holds {others[0]}" if others else ""
    elif not path.exists() and not path.is_symlink():
        return
    else:
        why = ""
    raise FileError(
        f"{path}: is there, and is no checkpoint{why}",
        "Name a folder that may be replaced, or move that away.",
    )


def _is_part(entry: Path) -> bool:
    """Return whether an entry of a folder is one that DCP or DeepSpeed writes."""
    if entry.is_symlink():
        return False
    if entry.is_dir():
        return entry.name == TAG and all(own.suffix == ".pt" and own.is_file() for own in entry.iterdir())
    return entry.is_file() and (entry.name in _PARTS or entry.suffix == ".distcp")


def find_checkpoint(path: Path) -> Path:
    """Return the folder, or the earlier checkpoint next to it, if a save ended between its two renames."""
    old = _beside(path.resolve(), ENDINGS[1])
    return old if not path.exists() and old.is_dir() else path


def read_checkpoint(training: TrainingState, path: Path) -> dict[str, Any]:
    """Read weights and optimizer state that any plan, or the plain model, wrote to a folder.

    Returns:
        The progress that was written with them; nothing where pplan did not write them.

    Raises:
        FileError: There is no checkpoint, or it is one of another model.
    """
    progress = read_about(training, path)
    reader = CheckpointReader(path)
    stored = reader.read_metadata().state_dict_metadata
    state: dict[str, dict[str, Any]] = {"model": dict(training.values)}
    missing = sorted(name for name in training.tensors.shapes if f"model.{name}" not in stored)
    if missing:
        raise FileError(
            f"{path}: the checkpoint lacks {missing[0]}, which {training.tensors.model} has",
            "Name a checkpoint of this model, with its weights under the key 'model'.",
        )
    if training.optimizer is not None:
        state["optimizer"] = _empty_optimizer_state(training, stored)
    try:
        _with_dcp(partial(load, storage_reader=reader, planner=CheckpointPlanner()), state, path)
    except CheckpointException as error:
        causes = [fault for fault, _ in error.failures.values()]
        raise FileError(
            f"{path}: the checkpoint cannot be read: {causes[0]}", "Name a checkpoint that was written whole."
        ) from error
    if training.optimizer is not None and state.get("optimizer"):
        _set_optimizer_state(training, training.optimizer, state["optimizer"])
    return progress


def read_about(training: TrainingState, path: Path, layout: str = "") -> dict[str, Any]:
    """Read the progress of a checkpoint.

    Args:
        training: The state of this process.
        path: The folder.
        layout: As of `replace_folder`: then DeepSpeed's own files must be there, of this layout.

    Raises:
        FileError: No checkpoint is there, or it is of another model or layout, or files are missing.
    """
    if not path.is_dir():
        partial_save = _beside(path.resolve(), ENDINGS[0])
        hint = f"A save was interrupted: {partial_save} is not whole." if partial_save.is_dir() else ""
        raise FileError(f"{path}: no checkpoint is there", hint or "Name the folder of one.")
    about = _read_about_file(training, path)
    if layout and about.get("layout", layout) != layout:
        raise FileError(
            f"{path}: the checkpoint is DeepSpeed's of {about['layout']}, the plan is of {layout}",
            "Go on with the plan that wrote it, or export float32 weights without ZeRO.",
        )
    count, present = about.get("files", 1), _count_own_files(path)
    if layout and present < count:
        raise FileError(
            f"{path}: {present} of {count} or more files of DeepSpeed are there",
            "Name a checkpoint that DeepSpeed wrote with ZeRO or 16-bit weights, whole.",
        )
    progress: dict[str, Any] = about.get("progress", {})
    return progress


def _read_about_file(training: TrainingState, path: Path) -> dict[str, Any]:
    """Return what pplan wrote about a checkpoint; empty if another tool wrote the checkpoint."""
    if not (path / ABOUT).is_file():
        return {}
    about, digest = _parse_about(path / ABOUT), _digest(training)
    if about["tensors_sha256"] != digest:
        raise FileError(
            f"{path}: the checkpoint is of {about['model']} ({about['tensors_sha256'][:12]}), "
            f"the plan trains {training.tensors.model} ({digest[:12]}), whose tensors differ",
            "Name a checkpoint of this model, or another folder.",
        )
    return about


def _parse_about(file: Path) -> dict[str, Any]:
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        texts = [about["model"], about["tensors_sha256"], about.get("layout", "")]
        is_whole = all(isinstance(text, str) for text in texts) and isinstance(about["progress"], dict)
        is_whole = is_whole and isinstance(about.get("files", 1), int)
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        is_whole = False
    if not is_whole:
        raise FileError(f"{file}: is not what pplan wrote", "Name a checkpoint that was written whole.")
    parsed: dict[str, Any] = about
    return parsed


def _digest(training: TrainingState) -> str:
    """A hash of the names and shapes of the model's tensors."""
    shapes = training.tensors.shapes
    return sha256("\n".join(f"{name} {tuple(shape)}" for name, shape in sorted(shapes.items())))


def _with_dcp(run: Callable[..., object], state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit", UserWarning)
        run(state, checkpoint_id=str(path))


def _optimized(training: TrainingState) -> list[tuple[str, nn.Parameter, dict[str, Any]]]:
    """The parameters of the optimizer in its order, by name, each with its group."""
    names = {id(parameter): name for name, parameter in training.parameters}
    groups = [] if training.optimizer is None else training.optimizer.param_groups
    return [(names[id(own)], own, group) for group in groups for own in group["params"]]


def _optimizer_state(training: TrainingState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, parameter, group in _optimized(training):
        values = optimizer.state.get(parameter, {})
        state |= {f"state.{name}.{key}": value for key, value in values.items()}
        state |= {f"param_groups.{name}.{key}": own for key, own in group.items() if key != "params"}
    return state


def _by_tensor(keys: Iterable[str]) -> dict[str, list[str]]:
    """The last parts of keys by what stands before them."""
    table: dict[str, list[str]] = {}
    for key in keys:
        start, _, last = key.rpartition(".")
        table.setdefault(start, []).append(last)
    return table


def _empty_optimizer_state(training: TrainingState, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors for what the checkpoint holds of this process's parameters."""
    state: dict[str, Any] = {}
    table = _by_tensor(stored)
    for name, parameter, _ in _optimized(training):
        for start in (f"state.{name}", f"param_groups.{name}"):
            for key in table.get(f"optimizer.{start}", ()):
                about = stored[f"optimizer.{start}.{key}"]
                if not isinstance(about, TensorStorageMetadata):
                    state[f"{start}.{key}"] = None
                elif about.size == parameter.size():
                    state[f"{start}.{key}"] = torch.zeros_like(parameter, dtype=about.properties.dtype)
                else:
                    state[f"{start}.{key}"] = torch.zeros(about.size, dtype=about.properties.dtype)
    return state


def _set_optimizer_state(
    training: TrainingState, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    table, values, names = _by_tensor(state), dict[int, dict[str, Any]](), set[str]()
    groups = [dict(group) | {"params": []} for group in optimizer.param_groups]
    numbers = {id(group): number for number, group in enumerate(optimizer.param_groups)}
    for index, (name, _, own_group) in enumerate(_optimized(training)):
        group = groups[numbers[id(own_group)]]
        group["params"].append(index)
        start = f"param_groups.{name}"
        group |= {key: state[f"{start}.{key}"] for key in table.get(start, ())}
        start = f"state.{name}"
        values[index] = {key: state[f"{start}.{key}"] for key in table.get(start, ())}
        if name in names:  # each copy of a shared weight is updated by itself
            values[index] = {
                key: own.clone() if isinstance(own, Tensor) else own for key, own in values[index].items()
            }
        names.add(name)
    optimizer.load_state_dict({"state": values, "param_groups": groups})
