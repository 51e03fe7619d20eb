"""What decides how a model computes and how fast, as a key: its modules, its code, the conditions."""

from __future__ import annotations

import ast
import copyreg
import importlib.util
import inspect
import json
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import (
    CodeType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..cost_models.text_files import sha256
from .cache import environment, process_state
from .layer import storage_aliases
from .local_machine import device_memory_bytes, device_name, versions
from .losses import Loss, load_loss
from .modes import Setup, dtype_for
from .names import find_source
from .torch_private import REGISTRIES, tree_flatten
from .user_model import LoadedModel

_HERE = Path(__file__).resolve().parents[1]
_INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders of packages, whichever environments are stacked."""
_VERSIONED = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")),
    *(_HERE / folder for folder in ("pplan", "profiler", "runtimes", "planner", "cost_models", "cli")),
)
"""Python's own files and pplan's."""
_SIMPLE = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout)
_WRAPPERS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (MethodType, ("__func__", "__self__")),
    (property, ("fget", "fset")),
    ((classmethod, staticmethod), ("__func__",)),
)
"""Functions with what they are bound to, by attribute."""
_ATTRIBUTES = (
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodDescriptorType),
    *(types.ClassMethodDescriptorType, types.WrapperDescriptorType),
)
"""Attributes of classes that are written in C."""
_OF_TORCH = ("torch", "_operator", "math", "builtins")
_OF_PROCESS = ("logging", "threading", "_thread", "random", "weakref", "_weakref")
"""Packages whose objects hold what is another thing in every process."""
_HASHES = ("_original_object_hash",)
"""Attributes of transformers' configurations that are another number in every process."""
_MOST_VALUES = 4096
"""Elements of a floating tensor that forward may read as constants."""


def fingerprint(loaded: LoadedModel, setup: Setup) -> str:
    """Compute the key of a profile: SHA-256 of all that decides what it holds, but for chance.

    The model is not traced. Of it count its modules with their settings and source code, parameters and
    buffers by shape and dtype, and how it is to be cut; of code the files of its classes and functions, all
    files of the user's that these import, also where they are imported when forward runs, and the globals
    that these use; of the conditions input, dtype, device, modes, loss, seed, threads, versions. Neither the
    model's name nor a value of its weights or of its input counts; of whole numbers and of small tensors that
    are no weights the values count. What tells nothing about itself, such as a generator, has no key.

    Args:
        loaded: The model and its input.
        setup: How it is to be measured.

    Returns:
        64 hexadecimal digits.

    Raises:
        UsageError, ModelError: The dtype or the loss is unknown, or a tensor cannot be measured.
        Exception: Whatever an object raises that cannot be described; TypeError of Python's own objects.
    """
    code = _Code()
    loss = load_loss(setup.loss, setup.seed)
    model = loaded.module
    content = {
        "modules": code.modules(model),
        "cuts": [setup.granularity, setup.keep_together],
        "loss": None if loss is None else [loss.name, code.loss(loss)],
        **_input(loaded, setup, code),
        "device": [setup.device.type, device_name(setup.device), device_memory_bytes(setup.device)],
        "modes": repr(setup.modes),
        "seed": setup.seed,
        "versions": versions().model_dump(exclude={"time", "command"}),
        "environment": environment(),
        "process": process_state(),
        "code": code.files(),
    }
    return sha256(json.dumps(content, sort_keys=True))


def _without_addresses(text: str) -> str:
    """A text that may hold those of objects, whose addresses are others in every process."""
    return re.sub(" at 0x[0-9a-fA-F]+(?=>)", "", text)


def _input(loaded: LoadedModel, setup: Setup, code: _Code) -> dict[str, Any]:
    """Shapes of two samples, dtypes, and what else forward is given."""
    dtype, _ = dtype_for(loaded, setup.dtype)
    example = loaded.example_input_for(2).to(dtype=dtype)
    leaves, form = tree_flatten((example.args, example.kwargs))
    tensors = [
        [list(leaf.shape), str(leaf.dtype)] if isinstance(leaf, Tensor) else code.value(leaf)
        for leaf in leaves
    ]
    return {"input": tensors, "form": _without_addresses(str(form)), "dtype": str(dtype)}


class _Code:
    """The code that the values it is shown are made of, and their settings."""

    def __init__(self) -> None:
        self._names: dict[str | None, None] = {}
        """Python modules."""
        self._numbers: dict[int, tuple[int, object]] = {}
        """By identity: the number of an object, and the object itself, which is kept alive."""

    def loss(self, loss: Loss) -> object:
        """The function, which may be a module; the file that a loss of the user's is named in counts too."""
        if ":" in loss.name:
            self._names[loss.name.partition(":")[0]] = None
        return self.value(loss.function)

    def modules(self, root: nn.Module) -> list[Any]:
        """A module with all in it, and its parameters and buffers, by all their names.

        What is shared is told from two alike.
        """
        parts = list(root.named_modules(remove_duplicate=False))
        kinds = {path: type(part).__module__ for path, part in parts}
        tensors = [
            *root.named_parameters(remove_duplicate=False),
            *root.named_buffers(remove_duplicate=False),
        ]
        # First, so that whatever else holds one of them refers to it.
        numbers = [[name, self._number(one)] for name, one in (*parts, *tensors)]
        rows = [
            self._tensor(
                tensor,
                has_values=_is_whole(tensor)
                and not kinds.get(name.rpartition(".")[0], "").startswith("torch."),
            )
            for name, tensor in tensors
        ]
        return [numbers, [self._module(part) for _, part in parts], rows, storage_aliases(root)]

    def value(self, value: object) -> object:
        """Plain values as they are, functions by their code, other things by what they hold.

        Raises what an object raises that cannot tell what it holds.
        """
        if type(value) in _SIMPLE:
            return repr(value)
        if type(value) is bytes:
            return ["bytes", sha256(value)]
        if id(value) in self._numbers:
            return self._numbers[id(value)][0]
        self._number(value)
        return self._described(value)

    def _number(self, value: object) -> int:
        return self._numbers.setdefault(id(value), (len(self._numbers), value))[0]

    def _described(self, value: Any) -> object:
        kind = type(value)
        if isinstance(value, nn.Module):
            return self.modules(value)
        if isinstance(value, Tensor):
            is_constant = not value.requires_grad and value.numel() <= _MOST_VALUES
            return self._tensor(value, has_values=_is_whole(value) or is_constant)
        if kind in (dict, MappingProxyType):
            pairs = [pair for pair in value.items() if pair[0] not in _HASHES]
            return [kind.__name__, *(self.value(one) for pair in pairs for one in pair)]
        if kind in (tuple, list):
            return [kind.__name__, *map(self.value, value)]
        if kind in (set, frozenset):
            return [kind.__name__, *sorted(json.dumps(self.value(one)) for one in value)]
        for wrappers, names in _WRAPPERS:
            if isinstance(value, wrappers):
                return [kind.__name__, *(self.value(getattr(value, name)) for name in names)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, GeneratorType) and inspect.getgeneratorstate(value) == inspect.GEN_CREATED:
            # As in a context that decorates a function; one that has begun tells not how far it is.
            return [_code_hash(value.gi_code), self.value(inspect.getgeneratorlocals(value))]
        if isinstance(value, type):
            return self._kind(value)
        if isinstance(value, _ATTRIBUTES):
            return [kind.__name__, value.__objclass__.__module__, value.__qualname__]
        if isinstance(value, ModuleType):
            self._names[value.__name__] = None
            return [kind.__name__, value.__name__]
        if kind.__module__.partition(".")[0] in _OF_PROCESS:
            return kind.__qualname__
        return self._object(value)

    def _object(self, value: Any) -> list[Any]:
        """Another object, by its attributes and what it tells `copy` and `pickle`. Raises what it raises."""
        contents = [vars(value) if hasattr(value, "__dict__") else {}, _slots(value)]
        reduce = copyreg.dispatch_table.get(type(value))
        reduced = reduce(value) if reduce else value.__reduce_ex__(2)
        if isinstance(reduced, str):
            contents += [getattr(value, "__module__", None), reduced]
        else:
            # Behind constructor, arguments and state: iterators of entries.
            contents += [*reduced[:3], *(list(entries or ()) for entries in reduced[3:5])]
        return [self.value(one) for one in (type(value), *contents)]

    def _module(self, module: nn.Module) -> list[Any]:
        """Class, settings and source of one module; torch's own are of torch's version."""
        graph: Any = module.graph if isinstance(module, fx.GraphModule) else None
        # Hooks are numbered through the process.
        settings = {
            name: self.value(list(value.values()) if "hooks" in name and isinstance(value, dict) else value)
            for name, value in (vars(module) | _slots(module)).items()
            if name not in REGISTRIES and (graph is None or name != "_graph")
        }
        nodes = [] if graph is None else [module.code, *(self.value(node.target) for node in graph.nodes)]
        return [self.value(type(module)), _without_addresses(module.extra_repr()), settings, nodes]

    def _tensor(self, tensor: Tensor, *, has_values: bool) -> list[Any]:
        form = [list(tensor.shape), str(tensor.dtype), tensor.requires_grad, list(tensor.stride())]
        row = [*form, self.value(type(tensor)), self.value(vars(tensor))]
        if has_values and not tensor.is_meta:
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            row.append(sha256(flat.view(torch.uint8).numpy().tobytes()))
        return row

    def _kind(self, kind: type) -> list[Any]:
        """A class by its name, with what it holds and torch's version does not tell."""
        self._names |= {base.__module__: None for base in kind.__mro__}
        values = [
            [key, self.value(value)]
            for base in kind.__mro__
            for key, value in vars(base).items()
            if _counts(key, value, base)
        ]
        return [kind.__module__, kind.__qualname__, values]

    def _function(self, function: FunctionType) -> list[Any]:
        """Name, code and enclosed values; what was typed into an interpreter with the globals it uses."""
        if _is_of_torch(function) and not function.__closure__:
            return [function.__module__, function.__qualname__]
        self._names |= {function.__module__: None, _home(function): None}
        cells = [_contents(cell) for cell in function.__closure__ or ()]
        contents = (cells, function.__defaults__, function.__kwdefaults__, vars(function))
        values = [self.value(one) for one in contents]
        used = _names_of(function.__code__) if _is_typed(_home(function)) else ()
        globals_used = [self.value(function.__globals__.get(name)) for name in sorted(used)]
        return [function.__qualname__, _code_hash(function.__code__), values, globals_used]

    def files(self) -> dict[str, Any]:
        """Hashes of the user's files, the globals that they use, and versions of the installed packages."""
        hashes, used = hash_sources(filter(None, self._names))
        own = {name: sys.modules[name] for name in hashes if name in sys.modules}
        globals_used = {
            name: {
                key: self.value(value)
                for key, value in vars(module).items()
                if key in used and not key.startswith("__") and not _is_defined_in(name, value)
            }
            for name, module in own.items()
        }
        # The globals may lead to functions and classes of further files.
        names = list(filter(None, self._names))
        hashes |= hash_sources(names)[0]
        return {
            "sources": hashes,
            "globals": globals_used,
            "variables": {name: value for name, value in os.environ.items() if name in used},
            "packages": _list_versions(names),
            "installed": _hash_installed(set(names) - hashes.keys()),
        }


def _contents(cell: Any) -> object:
    """What a closure holds; Ellipsis for what it does not hold yet."""
    with suppress(ValueError):
        return cell.cell_contents
    return ...


def _slots(value: object) -> dict[str, Any]:
    """Attributes that are in no `__dict__`."""
    return {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, MemberDescriptorType) and hasattr(value, name)
    }


