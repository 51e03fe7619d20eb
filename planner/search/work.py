"""What a search may spend: counted from the sizes of tables, never timed, so that answers do not vary."""

from __future__ import annotations


class Work:
    """What may still be spent, in nanoseconds or so."""

    def __init__(self, amount: float) -> None:
        self.left = amount

    def extend(self, entries: int) -> None:
        """Bounds were computed for so many unfinished plans and next stages."""
        self.left -= 200_000 + 1_000 * entries

    def simulate(self, plans: int, actions: int) -> None:
        """So many plans of so many actions were simulated side by side."""
        self.left -= 100_000 + actions * (1_500 if plans == 1 else 3_000 + 25 * plans)
