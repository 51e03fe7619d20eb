"""Names of models: torchvision's, and which ones a file may name. Needs no torch."""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost_models.errors import ModelError
from ..cost_models.quantities import either

if TYPE_CHECKING:
    from .profile_file import Profile

# Names of torchvision's models, read from its files: importing it takes seconds.

_REGISTERED = re.compile(
    r'^@register_model\((?:(?:name=)?"(\w+)")?\)\n(?:@[^\n]*\n(?:[ )][^\n]*\n)*)*def (\w+)', re.MULTILINE
)
"""A function that builds a model, with the name that is registered where it is another one."""
_MOST_NAMES = 5
"""Callables of a module that an error names."""


def refuse_unknown_name(name: str) -> None:
    """Refuse a name that no model can have. No module is imported, and torch neither.

    Args:
        name: The name of a model. Those of transformers, and factories in modules, pass.

    Raises:
        ModelError: The name is a path, a module without its factory, or none of torchvision's models.
    """
    module, colon, factory = name.partition(":")
    if f"{module}{colon}" == TRANSFORMERS or name.endswith(".json"):
        return
    if any(mark in module for mark in "/\\") or module.startswith(".") or module.endswith(".py"):
        raise _path_refusal(name, module, factory)
    if colon and not (module and factory):
        raise ModelError(
            f"model {name!r}: a module and a factory are needed around the colon",
            "Name it as package.module:factory.",
        )
    importlib.invalidate_caches()
    names = list_torchvision_names()
    if colon or name.lower() in names:
        return
    _refuse_module(name)
    if names:
        raise unknown_name(name, names)


def _path_refusal(name: str, path: str, factory: str) -> ModelError:
    """The error for a path: what to type in its place."""
    file = Path(path.replace("\\", "/"))
    callables = [] if factory else _callables(file)
    word, module = factory or next(iter(callables), "FACTORY"), file.with_suffix("")
    if module.is_absolute() or ".." in module.parts:
        typed = f"{module.name}:{word} (run pplan in the folder {module.parent})"
    else:
        typed = f"{'.'.join(module.parts).lstrip('.')}:{word}"
    if factory:
        return ModelError(
            f"model {name!r}: {path} is a path, not the name of a module",
            f"MODULE is an importable dotted name: {typed}.",
        )
    return ModelError(
        f"model {name!r}: this is a path, and no factory is named",
        f"Name a module by its importable dotted name, and its factory: {typed}.{_listed(callables)}",
    )


def _refuse_module(name: str) -> None:
    """Refuse the name of a module, or of what is in one behind a dot: a factory stands behind a colon.

    Args:
        name: A dotted name. The module that it names is looked for, and nothing of it is run.

    Raises:
        ModelError: There is such a module.
    """
    if (source := find_source(name)) is None:
        return
    file, module, factory = source
    callables = _callables(file)
    if not factory:
        typed = f"{name}:{next(iter(callables), 'FACTORY')}"
        raise ModelError(
            f"model {name!r}: this is a module ({file}), and no factory is named",
            f"Name the factory too, as in {typed}.{_listed(callables)}",
        )
    near = [] if factory in callables else difflib.get_close_matches(factory, callables, n=1)
    raise ModelError(
        f"model {name!r}: a colon separates the module ({file}) and its factory",
        f"Name it as {module}:{near[0] if near else factory}.{_listed(callables)}",
    )


def find_source(name: str) -> tuple[Path, str, str] | None:
    """The file of the longest part of a dotted name that is a module, that part, and what follows it."""
    source, parts = None, name.split(".")
    folders: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    for end in range(1, len(parts) + 1 if all(map(str.isidentifier, parts)) else 0):
        module = ".".join(parts[:end])
        spec = PathFinder.find_spec(module, folders)
        if spec is None and end == 1 and module not in sys.modules:
            spec = find_spec(module)
        if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
            source = Path(spec.origin), module, ".".join(parts[end:])
        folders = None if spec is None else spec.submodule_search_locations
        if folders is None:
            break
    return source


