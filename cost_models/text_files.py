"""Files as pplan reads and writes them: whole, in UTF-8, with the SHA-256 of their content.

The hash tells whether a file was edited since pplan wrote it. In a JSON document it is `content_sha256` of
`made_by`, over all other keys and values (so not over spaces and the order of keys); in a text with comments
of `#` it is the last line, over the lines above; in an HTML page a comment. A file is never written over one
of another kind, which is recognised by its content.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import unicodedata
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from .errors import FileError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

KEY = "content_sha256"
_MADE_BY = '\n "made_by": {\n'
"""As a document's text begins that object: no text in JSON holds the end of a line."""
MOST_FILE_BYTES = 2**28
"""Of a file that is read: a profile of a hundred thousand layers has fewer."""
_NEW = ".pplan-new"
"""How the name of a file ends that is being written."""
_LAST = "# As pplan wrote it, by the SHA-256 of the lines above: "
_STEERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_NOT_PLAIN = re.compile(r"[^\n\t -~]")


def add_hash(text: str) -> str:
    """A document's JSON, indented by 1, with the hash of its content where it says what made it.

    Characters that a terminal would obey are escaped.
    """
    text = escape_text(text)
    if _MADE_BY not in text:
        return text
    digest = _hash(json.loads(text))
    return text.replace(_MADE_BY, f'{_MADE_BY}  "{KEY}": "{digest}",\n', 1)


def escape_text(text: str) -> str:
    """Escape all characters of a JSON text that a terminal would interpret."""
    text = text.replace("\r", "")
    plain = text.isascii() and text.replace("\n", "").isprintable()
    return text if plain else _NOT_PLAIN.sub(_escape, text)


def add_line_hash(text: str) -> str:
    """Append a comment with the hash to a text of lines."""
    start, end = ("<!--\n", "\n-->\n") if text.startswith(_HTML) else ("", "\n")
    return f"{text}{start}{_LAST}{sha256(text + start)}{end}"


def is_unchanged(text: str) -> bool:
    """Return whether the text matches its hash: nobody edited it."""
    above, mark, last = text.rpartition(_LAST)
    if mark:
        digest = hashlib.sha256(above.encode(errors="surrogatepass")).hexdigest()
        return last.removesuffix("-->\n").strip() == digest
    content = _content(text)
    made_by = None if content is None else content.get("made_by")
    try:
        return isinstance(made_by, dict) and KEY in made_by and made_by[KEY] == _hash(content)
    except RecursionError:
        return False


def matches_fields(text: str, about: Mapping[str, str]) -> bool:
    """Return whether a document agrees with these fields of the file that it was made for.

    `profile.file` is the key `file` of `profile`. Missing fields agree, and so does a text that is not a
    document.
    """
    for path, expected in about.items():
        value: Any = _content(text)
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, "", expected):
            return False
    return True


def _parse(text: str) -> Any:
    """Return the content of a JSON text, or None for other texts."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _content(text: str) -> dict[str, Any] | None:
    content = _parse(text)
    return content if isinstance(content, dict) else None


def _hash(content: Any) -> str:
    """Over the content but its hash, in one order and without spaces."""
    made_by = {key: value for key, value in content["made_by"].items() if key != KEY}
    canonical = json.dumps(content | {"made_by": made_by}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _escape(match: re.Match[str]) -> str:
    """Return a character as JSON escapes it. Line ends and tabs stay: they only separate parts."""
    character = match[0]
    return json.dumps(character)[1:-1] if unicodedata.category(character) in _STEERS else character


def escape_surrogates(content: Any) -> Any:
    """Escape bytes of file names that are not UTF-8 in every text of a document."""
    if isinstance(content, str):
        return content.encode(errors="backslashreplace").decode()
    if isinstance(content, dict):
        return {escape_surrogates(key): escape_surrogates(value) for key, value in content.items()}
    return [escape_surrogates(item) for item in content] if isinstance(content, list | tuple) else content


FOR_A_RUNTIME = "file for a runtime"
KINDS = {
    "profile": "layers",
    "plan": "prediction",
    "simulation": "bubble_rate_span",
    "frontier": "points",
    "degrees": "combinations",
    "machine": "model_sizes",
    FOR_A_RUNTIME: "step_seconds",
}
"""A key at the top of a file that only files of this kind have, and those named before it."""
_OTHER_KINDS = {"check": "cases", "calibration": "corrections", "sweep": "rows", "trace": "traceEvents"}
"""The same for kinds of files that no command mistakes for another."""
COSTS, SVG, JSON, TEXT = "table or graph of costs", "SVG drawing", "JSON file", "text"
PDF, PNG = "PDF", "PNG image"
REPORT = "report page"
_HTML, _OF_PPLAN = "<!DOCTYPE html>", '<meta name="generator" content="pplan">'


def list_kinds(content: dict[str, Any]) -> list[str]:
    """The kinds that a document may be of, by its keys."""
    return [name for name, key in KINDS.items() if key in content]


def detect_kind(text: str) -> str | None:
    """Return the kind of a file of pplan by keys that only this kind has, or None."""
    return next(iter(list_kinds(_content(text) or {})), None)


def file_kind(text: str) -> str:
    """Return the kind of a file as text: one of pplan's kinds, another format, or plain text."""
    start = text.lstrip("\ufeff \t\r\n")
    if start.startswith(("{", "[")):
        return detect_kind(text) or _other_json(text)
    if start.startswith(("<svg", "<?xml")):
        return SVG
    if start.startswith(_HTML):
        return REPORT if _OF_PPLAN in start[:2000] else "HTML page"
    first = start.partition("\n")[0]
    return COSTS if "forward_" in first and ("," in first or "--" in first) else TEXT


