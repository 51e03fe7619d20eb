"""A configuration of transformers: from a model type or a config.json, with sizes in words for any family.

Every family names its sizes in its own way (`n_layer`, `num_layers`, `encoder_layers`), and has sizes that
follow from others (the width of a head from the hidden size). A user says `layers`, `hidden`, `heads`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ...cost_models.errors import FileError, ModelError, UsageError
from ..user_model.failures import first_line
from .agreeing_sizes import agreeing_sizes, in_proportion, lists_of_layers, open_keys

_KEYS: dict[str, tuple[str, ...]] = {
    "layers": (
        "num_hidden_layers", "n_layer", "n_layers", "num_layers",
        "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
    ),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads",
        "encoder_attention_heads", "decoder_attention_heads",
    ),
    "intermediate": (
        "intermediate_size", "n_inner", "d_ff", "d_inner", "ffn_dim", "hidden_dim", "dff", "ffn_hidden_size",
        "encoder_ffn_dim", "decoder_ffn_dim",
    ),
    "vocabulary": ("vocab_size",),
    "positions": (
        "max_position_embeddings", "n_positions", "max_seq_len", "context_length", "model_max_length",
    ),
    "classes": ("num_labels",),
}  # fmt: skip
"""What a size is called in the families. A family's `attribute_map` adds its own names."""