def _is_whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _is_defined_in(module_name: str, value: object) -> bool:
    """Return whether the source of a Python module tells what a class or a function of it does."""
    is_definition = isinstance(value, type | FunctionType) and not getattr(value, "__closure__", None)
    return is_definition and _home(value) == module_name


def _is_of_torch(definition: Any) -> bool:
    """Return whether torch's version, or Python's, tells what a class or a function does."""
    return str(_home(definition)).partition(".")[0] in _OF_TORCH


def _home(definition: Any) -> str | None:
    """The Python module with the code: a decorated function calls itself of that of what it decorates."""
    name: str | None = getattr(definition, "__globals__", {}).get("__name__", definition.__module__)
    return name


def _counts(name: str, value: object, kind: type) -> bool:
    """Return whether an attribute of a class counts: all but Python's own; of torch's what was put in."""
    if isinstance(value, FunctionType):
        return not (_is_of_torch(kind) and _is_of_torch(value))
    is_own = not name.startswith("__") and name != "_abc_impl"
    return (is_own or isinstance(value, property | classmethod | staticmethod)) and not _is_of_torch(kind)


def _is_typed(module_name: str | None) -> bool:
    """Return whether the code of a module is in no file: it was typed into an interpreter or a notebook."""
    return module_name == "__main__" and not Path(getattr(sys.modules["__main__"], "__file__", "")).is_file()


