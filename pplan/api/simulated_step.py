"""The timeline that `pplan.simulate` returns: also a drawing, a trace, and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cost_models.drawing import Drawing
from ..cost_models.errors import MachineError
from ..cost_models.timeline import Timeline
from .simulation import Simulation
from .timeline_svg import timeline_svg
from .trace import trace_json


@dataclass(frozen=True, eq=False, repr=False)
class SimulatedStep(Timeline):
    """The timeline of a plan's step, and what was simulated."""

    simulation: Simulation

    def to_svg(self) -> str:
        """The timeline as an SVG drawing."""
        return timeline_svg(self.simulation)

    def plot(self) -> Drawing:
        """The timeline as a drawing, which a notebook shows."""
        return Drawing(self.simulation.title, self.to_svg())

    def to_trace(self) -> str:
        """The step as a Chrome trace (JSON), which https://ui.perfetto.dev opens."""
        return trace_json(self.simulation)

    def to_records(self) -> list[dict[str, Any]]:
        """Every action: its stage, kind ("F", "B" or "W"), micro-batch, chunk, start and end in seconds."""
        return [
            {
                "stage": span.stage,
                "kind": span.action.kind,
                "micro_batch": span.action.micro_batch,
                "chunk": span.action.chunk,
                "start_seconds": span.start,
                "end_seconds": span.end,
            }
            for span in self.spans
        ]

    def to_dataframe(self) -> Any:
        """`to_records` as a DataFrame of pandas. Raises MachineError where pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            raise MachineError(
                "a DataFrame needs pandas, which is not installed",
                "Install it: pip install pandas; or take to_records().",
            ) from None
        return pandas.DataFrame.from_records(self.to_records())

    def _repr_html_(self) -> str:
        """Of a notebook."""
        return self.to_svg()


def as_step(simulation: Simulation) -> SimulatedStep:
    """The timeline of a simulation, with all that a caller may make of it."""
    timeline = simulation.timeline
    return SimulatedStep(
        order=timeline.order,
        costs=timeline.costs,
        run=timeline.run,
        reductions=timeline.reductions,
        stage_end=timeline.stage_end,
        simulation=simulation,
    )
