"""Checkpoints that are damaged, hostile, or not there: nothing runs, and nothing else is deleted."""

from __future__ import annotations

import importlib
import io
import pickle
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from pplan.cost_models.errors import FileError
from pplan.runtimes.pipelining.checkpoint_reader import METADATA
from pplan.runtimes.pipelining.checkpoints import (
    ABOUT,
    ModelTensors,
    TrainingState,
    find_checkpoint,
    read_about,
    read_checkpoint,
    replace_folder,
    write_checkpoint,
)


def make_state() -> TrainingState:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    values = {name: value.detach() for name, value in model.state_dict().items()}
    parameters = list(model.named_parameters())
    return TrainingState(ModelTensors(model, model), values, parameters, optimizer, is_main=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(make_state(), tmp_path / "checkpoint", {"step": 7})
    return tmp_path / "checkpoint"


class Payload:
    """Writes a file where it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.write_text, (self.file, "run")


def test_what_was_written_is_read(folder: Path) -> None:
    state, expected = make_state(), make_state()
    for value in state.values.values():
        value.zero_()
    torch.manual_seed(0)
    write_checkpoint(expected, folder, {"step": 8})
    assert read_checkpoint(state, folder) == {"step": 8}
    for name, value in state.values.items():
        assert torch.equal(value, expected.values[name])


def test_metadata_runs_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Payload(tmp_path / "owned")))
    with pytest.raises(FileError, match="which is no part of a checkpoint"):
        read_checkpoint(make_state(), folder)
    assert not (tmp_path / "owned").exists()


def test_values_run_nothing(folder: Path, tmp_path: Path) -> None:
    """The learning rate of the file is a payload."""
    state, payload = make_state(), Payload(tmp_path / "owned")
    assert state.optimizer is not None
    for group in state.optimizer.param_groups:
        group["lr"] = payload
    write_checkpoint(state, folder, {})
    with pytest.raises(FileError, match="cannot be read"):
        read_checkpoint(make_state(), folder)
    assert not (tmp_path / "owned").exists()


def test_damaged_metadata_is_refused(folder: Path) -> None:
    content, rng, refused = (folder / METADATA).read_bytes(), random.Random(0), 0
    for _ in range(60):
        damaged = bytearray(content)
        for _ in range(rng.randint(1, 5)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (folder / METADATA).write_bytes(bytes(damaged[: rng.randint(1, len(damaged))]))
        try:
            read_checkpoint(make_state(), folder)
        except FileError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": 1, "tensors_sha256": "", "progress": {}}'])
def test_what_pplan_did_not_write_is_refused(folder: Path, text: str) -> None:
    (folder / ABOUT).write_text(text)
    with pytest.raises(FileError, match="is not what pplan wrote"):
        read_checkpoint(make_state(), folder)


@pytest.mark.parametrize("name", ["folder", "file"])
def test_only_checkpoints_are_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileError, match="is no checkpoint"):
        write_checkpoint(make_state(), tmp_path / name, {})
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("ending", ["", ".partial", ".old"])
@pytest.mark.parametrize("name", [METADATA, "thesis.distcp", "pplan"])
def test_folders_like_checkpoints_are_kept(folder: Path, ending: str, name: str) -> None:
    """A workspace of Eclipse is a folder `.metadata`; another folder holds a file besides."""
    other = folder.with_name(f"other{ending}")
    (other / name).mkdir(parents=True)
    (other / name / "thesis.txt").write_text("mine")
    (other / ABOUT).write_text("{}")
    with pytest.raises(FileError, match=f"is no checkpoint: it holds {name}"):
        write_checkpoint(make_state(), folder.with_name("other"), {})
    assert (other / name / "thesis.txt").read_text() == "mine"


def test_a_link_to_a_checkpoint_stays_one(folder: Path) -> None:
    link = folder.with_name("latest")
    link.symlink_to(folder, target_is_directory=True)
    write_checkpoint(make_state(), link, {"step": 9})
    assert link.is_symlink()
    assert read_checkpoint(make_state(), folder) == {"step": 9}
    assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoint", "latest"]


def test_an_interrupted_save_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends at each of its renames (the first is DCP's) and deletions; then it saves again."""
    places = [(Path, "rename", 0), (Path, "rename", 1), (Path, "rename", 2), (shutil, "rmtree", 0)]
    places += [(Path, "write_text", 0), (shutil, "rmtree", 1)]
    missing = 0
    for step, (place, method, after) in enumerate(places):
        with monkeypatch.context() as patch:
            interrupt(patch, place, method, after)
            with pytest.raises((KeyboardInterrupt, FileError)):
                write_checkpoint(make_state(), folder, {"step": step})
        found = [own for own in sorted(folder.parent.iterdir()) if (own / METADATA).exists()]
        assert found
        for own in found:
            assert read_checkpoint(make_state(), own)["step"] in {7, *range(step + 1)}
        if not folder.exists():
            missing += 1
            with pytest.raises(FileError, match=r"no checkpoint is there"):
                read_checkpoint(make_state(), folder)
            assert find_checkpoint(folder) == folder.with_name("checkpoint.old")
        assert read_checkpoint(make_state(), find_checkpoint(folder))["step"] in {7, *range(step + 1)}
    assert missing == 1
    write_checkpoint(make_state(), folder, {"step": 10})
    assert read_checkpoint(make_state(), folder) == {"step": 10}
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def interrupt(patch: pytest.MonkeyPatch, place: Any, method: str, after: int) -> None:
    """Let the call of a function after so many others end the process."""
    function, calls = getattr(place, method), iter(range(100))

    def run(*args: Any, **kwargs: Any) -> Any:
        own = next(calls)
        if own == after:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    patch.setattr(place, method, run)


def test_a_save_that_fails_says_why(folder: Path) -> None:
    with pytest.raises(FileError, match=r"cannot be written: .*JSON serializable"):
        write_checkpoint(make_state(), folder, {"step": object()})
    assert read_checkpoint(make_state(), folder) == {"step": 7}


def test_deepspeeds_own_files_are_of_one_layout_and_all_there(folder: Path) -> None:
    def write(unfinished: Path) -> None:
        (unfinished / "pplan").mkdir()
        for number in range(2):
            (unfinished / "pplan" / f"mp_rank_0{number}_model_states.pt").write_bytes(b"")
        (unfinished / "latest").write_text("pplan")

    for step in range(2):  # the second replaces the first
        replace_folder(make_state(), folder, {"step": step}, write, layout="2 stages")
    assert read_about(make_state(), folder, "2 stages") == {"step": 1}
    with pytest.raises(FileError, match="is DeepSpeed's of 2 stages, the plan is of 3 stages"):
        read_about(make_state(), folder, "3 stages")
    (folder / "pplan" / "mp_rank_01_model_states.pt").unlink()
    with pytest.raises(FileError, match="1 of 2 or more files of DeepSpeed are there"):
        read_about(make_state(), folder, "2 stages")
    write_checkpoint(make_state(), folder, {})
    with pytest.raises(FileError, match="0 of 1 or more files of DeepSpeed are there"):
        read_about(make_state(), folder, "2 stages")


@pytest.mark.slow
def test_all_processes_raise_what_one_does(run_ranks: Callable[..., str], tmp_path: Path) -> None:
    """The first cannot begin, the second cannot write; nobody waits for the other."""
    (tmp_path / "taken").write_text("mine")
    printed = run_ranks([__file__, str(tmp_path)], tmp_path, 2)
    assert printed.count("taken: is there, and is no checkpoint") == 2
    assert printed.count("new: the checkpoint cannot be written: the disk is full") == 2


def save_in_two_processes(folder: Path) -> None:
    dist.init_process_group("gloo")
    state = replace(make_state(), is_main=dist.get_rank() == 0)

    def write(_: Path) -> None:
        if not state.is_main:
            raise OSError("the disk is full")

    for name in ("taken", "new"):
        try:
            replace_folder(state, folder / name, {}, write)
        except FileError as error:
            print(error)
    dist.destroy_process_group()


METADATA_MODULE = "torch.distributed.checkpoint.metadata"


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (METADATA_MODULE, "Metadata", b""),
        (METADATA_MODULE, "TensorProperties", b""),
        (METADATA_MODULE, "_MEM_FORMAT_ENCODING", b""),
        (METADATA_MODULE, "_MEM_FORMAT_ENCODING", b"K\x00\x85R"),
        ("torch.serialization", "_get_layout", b""),
        ("torch.serialization", "_get_layout", b"X\x0d\x00\x00\x00torch.strided\x85R"),
        ("pathlib", "Path", b""),
        ("torch", "Size", b""),
        ("torch", "float32", b""),
    ],
)
def test_metadata_changes_no_class(folder: Path, module: str, name: str, call: bytes) -> None:
    """BUILD sets attributes of what stands before it, here a class, a function or its value."""
    changes = pickle.dumps((None, {"owned": 1, "__doc__": "owned", "_value_": 9}), protocol=2)[2:-1]
    (folder / METADATA).write_bytes(f"c{module}\n{name}\n".encode() + call + changes + b"b.")
    with pytest.raises(FileError, match="cannot be read"):
        read_checkpoint(make_state(), folder)
    own = getattr(importlib.import_module(module), name)
    for target in (own, torch.strided, *_MEM_FORMAT_ENCODING):
        assert not hasattr(target, "owned")
        assert target.__doc__ != "owned"
    assert [member.value for member in _MEM_FORMAT_ENCODING] == [0, 1, 2]


def test_a_payload_is_one(tmp_path: Path) -> None:
    """The attack works where nothing stops it."""
    torch.load(_saved(Payload(tmp_path / "owned")), weights_only=False)
    assert (tmp_path / "owned").read_text() == "run"


def _saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


if __name__ == "__main__":
    save_in_two_processes(Path(sys.argv[1]))
