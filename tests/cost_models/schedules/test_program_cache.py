"""Programs that are kept."""

from __future__ import annotations

from pplan.cost_models.schedules import ProgramCache


def test_the_last_used_stay() -> None:
    """12 actions each, 30 in all."""
    kept = ProgramCache(30)
    first = kept.program("gpipe", 2, 3)
    kept.program("1f1b", 2, 3)
    assert kept.program("gpipe", 2, 3) is first
    kept.program("1f1b", 3, 2)
    assert list(kept.programs) == [("gpipe", 2, 3), ("1f1b", 3, 2)]
    assert kept.actions == 24


def test_the_last_stays_however_large() -> None:
    kept = ProgramCache(30)
    kept.program("gpipe", 2, 3)
    assert kept.program("1f1b", 4, 8) is kept.program("1f1b", 4, 8)
    assert list(kept.programs) == [("1f1b", 4, 8)]
    assert kept.actions == 64
