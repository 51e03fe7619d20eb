"""Plans by degrees for training programs: torchtitan's own command line and Megatron-LM's rules read them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import pplan
from pplan import ExportError, Plan
from pplan.cost_models.transformer.layer_work import LEAST_OFFLOADED
from pplan.runtimes.degree_exports import (
    DegreeRequest,
    degree_request,
    megatron_arguments,
    megatron_bridge_overrides,
    nemo_automodel_sections,
    torchtitan_arguments,
    torchtitan_remarks,
)
from pplan.runtimes.documents import TorchtitanExport

pytestmark = pytest.mark.filterwarnings("ignore:.*code with Transformer Engine:UserWarning")
MODEL = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 16,
    "vocab_size": 128256,
}


def solved(**options: Any) -> Plan:
    return pplan.solve(MODEL, gpus=16, gpu="b200", mini_batch=64, micro_batch_size=(2,), **options)


def requests(plan: Plan) -> list[DegreeRequest]:
    """The plan and its alternatives on their way to a trainer."""
    assert plan.training is not None
    rows = [(choice, choice.degrees) for choice in (plan.row, *plan.alternatives)]
    return [DegreeRequest(plan, choice, plan.training, degrees) for choice, degrees in rows if degrees]


def the_request(plan: Plan) -> DegreeRequest:
    assert plan.training is not None
    return degree_request(plan, plan.training)


@pytest.fixture
def read_arguments() -> Any:
    """torchtitan's reader of its sections; importing it warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tyro = pytest.importorskip("tyro")
        manager = pytest.importorskip("torchtitan.config.manager", exc_type=ImportError)
        sections = pytest.importorskip("torchtitan.config")
        recomputing = pytest.importorskip("torchtitan.distributed.activation_checkpoint")
        kind = dataclasses.make_dataclass(
            "Sections",
            [
                (name, own, dataclasses.field(default_factory=own))
                for name, own in (
                    ("parallelism", sections.ParallelismConfig),
                    ("training", sections.TrainingConfig),
                    ("compile", sections.CompileConfig),
                )
            ]
            + [("activation_checkpoint", recomputing.ActivationCheckpointingConfig, None)],
        )
        manager.ConfigManager()

        def read(arguments: list[str]) -> Any:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return tyro.cli(kind, args=arguments, registry=manager.custom_registry)

        yield read


@pytest.mark.parametrize(
    "options",
    [
        {"tp": (2,), "pp": (2,), "recompute": "full", "virtual_stages": (1,)},
        {"tp": (2,), "pp": (4,), "recompute": "none", "virtual_stages": (2,)},
        {"tp": (4,), "pp": (1,), "zero": (3,), "recompute": "full"},
        {"tp": (1,), "pp": (1,), "zero": (2,), "recompute": "selective"},
        {"tp": (1,), "pp": (8,), "zero": (0,), "recompute": "none", "virtual_stages": (1,)},
        {"implementation": "torchtitan", "tp": (2,), "pp": (2,), "virtual_stages": (4,), "recompute": "none"},
        {"implementation": "torchtitan", "tp": (2,), "pp": (1,), "recompute": "selective"},
    ],
)
def test_torchtitan_reads_its_arguments(read_arguments: Any, options: dict[str, Any]) -> None:
    plan = solved(**options)
    degrees = plan.degrees
    assert degrees is not None
    samples = plan.micro_batch_size // degrees.data
    document = pplan.export("torchtitan", plan)
    assert isinstance(document, TorchtitanExport)
    config = read_arguments(document.arguments)
    is_costed = options.get("implementation") == "torchtitan"
    assert (config.compile.enable, bool(document.warnings)) == (is_costed, not is_costed)
    own, training = config.parallelism, config.training
    assert (own.tensor_parallel_degree, own.pipeline_parallel_degree) == (degrees.tensor, degrees.pipeline)
    shared, copies = own.data_parallel_shard_degree, own.data_parallel_replicate_degree
    assert (shared, copies) == ((degrees.data, 1) if degrees.zero else (1, degrees.data))
    # What it adds up: all micro-batches of a pipeline at once, else as often as the global batch needs.
    assert training.global_batch_size == 64
    steps, left = divmod(64, training.local_batch_size * shared * copies)
    inside = training.local_batch_size // samples if degrees.pipeline > 1 else 1
    assert (steps * inside, left) == (plan.micro_batches, 0)
    assert type(config.activation_checkpoint).__qualname__.startswith(
        {"always": "FullAC", "selective": "SelectiveAC", "never": "None"}[degrees.recompute]
    )
    if degrees.pipeline > 1:
        parts = own.module_fqns_per_model_part
        assert own.pipeline_parallel_microbatch_size == samples
        assert own.pipeline_parallel_schedule == ("1F1B" if plan.virtual_stages == 1 else "Interleaved1F1B")
        assert len(parts) == degrees.pipeline * plan.virtual_stages
        names = [name for part in parts for name in part]
        assert names == ["tok_embeddings", *(f"layers.{n}" for n in range(16)), "norm", "lm_head"]
    else:
        assert own.fsdp_reshard_after_forward == ("always" if degrees.zero == 3 else "never")


