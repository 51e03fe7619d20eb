"""A training script for an exported plan: complete, short, and running as it is. Needs no torch."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ...cost_models.errors import ExportError
from ...cost_models.quantities import format_seconds
from ...cost_models.runtime import Runtime, find_runtime
from ...planner.plan_file import Plan
from ...profiler.names import NamedModel, model_for, quote_name
from ...profiler.profile_file import InputTensor, Profile
from ..documents import (
    ExportDocument,
    TrainerArguments,
    TrainerText,
    count_nodes,
    torchrun_options,
)

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_WIDTH = 84
"""Of a line in a function, as most formatters break it."""
_PLACEHOLDER = "WARNING: the loss is a placeholder, the output's mean square: edit loss_of in this script"
_SEVERAL_OUTPUTS = ("googlenet", "inception_v3")
_NO_CLASSES = ("fcn_", "deeplabv3_", "lraspp_", "raft_")
"""torchvision's models that are no classifiers: their names begin so."""
_CLASSES, _CLASSES_OF_CLIPS = 1000, 400
"""What torchvision's classifiers tell apart where nobody says."""


def model_lines(profile: Profile, model: NamedModel, row: Runtime, *, optimizer: str) -> dict[str, object]:
    """Values for a template: imports, batch, loss, model_lines, and what a sum of losses is divided by.

    If no loss is known, the loss is a placeholder, `warning` prints so before the first step, and `loss_name`
    names it in the printed lines.
    `model`: the model that the script builds. Raises ExportError for a dtype that torch does not have, and
    where the profile does not tell what the model takes.
    """
    if profile.dtype not in _BYTES:
        raise ExportError(
            f"`script`: the profile says dtype {quote_name(profile.dtype)}",
            f"It is one of {', '.join(_BYTES)}.",
        )
    data = _Data.of(profile, model.name, "float32" if row.converts else profile.dtype)
    placeholder = not data.is_plain and data.functional is None
    warning = "        if training.is_main:\n            print(PLACEHOLDER, file=sys.stderr)\n"
    return {
        "imports": "\n".join(_imports(model.name, row, data, optimizer)),
        "typing": "" if data.is_plain else "\nfrom typing import Any",
        "batch": data.batch(),
        "loss": data.loss_code(placeholder=placeholder),
        "loss_name": "placeholder loss" if placeholder else "loss",
        "warning": warning if placeholder else "",
        "model_lines": "\n".join(f"    {line}" for line in _model_code(profile, model, row, data)),
        "divisor": ", divisor=(labels != -100).sum()" if data.sums else "",
    }


