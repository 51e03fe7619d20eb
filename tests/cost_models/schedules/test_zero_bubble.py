"""zb-h1, zb-h2 and zb-v: the gradient of the weights is an action of its own."""

from __future__ import annotations

from typing import Any

import pytest

from pplan.cost_models.schedules import one_f_one_b, zb_h1, zb_h2, zb_v

GRID = [(stages, extra) for stages in (1, 2, 3, 6) for extra in (0, 1, 7)]
COSTS = [(1, 1, 1), (2, 2, 1), (3, 2, 2), (2, 5, 1), (4, 3, 3), (7, 5, 2), (3, 4, 3)]
"""F, B and W with W <= F and W <= B."""

# The figure has four stages and eight micro-batches; here three and four, drawn by its rule.
ZB_H1 = """
F0 F1 F2 .  .  B0 W0 F3 B1 W1 B2 W2 B3 W3
.  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3
.  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3
"""

# Three stages end one tick after another: a parallelogram, without a hole.
ZB_H2 = """
F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 B2 W2 B3 W3 B4 W4 B5 W5 .  .
.  F0 F1 F2 B0 F3 B1 F4 B2 W0 F5 B3 W1 B4 W2 B5 W3 W4 W5 .
.  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 F5 B5 W1 W2 W3 W4 W5
"""

ZB_V = """
F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 .
.  F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2
"""


def test_drawings(picture: Any, drawn: Any) -> None:
    assert picture(zb_h1(3, 4)) == drawn(ZB_H1)
    assert picture(zb_h2(3, 6)) == drawn(ZB_H2)
    assert picture(zb_v(2, 3)) == drawn(ZB_V)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "seconds", "transfer", "rates"),
    [
        (8, 24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1585, 0.1083)),
        (8, 32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.1045, 0.0559)),
    ],
    ids=["1.5B", "6.2B"],
)
def test_published_bubble_rates(
    stages: int,
    micro_batches: int,
    seconds: tuple[float, float, float],
    transfer: float,
    rates: tuple[float, float, float],
    play: Any,
) -> None:
    """ICLR 2024, times of table 9 and rates of table 5: 1F1B, ZB-H1, ZB-H2."""
    forward, backward, weight = seconds
    plain = play(one_f_one_b(stages, micro_batches), forward, backward + weight, 0, transfer)
    first = play(zb_h1(stages, micro_batches), *seconds, transfer)
    second = play(zb_h2(stages, micro_batches), *seconds, transfer)
    assert (round(plain.rate, 4), round(first.rate, 4), round(second.rate, 4)) == rates


@pytest.mark.parametrize(("stages", "extra"), GRID)
@pytest.mark.parametrize(("f", "b", "w"), COSTS)
def test_bubble(stages: int, extra: int, f: int, b: int, w: int, play: Any) -> None:
    """H1 where m >= p, W <= F, W <= B; H2 where m >= 2p - 1, W <= F, 2W <= F + B."""
    for program, micro_batches, idle in (
        (zb_h1, stages + extra, (stages - 1) * (f + b - w)),
        (zb_h2, 2 * stages - 1 + extra, (stages - 1) * (f + b - 2 * w)),
    ):
        played = play(program(stages, micro_batches), f, b, w)
        assert played.rate == pytest.approx(idle / (idle + micro_batches * (f + b + w)), abs=1e-12)


def test_zb_h2_where_the_weights_take_longer_than_the_forward(play: Any) -> None:
    """No order of at most 2p - 1 micro-batches meets the formula then: before its first backward stage 0
    waits (p-1)(F+B) - 2(p-1)F, and has no W yet to fill that with."""
    f, b, w = 1, 3, 2
    played = play(zb_h2(2, 6), f, b, w)
    assert played.rate == pytest.approx((b - f) / ((b - f) + 6 * (f + b + w)))


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("extra", [0, 1, 7])
def test_zb_v_has_no_bubble_where_all_take_the_same(stages: int, extra: int, play: Any) -> None:
    micro_batches = 2 * stages - 1 + extra
    played = play(zb_v(stages, micro_batches))
    for own in played.spans:
        assert own[-1][2] - own[0][1] == 6 * micro_batches
    if stages > 1:
        assert play(zb_v(stages, micro_batches), 1, 2, 1).rate > 0


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 5, 8, 16])
def test_in_flight(stages: int, micro_batches: int) -> None:
    def most(program: Any) -> list[float]:
        return [max(program.in_flight(device)) for device in range(stages)]

    assert most(zb_h1(stages, micro_batches)) == [min(micro_batches, stages)] * stages
    assert most(zb_h2(stages, micro_batches)) == [min(micro_batches, 2 * stages - 1)] * stages
    held = most(zb_v(stages, micro_batches))
    assert max(held) == held[-1] == min(micro_batches, stages)
    if micro_batches >= 2 * stages - 1:
        assert held == [stages] * stages