def test_fsdp_in_a_pipeline() -> None:
    """With 4 virtual stages torch reshards one; with 4 gathered, which torch 2.14 cannot, none."""
    options: dict[str, Any] = {"tp": (2,), "pp": (2,), "virtual_stages": (4,), "recompute": "none"}
    plans = {
        most: solved(implementation="torchtitan", max_param_unsharded_stages=(most,), **options)
        for most in (2, 3, 4)
    }
    assert [own.degrees.zero for own in plans.values() if own.degrees] == [3, 3, 1]
    weights = {most: max(stage.memory["weights"] for stage in own.stages) for most, own in plans.items()}
    assert weights[2] < weights[3] < weights[4]
    flag = "--parallelism.pipeline_parallel_max_param_unsharded_stages"
    for most, own in plans.items():
        arguments = torchtitan_arguments(the_request(own))
        assert (flag in arguments) == (most != 3)
        assert flag not in arguments or arguments[arguments.index(flag) + 1] == str(most)
        remarks = torchtitan_remarks(the_request(own))
        assert [text for text in remarks if "later torch" in text] == remarks
        assert bool(remarks) == (most != 3)
    kept = solved(zero=(1,), **options)
    assert "gather others again" in " ".join(torchtitan_remarks(the_request(kept)))
    with pytest.raises(pplan.UsageError, match="only 3 keep their weights"):
        solved(implementation="torchtitan", zero=(1,), **options)


def test_nemo_automodel_reduces_as_the_plan_does() -> None:
    cases: list[tuple[dict[str, Any], dict[str, bool]]] = [
        ({"pp": (1,), "zero": (3,)}, {"reshard_after_forward": True, "defer_fsdp_grad_sync": False}),
        ({"pp": (1,), "zero": (2,)}, {"reshard_after_forward": False, "defer_fsdp_grad_sync": False}),
        ({"pp": (2,), "zero": (2,)}, {"reshard_after_forward": False, "defer_fsdp_grad_sync": False}),
    ]
    for options, says in cases:
        plan = solved(implementation="transformers", tp=(2,), recompute="full", **options)
        sections = nemo_automodel_sections(the_request(plan))["distributed"]
        assert {name: sections[name] for name in says} == says


def test_where_torchtitan_differs() -> None:
    request = the_request(solved(tp=(2,), pp=(1,), zero=(1,), recompute="selective"))
    assert [text.split(" ")[0] for text in torchtitan_remarks(request)] == ["torchtitan", "torchtitan's"]
    assert not torchtitan_remarks(
        the_request(solved(tp=(2,), pp=(2,), virtual_stages=(1,), recompute="never"))
    )


@pytest.mark.parametrize(
    "options",
    [
        {"tp": (2,), "pp": (4,), "virtual_stages": (2,), "recompute": "partial"},
        {"tp": (1,), "pp": (2,), "cp": (2,), "virtual_stages": (1,), "recompute": "full"},
    ],
)
def test_megatron_bridge_says_what_megatron_does(options: dict[str, Any]) -> None:
    """Each flag with a value is the override of its name; the last word of a configuration's key."""
    plan = solved(**options)
    request = the_request(plan)
    flags = megatron_arguments(request)
    words = [each.partition("=") for each in megatron_bridge_overrides(request)]
    overrides = {name.rpartition(".")[2]: value for name, _, value in words}
    for flag, value in itertools.pairwise(flags):
        name = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and not value.startswith("--") and "per_virtual" not in name:
            assert overrides[name] == value
    assert overrides["sequence_parallel"] == str("--sequence-parallel" in flags).lower()
    assert overrides.get("virtual_pipeline_model_parallel_size", "1") == str(plan.virtual_stages)
    if options["recompute"] == "partial":
        assert overrides["recompute_method"] == "block"
        assert 0 < int(overrides["recompute_num_layers"]) < 16


@pytest.mark.parametrize("virtual", [1, 2])
def test_megatron_takes_layouts_with_predictors(layout_class: Any, virtual: int) -> None:
    plan = solved(tp=(2,), pp=(4,), recompute="always", predictors=2, virtual_stages=(virtual,))
    for request in requests(plan):
        flags = megatron_arguments(request)
        values = dict(itertools.pairwise(flags))
        assert values["--mtp-num-layers"] == "2"
        assert values["--recompute-num-layers"] == "1"
        layout = layout_class(values["--pipeline-model-parallel-layout"], 4)
        layout.validate_layer_layout(num_layers=16, mtp_num_layers=2)
        assert layout.virtual_pipeline_model_parallel_size == virtual


