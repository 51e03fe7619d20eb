"""Sizes of global batches and micro-batches against every number there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.planner.batch_sizes import BatchSizes

MakeChain = Callable[..., Chain]


def test_sizes_that_a_request_makes(make_chain: MakeChain) -> None:
    chain = make_chain(0, 2)
    assert BatchSizes(chain, 2, 2, 12, 3).micro_batch_sizes == [4]
    assert BatchSizes(chain, 2, 2, 12, 1).micro_batch_sizes == [12]
    one = make_chain(0, 2, sizes=(4,))
    assert BatchSizes(one, 2, 1, 16, 2).micro_batch_sizes == [8]  # four samples on each of two devices
    with pytest.raises(UsageError, match="need size 5, but the profile measured only size 4"):
        BatchSizes(one, 2, 1, 10, 2).micro_batch_sizes  # noqa: B018  raises


def test_what_cannot_be_is_said_with_what_can(make_chain: MakeChain) -> None:
    chain = make_chain(0, 2, sizes=(4,))
    with pytest.raises(UsageError) as none:
        BatchSizes(chain, 1, 1, 7, None).micro_batch_sizes  # noqa: B018  raises
    assert none.value.what == (
        "mini_batch=7: no measured micro-batch size divides it into at most 16384 micro-batches "
        "(measured sizes: 4)"
    )
    assert none.value.hint == "Use a multiple of 4, or measure more sizes with pplan profile."
    with pytest.raises(UsageError) as uneven:
        BatchSizes(chain, 1, 1, 12, 5).micro_batch_sizes  # noqa: B018  raises
    assert uneven.value.what == "micro_batches=5: does not divide the global batch of 12"
    assert uneven.value.hint == "Use a divisor of 12: 1, 2, 3, 4, 6, 12."
