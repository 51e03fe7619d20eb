"""Splits that trainers compute from numbers: Megatron-LM's, against megatron-core where it is installed, and
torchtitan's split points; and slots of losses and predictors on several stages."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from pplan.cost_models.errors import FileError
from pplan.planner.plan_file import Partition, Plan
from pplan.runtimes.documents import TrainerText
from pplan.runtimes.exports import export
from pplan.runtimes.imports import read_partition

MakePlan = Callable[..., Plan]


def names(blocks: int) -> list[str]:
    return [
        "model.embed_tokens",
        *(f"model.layers.{number}" for number in range(blocks)),
        "model.norm",
        "lm_head",
    ]


def read(text: str, blocks: int = 9) -> Partition:
    return read_partition(text, names(blocks), "x")


def ends(blocks: Sequence[int]) -> tuple[int, ...]:
    """The layers before the end of stages with so many blocks."""
    done = [1 + count for count in accumulate(blocks)]
    return (*done[:-1], done[-1] + 2)


MEGATRON = [
    (12, "--num-layers 12 --pipeline-model-parallel-size 4", [3, 3, 3, 3]),
    (12, "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2"
     " --decoder-last-pipeline-num-layers 4", [2, 3, 3, 4]),
    (11, "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 2", [3, 3, 3, 2]),
    (8, "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
     " --decoder-last-pipeline-num-layers 5", [3, 5]),
    (16, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2", [2] * 8),
    (16, "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
     " --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", [1, 3, 3, 1] * 2),
    (10, "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
     " --account-for-loss-in-pipeline-split", [2, 3, 3, 2]),
    (14, "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
     " --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
     [1, 2, 2, 2, 2, 2, 2, 1]),
    (6, "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split"
     " --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 1",
     [0, 1, 1, 1, 1, 1, 1, 0]),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "options", "counts"), MEGATRON)
def test_megatrons_numbers(blocks: int, options: str, counts: list[int]) -> None:
    partition = read(options, blocks)
    virtual = len(counts) // int(options.split("pipeline-model-parallel-size ")[1][0])
    assert partition.ends == ends(counts)
    assert partition.virtual_stages == virtual
    assert partition.schedule == ("interleaved" if virtual > 1 else "1f1b")


@pytest.mark.parametrize(("blocks", "options", "counts"), MEGATRON)
def test_megatron_core_builds_as_many(blocks: int, options: str, counts: list[int]) -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block")
    words = options.split()
    value = {word: int(following) for word, following in pairwise(words) if following.isdigit()}
    size = value["--pipeline-model-parallel-size"]
    virtual = len(counts) // size
    config = SimpleNamespace(
        num_layers=blocks,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=value.get("--decoder-first-pipeline-num-layers"),
        num_layers_in_last_pipeline_stage=value.get("--decoder-last-pipeline-num-layers"),
        account_for_embedding_in_pipeline_split="--account-for-embedding-in-pipeline-split" in words,
        account_for_loss_in_pipeline_split="--account-for-loss-in-pipeline-split" in words,
    )
    built = [
        block.get_num_layers_to_build(config, part if virtual > 1 else None, rank)
        for part in range(virtual)
        for rank in range(size)
    ]
    assert built == counts


SCRIPTS = [
    # As in Megatron-LM's examples/pretrain_gpt_distributed.sh, of earlier versions and of today.
    ("""
GPT_ARGS="
    --num-layers 12 \\
    --pipeline-model-parallel-size 4 \\
    --decoder-first-pipeline-num-layers 2 \\
--decoder-last-pipeline-num-layers 4
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --bf16
""", 12, [2, 3, 3, 4], 1),
    ("""
GPT_MODEL_ARGS=(
    --num-layers 16
    --hidden-size 64
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 4
	--num-layers-per-virtual-pipeline-stage 2
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]}
""", 16, [2] * 8, 2),
    ("""
MODEL_ARGS=(--pipeline-model-parallel-layout "Et*3|t*3|t*3m|mL" --pipeline-model-parallel-size 4)
""", 9, [3, 3, 3, 0], 1),
    # torchtitan's configuration.
    ("""