@pytest.mark.parametrize(
    "options",
    [
        {"tp": (2,), "pp": (4,), "virtual_stages": (2,), "recompute": "full"},
        {"tp": (4,), "pp": (1,), "zero": (3,), "recompute": "selective"},
        {"tp": (2,), "pp": (2,), "cp": (2,), "zero": (0,), "recompute": "none"},
    ],
)
def test_sections_of_nemo_automodel(options: dict[str, Any]) -> None:
    """As many processes as devices, as many sequences as the batch has, every module once; its recipe's
    reader takes `activation_checkpointing` as a truth value or selective."""
    for request in requests(solved(**options)):
        sections, choice = nemo_automodel_sections(request), request.choice
        own, batches = sections["distributed"], sections["step_scheduler"]
        sizes = [own[f"{name}_size"] for name in ("tp", "cp", "pp", "dp")]
        assert math.prod(sizes) == 16
        assert own["dp_size"] % own["dp_replicate_size"] == 0
        assert batches["global_batch_size"] == 64
        steps = 64 / (batches["local_batch_size"] * own["dp_size"])
        assert steps == (1 if own["pp_size"] > 1 else choice.micro_batches)
        checkpointing = {"never": False, "always": True, "selective": "selective"}
        assert own["activation_checkpointing"] == checkpointing[request.degrees.recompute]
        if own["pp_size"] > 1:
            parts = own["pipeline"]["module_fqns_per_model_part"]
            assert len(parts) == own["pp_size"] * choice.virtual_stages
            names = [name for part in parts for name in part if not name.endswith("rotary_emb")]
            blocks = [f"model.layers.{n}" for n in range(16)]
            assert names == ["model.embed_tokens", *blocks, "model.norm", "lm_head"]


