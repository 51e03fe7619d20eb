"""Run in a process that is forked from one that has imported PyTorch: becomes `python COMMAND...`."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path

import torch

FOLDER: str = globals()["FOLDER"]
COMMAND: list[str] = globals()["COMMAND"]
ENVIRONMENT: dict[str, str] = globals()["ENVIRONMENT"]
OUTPUTS: tuple[str, str] = globals()["OUTPUTS"]


def become(command: list[str]) -> None:
    """Options that Python takes: `-W error`, `-c CODE` and `-m MODULE`."""
    if command[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        command = command[2:]
    how, *rest = command
    if how == "-c":
        code, *arguments = rest
        sys.argv, sys.path[:0] = ["-c", *arguments], [""]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    elif how == "-m":
        sys.argv, sys.path[:0] = rest, [FOLDER]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = command, [str(Path(how).resolve().parent)]
        runpy.run_path(how, run_name="__main__")


os.chdir(FOLDER)
os.environ.clear()
os.environ.update(ENVIRONMENT)
for number, output in enumerate(OUTPUTS, start=1):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
torch.set_num_threads(1)
become(COMMAND)
