"""Sizes in words, and keys of its own, become changes of a configuration of transformers.

A user says `layers`, `hidden`, `heads`; sizes that follow from these (the width of a head) change with them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from ...cost_models.errors import UsageError
from ...cost_models.transformer.model_families import SIZE_KEYS
from .configuration_keys import (
    agreeing_sizes,
    configured_size,
    in_proportion,
    is_size,
    key_names,
    key_value,
    lists_of_layers,
    size_keys,
)

_WORDS = ("layers", "hidden", "heads", "intermediate", "vocabulary", "sequence", "classes")
_KEY_VALUE_HEADS = SIZE_KEYS["key_value_heads"]
_HEAD_WIDTHS = SIZE_KEYS["head_width"]
_INNER_WIDTHS = (
    *SIZE_KEYS["intermediate"],
    "moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size",
    "feed_forward_size", "intra_bottleneck_size", "embedding_size", "mamba_d_ssm",
)  # fmt: skip
_SAME_WIDTHS = ("word_embed_proj_dim", "pooler_output_size", "lru_width")
"""Widths that follow the hidden size where they equal it."""
_WIDTHS_OF_BACKBONE = ("reassemble_hidden_size",)
"""Widths that are the hidden size of the configuration inside it of what makes the features."""
_NO_CHANCE = {
    "apply_spec_augment": False, "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "mask_time_prob": 0.0, "mask_feature_prob": 0.0,
}  # fmt: skip
"""Parts of the input, and whole layers, that are left out by chance."""
_PLACES = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Words that stand for a picture, a clip or a sound in a text."""


