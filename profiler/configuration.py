"""Configurations of transformers: their sizes in words, and inputs that are made up by them."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..cost_models.errors import UsageError
from ..cost_models.transformer.model_families import SIZE_KEYS

# The keys of transformers' configurations that hold sizes: their names by family, and which must agree.
#
# Every family names its sizes in its own way (`n_layer`, `num_layers`, `encoder_layers`).

_OPEN: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 50265},
    "instructblip": {"image_token_index": 50265},
    "dbrx": {"attn_config": {"clip_qkv": 8, "rope_theta": 500000}},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    "dots1": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "autoformer": {"prediction_length": 24},
    "informer": {"prediction_length": 24},
    "time_series_transformer": {"prediction_length": 24},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "xmod": {"default_language": "en_XX"},
}
"""Keys that a family cannot do without and that its class has no value for, as published models have them."""
_WIDTH_UNIT = 8
"""Kernels want rows of whole 16 bytes; published widths are multiples of more."""


def configured_size(config: Any, word: str) -> int | None:
    """The configuration's size of this name in words; the smallest where there are several, None without."""
    sizes = [key_value(config, key) for key in size_keys(config, word)]
    return min((size for size in sizes if is_size(size)), default=None)


def size_keys(config: Any, word: str) -> list[str]:
    """The configuration's own keys for a size, each once."""
    if word == "classes":
        return ["num_labels"]
    names = key_names(config)
    if word in ("layers", "hidden") and "patch_embeds_hidden_size" in names:
        # The number of stages, and the width of the last.
        return []
    mapped = (config.attribute_map.get(key, key) for key in SIZE_KEYS[word])
    settable = (int, type(None)) if word == "intermediate" else int
    return [
        key
        for key in dict.fromkeys(mapped)
        # A stage has several layers.
        if key in names and key != "num_stages" and isinstance(key_value(config, key, ""), settable)
    ]


