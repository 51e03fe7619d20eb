"""The sizes of a transformer, and how many parameters it has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

from ..errors import UsageError

MOST_BLOCKS = 100_000


@dataclass(frozen=True)
class AttentionShape:
    """`heads` queries of `head_width` share `key_value_heads` keys and values of `value_width`.

    Multi-head latent attention (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1) has ranks: of
    `latent_queries` (0: queries are projected in one step) and `latent_keys`; `rotary_width` of the head's
    width is one key for all heads. `causal`: tokens attend to those before them only.
    """

    heads: int
    key_value_heads: int
    head_width: int
    value_width: int
    latent_queries: int = 0
    latent_keys: int = 0
    rotary_width: int = 0
    causal: bool = True

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

    def plus(self, other: LayerParameters) -> LayerParameters:
        return LayerParameters(*(a + b for a, b in zip(self, other, strict=True)))


class VectorParameters(NamedTuple):
    """Numbers of the parameters beside the matrices: biases, norms, tables of positions. Of a block's
    attention, its dense feed-forward layer and its experts; on the first stage and the last, and there those
    that have as many entries as the vocabulary, which the tensor-parallel devices share as they share it."""

    attention: LayerParameters
    dense: LayerParameters
    routed: LayerParameters
    first: int
    last: int
    vocabulary: int = 0


class LayerNames(NamedTuple):
    """Names of layers in a profile: the embedding, the list of the blocks, and the layers after them."""

    embedding: str = "model.embed_tokens"
    blocks: str = "model.layers"
    ends: tuple[str, ...] = ("model.norm", "lm_head")

    @property
    def granularity(self) -> str:
        """The granularity of a profile with these layers."""
        modules = (name for name in self.ends if name not in ("div", "mul"))
        return f"module:{','.join((f'{self.blocks}.*', *modules))}"


@dataclass(frozen=True)
class ExpertShape:
    """`number` experts of `width`, `per_token` of which a token takes; `shared_width` is for every token."""

    number: int
    per_token: int
    width: int
    shared_width: int = 0


class AttentionWindow(NamedTuple):
    """A token attends to at most `tokens`, itself included: the last ones, or, `chunked`, those of its piece
    of the sequence (Llama 4)."""

    tokens: int
    chunked: bool = False

    def pairs(self, sequence: int) -> int:
        """Of a token and one that it attends to."""
        size = min(self.tokens, sequence)
        if not self.chunked:
            return size * (size + 1) // 2 + (sequence - size) * size
        pieces, rest = divmod(sequence, size)
        return pieces * (size * (size + 1) // 2) + rest * (rest + 1) // 2


@dataclass(frozen=True)
class TransformerShape:
    """Sizes of embedding, blocks and head. `routed`: by block, whether its feed-forward layer has experts.

    `gated` feed-forward layers have two matrices up and one down (SwiGLU and the like), others one up.
    `vectors`: the parameters beside the matrices; None: a scale for each norm of a block and behind the last.
    `note`: what is not known of the model, as a sentence. `predictors`: blocks that predict further tokens
    (DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437, section 2.2); they are counted nowhere else. `windows`: by
    block what attention is limited to, or None; empty where all blocks attend to all tokens before.
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
    vectors: VectorParameters | None = None
    note: str = ""
    predictors: int = 0
    windows: tuple[AttentionWindow | None, ...] = ()
    names: LayerNames = LayerNames()

    @property
    def blocks(self) -> int:
        """Transformer layers."""
        return len(self.routed)

    def with_blocks(self, number: int) -> TransformerShape:
        """The same with fewer or more blocks: the first ones as they are, more like the last."""
        if not 0 < number <= MOST_BLOCKS:
            raise UsageError(f"layers={number}: must be from 1 to {MOST_BLOCKS}", "Give the model's layers.")
        windows = self.windows * (number // len(self.windows) + 1) if self.windows else ()
        routed = (*self.routed, *self.routed[-1:] * number)
        return replace(self, routed=routed[:number], windows=windows[:number])

    def attended_share(self, sequence: int) -> float:
        """Of the half below the diagonal what a block's attention computes, in the mean of all blocks."""
        whole = sequence * (sequence + 1) // 2
        counts = Counter(self.windows)
        pairs = sum(count * (own.pairs(sequence) if own else whole) for own, count in counts.items())
        return pairs / (len(self.windows) * whole) if self.windows else 1.0

    def beside_matrices(self) -> VectorParameters:
        """Biases, norms, tables of positions."""
        if self.vectors is not None:
            return self.vectors
        latent = self.attention.latent_queries + self.attention.latent_keys
        norm = LayerParameters(self.hidden, 0, 0)
        return VectorParameters(LayerParameters(self.hidden + latent, 0, 0), norm, norm, 0, self.hidden)

    def parameters(self) -> int:
        """Of the whole model."""
        tables = self.vocabulary * self.hidden * (1 if self.tied else 2)
        vectors = self.beside_matrices()
        blocks = self.blocks * sum(self.attention_parameters())
        blocks += sum(sum(self.feed_forward_parameters(own)) for own in self.routed)
        return tables + vectors.first + vectors.last + vectors.vocabulary * self.vocabulary + blocks

    def layers(self, predictors: int = 0) -> list[tuple[str, int]]:
        """List the layers as a profile has them, in order.

        Args:
            predictors: Multi-token predictors that are trained.

        Returns:
            Name and number of parameters of each. Of weights that several layers use the first counts them.
        """
        names, vectors, table = self.names, self.beside_matrices(), self.vocabulary * self.hidden
        blocks = [
            sum(self.attention_parameters()) + sum(self.feed_forward_parameters(own)) for own in self.routed
        ]
        layers = [(names.embedding, table + vectors.first)]
        layers += [(f"{names.blocks}.{number}", count) for number, count in enumerate(blocks)]
        predictor = blocks[-1] + 3 * self.hidden + 2 * self.hidden**2
        layers += [(f"model.mtp.{number}", predictor) for number in range(predictors)]
        head = (0 if self.tied else table) + vectors.vocabulary * self.vocabulary
        ends = [vectors.last + head] if len(names.ends) == 1 else [vectors.last, head]
        return layers + list(zip_longest(names.ends, ends, fillvalue=0))  # type: ignore[arg-type]

    def active_parameters(self) -> int:
        """Those that a token uses: of the routed experts only its own."""
        if self.experts is None:
            return self.parameters()
        routed = self.feed_forward_parameters(True).routed
        idle = routed - routed // self.experts.number * self.experts.per_token
        return self.parameters() - sum(self.routed) * idle

    def model_flops(self, sequence: int, predictors: int = 0) -> float:
        """Count the floating-point operations that training on one sequence needs, forward and backward.

        Each matrix of a block or a head multiplies every token that uses it, and attention multiplies queries
        by keys and weights by values over the whole square of the sequence (a windowed block: its share of
        it), causal or not. Backward takes twice forward. Recomputation, embeddings and passes over memory do
        not count: these are the FLOPs of MFU (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B), and
        for a GPT those of Narayanan et al., SC 2021, equation 3, without the recomputed forward.

        Args:
            sequence: Tokens of the sequence.
            predictors: Multi-token predictors that are trained.
        """
        attention, vectors = self.attention, self.beside_matrices()
        matrices = [
            sum(self.attention_parameters()) - sum(vectors.attention) + self._used_matrices(routed)
            for routed in self.routed
        ]
        head = self.hidden * self.vocabulary
        used = sum(matrices) + head + predictors * (matrices[-1] + 2 * self.hidden**2 + head)
        pairs = (self.blocks * self.attended_share(sequence) + predictors) * sequence**2
        return 6.0 * (
            used * sequence + pairs * attention.heads * (attention.head_width + attention.value_width)
        )

    def _used_matrices(self, routed: bool) -> int:
        """Number of entries in the matrices of a feed-forward layer, or of experts, that a token uses."""
        vectors = self.beside_matrices()
        if not routed or self.experts is None:
            return sum(self.feed_forward_parameters(False)) - sum(vectors.dense)
        whole, shared, experts = self.feed_forward_parameters(True)
        each = (experts - vectors.routed.routed) // self.experts.number * self.experts.per_token
        return whole + shared - vectors.routed.whole - vectors.routed.shared + each

    def attention_parameters(self) -> LayerParameters:
        """Of a block's attention with its norms."""
        attention, hidden = self.attention, self.hidden
        vectors = self.beside_matrices().attention
        shared = attention.heads * attention.value_width * hidden
        if not attention.is_latent:
            return vectors.plus(LayerParameters(0, shared + hidden * attention.fused_size, 0))
        queries, keys = attention.latent_queries, attention.latent_keys
        shared += keys * attention.key_value_up_size + (queries or hidden) * attention.query_size
        return vectors.plus(LayerParameters(hidden * (queries + keys + attention.rotary_width), shared, 0))

    def feed_forward_parameters(self, routed: bool) -> LayerParameters:
        """Of a block's feed-forward layer, or of its experts, with its norms."""
        hidden, matrices = self.hidden, 3 if self.gated else 2
        if not routed or self.experts is None:
            return self.beside_matrices().dense.plus(
                LayerParameters(0, matrices * hidden * self.feed_forward, 0)
            )
        experts = self.experts
        return self.beside_matrices().routed.plus(
            LayerParameters(
                hidden * experts.number,
                matrices * hidden * experts.shared_width,
                matrices * hidden * experts.width * experts.number,
            )
        )
