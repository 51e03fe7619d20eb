"""Time, memory and gap over layers x devices: python benchmarks/scale.py [--quick] [--csv FILE]

Generated chains (generated_chains.py; more than 100 layers take together what 100 do, as operators of a model
of 2 billion parameters) on machines of three levels of links: 8 GPUs of 80 GiB a node, 32 nodes a pod, pods;
of one kind of GPU, or half of them half as fast. The global batch is 256 samples a GPU; the largest case has
4,096 micro-batches, the others any number. Each case runs in a process of its own with a time limit of 20 s:
seconds of processor time of the solving, the most memory of the process, and how far the plan is from the
proven bound. Takes five to six minutes of processor time; `--quick` leaves out what has over 1,024 devices.
`--csv docs/scale.csv` writes what `docs/draw_images.py` draws.
"""

from __future__ import annotations

from large_cases import LargeCase, run

from pplan.cost_models.hardware import Device, Group, Level, Link
from pplan.cost_models.topology import Topology

CASES = [
    *(
        LargeCase(layers, gpus, kinds, "80GiB", 20.0, 256, most=100)
        for gpus in (64, 1_024, 16_384)
        for layers in (10, 1_000)
        for kinds in (1, 2)
    ),
    *(LargeCase(10_000, 16_384, kinds, "80GiB", 20.0, 256, 4_096, 100) for kinds in (1, 2)),
]


def machine(case: LargeCase) -> Topology:
    """Three levels of links, one port of each for every GPU."""
    gpu = Device("NVIDIA A100-SXM4-80GB", 80 * 2**30)
    levels = (
        Level("node", 8, Link(300e9, 5e-6)),
        Level("pod", 32, Link(25e9, 1e-5)),
        Level("network", None, Link(12.5e9, 2e-5)),
    )
    return Topology((Group(gpu, case.gpus),), levels)


if __name__ == "__main__":
    run(__file__, __doc__, CASES, [case.gpus <= 1_024 for case in CASES], machine)