_WORDS = ("layers", "hidden", "heads", "intermediate", "vocabulary", "sequence", "classes")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "attention_head_size", "d_head")
_INNER_WIDTHS = (
    *_KEYS["intermediate"],
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "feed_forward_size", "intra_bottleneck_size", "embedding_size", "mamba_d_ssm",
)  # fmt: skip
_SAME_WIDTHS = ("word_embed_proj_dim", "pooler_output_size", "lru_width")
"""Widths that follow the hidden size where they equal it."""
_NO_CHANCE = {
    "apply_spec_augment": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
"""Parts of the input, and whole layers, that are left out by chance."""
_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Words that stand for a picture, a clip or a sound in a text."""
_OF_A_CHECKPOINT = ("dtype", "torch_dtype", "quantization_config", "auto_map", "_name_or_path", "model_type")
"""Of the file that weights were saved with. The weights made here are random, and float32."""


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
    plain = _built(family, values, name)
    changes = _Changes(plain, name)
    changes.take(settings)
    changes.follow()
    changes.leave_out_chance()
    changes.stretch_lists(values)
    config = _built(family, values | changes.tree() | _no_cache(plain), name)
    if "tie_word_embeddings" in changes.values:
        # T5's class ties whatever it is told (it takes the key for another one).
        config.tie_word_embeddings = changes.values["tie_word_embeddings"]
    _leave_out_caches(config)
    return ConfiguredModel(config, changes.sequence, tuple(changes.notes))


def size_of(config: Any, word: str) -> int | None:
    """The configuration's size of this name in words; the smallest where there are several, None without."""
    sizes = [_value(config, key) for key in _keys_of(config, word)]
    return min((size for size in sizes if _is_size(size)), default=None)


class _Changes:
    """Keys of a configuration, and of those inside it (of text, of pictures), that get other values."""

    def __init__(self, config: Any, name: str, path: str = "") -> None:
        self._config, self._name, self._path = config, name, path
        self._words: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.sequence: int | None = None
        self.notes: list[str] = []
        subs = {key: _value(config, key) for key in getattr(config, "sub_configs", {})}
        self._parts = {
            key: _Changes(sub, name, f"{path}{key}.") for key, sub in subs.items() if hasattr(sub, "to_dict")
        }

    def take(self, settings: Mapping[str, object]) -> None:
        """Keys of the configuration's own first: they are the more exact."""
        for key, value in settings.items():
            if key not in _WORDS:
                self._take_key(key, value)
        for word in _WORDS:
            if word in settings and settings[word] is not None:
                self._take_word(word, settings[word])

    def follow(self) -> None:
        """Sizes that follow from those that were set."""
        followed: dict[str, Any] = {}
        if "hidden" in self._words:
            followed |= self._widths()
        if "hidden" in self._words or "heads" in self._words:
            followed |= self._head_widths()
        if "heads" in self._words:
            followed |= self._key_value_heads()
        causes = [f"`{word}`" for word in ("hidden", "heads") if word in self._words]
        if causes:
            followed |= agreeing_sizes(self._sizes(followed))
            self._let_follow(followed, " and ".join(causes))
        if "layers" in self._words:
            self._let_follow(lists_of_layers(self._sizes({}), self._words["layers"]), "`layers`")
        for part in self._parts.values():
            part.follow()
            self.notes += part.notes
        vocabularies = [each.values.get("vocab_size") for each in (self, *self._all_parts())]
        if any(vocabularies):
            self._special_tokens(min(filter(None, vocabularies)))

    def _let_follow(self, sizes: Mapping[str, Any], causes: str) -> None:
        """Those that are not set, and are others than before."""
        followed = {
            key: value
            for key, value in sizes.items()
            if key not in self.values and value != _value(self._config, key)
        }
        self.values |= followed
        if followed:
            shown = ", ".join(f"{self._path}{key}={value}" for key, value in followed.items())
            self.notes.append(f"{shown}: in proportion to {causes}")

    def leave_out_chance(self) -> None:
        """What is drawn in Python at each call would be a constant of the layers."""
        for key, value in _NO_CHANCE.items():
            before = _value(self._config, key)
            if key not in self.values and before and key in _names(self._config):
                self.values[key] = value
                self.notes.append(f"{self._path}{key}={value} instead of {before}: it is drawn in Python")
        for part in self._parts.values():
            known = len(part.notes)
            part.leave_out_chance()
            self.notes += part.notes[known:]

    def stretch_lists(self, values: Mapping[str, Any]) -> None:
        """Lists in the file that have one entry a layer are cut, or repeated, to the new number."""
        layers = self._words.get("layers")
        for key, value in values.items():
            each = isinstance(value, list) and value and len(value) == size_of(self._config, "layers")
            if layers and each and key not in self.values:
                self.values[key] = [value[index % len(value)] for index in range(layers)]

    def tree(self) -> dict[str, Any]:
        """All values that change; of a configuration inside that has such, all values."""
        found = dict(self.values)
        for key, part in self._parts.items():
            whole = part._config.to_dict()
            part.stretch_lists(whole)
            changed = part.tree()
            if changed:
                found.setdefault(key, whole | changed)
        return found

    def _sizes(self, followed: Mapping[str, Any]) -> dict[str, Any]:
        """All keys of the configuration, with the values that they will have."""
        before = {key: _value(self._config, key) for key in _names(self._config)}
        return before | dict(followed) | self.values

    def _take_key(self, key: str, value: object) -> None:
        """Where the configuration has no such key, those inside it that have."""
        having = [part for part in self._all_parts() if key in part._own_keys()]
        if key in self._own_keys() or not having:
            self.values[self._known(key)] = value
        else:
            for part in having:
                part.values[part._known(key)] = value

    def _all_parts(self) -> Iterator[_Changes]:
        """The configurations in it, and those in them."""
        for part in self._parts.values():
            yield part
            yield from part._all_parts()

    def _takers(self, word: str) -> list[_Changes]:
        """The configuration and those inside it that have keys for a size."""
        every = (self, *self._all_parts())
        return [each for each in every if _keys_of(each._config, word) and each._takes(word)]

    def _takes(self, word: str) -> bool:
        return word != "classes" or (not self._path and self._classifies())

    def _take_word(self, word: str, value: object) -> None:
        if not _is_size(value):
            raise UsageError(f"{word}={value!r}: a whole number of at least 1 is needed", f"As in {word}=8.")
        if word == "sequence":
            self._take_sequence(value)
            return
        takers = self._takers(word)
        if not takers:
            raise UsageError(
                f"{word}={value}: the configuration {self._name} has no key for it",
                f"Set a key of its own with `settings`: {', '.join(sorted(_names(self._config)))}.",
            )
        for taker in takers:
            taker._set_word(word, value)

    def _set_word(self, word: str, value: int) -> None:
        keys = _keys_of(self._config, word)
        for key in keys:
            if key in self.values:
                raise UsageError(
                    f"{word}={value} and settings={{{key!r}: {self.values[key]!r}}} set the same",
                    "Give one of them.",
                )
        self.values |= dict.fromkeys(keys, value)
        if word == "classes":
            # A file's table of names would overrule the number.
            self.values |= {"id2label": None, "label2id": None}
        self._words[word] = value

    def _classifies(self) -> bool:
        """Models of text do where their class is one for it; all others are taken to."""
        classes = self.values.get("architectures", self._config.architectures) or ()
        return size_of(self._config, "vocabulary") is None or "Classification" in "".join(classes)

    def _take_sequence(self, sequence: int) -> None:
        """A table of positions that is too short for it is made longer."""
        readers = self._takers("vocabulary")
        if not readers:
            raise UsageError(
                f"sequence={sequence}: {self._name} takes no tokens",
                "Omit it; the size of an image is set with settings={'image_size': 224}.",
            )
        self.sequence = sequence
        for reader in readers:
            reader._make_room(sequence)

    def _make_room(self, sequence: int) -> None:
        for key in _keys_of(self._config, "positions"):
            room = _value(self._config, key)
            if key not in self.values and _is_size(room) and room < sequence:
                self.values[key] = sequence
                self.notes.append(f"{self._path}{key}={sequence} instead of {room}: `sequence` needs as many")

    def _widths(self) -> dict[str, Any]:
        hidden = self._words["hidden"]
        before = size_of(self._config, "hidden") or hidden
        names = _names(self._config)
        inner = [key for key in (*_keys_of(self._config, "intermediate"), *_INNER_WIDTHS) if key in names]
        widths = {
            key: in_proportion(_value(self._config, key), hidden, before)
            for key in inner
            if _is_size(_value(self._config, key)) and "intermediate" not in self._words
        }
        same = [key for key in _SAME_WIDTHS if key in names and _value(self._config, key) == before]
        return widths | dict.fromkeys(same, hidden)

    def _head_widths(self) -> dict[str, Any]:
        hidden = self._words.get("hidden") or size_of(self._config, "hidden")
        heads = self._words.get("heads") or size_of(self._config, "heads")
        if not hidden or not heads:
            return {}
        # Where it does not divide: None, so that the family itself refuses (or pads) the pair.
        width = hidden // heads if hidden % heads == 0 else None
        names = _names(self._config)
        return {
            key: width if width or key == "head_dim" else max(1, hidden // heads)
            for key in _HEAD_WIDTHS
            if key in names and _is_size(_value(self._config, key))
        }

    def _key_value_heads(self) -> dict[str, Any]:
        """As many query heads share one as before, or the nearest number that divides the heads."""
        heads, before = self._words["heads"], size_of(self._config, "heads")
        names = _names(self._config)
        shared = {key: _value(self._config, key) for key in _KEY_VALUE_HEADS if key in names}
        return {
            key: max(
                part
                for part in range(1, heads + 1)
                if heads % part == 0 and part <= max(1, heads * own // (before or own))
            )
            for key, own in shared.items()
            if _is_size(own)
        }

    def _special_tokens(self, vocabulary: Any) -> None:
        """Those beyond a smaller vocabulary become its last words: an embedding refuses to pad beyond it."""
        places = 0
        for key in sorted(_names(self._config)):
            token = _value(self._config, key)
            beyond = _is_size(token) and _is_size(vocabulary) and token >= vocabulary
            if not beyond or key in self.values:
                continue
            if key.endswith(_PLACES):
                # None of these may be another.
                places += 1
                self.values[key] = max(0, vocabulary - 1 - places)
            elif key.endswith("_token_id"):
                self.values[key] = vocabulary - 1

    def _own_keys(self) -> set[str]:
        more = () if self._path else ("num_labels", "tie_word_embeddings", "attn_implementation")
        return {*_names(self._config), *self._config.attribute_map, *more}

    def _known(self, key: str) -> str:
        """The key as the family names it. Raises UsageError where it has none."""
        names, known = _names(self._config), self._own_keys()
        if key in known:
            mapped = self._config.attribute_map.get(key, key)
            return mapped if mapped in names else key
        near = difflib.get_close_matches(key, sorted({*known, *_WORDS}), n=4, cutoff=0.5)
        raise UsageError(
            f"settings[{key!r}]: the configuration {self._name} has no key of this name",
            f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(sorted(names))}.",
        )


def _keys_of(config: Any, word: str) -> list[str]:
    """The configuration's own keys for a size, each once."""
    if word == "classes":
        return ["num_labels"]
    names = _names(config)
    if word in ("layers", "hidden") and "patch_embeds_hidden_size" in names:
        # The number of stages, and the width of the last.
        return []
    mapped = (config.attribute_map.get(key, key) for key in _KEYS[word])
    settable = (int, type(None)) if word == "intermediate" else int
    return [
        key
        for key in dict.fromkeys(mapped)
        # A stage has several layers.
        if key in names and key != "num_stages" and isinstance(_value(config, key, ""), settable)
    ]


def _names(config: Any) -> set[str]:
    """The keys that a configuration of this class can be given."""
    fields = (
        {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )
    return {name for name in fields or config.to_dict() if not name.startswith("_")}


def _value(config: Any, key: str, otherwise: object = None) -> Any:
    """A key's value, or `otherwise` where each layer has its own: asking for one raises an error."""
    try:
        return getattr(config, key, otherwise)
    except Exception:
        return otherwise


def _leave_out_caches(config: Any) -> None:
    """Of the configurations inside."""
    for key in getattr(config, "sub_configs", {}):
        part = _value(config, key)
        if hasattr(part, "use_cache"):
            part.use_cache = False
        _leave_out_caches(part)


def _no_cache(config: Any) -> dict[str, Any]:
    """Keys and values of earlier tokens are of no use in training, and a model would return them."""
    return {"use_cache": False} if "use_cache" in _names(config) else {}


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _family(transformers: Any, kind: object, name: str) -> Any:
    """The class of the configurations of a model type."""
    known: Iterable[str] = transformers.CONFIG_MAPPING.keys()
    if isinstance(kind, str) and kind in set(known):
        return transformers.CONFIG_MAPPING[kind]
    if kind != name:
        where = f"{name}: transformers {transformers.__version__} has no model type {kind!r}"
    else:
        where = f"model 'hf:{name}': there is no model type and no file of this name"
    near = difflib.get_close_matches(str(kind).lower(), known, n=5, cutoff=0.5)
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    raise ModelError(
        where,
        f"{hint}Nothing is downloaded: name a model type such as gpt2, bert, llama or t5, or a config.json.",
    )


def _built(family: Any, values: Mapping[str, Any], name: str) -> Any:
    try:
        return family.from_dict(dict(values))
    except Exception as error:
        # The strict classes of its configurations say which check failed, and tell why in the cause.
        raise ModelError(
            f"hf:{name}: transformers refuses the configuration: {first_line(error.__cause__ or error)}",
            "Change the sizes, or the key with `settings`.",
        ) from error


def _file_values(name: str) -> dict[str, Any] | None:
    """What a config.json says; None where `name` is no path. Raises FileError."""
    path = Path(name)
    looks = "/" in name or "\\" in name or name.endswith(".json")
    if not looks and not (path / "config.json").is_file():
        return None
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(
            f"{file}: cannot be read: {error.strerror}",
            "Name a config.json or the folder that holds one. Nothing is downloaded from a hub.",
        ) from error
    except ValueError as error:
        raise FileError(
            f"{file}: is no JSON: {first_line(error)}", "Name the config.json of a model."
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise FileError(
            f"{file}: has no model_type, so it is no configuration of transformers",
            'Name the config.json of a model; "model_type": "llama" says which.',
        )
    return values