def _callables(file: Path) -> list[str]:
    """The public functions and classes that a file defines, those that need no argument first."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return []
    definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [node.name for node in sorted(definitions, key=_needs) if not node.name.startswith("_")]


def _needs(definition: ast.FunctionDef | ast.ClassDef) -> bool:
    """Return whether a function, or a class's `__init__`, is called with arguments."""
    if isinstance(definition, ast.FunctionDef):
        return len(definition.args.args) > len(definition.args.defaults)
    own = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return any(len(node.args.args) - 1 > len(node.args.defaults) for node in own)


def _listed(callables: Sequence[str]) -> str:
    more = ", ..." if len(callables) > _MOST_NAMES else ""
    return f" It has {', '.join(callables[:_MOST_NAMES])}{more}." if callables else ""


@cache
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


# Configurations of transformers' models: files, and what huggingface_hub has downloaded before.


def find_configuration(name: str) -> Path | None:
    """Find the config.json that a name leads to.

    Args:
        name: A file, the folder that holds it, or the name of a hub's model.

    Returns:
        The file, or None: there is none, here or in the local cache of huggingface_hub.
    """
    path = Path(name)
    if not (path.exists() if reads_as_path(name) else (path / "config.json").is_file()):
        return _downloaded_before(name)
    return path / "config.json" if path.is_dir() else path


def reads_as_path(name: str) -> bool:
    """Return whether a configuration's name is that of a file or folder, and not a model type."""
    return "/" in name or "\\" in name or name.endswith(".json")


def hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by the environment variables that it reads."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _downloaded_before(name: str) -> Path | None:
    """The configuration of a hub's model (`owner/model`, or `model`) in the local cache of huggingface_hub:
    that of its branch main, or else the newest."""
    if re.fullmatch(r"([\w.-]+/)?[\w.-]+", name) is None:
        return None
    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    with suppress(OSError, ValueError):
        file = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
        if file.is_file():
            return file
    files = [file for file in folder.glob("snapshots/*/config.json") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


# Which model is built again for a profile. A file may name those of torchvision and transformers, by names
# and sizes that are no code, no path and no address; anything else is built only where the user names it.
#
# Needs no torch: whether such a name exists is seen where it is built (`load_model(..., known_only=True)`).

LOSSES = ("cross-entropy", "mse", "none")
"""Names of losses that are no code of the user's."""
TRANSFORMERS = "hf:"
MOST_CHARACTERS = 80
"""Characters of a name in a file that an error shows."""

_TORCHVISION = re.compile(r"[A-Za-z0-9_]{1,100}")
_OF_TRANSFORMERS = re.compile(r"hf:[A-Za-z0-9][A-Za-z0-9_-]{0,99}(?:\.[0-9]{1,3})?")
_FACTORY = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", re.ASCII)
_KEY = re.compile(r"[a-z][a-z0-9_]{0,99}")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,39}")
_LEADS_OUTSIDE = re.compile(
    "remote|trust|auto_map|hub|kernels|implementation|backbone|timm|pretrained|checkpoint|quantiz|architecture"
    "|download|local_files|model_type"
)
"""Parts of keys with which a configuration has other code, weights or places looked up."""
_WORDS_FOR = ("act", "activation", "position_embedding_type", "layer_types", "feed_forward_proj", "norm_type")
"""Keys, or what they end with, whose values are words."""
_DEEPEST = 3


@dataclass(frozen=True)
class NamedModel:
    """A model to be built: its name, and what its factory or configuration is given.

    `by_user`: the name is from the command line or from Python, not from a file.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_user: bool = False


def model_for(profile: Profile, model: str | None, settings: Mapping[str, Any]) -> NamedModel:
    """`model` with `settings`, as the user names them; where `model` is None the profile's own, with
    `settings` on top of its own.

    Raises ModelError where the profile names code, a path, or settings that lead to any.
    """
    if model is not None:
        return NamedModel(model, dict(settings), by_user=True)
    name = profile.model
    if not may_name(name):
        raise _refused(f"the profile names the model {quote_name(name)}", profile)
    if name.startswith(TRANSFORMERS):
        for key, value in profile.settings.items():
            if not _is_size(key, value):
                raise _refused(f"the profile gives {quote_name(name)} the setting {quote_name(key)}", profile)
    elif profile.settings:
        key = next(iter(profile.settings))
        raise _refused(
            f"the profile gives {quote_name(name)}, which takes none, the setting {quote_name(key)}", profile
        )
    return NamedModel(name, {**profile.settings, **settings})


def loss_for(profile: Profile, loss: str | None) -> str:
    """`loss`, as the user names it; where it is None, the profile's. Raises ModelError where that is code."""
    if loss is not None:
        return loss
    own = "none" if profile.loss is None else profile.loss.name
    if own not in LOSSES:
        typed = own if _FACTORY.fullmatch(own) and len(own) <= MOST_CHARACTERS else "package.module:function"
        raise ModelError(
            f"the profile names the loss {quote_name(own)}: a file's word runs no code",
            f"Name it yourself, if it is yours: loss={typed!r}; or one of {', '.join(LOSSES)}.",
        )
    return own


