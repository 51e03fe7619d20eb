"""A published study, foreseen: python benchmarks/seed_study.py

VGG-19 on CIFAR-100 (3x32x32, batch of 128) on 2 to 8 A100s of one server, by torchgpipe, FairScale and
DeepSpeed: seconds of 25 epochs, 391 steps each. Small kernels, so the host's launches are what a step takes,
and more micro-batches are slower. pplan predicts all 56 cells from an estimate for an A100, in which the
host's seconds of a launch, and those of a step outside of the pipeline, are fitted to two cells: torchgpipe
on 2 GPUs with 1 and with 16 micro-batches. Set as the study says: SGD; all micro-batches but the last
recomputed in torchgpipe and FairScale (their default); DeepSpeed with 16 micro-batches, without
recomputation; balances by pplan's versions of the three tools' rules.

Besides the layers' launches, each pass of a stage takes what the runtime's own Python does, `OWN_SECONDS`, as
docs/lab/benchmarks.md has it, times the same factor. `pplan solve` does not count it.

The simulator counts the launches of one process that drives all devices, whose backwards are launched from a
thread a device, and of DeepSpeed's process a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from statistics import median

import numpy as np
import numpy.typing as npt

import pplan
from pplan.profiler.profile_file import LayerMeasurement, Profile

STEPS = 25 * 391
GPUS = (2, 4, 6, 8)
MICRO_BATCHES = (1, 8, 16)
BY_TIME = {
    2: (378, 1387, 2436, 392, 1372, 2386, 2934),
    4: (247, 933, 1925, 286, 972, 1826, 1823),
    6: (253, 1024, 1896, 266, 1062, 2005, 1445),
    8: (294, 1176, 2197, 376, 1219, 2235, 1306),
}
BY_SIZE = {
    2: (383, 1356, 2424, 386, 1343, 2360, 2964),
    4: (237, 880, 1691, 295, 916, 1697, 1842),
    6: (262, 1026, 1909, 307, 1074, 2027, 1433),
    8: (308, 1175, 2214, 427, 1251, 2331, 1316),
}
"""Published seconds by GPUs: torchgpipe and FairScale with 1, 8 and 16 micro-batches, DeepSpeed with 16. The
balance is by time (DeepSpeed: by parameters) and by size (DeepSpeed: uniform); FairScale has torchgpipe's.

One node of ThetaGPU: 8 A100, two EPYC 7742.
"""

OWN_SECONDS = {
    ("torchgpipe", "never"): 0.056e-3,
    ("torchgpipe", "except_last"): 0.112e-3,
    ("fairscale", "never"): 0.063e-3,
    ("fairscale", "except_last"): 0.127e-3,
    ("deepspeed", "never"): 0.353e-3,
}
"""By runtime and what it runs again: host seconds of its own by pass of a stage, measured on
an AMD EPYC with torch 2.14, the middle of 2, 4 and 8 stages."""


@dataclass(frozen=True)
class Cell:
    """A run of the study, and the seconds that it took."""

    runtime: str
    rule: str
    gpus: int
    micro_batches: int
    seconds: float

    @property
    def recompute(self) -> str:
        """What the runtime runs again by default: torchgpipe and FairScale all micro-batches but the last."""
        return "never" if self.runtime == "deepspeed" or self.micro_batches == 1 else "except_last"

    @property
    def own_seconds(self) -> float:
        """Host seconds of the runtime's own, by pass."""
        return OWN_SECONDS[self.runtime, self.recompute]


def published_cells() -> Iterator[Cell]:
    """All 56."""
    rules = ((BY_TIME, "torchgpipe-time", "parameters"), (BY_SIZE, "torchgpipe-size", "even"))
    for table, rule, deepspeed_rule in rules:
        runs = [(name, rule, count) for name in ("torchgpipe", "fairscale") for count in MICRO_BATCHES]
        for gpus, row in table.items():
            for run, seconds in zip([*runs, ("deepspeed", deepspeed_rule, 16)], row, strict=True):
                runtime, own_rule, micro_batches = run
                yield Cell(runtime, own_rule, gpus, micro_batches, seconds)


@cache
def estimate() -> Profile:
    """VGG-19 for CIFAR-100, estimated for the A100 of the study."""
    return pplan.profile(
        "vgg19",
        device="analytic:a100-40gb",
        input_shape=[3, 32, 32],
        classes=100,
        micro_batch_sizes=[8, 16, 128],
    )


@cache
def slower_host(factor: float, balance: str = "", own_seconds: float = 0.0) -> Profile:
    """The estimate with launches that take so many times as long, and as many of the runtime's `own_seconds`
    in the first layer of each stage."""
    firsts = {0, *accumulate(map(int, balance.split(",")))} if balance else set[int]()

    def change(cost: LayerMeasurement, more: float) -> LayerMeasurement:
        names = ("forward_host_seconds", "backward_host_seconds")
        return cost.model_copy(
            update={name: factor * ((getattr(cost, name) or 0.0) + more) for name in names}
        )

    profile = estimate()
    layers = [
        layer.model_copy(
            update={"costs": [change(cost, own_seconds if i in firsts else 0.0) for cost in layer.costs]}
        )
        for i, layer in enumerate(profile.layers)
    ]
    return profile.model_copy(update={"layers": layers})


