"""Files of a plan in the words of each training runtime, and the check of a model against such a file."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from ..cost_models.document import (
    DeviceCount,
    DeviceIndex,
    Document,
    JsonObject,
    LayerBound,
    LayerCount,
    LayerIndex,
    MadeBy,
    MemberCount,
    MicroBatches,
    MiniBatch,
    StepSeconds,
)
from ..cost_models.errors import ExportError, FileError, MachineError
from ..cost_models.memory import check_stage_word, count_first_layers
from ..cost_models.program import Program
from ..cost_models.quantities import format_count, format_seconds
from ..cost_models.runtime import OFFLOAD, find_runtime
from ..cost_models.schedule_text import NAME
from ..cost_models.schedules import PUBLISHED
from ..cost_models.text_files import sha256
from ..planner.plan_file import Plan, ScheduleName
from .torch_actions import are_bounds, build_program, read_actions

if TYPE_CHECKING:
    from torch import nn


class ExportDocument(Document):
    """A plan in a runtime's own words (`NAME.RUNTIME.json`); `kind` is the runtime's name."""

    runtime: str
    model: str
    layers_sha256: str = ""
    """Of the names of the model's layers, one a line, as in the plan."""
    mini_batch: MiniBatch
    micro_batch_size: MiniBatch
    step_seconds: StepSeconds
    """Predicted seconds of a step."""
    estimated: bool = False
    """Whether they follow from an estimated profile, and not from a measured one."""
    made_by: MadeBy = MadeBy()

    @property
    def replica_samples(self) -> int:
        """Samples of a micro-batch on one replica."""
        return self.micro_batch_size // int(getattr(self, "replicas", 1))

    @model_validator(mode="after")
    def _check_samples(self) -> Self:
        replicas = getattr(self, "replicas", 1)
        if self.mini_batch % self.micro_batch_size:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} does not divide mini_batch {self.mini_batch}"
            )
        if self.micro_batch_size % replicas:
            raise ValueError(
                f"micro_batch_size {self.micro_batch_size} is not shared evenly by {replicas} replicas"
            )
        return self


def hash_layers(plan: Plan) -> str:
    """The hash of the plan's layer names; empty where the plan does not tell them."""
    return plan.profile.layers_sha256 or (hash_names(plan.layer_names) if plan.layer_names else "")


def hash_names(names: Sequence[str]) -> str:
    """SHA-256 of layer names, one a line."""
    return sha256("\n".join(names))


def check_layers(document: BuiltExport, model: nn.Module, names: Sequence[str] | None) -> nn.Sequential:
    """Return `model` if it is an nn.Sequential of the document's layers.

    Args:
        document: An export.
        model: The model to check.
        names: Names of the layers in the profile. None takes those that `pplan.sequential` stored in the
            model; an nn.Sequential without names is only counted.

    Raises:
        ExportError: The model is of another type, or has other layers.
    """
    from torch import nn

    name, layers = getattr(model, "model_name", "") or type(model).__name__, document.parts[-1]
    if not isinstance(model, nn.Sequential):
        raise ExportError(
            f"{document.kind} takes an nn.Sequential of {document.model}'s {layers} layers, "
            f"the model is of type {name}",
            "Give an example_input, too, or pplan.sequential(model, example_input).",
        )
    if names is None:
        own_names = getattr(model, "layer_names", ())
        names = own_names if isinstance(own_names, tuple) and len(own_names) == layers else ()
    check_names(document, len(model), names, name)
    return model


def check_names(document: BuiltExport, count: int, names: Sequence[str], model: str) -> None:
    """Check that `model` has the layers that the document was made for. Raises ExportError.

    `count`: number of its layers. `names`: of the layers; empty if the model does not know them.
    """
    if count != document.parts[-1]:
        raise ExportError(
            f"the {document.kind} file is for {document.model} with {document.parts[-1]} layers, "
            f"the model ({model}) has {count}",
            "Give it pplan.sequential(model, example_input) of that model, or make a plan for this one.",
        )
    if names and document.layers_sha256 not in ("", hash_names(names)):
        raise ExportError(
            f"the {document.kind} file is for {document.model}, whose layers have the hash "
            f"{document.layers_sha256[:12]}, those of the model ({model}) have {hash_names(names)[:12]} "
            f"({names[0]} to {names[-1]})",
            "Give it the model of the file, or make a plan for this one.",
        )


