"""Partitions that other tools hold, read back: lists of layers, layouts, module names, and every export."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from math import prod
from typing import Any, TypeVar

from ..cost_models.errors import UsageError, short_repr
from ..cost_models.quantities import format_count
from ..cost_models.runtime import RUNTIMES, TORCH_CLASSES
from ..cost_models.schedule_text import read_schedule, register_order, write_program
from ..cost_models.schedules import PUBLISHED
from ..cost_models.text_files import detect_kind
from ..cost_models.transformer.pipeline_layout import layout_problems, stage_letters
from ..planner.plan_file import Partition, Recompute
from .documents import (
    DeepspeedExport,
    HuggingfaceExport,
    LayoutExport,
    NemoExport,
    PipeExport,
    TorchExport,
    TorchtitanExport,
    document_class,
    hash_names,
)
from .trainer_options import (
    Options,
    flatten_options,
    is_set,
    parse_options,
    parse_yaml,
    partition_error,
    read_module_lists,
    read_names,
    read_number,
)
from .transformer_blocks import (
    EMBEDDINGS,
    NotBlocksError,
    Transformer,
    blocks_or_none,
    find_blocks,
    first_block_words,
    is_small,
)


def from_counts(counts: Sequence[int], names: Sequence[str], where: str) -> Partition:
    """The partition of a list of layers a stage; of transformer blocks a stage, where they are as many as the
    blocks."""
    _check_positive(counts, where)
    layers = len(names)
    if sum(counts) == layers:
        return Partition("balance", tuple(accumulate(counts)))
    model = blocks_or_none(names)
    if model is None or sum(counts) != model.blocks:
        raise partition_error(
            where,
            f"the balance adds up to {format_count(sum(counts), 'layer')}, the profile has {layers}",
            "Name the profile of that model, cut into the same layers: profile=FILE",
        )
    note = f"the list counts the {model.blocks} transformer blocks"
    return from_blocks(counts, names, where, "blocks").with_notes(note)


def from_blocks(
    counts: Sequence[int], names: Sequence[str], where: str, format: str, moved: int = 0
) -> Partition:
    """The partition of transformer blocks a stage: the embedding is on the first stage, the head on the last,
    but for its first `moved` layers, one of which each of the stages before has, which have no block."""
    model = find_stack(names, where)
    if sum(counts) != model.blocks:
        raise partition_error(
            where,
            f"it places {sum(counts)} transformer blocks, the profile has {model.blocks}",
            "Name the profile of that model: profile=FILE",
        )
    done = list(accumulate(counts))
    ends = [model.ends[count] for count in done[:-1]]
    if moved:
        ends[-moved:] = [end + number for number, end in enumerate(ends[-moved:], start=1)]
    return check_stages(Partition(format, (*ends, len(names))), where)


def find_stack(names: Sequence[str], where: str) -> Transformer:
    """The transformer of a profile. Raises FileError where it is none."""
    try:
        return find_blocks(names)
    except NotBlocksError as error:
        raise partition_error(
            where,
            f"it places transformer blocks, and in the profile {error}",
            "Name the profile of a transformer: profile=FILE",
        ) from error


def with_first_blocks(partition: Partition, number: int, names: Sequence[str]) -> Partition:
    """The partition, of which every stage runs its first blocks again, at the most so many of them."""
    words = first_block_words(find_blocks(names), partition.ends, number)
    if set(words) <= {"always"}:
        return replace(partition, recompute="always")
    if (partition.virtual_stages or 1) > 1:
        note = (
            f"it runs the first {number} blocks of every virtual stage again; the plan of several stages a "
            "device does not know that, and recomputes whole devices where memory lacks"
        )
        return replace(partition, recompute=None).with_notes(note)
    note = (
        f"it runs the first {number} blocks of every stage again, each by itself; the plan has them, and "
        "what stands before them, in one checkpoint a stage"
    )
    return replace(partition, recompute=None, stage_recompute=words).with_notes(note)


def from_bounds(bounds: Sequence[int], names: Sequence[str], where: str) -> Partition:
    """The partition of DeepSpeed's parts: stage i holds layers bounds[i] up to, not including, bounds[i +
    1]."""
    counts = [end - first for first, end in pairwise(bounds)]
    return replace(from_counts(counts, names, where), format="deepspeed")


def check_stages(partition: Partition, where: str) -> Partition:
    """The partition, where no stage is empty. Raises FileError."""
    for stage, (first, end) in enumerate(pairwise((0, *partition.ends))):
        if end <= first:
            raise partition_error(
                where, f"stage {stage} holds no layer", "Omit it: every stage holds one or more."
            )
    return partition


def _check_positive(counts: Sequence[int], where: str) -> None:
    for stage, count in enumerate(counts):
        if count < 1:
            raise partition_error(where, f"stage {stage} has {count} layers, it must have 1 or more")
    if not counts:
        raise partition_error(where, "it lists no stage")


_GROUP = re.compile(r"\(([^()]+)\)\*(\d{1,18})(?!\d)")
_REPEATED = re.compile(r"(.)\*(\d{1,18})(?!\d)")
MOST = 100_000
"""Characters of a layout without its repetitions."""


def split_layout(layout: str, where: str) -> list[str]:
    """The letters of each (virtual) stage, whatever they are. Raises FileError where they are too many."""
    return _unroll(layout, where).split("|")


def _split_rightly(layout: str, where: str, pipeline: int | None = None) -> list[str]:
    """The letters of each stage. Raises FileError where Megatron-LM does not train the layout.

    `x*n` stands for n of x, `(...)*n` for n of what is inside; commas are passed over. The first stage begins
    with E and the last ends with L; m, a multi-token predictor, stands before L. `pipeline`: its size; None:
    that of the layout, without virtual stages."""
    stages = split_layout(layout, where)
    letters = "".join(stages)
    counts = letters.count("t"), letters.count("m")
    problems = layout_problems(stages, pipeline or len(stages), *counts, spread=True)
    if problems:
        raise partition_error(where, f"layout {layout!r}: {'; '.join(problems)}")
    return stages


def _unroll(layout: str, where: str) -> str:
    """The layout without repetitions and commas."""
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (_GROUP, _REPEATED):
        if sum(len(match[1]) * int(match[2]) for match in pattern.finditer(text)) > MOST:
            raise partition_error(where, f"layout {layout[:40]!r}: it stands for more than {MOST} blocks")
        text = pattern.sub(lambda match: match[1] * int(match[2]), text)
    return text


def from_layout(layout: str, names: Sequence[str], where: str, options: Options) -> Partition:
    """The partition of a layout, with what the options beside it say. Devices without a layer of the profile
    are left out, and multi-token predictors passed over; of empty stages before the head, whose devices have
    layers, each has a norm of the head: with notes. Raises FileError."""
    pipeline = read_number(options, "pipeline_model_parallel_size", where)
    stages = _split_rightly(layout, where, pipeline)
    size = pipeline or len(stages)
    virtual = len(stages) // size
    head = max(stage for stage, letters in enumerate(stages) if "L" in letters)
    empty = [stage for stage, letters in enumerate(stages) if stage != head and not letters.strip("mL")]
    idle = _idle_devices(empty, size, virtual)
    counts = {stage: letters.count("t") for stage, letters in enumerate(stages) if stage % size not in idle}
    moved = _norms_of_the_head([stage for stage in empty if stage in counts], counts, names, where)
    batch = read_number(options, "global_batch_size", where)
    full = options.get("recompute_granularity") == ["full"]
    tells_recompute = "recompute_granularity" in options or batch is not None
    partition = replace(
        from_blocks(list(counts.values()), names, where, "megatron", len(moved)).with_notes(
            *_notes(stages, [stage for stage in empty if stage not in counts], moved)
        ),
        virtual_stages=virtual,
        schedule="interleaved" if virtual > 1 else "1f1b",
        replicas=_read_replicas(options, size, where),
        mini_batch=batch,
        samples=read_number(options, "micro_batch_size", where),
        recompute=("always" if full else "never") if tells_recompute else None,
    )
    if not full or options.get("recompute_method") != ["block"]:
        return partition
    number = read_number(options, "recompute_num_layers", where)
    if number is None:
        return replace(partition, recompute=None)
    return with_first_blocks(partition, number, names)


SHARERS = (
    *("tensor_model_parallel_size", "context_parallel_size"),
    *("tensor_parallel_degree", "context_parallel_degree", "tp_size", "cp_size"),
)
"""Options of trainers for the devices that share every layer of a stage."""


def _read_replicas(options: Options, pipeline: int | None, where: str) -> int | None:
    """The replicas of every stage: as trainers name them, or those that the launcher's processes leave.

    A degree of -1 (torchtitan) or none (NeMo) stands for the rest of the processes.
    """

    def number(name: str) -> int | None:
        return (
            None if options.get(name) in (["-1"], ["none"], ["None"]) else read_number(options, name, where)
        )

    if total := number("dp_size"):
        return total
    degrees = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "dp_replicate_size")
    sizes = [number(name) for name in degrees if name in options]
    if sizes and all(sizes):
        return prod(filter(None, sizes))
    processes = (number("nproc_per_node") or 0) * (number("nnodes") or 1)
    devices = (pipeline or 1) * prod(number(name) or 1 for name in SHARERS)
    return processes // devices if processes and processes % devices == 0 else None


def _idle_devices(empty: Sequence[int], size: int, virtual: int) -> set[int]:
    """Those of a pipeline of this size all of whose virtual stages are empty."""
    devices = Counter(stage % size for stage in empty)
    return {device for device, count in devices.items() if count == virtual}


def _norms_of_the_head(
    empty: Sequence[int], counts: Mapping[int, int], names: Sequence[str], where: str
) -> dict[int, str]:
    """By empty stage of a device that has layers in others, the layer of the head that it has here: a plan
    has as many stages on every device, each of a layer or more. Raises FileError where there is none that
    takes next to no time."""
    if not empty:
        return {}
    before_head = list(counts)[-1 - len(empty) : -1]
    head = find_stack(names, where).head
    layers = head[: len(empty)]
    if before_head == list(empty) and len(head) > len(empty) and all(map(is_small, layers)):
        return dict(zip(empty, layers, strict=True))
    raise partition_error(
        where,
        f"its virtual stage {empty[0]} holds no layer of the profile, and its device has layers in others: a "
        "plan has as many stages on every device, each of a layer or more, and the head is not next, or has "
        "no norm to give",
        "pplan.lint_layout costs it as it is, from the model's config.json; or move a block there.",
    )


def _notes(stages: Sequence[str], empty: Sequence[int], moved: Mapping[int, str]) -> list[str]:
    """What a profile does not have of a layout."""
    notes, predictors = [], sum(letters.count("m") for letters in stages)
    if sum("L" in letters for letters in stages) > 1 or sum("m" in letters for letters in stages) > 1:
        notes.append(
            "predictors (m) or loss slots (L) are on several stages, which megatron-core 0.16 refuses and "
            "forks of it train: the head with the model's own loss is on the last stage"
        )
    if predictors:
        notes.append(
            f"{format_count(predictors, 'multi-token predictor')} (m): no layer of the profile, passed over; "
            "pplan.lint_layout costs what m stands for, from the model's config.json"
        )
    if empty:
        numbers = ", ".join(map(str, empty[:10]))
        hold = f"stage {numbers} holds" if len(empty) == 1 else f"stages {numbers} hold"
        notes.append(f"{hold} no layer of the profile: left out, with the devices that only hand tensors on")
    notes += [
        f"stage {stage} holds no layer of the profile: it has {layer} here, which Megatron-LM has with the "
        "head or the last block; pplan.lint_layout costs the layout as it is"
        for stage, layer in moved.items()
    ]
    return notes


SCHEDULES = {name.removeprefix("Schedule").lower(): schedule for schedule, name in TORCH_CLASSES.items()}
"""The plan's word by torch's, in small letters."""
Stage = TypeVar("Stage", int, str)
_RECOMPUTE: dict[str, Recompute] = {"full": "always", "True": "always", "none": "never", "False": "never"}
_BLOCK_NAME = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,18})$")
_NORMS = frozenset({"norm", "ln_f", "final_layernorm", "final_layer_norm"})
_HEADS = frozenset({"lm_head", "output", "embed_out"})


def from_modules(
    parts: Sequence[Sequence[str]], names: Sequence[str], where: str, options: Options
) -> Partition:
    """The partition of lists of module names, one a stage, with what the options beside them say.

    The names are the profile's, or torchtitan's: tok_embeddings, layers.N, norm, lm_head. Raises FileError.
    """
    layers = _Layers(names)
    owner: dict[int, int] = {}
    skipped_names: list[str] = []
    for stage, modules in enumerate(parts):
        for name in modules:
            indices = layers.of(name)
            skipped_names += [name] * (not indices and not name.endswith("rotary_emb"))
            for layer in indices:
                if owner.setdefault(layer, stage) != stage:
                    raise partition_error(
                        where, f"{name} is on stages {owner[layer]} and {stage}", "Name it once."
                    )
    stages = layers.assign_stages(owner, where)
    partition = _in_order(stages, len(parts), "torchtitan", where)
    if skipped_names:
        partition = partition.with_notes(
            f"{', '.join(dict.fromkeys(skipped_names))}: no layer of the profile, passed over"
        )
    return _with_options(partition, options, where)


def from_device_map(places: Mapping[str, object], names: Sequence[str], where: str) -> Partition:
    """The partition of a device_map: a stage is what follows one another on one device. Raises FileError."""
    layers = _Layers(names)
    devices = {name: str(place).removeprefix("cuda:") for name, place in places.items()}
    owner: dict[int, str] = {}
    for name in sorted(devices, key=lambda name: (name.count("."), len(name)), reverse=True):
        for layer in layers.of(name) if name else range(len(names)):
            owner.setdefault(layer, devices[name])
    indices = layers.assign_stages(owner, where)
    order = [device for device, _ in groupby(indices)]
    twice = [device for device in order if order.count(device) > 1]
    if twice:
        raise partition_error(
            where,
            f"device {twice[0]} has layers before and after those of another",
            "pplan's stages are layers that follow one another: give each device one run of them.",
        )
    stages = [order.index(device) for device in indices]
    partition = _in_order(stages, len(order), "device_map", where)
    return replace(partition, schedule="naive", devices=read_ranks(order))


def read_ranks(names: Sequence[object]) -> tuple[int, ...] | None:
    """Of devices, as numbers or cuda:N, each once; None where one is something else."""
    words = [str(name).removeprefix("cuda:") for name in names]
    ranks = [int(word) for word in words if re.fullmatch(r"[0-9]{1,9}", word)]
    return tuple(ranks) if ranks and len(ranks) == len(names) == len(set(ranks)) else None


class _Layers:
    """The layers of a profile, found by a module's name."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.model = names, blocks_or_none(names)

    def of(self, module: str) -> list[int]:
        """The layers of a module, by the profile's names or else by what such modules are called."""
        inside = [
            layer for layer, name in enumerate(self.names) if name == module or name.startswith(f"{module}.")
        ]
        return inside or ([] if self.model is None else self._find_by_custom(self.model, module))

    def _find_by_custom(self, model: Transformer, module: str) -> list[int]:
        last, block = module.rpartition(".")[2], _BLOCK_NAME.search(module)
        if block:
            number = int(block[1])
            return list(range(*model.ends[number : number + 2])) if number < model.blocks else []
        if last in EMBEDDINGS:
            return list(range(model.ends[0]))
        head = range(model.ends[-1], len(self.names))
        if last in _HEADS:
            return list(head[-1:])
        return list(head[:-1]) if last in _NORMS else []

    def assign_stages(self, owner: Mapping[int, Stage], where: str) -> list[Stage]:
        """The stage of each layer; what is inside a head and not named goes with the layer before."""
        stages: list[Stage] = []
        for layer, name in enumerate(self.names):
            if layer in owner:
                stages.append(owner[layer])
            elif self._inside_head(layer):
                stages.append(stages[-1])
            else:
                raise partition_error(
                    where, f"layer {layer}, {name}, is on no stage", "Name the module on one of them."
                )
        return stages

    def _inside_head(self, layer: int) -> bool:
        """Whether it is neither the head's first layer nor its last: a slice between norm and projection."""
        return self.model is not None and self.model.ends[-1] < layer < len(self.names) - 1


