"""Models of Hugging Face transformers, from a configuration with random weights. Nothing is downloaded."""

from __future__ import annotations

import copy
import difflib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ...cost_models.errors import MachineError, ModelError, short_repr
from ...cost_models.quantities import format_bytes
from ..local_machine import free_host_bytes
from ..user_model.failures import at_user_line, first_line, is_out_of_memory
from ..user_model.loaded_model import ModelInput
from ..user_model.seeding import fixed_seed
from .configuration_keys import configured_size
from .made_up_inputs import InputMaker
from .repeated_blocks import block_patterns, record_call_order, registration_order
from .transformers_config import configure_model, transformers_session

_SEQUENCE = 512
"""Tokens of a sample where nobody says, or all that the model has positions for."""
_SHORT = 8
"""Tokens of the run that tells the order of the modules."""
_HEADS = (
    "MASKED_LM", "CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "OBJECT_DETECTION",
    "VIDEO_CLASSIFICATION", "CTC", "AUDIO_CLASSIFICATION", "DEPTH_ESTIMATION", "IMAGE_TO_IMAGE",
)  # fmt: skip
"""What a family is usually trained as: the first of these tables that has it."""
_WITH_DECODER = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "OBJECT_DETECTION", "IMAGE_TEXT_TO_TEXT")


@dataclass(frozen=True, eq=False)
class TransformersModel:
    """A model of transformers, with what a profile needs to know of it."""

    module: nn.Module
    name: str
    example: ModelInput
    """Random token ids of shape (2, sequence), or images; of the keywords its forward needs."""
    loss: str
    granularity: str
    """`module:` with its blocks and what follows them; `block` where it repeats none."""
    notes: tuple[str, ...]


def load_transformers(
    name: str,
    settings: Mapping[str, object],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    known_only: bool = False,
    batch: ModelInput | None = None,
) -> TransformersModel:
    """The model of configuration `name`, random weights drawn from `seed`, in train mode and float32.

    `name` is what stands after `hf:`, a model type as `gpt2` or the path of a config.json (or of its
    folder). `settings` are `layers`, `hidden`, `heads`, `intermediate`, `vocabulary`, `sequence`, `classes`
    and keys of the configuration itself. On the device `meta` weights take no memory; the example is on the
    CPU in any case; `batch`: the example, which is then not made up. `known_only`: `name` is a model type,
    and no path is read. Raises ModelError, FileError, UsageError, and MachineError without transformers.
    """
    with transformers_session() as transformers, fixed_seed(seed):
        configured = configure_model(transformers, name, settings, known_only=known_only)
        module = _build_model(
            _class_of(transformers, configured.config, name), configured.config, name, torch.device(device)
        )
        if batch is not None:
            example, order, lacking = batch, _order_on(module, batch, name), tuple[str, ...]()
        else:
            sequence = _sequence(module, configured.config, configured.sequence, name)
            example, order, lacking = _example_and_order(module, configured.config, sequence, seed, name)
    patterns = block_patterns(module, order)
    return TransformersModel(
        module=module,
        name=f"hf:{name}",
        example=example,
        loss="cross-entropy",
        granularity=f"module:{','.join(patterns)}" if patterns else "block",
        notes=(*configured.notes, *lacking, *_ties(module, patterns, configured.config)),
    )


def _class_of(transformers: Any, config: Any, name: str) -> Any:
    """The class that a file names, or the one with the head that the family is usually trained with."""
    classes = config.architectures or [None]
    if not isinstance(classes, list | tuple) or not isinstance(classes[0], str | None):
        raise ModelError(
            f"hf:{name}: architectures is no list of names of classes: {short_repr(classes)}",
            "Name one with settings={'architectures': ['...']}, or omit the key.",
        )
    if classes[0] is not None:
        return _class_named(transformers, classes[0], name)
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    heads = _WITH_DECODER if config.is_encoder_decoder else _HEADS
    for table in (*(f"MODEL_FOR_{head}_MAPPING_NAMES" for head in heads), "MODEL_MAPPING_NAMES"):
        family = getattr(tables, table, {}).get(config.model_type)
        if family is not None:
            return _class_named(transformers, family if isinstance(family, str) else family[0], name)
    raise ModelError(
        f"hf:{name}: transformers has no model for a configuration of type {config.model_type}",
        "Name its class with settings={'architectures': ['...']}, or build it in a package.module:factory.",
    )


def _class_named(transformers: Any, class_name: str, name: str) -> Any:
    # Without a package that a class needs, transformers hands out a dummy that is no module.
    family = getattr(transformers, class_name, None)
    if isinstance(family, type) and issubclass(family, nn.Module):
        return family
    models = [other for other in dir(transformers) if "For" in other or other.endswith("Model")]
    near = difflib.get_close_matches(class_name, models, n=4)
    raise ModelError(
        f"hf:{name}: its architectures name {class_name}, which transformers {transformers.__version__} "
        "does not have",
        (f"Nearest: {', '.join(near)}. " if near else "")
        + "Code beside a configuration is not run; build such a model in a package.module:factory.",
    )


def _refuse_too_large(family: Any, config: Any, name: str) -> None:
    """Counted on the meta device: Linux promises more memory than it has, and ends the process later."""
    try:
        with torch.device("meta"), fixed_seed(0):
            needed = sum(4 * parameter.numel() for parameter in family(copy.deepcopy(config)).parameters())
    except Exception:
        # Some compute sizes with tensors while they are built, which have no values there.
        return
    free = free_host_bytes()
    if free is not None and needed > free:
        raise MachineError(
            f"hf:{name}: its weights take {format_bytes(needed)}, and {format_bytes(free)} are free",
            "Make it smaller (`layers`, `hidden`), or look at its structure alone: device='meta'.",
        )


