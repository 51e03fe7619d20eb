"""The file of a measured machine: what it refuses, and what plans are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import pplan
from pplan.api.degrees import search_configuration
from pplan.cli.app import main
from pplan.cost_models.errors import FileError, InfeasibleError, UsageError
from pplan.cost_models.transformer.configuration import transformer_shape
from pplan.cost_models.transformer.kernel_table import CollectiveName
from pplan.cost_models.transformer.rank_costs import CollectiveCurve
from pplan.profiler.machine_file import (
    CollectiveTimes,
    KernelTime,
    LayerTime,
    MachineFile,
    PassTime,
    UpdateTime,
)
from pplan.profiler.measured_links import MeasuredLinks, Member, PairTimes

CONFIG = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 8,
    "vocab_size": 32000,
}
ASKED: dict[str, Any] = {"sequence": 1024, "mini_batch": 16}
SIZES = [2**10, 2**16, 2**20, 2**24]


def machine_file(devices: int = 4) -> MachineFile:
    """Four H100 whose collectives are noisy: seconds fall and rise with the bytes."""
    names = get_args(CollectiveName)
    return MachineFile(
        device="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * 2**30,
        devices=devices,
        model_sizes=transformer_shape(CONFIG),
        sequence=1024,
        micro_batch_size=1,
        links=MeasuredLinks(
            backend="nccl",
            members=[
                Member(rank=rank, node=0, device_name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 2**30)
                for rank in range(devices)
            ],
            sizes=SIZES,
            repeats=3,
            pairs=[
                PairTimes(
                    first=0,
                    second=1,
                    there_seconds=[5e-6, 6e-6, 1e-5, 1e-4],
                    back_seconds=[5e-6, 6e-6, 1e-5, 1e-4],
                )
            ],
            all_reduce_seconds=[1e-5, 1e-5, 2e-5, 2e-4],
        ),
        collectives=[
            CollectiveTimes(
                name=name, devices=size, stride=stride, bytes=SIZES, seconds=[4e-5, 2e-5, 9e-5, 8e-5]
            )
            for name in names
            for size, stride in ((2, 1), (2, 2), (4, 1))
        ],
        kernels=[
            KernelTime(operation="matmul", shape="m=1024, k=1024, n=1024, layout=TN", seconds=5e-6),
            KernelTime(operation="matmul", shape="m=1024, k=1024, n=1024, layout=NN", seconds=5e-6),
            KernelTime(operation="matmul", shape="m=1024, k=1024, n=1024, layout=NT", seconds=9e-6),
        ],
        passes=[PassTime(bytes=2**20, seconds=4e-6), PassTime(bytes=2**28, seconds=1e-4)],
        whole_layers=[
            LayerTime(layer="dense", forward_seconds=3e-4, backward_seconds=7e-4, spread=0.02),
            LayerTime(layer="dense", tensor=2, forward_seconds=2e-4, backward_seconds=5e-4, spread=0.02),
            LayerTime(layer="head", forward_seconds=5e-4, backward_seconds=9e-4, spread=0.02),
        ],
        update=UpdateTime(parameters=2**24, seconds=1e-3),
    )


def write(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "machine.json"
    path.write_text(json.dumps(content))
    return path


def content() -> dict[str, Any]:
    read: dict[str, Any] = json.loads(machine_file().to_json())
    return read


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("devices",), 0, "devices"),
        (("devices",), 3, "links.members has 4 entries, devices is 3"),
        (("device_name",), "", "device_name"),
        (("dtype",), "float32", "dtype"),
        (("schema",), 7, "schema is 7"),
        (("sequence",), "1024", "sequence"),
        (("model_sizes", "hidden"), 0, "model_sizes: hidden is 0"),
        (("model_sizes", "attention", "heads"), -4, "attention.heads is -4"),
        (("model_sizes", "attention", "heads"), 3, "heads"),
        (("model_sizes", "routed"), [], "routed has 0 blocks"),
        (("passes", 0, "seconds"), -1, "passes.0.seconds"),
        (("passes", 1, "bytes"), 1.5, "passes.1.bytes"),
        (("kernels", 1, "operation"), "sort", "kernels.1: operation 'sort'"),
        (("kernels", 0, "shape"), "m=1024, k=0, n=1, layout=TN", "kernels.0: k: '0'"),
        (("collectives", 0, "seconds"), [1e-5], "collectives.0: bytes has 4 values and seconds 1"),
        (("collectives", 0, "bytes"), SIZES[::-1], "collectives.0"),
        (("collectives", 0, "name"), "gossip", "collectives.0.name"),
        (("whole_layers", 0, "layer"), "experts", "whole_layers.0.layer is 'experts'"),
        (("whole_layers", 1, "tensor"), 3, "whole_layers.1"),
        (("whole_layers", 0, "implementation"), "jax", "whole_layers.0.implementation is 'jax'"),
        (("whole_layers", 0, "forward_seconds"), 0, "whole_layers.0.forward_seconds"),
        (("update", "parameters"), 0, "update.parameters"),
        (("links", "pairs", 0, "second"), 9, "0 and 9 are no two ranks"),
        (("links", "sizes"), [1024], "sizes is [1024]"),
        (("links", "all_reduce_seconds"), [1e-5] * 3, "one for each size"),
    ],
)
def test_bad_files_are_refused_with_the_field(
    path: tuple[str | int, ...], value: object, words: str, tmp_path: Path
) -> None:
    wrong: Any = content()
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    file = write(tmp_path, wrong)
    with pytest.raises(FileError) as raised:
        pplan.solve(CONFIG, machine=file, **ASKED)
    assert words in str(raised.value)
    assert "machine.json" in str(raised.value)


def test_files_of_other_kinds_and_machines_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, content())
    text = file.read_text()
    with pytest.raises(UsageError, match="was measured on NVIDIA H100"):
        pplan.solve(CONFIG, machine=file, gpus=4, gpu="a100-40gb", **ASKED)
    with pytest.raises(UsageError, match="has kernels, too"):
        pplan.solve(CONFIG, machine=file, kernels="kernels.csv", **ASKED)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = str(tmp_path / "config.json")
    assert main(["solve", config, "--machine", config, "--gpus", "4"]) == 2
    assert "config.json: not a machine of pplan (it has no key 'schema')" in capsys.readouterr().err
    assert main(["solve", config, "--machine", str(file), "-o", str(file), "--force"]) == 2
    assert "would overwrite what it is made from" in capsys.readouterr().err
    assert main(["solve", str(file), "--gpus", "4"]) == 2
    assert "this is a machine, a profile is needed here" in capsys.readouterr().err
    assert file.read_text() == text


def test_a_layer_that_was_measured_whole_comes_out_as_measured(tmp_path: Path) -> None:
    file = write(tmp_path, content())
    for tensor, forward, backward in ((1, 3e-4, 7e-4), (2, 2e-4, 5e-4)):
        answer = search_configuration(
            CONFIG,
            machine=file,
            gpus=tensor,
            implementation="transformers",
            tp=tensor,
            micro_batch_size=1,
            recompute="never",
            **ASKED,
        )
        layers = answer.plans[0].layers
        own = layers.block_seconds(False, again=False)
        parameters = sum(layers.block_parameters[False])
        added = layers.costs.memory_seconds(layers.costs.implementation.accumulation * parameters)
        assert own.forward == pytest.approx(forward)
        assert own.backward == pytest.approx(backward + added)


def test_parts_that_are_missing_are_named_and_estimated(tmp_path: Path) -> None:
    """A ratio of 1 is taken where no layer was measured whole; without passes the GPU's bandwidth."""
    begun = content()
    for name in ("whole_layers", "passes", "collectives", "kernels"):
        begun[name] = []
    begun["update"] = None
    plan = pplan.solve(CONFIG, machine=write(tmp_path, begun), **ASKED)
    assert any("not measured yet: kernels, passes, whole_layers, update" in note for note in plan.notes)
    assert plan.prediction.uncertainty == pytest.approx(0.33, abs=0.02)
    begun["device_name"] = begun["links"]["members"][0]["device_name"] = "Abacus"
    with pytest.raises(FileError, match="kernels is empty, and nothing else is known of Abacus"):
        pplan.solve(CONFIG, machine=write(tmp_path, begun), gpus=1, **ASKED)