@cache
def balance_by(rule: str, gpus: int, micro_batches: int) -> str:
    """The layers of each stage, one a GPU. The rule's own plan: the time limit is that of what is proven
    beside it."""
    plan = pplan.solve(
        estimate(),
        gpus=gpus,
        topology="dgx-a100",
        mini_batch=128,
        micro_batches=micro_batches,
        runtime="torchgpipe",
        recompute="never",
        planner=rule,
        use_all=True,
        time_limit=1,
    )
    return ",".join(map(str, plan.balance))


def step_seconds(cell: Cell, factor: float, *, own: bool = True) -> float:
    """What pplan predicts for a step whose launches take `factor` times as long as estimated, with the
    runtime's `own` Python or without."""
    balance = balance_by(cell.rule, cell.gpus, cell.micro_batches)
    plan = pplan.import_plan(
        balance,
        slower_host(factor, balance, own * cell.own_seconds),
        gpus=cell.gpus,
        topology="dgx-a100",
        mini_batch=128,
        micro_batches=cell.micro_batches,
        runtime=cell.runtime,
        schedule="1f1b" if cell.runtime == "deepspeed" else "gpipe",
        recompute=cell.recompute,
        optimizer="sgd",
    )
    return plan.prediction.step_seconds


def fit(cells: Sequence[Cell], *, own: bool = True) -> tuple[float, float]:
    """The factor of the launches, by bisection, and the seconds of a step outside of the pipeline."""
    setting = ("torchgpipe", "torchgpipe-time", 2)
    both = [cell for cell in cells if (cell.runtime, cell.rule, cell.gpus) == setting]
    first, last = both[0], both[-1]
    difference = (last.seconds - first.seconds) / STEPS
    low, high = 0.1, 20.0
    for _ in range(12):
        factor = (low * high) ** 0.5
        more = step_seconds(last, factor, own=own) - step_seconds(first, factor, own=own)
        low, high = (factor, high) if more < difference else (low, factor)
    return factor, first.seconds / STEPS - step_seconds(first, factor, own=own)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; equal values share their mean rank."""
    own, other = (_mean_ranks(np.array(values)) for values in (first, second))
    return float(np.corrcoef(own, other)[0, 1])


def _mean_ranks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.array([np.mean(np.flatnonzero(np.isclose(np.sort(values), value))) for value in values])


def summarize(name: str, cells: Iterable[tuple[Cell, float]]) -> str:
    """A row: rank correlation, median and largest error."""
    pairs = list(cells)
    published, predicted = [cell.seconds for cell, _ in pairs], [seconds for _, seconds in pairs]
    errors = [seconds / cell.seconds - 1 for cell, seconds in pairs]
    return (
        f"| {name} | {len(pairs)} | {rank_correlation(published, predicted):.3f} | "
        f"{median(map(abs, errors)):.0%} | {max(errors, key=abs):+.0%} |"
    )


def main() -> None:
    cells = list(published_cells())
    factor, outside = fit(cells)
    print(f"launches x {factor:.2f}, {1e3 * outside:.1f} ms of a step outside of the pipeline\n")
    versions = {
        "as estimated, nothing fitted": (1.0, 0.0, False),
        "fitted, without the runtimes' own Python": (*fit(cells, own=False), False),
        "fitted": (factor, outside, True),
    }
    tables = {
        name: [(cell, STEPS * (step_seconds(cell, host, own=own) + rest)) for cell in cells]
        for name, (host, rest, own) in versions.items()
    }
    print("| GPUs, balance, micro-batches | runtime | published | predicted |\n| --- | --- | ---: | ---: |")
    for cell, seconds in tables["fitted"]:
        setting = f"{cell.gpus}, {cell.rule}, {cell.micro_batches}"
        print(f"| {setting} | {cell.runtime} | {cell.seconds:.0f} | {seconds:.0f} |")
    print("\n| cells | number | rank correlation | median error | largest |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, pairs in tables.items():
        print(summarize(f"all, {name}", pairs))
    for runtimes in (("torchgpipe", "fairscale"), ("deepspeed",)):
        own = [pair for pair in tables["fitted"] if pair[0].runtime in runtimes]
        print(summarize(", ".join(runtimes), own))
    print("\nThe fastest plan of solve --runtime torchgpipe, global batch 128:")
    for gpus in GPUS:
        plan = pplan.solve(
            slower_host(factor), gpus=gpus, topology="dgx-a100", mini_batch=128, runtime="torchgpipe"
        )
        print(f"{gpus} GPUs: balance {plan.balance}, micro-batches: {plan.micro_batches}")


if __name__ == "__main__":
    main()
