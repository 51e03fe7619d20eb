"""`pplan demo`: the main job, from the costs of a known model to a report, with each command that does it."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

COSTS = "gpt2-xl.csv"
"""Layers of GPT-2 XL for 1,024 tokens a sample in bfloat16, as `--device analytic:a100-40gb` has them."""

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder for the files; created if it does not exist."),
]


class Step(NamedTuple):
    """A command of the demonstration, without `pplan`, and what it is for."""

    purpose: str
    command: str


STEPS = (
    Step(
        "Read the costs of the layers of GPT-2 XL, estimated for an A100.\n"
        "(`pplan profile` measures your own model.)",
        "import gpt2-xl.csv --model gpt2-xl",
    ),
    Step(
        "Find the fastest plan for eight A100 of 40 GB, with a proof.",
        "solve --gpus 8 --gpu a100-40gb --optimizer adamw --mini-batch 64",
    ),
    Step("Draw a training step. The dots are the bubble.", "simulate"),
    Step("Export the plan for torch.distributed.pipelining.", "export torch"),
    Step("Write an HTML page in which you can move the cuts.", "report"),
)
NEXT = "Next: open {report} in a browser. In {folder}, pplan explain says what limits the plan."


def demo_command(folder: Folder = Path("pplan-demo")) -> None:
    """Plan GPT-2 XL on eight A100: no GPU, no download.

    It goes from costs to a report in some ten seconds, and shows each command.
    """
    from ..cost_models.errors import FileError
    from ..cost_models.text_files import write_whole

    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file", "Name a folder for the files of the demonstration.")
    folder.mkdir(parents=True, exist_ok=True)
    costs = resources.files(__package__).joinpath(COSTS).read_bytes()
    if not (folder / COSTS).is_file() or (folder / COSTS).read_bytes() != costs:
        write_whole(folder / COSTS, costs.decode(), force=False)
    for step in STEPS:
        print(f"\n# {step.purpose.replace(chr(10), chr(10) + '# ')}\n$ pplan {step.command}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pplan", *step.command.split()], cwd=folder, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
    print(f"\n{NEXT.format(report=folder / 'gpt2-xl.html', folder=folder)}")
