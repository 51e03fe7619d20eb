"""Proven lower bounds on the step seconds of complete and unfinished GPipe pipelines.

Letters as in `bounds_1f1b`. GPipe's forwards and backwards are two flow shops of identical jobs (links are
machines, latencies are lags). Their spans are known exactly:

    forwards     sum of (f + c) + (M - 1) max(f, o)
    backwards    sum of (b + c) + (M - 1) max(b, o)

The first backward job is shorter (b'): it adds to no gradients, and under `except_last` it recomputes
nothing. Two paths through the backwards are bounds:

    the first job on the last stage p, then the second job through all stages
                 b'_p + sum of (b + c) + (M - 2) max(b, o)
    the first job as far as the longest stage, where all other jobs pass
                 sum of (b' + c) + (M - 1) max(b, o)

The gradients of stage s are complete after the backwards of the stages from s on, another span of this form,
and reduced e seconds later.

If f, b and o of one stage are the largest, they count together: max(f + b, 2 o) replaces the two maxima.
The last F of a stage ends no earlier than the launches of all its forwards, and the backwards begin after it.
For an unfinished plan, each of these sums and maxima is minimised separately over the missing stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..candidate import PipelineConfig
from ..stage_table import Floats
from .bounds_1f1b import RoundTripBound, multiply_finite
from .partial import BoundState, Expansion
from .pipelines import Pipelines
from .stage_choices import GroupChoices, StageChoices

NAMES = (
    *("forward", "usual", "plain", "cuts"),
    *("most_forward", "most_backward", "most_both", "most_launch"),
    "tail",
)
"""Fields of `_Sums`, sums first."""


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums and maxima over the stages of a plan, in seconds.

    Attributes:
        forward: Sum of f.
        usual: Sum of b.
        plain: Sum of b'.
        cuts: Sum of c.
        most_forward: Largest f or o.
        most_backward: Largest b or o.
        most_both: Largest f + b or 2 o.
        most_launch: Largest host seconds of a forward.
        tail: Seconds from the start of the backwards to the latest end of a stage's all-reduce.
    """

    forward: Floats
    usual: Floats
    plain: Floats
    cuts: Floats
    most_forward: Floats
    most_backward: Floats
    most_both: Floats
    most_launch: Floats
    tail: Floats


