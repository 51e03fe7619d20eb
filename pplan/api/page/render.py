"""The page's HTML: the template filled in, with its style, its scripts and its data inside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ...cost_models.text_files import escape_text
from .page_content import PageContent

SCRIPTS = ("numbers.js", "simulator.js", "timeline.js", "page.js")
_FILES = resources.files(__package__)
_IN_A_SCRIPT = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that would end a script, or a line of it, as JSON may write them."""


def render_page(content: PageContent) -> str:
    """The whole file. Texts are escaped; control characters, also those that reverse text, are shown."""
    environment = Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_visible,
    )
    environment.filters["code"] = _mark_code
    scripts = [(_FILES / name).read_text() for name in SCRIPTS]
    return environment.get_template("report.html.jinja").render(
        page=content,
        style=Markup((_FILES / "report.css").read_text()),
        scripts=[Markup(script) for script in scripts],
        data=Markup(script_json(content.data)),
        policy=" ".join(f"'sha256-{_digest(script)}'" for script in scripts),
    )


def script_json(data: Any) -> str:
    """JSON that may stand inside a script element, whatever names it holds."""
    text = json.dumps(_visible_texts(data), separators=(",", ":"), allow_nan=False)
    return "".join(_IN_A_SCRIPT.get(character, character) for character in text)


def _visible_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _visible_texts(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_visible_texts(own) for own in value]
    return _visible(value)


def _visible(value: Any) -> Any:
    """A text with its control characters escaped."""
    if not isinstance(value, str) or isinstance(value, Markup) or value.isprintable():
        return value
    return escape_text(value.replace("\n", " ").replace("\t", " "))


def _mark_code(text: str) -> Markup:
    """HTML of a sentence in which names stand between back-ticks."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(_visible(text)))))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
