"""A published study, foreseen: python benchmarks/seed_study.py

VGG-19 on CIFAR-100 (3x32x32, batch of 128) on 2 to 8 A100s of one server, by torchgpipe, FairScale and
DeepSpeed: seconds of 25 epochs, 391 steps each. Small kernels, so the host's launches are what a step takes,
and more micro-batches are slower. pplan predicts all 56 cells from an estimate for an A100, in which the
host's seconds of a launch, and those of a step outside of the pipeline, are fitted to two cells: torchgpipe
on 2 GPUs with 1 and with 16 micro-batches. Set as the study says: SGD; all micro-batches but the last
recomputed in torchgpipe and FairScale (their default); DeepSpeed with 16 micro-batches, without
recomputation; balances by pplan's versions of the three tools' rules.

The simulator counts the launches of one process that drives all devices, whose backwards are launched from a
thread a device, and of DeepSpeed's process a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np
import numpy.typing as npt

import pplan
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_records import LayerMeasurement

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


@dataclass(frozen=True)
class Cell:
    """A run of the study, and the seconds that it took."""

    runtime: str
    rule: str
    gpus: int
    micro_batches: int
    seconds: float


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
def slower_host(factor: float) -> Profile:
    """The estimate with launches that take so many times as long."""

    def change(cost: LayerMeasurement) -> LayerMeasurement:
        names = ("forward_host_seconds", "backward_host_seconds")
        return cost.model_copy(update={name: factor * (getattr(cost, name) or 0.0) for name in names})

    profile = estimate()
    layers = [
        layer.model_copy(update={"costs": [change(cost) for cost in layer.costs]}) for layer in profile.layers
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


def step_seconds(cell: Cell, factor: float) -> float:
    """What pplan predicts for a step whose launches take `factor` times as long as estimated."""
    one_process = cell.runtime != "deepspeed"
    plan = pplan.import_plan(
        balance_by(cell.rule, cell.gpus, cell.micro_batches),
        slower_host(factor),
        gpus=cell.gpus,
        topology="dgx-a100",
        mini_batch=128,
        micro_batches=cell.micro_batches,
        runtime=cell.runtime,
        schedule="gpipe" if one_process else "1f1b",
        recompute="except_last" if one_process and cell.micro_batches > 1 else "never",
        optimizer="sgd",
    )
    return plan.prediction.step_seconds


def fit(cells: Sequence[Cell]) -> tuple[float, float]:
    """The factor of the launches, by bisection, and the seconds of a step outside of the pipeline."""
    setting = ("torchgpipe", "torchgpipe-time", 2)
    both = [cell for cell in cells if (cell.runtime, cell.rule, cell.gpus) == setting]
    first, last = both[0], both[-1]
    difference = (last.seconds - first.seconds) / STEPS
    low, high = 0.1, 20.0
    for _ in range(12):
        factor = (low * high) ** 0.5
        more = step_seconds(last, factor) - step_seconds(first, factor)
        low, high = (factor, high) if more < difference else (low, factor)
    return factor, first.seconds / STEPS - step_seconds(first, factor)


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
    tables = {
        name: [(cell, STEPS * (step_seconds(cell, host) + rest)) for cell in cells]
        for name, host, rest in (("as estimated", 1.0, 0.0), ("fitted", factor, outside))
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