def _in_order(stages: Sequence[int], count: int, format: str, where: str) -> Partition:
    """The partition of the stage of each layer. Raises FileError where stages fall, or one is empty."""
    for layer, (before, after) in enumerate(pairwise(stages)):
        if after < before:
            raise partition_error(
                where,
                f"layer {layer + 1} is on stage {after}, layer {layer} before it on stage {before}",
                "Stages hold the layers in their order.",
            )
    ends = tuple(sum(stage <= number for stage in stages) for number in range(count))
    return check_stages(Partition(format, ends), where)


def _with_options(partition: Partition, options: Options, where: str) -> Partition:
    """The partition, with what torchtitan's options, or a recipe of NeMo, say beside the names."""
    devices = read_number(options, "pipeline_parallel_degree", where) or read_number(
        options, "pp_size", where
    )
    stages = len(partition.ends)
    if devices and stages % devices:
        raise partition_error(
            where, f"{stages} stages on a pipeline of {devices} devices", "Give as many to each device."
        )
    word = (options.get("pipeline_parallel_schedule") or options.get("pp_schedule") or [""])[0]
    schedule = SCHEDULES.get(word.lower().replace("_", ""))
    if word and schedule is None:
        partition = partition.with_notes(f"schedule {word} does not tell the order: `schedule` names it")
    samples = read_number(options, "pipeline_parallel_microbatch_size", where) or read_number(
        options, "pp_microbatch_size", where
    )
    return replace(
        partition,
        schedule=schedule,
        virtual_stages=stages // devices if devices else None,
        samples=samples,
        replicas=_read_replicas(options, devices, where),
        mini_batch=read_number(options, "global_batch_size", where),
        recompute=_RECOMPUTE.get((options.get("activation_checkpointing") or [""])[0]),
    )