def check_same_kind(path: Path, kind: str) -> None:
    """Raises FileError where a file of another kind is at the path; an empty one is of any."""
    if not path.is_file():
        return
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error.strerror}", "Name another file.") from error
    old_kind = _content_kind(content)
    if content.strip() and old_kind != kind:
        raise FileError(
            f"{path}: is a {old_kind}, and a {kind} is written only over a {kind}",
            "Name another file, or delete that one first.",
        )


def _content_kind(content: bytes) -> str:
    """Kind of a file's bytes, in words."""
    if content.startswith(b"%PDF"):
        return PDF
    if content.startswith(b"\x89PNG"):
        return PNG
    try:
        return file_kind(content.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return "binary file"


def _other_json(text: str) -> str:
    content = _parse(text)
    names = (name for name, key in _OTHER_KINDS.items() if isinstance(content, dict) and key in content)
    return TEXT if content is None else next(names, JSON)


def read_bytes(path: Path, kind: str) -> bytes:
    """The content of a file. Raises FileError, with `kind` in the message.

    A device or a named pipe, which may never end, is refused; a pipe of the shell (/dev/stdin) is read.
    """
    try:
        mode = path.stat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or _is_shell_pipe(path, mode)):
            raise FileError(f"{path}: is no regular file, so not a {kind} file", f"Name a {kind} file.")
        with path.open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        raise FileError(f"{path}: no such {kind} file", f"Name an existing {kind} file.") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: cannot be read: {why}", "Check the path and its rights.") from error
    if len(content) > MOST_FILE_BYTES:
        raise FileError(
            f"{path}: has more than {MOST_FILE_BYTES // 2**20} MiB, which no {kind} file needs",
            f"Name a {kind} file.",
        )
    return content


def _is_shell_pipe(path: Path, mode: int) -> bool:
    return stat.S_ISFIFO(mode) and path.parts[:2] in (("/", "dev"), ("/", "proc"))


def parse_toml(text: str) -> dict[str, Any]:
    """The keys of a TOML text. Raises ValueError: no TOML, nested too deep, a number that is too long."""
    import tomllib  # most commands read none

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def decode_text(content: bytes, path: Path, kind: str) -> str:
    """The text of a file's content, in UTF-8 with or without a byte order mark. Raises FileError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise FileError(
            f"{path}: not a text file, so not a {kind} file", f"Name an existing {kind} file."
        ) from None


def read_text(path: Path, kind: str) -> str:
    """The text of a file. Raises FileError, with `kind` in the message."""
    return decode_text(read_bytes(path, kind), path, kind)


def check_destination(path: Path, *, force: bool) -> None:
    """Check that a file may be written to `path`.

    A dangling link counts as existing. Folders and devices are never replaced.

    Raises:
        FileError: The file may not be written.
    """
    try:
        exists, folder, file = os.path.lexists(path), path.is_dir(), path.is_file() or not path.exists()
    except OSError as error:  # a name that is too long, say
        raise FileError(f"{path}: cannot be written: {error.strerror}", "Name a file.") from error
    if folder:
        raise FileError(f"{path}: is a folder", "Name a file.")
    if not file:
        raise FileError(f"{path}: is no file that could be replaced", "Name a file.")
    if exists and not force:
        raise FileError(f"{path} exists already", "Give `force` to replace it, or another name.")


def write_whole(path: Path, content: str | bytes, *, force: bool) -> None:
    """Write a text (in UTF-8) or bytes to a temporary file next to `path` and rename it.

    A link stays, and the file it leads to is written. Raises FileError where `path` exists and `force` is not
    given, or where the disk refuses.
    """
    check_destination(path, force=force)
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    check_same_kind(path, _content_kind(data))
    temporary = None
    try:
        target = path.resolve(strict=False) if path.is_symlink() else path
        remove_leftovers(target)
        with _open_temporary(target) as file:
            temporary = Path(file.name)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()
            temporary.chmod(0o666 & ~_umask())
            temporary.replace(target)
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead to themselves, before 3.13
        raise FileError(
            f"{path}: cannot be written: {getattr(error, 'strerror', None) or error}",
            "Nothing was changed. Free some space, or name another place with -o.",
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _open_temporary(target: Path) -> IO[bytes]:
    """Open a new file next to the target.

    It is locked while open, so that nobody removes it as a leftover.

    The file itself is locked: filelock would leave a second one next to each of the user's files.
    """
    while True:
        file = tempfile.NamedTemporaryFile(  # noqa: SIM115 - the caller closes it
            "wb",
            dir=target.parent,
            prefix=f".{target.name}.",
            suffix=_NEW,
            delete=False,
        )
        with suppress(OSError):  # a file system without locks
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # another process took it before it was locked


def remove_leftovers(target: Path) -> None:
    """Remove temporary files of processes that were killed while they wrote the file."""
    with suppress(OSError):
        for path in target.parent.iterdir():
            if path.name.startswith(f".{target.name}.") and path.name.endswith(_NEW):
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    if fcntl is None:
        return
    with suppress(OSError):
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        finally:
            os.close(file)


def sha256(content: str | bytes) -> str:
    """Hexadecimal SHA-256 of a file's content; of a text in UTF-8."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
