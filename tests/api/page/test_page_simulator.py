"""The simulator of the report's page against pplan's own, over random pipelines, and its numbers in words."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pplan.api.page.cut_problem import cut_problem, refuse_cuts
from pplan.cost_models.layer import Chain, SharedBuffer, TiedWeight
from pplan.cost_models.optimizers import Precision
from pplan.cost_models.quantities import format_bytes, format_seconds
from pplan.cost_models.schedules import find_schedule
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Device, Link, Topology, two_level_topology
from pplan.planner.assembly import Assembly
from pplan.planner.plan_simulation import device_memory

PAGE = resources.files("pplan.api.page")
pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="the page's script runs in node")
PROBLEMS = 60


def run_in_node(program: str, content: Any) -> Any:
    """What the program prints, as JSON, with `content` as its `input` and the page's scripts loaded."""
    scripts = f"""
    const S = require({json.dumps(str(PAGE / "simulator.js"))});
    const N = require({json.dumps(str(PAGE / "numbers.js"))});
    const input = JSON.parse(require("fs").readFileSync(0, "utf8"));
    process.stdout.write(JSON.stringify(({program})(input)));
    """
    done = subprocess.run(
        ["node", "-e", scripts], input=json.dumps(content), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def random_chain(rng: np.random.Generator, layers: int) -> Chain:
    sizes = (1, 2, 4, 8)
    per_sample = np.array(sizes, dtype=np.float64)

    def line(slope: float, start: float = 0.0) -> Any:
        return slope * rng.random((layers, 1)) * per_sample + start * rng.random((layers, 1))

    backward = line(2e-3, 3e-4)
    weights = 2e7 * rng.random(layers) * (rng.random(layers) < 0.8)
    return Chain(
        names=tuple(f"layer{i}" for i in range(layers)),
        sizes=sizes,
        parameter_bytes=weights,
        trainable_bytes=weights * (rng.random(layers) < 0.8),
        buffer_bytes=1e4 * rng.random(layers),
        cut_after=np.append(np.ones(layers - 1, dtype=bool), False),
        input_bytes_per_sample=5e5,
        forward_seconds=line(1e-3, 3e-4),
        backward_seconds=backward,
        output_bytes=line(10 ** rng.uniform(4, 8)),
        saved_bytes=line(1e7),
        saved_input_bytes=line(2e6),
        workspace_bytes=line(2e7),
        forward_host_seconds=np.broadcast_to(1e-3 * rng.random((layers, 1)), (layers, 4)),
        backward_host_seconds=np.broadcast_to(1e-3 * rng.random((layers, 1)), (layers, 4)),
        accumulation_seconds=rng.random(layers) * backward.min(axis=1),
        largest_parameters=weights * rng.random(layers),
        shared_buffers=(SharedBuffer("table", 3e6, (0, layers // 2, layers - 1)),),
    )


def random_topology(rng: np.random.Generator, devices: int) -> Topology:
    """The devices of a node share one port to the other nodes, or have their own."""
    links = [Link(10 ** rng.uniform(8, 11), 1e-5 * rng.random()) for _ in range(2)]
    kind, node = Device("toy", None, speed=float(rng.choice([1.0, 2.0]))), int(rng.choice([1, 2, 4]))
    topology = two_level_topology(kind, -(-devices // node) * node, node, *links)
    network = replace(topology.levels[1], devices_per_port=int(rng.choice([1, node])))
    return replace(topology, levels=(topology.levels[0], network))


def random_ends(rng: np.random.Generator, layers: int, stages: int) -> list[int]:
    cuts = sorted(rng.choice(np.arange(1, layers), stages - 1, replace=False).tolist())
    return [0, *cuts, layers]


def random_assemblies(seed: int) -> tuple[list[Assembly], str]:
    """The same pipeline with two partitions, and the name of its schedule."""
    rng = np.random.default_rng(seed)
    stages, schedule = int(rng.integers(2, 7)), str(rng.choice(["1f1b", "gpipe"]))
    layers, micro_batches = int(rng.integers(stages, 20)), int(rng.integers(1, 12))
    replicas = rng.choice([1, 2, 3, 5], stages).tolist()
    first = np.cumsum([0, *replicas]).tolist()
    words = ["never", "always", *(["except_last"] if schedule == "gpipe" else [])]
    precisions = [Precision(4, 4, kernels="foreach"), Precision(2, 4, 4, kernels="for-loop"), Precision(4, 4)]
    common: dict[str, Any] = {
        "schedule": find_schedule(schedule),
        "program": find_schedule(schedule).program(stages, micro_batches, 1),
        "chain": random_chain(rng, layers),
        "topology": random_topology(rng, first[-1]),
        "size": int(rng.choice([2, 3, 6, 8])),
        "ranks": [list(range(a, a + n)) for a, n in zip(first, replicas, strict=False)],
        "recompute": tuple(str(word) for word in rng.choice(words, stages)),
        "optimizer": str(rng.choice(["sgd", "adam", "adamw"])),
        "dtype": "float32",
        "precision": precisions[seed % 3],
        "hosts": "one" if rng.random() < 0.4 else "each",
    }
    ends = [random_ends(rng, layers, stages) for _ in range(2)]
    pairs = [list(pairwise(own)) for own in ends]
    return [Assembly(bounds=bounds, **common) for bounds in pairs], schedule


def balance(assembly: Assembly) -> list[int]:
    return [end - first for first, end in assembly.bounds]


@pytest.fixture(scope="module")
def compared() -> list[tuple[Assembly, dict[str, Any]]]:
    """Random pipelines, each with what the page computes for cuts other than those it was written for."""
    assemblies, inputs = [], []
    for seed in range(PROBLEMS):
        (written, other), schedule = random_assemblies(seed)
        assert refuse_cuts(written) == ""
        assemblies.append(other)
        inputs.append([cut_problem({schedule: written}), balance(other), schedule])
    program = """(problems) => problems.map((own) => {
        const {step, bubble, memory, start, end, begin, arrival, order} = S.simulate(...own);
        return {step, bubble, memory, spans: order.map((action, i) => [
            action.stage, "FB"[action.kind], action.microBatch, start[i], end[i],
            action.target < 0 ? null : [begin[i], arrival[i]]])};
    })"""
    return list(zip(assemblies, run_in_node(program, inputs), strict=True))


@pytest.mark.slow
def test_steps_and_bubbles_are_those_of_the_simulator(compared: Sequence[tuple[Assembly, Any]]) -> None:
    shared, late = 0, 0
    for assembly, own in compared:
        costs = assembly.costs()
        timeline = simulate(assembly.program, costs)
        assert own["step"] == pytest.approx(timeline.step_seconds, rel=1e-8)
        assert own["bubble"] == pytest.approx(timeline.bubble, rel=1e-7, abs=1e-9)
        shared += bool(costs.reduce_loads)
        late += costs.all_reduce is not None and bool(timeline.reductions)
    # Pipelines whose all-reduces share ports, and whose all-reduces end after the backward, are among them.
    assert shared > 5
    assert late > 5


def test_every_action_and_transfer_is_where_the_simulator_has_it(
    compared: Sequence[tuple[Assembly, Any]],
) -> None:
    for assembly, own in compared:
        timeline = simulate(assembly.program, assembly.costs())
        spans = {(span.stage, span.action.kind, span.action.micro_batch): span for span in timeline.spans}
        sent = {(one.stage, one.action.kind, one.action.micro_batch): one for one in timeline.transfers}
        assert len(own["spans"]) == len(spans)
        for stage, kind, micro_batch, start, end, transfer in own["spans"]:
            expected = spans[stage, kind, micro_batch]
            assert (start, end) == pytest.approx((expected.start, expected.end), rel=1e-8, abs=1e-12)
            assert (transfer is None) == ((stage, kind, micro_batch) not in sent)
            if transfer is not None:
                other = sent[stage, kind, micro_batch]
                assert transfer == pytest.approx([other.start, other.end], rel=1e-8, abs=1e-12)


def test_memory_is_the_ledgers(compared: Sequence[tuple[Assembly, Any]]) -> None:
    for assembly, own in compared:
        timeline = simulate(assembly.program, assembly.costs())
        for device, needed in enumerate(own["memory"]):
            assert needed == pytest.approx(device_memory(assembly, device, timeline).bytes, rel=1e-8, abs=10)


def test_what_the_page_cannot_move_is_refused() -> None:
    (assembly, _), _ = random_assemblies(0)
    tied = replace(assembly.chain, tied=(TiedWeight("weight", 4.0, True, (0, 1)),))
    zb_v = find_schedule("zb-v")
    reasons = {
        "several parts": replace(assembly, schedule=zb_v, program=zb_v.program(2, 4, 2)),
        "ZeRO-1": replace(assembly, zero=1),
        "both sides of a cut": replace(assembly, chain=tied),
        "first layers alone": replace(assembly, recompute=("first_1", "never")),
        "a stage offloads": replace(assembly, recompute=("never", "offload")),
        "one stage": replace(assembly, program=find_schedule("1f1b").program(1, 4, 1)),
    }
    for words, other in reasons.items():
        assert words in refuse_cuts(other)


def test_numbers_read_as_in_the_tables() -> None:
    seconds = [0.0, 3.2e-9, 4.567e-6, 9.996e-4, 0.0123, 0.5, 1.0, 99.95, 999.6, 12345.6]
    sizes = [0, 1, 1023, 1024, 1048575, 1.5 * 2**30, 2**40, 7 * 2**43]
    words = run_in_node("([s, b]) => [s.map(N.formatSeconds), b.map(N.formatBytes)]", [seconds, sizes])
    assert words == [[format_seconds(each) for each in seconds], [format_bytes(each) for each in sizes]]
