"""The sizes of a decoder-only transformer, of its published configuration (`config.json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import FileError, UsageError
from ..text_files import read_text

_LARGEST = 2**31
"""Of any size of a configuration: far above what is trained."""


@dataclass(frozen=True)
class AttentionShape:
    """`heads` queries of `head_width` share `key_value_heads` keys and values of `value_width`.

    Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1) has ranks: of
    `latent_queries` (0: queries are projected in one step) and `latent_keys`; `rotary_width` of the head's
    width is one key for all heads.
    """

    heads: int
    key_value_heads: int
    head_width: int
    value_width: int
    latent_queries: int = 0
    latent_keys: int = 0
    rotary_width: int = 0

    @property
    def is_latent(self) -> bool:
        """Whether keys and values are projected up from a latent vector."""
        return self.latent_keys > 0

    @property
    def query_size(self) -> int:
        """Entries of all queries of a token."""
        return self.heads * self.head_width

    @property
    def key_value_up_size(self) -> int:
        """Entries that the latent vector is projected up to: of keys without their rotary part, and
        values."""
        return self.heads * (self.head_width - self.rotary_width + self.value_width)

    @property
    def fused_size(self) -> int:
        """Entries of queries, keys and values of a token in one projection."""
        return self.query_size + self.key_value_heads * (self.head_width + self.value_width)


class LayerParameters(NamedTuple):
    """Numbers of them: `whole` on every device, `shared` by the tensor-parallel ones, of `routed` experts."""

    whole: int
    shared: int
    routed: int


@dataclass(frozen=True)
class ExpertShape:
    """`number` experts of `width`, `per_token` of which a token takes; `shared_width` is for every token."""

    number: int
    per_token: int
    width: int
    shared_width: int = 0


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of embedding, blocks and head. `routed`: by block, whether its feed-forward layer has experts.

    `gated` feed-forward layers have two matrices up and one down (SwiGLU and the like), others one up. Biases
    and positions' tables are not counted: together under a thousandth of the weights.
    """

    name: str
    hidden: int
    vocabulary: int
    feed_forward: int
    attention: AttentionShape
    routed: tuple[bool, ...]
    experts: ExpertShape | None = None
    gated: bool = True
    tied: bool = False

    @property
    def blocks(self) -> int:
        """Transformer layers."""
        return len(self.routed)

    def with_blocks(self, number: int) -> TransformerShape:
        """The same with fewer or more blocks: the first ones as they are, more like the last."""
        if not 0 < number <= 100_000:
            raise UsageError(f"layers={number}: must be from 1 to 100000", "Give the model's layers.")
        return replace(self, routed=(*self.routed, *self.routed[-1:] * number)[:number])

    def parameters(self) -> int:
        """Of the whole model."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        blocks = self.blocks * sum(self.attention_parameters())
        return (
            tables + self.hidden + blocks + sum(sum(self.feed_forward_parameters(own)) for own in self.routed)
        )

    def active_parameters(self) -> int:
        """Those that a token uses: of the routed experts only its own."""
        if self.experts is None:
            return self.parameters()
        routed = self.feed_forward_parameters(True).routed
        idle = routed - routed // self.experts.number * self.experts.per_token
        return self.parameters() - sum(self.routed) * idle

    def attention_parameters(self) -> LayerParameters:
        """Of a block's attention with its norm."""
        attention, hidden = self.attention, self.hidden
        shared = attention.heads * attention.value_width * hidden
        if not attention.is_latent:
            return LayerParameters(hidden, shared + hidden * attention.fused_size, 0)
        queries, keys = attention.latent_queries, attention.latent_keys
        whole = hidden * (1 + queries + keys + attention.rotary_width) + queries + keys
        shared += keys * attention.key_value_up_size + (queries or hidden) * attention.query_size
        return LayerParameters(whole, shared, 0)

    def feed_forward_parameters(self, routed: bool) -> LayerParameters:
        """Of a block's feed-forward layer, or of its experts, with its norm."""
        hidden, matrices = self.hidden, 3 if self.gated else 2
        if not routed or self.experts is None:
            return LayerParameters(hidden, matrices * hidden * self.feed_forward, 0)
        experts = self.experts
        return LayerParameters(
            hidden * (1 + experts.number),
            matrices * hidden * experts.shared_width,
            matrices * hidden * experts.width * experts.number,
        )


