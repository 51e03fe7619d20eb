"""The package transformers, offline and silent, and configurations: from a model type or a config.json."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...cost_models.errors import FileError, MachineError, ModelError
from ...cost_models.quantities import MOST_LAYERS
from ...cost_models.text_files import read_text
from ..user_model.failures import first_line
from .configuration_changes import ConfigurationChanges
from .configuration_keys import key_names, key_value, open_keys, size_keys

_OF_A_CHECKPOINT = ("dtype", "torch_dtype", "quantization_config", "auto_map", "_name_or_path", "model_type")
"""Of the file that weights were saved with. The weights made here are random, and float32."""
_OF_A_CLASS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model|Config)$")
"""What the name of a class has behind that of its family: LlamaForCausalLM is one of llama."""


@dataclass(frozen=True, eq=False)
class ConfiguredModel:
    """A configuration, and what of the settings is not part of one."""

    config: Any
    sequence: int | None
    notes: tuple[str, ...]


def configure_model(
    transformers: Any, name: str, settings: Mapping[str, object], *, known_only: bool = False
) -> ConfiguredModel:
    """The configuration `name` (a model type, a config.json or its folder) with `settings`.

    `settings` are sizes in words (`layers`, `hidden`, `heads`, `intermediate`, `vocabulary`, `sequence`,
    `classes`) and any keys of the configuration. Sizes that follow from a changed one are changed with it
    where they are not set too. `known_only`: no file is read. Raises ModelError, FileError and UsageError.
    """
    values = None if known_only or name in transformers.CONFIG_MAPPING else _file_values(name)
    kind = name if values is None else values["model_type"]
    family = _family(transformers, kind, name)
    values = {key: value for key, value in (values or open_keys(name)).items() if key not in _OF_A_CHECKPOINT}
    plain = _build_configuration(family, values, name)
    changes = ConfigurationChanges(plain, name)
    changes.take(settings)
    changes.follow()
    changes.leave_out_chance()
    changes.stretch_lists(values)
    config = _build_configuration(family, values | changes.tree() | _no_cache(plain), name)
    if "tie_word_embeddings" in changes.values:
        # T5's class ties whatever it is told (it takes the key for another one).
        config.tie_word_embeddings = changes.values["tie_word_embeddings"]
    _leave_out_caches(config)
    _refuse_many_layers(config, name)
    return ConfiguredModel(config, changes.sequence, tuple(changes.notes))


def _refuse_many_layers(config: Any, name: str) -> None:
    """Of the configuration and those inside: a model is built layer by layer, also without its weights."""
    for key in size_keys(config, "layers"):
        count = key_value(config, key)
        if count > MOST_LAYERS:
            raise ModelError(
                f"hf:{name}: {key} is {count}: at most {MOST_LAYERS:,} layers are planned for",
                "Set fewer with `layers`, or correct the configuration.",
            )
    for key in getattr(config, "sub_configs", {}):
        if hasattr(part := key_value(config, key), "to_dict"):
            _refuse_many_layers(part, name)


def _leave_out_caches(config: Any) -> None:
    """Of the configurations inside."""
    for key in getattr(config, "sub_configs", {}):
        part = key_value(config, key)
        if hasattr(part, "use_cache"):
            part.use_cache = False
        _leave_out_caches(part)


def _no_cache(config: Any) -> dict[str, Any]:
    """Keys and values of earlier tokens are of no use in training, and a model would return them."""
    return {"use_cache": False} if "use_cache" in key_names(config) else {}


def _family(transformers: Any, kind: object, name: str) -> Any:
    """The class of the configurations of a model type."""
    families: Iterable[str] = transformers.CONFIG_MAPPING.keys()
    if isinstance(kind, str) and kind in set(families):
        return transformers.CONFIG_MAPPING[kind]
    if kind != name:
        where = f"{name}: transformers {transformers.__version__} has no model type {kind!r}"
    else:
        where = f"model 'hf:{name}': there is no model type and no file of this name"
    near = difflib.get_close_matches(_OF_A_CLASS.sub("", str(kind)).lower(), families, n=5, cutoff=0.5)
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    raise ModelError(
        where,
        f"{hint}Nothing is downloaded: name a model type such as gpt2, bert, llama or t5, or a config.json.",
    )


def _build_configuration(family: Any, values: Mapping[str, Any], name: str) -> Any:
    try:
        return family.from_dict(dict(values))
    except Exception as error:
        # The strict classes of its configurations say which check failed, and tell why in the cause.
        raise ModelError(
            f"hf:{name}: transformers refuses the configuration: {first_line(error.__cause__ or error)}",
            "Change the sizes, or the key with `settings`.",
        ) from error


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it downloads, by the environment variables that it reads."""
    home = os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(cache)).expanduser()


def _downloaded_before(name: str) -> Path | None:
    """The configuration of a hub's model (`owner/model`, or `model`) in the local cache of huggingface_hub:
    that of its branch main, or else the newest."""
    if re.fullmatch(r"([\w.-]+/)?[\w.-]+", name) is None:
        return None
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    with contextlib.suppress(OSError, ValueError):
        file = folder / "snapshots" / (folder / "refs" / "main").read_text().strip() / "config.json"
        if file.is_file():
            return file
    files = [file for file in folder.glob("snapshots/*/config.json") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)


def _is_hub_name(name: str) -> bool:
    """Whether it reads as `owner/model`, and not as a path."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not name.endswith(".json")


def _file_values(name: str) -> dict[str, Any] | None:
    """What a config.json says; None where `name` is no path, nor in the hub's cache. Raises FileError."""
    path = Path(name)
    looks = "/" in name or "\\" in name or name.endswith(".json")
    if not (path.exists() if looks else (path / "config.json").is_file()):
        downloaded = _downloaded_before(name)
        if downloaded is None and not looks:
            return None
        if downloaded is None and _is_hub_name(name) and not Path(name).parent.exists():
            raise FileError(
                f"hf:{name}: there is no such file, and its configuration is not in the hub's local cache "
                f"{_hub_cache()}",
                "Nothing is downloaded from a hub: take its config.json from there yourself, and name "
                "it as hf:./config.json.",
            )
        path = downloaded or path
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(read_text(file, "configuration"))
    except FileError as error:
        raise FileError(
            error.what, "Name a config.json or the folder that holds one, as hf:./config.json."
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{file}: is no JSON: {first_line(error)}", "Name the config.json of a model."
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise FileError(
            f"{file}: has no model_type, so it is no configuration of transformers",
            'Name the config.json of a model; "model_type": "llama" says which.',
        )
    return values


@contextlib.contextmanager
def transformers_session() -> Iterator[Any]:
    """The module `transformers`. Inside: no network, no log, no warning, float32; afterwards all as before.

    Raises MachineError where it is not installed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        transformers = _imported()
        stack.enter_context(_silent(transformers))
        stack.enter_context(_offline())
        stack.enter_context(_float32())
        yield transformers


def _imported() -> Any:
    # By name, and not by `import`: its types are its own affair, and reading them takes mypy a minute.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MachineError(
            f"models named hf: need transformers, which cannot be imported: {first_line(error)}",
            'pip install "pplan[transformers]"',
        ) from error


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        log.set_verbosity(before)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, which is read only once, when the package is imported."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
