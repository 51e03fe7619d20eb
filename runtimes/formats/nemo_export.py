"""NeMo Automodel 0.7 (https://github.com/NVIDIA-NeMo/Automodel): torchtitan's lists, in a recipe's YAML.

Its models are Hugging Face's, with their names. Source: its `recipes/_dist_utils.py` and
`components/distributed/pipelining`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

from ...cost_models.document import JsonObject, MadeBy
from ...cost_models.errors import ExportError
from ...planner.plan_file import Plan
from .module_lists import ModuleLists, ModuleNames, TransformerChoice, choose_blocks, is_decoder, list_modules
from .trainer_text import TrainerText, device_remark, join_remarks, shell_comment
from .transformer_blocks import Transformer


class NemoExport(TrainerText):
    """The sections `step_scheduler` and `distributed` of a recipe."""

    kind: ClassVar[str] = "nemo-automodel"
    suffix: ClassVar[str] = "yaml"
    runtime: Literal["nemo-automodel"]
    module_fqns_per_model_part: ModuleLists
    sections: dict[str, JsonObject]

    def text(self, path: Path) -> str:
        """A piece of YAML: sections to be put into a recipe."""
        sections = self.sections
        if self.actions:
            pipeline = {"pp_schedule_csv": path.with_suffix(".csv").name} | sections["distributed"][
                "pipeline"
            ]
            sections = sections | {"distributed": sections["distributed"] | {"pipeline": pipeline}}
        start = f"automodel RECIPE.yaml {self.torchrun_options}"
        about = shell_comment(f"Put these sections into the recipe of {self.model}; {start}")
        return "".join(f"{text}\n" for text in (about, *self.warning_comments)) + "".join(_yaml(sections, ""))


def export(plan: Plan, *, device: str, made_by: MadeBy) -> tuple[NemoExport, str | None]:
    """The sections, and a remark where they are not the plan itself. Raises ExportError.

    `device` changes nothing: NeMo runs on CUDA devices.
    """
    del device
    blocks = choose_blocks(plan, "nemo-automodel")
    if blocks.choice.micro_batches < blocks.devices:
        raise ExportError(
            f"it has {blocks.choice.micro_batches} micro-batches for {blocks.devices} devices: "
            "nemo-automodel takes as many as devices, or more",
            f"Make a plan with more: pplan.solve(micro_batches={blocks.devices})",
        )
    words = _words(blocks.model)
    names = _with_positions(blocks.model, list_modules(blocks.model, blocks.ends, words))
    document = NemoExport(
        **blocks.fields,
        module_fqns_per_model_part=names,
        sections=_sections(blocks, names),
        actions=list(blocks.actions),
        made_by=made_by,
    )
    return document, join_remarks(
        blocks.remark, device_remark(blocks.choice), None if words else _others(blocks.model)
    )


def _others(model: Transformer) -> str:
    """A plan knows the first module of a layer only."""
    beside = f"stands beside {model.embedding[0]} before" if model.embedding else "stands before"
    return (
        f"The model is not built as Llama is: NeMo keeps only what is named, so add to the first stage what "
        f"{beside} the blocks (a position embedding, a dropout), and to the "
        "last what stands behind them."
    )


def _words(model: Transformer) -> ModuleNames | None:
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


def _sections(blocks: TransformerChoice, names: list[list[str]]) -> dict[str, dict[str, Any]]:
    choice = blocks.choice
    batch = choice.micro_batches * choice.micro_batch_size
    return {
        "step_scheduler": {"global_batch_size": batch, "local_batch_size": batch // choice.replicas},
        "distributed": {
            "strategy": "fsdp2",
            "pp_size": blocks.devices,
            **_tensor_size(blocks.plan.profile.tensor_parallel),
            "dp_size": choice.replicas,
            "dp_replicate_size": 1 if blocks.plan.zero else choice.replicas,
            "activation_checkpointing": choice.recompute == "always",
            "pipeline": {
                "pp_schedule": blocks.schedule or "PipelineScheduleMulti",
                "pp_microbatch_size": choice.micro_batch_size // choice.replicas,
                "module_fqns_per_model_part": names,
            },
        },
    }


def _tensor_size(size: int) -> dict[str, int]:
    return {"tp_size": size} if size > 1 else {}


def _yaml(content: dict[str, Any], indent: str) -> list[str]:
    """Lines of YAML; its scalars and inner lists are those of JSON."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:\n", *_yaml(value, f"{indent}  ")]
        elif isinstance(value, list):
            lines += [f"{indent}{key}:\n", *(f"{indent}  - {json.dumps(item)}\n" for item in value)]
        else:
            lines.append(f"{indent}{key}: {json.dumps(value)}\n")
    return lines
