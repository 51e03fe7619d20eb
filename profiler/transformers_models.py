"""Models of Hugging Face transformers, from a configuration with random weights. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..cost_models.errors import FileError, MachineError, ModelError, short_repr
from ..cost_models.quantities import MOST_LAYERS, format_bytes
from ..cost_models.text_files import read_text
from .configuration import (
    ConfigurationChanges,
    InputMaker,
    configured_size,
    key_names,
    key_value,
    open_keys,
    size_keys,
)
from .local_machine import free_host_bytes
from .names import find_configuration, hub_cache, reads_as_path
from .torch_private import child_modules
from .user_model import LoadedModel, ModelInput, at_user_line, first_line, fixed_seed, is_out_of_memory

# The blocks that a model repeats, and what comes after them: the layers its authors think in.
#
# An nn.ModuleList holds blocks; what runs before the first is the embedding, and what runs after the last are
# the final norm and the head. Registration order is not the order of running (OPT registers its last norm
# first), so a short run tells it.

_COMPARABLE = 4
"""A list whose entries are smaller than this part of the largest list's entries is no list of blocks."""
_MOST_OF_IT = 0.5
"""Of the parameters of a stage its blocks have."""
_WIDER = 3
"""Times the parameters of the first stage's blocks, those of the last."""


def record_call_order(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Dotted name -> place among the first calls of all modules, while `run` runs (in eval mode)."""
    order: dict[str, int] = {}
    training = {module: module.training for module in model.modules()}
    hooks = [
        module.register_forward_pre_hook(partial(_note_call, order, name))
        for name, module in model.named_modules()
    ]
    model.eval()
    try:
        with torch.no_grad():
            run()
    finally:
        for hook in hooks:
            hook.remove()
        for module, before in training.items():
            module.training = before
    return order


def registration_order(model: nn.Module) -> dict[str, int]:
    """For a model that cannot be run: the order in which its modules are registered."""
    return {name: place for place, (name, _) in enumerate(model.named_modules())}


def block_patterns(model: nn.Module, order: dict[str, int]) -> list[str]:
    """`list.*` for every list of blocks, and the name of each module with parameters that runs after one.

    `order` places the dotted names of the modules that run. Empty where the model repeats nothing.
    """
    lists = [path for path, each in _lists(model, "") if any(name.startswith(f"{path}.") for name in order)]
    sizes = {path: _size(model.get_submodule(path)) / len(list(_children(model, path))) for path in lists}
    blocks = {path for path in lists if sizes[path] * _COMPARABLE >= max(sizes.values())}
    inside = {path: _lists_of_stages(model, path) for path in blocks}
    blocks = {own for path in blocks for own in inside[path] or [path]}
    return list(_patterns(model, "", blocks, order))


def _note_call(order: dict[str, int], name: str, *_: object) -> None:
    order.setdefault(name, len(order))


def _lists(
    model: nn.Module, path: str, kinds: tuple[type[nn.Module], ...] = (nn.ModuleList,)
) -> Iterator[tuple[str, nn.Module]]:
    """The outermost lists whose entries all have parameters."""
    for name, child in _children(model, path):
        # An entry may be None, as behind the last of Informer's blocks.
        parts = child_modules(child).values() if isinstance(child, kinds) else ()
        if parts and all(part and _size(part) for part in parts):
            yield name, child
        else:
            yield from _lists(model, name, kinds)


def _lists_of_stages(model: nn.Module, path: str) -> list[str]:
    """The lists of blocks of which the entries of a list are made, of wider blocks from stage to stage; none
    where the entries are blocks: the experts of a block are as wide in all."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = [[own for own, _ in _lists(model, entry, kinds)] for entry, _ in _children(model, path)]
    if not all(len(own) == 1 for own in lists):
        return []
    stages = [own[0] for own in lists]
    shares = [
        _size(model.get_submodule(own)) / _size(model.get_submodule(own.rpartition(".")[0])) for own in stages
    ]
    sizes = [_size(model.get_submodule(own)) / len(list(_children(model, own))) for own in stages]
    return stages if min(shares) > _MOST_OF_IT and max(sizes) > _WIDER * min(sizes) else []


def _patterns(
    model: nn.Module, path: str, blocks: set[str], order: dict[str, int], *, after: bool = False
) -> Iterator[str]:
    is_list = bool(path) and isinstance(model.get_submodule(path), nn.ModuleList)
    for name, child in sorted(_children(model, path), key=lambda pair: _first_call(pair[0], order)):
        if name in blocks:
            after = True
            yield f"{name}.*"
        elif any(block.startswith(f"{name}.") for block in blocks):
            # What leads into a stage behind another is a layer, and what leads into the first is not.
            yield from _patterns(model, name, blocks, order, after=after and is_list)
            after = True
        elif after and _size(child) and _first_call(name, order) < len(order):
            yield name


def _first_call(path: str, order: dict[str, int]) -> int:
    """The first call of the module itself or, where a list or a dict is never called, of what it holds."""
    calls = (place for name, place in order.items() if name == path or name.startswith(f"{path}."))
    return min(calls, default=len(order))


def _children(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.get_submodule(path).named_children():
        yield f"{path}.{name}" if path else name, child


def _size(module: nn.Module) -> int:
    """Elements of its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


# The package transformers, offline and silent, and configurations: from a model type or a config.json.

_OF_A_CHECKPOINT = ("dtype", "torch_dtype", "quantization_config", "auto_map", "_name_or_path", "model_type")
"""Of the file that weights were saved with. The weights made here are random, and float32."""
_OF_A_CLASS = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model|Config)$")
"""What the name of a class has behind that of its family: LlamaForCausalLM is one of llama."""


@dataclass(frozen=True, eq=False)
class ConfiguredModel:
    """A configuration, and what of the settings is not part of one."""

    config: Any
    sequence: int | None
    notes: tuple[str, ...]


def configure_model(
    transformers: Any, name: str, settings: Mapping[str, object], *, known_only: bool = False
) -> ConfiguredModel:
    """The configuration `name` (a model type, a config.json or its folder) with `settings`.

    `settings` are sizes in words (`layers`, `hidden`, `heads`, `intermediate`, `vocabulary`, `sequence`,
    `classes`) and any keys of the configuration. Sizes that follow from a changed one are changed with it
    where they are not set too. `known_only`: no file is read. Raises ModelError, FileError and UsageError.
    """
    values = None if known_only or name in transformers.CONFIG_MAPPING else _file_values(name)
    kind = name if values is None else values["model_type"]
    family = _family(transformers, kind, name)
    values = {key: value for key, value in (values or open_keys(name)).items() if key not in _OF_A_CHECKPOINT}
    plain = _build_configuration(family, values, name)
    changes = ConfigurationChanges(plain, name)
    changes.take(settings)
    changes.follow()
    changes.leave_out_chance()
    changes.stretch_lists(values)
    config = _build_configuration(family, values | changes.tree() | _no_cache(plain), name)
    if "tie_word_embeddings" in changes.values:
        # T5's class ties whatever it is told (it takes the key for another one).
        config.tie_word_embeddings = changes.values["tie_word_embeddings"]
    _leave_out_caches(config)
    _refuse_many_layers(config, name)
    return ConfiguredModel(config, changes.sequence, tuple(changes.notes))


def _refuse_many_layers(config: Any, name: str) -> None:
    """Of the configuration and those inside: a model is built layer by layer, also without its weights."""
    for key in size_keys(config, "layers"):
        count = key_value(config, key)
        if count > MOST_LAYERS:
            raise ModelError(
                f"hf:{name}: {key} is {count}: at most {MOST_LAYERS:,} layers are planned for",
                "Set fewer with `layers`, or correct the configuration.",
            )
    for key in getattr(config, "sub_configs", {}):
        if hasattr(part := key_value(config, key), "to_dict"):
            _refuse_many_layers(part, name)


def _leave_out_caches(config: Any) -> None:
    """Of the configurations inside."""
    for key in getattr(config, "sub_configs", {}):
        part = key_value(config, key)
        if hasattr(part, "use_cache"):
            part.use_cache = False
        _leave_out_caches(part)


def _no_cache(config: Any) -> dict[str, Any]:
    """Keys and values of earlier tokens are of no use in training, and a model would return them."""
    return {"use_cache": False} if "use_cache" in key_names(config) else {}


def _family(transformers: Any, kind: object, name: str) -> Any:
    """The class of the configurations of a model type."""
    families: Iterable[str] = transformers.CONFIG_MAPPING.keys()
    if isinstance(kind, str) and kind in set(families):
        return transformers.CONFIG_MAPPING[kind]
    if kind != name:
        where = f"{name}: transformers {transformers.__version__} has no model type {kind!r}"
    else:
        where = f"model 'hf:{name}': there is no model type and no file of this name"
    near = difflib.get_close_matches(_OF_A_CLASS.sub("", str(kind)).lower(), families, n=5, cutoff=0.5)
    hint = f"Nearest: {', '.join(near)}. " if near else ""
    raise ModelError(
        where,
        f"{hint}Nothing is downloaded: name a model type such as gpt2, bert, llama or t5, or a config.json.",
    )


def _build_configuration(family: Any, values: Mapping[str, Any], name: str) -> Any:
    try:
        return family.from_dict(dict(values))
    except Exception as error:
        # The strict classes of its configurations say which check failed, and tell why in the cause.
        raise ModelError(
            f"hf:{name}: transformers refuses the configuration: {first_line(error.__cause__ or error)}",
            "Change the sizes, or the key with `settings`.",
        ) from error


def _is_hub_name(name: str) -> bool:
    """Whether it reads as `owner/model`, and not as a path."""
    return re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) is not None and not name.endswith(".json")


def _file_values(name: str) -> dict[str, Any] | None:
    """What a config.json says; None where `name` is no path, nor in the hub's cache. Raises FileError."""
    if (file := find_configuration(name)) is None:
        if not reads_as_path(name):
            return None
        if _is_hub_name(name) and not Path(name).parent.exists():
            raise FileError(
                f"hf:{name}: there is no such file, and its configuration is not in the hub's local cache "
                f"{hub_cache()}",
                "Nothing is downloaded from a hub: take its config.json from there yourself, and name "
                "it as hf:./config.json.",
            )
        file = Path(name)
    try:
        values = json.loads(read_text(file, "configuration"))
    except FileError as error:
        raise FileError(
            error.what, "Name a config.json or the folder that holds one, as hf:./config.json."
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileError(
            f"{file}: is no JSON: {first_line(error)}", "Name the config.json of a model."
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise FileError(
            f"{file}: has no model_type, so it is no configuration of transformers",
            'Name the config.json of a model; "model_type": "llama" says which.',
        )
    return values


@contextlib.contextmanager
def transformers_session() -> Iterator[Any]:
    """The module `transformers`. Inside: no network, no log, no warning, float32; afterwards all as before.

    Raises MachineError where it is not installed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        transformers = _imported()
        stack.enter_context(_silent(transformers))
        stack.enter_context(_offline())
        stack.enter_context(_float32())
        yield transformers


def _imported() -> Any:
    # By name, and not by `import`: its types are its own affair, and reading them takes mypy a minute.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MachineError(
            f"models named hf: need transformers, which cannot be imported: {first_line(error)}",
            'pip install "pplan[transformers]"',
        ) from error


@contextlib.contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    log = transformers.utils.logging
    before = log.get_verbosity()
    log.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        log.set_verbosity(before)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, which is read only once, when the package is imported."""
    constants: Any = importlib.import_module("huggingface_hub.constants")
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _float32() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Models of Hugging Face transformers, from a configuration with random weights. Nothing is downloaded.

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


def load_transformers(
    name: str,
    settings: Mapping[str, object],
    *,
    seed: int,
    device: torch.device | str = "cpu",
    known_only: bool = False,
    batch: ModelInput | None = None,
) -> LoadedModel:
    """The model of configuration `name`, random weights drawn from `seed`, in train mode and float32.

    `name` is what stands after `hf:`, a model type as `gpt2` or the path of a config.json (or of its
    folder). `settings` are `layers`, `hidden`, `heads`, `intermediate`, `vocabulary`, `sequence`, `classes`
    and keys of the configuration itself. On the device `meta` weights take no memory; the example is on the
    CPU in any case: random token ids of shape (2, sequence), or images, in the keywords its forward needs;
    `batch`: the example, which is then not made up. Its granularity is `module:` with its blocks and what
    follows them, or `block` where it repeats none. `known_only`: `name` is a model type,
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
    return LoadedModel(
        module=module,
        name=f"hf:{name}",
        example=example,
        loss="cross-entropy",
        settings=settings,
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
