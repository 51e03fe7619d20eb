"""The export of a plan to each runtime: the plan itself, or the best alternative in its file.

Sources: megatron-core's `transformer/pipeline_parallel_layer_layout.py` and
`transformer/transformer_config.py`, Megatron-LM's `megatron/training/arguments.py`; torchtitan's
`distributed/pipeline_parallel.py` and `config/configs.py`; NeMo Automodel's `recipes/_dist_utils.py` and
`components/distributed/pipelining`; transformers' `integrations/accelerate.py`, accelerate's
`utils/modeling.py` (check_device_map).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd
from pathlib import Path
from typing import Any, TypeVar, cast

from ..cost_models.document import MadeBy
from ..cost_models.errors import ExportError, UsageError
from ..cost_models.memory import recompute_kinds
from ..cost_models.runtime import RUNTIMES, Runtime, find_runtime, other_layers_warning
from ..planner.plan_file import Plan, PlanRow
from .choice import choose
from .documents import (
    DeepspeedExport,
    ExportDocument,
    HuggingfaceExport,
    LayoutExport,
    NemoExport,
    PipeExport,
    TorchExport,
    TorchtitanExport,
    count_nodes,
    document_class,
    hash_layers,
    stage_bounds,
)
from .torch_actions import OWN_ORDER, action_rows, build_program, device_stages, schedule_class
from .trainer_words import (
    DISTRIBUTED_OPTIMIZER,
    WORDS,
    ModuleNames,
    write_flags,
    write_layout,
    write_overrides,
)
from .transformer_blocks import (
    Transformer,
    blocks_or_none,
    check_whole_blocks,
    count_first_blocks,
    ends_remark,
    find_plan_blocks,
    is_decoder,
    is_small,
)


@dataclass(frozen=True)
class ExportRequest:
    """A choice on its way to a runtime's file.

    `remark` says why it is not the plan itself. `device` "cpu" puts all stages on the CPU. `made_by` goes
    into the file.
    """

    plan: Plan
    runtime: Runtime
    choice: PlanRow
    remark: str | None
    device: str
    made_by: MadeBy

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that the document of every runtime has."""
        choice = self.choice
        return {
            "runtime": self.runtime.name,
            "model": self.plan.model,
            "layers_sha256": hash_layers(self.plan),
            "mini_batch": choice.micro_batches * choice.micro_batch_size,
            "micro_batch_size": choice.micro_batch_size,
            "step_seconds": choice.step_seconds,
            "estimated": self.plan.profile.estimated,
            "made_by": self.made_by,
        }

    @property
    def trainer_fields(self) -> dict[str, Any]:
        """The fields that every TrainerText has, but `actions`."""
        plan, choice = self.plan, self.choice
        sharers = plan.profile.tensor_parallel
        return self.fields | {
            "processes": self.pipeline_size * choice.replicas[0] * sharers,
            "nodes": count_nodes(choice.ranks, plan.gpus_per_node),
            "pipeline_size": self.pipeline_size,
            "replicas": choice.replicas[0],
            "order": choice.schedule,
            "virtual_stages": choice.virtual_stages,
            "recompute": choice.part_recompute[0],
        }

    @property
    def pipeline_size(self) -> int:
        """Devices of the pipeline."""
        return self.choice.pipeline_stages

    @property
    def replica_samples(self) -> int:
        """Samples of a micro-batch on one replica."""
        return self.choice.micro_batch_size // self.choice.replicas[0]

    def blocks(self) -> tuple[Transformer, tuple[int, ...]]:
        """The plan's transformer, and by stage the layers before its end: whole blocks. Raises
        ExportError."""
        model = find_plan_blocks(self.plan, self.runtime.name)
        ends = tuple(accumulate(self.choice.balance))
        check_whole_blocks(self.plan, model, ends, self.runtime.name)
        return model, ends

    def device_remark(self) -> str | None:
        """A sentence where the ranks are not to be started on devices 0, 1, ... in turn: a trainer numbers
        its processes itself."""
        devices = self.choice.ranks
        if devices == tuple(range(len(devices))):
            return None
        return f"Start ranks 0, 1, ... on devices {', '.join(map(str, devices))}: there the plan has them."


