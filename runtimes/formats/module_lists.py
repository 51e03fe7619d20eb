"""What each stage of a transformer holds, as a list of names of modules: torchtitan's way, and NeMo's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

from pydantic import Field

from ...cost_models.errors import ExportError
from ...cost_models.runtime import find_runtime
from ...planner.plan_file import Plan
from .plan_choice import Choice, choose
from .torch_actions import OWN_ORDER, action_rows, build_program, schedule_class
from .trainer_text import join_remarks, trainer_fields
from .transformer_blocks import Transformer, check_whole_blocks, ends_remark, find_plan_blocks

EMBEDDINGS = frozenset({"embed_tokens", "tok_embeddings", "wte", "embed_in", "word_embeddings"})
"""Last parts of the names that token embeddings go by."""
ModuleLists = Annotated[list[Annotated[list[str], Field(min_length=1)]], Field(min_length=1)]


@dataclass(frozen=True)
class ModuleNames:
    """What a decoder's modules are called: `blocks` is the list of its blocks."""

    embedding: str
    blocks: str
    norm: str
    head: str


@dataclass(frozen=True)
class TransformerChoice:
    """A plan's transformer as a trainer is given it; `fields` are those of its document.

    `schedule` is the class of torch.distributed.pipelining without its first word, None where the trainer is
    given `actions` instead, a line of CSV a device.
    """

    plan: Plan
    model: Transformer
    choice: Choice
    ends: tuple[int, ...]
    fields: dict[str, Any]
    schedule: str | None
    actions: tuple[str, ...]
    remark: str | None

    @property
    def devices(self) -> int:
        """The devices of a pipeline."""
        return len(self.choice.balance) // self.choice.virtual_stages


def choose_blocks(plan: Plan, runtime: str) -> TransformerChoice:
    """What `runtime` is given of a plan: whole blocks. Raises ExportError."""
    choice, remark = choose(plan, find_runtime(runtime))
    model = find_plan_blocks(plan, runtime)
    ends = tuple(accumulate(choice.balance))
    check_whole_blocks(plan, model, ends, runtime)
    devices = len(ends) // choice.virtual_stages
    program = build_program(choice.schedule, devices, choice.micro_batches, choice.virtual_stages)
    name = schedule_class(choice.schedule, program)
    schedule = None if name == OWN_ORDER else name.removeprefix("Schedule")
    actions = () if schedule else tuple(action_rows(program))
    remarks = join_remarks(remark, _unnamed_remark(model, runtime))
    return TransformerChoice(
        plan, model, choice, ends, trainer_fields(plan, choice, runtime), schedule, actions, remarks
    )


def _unnamed_remark(model: Transformer, runtime: str) -> str | None:
    """A sentence where the lists lack modules that the model has, which would be left out."""
    remark = ends_remark(model, runtime)
    if remark is None:
        return None
    return f"{remark} Add their modules to the first and the last list: what no list names is left out."


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


def is_decoder(model: Transformer) -> bool:
    """Whether it begins with a token embedding and ends with a head of its own: as Llama does."""
    names = [name.rpartition(".")[2] for name in model.embedding]
    return len(names) == 1 and names[0] in EMBEDDINGS and bool(model.head)
