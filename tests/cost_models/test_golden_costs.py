"""Figures of the cost models against golden files: tables of constants, kernels, steps, words of quantities.

Tests beside these hold the models to papers and to second implementations, with a tolerance or at chosen
points; a constant, a term or a comparison between these points is seen here. `make golden` rewrites the
files: read the diff.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from pplan.cost_models import collectives
from pplan.cost_models.errors import PplanError
from pplan.cost_models.hardware import Device, Level, Link
from pplan.cost_models.memory import StageBytes, ledger
from pplan.cost_models.number_format import (
    compare_percent,
    compare_steps,
    format_amount,
    percent,
    ranges,
    three_digits,
    whole_percent,
)
from pplan.cost_models.optimizers import (
    FLOAT32,
    MIXED,
    MIXED_FLOAT32_GRADIENTS,
    OPTIMIZERS,
    SIXTEEN_BITS,
    StepKernels,
)
from pplan.cost_models.quantities import (
    format_bytes,
    format_count,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)
from pplan.cost_models.schedules import SCHEDULES
from pplan.cost_models.simulator.costs import TRANSFERS, Costs
from pplan.cost_models.timeline import simulate
from pplan.cost_models.topology import Group, Topology
from pplan.cost_models.transformer.block_kernels import block_work, embedding_work, head_work, predictor_work
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.layer_work import Tokens
from pplan.cost_models.transformer.model_families import FAMILIES, ModelFamily
from pplan.cost_models.transformer.parallel_degrees import ParallelDegrees
from pplan.cost_models.transformer.rank_costs import DeviceLimits, RankCosts, TopologyLinks
from pplan.cost_models.transformer.transformer_shape import TransformerShape

Golden = Callable[[str, str], None]
AsText = Callable[[object], str]
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 97,
    "max_position_embeddings": 33,
    "type_vocab_size": 2,
}
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **ROUTED,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def switches() -> list[str]:
    """The keys that say whether a model has something."""
    named = {
        flag[0]
        for family in FAMILIES.values()
        for own in fields(ModelFamily)
        if isinstance(flag := getattr(family, own.name), tuple)
    }
    return sorted(
        named | {"use_parallel_residual", "parallel_attn", "new_decoder_architecture", "multi_query"}
    )


def answer(call: Callable[..., object], *values: Any) -> object:
    """What it returns, or what it refuses."""
    try:
        return call(*values)
    except PplanError as error:
        return str(error).replace("\n", " | ")


def parameters(**keys: Any) -> object:
    def count() -> str:
        shape = transformer_shape({**LLAMA, **keys})
        vectors = " ".join(str(tuple(map(int, np.ravel(own)))) for own in shape.beside_matrices())
        return f"{shape.parameters()} {shape.active_parameters()} {vectors}{' ' + shape.note}"

    return answer(count)


def test_parameters_of_families(golden: Golden, as_text: AsText) -> None:
    """Of every family, dense and with experts, its switches not named, off and on; and of each alone. A slow
    test counts them in transformers' own models."""
    rows: dict[str, object] = {}
    for name in sorted(FAMILIES):
        for word, more in (("dense", {}), ("routed", ROUTED), ("latent", LATENT)):
            for state in (None, False, True):
                own = {} if state is None else dict.fromkeys(switches(), state)
                rows[f"{name} {word} {state}"] = parameters(model_type=name, **more, **own)
        for switch in switches():
            alone = (
                parameters(model_type=name, **{switch: True}),
                parameters(model_type=name, **{switch: False}),
            )
            if alone[0] != alone[1]:
                rows[f"{name} {switch}"] = f"{alone[0]} / {alone[1]}"
    golden("cost_models/families.txt", as_text(rows))


DEGREES = (
    ParallelDegrees(),
    ParallelDegrees(tensor=2, data=2),
    ParallelDegrees(tensor=2, context=2),
    ParallelDegrees(context=2, exchange="ring"),
    ParallelDegrees(context=2, tensor=2, exchange="all-gather"),
    ParallelDegrees(expert=4, data=4),
    ParallelDegrees(tensor=2, expert=2, data=2),
)
COSTS = RankCosts(
    DeviceLimits(1e12, 1e11, shares={"ce_fusion": 0.4}),
    TopologyLinks(
        Topology(
            (Group(Device("GPU", None), 8),),
            (Level("node", 4, Link(1e10, 1e-6)), Level("network", None, Link(1e9, 1e-5))),
        )
    ),
)


