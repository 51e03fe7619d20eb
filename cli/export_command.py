"""`pplan export`: hands a plan to a training runtime, in that runtime's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..cost_models.runtime import RUNTIMES
from .options import AsJson, Force, Output, word
from .streams import printable, remark, result

if TYPE_CHECKING:
    from ..runtimes.exported import Exported

RuntimeName = Annotated[
    str, typer.Argument(metavar="RUNTIME", help=f"One of {', '.join(RUNTIMES)}.", show_default=False)
]
PlanFile = Annotated[
    Path | None, typer.Argument(metavar="PLAN", help="A plan; else the newest here.", show_default=False)
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        metavar="cuda|cpu",
        help="Where the stages will stand; cpu is for trying the file out.",
        parser=word("--device", ("cuda", "cpu")),
    ),
]


def export_command(
    runtime: RuntimeName,
    plan_file: PlanFile = None,
    device: Device = "cuda",
    output: Output = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Write a plan for a training runtime, in that runtime's own words."""
    from ..cost_models.document import MadeBy
    from ..cost_models.runtime import runtime_named
    from ..planner.plan_file import Plan
    from ..runtimes.export import SUFFIXES, export
    from .newest import named_or_newest
    from .output import chosen_target, file_stem
    from .provenance import command_line, made_by

    name = runtime_named(runtime).name
    source = named_or_newest(plan_file, ("plan",))
    plan = Plan.load(source)
    target = chosen_target(
        output, f"{file_stem(plan.model)}.{name}.{SUFFIXES.get(name, 'json')}", force=force
    )
    target.check(source)
    origin = made_by(MadeBy(), command=command_line(), measured=plan.made_by)
    document, about = export(name, plan, device=device, made_by=origin)
    if about:
        remark(about)
    if name == "deepspeed" and device == "cpu":
        remark("--device cpu changes nothing here: DeepSpeed takes its devices from its launcher")
    target.write(
        document, as_json=as_json, show=lambda: _show(document, target.path, plan.profile.granularity)
    )


def _show(document: Exported, path: Path, granularity: str) -> None:
    """Prints what the runtime is given, and the lines that a training script needs."""
    from ..cost_models.quantities import format_seconds
    from ..runtimes.trainer_text import TrainerText

    if isinstance(document, TrainerText):
        result("".join(f"{printable(line)}\n" for line in document.text(path).splitlines()))
        return
    content = document.model_dump(
        exclude={"schema_version", "layers_sha256", "made_by", "config", "runtime", "estimated"}
    )
    for key, value in content.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if key == "step_seconds":
            estimated = ", from an estimated profile" if document.estimated else ""
            key, shown = "predicted step", format_seconds(value) + estimated
        result(f"{key.replace('_', ' ')}: {printable(str(shown))}\n")
    name = document.runtime
    if name == "huggingface":
        result(
            "\nIn the training script, after `import json`:\n"
            f"    device_map = json.load(open({str(path)!r}))['device_map']\n"
            "    model = AutoModelForCausalLM.from_pretrained(NAME, device_map=device_map)\n"
        )
        return
    loss = ", loss_function" if name == "deepspeed" else ""
    cut = "" if granularity == "block" else f", granularity={granularity!r}"
    build = f"{name}.build({str(path)!r}, pplan.sequential(model, example_input{cut}){loss})"
    result(
        "\nIn the training script, after `import pplan`:\n"
        f"    from pplan.runtimes import {name}\n"
        f"    model = {build}\n"
    )