Remarks = Sequence[str | None]


def default_device(plan: Plan) -> str:
    """`cpu` or `cuda`: what the plan is for."""
    return "cpu" if plan.device_kind == "CPU" else "cuda"


E = TypeVar("E", bound=ExportDocument)


def load_document(source: Plan | E | str | Path, kind: type[E]) -> E:
    """The document of class `kind`: `source` itself, the one in the file it names, or the export of a plan.

    Where that is not the plan itself, a UserWarning tells. Raises UsageError, FileError, ExportError.
    """
    if isinstance(source, str | Path):
        return kind.load(source)
    document: object = source
    if isinstance(source, Plan):
        document, remark = export(kind.kind, source)
        if remark:
            warnings.warn(remark, UserWarning, stacklevel=3)
    if not isinstance(document, kind):
        raise UsageError(
            f"source is of type {type(source).__name__}, {kind.kind} takes a {kind.__name__} or a path",
            f'Give a plan, what pplan.export("{kind.kind}", plan) returns, or the path of its file.',
        )
    return document


def export(
    runtime: str, plan: Plan, *, device: str | None = None, made_by: MadeBy | None = None
) -> tuple[ExportDocument, str | None]:
    """The document `runtime` is to be given for `plan`, and a remark where it is not the plan itself.

    A runtime is never given what it does not run: where the plan's schedule, replicas or recomputation are
    not for it, the document holds the best of the plan's alternatives that is, and the remark, a sentence for
    standard error, says which, its step time and why. `device` "cpu" puts all stages on the CPU, so that the
    file can be tried without a GPU (launchers of processes give them their devices); None takes the
    devices that the plan is for: processors where one was profiled and no GPU was named.

    Raises UsageError (unknown runtime or device, "cuda" for a plan of processors), ExportError (nothing in
    the plan is for this runtime).
    """
    row = find_runtime(runtime)
    if device not in ("cuda", "cpu", None):
        raise UsageError(
            f"device={device!r}: cannot be exported for", "Use 'cuda', or 'cpu' to try without a GPU."
        )
    if device == "cuda" and plan.device_kind == "CPU":
        name = plan.profile.device_name
        raise UsageError(
            "device='cuda': the plan is for processors, by seconds measured on one"
            f"{f', {name}' if name not in ('', 'cpu') else ''}",
            "Plan for GPUs: with a profile of one, or pplan.profile(MODEL, device='analytic:h100'). Where a "
            "processor's seconds are meant: pplan.solve(gpu='h100', seconds_of='cpu').",
        )
    sharers = plan.profile.tensor_parallel
    if sharers > 1 and not row.shares_layers:
        sharing = ", ".join(name for name, other in RUNTIMES.items() if other.shares_layers)
        raise ExportError(
            f"each device of the plan is {sharers} that share every layer: {runtime} does not share layers",
            f"Export for one of: {sharing}.",
        )
    document, remark = export_on(row, plan, device or default_device(plan), made_by)
    if sharers > 1 and row.builds:
        remark = join_remarks(
            remark,
            f"Start {sharers} processes for each device of the plan, and give build tensor_parallel, the "
            "plan that the profile was measured with.",
        )
    other_layers = other_layers_warning(runtime, plan.profile.device)
    if other_layers is None:
        return document, remark
    document = document.model_copy(update={"warnings": [other_layers]})
    return document, join_remarks(f"Warning: {other_layers}.", remark)


def export_on(
    runtime: Runtime, plan: Plan, device: str, made_by: MadeBy | None = None
) -> tuple[ExportDocument, str | None]:
    """The document and the remark, for devices that the plan need not be for. Raises ExportError,
    UsageError."""
    warnings: list[str] = []
    if plan.training is not None:
        from .degree_exports import EXPORTERS, code_warnings, export_degrees, without_degrees

        if runtime.name in EXPORTERS:
            return export_degrees(runtime, plan, plan.training, made_by or MadeBy())
        warnings, plan = code_warnings(plan.training, runtime), without_degrees(plan)
    choice, remark = choose(plan, runtime)
    request = ExportRequest(plan, runtime, choice, remark, device, made_by or MadeBy())
    document, remarks = globals()[runtime.exporter](request)
    return document, join_remarks(*(f"Warning: {text}." for text in warnings), remark, *remarks)