class GPipeBound:
    """Bounds of the module's docstring for plans below `limit` seconds.

    Args:
        choices: Allowed stages.
        limit: Seconds of the best known step.
    """

    def __init__(self, choices: StageChoices, limit: float = np.inf) -> None:
        self.choices, self._limit = choices, limit
        self._round_trips = RoundTripBound(choices, limit)
        self._setting = choices.config
        self._count = choices.config.micro_batches
        firsts = (group.costs.backward - group.costs.accumulation for group in choices.groups)
        backwards = [first[-2, -1] for first in firsts]
        self._last = float(min(backwards, default=0.0))
        """b' of the last stage, at the least."""
        self._rows = [self._after_last()]

    def root(self, stages: int) -> float:
        """Return a bound in seconds on every plan of `stages` stages; inf if no plan exists."""
        simple = self._round_trips.root(stages)
        if simple >= self._limit:
            return simple
        row = _Sums(*(values[0, 0] for values in vars(self.rows(stages)).values()))
        return float(max(simple, self._total(row).max()))

    def rows(self, stages: int) -> _Sums:
        """Return the least sums of the last `stages` stages, by the end of the stage before them.

        The bound of an unfinished plan adds them for its missing stages.

        Returns:
            Sums of shape (positions + 1, cut points).
        """
        while len(self._rows) <= stages:
            self._rows.append(self._before(len(self._rows)))
        return self._rows[stages]

    def start(self) -> BoundState:
        """Return the state of the plan without stages."""
        return dict.fromkeys(("back", *NAMES[:-1]), np.zeros(1))

    def extend(self, state: BoundState, stage: Expansion) -> tuple[Floats, BoundState]:
        """Return the bound of plans with one further stage, and their states.

        Args:
            state: State of the plans, by entry of `stage`.
            stage: The further stages.

        Returns:
            (expansions,) bounds in seconds, and the new states.
        """
        follows = self.rows(stage.remaining - 1)
        at = (stage.end_position, stage.end)
        stage_sums = _Sums(
            forward=stage.forward,
            usual=stage.backward,
            plain=self._first(stage.plain, stage.backward) - stage.accumulation,
            cuts=stage.cut,
            most_forward=np.maximum(stage.forward, stage.occupancy),
            most_backward=np.maximum(stage.backward, stage.occupancy),
            most_both=np.maximum(stage.forward + stage.backward, 2 * stage.occupancy),
            most_launch=stage.forward_launch,
            tail=stage.least_after,
        )
        now = {name: state[name] + getattr(stage_sums, name) for name in NAMES[:4]}
        now |= {name: np.maximum(state[name], getattr(stage_sums, name)) for name in NAMES[4:8]}
        back = state["back"] + stage.cut
        ahead = _Sums(*(getattr(follows, name)[at] for name in NAMES))
        suffix = stage_sums.plain + stage.least_cut + ahead.plain + ahead.cuts
        most = np.maximum(stage.backward, ahead.most_backward)
        # Only gradients that go on to the previous stage take the link to it.
        passing = np.maximum(most, stage.occupancy)
        followers = self._count - 1
        reduced = suffix + multiply_finite(followers, most) + stage.least_after
        tail = np.maximum(
            np.maximum(suffix + multiply_finite(followers, passing) + back, reduced), ahead.tail
        )
        whole = _Sums(
            forward=now["forward"] + ahead.forward,
            usual=now["usual"] + ahead.usual,
            plain=now["plain"] + ahead.plain,
            cuts=now["cuts"] + stage.least_cut + ahead.cuts,
            most_forward=np.maximum(now["most_forward"], ahead.most_forward),
            most_backward=np.maximum(now["most_backward"], ahead.most_backward),
            most_both=np.maximum(now["most_both"], ahead.most_both),
            most_launch=np.maximum(now["most_launch"], ahead.most_launch),
            tail=tail,
        )
        # The last of several backwards is not the first, so it takes b instead of b'.
        final = stage.backward if self._count > 1 else stage_sums.plain
        back = final + np.maximum(back, stage.least_after)
        return self._total(whole), now | {"back": back}

    def _first(self, plain: Floats, usual: Floats) -> Floats:
        """Return the seconds of the backward that runs first, accumulation into gradients included."""
        return plain if self._setting.recompute == "except_last" else usual

    def _total(self, sums: _Sums) -> Floats:
        return _total(self._setting, sums, self._last, self.choices.forward_launches)

    def _after_last(self) -> _Sums:
        nothing = self.choices.after_last
        return _Sums(*(nothing for _ in NAMES))

    def _before(self, remaining: int) -> _Sums:
        rows = {name: np.full(self.choices.shape, np.inf) for name in NAMES}
        # If the round-trip bound excludes all plans below the limit, none is reachable.
        reachable = np.isfinite(self._round_trips.rows(remaining - 1)[0])
        for group in self.choices.groups:
            self.choices.space.budget.check()
            self._fill(rows, group, reachable, remaining)
        return _Sums(*(self.choices.ranges.least_reachable(values) for values in rows.values()))

    def _fill(
        self, rows: dict[str, Floats], group: GroupChoices, reachable: npt.NDArray[np.bool_], remaining: int
    ) -> None:
        stages = group.before(reachable)
        if stages is None:
            return
        follows, pairs = self.rows(remaining - 1), stages.pair
        f, b = group.forward[pairs], group.backward(self.choices.in_flight(remaining))[0][pairs]
        first = self._first(group.plain[pairs], b) - group.accumulation[pairs]
        plain = np.where(np.isinf(b), np.inf, first)
        latency, slowness = self.choices.ranges.least_pace(group.replicas, stages.key, stages.after)
        o = slowness * group.sent[pairs]
        c = o + latency * group.inner[pairs]
        ahead = _Sums(*(getattr(follows, name)[stages.after, stages.end] for name in NAMES))
        most_backward = np.maximum(np.maximum(b, o), ahead.most_backward)
        suffix = plain + c + ahead.plain + ahead.cuts
        stage_sums = {
            "forward": np.where(np.isinf(b), np.inf, f) + ahead.forward,
            "usual": b + ahead.usual,
            "plain": plain + ahead.plain,
            "cuts": np.where(np.isinf(b), np.inf, c) + ahead.cuts,
            "most_forward": np.maximum(np.maximum(f, o), ahead.most_forward),
            "most_backward": most_backward,
            "most_both": np.maximum(np.maximum(f + b, 2 * o), ahead.most_both),
            "most_launch": np.maximum(group.forward_launch[pairs], ahead.most_launch),
            "tail": np.maximum(
                suffix + multiply_finite(self._count - 1, most_backward) + group.least_after[pairs],
                ahead.tail,
            ),
        }
        for name, values in stage_sums.items():
            stages.least_into(rows[name], values)