def _names_of(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_of, inner))


def _code_hash(code: CodeType) -> str:
    constants = [
        _code_hash(one)
        if isinstance(one, CodeType)
        else repr(sorted(map(repr, one)) if isinstance(one, frozenset) else one)
        for one in code.co_consts
    ]
    return sha256(repr([code.co_code.hex(), code.co_names, code.co_varnames, constants]))


def hash_sources(modules: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Hash these Python modules and all that they import, as far as they are the user's.

    Installed packages and Python's own modules have versions: they are left out with what they import.
    Nothing is imported: a module that is not loaded yet, which a function may import, is looked for.

    Args:
        modules: Names of modules.

    Returns:
        SHA-256 by the name of each, and all names and words that these files use.
    """
    hashes: dict[str, str] = {}
    used: set[str] = set()
    pending = list(modules)
    importlib.invalidate_caches()
    while pending:
        name = pending.pop()
        file = None if name in hashes else _own_file(name)
        if file is None:
            continue
        with suppress(OSError, ValueError, SyntaxError):
            text = file.read_bytes()
            hashes[name] = sha256(text)
            package = name if file.stem == "__init__" else name.rpartition(".")[0]
            for node in ast.walk(ast.parse(text)):
                pending += _imported(node, package)
                used |= set(_words(node))
    return hashes, used


def _list_versions(modules: Iterable[str]) -> dict[str, str]:
    """What the installed packages of these modules call their versions."""
    packages = {name.partition(".")[0] for name in modules}
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in packages}
    return {name: version for name, version in versions.items() if isinstance(version, str)}


def _hash_installed(modules: Iterable[str]) -> dict[str, str]:
    """Hashes of files of installed packages, which may have been edited; none of torch."""
    hashes = {}
    for name in sorted(modules):
        file = getattr(sys.modules.get(name), "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and name.partition(".")[0] not in _OF_TORCH:
            with suppress(OSError):
                hashes[name] = sha256(Path(file).read_bytes())
    return hashes


def _own_file(name: str) -> Path | None:
    """None for what is installed, and for what has no source."""
    if name in sys.modules:
        path = getattr(sys.modules[name], "__file__", None)
    else:
        package = name.partition(".")[0]
        if getattr(sys.modules.get(package), "__file__", None) and _own_file(package) is None:
            return None
        source = find_source(name)
        path = str(source[0]) if source is not None and not source[2] else None
    if not isinstance(path, str) or not path.endswith(".py"):
        return None
    file = Path(path).resolve()
    if _INSTALLED.intersection(file.parts) or any(file.is_relative_to(folder) for folder in _VERSIONED):
        return None
    return file


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    """Names of what a statement imports, modules and what may be one."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            parts = alias.name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))
    elif isinstance(node, ast.ImportFrom):
        with suppress(ImportError):
            base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _words(node: ast.AST) -> Iterator[str]:
    """Names that are read, and texts, which may be those of environment variables."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.id if isinstance(node, ast.Name) else node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.alias):
        yield node.asname or node.name
