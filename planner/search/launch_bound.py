"""Proven lower bounds on the step of 1F1B and GPipe pipelines from what their hosts launch.

A host launches one action after another from the beginning of the step on, whatever its device waits for. So
the last B of stage s ends no earlier than the sum H of all its launches; the same micro-batch's B of the
stage before follows when the gradients are there (c seconds) and takes b, and its all-reduce takes e:

    L(s) = max(H(s), L(s + 1) + c + b(s))        step >= L(s) + e(s)

and L(s) + back, with `back` the seconds through the stages before s. For an unfinished plan L is minimised
over the missing stages from the last one back.

Where one process launches for all (`cost_models.simulator.launches`), no forward is launched while a backward
is. On a thread M backwards b(s), with what they run again, are launched one after another; the first waits
for a launch on each thread after it, and so does one on each before it for the last:

    step >= M F + sum over the other stages of b(t) + M b(s)

The device may take longer than the launches, B(s) from where that of the last begins:

    L(s) = B(s) + max(M F + sum over t > s of b(t) + (M - 1) the largest b(t) of t >= s, L(s + 1) + c)

Of GPipe, whose first backward follows all forwards, L(s) is also M - 1 times B(s) after the first, which ends
with its launch or its device, after those of the stage behind: M F + A(s), with B'(s) of a first backward

    A(s) = max(sum over t >= s of b(t), A(s + 1) + c + B'(s))

with F the launches of all forwards of a micro-batch. In the sum what is run again is left out where not known
to be. What is run again is launched one after another, of all stages, but for the first backward of all and
the last, beside which there is no other: step >= M F + all that is run again + what else these two launch.
For an unfinished plan the largest M b(s) is minimised over the missing stages.

Of GPipe all forwards are launched before a stage's first B: see `bounds_gpipe`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats, Indices
from .partial import Expansion
from .pipelines import Pipelines
from .stage_choices import GroupChoices, StageChoices


class LaunchBound:
    """The bounds of the module's docstring, of the plans that are made of these choices."""

    def __init__(self, choices: StageChoices) -> None:
        self.choices = choices
        self._rows = [(choices.after_last,) * 3]

    @cached_property
    def is_late(self) -> bool:
        """Whether a stage may wait for its own host."""
        return not self.choices.space.one_process and any(own.is_late for own in self.choices.groups)

    def root(self, stages: int) -> float:
        """A bound on every plan of so many stages."""
        if self.choices.space.one_process:
            launches, inward, _ = (float(row[0, 0]) for row in self.rows(stages))
            return max(self._least_of_process + launches, self.choices.forward_launches + inward)
        return float(self.rows(stages)[1][0, 0]) if self.is_late else 0.0

    def rows(self, stages: int) -> tuple[Floats, Floats, Floats]:
        """(positions + 1, cut points) each, for the last so many stages after one that ends there: the least
        L of the first of them, and the least seconds of the step. Of one process the least that the largest
        M - 1 backwards of them launch, the least L without M F, and the least A."""
        while len(self._rows) <= stages:
            self._rows.append(self._before(len(self._rows)))
        return self._rows[stages]

    def extend(self, least: Floats, stage: Expansion, back: Floats) -> tuple[Floats, Floats]:
        """(expansions,): the bound with a further stage, after which the step takes `back`; and what of it
        holds whatever follows, `least` with the stages before."""
        if self.choices.space.one_process:
            return self._extend_process(least, stage, back)
        if not self.is_late:
            return least, least
        inward, whole, _ = (row[stage.end_position, stage.end] for row in self.rows(stage.remaining - 1))
        config = self.choices.config
        backward = stage.plain if config.recompute == "except_last" else stage.backward
        own = self._host_seconds(stage.forward_launch, stage.plain_launch, stage.repeat_launch)
        after = np.maximum(back, stage.least_after)
        later = np.maximum(own, inward + stage.least_cut + backward)
        least = np.maximum(least, own + after)
        return np.maximum(np.maximum(later + after, whole), least), least

    def _extend_process(self, least: Floats, stage: Expansion, back: Floats) -> tuple[Floats, Floats]:
        """`extend` of one process."""
        ahead, inward, first = (row[stage.end_position, stage.end] for row in self.rows(stage.remaining - 1))
        more = self._later_launches(stage.forward_launch, stage.plain_launch, stage.repeat_launch)
        backward = stage.plain if self.choices.config.recompute == "except_last" else stage.backward
        behind = self._behind(stage.end) + more - stage.repeat_launch + backward
        later = np.maximum(behind, self._behind(stage.end) + ahead + backward)
        later = np.maximum(later, inward + stage.least_cut + backward)
        if self._is_gpipe:
            first = np.maximum(
                self._behind(stage.end) + stage.plain_launch,
                first + stage.least_cut + backward - stage.accumulation,
            )
            later = np.maximum(later, first + self._followers(stage.backward))
        after = self.choices.forward_launches + np.maximum(back, stage.least_after)
        least = np.maximum(least, np.maximum(self._least_of_process + more, behind + after))
        whole = np.maximum(self._least_of_process + ahead, later + after)
        return np.maximum(least, whole), least

    @property
    def _is_gpipe(self) -> bool:
        return self.choices.config.schedule == "gpipe"

    def _followers(self, backward: Floats) -> Floats:
        """Of all micro-batches but one."""
        count = self.choices.config.micro_batches - 1
        return count * backward if count else np.zeros_like(backward)

    def _behind(self, end: Indices) -> Floats:
        """Launches of one backward of each stage behind these cut points, without what is run again."""
        launches: Floats = self.choices.groups[0].costs.table.backward_launch[end, -1]
        return launches

    @cached_property
    def _least_of_process(self) -> float:
        """M F, and one backward of each stage."""
        forward, plain = self.choices.launches
        return self.choices.config.micro_batches * forward + plain

    def _later_launches(self, forward: Floats, plain: Floats, repeat: Floats) -> Floats:
        """Of the backwards of a stage on its thread, but for one that runs nothing again."""
        seconds = self._host_seconds(forward, plain, repeat)
        return np.asarray(seconds - self.choices.config.micro_batches * forward - plain)

    def _before(self, remaining: int) -> tuple[Floats, Floats, Floats]:
        rows = tuple(np.full(self.choices.shape, np.inf) for _ in range(3))
        reachable = np.isfinite(self._rows[-1][0])
        if reachable.any():
            for group in self.choices.groups:
                self.choices.space.budget.check()
                self._fill(rows, group, reachable, remaining)
        launches, inward, first = (self.choices.ranges.least_reachable(values) for values in rows)
        return launches, inward, first

    def _fill(
        self,
        rows: tuple[Floats, ...],
        group: GroupChoices,
        reachable: npt.NDArray[np.bool_],
        remaining: int,
    ) -> None:
        stages = group.before(reachable)
        if stages is None:
            return
        pairs, at = stages.pair, (stages.after, stages.end)
        in_flight = self.choices.in_flight(remaining)
        usual, repeat = group.backward(in_flight)[0], group.repeat_launch(in_flight)
        plain = np.where(np.isinf(usual), np.inf, group.plain)
        backward = plain if self.choices.config.recompute == "except_last" else usual
        latency, slowness = self.choices.ranges.least_pace(group.replicas, stages.key, stages.after)
        cut = slowness * group.sent[pairs] + latency * group.inner[pairs]
        ahead, end, first = (row[at] for row in self.rows(remaining - 1))
        if self.choices.space.one_process:
            more = self._later_launches(group.forward_launch, group.plain_launch, repeat)
            own = np.where(np.isinf(usual), np.inf, more)
            begin = self._behind(group.end)[pairs] + np.maximum((own - repeat)[pairs], ahead)
            stages.least_into(rows[0], np.maximum(own[pairs], ahead))
            first = first + cut + (backward - group.accumulation)[pairs]
            first = np.maximum(first, (self._behind(group.end) + group.plain_launch)[pairs])
            own = np.maximum(begin, end + cut) + backward[pairs]
            if self._is_gpipe:
                own = np.maximum(own, first + self._followers(usual[pairs]))
            stages.least_into(rows[1], own)
            stages.least_into(rows[2], first)
            return
        own = self._host_seconds(group.forward_launch, group.plain_launch, repeat)
        inward = np.maximum(own[pairs], ahead + cut + backward[pairs])
        stages.least_into(rows[0], inward)
        stages.least_into(rows[1], np.maximum(inward + group.least_after[pairs], end))

    def _host_seconds(self, forward: Floats, plain: Floats, repeat: Floats) -> Floats:
        """H of stages that launch for so long, `repeat`: what is run again."""
        config = self.choices.config
        again = config.micro_batches - (config.recompute == "except_last")
        seconds: Floats = config.micro_batches * (forward + plain) + again * repeat
        return seconds


