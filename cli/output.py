"""The files of a command: which it reads where none is named, and where its result goes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.errors import FileError
from ..cost_models.text_files import (
    TEXT,
    add_line_hash,
    check_destination,
    check_same_kind,
    is_unchanged,
    matches_fields,
    read_bytes,
    write_whole,
)
from .field_names import command_line
from .streams import remark, result

if TYPE_CHECKING:
    from ..cost_models.document import Document

_ADVICE = "Give --force to replace it, or another name with -o."


@dataclass(frozen=True)
class Target:
    """A file to be written.

    `replace`: an existing one may go. `own`: it has the tool's own name, and one goes that
    pplan wrote, that nobody changed since, and that says the same as `about` of what it was made for. `kind`:
    of the file, in the words of `file_kind`; one of another kind stays whatever was asked.
    """

    path: Path
    replace: bool
    own: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    kind: str = TEXT

    def check(self, *sources: Path | None) -> None:
        """Raises FileError where `write` would fail, as far as that can be known before, and where it would
        overwrite one of the `sources` it is made from."""
        folder = self.path.parent
        if not folder.is_dir():
            raise FileError(
                f"{self.path}: the folder {folder} does not exist", "Make it, or name another place with -o."
            )
        # An input named as the output is told so, not advised to --force.
        check_destination(self.path, force=True)
        if any(source is not None and _same_file(self.path, source) for source in sources):
            raise FileError(
                f"{self.path}: would overwrite what it is made from", "Name another file with -o."
            )
        self._check_free()
        check_same_kind(self.path, self.kind)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise FileError(
                f"{self.path}: the folder {folder} cannot be written to: {error.strerror or error}",
                "Name another place with -o.",
            ) from error

    def write_text(self, text: str) -> None:
        """Writes `text`, with its hash where it is no JSON and the file the tool's own. Raises FileError."""
        self._check_free()
        in_lines = self.own and self.path.suffix != ".json"
        write_whole(self.path, add_line_hash(text) if in_lines else text, force=True)

    def _check_free(self) -> None:
        """Raises FileError where another file is at the path that may not go."""
        if not self.own or self.replace or not self.path.is_file():
            check_destination(self.path, force=self.replace)
            return
        text = self.path.read_bytes().decode(errors="replace")
        if not is_unchanged(text):
            raise FileError(f"{self.path} exists already, and not as pplan wrote it", _ADVICE)
        if not matches_fields(text, self.about):
            raise FileError(f"{self.path} exists already, for another model, profile or device", _ADVICE)

    def write(self, document: Document, *, as_json: bool, show: Callable[[], None]) -> None:
        """Writes the file, prints its JSON or lets `show` print it, and says on standard error what was made.

        What was found is printed even where the file cannot be written. Raises FileError then.
        """
        if document.keeps_command:
            origin = document.made_by.model_copy(update={"command": command_line()})  # type: ignore[attr-defined]
            document = document.model_copy(update={"made_by": origin})
        files, written = document.files(self.path), False
        try:
            for path, text in files.items():
                if path == self.path:
                    self.write_text(text)
                else:
                    write_whole(path, text, force=self.replace or self.own)
            written = True
        finally:
            try:
                if as_json:
                    result(document.to_json())
                else:
                    show()
            finally:
                # Also where the reader of standard output has gone.
                if written:
                    remark(f"Wrote {' and '.join(map(str, files))}")


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def choose_target(
    path: Path | None, default: str, *, force: bool, about: Mapping[str, str] | None = None, kind: str = TEXT
) -> Target:
    """`path`, or the tool's own `default` in the working directory, which is replaced without `force` where
    pplan wrote it for the same and nobody changed it since."""
    if path is None:
        return Target(Path(default), replace=force, own=True, about=about or {}, kind=kind)
    return Target(path, replace=force, kind=kind)


def file_stem(model: str) -> str:
    """Return the first part of a file name for a model: `my.zoo_make` for `my.zoo:make`.

    A configuration is named by its file, and a `config.json` by its folder where it has one: `llama` for
    `hf:models/llama/config.json`.
    """
    if model.endswith(".json"):
        path = Path(model.removeprefix("hf:"))
        folder = path.parent.name.strip(".")
        model = folder if path.stem == "config" and folder else path.stem
    return re.sub(r"[^\w.+-]+", "_", model).strip("._").lstrip("-") or "model"


PlanFile = Annotated[
    Path | None,
    typer.Argument(metavar="PLAN", help="A plan; default: newest in this directory.", show_default=False),
]
ProfileFile = Annotated[
    Path | None,
    typer.Option("--profile", metavar="FILE", help="The plan's profile, where it is not beside it."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where to write; default: after the model and the kind of file, as in MODEL.profile.json.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file of the same kind.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

COMMAND_BY_KIND = {"profile": "pplan profile vgg19", "plan": "pplan solve --gpus 8"}


def choose_input(named_path: Path | None, kinds: Sequence[str]) -> Path:
    """`named_path`, or else the newest `*.KIND.json` of the working directory, said on standard error.

    Commands call it before they import what reads the file. Raises FileError where there is none, with the
    command that makes one.
    """
    if named_path is not None:
        if not named_path.exists():
            read_bytes(named_path, " or ".join(kinds))
        return named_path
    candidates = [path for kind in kinds for path in Path().glob(f"*.{kind}.json") if path.is_file()]
    if not candidates:
        files = " or ".join(f"*.{kind}.json" for kind in kinds)
        raise FileError(
            f"no {' or '.join(kinds)} named, and no {files} in this directory",
            f"Name one, or make one first, as in: {COMMAND_BY_KIND[kinds[0]]}",
        )
    newest = max(candidates, key=lambda path: (path.stat().st_mtime_ns, path.name))
    remark(f"Using {newest} (newest {' or '.join(kinds)} in this directory)")
    return newest