def key_names(config: Any) -> set[str]:
    """The keys that a configuration of this class can be given."""
    fields = (
        {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    )
    return {name for name in fields or config.to_dict() if not name.startswith("_")}


def key_value(config: Any, key: str, otherwise: object = None) -> Any:
    """A key's value, or `otherwise` where each layer has its own: asking for one raises an error."""
    try:
        return getattr(config, key, otherwise)
    except Exception:
        return otherwise


def is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def open_keys(kind: str) -> dict[str, Any]:
    """What a model type needs besides the values of its class."""
    return dict(_OPEN.get(kind, {}))


def in_proportion(width: int, hidden: int, before: int) -> int:
    """`width` as it is at `hidden` instead of `before`: if that does not come out, a multiple of 8 near."""
    exact = width * hidden / before
    if exact.is_integer() and (int(exact) % 4 == 0 or width % 4):
        return int(exact)
    return max(1, round(exact / _WIDTH_UNIT)) * _WIDTH_UNIT


def agreeing_sizes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """What else must change where the hidden size or the number of heads was set.

    `sizes` are all keys of the configuration, with the values that they are to have so far.
    """
    return _rotary(sizes) | _state_space(sizes) | _axial(sizes) | _boxes(sizes)


def _rotary(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """GPT-J turns a part of each head, which cannot be wider than the head."""
    heads = _first(sizes, "num_attention_heads", "n_head")
    hidden = _first(sizes, "hidden_size", "n_embd")
    rotary = sizes.get("rotary_dim")
    if not (heads and hidden and rotary):
        return {}
    return {"rotary_dim": min(rotary, hidden // heads // 2 * 2)}


def _state_space(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The heads of a state space model have its inner width together."""
    hidden = sizes.get("hidden_size")
    for heads, width, expand, groups in (
        ("mamba_n_heads", "mamba_d_head", "mamba_expand", "mamba_n_groups"),
        ("num_heads", "head_dim", "expand", "n_groups"),
        ("mamba_num_heads", "mamba_head_dim", "expand", "n_groups"),
    ):
        if not (hidden and all(key in sizes for key in (heads, width, expand, groups))):
            continue
        inner = sizes.get("mamba_d_ssm") or sizes[expand] * hidden
        # As many as before where the width can follow, else the most that divide the inner width.
        count = max(n for n in range(1, max(1, min(sizes[heads], inner // 4)) + 1) if inner % n == 0)
        return {heads: count, width: inner // count, groups: math.gcd(sizes[groups], count)}
    return {}


def _axial(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Reformer's two tables of positions have the hidden size together."""
    parts = sizes.get("axial_pos_embds_dim")
    hidden = sizes.get("hidden_size")
    if not parts or not hidden or sum(parts) == hidden:
        return {}
    first = hidden * parts[0] // sum(parts)
    return {"axial_pos_embds_dim": [first, hidden - first]}


def _boxes(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """LayoutLMv3's tables for the places of words, four coordinates and two sides, have it together."""
    hidden = sizes.get("hidden_size")
    if not hidden or "coordinate_size" not in sizes or "shape_size" not in sizes:
        return {}
    coordinate = hidden // 6
    return {"coordinate_size": coordinate, "shape_size": (hidden - 4 * coordinate) // 2}


def lists_of_layers(sizes: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Keys that name the kind of each layer: the kinds in turn."""
    lists: dict[str, Any] = {}
    if "attention_types" in sizes:
        kinds = ["global", "local"]
        lists["attention_types"] = [[[kinds[index % 2]], 1] for index in range(layers)]
    for key in ("attn_layers", "layers_block_type"):
        kinds = list(sizes.get(key) or ())
        if kinds:
            # As many of each kind as there are beside the others, and at least one.
            rare = [kind for kind in dict.fromkeys(kinds) if kind not in kinds[:layers]][: layers - 1]
            lists[key] = [*(kinds[index % len(kinds)] for index in range(layers - len(rare))), *rare]
    stages = sizes.get("out_features") or ()
    if stages and "num_hidden_layers" in sizes and "depths" not in sizes:
        # A stage is a layer, and what is handed on comes from the last ones.
        lists["out_indices"] = list(range(max(1, layers - len(stages) + 1), layers + 1))
        lists["out_features"] = [f"stage{index}" for index in lists["out_indices"]]
    if sizes.get("backbone_out_indices"):
        count, last = len(sizes["backbone_out_indices"]), max(sizes["backbone_out_indices"])
        lists["backbone_out_indices"] = [
            max(index, (own + 1) * layers // (last + 1) - 1)
            for index, own in enumerate(sizes["backbone_out_indices"][: min(count, layers)])
        ]
    return lists


def _first(sizes: Mapping[str, Any], *keys: str) -> int | None:
    return next((sizes[key] for key in keys if sizes.get(key)), None)


# Sizes in words, and keys of its own, become changes of a configuration of transformers.
#
# A user says `layers`, `hidden`, `heads`; sizes that follow from these (the width of a head) change with
# them.

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


SAMPLES = 2
_SIDE = 224
"""Of a picture, where the configuration says nothing."""
_WAVE = 16_000
"""Numbers of one second of sound."""
_FRAMES = 128
"""Of sound turned into features."""
_STEPS = 20
"""Of a series of decisions."""
_BYTES = 256
"""Tokens of a model without a vocabulary, which reads characters."""
_OBJECTS = 36
"""Of a picture that comes as features of what is in it."""
_OF_OTHER_KINDS = ("pixel_values", "input_features", "input_values", "visual_feats", "visual_pos")
"""What a model that reads text may take beside it."""


class InputMaker:
    """Makes up arguments of `module`: 2 samples, drawn from `seed`, texts of `sequence` tokens."""

    def __init__(self, module: nn.Module, config: Any, sequence: int, seed: int) -> None:
        self._module, self._config, self._sequence = module, config, sequence
        self._text = config.get_text_config()
        self._generator = torch.Generator().manual_seed(seed)
        main = getattr(module, "main_input_name", "input_ids")
        self._main = str(main[0] if isinstance(main, list) else main)
        parameters = inspect.signature(module.forward).parameters
        self._names = list(parameters)
        self._needed = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]

    def proposals(self) -> Iterator[dict[str, Tensor]]:
        """Keywords to call it with: with all kinds of inputs that it takes, and with those it must have."""
        more = ["decoder_input_ids"] if self._config.is_encoder_decoder else []
        must = dict.fromkeys([self._main, *self._needed, *(name for name in more if name in self._names)])
        if "spatial_shapes" in self._names and self._main == "pixel_values":
            must |= dict.fromkeys(("pixel_attention_mask", "spatial_shapes"))
        if "image_embeds_position_mask" in self._names:
            must["image_embeds_position_mask"] = None
        if self._config.model_type == "fsmt":
            # Else forward decides by values whether there is padding.
            must["decoder_attention_mask"] = None
        every = must | dict.fromkeys(name for name in _OF_OTHER_KINDS if name in self._names)
        if "past_time_features" in must:
            every |= dict.fromkeys(name for name in self._names if name.startswith("future_"))
        if self._main == "states":
            every |= dict.fromkeys(("actions", "rewards", "returns_to_go", "timesteps"))
        if "pixel_values" in every and "input_ids" in self._names:
            every["input_ids"] = None
        tensors = {name: self._make(name) for name in every}
        whole = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        if must.keys() <= whole.keys():
            yield self._with_places_for_pictures(whole)
            if whole.keys() != must.keys():
                yield {name: whole[name] for name in must}

    @property
    def lacking(self) -> list[str]:
        """The arguments that it must have and that cannot be made up."""
        return [name for name in dict.fromkeys([self._main, *self._needed]) if self._make(name) is None]

    def _make(self, name: str) -> Tensor | None:
        makers: dict[str, Callable[[], Tensor | None]] = {
            "input_ids": self._tokens,
            "inputs": self._tokens,
            "decoder_input_ids": self._tokens,
            "qformer_input_ids": self._tokens,
            "pixel_values": self._pictures,
            "input_values": self._sound,
            "input_features": self._features,
            "visual_feats": lambda: self._noise(_OBJECTS, self._size("visual_feat_dim")),
            "visual_pos": lambda: self._noise(_OBJECTS, self._size("visual_pos_dim")),
            "states": lambda: self._noise(_STEPS, self._size("state_dim")),
            "actions": lambda: self._noise(_STEPS, self._size("act_dim")),
            "rewards": lambda: self._noise(_STEPS, 1),
            "returns_to_go": lambda: self._noise(_STEPS, 1),
            "timesteps": lambda: torch.arange(_STEPS, device="cpu").repeat(SAMPLES, 1),
            "flattened_patches": self._placed_patches,
            "pixel_attention_mask": lambda: torch.ones(SAMPLES, self._patches_a_side**2, device="cpu"),
            "image_embeds_position_mask": self._picture_places,
            "decoder_attention_mask": lambda: torch.ones(SAMPLES, self._sequence, device="cpu"),
            "spatial_shapes": lambda: torch.full((SAMPLES, 2), self._patches_a_side, device="cpu"),
            "freq": lambda: torch.zeros(SAMPLES, 1, dtype=torch.long, device="cpu"),
        }
        if name.startswith(("past_", "future_")):
            return self._series(name)
        return makers[name]() if name in makers else None

    def _noise(self, *shape: int | None) -> Tensor | None:
        if any(size is None for size in shape):
            return None
        sizes = [size for size in shape if size is not None]
        return torch.randn((SAMPLES, *sizes), generator=self._generator, device="cpu")

    def _size(self, *keys: str) -> int | None:
        """Of the configuration, or of one inside it."""
        parts = [getattr(self._config, key, None) for key in getattr(self._config, "sub_configs", {})]
        values = (getattr(part, key, None) for part in (self._config, *parts) for key in keys)
        return next((size for size in values if isinstance(size, int) and not isinstance(size, bool)), None)

    def _tokens(self) -> Tensor:
        """Random ids of shape (2, sequence), none of them special: padding is skipped, an end ends."""
        vocabulary = configured_size(self._text, "vocabulary") or _BYTES
        special = {
            token
            for config in (self._config, self._text)
            for key, value in config.to_dict().items()
            if key.endswith(("_token_id", "_token_index"))
            for token in (value if isinstance(value, list) else [value])
        }
        plain = [token for token in range(vocabulary) if token not in special] or list(range(vocabulary))
        indices = torch.randint(
            len(plain), (SAMPLES, self._sequence), generator=self._generator, device="cpu"
        )
        return torch.tensor(plain, device="cpu")[indices]

    def _pictures(self) -> Tensor | None:
        """Noise of shape (2, channels, height, width), for clips (2, frames, channels, height, width)."""
        vision = getattr(self._config, "vision_config", None) or getattr(
            self._config, "image_config", self._config
        )
        side = getattr(vision, "image_size", None) or getattr(self._config, "image_size", None) or _SIDE
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        if "spatial_shapes" in self._names:
            return self._noise(self._patches_a_side**2, channels * vision.patch_size**2)
        frames = getattr(vision, "num_frames", None)
        return self._noise(*([frames] if frames else []), channels, height, width)

    @property
    def _patches_a_side(self) -> int:
        """Of a picture that comes as patches."""
        return math.isqrt(self._size("num_patches") or 64)

    def _picture_places(self) -> Tensor | None:
        """Kosmos-2 puts so many vectors of a picture in the place of the first words."""
        count = self._size("latent_query_num")
        if count is None:
            return None
        return (torch.arange(count + self._sequence, device="cpu") < count).long().repeat(SAMPLES, 1)

    def _placed_patches(self) -> Tensor | None:
        """Behind the row and the column of each, from 1 on, as Pix2Struct takes them."""
        patches = self._noise(self._patches_a_side**2, self._size("patch_embed_hidden_size"))
        if patches is None:
            return None
        places = torch.arange(1, self._patches_a_side + 1, device="cpu")
        grid = torch.cartesian_prod(places, places).float().expand(SAMPLES, -1, 2)
        return torch.cat([grid, patches], 2)

    def _sound(self) -> Tensor | None:
        bins, frames = self._size("num_mel_bins"), self._size("max_length")
        return self._noise(frames, bins) if bins and frames else self._noise(_WAVE)

    def _features(self) -> Tensor | None:
        """As Whisper takes them (bins first), CLAP (a picture of them), and others (frames first)."""
        bins, positions = self._size("num_mel_bins"), self._size("max_source_positions")
        if self._size("spec_size") and bins:
            return self._noise(1, (self._size("spec_size") or 0) * (self._size("freq_ratio") or 4), bins)
        channels = self._size("input_feat_per_channel", "feature_projection_input_dim")
        if channels:
            return self._noise(_FRAMES, channels)
        return self._noise(bins, 2 * positions) if bins and positions else None

    def _series(self, name: str) -> Tensor | None:
        context, ahead = self._size("context_length"), self._size("prediction_length")
        lags = max(getattr(self._config, "lags_sequence", None) or [0])
        steps = ahead if name.startswith("future_") else (context or ahead or 0) + lags
        if name.endswith("_padding"):
            return torch.zeros(SAMPLES, steps or 0, dtype=torch.long, device="cpu")
        if name.endswith("_time_features"):
            return self._noise(steps, (self._size("num_time_features") or 0))
        channels = self._size("num_input_channels")
        values = self._noise(steps, channels) if channels else self._noise(steps)
        return torch.ones_like(values) if values is not None and name.endswith("_mask") else values

    def _with_places_for_pictures(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The text begins with as many tokens for pictures as the model makes of one."""
        if "image_embeds_position_mask" in inputs:
            count = int(inputs["image_embeds_position_mask"][0].sum())
            places = torch.full((SAMPLES, count), int(inputs["input_ids"][0, 0]), device="cpu")
            return inputs | {"input_ids": torch.cat([places, inputs["input_ids"]], 1)}
        names = ("image_token_id", "image_token_index")
        token = next(
            (getattr(self._config, n) for n in names if getattr(self._config, n, None) is not None), None
        )
        ask = getattr(self._module, "get_image_features", None)
        if token is None or ask is None or "pixel_values" not in inputs or "input_ids" not in inputs:
            return inputs
        device = next(self._module.parameters()).device
        try:
            with torch.no_grad():
                answer = ask(pixel_values=inputs["pixel_values"][:1].to(device))
        except Exception:
            return inputs
        parts = getattr(answer, "pooler_output", answer)
        tensors = parts if isinstance(parts, list | tuple) else [parts]
        count = sum(part.numel() // part.shape[-1] for part in tensors)
        places = torch.full((SAMPLES, count), token, device="cpu")
        return inputs | {"input_ids": torch.cat([places, inputs["input_ids"]], 1)}
