"""The estimate of a step that DAPPLE compares plans by: fill, steady phase and drain around the pivot stage.

Fan et al., "DAPPLE: A pipelined data parallel approach for training large models", PPoPP 2021, section 4.1.
It is neither a bound nor a step that any schedule takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..stage_table import Floats

if TYPE_CHECKING:
    pass

TIE = 1e-12
"""Equal stages leave the pivot where it is, whatever the rounding."""


@dataclass(frozen=True)
class DappleStage:
    """A stage of many plans side by side: arrays that broadcast together. Forward and backward of one
    micro-batch; the all-reduce of a step."""

    forward: Floats
    backward: Floats
    all_reduce: Floats


@dataclass(frozen=True)
class Latency:
    """Seconds of the step, and the pivot: 2 s for stage s, 2 s + 1 for the transfer after it."""

    seconds: Floats
    pivot: npt.NDArray[np.int64]


def latency(stages: Sequence[DappleStage], transfers: Sequence[Floats], micro_batches: int) -> Latency:
    """T = T_w + T_s + T_e of plans of `stages`, with a transfer of so many seconds after each but the last.

    A transfer is a stage whose forward and backward take its seconds, without an all-reduce. With those, for
    M micro-batches, the pivot Q, and F, B, AR of the stages:

        T_w = sum of F_s up to Q                 T_s = (M - 1) (F_Q + B_Q)
        T_e = max over s of AR_s + (sum of B_a for a = s..Q)         for s <= Q
                            AR_s - (sum of B_a for a = Q+1..s-1)     for s > Q

    The all-reduce of a stage is so hidden by the backwards that follow it on the stages before. Q is the last
    stage, or from there backwards each stage whose (M - 1)(F + B) is above that of Q plus F + B of the stages
    between. Both cases of T_e are AR_s + (backwards up to Q) - (backwards before s), so that
    T = (F + B of the stages before Q) + M (F_Q + B_Q) + max over s of (AR_s - backwards before s).
    """
    before, backwards, exposed = np.zeros(1), np.zeros(1), np.full(1, -np.inf)
    reaches, works = [], []
    for stage in _with_transfers(stages, transfers):
        work = stage.forward + stage.backward
        reaches.append(before + micro_batches * work)
        works.append(work)
        exposed = np.maximum(exposed, stage.all_reduce - backwards)
        before, backwards = before + work, backwards + stage.backward
    seconds, pivot = reaches[-1], np.asarray(len(works) - 1)
    hidden = seconds - works[-1]
    for index in range(len(works) - 2, -1, -1):
        # (M - 1) w_s > (M - 1) w_Q + between  <=>  before_s + M w_s > before_Q + (M - 1) w_Q
        moves = reaches[index] > hidden * (1 + TIE)
        seconds = np.where(moves, reaches[index], seconds)
        hidden = np.where(moves, reaches[index] - works[index], hidden)
        pivot = np.where(moves, index, pivot)
    whole = seconds + exposed
    return Latency(whole, np.broadcast_to(pivot, whole.shape))


def _with_transfers(stages: Sequence[DappleStage], transfers: Sequence[Floats]) -> Iterator[DappleStage]:
    for stage, transfer in zip_longest(stages, transfers):
        yield stage
        if transfer is not None:
            yield DappleStage(transfer, transfer, np.zeros(1))
