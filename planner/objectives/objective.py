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
"""Default share by which a step may be longer than the fastest to need less memory."""
ANY = ""
"""Key of a price for every kind of device."""


@dataclass(frozen=True)
class Objective:
    """Objective of a plan.

    Attributes:
        name: Name of the objective.
        slack: For `memory`, the share by which the step may be longer than the fastest.
        prices: For `cost`, dollars per device hour by the name of a kind of device or a part of it; `ANY` for
            all others.
    """

    name: str = STEP_TIME
    slack: float = SLACK
    prices: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name == COST and not self.prices:
            raise UsageError(
                "objective='cost': needs the price of a device",
                "Give dollars per device hour: price=2.5, or by kind: price='A100=2.5,T4=0.35'.",
            )
        if self.name != COST and self.prices:
            raise UsageError(
                f"`price` with objective={self.name!r} has no effect",
                "Give objective='cost', or omit `price`.",
            )
        for kind, dollars in self.prices.items():
            if not LEAST_PRICE <= dollars <= MOST_PRICE:
                text = f"'{kind}={dollars:g}'" if kind else f"{dollars:g}"
                raise UsageError(
                    f"price={text}: must be above 0, from {LEAST_PRICE:g} to {MOST_PRICE:g}",
                    "Give dollars per device hour. If devices are free, use objective='step-time'.",
                )


def parse_objective(text: str, prices: Mapping[str, float] | None = None) -> Objective:
    """Read `step-time`, `throughput`, `memory`, `memory:10%` or `cost`.

    Args:
        text: The text.
        prices: Dollars per device hour.

    Raises:
        UsageError: The text is none of these.
    """
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
            f"objective={text!r}: {share!r} is not a percentage",
            "Give it in percent: objective='memory:10%'.",
        )
    if float(match[1]) > MOST_SHARE:
        raise UsageError(
            f"objective={text!r}: must be at most {MOST_SHARE:g} %",
            "Give it in percent: objective='memory:10%'.",
        )
    return float(match[1]) / 100


def parse_prices(text: str) -> dict[str, float]:
    """Read `2.5`, or `A100=2.5,T4=0.35`: dollars per device hour.

    Raises:
        UsageError: The text has another form.
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        kind, equals, amount = part.rpartition("=")
        name = kind.strip()
        if (equals and not name) or name in prices:
            what = (
                f"{name or 'the price of any device'} is given twice"
                if name in prices
                else "a kind is missing"
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
    """Return the dollars per hour of every kind of device of a topology.

    A kind takes the price whose key is the longest part of its name.

    Args:
        prices: Dollars per device hour.
        topology: The devices.

    Raises:
        UsageError: A kind has no price, or a price has no kind.
    """
    by_kind, used = dict[str, float](), set[str]()
    names = [kind.name for kind in topology.kinds]
    for name in names:
        matching = [key for key in prices if key.lower() in name.lower()]
        key = max(matching, key=len, default=None)
        if key is None:
            raise UsageError(
                f"`price`: no price of {name}",
                f"Price every kind: price='{','.join(f'{n}=2.5' for n in names)}'.",
            )
        by_kind[name] = prices[key]
        used.add(key)
    idle = [key for key in prices if key not in used]
    if idle:
        what = f"'{idle[0]}={prices[idle[0]]:g}'" if idle[0] else f"{prices[idle[0]]:g}"
        raise UsageError(
            f"price={what}: matches no device", f"The topology has {', '.join(names)}: price these."
        )
    return by_kind


def _prices(name: str, value: Any) -> dict[str, float] | None:
    """Return dollars per device hour by kind, from a number, a text ("A100=2.5,T4=0.35") or a mapping."""
    if value is None:
        return None
    if isinstance(value, str):
        return parse_prices(value)
    if isinstance(value, Mapping):
        return {
            arguments.word(name, kind): arguments.number(f"{name}[{kind!r}]", dollars)
            for kind, dollars in value.items()
        }
    return {ANY: arguments.number(name, value)}


def _objective(default: Any, check: Any, form: str, help: str) -> Any:
    return option(default, check, help, form, panel="The objective")


@options_class
class ObjectiveOptions(Options):
    """Objective for which the plan is optimized.

    Attributes:
        objective: "step-time"; "throughput", with gradients that may be an update or more late; "memory", the
            least that the fullest device holds with a step at most 5 % longer than the fastest ("memory:10%"
            for 10 %); or "cost", dollars per sample.
        price: Dollars per device hour, for all or by kind of device.
    """

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
        """The objective. Raises UsageError if it is invalid."""
        return parse_objective(self.objective, self.price)