_LIST = re.compile(r"[\[(]?\s*\d{1,18}(?:(?:\s*,\s*|\s+)\d{1,18})*\s*(?:,\s*)?[\])]?")
"""Between two numbers stands something: without it there are ever so many ways to read a row of digits."""
_BALANCE = re.compile(r"\b(?:balance|num_layers_per_stage|parts)\b[\"']?\s*[=:]\s*\[([\d,\s]+)\]")
_DIGITS = 18
"""Of the longest number that is read."""
_LAYOUT = re.compile(r"\s*E[EtmL|()*,\d\s]*")
_LAYOUT_FIRST = re.compile(r"\s*E[tmL*\d]*\|")
_TRAINER = re.compile(r"module_fqns_per_model_part|pipeline[_-](?:model[_-])?parallel")


def read_partition(text: str, names: Sequence[str], where: str) -> Partition:
    """The partition in `text` of the layers of these names. `where` names it in errors.

    The formats: a balance list (also Colossal-AI's num_layers_per_stage), DeepSpeed's parts (which begin with
    0), a Megatron layout, alone or among the options that go with it, torchtitan's lists of module names,
    also in a recipe of NeMo, a device_map of Hugging Face, and everything that `pplan export` writes.
    Raises FileError.
    """
    try:
        content = _load_json(text)
    except ValueError:
        return _from_text(text, names, where)
    except RecursionError as error:
        raise partition_error(where, "it is nested too deep") from error
    if isinstance(content, dict) and "schema" in content:
        return _from_document(text, content, names, where)
    return _from_json(content, names, where)