def launch_bound(plans: Pipelines) -> Floats:
    """(plans,): the bound of whole plans."""
    count, stages = plans.config.micro_batches, plans.stages
    last_differs = plans.config.recompute == "except_last"
    last = plans.plain_launch if last_differs else plans.backward_launch
    backwards = (count - 1) * plans.backward_launch + last
    if plans.hosts == "one":
        return _process_bound(plans, backwards, last)
    hosts = count * plans.forward_launch + backwards
    backward = plans.plain if last_differs else plans.backward
    cut = np.hstack([plans.occupancy + plans.latency, np.zeros((len(plans), 1))])
    inward = np.zeros(len(plans))
    ends = np.zeros((stages, len(plans)))
    for stage in reversed(range(stages)):
        inward = np.maximum(hosts[:, stage], inward + cut[:, stage] + backward[:, stage])
        ends[stage] = inward + plans.exposed_allreduce[:, stage]
    latest: Floats = plans.after_tied_sums(ends).max(axis=0)
    return latest


def _process_bound(plans: Pipelines, backwards: Floats, last: Floats) -> Floats:
    """`backwards` (plans, stages): launches of all of a stage; `last`: of the shortest."""
    count, plain = plans.config.micro_batches, plans.plain_launch
    forwards = count * plans.forward_launch.sum(axis=1)
    threads = (last.sum(axis=1)[:, None] - last + backwards).max(axis=1)
    repeated = (plans.backward_launch - plain).sum(axis=1)
    repeats = (count - (plans.config.recompute == "except_last")) * repeated
    if count * plans.stages > 1:
        # Alone are the last stage's first backward, for which all others wait, and the first stage's last.
        repeats = repeats + plain[:, -1] + plain[:, 0]
    bound: Floats = forwards + np.maximum(threads, repeats)
    return np.maximum(bound, _after_launches(plans, forwards, backwards, last))