def whole_bound_gpipe(plans: Pipelines) -> Floats:
    """Return (plans,) bounds in seconds of complete plans."""
    config, after_last = plans.config, np.zeros((len(plans), 1))
    f, b = plans.forward, plans.backward
    plain = (plans.plain if config.recompute == "except_last" else b) - plans.accumulation
    o = np.hstack([plans.occupancy, after_last])
    c = np.hstack([plans.occupancy + plans.latency, after_last])
    backward = np.maximum(b, o)
    suffix, most = np.zeros(len(plans)), np.zeros(len(plans))
    ends = np.zeros((plans.stages, len(plans)))
    for stage in reversed(range(plans.stages)):
        suffix = suffix + plain[:, stage] + c[:, stage]
        most = np.maximum(most, backward[:, stage])
        ends[stage] = suffix + (config.micro_batches - 1) * most + plans.exposed_allreduce[:, stage]
    tail = plans.after_tied_sums(ends).max(axis=0)
    sums = _Sums(
        f.sum(axis=1),
        b.sum(axis=1),
        plain.sum(axis=1),
        c.sum(axis=1),
        np.maximum(f, o).max(axis=1),
        backward.max(axis=1),
        np.maximum(f + b, 2 * o).max(axis=1),
        plans.forward_launch.sum(axis=1) if plans.hosts == "one" else plans.forward_launch.max(axis=1),
        tail,
    )
    return _total(config, sums, plain[:, -1])


def _total(
    config: PipelineConfig, sums: _Sums, last: Floats | float, forward_launches: float = 0.0
) -> Floats:
    """Return the bound in seconds from the sums and maxima over all stages.

    `last` is the least b' of the last stage. `forward_launches` are the host seconds of all forwards if one
    process launches them, else 0.
    """
    followers = config.micro_batches - 1
    forwards = sums.forward + sums.cuts + multiply_finite(followers, sums.most_forward)
    launch_end = np.maximum(config.micro_batches * sums.most_launch, forward_launches)
    forwards = np.maximum(forwards, launch_end)
    paths = [(sums.plain, followers)]
    if followers:
        paths.append((sums.usual + last, followers - 1))
    bounds = [forwards + sums.tail]
    for seconds, count in paths:
        span = sums.forward + seconds + 2 * sums.cuts
        bounds.append(
            span + multiply_finite(followers, sums.most_forward) + multiply_finite(count, sums.most_backward)
        )
        more = multiply_finite(followers - count, sums.most_forward)
        bounds.append(span + multiply_finite(count, sums.most_both) + more)
    total: Floats = np.max(np.broadcast_arrays(*bounds), axis=0)
    return total
