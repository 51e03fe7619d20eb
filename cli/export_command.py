"""`pplan export`: hands a plan to a training runtime, in that runtime's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models import arguments
from ..cost_models.arguments import Options, option, options_class, settings_option
from ..cost_models.runtime import RUNTIMES, find_runtime
from .output import AsJson, Force, Output, PlanFile, choose_input, choose_target, file_stem
from .streams import printable, remark, result

if TYPE_CHECKING:
    from ..runtimes.documents import ExportDocument
    from ..runtimes.scripts.script import Script

_HIDDEN_FIELDS = {
    *("schema_version", "layers_sha256", "made_by", "config", "runtime", "estimated", "actions", "warnings"),
    *("granularity", "gpus_per_node"),
}
"""What the table of an export leaves to its file."""

RuntimeName = Annotated[
    str, typer.Argument(metavar="RUNTIME", help=f"One of {', '.join(RUNTIMES)}.", show_default=False)
]


@options_class
class ExportOptions(Options):
    """Where the stages will be, and what a script is made of."""

    device: str | None = option(
        None,
        arguments.optional_word,
        "Where the stages will be; default: what the plan is for; cpu is for trying the file out.",
        "cuda|cpu",
        words=("cuda", "cpu"),
    )
    script: Path | None = option(
        None,
        arguments.optional_path,
        "Also write a script that trains by the export: train.py; train.sh for a trainer of its own.",
        "FILE",
    )
    profile: Path | None = option(
        None,
        arguments.optional_path,
        "For `script`, the plan's profile; default: the one it names, beside it.",
        "FILE",
    )
    model: str | None = option(
        None,
        arguments.optional_word,
        "For `script`: the model, where it is your own, as package.module:factory.",
        "NAME",
    )
    settings: Mapping[str, object] | None = settings_option(
        "For `model`, as it was profiled with; repeatable."
    )


def export_command(
    runtime: RuntimeName,
    plan_file: PlanFile = None,
    *,
    options: ExportOptions,
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a plan for a training runtime, or a script that trains.

    The file is in the runtime's own format. --script FILE writes a script that trains by it, too.
    """
    from ..api.provenance import made_by
    from ..cost_models.document import MadeBy
    from ..cost_models.text_files import FOR_A_RUNTIME, TEXT, write_whole
    from ..planner.plan_file import Plan
    from ..runtimes.documents import hash_layers
    from ..runtimes.exports import default_device, export

    row = find_runtime(runtime)
    name = row.name
    source = choose_input(plan_file, ("plan",))
    plan = Plan.load(source)
    default = f"{file_stem(plan.model)}.{name}.{row.suffix}"
    is_document = row.suffix == "json" or (output or Path(default)).suffix == ".json"
    about = {"model": plan.model, "layers_sha256": hash_layers(plan)}
    kind = FOR_A_RUNTIME if is_document else TEXT
    target = choose_target(output, default, force=force, about=about, kind=kind)
    target.check(source)
    origin = made_by(MadeBy(), measured=plan.made_by)
    document, note = export(name, plan, device=options.device, made_by=origin)
    if note:
        remark(note)
    if options.device is None and plan.device_kind == "CPU" and row.one_process:
        remark("the plan is for processors, by seconds measured on one: the export is for the CPU")
    devices: list[str] = getattr(document, "devices", []) if row.one_process else []  # of threads
    if len(devices) > 1 and devices[0] == "cpu":
        remark(
            "run it with OMP_NUM_THREADS=1: its stages, threads of one process, otherwise take all cores each"
        )
    if name == "deepspeed" and options.device == "cpu":
        remark("--device cpu changes nothing here: DeepSpeed takes its devices from its launcher")
    script_text, script = None, options.script
    if script is not None:
        _check_script(script, (source, target.path), force=force)
        options = replace(options, device=options.device or default_device(plan))
        script_text = _script(document, source, target.path, script, options)
    target.write(document, as_json=as_json, show=lambda: _show(document, target.path, script_text))
    if script_text is not None and script is not None:
        write_whole(script, script_text.text, force=force)
        remark(f"Wrote {script}. Run it where it is: {printable(script_text.command)}")
        if script_text.placeholder_line is not None:
            remark(
                f"{script} has a placeholder loss, because the profile names none that a script can compute: "
                f"put yours into loss_of, line {script_text.placeholder_line}"
            )
        _remark_missing(name)


def _remark_missing(runtime: str) -> None:
    """Says how the runtime is installed where it is not here: the script imports it."""
    from ..api.doctor import missing_extra

    extra = missing_extra(runtime)
    if extra is not None:
        remark(f"{runtime} is not installed here, and the script needs it: {extra}")


def _check_script(script: Path, others: tuple[Path, ...], *, force: bool) -> None:
    """Raises FileError where the script cannot be put there, or would overwrite one of the `others`."""
    from ..cost_models.errors import FileError

    if any(script.absolute() == other.absolute() for other in others):
        raise FileError(
            f"{script}: --script would overwrite what the script is made from", "Name another file."
        )
    choose_target(script, "", force=force).check(*others)


def _script(
    document: ExportDocument, source: Path, plan_path: Path, path: Path, options: ExportOptions
) -> Script:
    """The script for what is exported, which builds the model that the options name, with its settings.

    Raises FileError for the plan's profile, ModelError for what that names, ExportError.
    """
    from ..api.load import read_plan
    from ..planner.plan_file import Plan
    from ..runtimes.scripts.script import write_script

    device = options.device or "cuda"
    if not find_runtime(document.runtime).builds:
        return write_script(document, Plan.load(source), None, path=path, plan_path=plan_path, device=device)
    files = read_plan(source, options.profile)
    return write_script(
        document,
        files.plan,
        files.profile,
        path=path,
        plan_path=plan_path,
        device=device,
        model=options.model,
        settings=options.settings or {},
    )


def _show(document: ExportDocument, path: Path, script: Script | None) -> None:
    """Prints what the runtime is given, and the lines that a training script needs where none is written."""
    from ..api.plan_summary import describe_batch
    from ..cost_models.quantities import format_seconds
    from ..runtimes.documents import TrainerText

    if isinstance(document, TrainerText):
        result("".join(f"{printable(line)}\n" for line in document.text(path).splitlines()))
        return
    content = document.model_dump(exclude=_HIDDEN_FIELDS | {"mini_batch", "micro_batch_size"})
    batch = describe_batch(document.mini_batch, document.micro_batch_size, [content.get("replicas", 1)])
    result(f"model: {printable(content.pop('model'))}\nglobal batch: {batch}\n")
    for key, value in content.items():
        text = ", ".join(map(str, value)) if isinstance(value, list) else value
        if key == "step_seconds":
            estimated = ", from an estimated profile" if document.estimated else ""
            key, text = "predicted step", format_seconds(value) + estimated
        result(f"{key.replace('_', ' ')}: {printable(str(text))}\n")
    name = document.runtime
    if name == "huggingface":
        result(
            "\nIn the training script:\n"
            "    from pplan.runtimes.huggingface import device_map  # completes the map for the model\n"
            "    with torch.device('meta'):\n"
            "        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(NAME))\n"
            f"    places = device_map({str(path)!r}, empty)\n"
            "    model = AutoModelForCausalLM.from_pretrained(NAME, device_map=places)\n"
        )
        return
    if script is None:
        row = find_runtime(name)
        result(
            "\nIn the training script:\n"
            f"    from pplan.runtimes.{row.module} import build\n"
            f"    {row.builds.format(file=repr(str(path)))}\n"
        )