def kernels(shape: TransformerShape, degrees: ParallelDegrees) -> Iterator[tuple[str, object]]:
    """Of each layer: every kernel with its seconds, and the bytes that it keeps."""
    tokens = Tokens(32, 2)
    layers = {
        "dense": block_work(shape, False, degrees, tokens),
        "routed": block_work(shape, True, degrees, tokens),
        "embedding": embedding_work(shape, degrees, tokens),
        "head": head_work(shape, degrees, tokens),
        "predictor": predictor_work(shape, degrees, tokens),
    }
    for name, work in layers.items():
        for direction, own in (("F", work.forward), ("B", work.backward), ("A", work.attention)):
            for number, kernel in enumerate(own):
                yield f"{name} {direction}{number}", f"{kernel} {COSTS.kernel_seconds(kernel, degrees):.7g} s"
        yield name, [work.saved, work.workspace, work.attention_saved, work.exchanges_tokens]


@pytest.mark.parametrize("name", ["llama", "gpt2", "deepseek_v3"])
def test_kernels(name: str, golden: Golden, as_text: AsText) -> None:
    shape = transformer_shape({**LLAMA, **(LATENT if name == "deepseek_v3" else ROUTED), "model_type": name})
    rows = {str(degrees): dict(kernels(shape, degrees)) for degrees in DEGREES}
    golden(f"cost_models/kernels_{name}.txt", as_text(rows))