def load_transformer_shape(path: Path) -> TransformerShape:
    """Of a `config.json` as the transformers library writes it. Raises FileError."""
    try:
        keys = json.loads(read_text(path, "configuration"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not JSON: {error}", "Give the model's config.json.") from error
    if not isinstance(keys, dict):
        raise FileError(f"{path}: not the configuration of a model", "Give the model's config.json.")
    nested = keys.get("text_config")
    try:
        return transformer_shape(nested if isinstance(nested, dict) else keys, path.stem)
    except UsageError as error:
        raise FileError(f"{path}: {error.what}", error.hint) from error


def transformer_shape(keys: Mapping[str, Any], name: str = "") -> TransformerShape:
    """Of the keys of a configuration, in any of the families' spellings. Raises UsageError."""
    sizes = _ConfigurationSizes(keys)
    family = str(keys.get("model_type", name))
    hidden, heads = (
        sizes.needed("hidden_size", "n_embd", "d_model"),
        sizes.needed("num_attention_heads", "n_head"),
    )
    blocks = sizes.needed("num_hidden_layers", "n_layer", "num_layers")
    experts = _experts(sizes)
    width = sizes.optional("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    gated = family not in _NOT_GATED
    shape = TransformerShape(
        name=family,
        hidden=hidden,
        vocabulary=sizes.needed("vocab_size"),
        feed_forward=width or 4 * hidden,
        attention=_attention(sizes, hidden, heads),
        routed=tuple(_routed(keys, blocks)) if experts else (False,) * min(blocks, 100_000),
        experts=experts,
        gated=gated,
        tied=bool(keys.get("tie_word_embeddings", family in _TIED)),
    )
    return shape.with_blocks(blocks)


_NOT_GATED = frozenset(
    {
        "gpt2",
        "gpt_neo",
        "gpt_neox",
        "gptj",
        "codegen",
        "opt",
        "bloom",
        "falcon",
        "mpt",
        "phi",
        "starcoder2",
        "nemotron",
        "bert",
    }
)
"""Families whose feed-forward layer has one matrix up and one down."""
_TIED = frozenset(
    {"gpt2", "gpt_neo", "opt", "bloom", "falcon", "mpt", "gemma", "gemma2", "gemma3_text", "bert"}
)
"""Families that tie head and embedding unless told otherwise."""


class _ConfigurationSizes:
    """Whole numbers by any of several keys."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self._keys = keys

    def optional(self, *names: str) -> int:
        """0 where none of them is given."""
        for name in names:
            value = self._keys.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
                raise UsageError(
                    f"{name}={str(value)[:40]}: must be a whole number from 0 to {_LARGEST}",
                    "Give the model's own config.json.",
                )
            return value
        return 0

    def needed(self, *names: str) -> int:
        size = self.optional(*names)
        if not size:
            raise UsageError(
                f"the key {' or '.join(names)} is missing, or 0",
                "Give the config.json of a decoder-only transformer.",
            )
        return size


def _attention(sizes: _ConfigurationSizes, hidden: int, heads: int) -> AttentionShape:
    latent = sizes.optional("kv_lora_rank")
    if latent:
        rotary = sizes.needed("qk_rope_head_dim")
        return AttentionShape(
            heads=heads,
            key_value_heads=heads,
            head_width=sizes.needed("qk_nope_head_dim") + rotary,
            value_width=sizes.needed("v_head_dim"),
            latent_queries=sizes.optional("q_lora_rank"),
            latent_keys=latent,
            rotary_width=rotary,
        )
    width = sizes.optional("head_dim") or hidden // heads
    if not sizes.optional("head_dim") and hidden % heads:
        raise UsageError(
            f"hidden_size={hidden} is no multiple of num_attention_heads={heads}",
            "Give head_dim, or other sizes.",
        )
    shared = sizes.optional("num_key_value_heads", "num_kv_heads") or heads
    if heads % shared:
        raise UsageError(
            f"num_attention_heads={heads} is no multiple of num_key_value_heads={shared}",
            "Correct the configuration.",
        )
    return AttentionShape(heads, shared, width, width)


def _experts(sizes: _ConfigurationSizes) -> ExpertShape | None:
    number = sizes.optional("n_routed_experts", "num_experts", "num_local_experts")
    if number < 2:
        return None
    width = sizes.optional("moe_intermediate_size") or sizes.needed("intermediate_size")
    shared = sizes.optional("shared_expert_intermediate_size") or sizes.optional("n_shared_experts") * width
    per_token = sizes.needed("num_experts_per_tok", "num_experts_per_token", "moe_topk")
    if per_token > number:
        raise UsageError(
            f"num_experts_per_tok={per_token}: there are {number} experts", "Correct the configuration."
        )
    return ExpertShape(number, per_token, width, shared)


def _routed(keys: Mapping[str, Any], blocks: int) -> Iterator[bool]:
    """By block: `first_k_dense_replace` (DeepSeek), `mlp_only_layers` and `decoder_sparse_step` (Qwen),
    `moe_layer_freq` say which have no experts; without them all have."""
    sizes = _ConfigurationSizes(keys)
    dense_first = sizes.optional("first_k_dense_replace")
    step = sizes.optional("decoder_sparse_step") or 1
    every = keys.get("moe_layer_freq", 1)
    every = every if isinstance(every, int) and every > 0 else 1
    only = keys.get("mlp_only_layers") or ()
    plain = {index for index in only if isinstance(index, int)} if isinstance(only, list) else set()
    for block in range(min(blocks, 100_000)):
        yield block >= dense_first and block not in plain and (block + 1) % step == 0 and block % every == 0
