"""Documents: what is refused and in which words, numbers that must be numbers, files written whole."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, get_args, get_type_hints

import pytest
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from pplan.cost_models.document import Document, JsonObject, Record, Seed
from pplan.cost_models.errors import FileError
from pplan.cost_models.text_files import decode_text, detect_kind, file_kind, read_text, sha256, write_whole
from pplan.cost_models.topology_file import load_topology
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile
from pplan.runtimes.documents import DeepspeedExport, NemoExport


class Part(Record):
    seconds: Annotated[float, Field(ge=0)]
    count: int = 1


class Toy(Document):
    kind: ClassVar[str] = "toy"

    parts: list[Part]
    named: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.parts) > 2:
            raise ValueError(f"there are {len(self.parts)} parts, at most 2 may be")
        return self


def text(*parts: dict[str, Any], **keys: Any) -> str:
    return json.dumps({"schema": 1, "parts": list(parts), **keys})


def refused(content: str) -> FileError:
    with pytest.raises(FileError) as caught:
        Toy.parse(content, "toy.json")
    assert "Traceback" not in caught.value.what
    assert "\n" not in caught.value.what
    assert caught.value.hint
    return caught.value


def test_round_trip(tmp_path: Path) -> None:
    toy = Toy(parts=[Part(seconds=0.5)])
    toy.save(tmp_path / "toy.json", force=False)
    assert Toy.load(tmp_path / "toy.json") == toy
    assert json.loads((tmp_path / "toy.json").read_text())["schema"] == 1


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    toy, path = Toy(parts=[Part(seconds=0.5)]), str(tmp_path / "toy.json")
    toy.save(path, force=False)
    toy.save(path, force=True)
    assert Toy.load(path) == toy
    with pytest.raises(FileError, match="exists already"):
        toy.save(path, force=False)
    with pytest.raises(FileError, match="no such toy file"):
        Toy.load(f"{path}.gone")


@pytest.mark.parametrize("depth", [300, 100_000])
def test_json_that_is_too_deep(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    error = refused(f'{{"schema": 1, "parts": [], "more": {nested}}}')
    assert error.what.startswith("toy.json: ")


def test_an_integer_that_is_too_long() -> None:
    assert "a number is too long" in refused(text({"seconds": 1}).replace("1}", "1" * 5000 + "}")).what


def test_a_number_beyond_every_float() -> None:
    for number in ("1" * 400, "1e400", "NaN", "-Infinity"):
        assert "parts.0.seconds" in refused(text({"seconds": 0.5}).replace("0.5", number)).what


def test_what_is_not_pplans_own_is_finite_at_any_depth() -> None:
    """JSON has no infinity; what is written of one is null, and another answer when it is read again."""
    own = TypeAdapter[dict[str, Any]](JsonObject)
    assert own.validate_json('{"a": [{"b": [1e300, null, true, "inf"]}], "c": 10}')["c"] == 10
    for text in ('{"a": 1e400}', '{"a": [{"b": [0, -1e400]}]}'):
        with pytest.raises(ValidationError, match="Out of range float values"):
            own.validate_json(text)


@pytest.mark.parametrize("document", [Profile, Plan, DeepspeedExport, NemoExport])
def test_no_field_takes_any_object(document: type[Document]) -> None:
    """Also in the parts of a file."""
    todo, fields = [document], 0
    for record in todo:
        for name, field in get_type_hints(record, include_extras=True).items():
            fields += 1
            assert not re.search(r"(?<!Annotated\[)dict\[str, (typing\.)?Any\]", str(field)), name
            todo += [own for own in records(field) if own not in todo]
    assert fields > 10


def records(field: Any) -> list[type[Any]]:
    """The classes of records in a type."""
    if isinstance(field, type) and issubclass(field, Record):
        return [field]
    return [own for part in get_args(field) for own in records(part)]


def test_a_field_is_named_with_its_value() -> None:
    error = refused(text({"seconds": 1}, {"seconds": -2.5}))
    assert error.what == (
        "toy.json: parts.1.seconds: Input should be greater than or equal to 0, the value is -2.5"
    )


def test_a_contradiction_is_told_without_a_dump() -> None:
    error = refused(text(*[{"seconds": 1}] * 3))
    assert error.what == "toy.json: there are 3 parts, at most 2 may be"


def test_a_missing_key_has_no_value() -> None:
    assert refused(text({})).what == "toy.json: parts.0.seconds: Field required"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"seconds": "0.01"}, "parts.0.seconds"),
        ({"seconds": True}, "parts.0.seconds"),
        ({"seconds": 1, "count": "3"}, "parts.0.count"),
        ({"seconds": 1, "count": 3.0}, "parts.0.count"),
        ({"seconds": 1, "count": False}, "parts.0.count"),
    ],
)
def test_numbers_must_be_numbers(part: dict[str, Any], field: str) -> None:
    assert f"toy.json: {field}: Input should be a valid" in refused(text(part)).what


def test_a_whole_number_may_stand_for_seconds() -> None:
    assert Toy.parse(text({"seconds": 2}), "toy.json").parts[0].seconds == 2.0
    assert "named: Input should be a valid boolean" in refused(text(named="yes")).what


def test_a_key_with_control_characters_is_refused_without_them() -> None:
    error = refused(text({"seconds": "\x1b[31m\n"}))
    assert r"'\x1b[31m\n'" in error.what


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    path.write_bytes(b"\xef\xbb\xbf" + text({"seconds": 1}).encode())
    assert Toy.load(path).parts[0].seconds == 1
    assert read_text(path, "toy") == text({"seconds": 1})
    toml = tmp_path / "two.toml"
    toml.write_bytes(b"\xef\xbb\xbfgpus = 2\r\n")
    assert load_topology(toml).gpus == 2


def test_text_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="not a text file"):
        decode_text(b"\xff\xfe", tmp_path, "toy")
    with pytest.raises(FileError, match="cannot be read"):
        read_text(Path("a\0b"), "toy")


def test_the_hash_of_a_file_is_that_of_its_bytes() -> None:
    assert sha256("ä\n") == sha256("ä\n".encode()) == hashlib.sha256("ä\n".encode()).hexdigest()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ('{"layers": []}', "profile"),
        ('{"prediction": {}, "balance": []}', "plan"),
        ('{"step_seconds": 1, "balance": []}', "file for a runtime"),
        ('{"step_seconds": 1, "bubble_rate_span": 0}', "simulation"),
        ('{"hello": 1}', None),
        ("[1]", None),
        ("{", None),
        ("[" * 100_000, None),
        ("1" * 5000, None),
    ],
)
def test_kind_of(content: str, kind: str | None) -> None:
    assert detect_kind(content) == kind


def test_an_existing_file_needs_force(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(FileError, match="exists already"):
        write_whole(path, "new", force=False)
    assert path.read_text() == "old"
    write_whole(path, "new", force=True)
    assert path.read_text() == "new"


def test_a_link_that_leads_nowhere_exists(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(FileError, match="exists already"):
        write_whole(link, "new", force=False)
    assert link.is_symlink()
    assert not link.exists()


def test_a_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "target", tmp_path / "link"
    link.symlink_to(Path("folder") / "target")
    for content in ("first", "second"):
        write_whole(link, content, force=True)
        assert link.is_symlink()
        assert target.read_text() == content
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["target"]


@pytest.mark.parametrize("where", ["gone/target", "link"])
def test_a_link_that_cannot_be_written_through(tmp_path: Path, where: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / where)
    with pytest.raises(FileError, match="link: cannot be written"):
        write_whole(link, "new", force=True)
    assert os.path.lexists(link)
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(FileError, match="no file that could be replaced"):
        write_whole(pipe, "new", force=True)
    assert pipe.is_fifo()
    with pytest.raises(FileError, match="is a folder"):
        write_whole(tmp_path, "new", force=True)


def test_a_name_that_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be written: File name too long"):
        write_whole(tmp_path / ("x" * 400), "new", force=False)
    with pytest.raises(FileError, match="cannot be read: File name too long"):
        read_text(tmp_path / ("x" * 400), "toy")


def test_the_ends_of_a_seeds_range() -> None:
    """Those of torch.manual_seed."""
    seeds: TypeAdapter[int] = TypeAdapter(Seed)
    for seed in (-(2**63), 2**64 - 1):
        assert seeds.validate_python(seed) == seed
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ValidationError):
            seeds.validate_python(seed)


def test_a_check_with_corrections_is_a_check() -> None:
    """Which is written over the next time."""
    assert file_kind('{"schema": 1, "corrections": null, "cases": []}') == "check"
    assert file_kind('{"schema": 1, "corrections": {}}') == "calibration"
