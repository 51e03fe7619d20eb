"""Sizes of global batches and micro-batches against every number there is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.layer import Chain
from pplan.planner import batch_sizes
from pplan.planner.batch_sizes import BatchSizes, divisors
from pplan.planner.candidate import MOST_MICRO_BATCHES

MakeChain = Callable[..., Chain]


def made_of(chain: Chain, batch: int, replicas: int, most: int = MOST_MICRO_BATCHES) -> list[int]:
    """Sizes of micro-batches of which some number of replicas has a share that was measured."""
    return [
        size
        for size in range(1, batch + 1)
        if batch % size == 0
        and batch // size <= most
        and any(chain.reaches(-(-size // count)) for count in range(1, min(size, replicas) + 1))
    ]


def test_divisors_are_all_divisors(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 300):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]
    monkeypatch.setattr(batch_sizes, "MOST_MICRO_BATCHES", 4)
    for number in range(1, 300):
        some = divisors(number)
        assert some == sorted(set(some))
        assert all(number % one == 0 for one in some)
        assert {one for one in range(1, number + 1) if number % one == 0 and number // one <= 4} <= set(some)
    assert divisors(49) == [1, 49]


@pytest.mark.parametrize("sizes", [(1,), (4,), (2, 4), (1, 2, 4)])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_micro_batches_are_all_that_were_measured(
    sizes: tuple[int, ...], replicas: int, make_chain: MakeChain, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(0, 2, sizes=sizes)
    monkeypatch.setattr(batch_sizes, "MOST_MICRO_BATCHES", 12)
    for batch in range(1, 49):
        made = BatchSizes(chain, replicas, replicas, batch, None)
        assert made.global_batch == batch
        wanted = made_of(chain, batch, replicas, 12)
        if wanted:
            assert made.micro_batch_sizes == wanted
        else:
            with pytest.raises(UsageError):
                made.micro_batch_sizes  # noqa: B018  raises


@pytest.mark.parametrize("sizes", [(3,), (5,), (2, 4)])
@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [None, 1, 3, 64])
def test_a_default_batch_is_the_nearest_that_can_be_made(
    sizes: tuple[int, ...], gpus: int, micro_batches: int | None, make_chain: MakeChain
) -> None:
    """Of multiples of what all devices share, or of the micro-batches; the smaller of two as near."""
    chain, samples = make_chain(0, 2, sizes=sizes), 6 * gpus
    unit = micro_batches or (gpus * sizes[0] if len(sizes) == 1 else gpus)

    def can_be(batch: int) -> bool:
        if micro_batches is None:
            return bool(made_of(chain, batch, gpus))
        size = batch // micro_batches
        shares = {-(-size // count) for count in range(1, min(size, gpus) + 1)}
        return len(sizes) > 1 or bool(shares & set(sizes))

    every = [batch for batch in range(unit, 20 * samples + unit, unit) if can_be(batch)]
    tried = [batch for batch in every if batch <= 2 * samples + unit]
    nearest = min(tried, key=lambda batch: (abs(batch - samples), batch), default=samples)
    assert BatchSizes(chain, gpus, gpus, None, micro_batches, 6).global_batch == nearest


def test_of_two_as_near_the_smaller(make_chain: MakeChain) -> None:
    """64 and 128 are both 32 from 96."""
    chain = make_chain(0, 2)
    assert BatchSizes(chain, 3, 3, None, 64).global_batch == 64
    assert BatchSizes(chain, 3, 3, None, 60).global_batch == 120


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
        "mini_batch=7: no micro-batch size that the profile reaches makes it, in at most 16384 micro-batches "
        "(measured sizes: 4)"
    )
    assert none.value.hint == "Use a multiple of 4, or measure more sizes with pplan profile."
    with pytest.raises(UsageError) as uneven:
        BatchSizes(chain, 1, 1, 12, 5).micro_batch_sizes  # noqa: B018  raises
    assert uneven.value.what == "micro_batches=5: a global batch of 12 does not divide into so many"
    assert uneven.value.hint == "Use a divisor of 12: 1, 2, 3, 4, 6, 12."
