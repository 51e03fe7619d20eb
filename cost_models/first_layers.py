"""Stages that run only their first layers again: the word for it, and the bytes of such a stage.

A stage that recomputes `first_3` keeps its input and what its layers from the fourth on save; backward runs
the first three again when it comes to them, and by then nothing of the others is left. So these two never add
up: of the micro-batch at work counts the larger. Any other layers would be run again beside what the layers
before them save. Megatron-LM's `--recompute-method block` takes the first layers of each stage, too, each by
itself; here they are one checkpoint, which keeps one input.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .runtime import OFFLOAD
from .stage_bytes import StageBytes

_WORD = re.compile(r"first_([1-9]\d{0,6})")


def first_layers_word(count: int) -> str:
    """The word for a stage that runs so many of its first layers again.

    >>> first_layers_word(3)
    'first_3'
    """
    return f"first_{count}"


def count_first_layers(word: str) -> int | None:
    """How many of its first layers a stage of such a word runs again; None of every other word.

    >>> count_first_layers("first_3"), count_first_layers("always")
    (3, None)
    """
    match = _WORD.fullmatch(word)
    return None if match is None else int(match[1])


def whole_word(word: str) -> str:
    """The word as the ledger takes it, for which a stage of `recompute_first` recomputes always, and so does
    one of `offload_saved`.

    >>> whole_word("first_3"), whole_word("never"), whole_word("offload")
    ('always', 'never', 'always')
    """
    return word if count_first_layers(word) is None and word != OFFLOAD else "always"


def repeat_word(word: str) -> str:
    """The word as the seconds take it: what is run again, of some layers or of all; what comes back from the
    host is not.

    >>> repeat_word("first_3"), repeat_word("offload")
    ('always', 'never')
    """
    return "never" if word == OFFLOAD else whole_word(word)


def recompute_kind(word: str) -> str:
    """The word without its number of layers, as runtimes know it.

    >>> recompute_kind("first_3"), recompute_kind("always")
    ('first_layers', 'always')
    """
    return word if count_first_layers(word) is None else "first_layers"


def recompute_kinds(words: Sequence[str]) -> set[str]:
    """The kinds of several words.

    >>> sorted(recompute_kinds(["first_3", "never", "first_1"]))
    ['first_layers', 'never']
    """
    return {recompute_kind(word) for word in words}


def recompute_first(stage: StageBytes, first: StageBytes, rest: StageBytes) -> StageBytes:
    """The bytes of a stage that runs its `first` layers again and keeps what the `rest` saves, as those of a
    stage that recomputes always.

    In flight it holds its input and what the rest saves. The micro-batch at work needs the workspace of the
    rest on top of that, or, when the rest is done, what the first layers save and their workspace in place of
    what the rest saved: the larger of both.
    """
    again, besides = first.saved + first.saved_input, rest.saved + rest.saved_input
    more = np.maximum(again - besides, 0.0)
    most = np.maximum(rest.workspace, again - besides + first.workspace)
    return replace(
        stage,
        saved=more - first.saved_input,
        saved_input=first.saved_input,
        besides=besides,
        workspace=most - more,
    )
