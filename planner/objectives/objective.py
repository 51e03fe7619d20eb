"""The objective that a user names, and the prices of devices."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ...cost_models import arguments
from ...cost_models.arguments import Converted, Options, option, options_class
from ...cost_models.errors import UsageError
from ...cost_models.quantities import LEAST_PRICE, MOST_PRICE, MOST_SHARE

if TYPE_CHECKING:
    from ...cost_models.topology import Topology

STEP_TIME, THROUGHPUT, MEMORY, COST = "step-time", "throughput", "memory", "cost"
OBJECTIVES = (STEP_TIME, THROUGHPUT, MEMORY, COST)
SLACK = 0.05
"""Share by which a step may be longer than the fastest, so that less memory is needed."""
ANY = ""
"""Instead of the name of a kind of device: whatever it is."""


@dataclass(frozen=True)
class Objective:
    """`slack`: of `memory`, the share by which the step may be longer than the fastest. `prices`: of `cost`,
    dollars per device hour by the name of the kind of device, or part of it; `ANY` for all others."""

    name: str = STEP_TIME
    slack: float = SLACK
    prices: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == COST and not self.prices:
            raise UsageError(
                "objective='cost': what a device costs is missing",
                "Give dollars per device hour: price=2.5, or by kind: price='A100=2.5,T4=0.35'.",
            )
        if self.name != COST and self.prices:
            raise UsageError(
                f"`price` with objective={self.name!r}: prices say nothing there",
                "Give objective='cost', or omit `price`.",
            )
        for kind, dollars in self.prices.items():
            if not LEAST_PRICE <= dollars <= MOST_PRICE:
                text = f"'{kind}={dollars:g}'" if kind else f"{dollars:g}"
                raise UsageError(
                    f"price={text}: must be above 0, from {LEAST_PRICE:g} to {MOST_PRICE:g}",
                    "Give dollars per device hour; of what costs nothing, objective='step-time'.",
                )


def parse_objective(text: str, prices: Mapping[str, float] | None = None) -> Objective:
    """`step-time`, `throughput`, `memory`, `memory:10%` or `cost`. Raises UsageError."""
    name, colon, share = text.partition(":")
    if name not in OBJECTIVES:
        near = difflib.get_close_matches(name, OBJECTIVES, n=1)
        guess = f"Did you mean {near[0]}? " if near else ""
        raise UsageError(
            f"objective={text!r}: not known", f"{guess}Use one of: {', '.join(OBJECTIVES)} (memory:10%)."
        )
    if colon and name != MEMORY:
        raise UsageError(f"objective={text!r}: {name} takes no share", f"Write objective={name!r}.")
    return Objective(name, _share(text, share) if colon else SLACK, prices or {})


def _share(text: str, share: str) -> float:
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*%?", share.strip())
    if not match:
        raise UsageError(
            f"objective={text!r}: is not how much longer than the fastest a step may be",
            "Give it in percent: objective='memory:10%'.",
        )
    if float(match[1]) > MOST_SHARE:
        raise UsageError(
            f"objective={text!r}: must be at most {MOST_SHARE:g} %",
            "Give it in percent: objective='memory:10%'.",
        )
    return float(match[1]) / 100


def parse_prices(text: str) -> dict[str, float]:
    """`2.5`, or `A100=2.5,T4=0.35`: dollars per device hour. Raises UsageError."""
    prices: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, amount = part.rpartition("=")
        name = kind.strip()
        if (equals and not name) or name in prices:
            what = (
                f"{name or 'the price of any device'} stands twice" if name in prices else "a kind is missing"
            )
            raise UsageError(f"price={text!r}: {what}", "Write price='A100=2.5,T4=0.35'.")
        try:
            prices[name] = float(amount.strip().removeprefix("$"))
        except ValueError:
            raise UsageError(
                f"price={text!r}: {amount.strip()!r} is not a price",
                "Give dollars per device hour: price=2.5, or by kind: price='A100=2.5,T4=0.35'.",
            ) from None
    return prices


def price_by_kind(prices: Mapping[str, float], topology: Topology) -> dict[str, float]:
    """Dollars per hour of every kind of device of a topology: of the price with its name, else with the
    longest part of its name. Raises UsageError for a kind without a price, and a price of no kind."""
    by_kind, used = dict[str, float](), set[str]()
    names = [kind.name for kind in topology.kinds]
    for name in names:
        own = [key for key in prices if key.lower() in name.lower()]
        key = max(own, key=len, default=None)
        if key is None:
            raise UsageError(
                f"`price`: no price of {name}",
                f"Give every kind one: price='{','.join(f'{n}=2.5' for n in names)}'.",
            )
        by_kind[name] = prices[key]
        used.add(key)
    idle = [key for key in prices if key not in used]
    if idle:
        what = f"'{idle[0]}={prices[idle[0]]:g}'" if idle[0] else f"{prices[idle[0]]:g}"
        raise UsageError(
            f"price={what}: is of no device here", f"The topology has {', '.join(names)}: name these."
        )
    return by_kind


def _prices(name: str, value: Any) -> dict[str, float] | None:
    """Dollars per device hour by kind: of a number, a text such as "A100=2.5,T4=0.35", or a mapping."""
    if value is None:
        return None
    if isinstance(value, str):
        return parse_prices(value)
    if isinstance(value, Mapping):
        return {
            arguments.word(name, kind): arguments.number(f"{name}[{kind!r}]", own)
            for kind, own in value.items()
        }
    return {ANY: arguments.number(name, value)}


def _objective(default: Any, check: Any, form: str, help: str) -> Any:
    return option(default, check, help, form, panel="The objective")


@options_class
class ObjectiveOptions(Options):
    """What the plan is to be the best of: "step-time"; "throughput", for which the weights may be an update
    or more late; "memory", the least that the fullest device holds with a step at most 5 % longer than the
    fastest ("memory:10%"); or "cost", dollars per sample. `price`: dollars per device hour, one for all or by
    the kind of device."""

    objective: Literal["step-time", "throughput", "memory", "cost"] | str = _objective(
        STEP_TIME,
        arguments.word,
        "step-time|throughput|memory[:5%]|cost",
        "The shortest step; the most samples a second, with late gradients; the least memory with a step at "
        "most 5 % longer than the fastest; the fewest dollars a sample.",
    )
    price: Converted[float | str | Mapping[str, float] | None, Mapping[str, float] | None] = _objective(
        None,
        _prices,
        "2.5|A100=2.5,T4=0.35",
        "Of `objective` cost: dollars per device hour, or by the kind.",
    )

    @property
    def aim(self) -> Objective:
        """Raises UsageError."""
        return parse_objective(self.objective, self.price)