def input_function_for(profile: Profile, input_like: str | None) -> str | None:
    """`input_like`, as the user names it; None where the model was profiled without. Raises ModelError where
    only the profile names it."""
    own = profile.input_like
    if input_like is None and own is not None:
        typed = own if _FACTORY.fullmatch(own) and len(own) <= MOST_CHARACTERS else "package.module:function"
        raise ModelError(
            f"the profile names the function of its input {quote_name(own)}: a file's word runs no code",
            f"Name it yourself, if it is yours: input_like={typed!r}.",
        )
    return input_like


def may_name(name: str) -> bool:
    """Whether a file may name this model: as torchvision's and transformers' are called."""
    return (_TORCHVISION.fullmatch(name) or _OF_TRANSFORMERS.fullmatch(name)) is not None


def quote_name(text: str) -> str:
    """A name out of a file as an error shows it: in quotes, ASCII with everything else escaped, cut."""
    quoted = ascii(text[:MOST_CHARACTERS])
    return f"{quoted}…" if len(text) > MOST_CHARACTERS else quoted


HIDDEN = "..."
"""What a profile has for the value of a setting that may be private."""


def public_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the values of settings that may be private: texts other than words of a configuration."""
    return {key: value if _is_size(key, value) else HIDDEN for key, value in settings.items()}


def public_name(model: str) -> str:
    """Shorten the path of a configuration to its file and folder: `hf:llama/config.json`."""
    path = Path(model.removeprefix(TRANSFORMERS))
    if not (model.startswith(TRANSFORMERS) and len(path.parts) > 2 and path.suffix == ".json"):
        return model
    return f"{TRANSFORMERS}{path.parent.name}/{path.name}"


def _is_size(key: str, value: object) -> bool:
    """Whether a setting is a number, a switch or a word of a configuration's own, and leads nowhere else."""
    if not _KEY.fullmatch(key) or _LEADS_OUTSIDE.search(key):
        return False
    return _is_plain(value, 0, words=key.endswith(_WORDS_FOR))


def _is_plain(value: object, depth: int, *, words: bool) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return True
    if isinstance(value, str):
        return words and _WORD.fullmatch(value) is not None
    if isinstance(value, list) and depth < _DEEPEST:
        return all(_is_plain(item, depth + 1, words=words) for item in value)
    return False


def _refused(what: str, profile: Profile) -> ModelError:
    return ModelError(f"{what}: a file's word runs no code", _typed(profile))


def _typed(profile: Profile) -> str:
    """What the user types to have it built all the same."""
    name, settings = profile.model, profile.settings
    plain = (
        all(_KEY.fullmatch(key) and _fits(value) for key, value in settings.items()) and len(settings) <= 6
    )
    if len(name) <= MOST_CHARACTERS and plain and (_FACTORY.fullmatch(name) or may_name(name)):
        settings_text = f", settings={dict(settings)!r}" if settings else ""
        return f"Name it yourself, if you know and trust it: model={name!r}{settings_text}"
    return "Name the model yourself: model='package.module:factory', with its `settings`."


def _fits(value: object) -> bool:
    """Whether a setting's value may stand in the line that is proposed."""
    if isinstance(value, str):
        return len(value) <= MOST_CHARACTERS // 2 and value.isascii() and value.isprintable()
    return value is None or isinstance(value, bool | int | float)