def looks_like_partition(text: str) -> bool:
    """Return whether a text has the form of one of the formats that `read_partition` reads."""
    try:
        _load_json(text)
    except RecursionError:
        return True
    except ValueError:
        whole = _LIST.fullmatch(text.strip()) or _LAYOUT.fullmatch(text)
        return bool(whole or _TRAINER.search(text) or _BALANCE.search(text))
    return True


def _load_json(text: str) -> Any:
    """The value of a JSON text, or of a list or dict as Python prints it. Raises ValueError."""
    try:
        return json.loads(text)
    except ValueError:
        if not text.lstrip().startswith(("[", "{")):
            raise
        return json.loads(text.replace("'", '"'))


def _from_document(text: str, content: dict[str, Any], names: Sequence[str], where: str) -> Partition:
    kind = detect_kind(text)
    if kind in ("plan", "profile", "simulation"):
        hint = "Give it to show, simulate or export." if kind == "plan" else ""
        raise partition_error(where, f"this is a {kind} of pplan, not another tool's partition", hint)
    runtime = content.get("runtime")
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise partition_error(where, f"runtime is {short_repr(runtime)}, which is not known")
    if content.get("layers_sha256") not in (None, "", hash_names(names)):
        raise partition_error(
            where,
            f"it was exported for {content.get('model')}, the profile has other layers",
            "Name the profile of that plan: profile=FILE",
        )
    return from_export(text, runtime, names, where)