def costs(rng: np.random.Generator, shape: tuple[int, int, int], cuts: int, transfers: str) -> Costs:
    """Random ones with everything that a runtime can have."""
    devices, chunks, _ = shape
    links: dict[str, Any] = {
        f"{way}_{what}": rng.random((1, cuts))
        for way in ("forward", "backward")
        for what in ("occupancy", "latency")
    }
    launches: dict[str, Any] = {
        f"{name}_launch": 0.3 * rng.random(shape) for name in ("forward", "backward", "weight", "recompute")
    }
    launches["recompute_launch"] = 0.2 * launches["backward_launch"]
    return Costs(
        forward=rng.random(shape),
        backward=2 * rng.random(shape),
        weight=rng.random(shape),
        accumulation=0.1 * rng.random(shape),
        recompute=rng.random((devices, 1, shape[2])),
        overhead=0.1 * rng.random(devices),
        optimizer=rng.random(devices),
        all_reduce=rng.random((devices, chunks)),
        transfers=transfers,  # type: ignore[arg-type]
        hosts="each",
        buckets=3,
        **links,
        **launches,
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_of_schedules(name: str, golden: Golden, as_text: AsText) -> None:
    """Step, bubble, where the time goes and what is in flight, under every way to transfer; and refusals."""
    rows: dict[str, object] = {}
    for stages, micro_batches in ((1, 3), (2, 4), (3, 5), (4, 8)):
        program = answer(SCHEDULES[name].program, stages, micro_batches)
        if isinstance(program, str):
            rows[f"{stages} x {micro_batches}"] = program
            continue
        for number, transfers in enumerate(TRANSFERS):
            rng = np.random.default_rng([stages, micro_batches, number])
            own: Any = program
            shape = (own.devices, own.chunks, own.micro_batches)
            timeline: Any = answer(simulate, own, costs(rng, shape, own.slots - 1, transfers))
            rows[f"{stages} x {micro_batches}, {transfers}"] = (
                timeline
                if isinstance(timeline, str)
                else {
                    "step": [timeline.step_seconds, timeline.bubble, timeline.bubble_rate_span],
                    "stages": list(timeline.stage_times),
                    "in flight": timeline.peak_in_flight,
                    "reductions": [own.end for own in timeline.reductions],
                }
            )
    golden(f"cost_models/steps/{name}.txt", as_text(rows))


KERNELS: tuple[StepKernels, ...] = ("fused", "foreach", "for-loop")


def test_ledgers(golden: Golden, as_text: AsText) -> None:
    stage = StageBytes(
        parameters=1000.0, trainable=800.0, buffers=10.0, saved=200.0, saved_input=30.0, input=40.0,
        received=45.0, sent=50.0, workspace=7.0,
    )  # fmt: skip
    precisions = {"32": FLOAT32, "16": SIXTEEN_BITS, "mixed": MIXED, "mixed32": MIXED_FLOAT32_GRADIENTS}
    rows = {}
    for (name, own), kernels, optimizer in product(precisions.items(), KERNELS, OPTIMIZERS):
        for zero, replicas, versions, ahead in (
            (0, 1, 1, 0),
            (0, 2, 2, 0),
            (1, 2, 1, 4),
            (2, 4, 1, 0),
            (3, 2, 1, 0),
        ):
            rows[f"{name} {kernels} {optimizer} {zero} {replicas} {versions} {ahead}"] = ledger(
                stage,
                in_flight=3,
                recompute=("never", "always", "except_last")[(zero + replicas) % 3],
                optimizer=optimizer,
                replicas=replicas,
                weight_versions=versions,
                zero=zero,
                precision=replace(own, kernels=kernels),
                context_bytes=11,
                ahead=ahead,
            )
    golden("cost_models/ledgers.txt", as_text(rows))


def test_collectives(golden: Golden, as_text: AsText) -> None:
    """By every algorithm over devices of one port, of one node and of several, even and uneven."""
    device = Device("GPU", None)
    node = Level("node", 4, Link(10.0, 0.1))
    rack, network = (
        Level("rack", 2, Link(5.0, 0.3), devices_per_port=2),
        Level("network", None, Link(2.0, 0.5)),
    )
    topology = Topology((Group(device, 16),), (node, rack, network))
    groups = (
        (3,),
        (0, 1),
        (0, 2),
        (0, 4),
        (0, 1, 2, 3),
        (0, 1, 4),
        (0, 4, 8),
        (0, 1, 8, 9),
        tuple(range(16)),
        (0, 5, 6, 7, 8),
    )
    rows = {}
    for ranks in groups:
        for algorithm in collectives.ALGORITHMS:
            rows[f"{ranks} {algorithm}"] = [
                answer(call, topology, ranks, bytes, algorithm)
                for call in (collectives.all_reduce_seconds, collectives.reduce_scatter_seconds)
                for bytes in (0.0, 1.0, 100.0)
            ]
        rows[f"{ranks} loads"] = [
            collectives.all_reduce_loads(topology, ranks),
            collectives.link_signature(topology, ranks),
            *(collectives.best_algorithm(topology, ranks, bytes) for bytes in (0.1, 1.0, 1000.0)),
        ]
    golden("cost_models/collectives.txt", as_text(rows))


NUMBERS = (
    *(0.0, 4.9e-10, 1e-9, 9.995e-7, 9.994e-7, 4.5e-6, 0.00123, 0.9994, 0.9995, 1.0, 9.994, 9.995, 9.996),
    *(59.99, 99.94, 99.95, 999.4, 999.5, 1000.0, 1023.0, 1024.0, 1048570.0, 1e6, 999.5e6, 1.5e9, 7.02e9),
    *(999.4e9, 1e12, 3.21e12, 1024.0**4, 1e15, float("inf")),
)
TEXTS = (
    *(
        "16GiB",
        "40 GB",
        "1.5kb",
        "7",
        "0B",
        "0.4B",
        "-1GB",
        "1e30TB",
        "12 parsecs",
        "nan",
        "",
        ".5MB",
        "9.3EB",
    ),
    *("300GB/s", "25Gb/s", "100Gbps", "1kibit/s", "inf", "0.5B/s", "2e18B/s", "3MiB/s", "1B/s", "8bits/s"),
    *(
        "5us",
        "5µs",
        "5\u03bcs",
        "1.5ms",
        "60s",
        "2m",
        "3min",
        "1h",
        "0",
        "0s",
        "1e9s",
        "1.1e9s",
        "400000h",
        "3 ns",
        "-1s",
    ),
)


def test_words_of_quantities(golden: Golden, as_text: AsText) -> None:
    rows: dict[str, object] = {}
    formats = (percent, whole_percent, three_digits, format_amount, format_bytes, format_rate, format_seconds)
    for number in NUMBERS:
        own = [call(number) for call in formats if number < 1e300 or call in (format_rate, format_seconds)]
        rows[f"{number:.12g}"] = [
            *own,
            format_seconds(number, short=True),
            format_count(int(min(number, 9e9)), "batch"),
        ]
    for share in (
        0.0,
        1e-10,
        2e-9,
        4e-4,
        4.999e-4,
        5e-4,
        5.1e-4,
        0.0049,
        0.005,
        0.0051,
        0.09,
        0.5,
        9.0,
        99.0,
        1e4,
    ):
        rows[f"by {share}"] = [
            compare(*pair)
            for compare in (compare_steps, compare_percent)
            for pair in ((1 + share, 1.0), (1.0, 1 + share))
        ]
    for text in TEXTS:
        rows[f"'{text}'"] = [answer(parse, text, "it") for parse in (parse_bytes, parse_rate, parse_seconds)]
    rows["ranges"] = [ranges(own) for own in ([], [3], [1, 2], [2, 1, 5], [0, 1, 2, 4, 6, 7], [1, 1, 2])]
    golden("cost_models/quantities.txt", as_text(rows))
