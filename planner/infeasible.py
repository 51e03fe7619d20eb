"""Why no plan fits: the plan that needs the least memory, its tightest stage, and what would make it fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cost_models.errors import InfeasibleError
from ..cost_models.quantities import format_bytes
from ..cost_models.schedules import schedule_named
from .balance import balance_table
from .search import Space
from .setting import Setting


@dataclass(frozen=True)
class Tightest:
    """The stage that needs most, of the plan that needs least: places `start` to `end`."""

    setting: Setting
    stages: int
    stage: int
    start: int
    end: int
    memory_bytes: int
    ledger: dict[str, int]


def least_memory(space: Space, settings: Sequence[Setting], stage_counts: Iterable[int]) -> Tightest:
    """The straight plan whose largest stage is smallest."""
    plans = [_tightest(space, setting, stages) for stages in stage_counts for setting in settings]
    return min(plans, key=lambda plan: plan.memory_bytes)


def no_plan_fits(
    space: Space, settings: Sequence[Setting], freer_settings: Sequence[Setting], stage_counts: Sequence[int]
) -> InfeasibleError:
    """The error for a space without a plan that fits; `freer_settings` are those the wishes left out."""
    tightest = least_memory(space, settings, stage_counts)
    limit = int(space.memory_limit or 0)
    names, places = space.chain.names, space.table(tightest.setting.micro_batch_size).places
    first, last = names[places[tightest.start]], names[places[tightest.end] - 1]
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(amount)}"
        for name, amount in tightest.ledger.items()
        if amount
    )
    what = (
        f"no plan fits into {format_bytes(limit)} a GPU: at the least, stage {tightest.stage} of "
        f"{tightest.stages} ({first} to {last}; {tightest.setting}) needs "
        f"{format_bytes(tightest.memory_bytes)} ({terms}); "
        f"{format_bytes(tightest.memory_bytes - limit)} are missing"
    )
    changes = list(_changes(space, settings, freer_settings, stage_counts, limit))
    changes.append(f"--memory {tightest.memory_bytes / 2**30 + 0.005:.2f}GiB a GPU")
    return InfeasibleError(what, "What would fit: " + "; or ".join(changes) + ".")


def _changes(
    space: Space,
    settings: Sequence[Setting],
    freer_settings: Sequence[Setting],
    stage_counts: Sequence[int],
    limit: int,
) -> Iterator[str]:
    """Single changes that make a plan fit, the cheapest for the user first."""
    freer = least_memory(space, freer_settings, stage_counts)
    if freer.memory_bytes <= limit:
        yield f"{freer.setting} (leave --micro-batches, --schedule and --recompute at auto)"
    if space.optimizer != "sgd":
        plain = least_memory(replace(space, optimizer="sgd"), settings, stage_counts)
        if plain.memory_bytes <= limit:
            yield "--optimizer sgd"
    for stages in range(max(stage_counts) + 1, min(space.chain.max_stages, 4 * max(stage_counts)) + 1):
        wider = replace(space, topology=replace(space.topology, gpus=stages))
        if least_memory(wider, settings, [stages]).memory_bytes <= limit:
            yield f"--gpus {stages}"
            return


def _tightest(space: Space, setting: Setting, stages: int) -> Tightest:
    table = space.table(setting.micro_batch_size)
    schedule = schedule_named(setting.schedule)
    held = [schedule.in_flight(stage, stages, setting.micro_batches) for stage in range(stages)]
    needs = {count: table.memory(count, setting.recompute, space.optimizer) for count in set(held)}
    ends = balance_table(lambda stage: needs[held[stage]], stages)
    starts = [0, *ends[:-1]]
    bytes_by_stage = [float(needs[held[s]][starts[s], ends[s]]) for s in range(stages)]
    stage = int(np.argmax(bytes_by_stage))
    ledger = table.stage_ledger(starts[stage], ends[stage], held[stage], setting.recompute, space.optimizer)
    return Tightest(setting, stages, stage, starts[stage], ends[stage], sum(ledger.values()), ledger)