class ConfigurationChanges:
    """Keys of a configuration, and of those inside it (of text, of pictures), that get other values."""

    def __init__(self, config: Any, name: str, path: str = "") -> None:
        self._config, self._name, self._path = config, name, path
        self._words: dict[str, int] = {}
        self.values: dict[str, Any] = {}
        self.sequence: int | None = None
        self.notes: list[str] = []
        subs = {key: key_value(config, key) for key in getattr(config, "sub_configs", {})}
        self._parts = {
            key: ConfigurationChanges(sub, name, f"{path}{key}.")
            for key, sub in subs.items()
            if hasattr(sub, "to_dict")
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
        for key, part in self._parts.items():
            part.follow()
            self.notes += part.notes
            if key == "backbone_config" and "hidden" in part._words:
                same = [own for own in _WIDTHS_OF_BACKBONE if own in key_names(self._config)]
                self._let_follow(dict.fromkeys(same, part._words["hidden"]), "`hidden`")
        vocabularies = [each.values.get("vocab_size") for each in (self, *self._all_parts())]
        if any(vocabularies):
            self._special_tokens(min(filter(None, vocabularies)))

    def _let_follow(self, sizes: Mapping[str, Any], causes: str) -> None:
        """Those that are not set, and are others than before."""
        followed = {
            key: value
            for key, value in sizes.items()
            if key not in self.values and value != key_value(self._config, key)
        }
        self.values |= followed
        if followed:
            changes = ", ".join(f"{self._path}{key}={value}" for key, value in followed.items())
            self.notes.append(f"{changes}: in proportion to {causes}")

    def leave_out_chance(self) -> None:
        """What is drawn in Python at each call would be a constant of the layers."""
        names = key_names(self._config)
        for key, value in _NO_CHANCE.items():
            before = key_value(self._config, key)
            # One switch for both kinds of masks, where there is one.
            is_off = key.startswith("mask_") and "apply_spec_augment" in names
            if key not in self.values and before and key in names and not is_off:
                self.values[key] = value
                self.notes.append(f"{self._path}{key}={value} instead of {before}: it is drawn in Python")
        for part in self._parts.values():
            count = len(part.notes)
            part.leave_out_chance()
            self.notes += part.notes[count:]

    def stretch_lists(self, values: Mapping[str, Any]) -> None:
        """Lists in the file that have one entry a layer are cut, or repeated, to the new number."""
        layers = self._words.get("layers")
        for key, value in values.items():
            each = isinstance(value, list) and value and len(value) == configured_size(self._config, "layers")
            if layers and each and key not in self.values:
                self.values[key] = [value[index % len(value)] for index in range(layers)]

    def tree(self) -> dict[str, Any]:
        """All values that change; of a configuration inside that has such, all values."""
        values = dict(self.values)
        for key, part in self._parts.items():
            whole = part._config.to_dict()
            part.stretch_lists(whole)
            changed = part.tree()
            if changed:
                values.setdefault(key, whole | changed)
        return values

    def _sizes(self, followed: Mapping[str, Any]) -> dict[str, Any]:
        """All keys of the configuration, with the values that they will have."""
        # What a backbone hands on is no key of its class, and yet one of its file.
        handed_on = ("out_features",) if self._path else ()
        before = {key: key_value(self._config, key) for key in (*key_names(self._config), *handed_on)}
        return before | dict(followed) | self.values

    def _take_key(self, key: str, value: object) -> None:
        """Where the configuration has no such key, those inside it that have."""
        having = [part for part in self._all_parts() if key in part._own_keys()]
        if key in self._own_keys() or not having:
            self.values[self._own_key(key)] = value
        else:
            for part in having:
                part.values[part._own_key(key)] = value

    def _all_parts(self) -> Iterator[ConfigurationChanges]:
        """The configurations in it, and those in them."""
        for part in self._parts.values():
            yield part
            yield from part._all_parts()

    def _takers(self, word: str) -> list[ConfigurationChanges]:
        """The configuration and those inside it that have keys for a size."""
        every = (self, *self._all_parts())
        return [each for each in every if size_keys(each._config, word) and each._takes(word)]

    def _takes(self, word: str) -> bool:
        return word != "classes" or (not self._path and self._classifies())

    def _take_word(self, word: str, value: object) -> None:
        if not is_size(value):
            raise UsageError(f"{word}={value!r}: a whole number of at least 1 is needed", f"As in {word}=8.")
        if word == "sequence":
            self._take_sequence(value)
            return
        takers = self._takers(word)
        if not takers:
            raise UsageError(
                f"{word}={value}: the configuration {self._name} has no key for it",
                f"Set a key of its own with `settings`: {', '.join(sorted(key_names(self._config)))}.",
            )
        for taker in takers:
            taker._set_word(word, value)

    def _set_word(self, word: str, value: int) -> None:
        keys = size_keys(self._config, word)
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
        return configured_size(self._config, "vocabulary") is None or "Classification" in "".join(classes)

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
        for key in size_keys(self._config, "positions"):
            room = key_value(self._config, key)
            if key not in self.values and is_size(room) and room < sequence:
                self.values[key] = sequence
                self.notes.append(f"{self._path}{key}={sequence} instead of {room}: `sequence` needs as many")

    def _widths(self) -> dict[str, Any]:
        hidden = self._words["hidden"]
        before = configured_size(self._config, "hidden") or hidden
        names = key_names(self._config)
        inner = [key for key in (*size_keys(self._config, "intermediate"), *_INNER_WIDTHS) if key in names]
        widths = {
            key: in_proportion(key_value(self._config, key), hidden, before)
            for key in inner
            if is_size(key_value(self._config, key)) and "intermediate" not in self._words
        }
        same = [key for key in _SAME_WIDTHS if key in names and key_value(self._config, key) == before]
        return widths | dict.fromkeys(same, hidden)

    def _head_widths(self) -> dict[str, Any]:
        hidden = self._words.get("hidden") or configured_size(self._config, "hidden")
        heads = self._words.get("heads") or configured_size(self._config, "heads")
        if not hidden or not heads:
            return {}
        # Where it does not divide: None, so that the family itself refuses (or pads) the pair.
        width = hidden // heads if hidden % heads == 0 else None
        names = key_names(self._config)
        return {
            key: width if width or key == "head_dim" else max(1, hidden // heads)
            for key in _HEAD_WIDTHS
            if key in names and is_size(key_value(self._config, key))
        }

    def _key_value_heads(self) -> dict[str, Any]:
        """As many query heads share one as before, or the nearest number that divides the heads."""
        heads, before = self._words["heads"], configured_size(self._config, "heads")
        names = key_names(self._config)
        shared = {key: key_value(self._config, key) for key in _KEY_VALUE_HEADS if key in names}
        return {
            key: max(
                part
                for part in range(1, heads + 1)
                if heads % part == 0 and part <= max(1, heads * own // (before or own))
            )
            for key, own in shared.items()
            if is_size(own)
        }

    def _special_tokens(self, vocabulary: Any) -> None:
        """Those beyond a smaller vocabulary become its last words: an embedding refuses to pad beyond it."""
        places = 0
        for key in sorted(key_names(self._config)):
            token = key_value(self._config, key)
            beyond = is_size(token) and is_size(vocabulary) and token >= vocabulary
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
        return {*key_names(self._config), *self._config.attribute_map, *more}

    def _own_key(self, key: str) -> str:
        """The key as the family names it. Raises UsageError where it has none."""
        names, own_keys = key_names(self._config), self._own_keys()
        if key in own_keys:
            mapped = self._config.attribute_map.get(key, key)
            return mapped if mapped in names else key
        near = difflib.get_close_matches(key, sorted({*own_keys, *_WORDS}), n=4, cutoff=0.5)
        raise UsageError(
            f"settings[{key!r}]: the configuration {self._name} has no key of this name",
            f"Nearest: {', '.join(near)}." if near else f"It has {', '.join(sorted(names))}.",
        )