def _after_launches(plans: Pipelines, forwards: Floats, backwards: Floats, last: Floats) -> Floats:
    """The largest L(s), and what follows it."""
    count, differs = plans.config.micro_batches, plans.config.recompute == "except_last"
    backward = plans.plain if differs else plans.backward
    cut = np.hstack([plans.occupancy + plans.latency, np.zeros((len(plans), 1))])
    is_gpipe = plans.config.schedule == "gpipe"
    behind, ahead, inward, first = np.zeros((4, len(plans)))
    ends = np.zeros((plans.stages, len(plans)))
    for stage in reversed(range(plans.stages)):
        final = plans.backward_launch[:, stage] if count > 1 else last[:, stage]
        begin = behind + np.maximum(backwards[:, stage] - final, ahead)
        inward = np.maximum(begin, inward + cut[:, stage]) + backward[:, stage]
        first = first + cut[:, stage] + backward[:, stage] - plans.accumulation[:, stage]
        first = np.maximum(first, behind + last[:, stage])
        if is_gpipe:
            inward = np.maximum(inward, first + (count - 1) * plans.backward[:, stage])
        ends[stage] = forwards + inward + plans.exposed_allreduce[:, stage]
        behind = behind + last[:, stage]
        ahead = np.maximum(ahead, backwards[:, stage] - last[:, stage])
    return np.asarray(plans.after_tied_sums(ends).max(axis=0))