def _from_json(content: Any, names: Sequence[str], where: str) -> Partition:
    """A list, or an object that holds one under the name that a tool calls it."""
    if isinstance(content, int) and not isinstance(content, bool):
        return from_counts([content], names, where)
    if isinstance(content, list) and content and all(type(item) is int for item in content):
        return from_numbers(content, names, where)
    if isinstance(content, list) and (parts := _parts(content)):
        return from_modules(parts, names, where, {})
    if isinstance(content, dict):
        for key, read_value in _KEYS.items():
            if key in content:
                return read_value(content[key], names, where)
        options = flatten_options(content)
        if options.keys() & set(PARTITION_KEYS):
            return _from_options(options, names, where)
        if content and all(isinstance(place, int | str) for place in content.values()):
            return from_device_map(content, names, where)
    raise partition_error(where, "its JSON is no partition")


def from_numbers(numbers: Sequence[int], names: Sequence[str], where: str) -> Partition:
    """A balance, or DeepSpeed's parts, which begin with 0."""
    if numbers[0] == 0 and len(numbers) > 1:
        return from_bounds(numbers, names, where)
    return from_counts(numbers, names, where)


_KEYS: dict[str, Callable[[Any, Sequence[str], str], Partition]] = {
    "balance": _from_json,
    "num_layers_per_stage": _from_json,
    "parts": _from_json,
    "device_map": _from_json,
}


