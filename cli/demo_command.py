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
    typer.Argument(metavar="FOLDER", help="Where to write the files; it is made where there is none."),
]


class Step(NamedTuple):
    """A command of the demonstration, without `pplan`, and what it is for."""

    purpose: str
    command: str


STEPS = (
    Step(
        "What the layers of GPT-2 XL take on an A100, estimated, is in gpt2-xl.csv.\n"
        "(`pplan profile` measures your own model.) Make a profile of it:",
        "import gpt2-xl.csv --model gpt2-xl",
    ),
    Step(
        "Find the fastest plan for eight A100 of 40 GB, and prove that no other is faster:",
        "solve --gpus 8 --gpu a100-40gb --optimizer adamw --mini-batch 64",
    ),
    Step("Look at one step of the plan. Its gaps are the bubble:", "simulate"),
    Step("Write the plan for torch.distributed.pipelining:", "export torch"),
    Step("Write a page to look at, with cuts to move, and to send on:", "report"),
)
NEXT = "Next: open {report} in a browser. In {folder}, pplan explain says what limits the plan."


def demo_command(folder: Folder = Path("pplan-demo")) -> None:
    """Plan GPT-2 XL on eight A100, from costs to a report: no GPU, no download, some ten seconds."""
    from ..cost_models.errors import FileError
    from ..cost_models.text_files import write_whole

    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder}: is a file", "Name a folder for the files of the demonstration.")
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / COSTS, resources.files(__package__).joinpath(COSTS).read_text("utf-8"), force=True)
    for step in STEPS:
        print(f"\n# {step.purpose.replace(chr(10), chr(10) + '# ')}\n$ pplan {step.command}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pplan", *step.command.split()], cwd=folder, check=False)
        if done.returncode:
            raise typer.Exit(done.returncode)
    print(f"\n{NEXT.format(report=folder / 'gpt2-xl.html', folder=folder)}")