def join_remarks(*remarks: str | None) -> str | None:
    """The sentences that there are, as one remark."""
    return " ".join(remark for remark in remarks if remark) or None


def export_pipe(request: ExportRequest) -> tuple[PipeExport, Remarks]:
    """What torchgpipe takes, or FairScale: on "cuda" stage by stage the plan's devices."""
    choice, on_cpu = request.choice, request.device == "cpu"
    arguments: dict[str, Any] = {
        "balance": list(choice.balance),
        "devices": ["cpu" if on_cpu else f"cuda:{number}" for number in choice.ranks],
        "chunks": choice.micro_batches,
        "checkpoint": choice.part_recompute[0],
        "deferred_batch_norm": request.plan.profile.has_batch_norms,
        "granularity": request.plan.profile.granularity,
    }
    document = cast(type[PipeExport], document_class(request.runtime.name))(**request.fields, **arguments)
    return document, ()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"type": "SGD", "params": {"lr": 0.01}},
    "momentum": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    # torch's Adam: DeepSpeed's own is compiled on the spot, and is AdamW unless told otherwise.
    "adam": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True, "adam_w_mode": False}},
    "adamw": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}
"""By the plan's word; the learning rates are torch's or usual defaults, for the user to change."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float16": {"fp16": {"enabled": True}},
    "bfloat16": {"bf16": {"enabled": True}},
}


def export_deepspeed(request: ExportRequest) -> tuple[DeepspeedExport, Remarks]:
    """What DeepSpeed takes. Its launcher gives each process its device. Raises ExportError."""
    choice, plan = request.choice, request.plan
    document = DeepspeedExport(
        **request.fields,
        num_stages=len(choice.balance),
        replicas=choice.replicas[0],
        parts=stage_bounds(choice.balance),
        devices=list(choice.ranks),
        config=_deepspeed_config(plan, choice),
        granularity=plan.profile.granularity,
    )
    return document, ()


def _deepspeed_config(plan: Plan, choice: PlanRow) -> dict[str, Any]:
    """DeepSpeed holds train_batch_size to be the product of the next two and the replicas."""
    dtype, config = plan.profile.dtype, dict[str, Any]()
    if dtype == "bfloat16" and plan.gradient_dtype is not None:  # by default that depends on ZeRO
        config["data_types"] = {"grad_accum_dtype": plan.gradient_dtype}
    if plan.zero and choice.replicas[0] > 1:
        # DeepSpeed calls torch's optimizers untested, and refuses them otherwise.
        config |= {"zero_optimization": {"stage": plan.zero}, "zero_allow_untested_optimizer": True}
    return {
        "train_batch_size": choice.micro_batches * choice.micro_batch_size,
        "train_micro_batch_size_per_gpu": choice.micro_batch_size // choice.replicas[0],
        "gradient_accumulation_steps": choice.micro_batches,
        "gradient_clipping": 0.0,  # left out, it is 1.0 and changes the training
        "optimizer": _optimizer(plan),
        "pipeline": {
            "use_reentrant": False,  # the reentrant kind loses the gradients of a stage fed by plain data
            "activation_checkpoint_interval": max(choice.balance) * (choice.part_recompute[0] == "always"),
        },
        **PRECISIONS.get(dtype, {}),
        **config,
    }


def _optimizer(plan: Plan) -> dict[str, Any]:
    if plan.optimizer == "adamw-8bit":
        raise ExportError(
            "adamw-8bit: DeepSpeed's configuration names no optimizer with 8-bit states",
            "Make a plan with another: pplan.solve(optimizer='adamw'). Or export that one, and pass "
            "deepspeed.initialize an optimizer of bitsandbytes in place of the configuration's.",
        )
    if plan.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"no DeepSpeed configuration is known for the plan's optimizer {plan.optimizer!r}",
            f"Make a plan with one of {', '.join(OPTIMIZERS)}: pplan.solve(optimizer='sgd')",
        )
    return OPTIMIZERS[plan.optimizer]


def export_torch(request: ExportRequest) -> tuple[TorchExport, Remarks]:
    """What a process of torch.distributed.pipelining takes; each has its own device. Raises ExportError,
    UsageError."""
    plan, choice = request.plan, request.choice
    devices = request.pipeline_size
    program = build_program(choice.schedule, devices, choice.micro_batches, choice.virtual_stages)
    stages = device_stages(program)
    if len(choice.balance) != program.slots:
        raise ExportError(
            f"the plan has {len(choice.balance)} stages, {choice.schedule} with {choice.virtual_stages} "
            f"virtual stages on {devices} devices has {program.slots}",
            "Make the plan again with pplan solve.",
        )
    if request.remark is None:
        _check_places(plan, stages)
    document = TorchExport(
        **request.fields,
        micro_batches=choice.micro_batches,
        order=choice.schedule,
        schedule=schedule_class(choice.schedule, program),
        parts=stage_bounds(choice.balance),
        stages=stages,
        replicas=choice.replicas[0],
        zero=plan.zero if choice.replicas[0] > 1 else 0,
        devices=list(choice.ranks),
        gpus_per_node=plan.gpus_per_node,
        recompute=["never" if word == "except_last" else word for word in choice.part_recompute],
        granularity=plan.profile.granularity,
        actions=action_rows(program),
    )
    return document, ()


def _check_places(plan: Plan, stages: Sequence[Sequence[int]]) -> None:
    """The plan's parts lie where the schedule has them: in a loop over the devices, or in a V."""
    for stages_of_device in stages:
        first = plan.stages[stages_of_device[0]].devices
        for stage in stages_of_device[1:]:
            if plan.stages[stage].devices != first:
                raise ExportError(
                    f"stage {stage} of the plan is on devices {plan.stages[stage].devices}, {plan.schedule} "
                    f"has it with stage {stages_of_device[0]}, on {first}",
                    "Make the plan again with pplan solve.",
                )


