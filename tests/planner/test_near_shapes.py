"""The neighbours of a plan's shape, by hand."""

from __future__ import annotations

from pplan.planner.candidate import near_shapes


def test_neighbours_of_a_plan() -> None:
    """By hand: a cut moved, stages joined; a device more, less or from stage to stage; a stage parted."""
    points = (0, 2, 4, 6, 8)
    assert list(near_shapes(points, (4, 8), (1, 2), 4)) == [
        ((2, 8), (1, 2)),
        ((6, 8), (1, 2)),
        ((8,), (3,)),
        ((4, 8), (2, 2)),
        ((4, 8), (1, 3)),
        ((4, 8), (1, 1)),
        ((4, 8), (2, 1)),
        ((4, 6, 8), (1, 1, 1)),
    ]
    assert list(near_shapes(points, (4, 8), (1, 2), 3))[3:] == [
        ((4, 8), (1, 1)),
        ((4, 8), (2, 1)),
        ((4, 6, 8), (1, 1, 1)),
    ]
    assert list(near_shapes(points, (2, 4, 6, 8), (3, 1, 1, 1), 6))[:5] == [
        ((4, 6, 8), (4, 1, 1)),
        ((2, 6, 8), (3, 2, 1)),
        ((2, 4, 8), (3, 1, 2)),
        ((2, 4, 6, 8), (2, 1, 1, 1)),
        ((2, 4, 6, 8), (2, 2, 1, 1)),
    ]
    assert list(near_shapes(points, (8,), (5,), 5)) == [((8,), (4,)), ((4, 8), (2, 3))]
    assert list(near_shapes((0, 8), (8,), (2,), 2)) == [((8,), (1,))]