def test_no_plan_is_below_the_proven_least(tmp_path: Path) -> None:
    """Measured seconds of collectives neither rise with the bytes nor are concave."""
    file = write(tmp_path, content())
    best = pplan.solve(CONFIG, machine=file, **ASKED)
    least = best.prediction.lower_bound_seconds
    steps = []
    for tensor in (1, 2, 4):
        for pipeline in (1, 2, 4):
            if tensor * pipeline <= 4:
                for zero in (0, 1, 3) if pipeline == 1 else (1,):
                    own = pplan.solve(CONFIG, machine=file, tp=tensor, pp=pipeline, zero=zero, **ASKED)
                    steps.append(own.prediction.step_seconds)
    assert min(steps) >= least * (1 - 1e-9)
    assert best.prediction.step_seconds <= min(steps) * (1 + 1e-9)


def test_seconds_and_rate_of_a_curve_never_fall() -> None:
    generator = np.random.default_rng(0)
    for _ in range(50):
        sizes = np.unique(generator.integers(1, 10**6, 6))
        curve = CollectiveCurve(tuple(map(float, sizes)), tuple(generator.random(len(sizes)) + 1e-3))
        bytes = np.geomspace(1, 10**8, 200)
        seconds = np.array([curve.at(each) for each in bytes])
        assert (np.diff(seconds) >= -1e-12).all()
        assert (np.diff(seconds / bytes) <= 1e-12).all()
    rising = CollectiveCurve((10.0, 100.0), (1.0, 4.0))
    assert [rising.at(each) for each in (1, 10, 55, 100, 200)] == pytest.approx([1, 1, 2.5, 4, 8])


def test_a_device_without_a_known_host_link_offloads_only_if_told_its_speed(tmp_path: Path) -> None:
    unknown = machine_file().model_copy(update={"device_name": "Abacus", "links": None, "collectives": []})
    machine = tmp_path / "machine.json"
    unknown.save(machine, force=False)
    with pytest.raises(UsageError, match="how fast Abacus copies"):
        pplan.solve(CONFIG, machine=machine, gpus=1, offload=True, **ASKED)
    with pytest.raises(InfeasibleError) as raised:
        pplan.solve(CONFIG, machine=machine, gpus=1, memory_bytes=2**26, **ASKED)
    assert not any("offload" in change for change in raised.value.details["would_fit"])
    told: dict[str, Any] = {"host_bandwidth": 25e9, "offload": True, "memory_bytes": 2**36}
    assert pplan.solve(CONFIG, machine=machine, gpus=1, **told, **ASKED).training


def test_passes_of_one_size_show_no_bandwidth(tmp_path: Path) -> None:
    twice = [PassTime(bytes=2**20, seconds=4e-6)] * 2
    machine = tmp_path / "machine.json"
    update = {"device_name": "Abacus", "links": None, "collectives": [], "passes": twice}
    machine_file().model_copy(update=update).save(machine, force=False)
    with pytest.raises(FileError, match="passes of one size, and nothing else is known of Abacus"):
        pplan.solve(CONFIG, machine=machine, **ASKED)
