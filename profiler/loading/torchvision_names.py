"""Names of torchvision's models, read from its files: importing it takes seconds."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from ...cost_models.errors import ModelError
from ...cost_models.quantities import either

_REGISTERED = re.compile(
    r'^@register_model\((?:(?:name=)?"(\w+)")?\)\n(?:@[^\n]*\n(?:[ )][^\n]*\n)*)*def (\w+)', re.MULTILINE
)
"""A function that builds a model, with the name that is registered where it is another one."""


def refuse_unknown_name(name: str) -> None:
    """Refuse a name that no model can have, before torch is imported.

    Args:
        name: The name of a model. Files of transformers, factories, and files or modules that exist pass.

    Raises:
        ModelError: torchvision is installed and has no model of this name.
    """
    names, is_other = list_torchvision_names(), not name.isidentifier() or Path(name).exists()
    if not names or is_other or name.lower() in names or Path(f"{name}.py").exists() or find_spec(name):
        return
    raise unknown_name(name, names)


def list_torchvision_names() -> list[str]:
    """List the names of the models that the installed torchvision registers; empty without torchvision."""
    if (spec := find_spec("torchvision")) is None:
        return []
    paths = [Path(folder) / "models" for folder in spec.submodule_search_locations or ()]
    texts = [file.read_text(encoding="utf-8") for path in paths for file in path.rglob("*.py")]
    return sorted(name or function for text in texts for name, function in _REGISTERED.findall(text))


def unknown_name(name: str, names: Collection[str]) -> ModelError:
    """Make the error for a name that is none of `names`, with the nearest."""
    near = difflib.get_close_matches(name.lower(), sorted(names), n=3, cutoff=0.5)
    return ModelError(
        f"model {name!r}: torchvision has no model of this name",
        (f"Did you mean {either(near)}? " if near else "")
        + "A model of your own is named package.module:factory, one of transformers hf:NAME.",
    )