def export_huggingface(request: ExportRequest) -> tuple[HuggingfaceExport, Remarks]:
    """A `device_map`. Raises ExportError where a stage ends inside a transformer block."""
    plan, choice = request.plan, request.choice
    if not plan.layer_names:
        raise ExportError(
            f"the plan of {plan.model} does not tell the names of its layers", "Make it again: pplan solve"
        )
    places: dict[str, int] = {}
    devices = (
        device for device, layers in zip(choice.ranks, choice.balance, strict=True) for _ in range(layers)
    )
    for module, device in zip(_placed_modules(plan.layer_names), devices, strict=True):
        if places.setdefault(module, device) != device:
            raise ExportError(
                f"{module} is on devices {places[module]} and {device}: huggingface places blocks whole",
                f"Measure whole blocks: pplan.profile({plan.model!r}, "
                f"granularity='module:{module.rpartition('.')[0]}.*'), and make the plan again: pplan solve",
            )
    on_cpu = request.device == "cpu"
    document = HuggingfaceExport(
        **request.fields,
        micro_batches=choice.micro_batches,
        device_map={module: "cpu" if on_cpu else place for module, place in places.items()},
    )
    return document, ()


def _placed_modules(names: list[str]) -> list[str]:
    """The module of each layer: of a layer inside a transformer block, the block; else the layer itself."""
    model = blocks_or_none(names)
    if model is None:
        return names
    first, last = model.ends[0], model.ends[-1]
    return [
        f"{model.list_name}.{model.blocks_before(layer)}" if first <= layer < last else name
        for layer, name in enumerate(names)
    ]