def _from_text(text: str, names: Sequence[str], where: str) -> Partition:
    if _LIST.fullmatch(text.strip()):
        return from_numbers(_numbers(text, where), names, where)
    if _LAYOUT.fullmatch(text):
        return from_layout(text.strip(), names, where, {})
    if _TRAINER.search(text) and not _LAYOUT_FIRST.match(text):
        options = _options_in(text, where)
        if options.keys() & set(PARTITION_KEYS):
            return _from_options(options, names, where)
    if match := _BALANCE.search(text):
        return from_numbers(_numbers(match[1], where), names, where)
    raise partition_error(
        where, "it is in none of the formats that are read" if text.strip() else "it is empty"
    )


def _numbers(text: str, where: str) -> list[int]:
    parts = re.findall(r"\d+", text)
    if not parts or max(map(len, parts)) > _DIGITS:
        raise partition_error(where, "its list holds no number, or one that is too long")
    return [int(part) for part in parts]


def _options_in(text: str, where: str) -> Options:
    """The options in torchtitan's TOML, a recipe of NeMo or Megatron-Bridge, or a command line."""
    try:
        return flatten_options(tomllib.loads(text))
    except (ValueError, RecursionError):
        pass
    if re.search(rf"^\s*(?:{'|'.join(PARTITION_KEYS)}):", text, re.MULTILINE):
        return parse_yaml(text, where) | _launcher_options(text)
    options = parse_options(text, where)
    if subcommand := re.search(r"\bactivation_checkpoint(?::|\.mode[\s=]+)([\w-]+)", text):
        options["activation_checkpointing"] = [subcommand[1]]
    return options | _launcher_options(text)


def _launcher_options(text: str) -> Options:
    """The numbers of torchrun's processes, also in a comment: `pplan export` writes the command there."""
    matches = re.findall(r"--(nproc|nnodes)(?:[-_]per[-_]node)?[\s=]+(\d{1,6})\b", text)
    return {"nproc_per_node" if name == "nproc" else name: [number] for name, number in matches}


PARTITION_KEYS = (
    "pipeline_model_parallel_layout",
    "module_fqns_per_model_part",
    "pipeline_parallel_split_points",
    "pipeline_model_parallel_size",
)
"""Options of trainers that name a partition; the first that is there does."""