def import_package(runtime: str, module: str) -> Any:
    """Import a module of a runtime's package. Raises MachineError where it cannot be imported."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MachineError(
            f"{runtime} cannot be imported: {error}", f'Install it: pip install "pplan[{runtime}]"'
        ) from error


def stage_bounds(balance: Sequence[int]) -> list[int]:
    """The bounds of the stages: stage i holds layers bounds[i] up to, not including, bounds[i + 1]."""
    return [0, *accumulate(balance)]


Checkpoint = Literal["never", "always", "except_last"]


class PipeExport(ExportDocument):
    """`balance`, `devices`, `chunks` and `checkpoint` are the constructor's arguments, under its own names.

    `chunks` times `micro_batch_size` is `mini_batch`: a global batch of that many samples is cut into as many
    equal micro-batches (other sizes are not: `torch.chunk` makes 3, 3, 3 and 1 of 10 samples and 4 chunks).
    """

    order: ClassVar[str] = "gpipe"
    replicas: ClassVar[int] = 1
    virtual_stages: ClassVar[int] = 1
    balance: Annotated[list[LayerCount], Field(min_length=1)]
    """Layers of each stage."""
    devices: list[str]
    """By stage: "cpu" or "cuda:N"."""
    chunks: MicroBatches
    """Micro-batches."""
    checkpoint: Checkpoint
    """Which micro-batches are recomputed."""
    deferred_batch_norm: bool = False
    """True if the running statistics of batch norms are those of global batches."""
    granularity: str = "block"
    """How the model is cut into layers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.devices) != len(self.balance):
            raise ValueError(f"devices are {len(self.devices)}, balance has {len(self.balance)} stages")
        for number, device in enumerate(self.devices):
            if not re.fullmatch(r"cpu|cuda:[0-9]+", device):
                raise ValueError(f"devices.{number}: must be 'cpu' or 'cuda:N', the value is {device!r}")
        if self.chunks * self.micro_batch_size != self.mini_batch:
            raise ValueError(
                f"chunks {self.chunks} times micro_batch_size {self.micro_batch_size} "
                f"do not make a mini_batch of {self.mini_batch}"
            )
        return self

    @property
    def parts(self) -> list[int]:
        """Stage i holds layers parts[i] up to, not including, parts[i + 1]."""
        return stage_bounds(self.balance)

    @property
    def recompute(self) -> Checkpoint:
        """What is recomputed, as the other files say it."""
        return self.checkpoint

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of the constructor."""
        names = {"balance", "devices", "chunks", "checkpoint", "deferred_batch_norm"}
        return self.model_dump(include=names)


class TorchgpipeExport(PipeExport):
    """What `torchgpipe.GPipe` takes."""

    kind: ClassVar[str] = "torchgpipe"
    runtime: Literal["torchgpipe"]


class FairscaleExport(PipeExport):
    """What `fairscale.nn.Pipe` takes."""

    kind: ClassVar[str] = "fairscale"
    runtime: Literal["fairscale"]


class DeepspeedExport(ExportDocument):
    """What `deepspeed.initialize` and a PipelineModule take.

    Stage i holds layers parts[i] up to, not including, parts[i + 1]; rank s * replicas + r is replica r of
    stage s. `config` is DeepSpeed's own configuration.
    """

    kind: ClassVar[str] = "deepspeed"
    order: ClassVar[str] = "1f1b"
    virtual_stages: ClassVar[int] = 1
    runtime: Literal["deepspeed"]
    num_stages: LayerCount
    replicas: DeviceCount
    """Of every stage."""
    parts: Annotated[list[LayerBound], Field(min_length=2)]
    devices: list[DeviceIndex]
    """By rank, as the plan numbers them."""
    config: JsonObject
    granularity: str = "block"
    """How the model is cut into layers."""

    @property
    def recompute(self) -> Checkpoint:
        """What is recomputed, as the other files say it."""
        pipeline = self.config.get("pipeline")
        interval = pipeline.get("activation_checkpoint_interval") if isinstance(pipeline, dict) else None
        return "always" if isinstance(interval, int) and interval > 0 else "never"

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        if len(self.parts) != self.num_stages + 1 or not are_bounds(self.parts):
            raise ValueError(f"parts {self.parts} are not the bounds of {self.num_stages} stages")
        if len(self.devices) != self.num_stages * self.replicas:
            raise ValueError(
                f"devices are {len(self.devices)}, num_stages {self.num_stages} times replicas "
                f"{self.replicas} must be as many"
            )
        return self


StageWord = Annotated[str, AfterValidator(partial(check_stage_word, words=("never", "always", OFFLOAD)))]


class TorchExport(ExportDocument):
    """What a process of torch.distributed.pipelining is to know.

    Stage i holds layers parts[i] up to, not including, parts[i + 1], and recomputes by the i-th word of
    `recompute`. stages[d] are the stages of device d of the pipeline: rank d * replicas + r is its replica r.
    """

    kind: ClassVar[str] = "torch"
    runtime: Literal["torch"]
    micro_batches: MicroBatches
    order: Annotated[str, Field(pattern=NAME.pattern)]
    """The plan's word for the schedule; of one that is not pplan's own, `actions` alone say what is done."""
    schedule: str
    """The class in torch.distributed.pipelining.schedules."""
    parts: Annotated[list[LayerBound], Field(min_length=2)]
    stages: Annotated[list[list[LayerIndex]], Field(min_length=1)]
    replicas: DeviceCount
    """Of every stage; they share every micro-batch."""
    zero: Annotated[int, Field(ge=0, le=1)] = 0
    """1: the replicas of a stage spread the optimizer's states, by FSDP2."""
    devices: list[DeviceIndex]
    """By rank, as the plan numbers them."""
    gpus_per_node: MemberCount | None = None
    recompute: list[StageWord]
    granularity: str = "block"
    """How the model is cut into layers."""
    actions: list[str]
    """Lines of a schedule CSV, one a device of the pipeline, as `_load_csv(path, format="compute_only")` of
    a schedule takes them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        stages = len(self.parts) - 1
        if not are_bounds(self.parts):
            raise ValueError(f"parts {self.parts} are not the bounds of {stages} stages")
        if sorted(stage for device_stages in self.stages for stage in device_stages) != list(range(stages)):
            raise ValueError(f"stages {self.stages} are not stages 0 to {stages - 1}, once each")
        if len(self.devices) != len(self.stages) * self.replicas:
            raise ValueError(
                f"devices are {len(self.devices)}, {len(self.stages)} of the pipeline times replicas "
                f"{self.replicas} must be as many"
            )
        for name, words, needed in (
            ("recompute", self.recompute, stages),
            ("actions", self.actions, len(self.stages)),
        ):
            if len(words) != needed:
                raise ValueError(f"{name} has {len(words)} entries, there must be {needed}")
        self._check_sizes()
        return self

    def _check_sizes(self) -> None:
        for stage, (word, (first, end)) in enumerate(zip(self.recompute, pairwise(self.parts), strict=True)):
            if (count_first_layers(word) or 0) >= end - first:
                raise ValueError(
                    f"recompute: {word} of stage {stage}, which has {format_count(end - first, 'layer')}"
                )
        if self.micro_batches * self.micro_batch_size != self.mini_batch:
            raise ValueError(
                f"micro_batches {self.micro_batches} times micro_batch_size {self.micro_batch_size} "
                f"do not make a mini_batch of {self.mini_batch}"
            )

    @property
    def virtual_stages(self) -> int:
        """Of each device."""
        return len(self.stages[0])

    @property
    def program(self) -> Program:
        """What the processes run. Raises UsageError, ExportError."""
        if self.order in PUBLISHED:
            return build_program(self.order, len(self.stages), self.micro_batches, self.virtual_stages)
        return read_actions(self.actions, self.stages, self.micro_batches)

    @property
    def csv(self) -> str:
        """The order as a schedule CSV, for what reads one (torchtitan's pipeline_parallel_schedule_csv)."""
        return "\n".join(self.actions) + "\n"


BuiltExport = TorchExport | TorchgpipeExport | FairscaleExport | DeepspeedExport
"""What pplan builds stages by."""


class HuggingfaceExport(ExportDocument):
    """`device_map` is what `from_pretrained(..., device_map=...)` takes, for the modules that are layers."""

    kind: ClassVar[str] = "huggingface"
    order: ClassVar[str] = "naive"
    replicas: ClassVar[int] = 1
    virtual_stages: ClassVar[int] = 1
    recompute: ClassVar[None] = None
    runtime: Literal["huggingface"]
    micro_batches: MicroBatches
    """To be run one after another, their gradients added up."""
    device_map: dict[str, DeviceIndex | Literal["cpu"]]


def count_nodes(devices: Sequence[int], gpus_per_node: int | None) -> int:
    """The number of nodes that hold these devices, as many on each.

    Raises ExportError where they are not as many: one command of torchrun starts as many processes on each.
    """
    if gpus_per_node is None:
        return 1
    counts = Counter(device // gpus_per_node for device in devices)
    if len(set(counts.values())) > 1:
        numbers = ", ".join(f"{counts[node]} on node {node}" for node in sorted(counts))
        raise ExportError(
            f"the plan's devices are {numbers}: torchrun starts as many processes on each node",
            "Plan with as many devices on each: pplan.solve(gpus=N), or use_all=True.",
        )
    return len(counts)


def torchrun_options(processes: int, nodes: int) -> str:
    """torchrun's options for so many processes, as many on each node."""
    return f"--nnodes {nodes} " * (nodes > 1) + f"--nproc-per-node {processes // nodes}"


class TrainerText(ExportDocument):
    """A plan as a trainer's own text.

    The file is that text; one whose name ends in `.json` is this document instead, which pplan reads again.
    """

    processes: DeviceCount
    """To be started: one a device."""
    nodes: DeviceCount = 1
    """That they are spread over, as many on each."""
    pipeline_size: DeviceCount
    """Devices of a pipeline."""
    replicas: DeviceCount
    """Of every stage. Ranks count those of a stage before the next stage."""

    order: ScheduleName
    """The plan's word for the schedule."""
    virtual_stages: LayerCount
    """Of each device."""
    recompute: Literal["never", "always"]
    warnings: list[str] = []
    """Reasons why the prediction may be wrong for this trainer."""
    actions: list[str] = []
    """Where the trainer is given the order of the actions: its lines, one a device of the pipeline."""

    @property
    def warning_comments(self) -> list[str]:
        """The warnings as lines of comment, which bash and YAML share."""
        return [shell_comment(f"Warning: {warning}") for warning in self.warnings]

    @property
    def torchrun_options(self) -> str:
        """The launcher's options for the processes; on several nodes it needs a rendezvous, too."""
        return torchrun_options(self.processes, self.nodes)

    def text(self, path: Path) -> str:
        """What the trainer takes, in a file of that name."""
        raise NotImplementedError

    def files(self, path: Path) -> dict[Path, str]:
        """The text, and beside it the CSV of its actions; at a name that ends in `.json`, this document.

        Raises FileError where both would have one name.
        """
        if path.suffix == ".json":
            return {path: self.to_json()}
        if self.actions and path.suffix == ".csv":
            raise FileError(
                f"{path}: the order of the actions goes into the file of that name, next to the text for "
                f"{self.runtime}",
                f"Name a file that ends in .{find_runtime(self.runtime).suffix}.",
            )
        order = {path.with_suffix(".csv"): "\n".join([*self.actions, ""])} if self.actions else {}
        return {path: self.text(path)} | order


class TrainerArguments(TrainerText):
    """Arguments of a trainer's command line, one text each; the file sets them as a bash array."""

    arguments: list[str]

    def arguments_in(self, path: Path) -> list[str]:
        """The arguments in a file of that name, which they may name files beside."""
        del path
        return self.arguments

    def text(self, path: Path) -> str:
        """A piece of bash that sets PPLAN, with the command that uses it in its first lines."""
        estimated = " (estimated)" if self.estimated else ""
        row = find_runtime(self.runtime)
        command = " ".join(filter(None, ("torchrun", self.torchrun_options, row.program, row.needs[0])))
        return "\n".join(
            [
                shell_comment(
                    f"{self.model} on {self.processes} devices, predicted{estimated}: "
                    f"{format_seconds(self.step_seconds)} a step"
                ),
                *self.warning_comments,
                shell_comment(f'source {path.name}; {command} ... "${{PPLAN[@]}}"'),
                "PPLAN=(",
                *(f"  {line}" for line in _lines(self.arguments_in(path))),
                ")",
                "",
            ]
        )


def shell_comment(text: str) -> str:
    """A line of comment: names out of a file may not begin another."""
    return "# " + "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _lines(arguments: Sequence[str]) -> list[str]:
    """The arguments as bash reads them, an option and its values a line; `name:word` is a subcommand."""
    lines: list[list[str]] = []
    for argument in arguments:
        alone = argument.startswith("--") or ":" in argument
        if not lines or alone or not lines[-1][0].startswith("--"):
            lines.append([])
        lines[-1].append(shlex.quote(argument))
    return [" ".join(line) for line in lines]


class LayoutExport(TrainerArguments):
    """A layout and what goes with it; `layout` tells the virtual stages by how many stages it has."""

    layout: str
    num_layers: LayerCount
    """Transformer blocks."""
    first_blocks: LayerCount | None = None
    """Of every stage, that it recomputes; None: all, where `recompute` is always."""


class MegatronExport(LayoutExport):
    """Arguments of Megatron-LM's training scripts.

    The layout does not stand together with --num-layers-per-virtual-pipeline-stage,
    --num-virtual-stages-per-pipeline-rank, --decoder-first-pipeline-num-layers,
    --decoder-last-pipeline-num-layers, --account-for-embedding-in-pipeline-split and
    --account-for-loss-in-pipeline-split.
    """

    kind: ClassVar[str] = "megatron"
    runtime: Literal["megatron"]


class MegatronBridgeExport(LayoutExport):
    """Overrides of the configuration of a recipe of Megatron-Bridge."""

    kind: ClassVar[str] = "megatron-bridge"
    runtime: Literal["megatron-bridge"]


ModuleLists = Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]


class TorchtitanExport(TrainerArguments):
    """Arguments of `torchtitan.train`; those of `--module` and `--config` come before them."""

    kind: ClassVar[str] = "torchtitan"
    runtime: Literal["torchtitan"]
    module_fqns_per_model_part: ModuleLists

    def arguments_in(self, path: Path) -> list[str]:
        """The arguments, with the file of the actions where there are any.

        What is recomputed is a subcommand: options of the root cannot follow it.
        """
        if not self.actions:
            return self.arguments
        *options, recompute = self.arguments
        file = path.with_suffix(".csv").name
        return [*options, "--parallelism.pipeline_parallel_schedule_csv", file, recompute]


class NemoExport(TrainerText):
    """The sections `step_scheduler` and `distributed` of a recipe."""

    kind: ClassVar[str] = "nemo-automodel"
    runtime: Literal["nemo-automodel"]
    module_fqns_per_model_part: ModuleLists
    sections: dict[str, JsonObject]

    def text(self, path: Path) -> str:
        """A piece of YAML: sections to be put into a recipe."""
        import yaml  # type: ignore[import-untyped,unused-ignore]  # only recipes need it

        sections = self.sections
        if self.actions:
            pipeline = {"pp_schedule_csv": path.with_suffix(".csv").name} | sections["distributed"][
                "pipeline"
            ]
            sections = sections | {"distributed": sections["distributed"] | {"pipeline": pipeline}}
        start = f"automodel RECIPE.yaml {self.torchrun_options}"
        about = shell_comment(f"Put these sections into the recipe of {self.model}; {start}")
        comments = "".join(f"{text}\n" for text in (about, *self.warning_comments))
        return comments + str(yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=100))


def document_class(runtime: str) -> type[ExportDocument]:
    """The class of a runtime's file."""
    kind: type[ExportDocument] = globals()[find_runtime(runtime).document]
    return kind
