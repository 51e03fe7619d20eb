"""Whether a file is still as pplan wrote it: the SHA-256 of its content stands in it.

In a JSON document it is `content_sha256` of `made_by`, over all other keys and values (so not over spaces and
the order of keys); in a text with comments of `#` it is the last line, over the lines above.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

KEY = "content_sha256"
_MADE_BY = '\n "made_by": {\n'
"""As a document's text begins that object: no text in JSON holds the end of a line."""
_LAST = "# As pplan wrote it, by the SHA-256 of the lines above: "
_STEERS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def sealed(text: str) -> str:
    """A document's JSON, indented by 1, with the hash of its content where it says what made it.

    Characters that a terminal would obey are escaped.
    """
    text = escaped(text)
    if _MADE_BY not in text:
        return text
    found = _hash(json.loads(text))
    return text.replace(_MADE_BY, f'{_MADE_BY}  "{KEY}": "{found}",\n', 1)


def escaped(text: str) -> str:
    """A JSON text in which no character stands as it is that a terminal would obey."""
    text = text.replace("\r", "")
    return text if text.isascii() and text.replace("\n", "").isprintable() else "".join(map(_escaped, text))


def sealed_lines(text: str) -> str:
    """A text in lines, with a comment of its hash behind it."""
    return f"{text}{_LAST}{sha256(text.encode()).hexdigest()}\n"


def is_unchanged(text: str) -> bool:
    """Whether the text holds its own hash: nobody edited it."""
    above, mark, last = text.rpartition(_LAST)
    if mark:
        return last.strip() == sha256(above.encode(errors="surrogatepass")).hexdigest()
    content = _content(text)
    made_by = None if content is None else content.get("made_by")
    try:
        return isinstance(made_by, dict) and KEY in made_by and made_by[KEY] == _hash(content)
    except RecursionError:
        return False


def is_about(text: str, about: Mapping[str, str]) -> bool:
    """Whether a document says this of what it is made for, as far as it says anything: `profile.file` is the
    key `file` of `profile`. A text that is no document says nothing."""
    for path, expected in about.items():
        value: Any = _content(text)
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value not in (None, "", expected):
            return False
    return True


def _content(text: str) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _hash(content: Any) -> str:
    """Over the content but its hash, in one order and without spaces."""
    made_by = {key: value for key, value in content["made_by"].items() if key != KEY}
    canonical = json.dumps(content | {"made_by": made_by}, sort_keys=True, separators=(",", ":"))
    return sha256(canonical.encode()).hexdigest()


def _escaped(character: str) -> str:
    """As JSON may write it in a text. Ends of lines and tabs stay: they can only lie between its parts."""
    if character in "\n\t" or unicodedata.category(character) not in _STEERS:
        return character
    return json.dumps(character)[1:-1]