[training]
global_batch_size = 64
[parallelism]
pipeline_parallel_degree = 3
pipeline_parallel_split_points = ["layers.2", "layers.6"]
pipeline_parallel_schedule = "1F1B"
""", 9, [2, 4, 3], 1),
]  # fmt: skip


@pytest.mark.parametrize(("text", "blocks", "counts", "virtual"), SCRIPTS)
def test_files_written_by_hand(text: str, blocks: int, counts: list[int], virtual: int) -> None:
    partition = read(text, blocks)
    assert (partition.ends, partition.virtual_stages) == (ends(counts), virtual)
    assert partition.schedule == ("interleaved" if virtual > 1 else "1f1b")


ROUND_TRIPS = [
    ("megatron", 12, "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2"
     " --decoder-last-pipeline-num-layers 4"),
    ("megatron-bridge", 16, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"),
    ("torchtitan", 9, "--parallelism.pipeline_parallel_split_points layers.2,layers.6"
     " --parallelism.pipeline_parallel_degree 3"),
    ("megatron", 9, "--pipeline-model-parallel-layout Et*4|t*5mL|L --pipeline-model-parallel-size 3"),
    ("megatron", 9, "--pipeline-model-parallel-layout Et*4|t*4|tm|mL --pipeline-model-parallel-size 4"),
    ("megatron", 16, "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"),
]  # fmt: skip


@pytest.mark.parametrize(("runtime", "blocks", "text"), ROUND_TRIPS)
def test_splits_of_a_trainer_come_back_from_the_export(
    make_decoder_plan: MakePlan, runtime: str, blocks: int, text: str
) -> None:
    """What is read, planned with 2 replicas, exported and read again is the same."""
    partition = read(text, blocks)
    balance = [end - first for first, end in pairwise((0, *partition.ends))]
    virtual = partition.virtual_stages or 1
    plan = make_decoder_plan(balance, virtual=virtual, replicas=2, names=names(blocks))
    document, _ = export(runtime, plan)
    assert isinstance(document, TrainerText)
    for exported in (document.to_json(), document.text(Path("x.sh"))):
        partition_again = read(exported, blocks)
        assert partition_again.ends == partition.ends
        assert (partition_again.virtual_stages, partition_again.replicas) == (virtual, 2)


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=6 x.py --pipeline-model-parallel-size 3", 4),
        ("torchrun --nproc_per_node 12 x.py --pipeline-model-parallel-size 3"
         " --tensor-model-parallel-size 2", 2),
        ("torchrun --nproc-per-node 7 x.py --pipeline-model-parallel-size 3", None),
        ("--parallelism.pipeline_parallel_split_points layers.4 --parallelism.data_parallel_shard_degree 4"
         " --parallelism.data_parallel_replicate_degree 2", 8),
        ("torchrun --nproc-per-node 8 x.py --parallelism.pipeline_parallel_split_points layers.4"
         " --parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree=-1", 4),
    ],
)  # fmt: skip
def test_replicas_follow_from_the_processes(text: str, replicas: int | None) -> None:
    assert read(text).replicas == replicas


def test_what_stands_beside_them() -> None:
    partition = read(
        "torchrun pretrain_gpt.py --num-layers 9 --pipeline-model-parallel-size 3 --micro-batch-size 2"
        " --global-batch-size 64 --recompute-granularity full --recompute-method uniform --bf16"
    )
    assert (partition.samples, partition.mini_batch, partition.recompute) == (2, 64, "always")


@pytest.mark.parametrize(
    "text",
    [
        "model.pipeline_model_parallel_size=3 model.num_layers_in_first_pipeline_stage=2"
        " model.num_layers_in_last_pipeline_stage=4",
        "pipeline_model_parallel_size: 3\nnum_layers_in_first_pipeline_stage: 2\n"
        "num_layers_in_last_pipeline_stage: 4\naccount_for_loss_in_pipeline_split: false",
        json.dumps(
            {"model": {"pipeline_model_parallel_size": 3, "num_layers_in_first_pipeline_stage": 2,
                       "num_layers_in_last_pipeline_stage": 4}}
        ),
    ],
)  # fmt: skip
def test_megatron_bridges_names(text: str) -> None:
    assert read(text).ends == ends([2, 3, 4])


HUGE = 10**15


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("--num-layers 12 --pipeline-model-parallel-size 3", "num_layers is 12, the profile has 9"),
        ("--pipeline-model-parallel-size 4", "9 layers do not divide among 4 pipeline ranks"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3"
         " --decoder-last-pipeline-num-layers 3", "3 layers do not divide among 0 pipeline ranks"),
        ("--pipeline-model-parallel-size 1 --decoder-first-pipeline-num-layers 3"
         " --decoder-last-pipeline-num-layers 6", "0 layers do not divide among"),
        ("--pipeline-model-parallel-size 3 --num-layers-per-virtual-pipeline-stage 2", "no multiple of 2"),
        ("--pipeline-model-parallel-size 3 --decoder-first-pipeline-num-layers 3"
         " --num-layers-per-virtual-pipeline-stage 3", "are given"),
        ("--pipeline-model-parallel-size 5 --account-for-loss-in-pipeline-split"
         " --decoder-first-pipeline-num-layers 2", "counts as a layer"),
        ("--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4"
         " --num-virtual-stages-per-pipeline-rank 2", "4, 5 layers by rank do not divide into 2"),
        ("--pipeline-model-parallel-size many", "pipeline_model_parallel_size is 'many'"),
        ("pipeline_model_parallel_size: [3", "it is no YAML"),
        ("a: &a [x, x]\nb: [*a, *a]\npipeline_model_parallel_size: 3", "has references"),
        (f"--pipeline-model-parallel-size {HUGE}", f"{HUGE} pipeline ranks .* more than the 9 layers"),
        (f"--pipeline-model-parallel-size {HUGE} --decoder-first-pipeline-num-layers 9", "than the 9"),
        (f"--pipeline-model-parallel-size 3 --num-virtual-stages-per-pipeline-rank {HUGE}", "than the 9"),
    ],
)  # fmt: skip
def test_numbers_that_megatron_refuses(options: str, why: str) -> None:
    with pytest.raises(FileError, match=why):
        read(options)


@pytest.mark.parametrize(
    "text",
    [
        "--parallelism.pipeline_parallel_split_points layers.2,layers.6 --x.pipeline_parallel_degree 3",
        "--experimental.pipeline_parallel_split_points=layers.2,layers.6",
        "[parallelism]\npipeline_parallel_degree=3\npipeline_parallel_split_points=['layers.2', 'layers.6']",
        json.dumps({"experimental": {"pipeline_parallel_split_points": ["layers.2", "layers.6"]}}),
        "pipeline_parallel_split_points: ['layers.2', 'layers.6']",
    ],
)
def test_torchtitans_split_points(text: str) -> None:
    """Each begins a stage; the embedding is on the first, norm and head on the last."""
    assert read(text).ends == ends([2, 4, 3])


def test_split_points_with_a_schedule() -> None:
    text = (
        "--parallelism.pipeline_parallel_split_points layers.2,layers.4,layers.6"
        " --parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule Interleaved1F1B"
    )
    partition = read(text)
    assert (partition.ends, partition.virtual_stages) == (ends([2, 2, 2, 3]), 2)
    assert partition.schedule == "interleaved"


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ("layers.9", "split point layers.9: no layer"),
        ("layers.4,layers.2", "stage 1 holds no layer"),
        ("tok_embeddings,layers.2", "stage 0 holds no layer"),
    ],
)
def test_points_that_make_no_stages(points: str, why: str) -> None:
    with pytest.raises(FileError, match=why):
        read(f"--parallelism.pipeline_parallel_split_points {points}")


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        ("Et*4|t*5|m|mL", [4, 5, 0]),
        ("Et*4|t*5m|L|L", [4, 5, 0]),
        ("Et*4|t*4|tL|mL", [4, 4, 1, 0]),
        ("Et*4|t*5|mL|mLL", [4, 5, 0]),
    ],
)
def test_losses_and_predictors_on_several_stages(layout: str, counts: list[int]) -> None:
    """The slots of predictors are no layers of the profile; the head is on the last stage."""
    partition = read(layout)
    assert partition.ends == ends(counts)
    assert "on several stages" in partition.notes[0]


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("Et*4|t*5L|L", "L stands 2 times"),
        ("Et*4|mt*5|mL", "a transformer block"),
        ("Et*4|t*5|mLLL", "L stands 3"),
    ],
)
def test_slots_that_no_trainer_takes(layout: str, why: str) -> None:
    with pytest.raises(FileError, match=why):
        read(layout)
