"""What the README shows is what there is."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import pplan
from pplan.cli.app import main
from pplan.planner.planners import PLANNERS
from pplan.runtimes.formats.exporters import EXPORTERS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
LEFT_OUT = "..."
WIDTH = "100"
"""Columns of the terminal whose output is quoted."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def table_after(heading: str) -> list[str]:
    """The names in the first column of the first table behind a heading."""
    rows = README.split(f"\n{heading}\n")[1].split("\n| --- ")[1].split("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`(\w[\w-]*)", row.split("|")[1])]


def examples() -> Iterator[tuple[str, list[list[str]]]]:
    """Every command of the console blocks, in their order, and the runs of lines that it is said to print."""
    for block in blocks("console"):
        lines = block.splitlines()
        starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in pairwise([*starts, len(lines)]):
            shown = re.split(
                rf"^{re.escape(LEFT_OUT)}$", "\n".join(lines[start + 1 : end]), flags=re.MULTILINE
            )
            yield lines[start][2:], [part.strip("\n").splitlines() for part in shown if part.strip()]


def stands_in(part: list[str], lines: list[str]) -> int | None:
    """Where these lines stand, one after another; None where they do not."""
    starts = range(len(lines) - len(part) + 1)
    return next((at for at in starts if lines[at : at + len(part)] == part), None)


def test_it_starts_with_the_two_commands() -> None:
    assert blocks("sh")[:2] == [
        "pip install -e . && pplan profile vgg19 && pplan solve --gpus 8 && pplan export torchgpipe\n",
        'pip install -e ".[test]" && pytest\n',
    ]


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale", "deepspeed"])
def test_its_scripts_are_the_examples(runtime: str) -> None:
    script = (ROOT / f"examples/train_{runtime}.py").read_text()
    assert script in blocks("python")
    assert len(script.splitlines()) < 30


def test_continuous_integration_runs_its_test_command() -> None:
    assert blocks("sh")[1] in (ROOT / ".ci/run").read_text()


def test_its_commands_print_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One after another in a folder with the files that it shows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    (tmp_path / "gpt.csv").write_text(blocks("csv")[0])
    (tmp_path / "machine.toml").write_text(blocks("toml")[0])
    ran = list(examples())
    assert len(ran) > 10
    for command, parts in ran:
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        main()
        captured = capsys.readouterr()
        printed = [line.rstrip() for line in (captured.out + captured.err).splitlines()]
        assert parts, command
        for part in parts:
            at = stands_in(part, printed)
            assert at is not None, "\n".join([command, "does not print", *part, "but", *printed])
            printed = printed[at + len(part) :]


def test_the_options_that_it_names_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    named = dict[str, set[str]]()
    for line in "".join(blocks("sh")).replace("\\\n", "").splitlines():
        for command in re.findall(r"\bpplan [^#&]+", line):
            _, verb, *words = shlex.split(command)
            named.setdefault(verb, set()).update(word for word in words if word.startswith("--"))
    assert len(named) > 8
    for verb, options in named.items():
        monkeypatch.setattr(sys, "argv", ["pplan", verb, "--help"])
        main()
        known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert options <= known, verb


def test_its_machine_of_two_kinds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(blocks("toml")[1])
    machine = pplan.topology(path)
    assert [machine.device(rank).speed for rank in (0, 3, 4, 7)] == [1.0, 1.0, 0.2, 0.2]


def test_it_names_every_planner() -> None:
    assert table_after("## Named planners") == list(PLANNERS)
    formulas = (ROOT / "docs/planners.md").read_text()
    assert not [name for name in PLANNERS if f"`{name}" not in formulas]


def test_it_names_every_runtime() -> None:
    assert sorted(table_after("## Exports")) == sorted(EXPORTERS)


def test_it_names_every_function() -> None:
    listed = README.split("\n## From Python\n")[1].split("\n## ")[0]
    named = {name for name in re.findall(r"`(\w+)\b", listed) if name in pplan.__all__}
    assert named == {name for name in pplan.__all__ if not name.startswith("__")}
