"""torchtitan 0.3.0 (https://github.com/pytorch/torchtitan): lists of module names, one a stage.

Its models are called tok_embeddings, layers.N, norm and lm_head; it keeps of a stage's copy of the model what
the list names, modules at the top of the model and elements of lists there. Source: its
`distributed/pipeline_parallel.py` and `config/configs.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from ...cost_models.document import MadeBy
from ...cost_models.errors import ExportError
from ...planner.plan_file import Plan
from .module_lists import ModuleLists, ModuleNames, TransformerChoice, choose_blocks, is_decoder, list_modules
from .trainer_text import TrainerArguments, device_remark, join_remarks
from .transformer_blocks import Transformer

WORDS = ModuleNames("tok_embeddings", "layers", "norm", "lm_head")
"""What its models' modules are called."""


class TorchtitanExport(TrainerArguments):
    """Arguments of `torchtitan.train`; those of `--module` and `--config` come before them."""

    kind: ClassVar[str] = "torchtitan"
    command: ClassVar[str] = "-m torchtitan.train --module MODULE --config CONFIG"
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


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[TorchtitanExport, str | None]:
    """The arguments, and a remark where they are not the plan itself, or the model's own names are kept.

    `device` changes nothing: torchtitan runs on the devices it finds. Raises ExportError.
    """
    del device
    blocks = choose_blocks(plan, "torchtitan")
    words = WORDS if is_decoder(blocks.model) else None
    if words is None:
        _check_top(blocks.model)
    names = list_modules(blocks.model, blocks.ends, words)
    document = TorchtitanExport(
        **blocks.fields,
        module_fqns_per_model_part=names,
        arguments=_arguments(blocks, names),
        actions=list(blocks.actions),
        made_by=made_by,
    )
    naming_remark = None if words else f"The modules keep the names that they have in {plan.model}."
    return document, join_remarks(blocks.remark, naming_remark, device_remark(blocks.choice))


def _check_top(model: Transformer) -> None:
    """Raises ExportError where modules with names of their own are deeper than torchtitan looks."""
    deep = [name for name in (*model.embedding, model.list_name, *model.head) if "." in name]
    if deep:
        raise ExportError(
            f"{deep[0]} is inside another module, and the model is no decoder whose names could be "
            "translated: torchtitan takes modules at the top of the model, and elements of lists there",
            "Export for another runtime: pplan.solve(runtime='torch')",
        )


def _arguments(blocks: TransformerChoice, names: list[list[str]]) -> list[str]:
    """torchtitan counts batches by what one replica computes."""
    choice = blocks.choice
    prefix = "--parallelism.pipeline_parallel"
    recompute = "full" if choice.recompute == "always" else "none"
    return [
        *("--parallelism.module_fqns_per_model_part", *(",".join(stage) for stage in names)),
        *(f"{prefix}_degree", str(blocks.devices)),
        *_tensor_degree(blocks.plan.profile.tensor_parallel),
        # With a file of actions the name only says that the stages go round the devices.
        *(f"{prefix}_schedule", blocks.schedule or "PipelineScheduleMulti"),
        *(f"{prefix}_microbatch_size", str(choice.micro_batch_size // choice.replicas)),
        *(
            "--training.local_batch_size",
            str(choice.micro_batches * choice.micro_batch_size // choice.replicas),
        ),
        *("--training.global_batch_size", str(choice.micro_batches * choice.micro_batch_size)),
        *("--parallelism.data_parallel_replicate_degree", "1" if blocks.plan.zero else str(choice.replicas)),
        *("--parallelism.data_parallel_shard_degree", str(choice.replicas) if blocks.plan.zero else "1"),
        "--training.disable_cuda_graphs",  # they do not go with pipelines
        f"activation_checkpoint:{recompute}",
    ]


def _tensor_degree(size: int) -> list[str]:
    return ["--parallelism.tensor_parallel_degree", str(size)] if size > 1 else []
