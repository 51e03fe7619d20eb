"""Sources of `solve`: a profile, or the configuration of a transformer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cost_models.errors import FileError
from ..cost_models.text_files import JSON, decode_text, file_kind, read_bytes, sha256
from ..profiler.profile_file import Profile

if TYPE_CHECKING:
    from ..cost_models.transformer.transformer_shape import TransformerShape

OF_TRANSFORMERS = "hf:"


class ProfileFile(NamedTuple):
    """A profile, with the name and the hash of its file."""

    profile: Profile
    file: str
    sha256: str


@dataclass(frozen=True)
class Configuration:
    """Sizes of a transformer, with the name and the hash of the file that they were read from."""

    shape: TransformerShape
    file: str
    sha256: str

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.shape.name


def read_source(source: str | Path) -> ProfileFile | Configuration:
    """Read a profile, or a transformer's configuration: the path of its file, or `hf:` and a name.

    The file is read once: it may be a pipe.

    Raises:
        UsageError: The name is not one that transformers knows.
        FileError: The file cannot be read, or is neither.
    """
    if isinstance(source, str) and source.startswith(OF_TRANSFORMERS):
        return named_configuration(source)
    path = Path(source)
    content = read_bytes(path, "profile")
    text = decode_text(content, path, "profile")
    try:
        return ProfileFile(Profile.parse(text, str(path)), path.name, sha256(content))
    except FileError:
        if file_kind(text) != JSON:
            raise
    from ..cost_models.transformer.configuration import parse_configuration, parse_transformer_shape

    if not text.lstrip("\ufeff \t\r\n").startswith("{") or not _has_sizes(parse_configuration(text, path)):
        raise FileError(
            f"{path}: not a profile, and not the configuration of a transformer",
            "Give what pplan profile wrote, or a config.json with model_type, hidden_size and so on.",
        )
    return Configuration(parse_transformer_shape(text, path), path.name, sha256(content))


def configuration_of(keys: Mapping[str, Any]) -> Configuration | None:
    """Return the configuration that the keys are; None where none of them is a transformer's.

    Raises UsageError for sizes that are missing or cannot be.
    """
    from ..cost_models.transformer.configuration import transformer_shape

    return Configuration(transformer_shape(keys), "", _hash(keys)) if _has_sizes(keys) else None


def _has_sizes(keys: Mapping[str, Any]) -> bool:
    """Return whether some key is one of which every configuration has one."""
    from ..cost_models.transformer.model_families import SIZE_KEYS

    return not keys.keys().isdisjoint(
        {"model_type", "text_config", *SIZE_KEYS["hidden"], *SIZE_KEYS["layers"]}
    )


def named_configuration(name: str) -> Configuration:
    """Return a configuration that transformers builds by its name, such as `hf:llama`."""
    from ..cost_models.transformer.configuration import transformer_shape
    from ..profiler.transformers_models import configure_model, transformers_session

    with transformers_session() as transformers:
        config = configure_model(transformers, name.removeprefix(OF_TRANSFORMERS), {}).config
    keys = config.to_diff_dict() | {"model_type": config.model_type}
    return Configuration(transformer_shape(keys, name), name, _hash(keys))


def _hash(keys: Mapping[str, Any]) -> str:
    return sha256(json.dumps(keys, default=str))
