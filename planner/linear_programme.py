"""HiGHS, a solver of linear programmes."""

from __future__ import annotations

from typing import Any


def new_solver() -> Any:
    """Return a HiGHS solver on one thread that prints nothing.

    It is imported here because most commands do not need it.
    """
    from highspy import Highs

    class QuietHighs(Highs):
        """HiGHS without the banner that its constructor prints when it enables callbacks."""

        def enableCallbacks(self) -> None:
            self.silent()
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    solver = QuietHighs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("threads", 1)
    return solver
