"""Write the pages of the site: docs/, the pages of the root, and the reference made of the code.

`python docs/site_pages.py` writes them to .site/pages, where `zensical build --strict` takes them.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pplan
from pplan.cli.schema_command import DOCUMENTS, document_schema
from pplan.cli.usage import list_verbs
from pplan.cli.verbs import root

ROOT = Path(__file__).resolve().parent.parent
OF_THE_ROOT = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}


def write_pages(folder: Path) -> None:
    """Write all pages of the site: those of docs/, those of the root, and those made of the code."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder, ignore=shutil.ignore_patterns("*.py", "*.csv", "__pycache__"))
    pages = {
        "commands.md": "\n".join(_commands()),
        "functions.md": "\n".join(_functions()),
        "fields.md": "\n".join(_fields()),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(),
        **{f"schemas/{kind}.json": json.dumps(document_schema(kind), indent=1) for kind in DOCUMENTS},
    }
    for name, content in pages.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    for path in folder.rglob("*.md"):
        name = path.relative_to(folder).as_posix()
        path.write_text(_site_links(path.read_text(), name))


def _site_links(markdown: str, name: str) -> str:
    """Lead links to files of the root to their pages; they become words where the site has none."""
    if name.startswith("lab/"):
        return markdown
    at_root = name in ("contributing.md", "changelog.md")
    return re.sub(r"\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", lambda match: _link(match, at_root), markdown)


def _link(match: re.Match[str], at_root: bool) -> str:
    words, target, heading = match[1], match[2], match[3] or ""
    if target.startswith("https://") or not target:
        return match[0]
    if at_root or target.startswith("../"):
        target = target.removeprefix("../")
        if target.startswith("docs/"):
            return f"[{words}]({target.removeprefix('docs/')}{heading})"
        return f"[{words}]({OF_THE_ROOT[target]}{heading})" if target in OF_THE_ROOT else words
    return match[0]


def _commands() -> Iterator[str]:
    """Every verb with its options, examples and exit statuses, as its help says them."""
    yield "# Commands\n\nMade from the code; `pplan VERB --help` prints the same.\n"
    for verb, command in list_verbs(root):
        yield f"## pplan {verb}\n\n{_sentence(command.help or '')}\n"
        yield "```sh\n" + "\n".join(command.entry.examples) + "\n```\n"
        yield "| option | value | |\n| --- | --- | --- |"
        for parameter in command.params:
            names = ", ".join(f"`{name}`" for name in parameter.opts)
            if parameter.param_type_name == "argument":
                names = f"`{parameter.metavar or parameter.name.upper()}`"
            form = parameter.metavar or ""
            yield f"| {names} | {_cell(form)} | {_cell(getattr(parameter, 'help', '') or '')} |"
        yield ""


MOST_ON_A_LINE = 4


def _functions() -> Iterator[str]:
    """The public functions with their arguments and docstrings."""
    yield "# Functions\n\nMade from the code; the tests run the examples.\n"
    for name in pplan.__all__:
        value = getattr(pplan, name)
        if inspect.isfunction(value):
            yield f"## {name}\n\n```python\npplan.{name}{_signature(value)}\n```\n"
            yield _docstring(inspect.getdoc(value) or "") + "\n"
    yield "## Classes and errors\n"
    for name in pplan.__all__:
        value = getattr(pplan, name)
        if inspect.isclass(value):
            yield f"- `{name}`: {_sentence(inspect.getdoc(value) or '')}"
    yield ""


def _signature(function: Any) -> str:
    """The arguments, each on a line where they are many."""
    signature = inspect.signature(function)
    every = list(signature.parameters.values())
    words = [_argument(own) for own in every]
    kinds = [own.kind for own in every]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returned = f" -> {signature.return_annotation}"
    if len(every) <= MOST_ON_A_LINE:
        return f"({', '.join(words)}){returned}"
    return "(\n" + "".join(f"    {word},\n" for word in words) + f"){returned}"


def _argument(own: inspect.Parameter) -> str:
    star = "*" if own.kind is own.VAR_POSITIONAL else ""
    default = "" if own.default is own.empty else f" = {own.default!r}"
    return f"{star}{own.name}: {own.annotation}{default}"


SECTIONS = ("Args", "Attributes", "Options", "Raises", "Returns", "Yields")
"""Headings of a docstring's sections."""


def _docstring(text: str) -> str:
    """A docstring as Markdown: sections as lists, examples as blocks."""
    return re.sub(
        r"((?:^(?:>>>|\.\.\.).*\n?)(?:^.+\n?)*)",
        lambda match: f"```pycon\n{match[1].rstrip()}\n```\n",
        "\n".join(_sections(text.splitlines())),
        flags=re.MULTILINE,
    )


def _sections(lines: list[str]) -> Iterator[str]:
    section = ""
    for line in lines:
        name, _, rest = line.strip().partition(": ")
        if line.removesuffix(":") in SECTIONS:
            section = line.removesuffix(":")
            yield f"**{section}**\n"
        elif not section or not line.startswith("    "):
            section = section if not line else ""
            yield line
        elif section in ("Returns", "Yields") or line.startswith("        "):
            yield f"  {line.strip()}" if section not in ("Returns", "Yields") else line.strip()
        else:
            yield f"- `{name}`: {rest}"


def _fields() -> Iterator[str]:
    """The keys of every file, of its JSON Schema."""
    yield "# Keys of the files\n\nMade from the JSON Schemas, which `pplan schema KIND` prints.\n"
    for kind in DOCUMENTS:
        schema = document_schema(kind)
        words = _sentence(schema.get("description", ""))
        yield f"## {kind}\n\n[Its JSON Schema](schemas/{kind}.json). {words}\n"
        yield from _table(schema)
        for name, record in schema.get("$defs", {}).items():
            if "properties" in record:
                yield f"### {name} of {kind}\n\n{_sentence(record.get('description', ''))}\n"
                yield from _table(record)


def _table(schema: dict[str, Any]) -> Iterator[str]:
    yield "| key | type | |\n| --- | --- | --- |"
    required = schema.get("required", [])
    for name, own in schema["properties"].items():
        need = "required" if name in required else f"default `{json.dumps(own.get('default'))}`"
        yield f"| `{name}` | {_cell(_type(own))} | {_cell(need)} |"
    yield ""


def _type(own: dict[str, Any]) -> str:
    """`integer`, `list of PlannedStage`, `number or null`."""
    if "$ref" in own:
        return own["$ref"].rpartition("/")[2]
    if "anyOf" in own:
        return " or ".join(map(_type, own["anyOf"]))
    if "enum" in own:
        return " or ".join(map(str, own["enum"]))
    if own.get("type") == "array":
        return f"list of {_type(own.get('items', {}))}"
    return str(own.get("const", own.get("type", "any")))


def _sentence(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return _sentence(text).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    write_pages(ROOT / ".site/pages")
