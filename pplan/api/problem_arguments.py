"""What `solve`, `frontier` and `sweep` of the Python API are given, and the problem that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cost_models import arguments
from ..cost_models.errors import UsageError
from ..cost_models.machines.measured_on import check_processor_seconds
from ..cost_models.machines.topology_options import make_topology
from ..planner.joint_search import BEST
from ..planner.objectives.objective import ANY, Objective, parse_objective, parse_prices
from ..planner.planners import planner_named
from ..planner.problem import Problem
from ..planner.solve import build_problem
from ..planner.wishes import Wishes
from ..profiler.profile_warnings import profiled_device
from .machine import own_profiles

if TYPE_CHECKING:
    from ..planner.plan_file import ProfileReference
    from ..profiler.profile_file import Profile


@dataclass(frozen=True)
class ProblemArguments:
    """The arguments of `pplan.solve` but for the profile, of any type until `problem` has looked at them."""

    gpus: int
    gpus_per_node: int | None = None
    gpu: str | None = None
    memory_bytes: int | None = None
    bandwidth: float | Sequence[float] | None = None
    latency: float | Sequence[float] | None = None
    topology: str | Path | None = None
    runtime: str | None = None
    mini_batch: int | None = None
    micro_batches: int | str | None = None
    schedule: str = "auto"
    recompute: str = "auto"
    optimizer: str = "sgd"
    precision: str = "auto"
    gradient_dtype: str = "auto"
    zero: int = 0
    planner: str = "best"
    time_limit: float = 30.0
    use_all: bool = False
    max_stages: int | None = None
    cut_after: Sequence[str] = ()
    keep_together: Sequence[str] = ()
    pins: Sequence[tuple[str, int]] = ()
    memory_limit: float | None = None
    robust: bool = False
    objective: str = "step-time"
    price: float | str | Mapping[str, float] | None = None
    seconds_of: str | None = None

    def problem(self, measured: Profile, reference: ProfileReference) -> Problem:
        """Raises UsageError, FileError."""
        machine = make_topology(
            gpus=arguments.whole("gpus", self.gpus),
            gpu=arguments.optional_word("gpu", self.gpu),
            memory_bytes=arguments.optional_whole("memory_bytes", self.memory_bytes, example="16 * 2**30"),
            bandwidth=arguments.by_level("bandwidth", self.bandwidth, "(300e9, 25e9)"),
            latency=arguments.by_level("latency", self.latency, "(5e-6, 20e-6)"),
            gpus_per_node=arguments.optional_whole("gpus_per_node", self.gpus_per_node),
            file=None if self.topology is None else arguments.path("topology", self.topology),
            profiled=profiled_device(measured),
        )
        wishes = self._wishes()
        check_processor_seconds(profiled_device(measured), machine, wishes.seconds_of)
        folder = Path() if self.topology is None else Path(self.topology).parent
        own = own_profiles(machine, folder, wishes.seconds_of)
        return build_problem(measured.chain(), machine, wishes, reference, own)

    def _wishes(self) -> Wishes:
        return Wishes(
            mini_batch=arguments.optional_whole("mini_batch", self.mini_batch),
            micro_batches=arguments.whole_or_auto("micro_batches", self.micro_batches),
            schedule=arguments.word("schedule", self.schedule),
            recompute=arguments.word("recompute", self.recompute).replace("-", "_"),
            optimizer=arguments.word("optimizer", self.optimizer),
            precision=arguments.word("precision", self.precision),
            gradient_dtype=arguments.word("gradient_dtype", self.gradient_dtype),
            zero=arguments.whole("zero", self.zero, at_least=0),
            runtime=arguments.optional_word("runtime", self.runtime),
            planner=arguments.word("planner", self.planner),
            time_limit=arguments.number("time_limit", self.time_limit),
            use_all=arguments.flag("use_all", self.use_all),
            max_stages=arguments.optional_whole("max_stages", self.max_stages),
            cut_after=arguments.words("cut_after", self.cut_after),
            keep_together=arguments.words("keep_together", self.keep_together),
            pins=arguments.pins("pins", self.pins),
            memory_limit=arguments.optional_number("memory_limit", self.memory_limit),
            robust=arguments.flag("robust", self.robust),
            seconds_of=arguments.optional_word("seconds_of", self.seconds_of),
        )

    @property
    def aim(self) -> Objective:
        """Raises UsageError."""
        return parse_objective(arguments.word("objective", self.objective), _prices(self.price))


def _prices(price: Any) -> dict[str, float]:
    """Dollars per device hour by kind: of a number, a text as of `--price`, or a mapping."""
    if price is None:
        return {}
    if isinstance(price, str):
        return parse_prices(price)
    if isinstance(price, Mapping):
        return {
            arguments.word("price", kind): arguments.number(f"price[{kind!r}]", own)
            for kind, own in price.items()
        }
    return {ANY: arguments.number("price", price)}


def check_grid(grid: Any, options: Mapping[str, Any]) -> None:
    """Raises UsageError for keys that are no arguments, or stand in both, and for values that are no list."""
    arguments.instance("grid", grid, Mapping, 'For example: grid={"gpus": [2, 4]}.')
    known = [field.name for field in fields(ProblemArguments)]
    for key in (*grid, *options):
        if key not in known:
            near = get_close_matches(str(key), known, n=1)
            guess = f"Did you mean {near[0]}? " if near else ""
            raise UsageError(f"{key}: is no option of solve", f"{guess}There are: {', '.join(known)}.")
    twice = next((key for key in grid if key in options), None)
    if twice is not None:
        raise UsageError(f"{twice}: is in the grid and an option besides", "Omit one of the two.")
    for key, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise UsageError(
                f"grid[{key!r}]={values!r}: is not a list", f'For example: grid={{"{key}": [...]}}.'
            )
    for key in WORDS:
        for value in grid.get(key, ()):
            _check_word(key, value)


WORDS = ("runtime", "schedule", "planner", "recompute", "optimizer", "precision", "gradient_dtype")
"""Arguments of which a value that no problem knows is refused at once: it would be a row without a plan."""


def _check_word(key: str, value: Any) -> None:
    """Raises UsageError for a word that is not known."""
    text = arguments.optional_word(key, value)
    if text is None:
        return
    if key == "planner" and text != BEST:
        planner_named(text)
    wished: dict[str, Any] = {key: text.replace("-", "_") if key == "recompute" else text}
    Wishes(**wished)