def _from_options(options: Options, names: Sequence[str], where: str) -> Partition:
    """The partition that a trainer's options name. Raises FileError."""
    if layout := options.get("pipeline_model_parallel_layout"):
        return from_layout(layout[0], names, where, options)
    if "module_fqns_per_model_part" in options:
        parts = read_module_lists(options)
        if not parts:
            raise partition_error(where, "module_fqns_per_model_part lists no stage")
        return from_modules(parts, names, where, options)
    if "pipeline_parallel_split_points" in options:
        return from_split_points(options, names, where)
    blocks = _megatron_blocks(options, find_stack(names, where).blocks, where)
    return from_layout("|".join(stage_letters(blocks)), names, where, options)


def from_split_points(options: Options, names: Sequence[str], where: str) -> Partition:
    """The partition of torchtitan's split points: each names the first module of a stage. Raises FileError.

    Source: `pipeline_parallel_split_points` of torchtitan 0.1; 0.3 takes lists of modules instead.
    """
    layers, ends = _Layers(names), []
    for point in read_names(options["pipeline_parallel_split_points"]):
        indices = layers.of(point)
        if not indices:
            raise partition_error(
                where, f"split point {point}: no layer of the profile", "Name a module that begins a stage."
            )
        ends.append(indices[0])
    partition = check_stages(Partition("torchtitan", (*ends, len(names))), where)
    return _with_options(partition, options, where)