@dataclass(frozen=True)
class _Data:
    """Random inputs and labels of the profile's shapes.

    `tokens`: of a sample whose every token has a label. `classes`: for cross-entropy, or elements of an
    output. `is_plain`: the output is one tensor with a row of classes.
    """

    inputs: list[InputTensor]
    loss: str
    classes: int
    tokens: int | None
    is_plain: bool
    dtype: str

    @classmethod
    def of(cls, profile: Profile, name: str, dtype: str) -> _Data:
        inputs = profile.inputs
        if not inputs:
            raise ExportError(
                f"`script`: the profile of {quote_name(name)} does not say what the model takes",
                "It was imported. Profile the model itself: pplan.profile('package.module:factory')",
            )
        if _is_torchvisions(name):
            if name.startswith(_NO_CLASSES):
                raise ExportError(
                    f"`script`: {name} is no classifier, and a script for it would need your loss",
                    "Omit `script`, or wrap it in a package.module:factory that returns one tensor.",
                )
            classes = profile.classes or (_CLASSES_OF_CLIPS if len(inputs[0].shape) == 4 else _CLASSES)
            return cls(inputs, "cross-entropy", classes, None, name not in _SEVERAL_OUTPUTS, dtype)
        last = profile.layers[-1].costs[0]
        elements = last.output_bytes // (last.micro_batch_size * _BYTES.get(profile.dtype, 4))
        tokens = inputs[0].shape[0] if _is_whole(inputs[0]) and len(inputs[0].shape) == 1 else None
        if tokens is None or elements % tokens or elements == tokens:
            tokens = None
        loss = "none" if profile.loss is None else profile.loss.name
        return cls(inputs, loss, max(elements // (tokens or 1), 1), tokens, False, dtype)

    @property
    def is_one(self) -> bool:
        return len(self.inputs) == 1

    @property
    def is_one_float(self) -> bool:
        return self.is_one and not _is_whole(self.inputs[0])

    def batch(self) -> str:
        """A function that makes the samples of a step."""
        kind = "torch.Tensor" if self.is_one else "tuple[torch.Tensor, ...]"
        tensors = [self._tensor_code(tensor) for tensor in self.inputs]
        inputs = (
            tensors[0] if self.is_one else "\n        ".join(["(", *(f"{t}," for t in tensors)]) + "\n    )"
        )
        return (
            f"def batch(step: int, samples: int) -> tuple[{kind}, torch.Tensor]:\n"
            '    """Stands for your data: the inputs and labels of a step."""\n'
            "    random = torch.Generator().manual_seed(step)\n"
            f"    inputs = {inputs}\n"
            f"    labels = {self._labels()}\n"
            "    return inputs, labels"
        )

    def loss_code(self, *, placeholder: bool) -> str:
        """A function that makes the loss of an output."""
        if self.is_plain:
            return (
                "def loss_of(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:\n"
                "    return cross_entropy(output, labels)"
            )
        sentence = "Of the first tensor that the model returns."
        if placeholder:
            sentence = "EDIT HERE. Stands for your loss, of the first tensor that the model returns."
        by_token = "first.flatten(0, 1), labels.flatten()"
        arguments = f'{by_token}, reduction="sum"' if self.sums else "first.flatten(1), labels"
        return (
            f'PLACEHOLDER = "{_PLACEHOLDER}"\n\n\n'
            * placeholder
            + "def loss_of(output: Any, labels: torch.Tensor) -> torch.Tensor:\n"
            f'    """{sentence}"""\n'
            "    if isinstance(output, dict):\n"
            "        output = tuple(output.values())\n"
            "    first: torch.Tensor = output if torch.is_tensor(output) else output[0]\n    return "
            + (f"{self.functional}({arguments})" if self.functional else "first.square().mean()")
        )

    @property
    def sums(self) -> bool:
        """Whether the loss is a sum, to be divided by the valid labels of the whole batch."""
        return self.tokens is not None and self.functional == "cross_entropy"

    @property
    def functional(self) -> str | None:
        """The function that the loss imports."""
        return {"cross-entropy": "cross_entropy", "mse": "mse_loss"}.get(self.loss)

    def _random(self, shape: str) -> str:
        kind = "" if self.dtype == "float32" else f", dtype=torch.{self.dtype}"
        return f"torch.randn({shape}, generator=random{kind})"

    def _tensor_code(self, tensor: InputTensor) -> str:
        shape = ", ".join(["samples", *map(str, tensor.shape)])
        if not _is_whole(tensor):
            return self._random(shape)
        most = self.classes if self.tokens else 2
        return f"torch.randint({most}, ({shape if tensor.shape else 'samples,'}), generator=random)"

    def _labels(self) -> str:
        if self.loss == "mse":
            return self._random(f"samples, {self.classes * (self.tokens or 1)}")
        shape = "samples," if self.tokens is None else f"samples, {self.tokens}"
        return f"torch.randint({self.classes}, ({shape}), generator=random)"


def _imports(name: str, row: Runtime, data: _Data, optimizer: str) -> list[str]:
    """The import lines, in the order that linters ask for."""
    modules = ["import torch", "import torchvision" if _is_torchvisions(name) else "import pplan"]
    if optimizer == "adamw-8bit" and not row.own_optimizer:
        modules.append("import bitsandbytes")
    functions = [f"from torch.nn.functional import {data.functional}"] if data.functional else []
    return [*sorted(modules), "from pplan.runtimes.training import build", *functions]


def _model_code(profile: Profile, model: NamedModel, row: Runtime, data: _Data) -> list[str]:
    """Lines that make `model` and `example`."""
    name = write_literal(model.name)
    casts = profile.dtype != "float32" and not row.converts
    if _is_torchvisions(model.name):
        classes = "" if profile.classes is None else f", num_classes={profile.classes}"
        lines = [f"model = torchvision.models.get_model({name}, weights=None{classes})"]
    else:
        arguments = [name]
        if model.settings:
            arguments.append(f"settings={write_literal(dict(model.settings))}")
        module = (profile.input_like or "").partition(":")[0]
        if model.by_user and module and module == model.name.partition(":")[0]:
            # In the module that the user named himself: a file's word runs no other code.
            arguments.append(f"input_like={write_literal(profile.input_like)}")
        elif data.is_one_float and not model.name.startswith("hf:"):
            arguments.append(f"input_shape={tuple(profile.inputs[0].shape)}")
        lines = [f"model, example = pplan.load_model({', '.join(arguments)})"]
        if len(lines[0]) > _WIDTH:
            indented = (f"    {argument}," for argument in arguments)
            lines = ["model, example = pplan.load_model(", *indented, ")"]
    if casts:
        lines.append(f"model.to(torch.{profile.dtype})")
    if _is_torchvisions(model.name) or (casts and data.is_one_float):
        lines.append("example, _ = batch(0, 2)")
    return lines


def write_literal(value: object) -> str:
    """A literal of Python, as formatters write it, of what JSON can say; of others what `repr` makes.

    What a terminal or an editor would not show as it is, is escaped.
    """
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{write_literal(name)}: {write_literal(item)}" for name, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(write_literal, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str) and value.isprintable():
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _is_torchvisions(name: str) -> bool:
    return ":" not in name and not name.endswith(".json")


def _is_whole(tensor: InputTensor) -> bool:
    return not tensor.dtype.startswith(("float", "bfloat"))


OPTIMIZERS = {
    "sgd": ("torch.optim.SGD", "lr=0.01"),
    "momentum": ("torch.optim.SGD", "lr=0.01, momentum=0.9"),
    "adam": ("torch.optim.Adam", "lr=0.001"),
    "adamw": ("torch.optim.AdamW", "lr=0.001"),
    "adamw-8bit": ("bitsandbytes.optim.AdamW8bit", "lr=0.001"),
}
"""By the plan's word; the learning rates are for the user to change."""


@dataclass(frozen=True)
class Script:
    """A script's text, the command that runs it in its folder, and the line of a loss to be replaced."""

    text: str
    command: str
    placeholder_line: int | None = None


def write_script(
    document: ExportDocument,
    plan: Plan,
    profile: Profile | None,
    *,
    path: Path,
    plan_path: Path,
    device: str,
    model: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Script:
    """The script that is to stand at `path` and trains by the `document`, which stands at `plan_path`.

    `profile`: the plan's; it says how the model was built and what it takes. A trainer of its own needs none.
    `model` and `settings`: as the user names it, where it is neither torchvision's nor transformers' own: a
    file's word puts no code into the script. What it builds is held against the plan's layers when it runs.
    Raises ExportError where the runtime is trained with no script of ours, ModelError for the name.
    """
    _check_names(path, plan_path)
    plan_reference = Path(os.path.relpath(plan_path.absolute(), path.absolute().parent))
    row = find_runtime(document.runtime)
    if isinstance(document, TrainerArguments):
        return Script(*_trainer_script(document, row, path, plan_reference))
    if not row.builds:
        if isinstance(document, TrainerText):
            why = f"{document.runtime} trains by its own recipe: put the sections of {plan_path.name} into it"
        else:
            why = f"{document.runtime} trains by your own script, which loads the model with the device_map"
        raise ExportError(
            f"`script`: none is written, {why}", "Omit `script`. Or export for torch: pplan.export('torch')"
        )
    if profile is None:
        raise ExportError(
            f"`script`: the profile that the plan of {plan.model} was made from says how it is built",
            "Name it: profile=FILE",
        )
    _check_module_name(path)
    named_model = model_for(profile, model, settings or {})
    names = model_lines(profile, named_model, row, optimizer=plan.optimizer)
    names |= _fields(document, row, plan, path, plan_reference, device, sums=bool(names["divisor"]))
    text = _fill("training", names)
    loss_line = text[: text.index("def loss_of(")].count("\n") + 1
    return Script(text, str(names["command"]), loss_line if names["warning"] else None)


def _fill(template: str, names: Mapping[str, object]) -> str:
    """A template of this folder with its placeholders filled in."""
    text = files(__package__).joinpath(f"{template}.template").read_text(encoding="utf-8")
    return Template(text).substitute(names)


def _fields(
    document: Any, row: Runtime, plan: Plan, path: Path, beside: Path, device: str, *, sums: bool
) -> dict[str, object]:
    """Values for a template that follow from the export and the plan."""
    if plan.optimizer not in OPTIMIZERS:
        raise ExportError(
            f"`script`: the plan's optimizer is {quote_name(plan.optimizer)}",
            f"Known are {', '.join(OPTIMIZERS)}.",
        )
    start, count = "python", len(document.parts) - 1
    arguments = ["PLAN", "model", "loss_of", "example"]
    if not row.own_optimizer:
        arguments.append(f"optimizer=partial({', '.join(OPTIMIZERS[plan.optimizer])})")
    if sums:
        arguments.append('loss_reduction="sum"')
    if not row.one_process:
        nodes = count_nodes(document.devices, plan.gpus_per_node)
        start = f"torchrun {torchrun_options(len(document.devices), nodes)}"
        arguments += ['device="cpu"'] * (device == "cpu")
    checkpoint = f"{path.stem}.checkpoint"
    return {
        "command": f"{start} {shlex.quote(path.name)}",
        "runtime": row.name,
        "model": _printable_name(document.model),
        "plan_name": _printable_name(beside.name),
        "plan_path": f"HERE / {write_literal(beside.as_posix())}",
        "checkpoint_name": _printable_name(checkpoint),
        "checkpoint_path": f"HERE / {write_literal(checkpoint)}",
        "stages": f"{count} stage{'s' * (count > 1)}",
        "estimated": " (estimated)" if document.estimated else "",
        "step_seconds": format_seconds(document.step_seconds),
        "mini_batch": document.mini_batch,
        "micro_batches": document.mini_batch // document.micro_batch_size,
        "functools": "from functools import partial\n" * (not row.own_optimizer),
        "arguments": "".join(f"        {argument},\n" for argument in arguments),
    }


def _check_names(*paths: Path) -> None:
    """Raises ExportError for a name that would end the line of the script on which it stands."""
    for path in paths:
        if not path.name.isprintable():
            raise ExportError(f"`script`: the file's name is {quote_name(path.name)}", "Name it in one line.")


def _check_module_name(path: Path) -> None:
    """Raises ExportError for a script that Python would import in place of an installed module."""
    name = path.stem
    nearby = Path.cwd(), path.absolute().parent
    installed = [folder for folder in sys.path if Path(folder).absolute() not in nearby]
    if name.isidentifier() and PathFinder.find_spec(name, installed) is not None:
        raise ExportError(
            f"`script`: {path.name} has the name of the installed module {name}, and would be imported "
            "in its place",
            "Name another file: train.py, say.",
        )


def _printable_name(name: str) -> str:
    """A name as it may stand in a docstring."""
    return "".join(c if c.isprintable() and c not in '"\\' else "_" for c in name)


def _trainer_script(document: TrainerArguments, row: Runtime, path: Path, beside: Path) -> tuple[str, str]:
    """The text of the script at `path`, which reads the arguments in the file `beside`; and its command.

    Raises ExportError where that file is none that a shell reads.
    """
    if beside.suffix == ".json":
        raise ExportError(
            f"`script`: {beside} would be the plan for pplan, the script needs it as arguments for a shell",
            "Omit `output`, or name a file that ends in .sh.",
        )
    needs = " ".join(filter(None, row.needs))
    command = f"bash {shlex.quote(path.name)}"
    names = {
        "command": command,
        "needs": needs,
        "model": "".join(c if c.isprintable() else "_" for c in document.model),
        "plan_path": shlex.quote(beside.as_posix()),
        "launch": " ".join(filter(None, ("torchrun", document.torchrun_options, row.program))),
    }
    return _fill("trainer", names), f"{command} {needs}"
