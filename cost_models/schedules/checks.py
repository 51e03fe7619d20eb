"""Which numbers a schedule can run: errors that name the argument, its value and what is allowed."""

from __future__ import annotations

from ..errors import UsageError


def exactly(name: str, virtual_stages: int, allowed: int) -> None:
    """Raises UsageError unless a device of schedule `name` holds `allowed` virtual stages."""
    if virtual_stages != allowed:
        raise UsageError(
            f"virtual stages {virtual_stages}: {name} runs {allowed} on a device",
            f"Leave virtual stages at {allowed}, or take a schedule of several: interleaved, looped-bfs.",
        )


def multiple(name: str, micro_batches: int, unit: int, of: str) -> None:
    """Raises UsageError unless the micro-batches of schedule `name` are a multiple of `unit`, named `of`."""
    if micro_batches % unit:
        below = micro_batches - micro_batches % unit
        nearest = f"{below} or {below + unit}" if below else f"{unit}"
        raise UsageError(
            f"micro-batches {micro_batches}: {name} needs a multiple of {of}, {unit}", f"Use {nearest}."
        )


def at_least(name: str, argument: str, value: int, least: int, why: str) -> None:
    """Raises UsageError where `value` of `argument` is below `least`."""
    if value < least:
        raise UsageError(f"{argument} {value}: {name} needs at least {least}, {why}", f"Use {least} or more.")