def export_megatron(request: ExportRequest) -> tuple[LayoutExport, Remarks]:
    """Arguments of Megatron-LM, or overrides of Megatron-Bridge; both run on CUDA devices only. Raises
    ExportError."""
    plan, choice, runtime = request.plan, request.choice, request.runtime.name
    model, ends = request.blocks()
    stages = _blocks_by_stage(plan, model, ends, runtime)
    fields = request.trainer_fields | {"layout": write_layout(stages), "num_layers": model.blocks}
    together = None
    if "first_layers" in recompute_kinds(choice.part_recompute):
        number: int | None = count_first_blocks(model, ends, choice.part_recompute)
        fields |= {"first_blocks": number, "recompute": "always"}
    elif choice.part_recompute[0] == "always":
        # As many as divide every stage: its uniform method steps through a stage by this number and does not
        # look where the stage ends.
        number = together = gcd(*stages)
    else:
        number = None
    settings: dict[str, object] = {
        "num_layers": model.blocks,
        "pipeline_model_parallel_size": request.pipeline_size,
        "pipeline_model_parallel_layout": fields["layout"],
        "micro_batch_size": request.replica_samples,
        "global_batch_size": fields["mini_batch"],
    }
    if plan.profile.tensor_parallel > 1:
        settings["tensor_model_parallel_size"] = plan.profile.tensor_parallel
    if number is not None:
        settings |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if together else "block",
            "recompute_num_layers": number,
        }
    has_flags = bool(request.runtime.program)
    write = _flags if has_flags else _overrides
    document = cast(type[LayoutExport], document_class(runtime))(**fields, arguments=write(settings, request))
    remarks = [
        ends_remark(model, runtime),
        *_megatron_remarks(model, ends, stages, fields.get("first_blocks"), together, runtime),
    ]
    if plan.tied and has_flags:
        remarks.append(
            "The plan's embedding and head share a weight, as Megatron-LM's do without "
            "--untie-embeddings-and-output-weights."
        )
    return document, [*remarks, request.device_remark()]


def _blocks_by_stage(plan: Plan, model: Transformer, ends: Sequence[int], runtime: str) -> list[int]:
    """Transformer blocks of each stage. Raises ExportError where a stage ends inside the head."""
    stages = [model.blocks_before(end) - model.blocks_before(first) for first, end in pairwise((0, *ends))]
    for stage, (first, end) in enumerate(pairwise((0, *ends[:-1]))):
        moved = model.names[max(model.ends[-1], first) : end]
        if moved and not (stages[stage] and all(map(is_small, moved))):
            raise ExportError(
                f"stage {stage} computes {', '.join(moved)}, a later one the rest of the head: {runtime} has "
                "the head on the last stage",
                f"Measure it as one layer: pplan.profile({plan.model!r}, "
                f"granularity='module:{model.list_name}.*'), and make the plan again: pplan solve",
            )
    return stages


def _spreads(request: ExportRequest) -> bool:
    """Whether its distributed optimizer is the plan's: ZeRO-1 over the replicas of a stage."""
    return request.plan.zero == 1 and request.choice.replicas[0] > 1


