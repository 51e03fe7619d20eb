"""Which degrees are tried, against the rules written down once more: sizes are shared where they divide."""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random
from typing import NamedTuple

import pytest

from pplan.cost_models.errors import UsageError
from pplan.cost_models.transformer.transformer_shape import AttentionShape, ExpertShape, TransformerShape
from pplan.planner.degrees.degree_combinations import list_combinations
from pplan.planner.degrees.degree_options import DegreeOptions
from pplan.planner.degrees.degree_refusals import nothing_possible


class Choice(NamedTuple):
    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    zero: int
    exchange: str
    size: int
    virtual: int


def drawn(random: Random) -> tuple[TransformerShape, int, DegreeOptions]:
    """Sizes that often do not divide."""
    blocks, heads = random.randint(1, 9), random.choice((1, 2, 6, 8, 12, 40))
    shared = random.choice([one for one in range(1, heads + 1) if heads % one == 0])
    experts = (
        ExpertShape(random.choice((6, 8, 10)), 2, 24, random.choice((0, 36)))
        if random.random() < 0.6
        else None
    )
    often = random.choice((0.6, 1.0))
    routed = tuple(experts is not None and random.random() < often for _ in range(blocks))
    width = random.choice((30, 48, 128))
    shape = TransformerShape("drawn", 64, 100, width, AttentionShape(heads, shared, 8, 8), routed, experts)

    def some(*values: int) -> tuple[int, ...] | None:
        return random.choice((None, tuple(sorted(random.sample(values, 2)))))

    options = DegreeOptions(
        mini_batch=random.choice((4, 6, 12)),
        sequence=random.choice((24, 32, 36)),
        tp=some(1, 2, 3, 4),
        cp=some(1, 2, 3, 4) or (1, 2, 3),
        pp=some(1, 2, 3, 4),
        ep=some(1, 2, 3, 4, 5),
        zero=random.choice((None, (1,), (0, 3))),
        micro_batch_size=some(1, 2, 3),
        virtual_stages=(1, 2, 3),
        recompute="none",
        context_exchange=random.choice(("auto", "ring", "all-gather")),
    )
    return shape, random.choice((1, 4, 6, 8, 12)), options


def allowed(shape: TransformerShape, devices: int, options: DegreeOptions) -> set[Choice]:
    """Every combination of numbers that multiply to that of the devices, but those that a rule forbids."""
    numbers = [one for one in range(1, devices + 1) if devices % one == 0]
    attention, experts = shape.attention, shape.experts
    groups = [each for each in product(numbers, repeat=4) if prod(each) == devices]
    every = product(
        groups, range(1, max(devices, 10) + 1),
        options.zero or range(4), ("all-to-all", "ring", "all-gather"),
        range(1, options.mini_batch + 1), (1, 2, 3),
    )  # fmt: skip
    left = set()
    for group, *others in every:
        one = Choice._make((*group, *others))
        t, c, p, d, e, zero, exchange, size, virtual = one
        lists = (
            (t, options.tp),
            (c, options.cp),
            (p, options.pp),
            (e, options.ep),
            (size, options.micro_batch_size),
        )
        if any(values is not None and value not in values for value, values in lists):
            continue
        if options.micro_batch_size is None and size & (size - 1):
            continue  # powers of two alone are tried
        if exchange != ("all-to-all" if c == 1 else exchange) or (
            c > 1 and options.context_exchange not in ("auto", exchange)
        ):
            continue
        count, rest = divmod(options.mini_batch, d * size)
        spreads = c * d > 1 or (any(shape.routed) and t * c * d > e)
        shards = t * c if exchange == "all-to-all" else t
        widths = [shape.feed_forward] * (not all(shape.routed)) + ([experts.shared_width] if experts else [])
        fits = (
            not rest
            and attention.heads % shards == attention.key_value_heads % shards == 0
            and all(width % t == 0 for width in widths)
            and options.sequence % (t * c) == 0
            and (c == 1 or options.sequence % (2 * c) == 0)
            and (e == 1 or (any(shape.routed) and experts is not None and experts.number % e == 0))
            and t * c * d % e == 0
            and not (zero > 1 and p > 1)
            and (options.zero is not None or zero == 1 or (p == 1 and spreads))
            and (options.pp is not None or p <= len(shape.routed) + 2)
            and (virtual == 1 or (p > 1 and count % p == 0))
        )
        if fits:
            left.add(one)
    return left


@pytest.mark.parametrize("seed", range(60))
def test_all_that_divide_are_tried_and_no_others(seed: int) -> None:
    shape, devices, options = drawn(Random(seed))
    tried = [
        Choice(
            one.degrees.tensor,
            one.degrees.context,
            one.degrees.pipeline,
            one.degrees.data,
            one.degrees.expert,
            one.degrees.zero,
            one.degrees.exchange,
            one.setting.tokens.samples,
            one.virtual_stages,
        )
        for one in list_combinations(shape, devices, options)
    ]
    assert len(set(tried)) == len(tried)
    assert set(tried) == allowed(shape, devices, options)
    if not tried:
        error = nothing_possible(shape, devices, options)
        assert isinstance(error, UsageError)
        assert "\n" not in error.what + error.hint


def test_a_width_that_no_layer_has_need_not_divide() -> None:
    """Mixtral's like have the width of dense layers in their files, and no dense layer."""
    attention, experts = AttentionShape(8, 8, 8, 8), ExpertShape(8, 2, 24)
    shape = TransformerShape("all routed", 64, 100, 30, attention, (True, True), experts)
    options = DegreeOptions(mini_batch=4, sequence=32, tp=(4,), recompute="none", virtual_stages=(1,))
    assert list(list_combinations(shape, 4, options))
    some_dense = TransformerShape("dense", 64, 100, 30, attention, (True, False), experts)
    assert not list(list_combinations(some_dense, 4, options))