@cache
def offload_plan() -> Plan:
    """Of a model with experts, in memory that only plans with offload fit."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    plan = pplan.solve(
        {**MODEL, **experts, "model_type": "mixtral", "vocab_size": 32000},
        gpus=16,
        gpu="a100-80gb",
        memory_bytes=40 * 2**30,
        mini_batch=64,
        micro_batch_size=(1,),
        sequence=8192,
        tp=(2,),
        pp=(2,),
        cp=(1,),
        ep=(8,),
        virtual_stages=(2,),
        recompute="none",
        offload=True,
    )
    assert {request.degrees.recompute for request in requests(plan)} == {"offload"}
    return plan


@pytest.mark.slow
def test_arguments_of_offload() -> None:
    """Megatron-LM's modules of attention, and of experts where there are some; others keep all."""
    plan = offload_plan()
    request = the_request(plan)
    flags = megatron_arguments(request)
    modules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
    start = flags.index("--offload-modules")
    assert flags[start - 1 :] == ["--fine-grained-activation-offloading", "--offload-modules", *modules]
    assert "--recompute-granularity" not in flags
    training = request.training.model_copy(update={"active_parameters": request.training.parameters})
    dense = dataclasses.replace(request, training=training)
    assert megatron_arguments(dense)[start - 1 :] == flags[start - 1 : -3]
    overrides = megatron_bridge_overrides(request)
    assert f"model.offload_modules=[{','.join(modules)}]" in overrides
    assert "model.fine_grained_activation_offloading=true" in overrides
    assert torchtitan_arguments(request)[-1] == "activation_checkpoint:none"
    assert nemo_automodel_sections(request)["distributed"]["activation_checkpointing"] is False
    assert "offloads no activations" in torchtitan_remarks(request)[0]
    assert (plan.stages[0].host_bytes or 0) > 0
    assert any("85 %" in note and "nothing was measured" in note for note in plan.notes)
    with pytest.warns(UserWarning, match="NVTE_CPU_OFFLOAD_V1"):
        pplan.export("megatron", plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_megatron_takes_the_modules() -> None:
    """Of a pipeline; `cpu_offloading`, which would offload whole layers, it refuses there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = pytest.importorskip("megatron.core.transformer.transformer_config", exc_type=ImportError)
    sizes: dict[str, Any] = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.bfloat16}
    flags = megatron_arguments(the_request(offload_plan()))
    modules = flags[flags.index("--offload-modules") + 1 :]
    own = core.TransformerConfig(**sizes, fine_grained_activation_offloading=True, offload_modules=modules)
    assert own.min_offloaded_tensor_size == LEAST_OFFLOADED
    with pytest.raises(ValueError, match="no support for Pipeline parallelism"):
        core.TransformerConfig(**sizes, cpu_offloading=True, cpu_offloading_num_layers=4)


MEGATRON_SCRIPTS_OWN = {
    "micro_batch_size", "global_batch_size", "seq_length", "ckpt_format",
    "num_layers_per_virtual_pipeline_stage",
}  # fmt: skip
"""Arguments that Megatron-LM's training scripts read, which megatron-core does not come with."""
EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {"tp": (2,), "pp": (4,), "virtual_stages": (2,), "recompute": "partial"}),
        ({}, {"tp": (1,), "pp": (2,), "cp": (2,), "virtual_stages": (1,), "recompute": "full"}),
        ({}, {"cp": (2,), "pp": (1,), "context_exchange": "ring", "recompute": "selective"}),
        ({}, {"tp": (2,), "pp": (1,), "zero": (3,)}),
        (EXPERTS, {"ep": (8,), "tp": (2,), "pp": (1,), "zero": (0,), "recompute": "none"}),
        (EXPERTS, {"ep": (4,), "pp": (2,), "virtual_stages": (4,), "recompute": "full"}),
    ],
    ids=str,
)
def test_megatron_core_has_each_option(model: dict[str, Any], options: dict[str, Any]) -> None:
    """As a field of one of the configurations that Megatron-LM makes of its arguments, by the same name."""
    names = set(MEGATRON_SCRIPTS_OWN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, kind in (
            ("transformer.transformer_config", "TransformerConfig"),
            ("distributed.distributed_data_parallel_config", "DistributedDataParallelConfig"),
            ("optimizer.optimizer_config", "OptimizerConfig"),
        ):
            core = pytest.importorskip(f"megatron.core.{module}", exc_type=ImportError)
            names |= {field.name for field in dataclasses.fields(getattr(core, kind))}
    plan = pplan.solve(
        {**MODEL, **model}, gpus=16, gpu="b200", mini_batch=64, micro_batch_size=(2,), **options
    )
    flags = [word for word in megatron_arguments(the_request(plan)) if word.startswith("--")]
    assert len(flags) > 5
    own = {flag.removeprefix("--").removeprefix("no-").replace("-", "_") for flag in flags}
    assert own <= names


def test_megatrons_fsdp() -> None:
    document = pplan.export("megatron", solved(tp=(2,), pp=(1,), zero=(3,)))
    flags = document.arguments  # type: ignore[attr-defined]
    assert flags[flags.index("--data-parallel-sharding-strategy") + 1] == "optim_grads_params"
    assert flags[flags.index("--ckpt-format") + 1] == "fsdp_dtensor"
    assert {"--use-megatron-fsdp", "--use-distributed-optimizer"} < set(flags)


def test_exports_carry_the_degrees_and_say_whose_code_is_costed(tmp_path: Path) -> None:
    """The second line of a file for another trainer is the warning."""
    plan = solved(tp=(2,), pp=(2,), recompute="never", virtual_stages=(1,))
    for runtime in ("megatron", "megatron-bridge", "torchtitan", "nemo-automodel"):
        document = pplan.export(runtime, plan)
        assert document.step_seconds == plan.prediction.step_seconds
        file = tmp_path / "file.txt"
        document.save(file, force=True)
        second = file.read_text().splitlines()[1]
        assert second.startswith("# Warning: the plan's seconds and bytes are those of megatron's code") == (
            not runtime.startswith("megatron")
        )
    for runtime in ("torch", "torchgpipe", "deepspeed", "huggingface"):
        with pytest.raises(ExportError, match="from a configuration"):
            pplan.export(runtime, plan)


def test_a_stage_without_a_layer_is_for_megatron_alone() -> None:
    model = {**MODEL, "num_hidden_layers": 2}
    plan = pplan.solve(
        model, gpus=4, gpu="h100", pp=(4,), virtual_stages=(2,), mini_batch=16, recompute="never"
    )
    assert 0 in plan.balance
    pplan.export("megatron", plan)
    for runtime in ("torchtitan", "nemo-automodel"):
        with pytest.raises(ExportError, match="has no layer"):
            pplan.export(runtime, plan)


def test_of_degrees_by_stage_the_fastest_with_equal_degrees_is_exported() -> None:
    wide = {"hidden_size": 3584, "num_attention_heads": 16, "num_hidden_layers": 42, "vocab_size": 256000}
    few: dict[str, Any] = {"tp": (2, 4), "pp": (2,), "cp": (1,), "micro_batch_size": (1, 2)}
    few |= {"virtual_stages": (1,), "recompute": "never", "mini_batch": 64}
    plan = pplan.solve({**MODEL, **wide}, gpus=8, gpu="a100-40gb", by_stage=True, **few)
    assert plan.degrees is None
    with pytest.warns(UserWarning, match="Exported instead the fastest alternative: TP 4"):
        document = pplan.export("megatron", plan)
    assert document.step_seconds == min(row.step_seconds for row in plan.alternatives)
