"""`package.module:factory`: the module is imported, the factory found and called; and what goes wrong."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...cost_models.errors import ModelError, UsageError
from ..user_model.failures import at_user_line, first_line
from ..user_model.loaded_model import describe_type

_MOST_NAMES = 5
"""Callables of a module that an error names."""


def call_factory(name: str, settings: Mapping[str, object] | None = None) -> Any:
    """What the factory `name` returns for the keywords `settings`, or the object itself where it is a module.

    A factory returns the model and an example input, as `ModelInput.of` takes it. The example's batch is best
    a number that no other dimension 0 of its tensors has: a tensor that all samples share and that is as long
    as the batch would be taken for samples, and repeated with them.

    The working directory is put on the import path, as `python -m` does. Raises ModelError, and UsageError
    where the factory does not take a keyword, or an nn.Module is given any.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ModelError(
            f"model {name!r}: a module and a factory are needed around the colon",
            "Name it as package.module:factory.",
        )
    if _is_path(module_name):
        raise ModelError(
            f"model {name!r}: {module_name} is a path, not the name of a module",
            f"MODULE is an importable dotted name: {_dotted(module_name, attribute)}.",
        )
    target = _attribute(_imported(module_name, name), attribute, name)
    if not isinstance(target, nn.Module):
        return _called(target, name, settings or {})
    if settings:
        raise UsageError(
            f"settings={dict(settings)!r}: {name} is a module already built, which takes no options",
            f"Omit `settings`, or name a factory: a function that builds the {type(target).__name__}.",
        )
    return target


def refuse_module(name: str) -> None:
    """Raises ModelError where `name` is a module's, or a path: the factory was forgotten.

    Nothing of the module itself is run.
    """
    if _is_path(name):
        raise ModelError(
            f"model {name!r}: this is a path, and no factory is named",
            f"Name a module by its importable dotted name, and its factory: {_dotted(name, 'FACTORY')}.",
        )
    _look_here()
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return
    if spec is None or spec.origin is None:
        return
    callables = _callables(Path(spec.origin))
    has = f" It has {', '.join(callables[:_MOST_NAMES])}{', ...' if len(callables) > _MOST_NAMES else ''}."
    raise ModelError(
        f"model {name!r}: this is a module ({spec.origin}), and no factory is named",
        f"Name the factory too, as in {name}:{callables[0] if callables else 'FACTORY'}."
        + (has if callables else ""),
    )


def _is_path(module_name: str) -> bool:
    return (
        any(mark in module_name for mark in "/\\")
        or module_name.startswith(".")
        or (module_name.endswith(".py") and Path(module_name).is_file())
    )


def _dotted(path: str, attribute: str) -> str:
    """How the file is to be named, and where from, in words."""
    file = Path(path.replace("\\", "/")).with_suffix("")
    if file.is_absolute() or ".." in file.parts:
        return f"{file.name}:{attribute} (run pplan in the folder {file.parent})"
    return f"{'.'.join(file.parts).lstrip('.')}:{attribute}"


def _callables(source: Path) -> list[str]:
    """The public functions and classes that a module's text defines."""
    try:
        body = ast.parse(source.read_bytes()).body
    except (OSError, ValueError, SyntaxError):
        return []
    definitions = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [node.name for node in definitions if not node.name.startswith("_")]


def _look_here() -> str:
    """Puts the working directory on the import path, and returns it."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    return here


def _imported(module_name: str, name: str) -> ModuleType:
    here = _look_here()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ModelError(
                f"model {name!r}: there is no module {error.name!r}",
                f"Run pplan where {module_name.split('.')[0]} can be imported from; looked in {here} "
                "and the installed packages.",
            ) from None
        raise _import_failure(module_name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(module_name, error) from error


def _import_failure(module_name: str, error: BaseException) -> ModelError:
    return ModelError(
        f"importing {module_name} failed: {first_line(error)}{at_user_line(error)}",
        f'Mend it; python -c "import {module_name}" shows the same.',
    )


def _attribute(module: ModuleType, attribute: str, name: str) -> Any:
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, dir(target), n=3)
            raise ModelError(
                f"model {name!r}: {module.__name__} has no {attribute!r}",
                f"Nearest: {', '.join(near)}." if near else f"Define {attribute} in {module.__file__}.",
            )
        target = getattr(target, part)
    return target


def _called(factory: Callable[..., Any] | Any, name: str, settings: Mapping[str, object]) -> Any:
    if not callable(factory):
        raise ModelError(
            f"model {name!r} is {describe_type(factory)}, which cannot be called",
            "Name a function that takes no arguments and returns an nn.Module.",
        )
    _refuse_unexpected(factory, name, settings)
    try:
        return factory(**settings)
    except (Exception, SystemExit) as error:
        how = f"with {_format_settings(settings)}" if settings else "without arguments"
        raise ModelError(
            f"{name} failed: {first_line(error)}{at_user_line(error)}",
            f"Mend the factory; it is called {how}.",
        ) from error


def _refuse_unexpected(factory: Callable[..., Any], name: str, settings: Mapping[str, object]) -> None:
    """Raises UsageError for the first setting that is no keyword of the factory."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_keyword = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    for key in settings:
        if key not in by_keyword:
            near = difflib.get_close_matches(key, by_keyword, n=3)
            hint = f"Nearest: {', '.join(near)}. " if near else ""
            raise UsageError(
                f"settings[{key!r}]: {name} takes no keyword {key!r}",
                f"{hint}Its signature is {name.partition(':')[2]}{signature}.",
            )


def _format_settings(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in settings.items())
