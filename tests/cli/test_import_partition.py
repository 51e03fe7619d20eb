"""`pplan import`: other tools' partitions as plans, which the other verbs take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pplan

Run = Callable[..., Any]
NAMES = ["embed", *(f"layers.{n}" for n in range(6)), "norm", "head"]


@pytest.fixture
def decoder_file(here: Path) -> Path:
    """Of a decoder with six blocks, at two sizes."""

    def layer(name: str) -> dict[str, Any]:
        costs = [
            {
                "micro_batch_size": size,
                "forward_seconds": 0.001 * size,
                "backward_seconds": 0.002 * size,
                "output_bytes": 1000 * size,
                "saved_bytes": 2000 * size,
                "workspace_bytes": 0,
                "spread": 0.0,
            }
            for size in (2, 4)
        ]
        return {
            "name": name,
            "kind": "Linear",
            "parameter_bytes": 4000,
            "buffer_bytes": 0,
            "cut_after": name != "head",
            "costs": costs,
        }

    content = {
        "schema": 1,
        "model": "toy",
        "device": "cpu",
        "dtype": "float32",
        "estimated": False,
        "layers": [layer(name) for name in NAMES],
        "edges": [],
        "whole": [],
    }
    path = here / "toy.profile.json"
    path.write_text(json.dumps(content))
    return path


MACHINE = ("--memory", "1GiB", "--bandwidth", "10GB/s", "--latency", "5us")


def imported(run: Run, *arguments: str) -> dict[str, Any]:
    ran = run("import", *arguments, *MACHINE, "--json")
    assert ran.status == 0, ran.err
    plan = json.loads(ran.out)
    assert isinstance(plan, dict)
    return plan


@pytest.mark.parametrize(
    ("partition", "balance"),
    [
        ("4,5", [4, 5]),
        ("0,4,9", [4, 5]),
        ("Et*3|t*3L", [4, 5]),
        ("9", [9]),
        (
            '[["embed","layers.0"],["layers.1","layers.2","layers.3","layers.4","layers.5","norm","head"]]',
            [2, 7],
        ),
    ],
)
def test_a_partition_on_the_command_line(
    run: Run, decoder_file: Path, partition: str, balance: list[int]
) -> None:
    plan = imported(run, partition, "--mini-batch", "16")
    assert (plan["balance"], plan["gpus"]) == (balance, len(balance))
    assert plan["profile"]["file"] == decoder_file.name
    assert json.loads(Path("toy.imported.plan.json").read_text())["balance"] == balance


@pytest.mark.parametrize(
    ("arguments", "balance", "recompute"),
    [
        ("--pipeline-model-parallel-layout Et*3|t*3L --recompute-granularity full", [4, 5], "always"),
        ("--pipeline-model-parallel-layout=Et*3|t*3L", [4, 5], "never"),
        ("--micro-batch-size 2\n--pipeline-model-parallel-layout Et|t*5L", [2, 7], "never"),
        (
            "--parallelism.module_fqns_per_model_part tok_embeddings,layers.0 layers.1,layers.2,layers.3,"
            "layers.4,layers.5,norm,output --parallelism.pipeline_parallel_degree 2 "
            "activation_checkpoint:full",
            [2, 7],
            "always",
        ),
    ],
)
def test_a_trainers_arguments_in_one_word(
    run: Run, decoder_file: Path, arguments: str, balance: list[int], recompute: str
) -> None:
    """They begin with dashes, and need no ` -- ` before them."""
    assert decoder_file.is_file()
    plan = imported(run, arguments, "--mini-batch", "16")
    assert (plan["balance"], plan["recompute"], plan["mini_batch"]) == (balance, recompute, 16)


@pytest.mark.parametrize("words", [("--mini-bach", "16"), ("--mini-bach=16",)])
def test_an_unknown_option_is_no_partition(run: Run, decoder_file: Path, words: tuple[str, ...]) -> None:
    assert decoder_file.is_file()
    ran = run("import", *words, "4,5", *MACHINE)
    assert ran.status == 2
    assert "no such option: --mini-bach" in ran.err
    assert "Did you mean --mini-batch" in ran.err


def test_a_file_and_the_verbs_after_it(run: Run, decoder_file: Path) -> None:
    assert decoder_file.is_file()
    Path("flags.sh").write_text(
        "--pipeline-model-parallel-layout 'Et*2|t|t|t*2L' --pipeline-model-parallel-size 2 "
        "--micro-batch-size 2 --global-batch-size 16"
    )
    plan = imported(run, "flags.sh")
    assert (plan["schedule"], plan["virtual_stages"], plan["micro_batches"]) == ("interleaved", 2, 8)
    assert [stage["devices"] for stage in plan["stages"]] == [[0], [1], [0], [1]]
    shown = run("show", "toy.imported.plan.json")
    assert "as given: " in shown.out.splitlines()[0]
    assert "fastest" not in shown.out
    simulated = run("simulate", "toy.imported.plan.json", "--json")
    assert simulated.status == 0, simulated.err
    assert json.loads(simulated.out)["step_seconds"] == pytest.approx(plan["prediction"]["step_seconds"])
    again = run("export", "megatron", "toy.imported.plan.json", "-o", "again.sh")
    assert again.status == 0, again.err
    assert "--pipeline-model-parallel-layout 'Et*2|t|t|t*2L'" in Path("again.sh").read_text()
    assert again.out == Path("again.sh").read_text()


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (("",), "is no partition, and no file", "12,34"),
        (("nothing.txt",), "nothing.txt: no such costs or partition file", ""),
        (("4,5", "--granularity", "fine"), "--granularity: 4,5 is a partition", "Omit it"),
        (("4,4",), "4,4: the balance adds up to 8 layers, the profile has 9", "--profile FILE"),
        (("4,5", "--gpus", "1"), "--gpus 1: the partition needs 2 devices", "--gpus 2"),
        (("4,5", "--replicas", "0"), "--replicas 0: must be at least 1", ""),
        (("4,5", "--virtual-stages", "3"), "--virtual-stages 3: 4,5 has 2 stages", "divides"),
        (("4,5", "--schedule", "1f1bb"), "--schedule 1f1bb: not known", "1f1b"),
        (("4,5", "--micro-batches", "3", "--mini-batch", "16"), "does not divide the global batch of 16", ""),
    ],
)
def test_refusals(run: Run, decoder_file: Path, arguments: tuple[str, ...], what: str, hint: str) -> None:
    assert decoder_file.is_file()
    ran = run("import", *arguments, *MACHINE)
    assert (ran.status, ran.out) == (2, "")
    assert what in ran.err
    assert hint in ran.err
    assert not Path("toy.imported.plan.json").exists()


def test_from_python(decoder_file: Path) -> None:
    machine: dict[str, Any] = {"memory_bytes": 2**30, "bandwidth": 10e9, "latency": 5e-6}
    plan = pplan.import_plan("4,5", decoder_file, mini_batch=16, schedule="gpipe", micro_batches=8, **machine)
    assert (plan.balance, plan.schedule, plan.micro_batches) == ([4, 5], "gpipe", 8)
    document = pplan.export("torchgpipe", plan)
    document.save("toy.torchgpipe.json", force=False)
    again = pplan.import_plan(Path("toy.torchgpipe.json"), decoder_file, **machine)
    assert (again.balance, again.micro_batches, again.runtime) == ([4, 5], 8, "torchgpipe")
    with pytest.raises(pplan.UsageError, match="source=12: is not a text"):
        pplan.import_plan(12, decoder_file)  # type: ignore[arg-type]
    with pytest.raises(pplan.FileError, match="no such partition file"):
        pplan.import_plan(Path("4,5"), decoder_file)


UNLIKE = """
[[device]]
name = "slow"
count = 1
[[device]]
name = "fast"
count = 2
speed = 4.0
[[level]]
name = "node"
bandwidth = "10GB/s"
"""


@pytest.mark.parametrize(
    ("runtime", "schedule"), [("torchgpipe", "gpipe"), ("deepspeed", "1f1b"), ("huggingface", "naive")]
)
def test_an_export_keeps_its_devices(profile: Path, here: Path, runtime: str, schedule: str) -> None:
    """On devices of several kinds a plan may leave the first one free."""
    (here / "unlike.toml").write_text(UNLIKE)
    machine: dict[str, Any] = {"gpus": 3, "mini_batch": 16, "topology": "unlike.toml"}
    plan = pplan.solve(profile, runtime=runtime, schedule=schedule, **machine)
    used = [rank for stage in plan.stages for rank in stage.devices]
    assert used[0] > 0
    pplan.export(runtime, plan).save(here / "exported.json", force=False)
    again = pplan.import_plan(here / "exported.json", profile, **machine)
    assert [stage.devices for stage in again.stages] == [stage.devices for stage in plan.stages]
    assert again.prediction.step_seconds == pytest.approx(plan.prediction.step_seconds)
    few = pplan.import_plan(here / "exported.json", profile, gpus=len(used), bandwidth=1e10)
    assert [rank for stage in few.stages for rank in stage.devices] == list(range(len(used)))
    words = f"it names the devices {', '.join(map(str, used))}, of a machine with more than {len(used)}"
    assert any(note.startswith(words) for note in few.notes)


def test_stages_that_recompute_differently(decoder_file: Path) -> None:
    """As the document says, where there is memory for none to recompute, too; a runtime that recomputes all
    stages in one way is refused."""
    machine: dict[str, Any] = {"gpus": 3, "bandwidth": 10e9, "latency": 5e-6, "memory_bytes": 2**30}
    plan = pplan.import_plan(
        "3,3,3", decoder_file, mini_batch=16, runtime="torch", schedule="gpipe", **machine
    )
    document = json.loads(pplan.export("torch", plan).to_json()) | {"recompute": ["always", "never", "never"]}
    path = decoder_file.with_name("mixed.torch.json")
    path.write_text(json.dumps(document))
    mixed = pplan.import_plan(path, decoder_file, **machine)
    assert [stage.recompute for stage in mixed.stages] == ["always", "never", "never"]
    assert pplan.lint(mixed, decoder_file).agrees
    work = [own.forward_seconds + own.backward_seconds for own in mixed.stages]
    plain = [own.forward_seconds + own.backward_seconds for own in plan.stages]
    assert work == pytest.approx([plain[0] + plan.stages[0].forward_seconds, *plain[1:]])
    with pytest.raises(pplan.UsageError, match="recomputes all stages in one way"):
        pplan.import_plan(path, decoder_file, runtime="torchgpipe", **machine)
    alike = pplan.import_plan(path, decoder_file, recompute="never", **machine)
    assert alike.recompute == "never"


def test_too_few_gpus_for_layers_that_two_share(run: Run, here: Path) -> None:
    """In GPUs, as they were given, and not in groups of them."""
    names = "name,forward_ms,backward_ms,activation_mb,parameter_mb"
    rows = "".join(f"layers.{n},1,2,3,4\n" for n in range(4))
    (here / "costs.csv").write_text(f"{names}\n{rows}")
    assert run("import", "costs.csv", "--tp", "2", "-o", "costs.profile.json").status == 0
    asked = ("import", "2,2", "--profile", "costs.profile.json", "--gpus")
    ran = run(*asked, "2", *MACHINE)
    assert "--gpus 2: the partition needs 2 devices, which 2 GPUs share each" in ran.err
    assert "--gpus 4" in ran.err
    assert run(*asked, "4", *MACHINE).status == 0
