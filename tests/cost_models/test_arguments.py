"""The arguments of the Python API that the functions themselves do not test."""

from __future__ import annotations

import numpy as np
import pytest

from pplan.cost_models.arguments import unknown_word, whole
from pplan.cost_models.errors import UsageError


def test_a_whole_number_within_its_bounds() -> None:
    assert [whole("seed", value, at_least=0, at_most=5) for value in (0, np.int64(5))] == [0, 5]
    assert whole("seed", 2**63 - 1, at_least=0, at_most=2**63 - 1) == 2**63 - 1
    assert whole("gpus", 2**70) == 2**70


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (2**63, f"seed={2**63}: must be at most {2**63 - 1}"),
        (-1, "seed=-1: must be at least 0"),
        (1 << 20_000, f"seed=(a number of 20001 bits): must be at most {2**63 - 1}"),
        (-(1 << 20_000), "seed=(a number of 20001 bits): must be at least 0"),
    ],
    ids=["above", "below", "far above", "far below"],
)
def test_a_whole_number_out_of_its_bounds(value: int, what: str) -> None:
    with pytest.raises(UsageError) as caught:
        whole("seed", value, at_least=0, at_most=2**63 - 1)
    assert caught.value.what == what
    assert caught.value.hint


def test_the_nearest_of_the_words_is_near() -> None:
    """Not `any` for a schedule that is not there."""
    words = ("any", "gpipe", "1f1b", "zb-h1")
    assert unknown_word("schedule", "hanayo", words).hint == "Use one of: any, gpipe, 1f1b, zb-h1."
    for wrong, nearest in (("gpip", "gpipe"), ("1f1bb", "1f1b"), ("zbh1", "zb-h1")):
        assert unknown_word("schedule", wrong, words).hint.startswith(f"Did you mean {nearest}?")
