"""Checkpoints that are damaged, hostile, or not there: nothing runs, and nothing else is deleted."""

from __future__ import annotations

import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pplan.cost_models.errors import FileError
from pplan.runtimes.pipelining.checkpoint_reader import METADATA
from pplan.runtimes.pipelining.checkpoints import (
    ABOUT,
    ModelTensors,
    TrainingState,
    read_checkpoint,
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


def test_a_payload_is_one(tmp_path: Path) -> None:
    """The attack works where nothing stops it."""
    torch.load(_saved(Payload(tmp_path / "owned")), weights_only=False)
    assert (tmp_path / "owned").read_text() == "run"


def _saved(value: object) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