def _flags(settings: dict[str, object], request: ExportRequest) -> list[str]:
    dtype, gradients = request.plan.profile.dtype, request.plan.gradient_dtype
    words = {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(dtype, [])
    if dtype == "bfloat16" and gradients == "bf16":
        words.append("--grad-reduce-in-bf16")
    if dtype == "float16" and gradients == "fp32":
        words.append("--accumulate-allreduce-grads-in-fp32")
    return write_flags(settings) + words + ["--use-distributed-optimizer"] * _spreads(request)


def _overrides(settings: dict[str, object], request: ExportRequest) -> list[str]:
    plan, virtual_stages = request.plan, request.choice.virtual_stages
    if plan.tied:
        settings["share_embeddings_and_output_weights"] = "true"
    if virtual_stages > 1:
        settings["virtual_pipeline_model_parallel_size"] = virtual_stages
    if plan.profile.dtype == "bfloat16" and plan.gradient_dtype is not None:
        settings["grad_reduce_in_fp32"] = str(plan.gradient_dtype == "fp32").lower()
    return write_overrides(settings) + DISTRIBUTED_OPTIMIZER * _spreads(request)


def _megatron_remarks(
    model: Transformer,
    ends: Sequence[int],
    stages: Sequence[int],
    first_blocks: int | None,
    together: int | None,
    runtime: str,
) -> Iterator[str]:
    """Remarks on what the trainer does otherwise than the plan."""
    moved = model.names[model.ends[-1] : ends[-2]] if len(ends) > 1 else ()
    if moved:
        yield (
            f"{runtime} computes {', '.join(moved)} with the head, on the last stage; the plan has it on "
            "the stage before."
        )
    if first_blocks is not None:
        yield (
            f"{runtime} runs each of the first {first_blocks} blocks of a stage again by itself and keeps "
            "its input, and never the embedding; the plan counts one checkpoint of all of a stage."
        )
    if together is not None and together < max(stages):
        yield (
            f"{runtime} recomputes {together} of a stage's blocks at a time, since the stages have different "
            "numbers of them: it keeps the input of each, the plan counts only the stage's."
        )


def list_modules(model: Transformer, ends: Sequence[int], words: ModuleNames | None) -> list[list[str]]:
    """By stage, the names of its modules: the model's own, or `words`, whose norm goes with the first layer
    of the head and whose head goes with the last. `ends` are whole.

    Raises ExportError for a stage of no module.
    """
    modules = [
        list(dict.fromkeys(name for layer in range(first, end) for name in _modules(model, layer, words)))
        for first, end in pairwise((0, *ends))
    ]
    if [] in modules:
        stage = modules.index([])
        raise ExportError(
            f"stage {stage} computes only {model.names[ends[stage] - 1]}, which is no module of its own",
            "Make a plan with fewer stages: pplan.solve(gpus=N)",
        )
    return modules


def _modules(model: Transformer, layer: int, words: ModuleNames | None) -> list[str]:
    first, last = model.ends[0], model.ends[-1]
    if first <= layer < last:
        return [f"{words.blocks if words else model.list_name}.{model.blocks_before(layer)}"]
    if words is None:
        return [model.names[layer]]
    if layer < first:
        return [words.embedding]
    final = layer == len(model.names) - 1
    return [words.norm] * (layer == last) + [words.head] * final


@dataclass(frozen=True)
class ListedModules:
    """The module names of each stage, and how the trainer runs them.

    `schedule` is the class of torch.distributed.pipelining without its first word, or that of any order where
    the trainer is given `actions` instead, a line of CSV a device.
    """

    model: Transformer
    names: list[list[str]]
    schedule: str
    actions: list[str]
    remark: str | None


def _list_stages(
    request: ExportRequest, find_words: Callable[[Transformer], ModuleNames | None]
) -> ListedModules:
    """What the trainer is given of a plan. `find_words`: the trainer's names of a model's modules, None for
    the model's own. Raises ExportError."""
    choice = request.choice
    model, ends = request.blocks()
    program = build_program(
        choice.schedule, request.pipeline_size, choice.micro_batches, choice.virtual_stages
    )
    name = schedule_class(choice.schedule, program)
    remark = ends_remark(model, request.runtime.name)
    if remark:
        remark += " Add their modules to the first and the last list: what no list names is left out."
    names = list_modules(model, ends, find_words(model))
    if name == OWN_ORDER:
        # With a file of actions the name only says that the stages go round the devices.
        return ListedModules(model, names, "PipelineScheduleMulti", action_rows(program), remark)
    return ListedModules(model, names, name.removeprefix("Schedule"), [], remark)


def export_torchtitan(request: ExportRequest) -> tuple[TorchtitanExport, Remarks]:
    """Arguments of torchtitan, which runs on the devices that it finds. It counts batches by what one replica
    computes. Raises ExportError."""
    plan, choice = request.plan, request.choice
    listed = _list_stages(request, _titan_words)
    batch, zero = choice.micro_batches * choice.micro_batch_size, bool(plan.zero)
    prefix = "--parallelism.pipeline_parallel"
    sharers = plan.profile.tensor_parallel
    arguments = [
        *("--parallelism.module_fqns_per_model_part", *(",".join(stage) for stage in listed.names)),
        *(f"{prefix}_degree", str(request.pipeline_size)),
        *(["--parallelism.tensor_parallel_degree", str(sharers)] if sharers > 1 else []),
        *(f"{prefix}_schedule", listed.schedule),
        *(f"{prefix}_microbatch_size", str(request.replica_samples)),
        *("--training.local_batch_size", str(batch // choice.replicas[0])),
        *("--training.global_batch_size", str(batch)),
        *("--parallelism.data_parallel_replicate_degree", "1" if zero else str(choice.replicas[0])),
        *("--parallelism.data_parallel_shard_degree", str(choice.replicas[0]) if zero else "1"),
        "--training.disable_cuda_graphs",  # they do not go with pipelines
        f"activation_checkpoint:{'full' if choice.part_recompute[0] == 'always' else 'none'}",
    ]
    document = TorchtitanExport(
        **request.trainer_fields,
        module_fqns_per_model_part=listed.names,
        arguments=arguments,
        actions=listed.actions,
    )
    naming = (
        None if is_decoder(listed.model) else f"The modules keep the names that they have in {plan.model}."
    )
    return document, (listed.remark, naming, request.device_remark())


def _titan_words(model: Transformer) -> ModuleNames | None:
    """torchtitan's names of a decoder's modules. Raises ExportError where other modules are deeper than it
    looks."""
    if is_decoder(model):
        return WORDS
    deep = [name for name in (*model.embedding, model.list_name, *model.head) if "." in name]
    if deep:
        raise ExportError(
            f"{deep[0]} is inside another module, and the model is no decoder whose names could be "
            "translated: torchtitan takes modules at the top of the model, and elements of lists there",
            "Export for another runtime: pplan.solve(runtime='torch')",
        )
    return None


def export_nemo(request: ExportRequest) -> tuple[NemoExport, Remarks]:
    """Sections of a recipe of NeMo Automodel, which runs on CUDA devices. Raises ExportError."""
    plan, choice, devices = request.plan, request.choice, request.pipeline_size
    listed = _list_stages(request, _llama_words)
    if choice.micro_batches < devices:
        raise ExportError(
            f"it has {choice.micro_batches} micro-batches for {devices} devices: "
            "nemo-automodel takes as many as devices, or more",
            f"Make a plan with more: pplan.solve(micro_batches={devices})",
        )
    names = _with_positions(listed.model, listed.names)
    batch, sharers = choice.micro_batches * choice.micro_batch_size, plan.profile.tensor_parallel
    sections: dict[str, dict[str, Any]] = {
        "step_scheduler": {"global_batch_size": batch, "local_batch_size": batch // choice.replicas[0]},
        "distributed": {
            "strategy": "fsdp2",
            "pp_size": devices,
            **({"tp_size": sharers} if sharers > 1 else {}),
            "dp_size": choice.replicas[0],
            "dp_replicate_size": 1 if plan.zero else choice.replicas[0],
            "activation_checkpointing": choice.part_recompute[0] == "always",
            "pipeline": {
                "pp_schedule": listed.schedule,
                "pp_microbatch_size": request.replica_samples,
                "module_fqns_per_model_part": names,
            },
        },
    }
    document = NemoExport(
        **request.trainer_fields,
        module_fqns_per_model_part=names,
        sections=sections,
        actions=listed.actions,
    )
    unnamed = None if _llama_words(listed.model) else _unnamed_remark(listed.model)
    return document, (listed.remark, request.device_remark(), unnamed)


def _unnamed_remark(model: Transformer) -> str:
    """A plan knows the first module of a layer only."""
    beside = f"stands beside {model.embedding[0]} before" if model.embedding else "stands before"
    return (
        f"The model is not built as Llama is: NeMo keeps only what is named, so add to the first stage what "
        f"{beside} the blocks (a position embedding, a dropout), and to the "
        "last what stands behind them."
    )


def _llama_words(model: Transformer) -> ModuleNames | None:
    """The names of a model built as Hugging Face's Llama is; None: they are kept."""
    inner = model.list_name.rpartition(".")[0]
    if not is_decoder(model) or model.embedding[0] != f"{inner}.embed_tokens":
        return None
    return ModuleNames(model.embedding[0], model.list_name, f"{inner}.norm", "lm_head")


def _with_positions(model: Transformer, names: list[list[str]]) -> list[list[str]]:
    """Every stage with blocks computes the rotary embedding for itself; where a model has none the name is
    passed over."""
    rotary = ".".join([*model.list_name.split(".")[:-1], "rotary_emb"])
    blocks = f"{model.list_name}."
    return [
        [*modules, rotary] if any(name.startswith(blocks) for name in modules) else modules
        for modules in names
    ]