def _build_model(family: Any, config: Any, name: str, device: torch.device) -> nn.Module:
    if device.type != "meta":
        _refuse_too_large(family, config, name)
    try:
        with device:
            module: nn.Module = family(config)
    except Exception as error:
        if is_out_of_memory(error):
            raise MachineError(
                f"hf:{name}: its weights do not fit in memory: {first_line(error)}",
                "Make it smaller: `layers`, `hidden`.",
            ) from error
        raise ModelError(
            f"hf:{name}: transformers could not build it: {first_line(error)}",
            "Change the sizes (`layers`, `hidden`, `heads`, `vocabulary`), or a key with `settings`.",
        ) from error
    # torch.Tensor(...) makes a tensor on the CPU, whatever the default device is.
    return module.to(device).float().train()


def _sequence(module: nn.Module, config: Any, length: int | None, name: str) -> int:
    """Tokens of a sample. Raises ModelError where the model's table of positions is shorter than asked."""
    room = configured_size(config.get_text_config(), "positions")
    for path, table in module.named_modules():
        # RoBERTa counts positions from behind the padding token on, in a table with room for those too.
        if "position" in path and isinstance(table, nn.Embedding) and table.padding_idx is not None:
            room = min(room or table.num_embeddings, table.num_embeddings - table.padding_idx - 1)
    if length is None:
        return min(_SEQUENCE, room or _SEQUENCE)
    if room is not None and length > room:
        raise ModelError(
            f"hf:{name}: a sequence of {length} tokens, and positions for {room}",
            f"Give sequence={room}, or more with settings={{'max_position_embeddings': {length + 2}}}.",
        )
    return length


def _example_and_order(
    module: nn.Module, config: Any, sequence: int, seed: int, name: str
) -> tuple[ModelInput, dict[str, int], tuple[str, ...]]:
    """The first of the inputs made up that the model runs on, the order of its modules then, and a note where
    it is not the whole of what it takes."""
    maker = InputMaker(module, config, sequence, seed)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    failures: dict[tuple[str, ...], Exception] = {}
    first: ModelInput | None = None
    for inputs in maker.proposals():
        example = ModelInput.of(inputs)
        first = first or example
        try:
            order = _order(module, example, device)
        except Exception as error:
            failures[tuple(inputs)] = error
            continue
        lost = [key for key in first.kwargs if key not in inputs]
        why = next(map(first_line, failures.values()), "")
        note = f"the example has no {', '.join(lost)}: {type(module).__name__} fails on one made up: {why}"
        return example, order, (note,) if lost else ()
    if first is None:
        lacking = ", ".join(maker.lacking)
        raise ModelError(
            f"hf:{name}: {type(module).__name__} takes {lacking}, which pplan cannot make up",
            "Name a function of yours that returns {keyword: tensor, ...}: "
            "input_like='package.module:function'.",
        )
    if device.type == "meta":
        # What depends on values (which expert a token goes to) has no meaning there.
        return first, registration_order(module), ()
    failing_inputs, failure = next(iter(failures.items()))
    raise ModelError(
        f"hf:{name}: {type(module).__name__} fails on {', '.join(failing_inputs)}: "
        f"{first_line(failure)}{at_user_line(failure)}",
        "Change the sizes, or give it an example input of yours: input_like='package.module:function'.",
    ) from failure


def _order_on(module: nn.Module, batch: ModelInput, name: str) -> dict[str, int]:
    """The order of the modules on the user's own input. Raises ModelError where the model fails on it."""
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    try:
        return _order(module, batch, device)
    except Exception as error:
        if device.type == "meta":
            return registration_order(module)
        raise ModelError(
            f"hf:{name}: {type(module).__name__} fails on the example input: "
            f"{first_line(error)}{at_user_line(error)}",
            "Return what its forward takes: a tensor, a tuple of arguments, or a dict of keyword arguments.",
        ) from error


def _order(module: nn.Module, example: ModelInput, device: torch.device) -> dict[str, int]:
    """The order in which the modules run, told by one sample with few tokens, or else with all."""
    whole = example.repeated(1).to(device)
    short = whole.mapped(_cut)
    try:
        return record_call_order(module, lambda: short.call(module))
    except Exception:
        # Some families need a sequence of at least one of their windows.
        return record_call_order(module, lambda: whole.call(module))


def _cut(tensor: Tensor) -> Tensor:
    return tensor[:, :_SHORT] if tensor.dim() == 2 else tensor


def _ties(module: nn.Module, patterns: list[str], config: Any) -> Iterator[str]:
    """A line for every weight that modules of several layers share."""
    owners: dict[int, dict[str, None]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), {})[path.rpartition(".")[0]] = None
    groups = {tuple(sorted(paths)) for paths in owners.values()}
    for group in sorted(groups):
        if len({_layer_of(path, patterns) for path in group}) > 1 or (len(group) > 1 and not patterns):
            free = "; settings={'tie_word_embeddings': False} gives each its own"
            users = f"{', '.join(group[:-1])} and {group[-1]} share a weight"
            yield f"{users}: where they are on several stages, each has a copy" + (
                free if getattr(config, "tie_word_embeddings", False) else ""
            )


def _layer_of(path: str, patterns: list[str]) -> str:
    """The module that is a layer and holds this one; "" for what lies between such."""
    parents = [path[: len(path) - len(rest)] for rest in _tails(path)]
    return next((parent for parent in parents if any(fnmatchcase(parent, each) for each in patterns)), "")


def _tails(path: str) -> Iterator[str]:
    """What may be taken off a dotted name to leave a parent of it, the longest first."""
    parts = path.split(".")
    for count in range(1, len(parts) + 1):
        yield path[len(".".join(parts[:count])) :]
