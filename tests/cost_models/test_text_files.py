"""The hash in a file: it stands for the content, not for its spaces, and every edit is seen."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import ClassVar

import pytest

from pplan.cost_models import text_files
from pplan.cost_models.document import Document, MadeBy
from pplan.cost_models.errors import FileError
from pplan.cost_models.text_files import (
    add_hash,
    add_line_hash,
    escape_text,
    is_unchanged,
    matches_fields,
    parse_toml,
    read_bytes,
    read_text,
)


class Note(Document):
    kind: ClassVar[str] = "note"

    text: str
    numbers: list[float] = []
    made_by: MadeBy = MadeBy()


NOTE = Note(text='a "made_by": {\n}', numbers=[0.1, 1e-300, 3.0], made_by=MadeBy(pplan="1"))


def test_a_document_as_it_was_written(tmp_path: Path) -> None:
    text = NOTE.to_json()
    assert is_unchanged(text)
    content = json.loads(text)
    assert len(content["made_by"]["content_sha256"]) == 64
    assert is_unchanged(json.dumps(dict(reversed(content.items()))))
    NOTE.save(tmp_path / "a.json", force=False)
    assert Note.load(tmp_path / "a.json") == NOTE
    assert Note.load(tmp_path / "a.json").to_json() == text


@pytest.mark.parametrize(
    "edit", [{"text": "b"}, {"numbers": [0.1]}, {"mine": 1}, {"made_by": {}}, {"made_by": 3}, {"schema": 2}]
)
def test_every_edit_is_seen(edit: dict[str, object]) -> None:
    assert not is_unchanged(json.dumps(json.loads(NOTE.to_json()) | edit))


def test_what_is_not_ours() -> None:
    for text in ("", "old", "[]", "{}", "[" * 10**5, '{"made_by": {"content_sha256": ""}}', "\ud800"):
        assert not is_unchanged(text)
    assert add_hash('{\n "schema": 1\n}') == '{\n "schema": 1\n}'


def test_lines() -> None:
    text = add_line_hash("a = 1\nb = 2\n")
    assert text.startswith("a = 1\nb = 2\n# ")
    assert is_unchanged(text)
    assert not is_unchanged(text.replace("2", "3", 1))
    assert not is_unchanged(f"{text}c = 4\n")
    assert not is_unchanged("a = 1\nb = 2\n")


def test_what_a_document_is_about() -> None:
    text = '{"model": "a", "profile": {"file": "p", "none": null}}'
    assert matches_fields(text, {"model": "a", "profile.file": "p", "other": "x", "profile.none.deep": "y"})
    assert not matches_fields(text, {"model": "b"})
    assert not matches_fields(text, {"profile.file": "q"})
    assert matches_fields("# lines", {"model": "a"})


def test_no_character_that_a_terminal_obeys_is_left() -> None:
    steering = "\x7f\x9b\u202e\u2028\u200b\ud800"
    text = escape_text(f'{{"a": "{steering}\u00e9\U0001f600"}}\r\n\t')
    assert text.endswith('\u00e9\U0001f600"}\n\t')
    assert not any(character in text for character in steering)
    assert json.loads(text)["a"].startswith(steering)


def test_what_never_ends_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A named pipe without a writer would block, a device would fill the memory."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(FileError, match="is no regular file, so not a profile file"):
            read_bytes(path, "profile")
    monkeypatch.setattr(text_files, "MOST_FILE_BYTES", 2**20)
    (tmp_path / "large").write_bytes(b"a" * 2**20)
    assert len(read_bytes(tmp_path / "large", "profile")) == 2**20
    (tmp_path / "large").write_bytes(b"a" * (2**20 + 1))
    with pytest.raises(FileError, match="more than 1 MiB"):
        read_bytes(tmp_path / "large", "profile")


def test_a_pipe_of_the_shell_is_read() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"a text")
    os.close(writing)
    try:
        assert read_text(Path(f"/dev/fd/{reading}"), "profile") == "a text"
    finally:
        os.close(reading)


@pytest.mark.parametrize("text", ["a = " + "[" * 10**5, "a = " + "9" * 5000, "a", "a = 1\na = 2"])
def test_toml_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"too deep|Exceeds|Expected|Cannot overwrite"):
        parse_toml(text)