def _megatron_blocks(options: Options, blocks: int, where: str) -> list[int]:
    """Transformer blocks by virtual stage, as Megatron-LM places them where no layout is given.

    The slots of a pipeline rank are an equal share of the blocks, to which the embedding and the loss may
    count as one each; or `--decoder-first-pipeline-num-layers` and `--decoder-last-pipeline-num-layers` say
    how many blocks the first and the last rank have. Virtual stages divide a rank's slots equally. Source:
    megatron-core 0.16.1, `transformer/transformer_block.py` (get_num_layers_to_build), Megatron-LM's
    `megatron/training/arguments.py`.

    Raises FileError for numbers that it refuses.
    """

    def number(*words: str) -> int | None:
        return next((value for word in words if (value := read_number(options, word, where))), None)

    size, count = number("pipeline_model_parallel_size") or 1, number("num_layers") or blocks
    first = number("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = number("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    embedding = is_set(options, "account_for_embedding_in_pipeline_split")
    loss = is_set(options, "account_for_loss_in_pipeline_split")
    uneven = [stage for stage in (first, last) if stage is not None]
    slots = count + embedding + loss
    rest, ranks = slots - sum(uneven), size - len(uneven)
    share = rest // max(ranks, 1)
    virtual = number("num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size") or 1
    per_stage = number("num_layers_per_virtual_pipeline_stage")
    if per_stage:
        virtual = max(share // per_stage, 1)
    hint = "Give the numbers that Megatron-LM trains with."
    if size * virtual > slots:
        ranks_text = f"{format_count(size, 'pipeline rank')} of {format_count(virtual, 'virtual stage')}"
        raise partition_error(where, f"{ranks_text} are more than the {format_count(slots, 'layer')}", hint)
    by_rank = [*uneven[: first is not None], *[share] * ranks, *uneven[first is not None :]]
    counts = [layers // virtual for layers in by_rank] * virtual
    counts[0], counts[-1] = counts[0] - embedding, counts[-1] - loss
    checks = [
        (
            count != blocks,
            f"num_layers is {count}, the profile has {format_count(blocks, 'transformer block')}",
        ),
        (
            uneven and (embedding or loss),
            "the embedding or the loss counts as a layer, and the first or last rank's number is given",
        ),
        (
            uneven and per_stage,
            "num_layers_per_virtual_pipeline_stage and the first or last rank's number are given",
        ),
        (
            per_stage and not uneven and share % per_stage,
            f"{share} layers of a rank are no multiple of {per_stage} per virtual stage",
        ),
        (
            rest < 0 or ranks < 0 or rest != share * ranks,
            f"{rest} layers do not divide among {format_count(max(ranks, 0), 'pipeline rank')}",
        ),
        (
            any(layers % virtual for layers in by_rank),
            f"{', '.join(map(str, by_rank))} layers by rank do not divide into {virtual} virtual stages",
        ),
        (min(counts) < 0, "a stage would have less than no block"),
    ]
    if problems := [problem for is_wrong, problem in checks if is_wrong]:
        raise partition_error(where, "; ".join(problems), hint)
    return counts


def _parts(content: list[Any]) -> list[list[str]]:
    """Lists of module names: each a list, or a text with commas; none where it is something else."""
    parts = [item.split(",") if isinstance(item, str) else item for item in content]
    all_names = all(
        isinstance(part, list) and part and all(isinstance(n, str) for n in part) for part in parts
    )
    return parts if all_names else []


def with_virtual_stages(partition: Partition, virtual_stages: int | None, where: str) -> Partition:
    """The partition with so many stages a device, where that is asked for: 1F1B of several is interleaved.

    Raises UsageError.
    """
    if virtual_stages is None:
        return partition
    if len(partition.ends) % virtual_stages:
        raise UsageError(
            f"virtual_stages={virtual_stages}: {where} has {format_count(len(partition.ends), 'stage')}",
            "Give a number that divides them.",
        )
    is_interleaved = virtual_stages > 1 and partition.schedule == "1f1b"
    schedule = "interleaved" if is_interleaved else partition.schedule
    return replace(partition, virtual_stages=virtual_stages, schedule=schedule)


def from_export(text: str, runtime: str, names: Sequence[str], where: str) -> Partition:
    """The partition in a file for `runtime`. Raises FileError."""
    document: Any = document_class(runtime).parse(text, where)
    partition: Partition = globals()[RUNTIMES[runtime].reader](document, names, where)
    if partition.ends[-1] != len(names):
        raise partition_error(
            where,
            f"it has {format_count(partition.ends[-1], 'layer')}, the profile {len(names)}",
            "Name the profile of that model: profile=FILE",
        )
    words: list[Any] = document.recompute if isinstance(document, TorchExport) else [document.recompute]
    alike = len(set(words)) == 1 and words[0] in ("never", "always", "except_last", None)
    partition = replace(
        partition,
        format=runtime,
        runtime=runtime,
        schedule=document.order,
        virtual_stages=document.virtual_stages,
        replicas=document.replicas,
        devices=partition.devices or read_ranks(getattr(document, "devices", [])),
        mini_batch=document.mini_batch,
        samples=document.replica_samples,
        recompute=words[0] if alike else None,
        stage_recompute=None if alike else tuple(words),
    )
    if isinstance(document, LayoutExport) and document.first_blocks is not None:
        partition = with_first_blocks(partition, document.first_blocks, names)
    # Megatron-LM runs first blocks again one by one: no plan for it does, in one checkpoint.
    if partition.stage_recompute is not None and not RUNTIMES[runtime].recompute_by_stage:
        partition = replace(partition, runtime=None)
    return check_stages(partition, where)


def read_parts(document: PipeExport | DeepspeedExport, names: Sequence[str], where: str) -> Partition:
    """The stages of an export that has their bounds."""
    del names, where
    return Partition("", tuple(document.parts[1:]))


def read_torch(document: TorchExport, names: Sequence[str], where: str) -> Partition:
    """The stages of an export to torch. An order that pplan does not know is known from then on."""
    del names, where
    if document.order not in PUBLISHED:
        order = read_schedule(write_program(document.order, document.program))
        register_order(order, len(document.stages), document.micro_batches, document.virtual_stages)
    return Partition("", tuple(document.parts[1:]))


def read_layout(document: LayoutExport, names: Sequence[str], where: str) -> Partition:
    """The stages of an export that has a layout."""
    return from_layout(document.layout, names, where, {})


def read_modules(document: TorchtitanExport | NemoExport, names: Sequence[str], where: str) -> Partition:
    """The stages of an export that lists their modules."""
    return from_modules(document.module_fqns_per_model_part, names, where, {})


def read_device_map(document: HuggingfaceExport, names: Sequence[str], where: str) -> Partition:
    """The stages of an export that has a device_map."""
    return from_device_map(document.device_map, names, where)
