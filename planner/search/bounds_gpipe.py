"""Proven lower bounds on the step seconds of GPipe pipelines, for whole plans and for unfinished ones.

The letters are those of `one_f_one_b`. GPipe's forwards and backwards are two flow shops of identical jobs
(links are machines, latencies lags), whose spans are known exactly: sum of f and c plus (M - 1) times the
largest f or o; the same for b. The first backward job is shorter (b': it adds to no gradients, and under
`except_last` runs nothing again), and two paths are bounds: it on the last stage, then the second job through
all of them: sum of b and c plus (M - 2) times the largest b or o, plus b' of the last stage; or it as far as
the largest stage, where all others pass: sum of b' and c plus (M - 1) times the largest b or o.

The gradients of stage s are complete after the backwards of the stages from s on, another such span, and
reduced e later.

Where f, b and o of one stage are the largest they count together: the largest f + b (or 2 o) is a bound, too.
The last F of a stage ends no earlier than the launches of all its forwards, and the backwards begin after it.
For an unfinished plan each of these sums and maxima is minimised by itself over the missing stages.
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


@dataclass(frozen=True, eq=False)
class _Sums:
    """Of the stages of a plan: sums of f, of b, of b', of c; the largest f, b and f + b (or o, 2 o of a cut),
    and launch of a forward; and `tail`: from the start of the backwards to the latest end of a stage's
    all-reduce."""

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
    """The bounds of the module's docstring."""

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
        """A bound on every plan of so many stages; inf where there is none."""
        simple = self._round_trips.root(stages)
        if simple >= self._limit:
            return simple
        row = _Sums(*(values[0, 0] for values in vars(self.rows(stages)).values()))
        return float(max(simple, self._total(row).max()))

    def rows(self, stages: int) -> _Sums:
        """(positions + 1, cut points): the smallest that each can be for the last so many stages, after one
        that ends there."""
        while len(self._rows) <= stages:
            self._rows.append(self._before(len(self._rows)))
        return self._rows[stages]

    def start(self) -> BoundState:
        """What is known of the plan of no stages."""
        return dict.fromkeys(("back", *NAMES[:-1]), np.zeros(1))

    def extend(self, state: BoundState, stage: Expansion) -> tuple[Floats, BoundState]:
        """(expansions,): the bound with a further stage, and what is known then."""
        follows = self.rows(stage.remaining - 1)
        at = (stage.end_position, stage.end)
        own = _Sums(
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
        now = {name: state[name] + getattr(own, name) for name in NAMES[:4]}
        now |= {name: np.maximum(state[name], getattr(own, name)) for name in NAMES[4:8]}
        back = state["back"] + stage.cut
        ahead = _Sums(*(getattr(follows, name)[at] for name in NAMES))
        suffix = own.plain + stage.least_cut + ahead.plain + ahead.cuts
        most = np.maximum(stage.backward, ahead.most_backward)
        # Only what goes on to the stage before takes the link to it.
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
        # The last of several backwards is no first one.
        final = stage.backward if self._count > 1 else own.plain
        back = final + np.maximum(back, stage.least_after)
        return self._total(whole), now | {"back": back}

    def _first(self, plain: Floats, usual: Floats) -> Floats:
        """Seconds of the backward that runs first, as if it added to gradients."""
        return plain if self._setting.recompute == "except_last" else usual

    def _total(self, sums: _Sums) -> Floats:
        return _total(self._setting, sums, self._last, self.choices.forward_launches)

    def _after_last(self) -> _Sums:
        nothing = self.choices.after_last
        return _Sums(*(nothing for _ in NAMES))

    def _before(self, remaining: int) -> _Sums:
        rows = {name: np.full(self.choices.shape, np.inf) for name in NAMES}
        # Where round trips leave no plan below the limit there is none.
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
        own = {
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
        for name, values in own.items():
            stages.least_into(rows[name], values)


def whole_bound_gpipe(plans: Pipelines) -> Floats:
    """(plans,): the bound of whole plans."""
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
    """The bound from the sums and the largest of all stages; `last`: b' of the last stage, at the least;
    `forward_launches`: of all micro-batches, where one process makes them."""
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
