"""Why none of some proposals is a plan: the check that fails, with its values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

import numpy as np

from ..cost_models.errors import UsageError
from ..cost_models.quantities import format_bytes
from .assembly import Assembly
from .candidate import Proposal, abbreviate
from .scoring import assemble
from .search.space import Space, divide_batch
from .search.stage_recompute import stage_modes

UNFIT = "does not fit"
MOST_ASSEMBLED = 16
"""Proposals with the most stages whose memory is counted."""


def unfit_reason(space: Space, proposals: Sequence[Proposal]) -> str:
    """Describe why none of a planner's proposals is a plan.

    Args:
        space: The plans under the problem's limits.
        proposals: Proposals that the options allow, none of which is a plan.

    Returns:
        The memory of the proposal that lacks least. If none can be costed, the first failed check.
    """
    reasons, lacking = list[str](), list[tuple[float, str]]()
    deepest = sorted(dict.fromkeys(proposals), key=lambda own: -len(own.ends))
    for proposal in deepest[:MOST_ASSEMBLED]:
        if lacking and space.budget.over:
            break
        if (reason := next(list_failures(space, proposal), None)) is not None:
            reasons.append(reason)
            continue
        modes = (stage_modes(proposal.config)[-1],) * len(proposal.ends)
        try:
            assembly = assemble(space, proposal, modes)
        except UsageError as error:
            reasons.append(error.what)
            continue
        bytes_short, device, needed = most_lacking(space, assembly)
        if 0 < bytes_short < inf:
            lacking.append((bytes_short, f"{UNFIT}: {memory_text(assembly, device, needed, bytes_short)}"))
    return min(lacking)[1] if lacking else reasons[0] if reasons else UNFIT


def list_failures(space: Space, proposal: Proposal) -> Iterator[str]:
    """Describe what keeps a proposal from being costed: sizes, cuts or weights to train."""
    size, chain, runtime = proposal.config.micro_batch_size, space.chain, space.runtime
    for count in sorted(set(proposal.replicas)):
        if count > size:
            yield f"{count} replicas share micro-batches of {size}, and one has no sample"
        elif not space.fits_someone(size, count):
            share = divide_batch(size, count)
            yield f"a replica needs size {share:g}, and the profile measured {abbreviate(chain.sizes)}"
    allowed = {0, *(np.flatnonzero(chain.cut_after) + 1).tolist(), len(chain)}
    for stage, (first, end) in enumerate(proposal.bounds):
        if end not in allowed:
            yield f"stage {stage} ends after {chain.names[end - 1]}, where no cut is allowed"
        crossed = [layer for layer in space.limits.must_cut if first <= layer < end - 1]
        if crossed:
            yield f"stage {stage} goes on after {chain.names[crossed[0]]}, which `cut_after` names"
        is_trained = chain.trainable_bytes[first:end].any()
        if runtime is not None and runtime.trains_every_stage and not is_trained:
            layers = chain.name_range(first, end)
            yield f"{runtime.name} trains every stage, and stage {stage} ({layers}) has 0 trainable bytes"


def most_lacking(space: Space, assembly: Assembly) -> tuple[float, int, float]:
    """Bytes that the device which lacks most is short of, which device of the pipeline, and what it needs."""
    needs = [sum(assembly.ledger(device).values()) for device in range(assembly.program.devices)]
    return max(
        (need - space.limit(assembly.ranks[device]), device, need) for device, need in enumerate(needs)
    )


def memory_text(assembly: Assembly, device: int, needed: float, bytes_short: float) -> str:
    """Describe the memory that a device needs, and its limit."""
    return (
        f"device {assembly.ranks[device][0]} needs {format_bytes(round(needed))} of "
        f"{format_bytes(round(needed - bytes_short))}"
    )
