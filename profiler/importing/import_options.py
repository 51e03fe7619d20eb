"""The options of how a file of costs is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

from ...cost_models import arguments
from ...cost_models.arguments import Options, option
from ...cost_models.errors import UsageError
from ...cost_models.precision import training_precision

FORMATS = ("pipedream", "csv", "json")
GRANULARITIES = ("block", "fine")


class ImportKeywords(TypedDict, total=False):
    """The fields of `ProfileImportOptions`, as a caller may give them."""

    format: Literal["pipedream", "csv", "json"] | str | None
    model: str | None
    micro_batch_size: int | None
    granularity: Literal["block", "fine"] | str | None
    dtype: str
    tensor_parallel: int


@dataclass(frozen=True)
class ProfileImportOptions(Options):
    """What a file of costs does not say; None: as is usual for its format.

    `granularity` is for graphs: a table's rows are its layers.
    """

    format: str | None = option(
        None,
        arguments.optional_word,
        "Format of the file; default: detected from its content.",
        "|".join(FORMATS),
        words=FORMATS,
    )
    model: str | None = option(
        None, arguments.optional_word, "The model's name; default: the file's.", "NAME"
    )
    micro_batch_size: int | None = option(
        None,
        arguments.optional_whole,
        "Samples that the costs are for, where the file does not say it; default: 128 of a graph, 1 of a "
        "table.",
        "N",
        least=1,
    )
    granularity: str | None = option(
        None,
        arguments.optional_word,
        "Layers of a graph: what lies between all places that one tensor crosses, or each operation.",
        "|".join(GRANULARITIES),
        words=GRANULARITIES,
    )
    tensor_parallel: int = option(
        1,
        arguments.whole,
        "Devices that share every layer, where the costs are those of one of them.",
        "N",
        flag="tp",
        least=1,
    )
    dtype: str = option(
        "float32", arguments.word, "Or float16, bfloat16, float64: of the weights.", "float32"
    )

    def check(self) -> None:
        """Raises UsageError for words that are not known."""
        for field, word, allowed in (
            ("format", self.format, FORMATS),
            ("granularity", self.granularity, GRANULARITIES),
        ):
            if word is not None and word not in allowed:
                raise UsageError(f"{field}={word!r}: not known", f"Use one of: {', '.join(allowed)}.")
        training_precision(self.dtype)
