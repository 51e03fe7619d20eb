"""Where a verb's result goes: the default name or `-o`, checked before the work, written after it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..cost_models.document import Document, check_place, write_whole
from ..cost_models.errors import FileError
from .streams import remark, result


@dataclass(frozen=True)
class Target:
    """A file to be written. `replace`: an existing one may go."""

    path: Path
    replace: bool

    def check(self, *sources: Path | None) -> None:
        """Raises FileError where `write` would fail, as far as that can be known before, and where it would
        overwrite one of the `sources` it is made from."""
        folder = self.path.parent
        if not folder.is_dir():
            raise FileError(
                f"{self.path}: the folder {folder} does not exist", "Make it, or name another place with -o."
            )
        # An input named as the output is told so, not advised to --force.
        check_place(self.path, force=True)
        if any(source is not None and _same_file(self.path, source) for source in sources):
            raise FileError(
                f"{self.path}: would overwrite what it is made from", "Name another file with -o."
            )
        check_place(self.path, force=self.replace)
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            raise FileError(
                f"{self.path}: the folder {folder} cannot be written to: {error.strerror or error}",
                "Name another place with -o.",
            ) from error

    def write(self, document: Document, *, as_json: bool, show: Callable[[], None]) -> None:
        """Writes the file, prints its JSON or lets `show` print it, and says on standard error what was made.

        What was found is printed even where the file cannot be written. Raises FileError then.
        """
        files, written = document.files(self.path), False
        try:
            for path, text in files.items():
                write_whole(path, text, force=self.replace)
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


def chosen_target(named: Path | None, default: str, *, force: bool) -> Target:
    """`named` (replaced only with `force`), or the tool's own `default` in the working directory."""
    if named is None:
        return Target(Path(default), replace=True)
    return Target(named, replace=force)


def file_stem(model: str) -> str:
    """A model's name as the first part of a file name: `my.zoo:make` as `my.zoo_make`."""
    return re.sub(r"[^\w.+-]+", "_", model).strip("._") or "model"
