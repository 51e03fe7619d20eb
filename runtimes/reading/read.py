"""Reads a partition in any of the formats, which it tells by its content."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

from ...cost_models.errors import UsageError, short_repr
from ...cost_models.quantities import format_count
from ...cost_models.runtime import RUNTIMES
from ...cost_models.schedules import PUBLISHED
from ...cost_models.schedules.registration import register_order
from ...cost_models.schedules.schedule_text import read_schedule, write_program
from ...cost_models.text_files import detect_kind
from ..formats.deepspeed_export import DeepspeedExport
from ..formats.export_document import ExportDocument, hash_names
from ..formats.huggingface_export import HuggingfaceExport
from ..formats.megatron_export import LayoutExport, MegatronBridgeExport, MegatronExport
from ..formats.nemo_export import NemoExport
from ..formats.pipe_export import FairscaleExport, PipeExport, TorchgpipeExport
from ..formats.torch_export import TorchExport
from ..formats.torchtitan_export import TorchtitanExport
from .megatron_layout import from_layout
from .module_names import from_device_map, from_modules, read_ranks
from .partition import (
    Partition,
    check_stages,
    from_bounds,
    from_counts,
    partition_error,
    with_first_blocks,
)
from .trainer_options import Options, flatten_options, parse_options, parse_yaml, read_module_lists

_LIST = re.compile(r"[\[(]?\s*\d{1,18}(?:(?:\s*,\s*|\s+)\d{1,18})*\s*(?:,\s*)?[\])]?")
"""Between two numbers stands something: without it there are ever so many ways to read a row of digits."""
_BALANCE = re.compile(r"\b(?:balance|num_layers_per_stage|parts)\b[\"']?\s*[=:]\s*\[([\d,\s]+)\]")
_DIGITS = 18
"""Of the longest number that is read."""
_LAYOUT = re.compile(r"\s*E[EtmL|()*,\d\s]*")


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
        if "module_fqns_per_model_part" in options or "pipeline_model_parallel_layout" in options:
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
    if "module_fqns_per_model_part" in text or "layout" in text:
        options = _options_in(text, where)
        if "module_fqns_per_model_part" in text or "pipeline_model_parallel_layout" in options:
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
    if re.search(r"^\s*(?:module_fqns_per_model_part|pipeline_model_parallel_layout):", text, re.MULTILINE):
        return parse_yaml(text)
    options = parse_options(text, where)
    if subcommand := re.search(r"\bactivation_checkpoint(?::|\.mode[\s=]+)([\w-]+)", text):
        options["activation_checkpointing"] = [subcommand[1]]
    return options


def _from_options(options: Options, names: Sequence[str], where: str) -> Partition:
    """The partition that a trainer's options name."""
    if layout := options.get("pipeline_model_parallel_layout"):
        return from_layout(layout[0], names, where, options)
    parts = read_module_lists(options)
    if not parts:
        raise partition_error(where, "module_fqns_per_model_part lists no stage")
    return from_modules(parts, names, where, options)


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


KINDS: dict[str, type[ExportDocument]] = {
    kind.kind: kind
    for kind in (
        TorchgpipeExport,
        FairscaleExport,
        DeepspeedExport,
        TorchExport,
        HuggingfaceExport,
        MegatronExport,
        MegatronBridgeExport,
        TorchtitanExport,
        NemoExport,
    )
}


def from_export(text: str, runtime: str, names: Sequence[str], where: str) -> Partition:
    """The partition in a file for `runtime`. Raises FileError."""
    document = KINDS[runtime].parse(text, where)
    partition = _partition(document, names, where)
    if partition.ends[-1] != len(names):
        raise partition_error(
            where,
            f"it has {format_count(partition.ends[-1], 'layer')}, the profile {len(names)}",
            "Name the profile of that model: profile=FILE",
        )
    replicas = getattr(document, "replicas", 1)
    return check_stages(
        replace(
            partition,
            format=runtime,
            # Megatron-LM runs first blocks again one by one: no plan for it does, in one checkpoint.
            runtime=runtime if partition.stage_recompute is None or runtime == "torch" else None,
            replicas=replicas,
            devices=partition.devices or read_ranks(getattr(document, "devices", [])),
            mini_batch=document.mini_batch,
            samples=document.micro_batch_size // replicas,
        ),
        where,
    )


def _partition(document: ExportDocument, names: Sequence[str], where: str) -> Partition:
    """The stages, schedule and recomputation."""
    if isinstance(document, PipeExport):
        partition = Partition("", tuple(accumulate(document.balance)), schedule="gpipe")
        return replace(partition, virtual_stages=1, recompute=document.checkpoint)
    if isinstance(document, DeepspeedExport):
        pipeline = document.config.get("pipeline")
        interval = pipeline.get("activation_checkpoint_interval") if isinstance(pipeline, dict) else None
        recomputes = isinstance(interval, int) and interval > 0
        partition = Partition("", tuple(document.parts[1:]), virtual_stages=1, schedule="1f1b")
        return replace(partition, recompute="always" if recomputes else "never")
    if isinstance(document, TorchExport):
        if document.order not in PUBLISHED:
            register_order(
                read_schedule(write_program(document.order, document.program)),
                len(document.stages),
                document.micro_batches,
                len(document.stages[0]),
            )
        words = set(document.recompute)
        return Partition(
            "",
            tuple(document.parts[1:]),
            virtual_stages=len(document.stages[0]),
            schedule=document.order,
            recompute="always" if words == {"always"} else "never" if words == {"never"} else None,
            stage_recompute=None if words in ({"always"}, {"never"}) else tuple(document.recompute),
        )
    if isinstance(document, HuggingfaceExport):
        return replace(from_device_map(document.device_map, names, where), virtual_stages=1)
    return _from_trainer(document, names, where)


def _from_trainer(document: ExportDocument, names: Sequence[str], where: str) -> Partition:
    if isinstance(document, LayoutExport):
        partition = replace(
            from_layout(document.layout, names, where, {}), virtual_stages=document.virtual_stages
        )
        if document.first_blocks is not None:
            partition = with_first_blocks(partition, document.first_blocks, names)
            return replace(partition, schedule=document.order)
    elif isinstance(document, TorchtitanExport | NemoExport):
        partition = from_modules(document.module_fqns_per_model_part, names, where, {})
    else:
        raise partition_error(where, f"files for {document.runtime} are not read")
    return replace(
        partition,
        virtual_stages=document.virtual_stages,
        schedule=document.order,
        recompute=document.recompute,
    )
