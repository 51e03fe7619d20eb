"""Hostile names through every output, each read by its own reader: bash, YAML, TOML, XML, JSON, CSV, Python.

A name may not begin a line, end a quote, run a command, become a formula, steer a terminal, or name a file.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import subprocess
import tomllib
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fuzzing.running import run
from fuzzing.seeds import PLAIN, profile

NAMES = (
    *(
        "$(touch owned)",
        "`touch owned`",
        "'; touch owned; '",
        '"; touch owned; "',
        "a\ntouch owned\n",
        "a; touch owned",
    ),
    *(
        "${HOME}",
        "a && touch owned",
        "| touch owned",
        "> owned",
        "\\",
        "\\'; touch owned #",
        "'\"'\"'",
        "--help",
        "-rf",
    ),
    *(
        "]]>",
        "<script>alert(1)</script>",
        "&amp;\"'<",
        "--><b>",
        "=1+1",
        "@SUM(1)",
        "-2+3",
        "+1",
        "=cmd|' /C x'!A0",
    ),
    *(
        "{{7*7}}",
        "{x}",
        "%s%n",
        "key: [",
        "- a",
        "# c",
        "a: b",
        "!!python/object:os.system",
        "&a *a",
        "null",
        "true",
    ),
    *(
        '"""\nimport os\n"""',
        "'''",
        "1e5",
        "\u202egnp",
        "\x1b[31m",
        "\x1b]0;x\x07",
        "a\x00b",
        "\x7f\x9b2J",
        "\u2028",
    ),
    *("\U0001f642", "../x", "/etc/passwd", "a" * 300, "[bold]x[/bold]", "\r", "\ufeffa", "a,b;c\td"),
)
EVERYWHERE = (
    *("$(touch owned)`touch owned`", "'; touch owned; '", '"; touch owned; "', "a\ntouch owned\n"),
    *("--help; touch owned", "\\'; touch owned #", "]]><script>&amp;\"'<", "=cmd|' /C x'!A0", "../x"),
    *(
        '"""\nimport os\n"""',
        "!!python/object:os.system",
        "null",
        "\x1b]0;x\x07\u202e\u2028\x00",
        "[bold]{x}%s",
    ),
)
"""Those that are tried as every text of a profile."""
yaml = pytest.importorskip("yaml")
TRANSFORMER = tuple(layer["name"].removeprefix("transformer.") for layer in profile()["layers"])
MACHINE = ("--gpus", "4", "--gpu", "a100-40gb", "--mini-batch", "16")
FORMULA = "=+-@\t\r"


def with_names(layers: tuple[str, ...], name: str) -> dict[str, Any]:
    """A profile of layers of these names, in which every other text is `name`."""
    content = profile() | {"model": name, "device_name": name, "tied": [], "edges": [], "notes": [name]}
    first = content["layers"][0]
    content["layers"] = [
        first | {"name": own, "kind": name, "cut_reason": name, "cut_after": True} for own in layers
    ]
    content["loss"]["name"] = name
    content["made_by"] = {"command": name, "time": name, "pplan": name, "torch": name}
    return content


@dataclass(frozen=True)
class Output:
    """A command on hostile names: what it printed, and the folder with what it wrote."""

    command: list[str]
    status: int | None
    out: str
    err: str


def outputs(folder: Path, content: dict[str, Any], cut: str) -> Iterator[Output]:
    """Of every verb that writes something, on a profile of this content."""
    (folder / PLAIN).write_text(json.dumps(content), encoding="utf-8")
    given = ["--profile", PLAIN, *MACHINE]
    plans = {"1f1b": "flat.plan.json", "gpipe": "gpipe.plan.json", "naive": "naive.plan.json"}
    made = [["import", cut, *given, "--schedule", way, "-o", plan] for way, plan in plans.items()]
    made += [["show", PLAIN], ["show", "flat.plan.json"]]
    made += [["simulate", "flat.plan.json", "--trace", "made.trace.json", "--plot", "made.svg"]]
    sweep = ["--sweep", "gpus=1", "--csv", "made.csv", "--jobs", "1", "--time-limit", "1s"]
    made += [["solve", PLAIN, *MACHINE, *sweep]]
    made += [["export", name, "flat.plan.json"] for name in ("deepspeed", "megatron", "megatron-bridge")]
    made += [["export", name, "flat.plan.json"] for name in ("torch", "torchtitan", "nemo-automodel")]
    made += [["export", name, "gpipe.plan.json"] for name in ("torchgpipe", "fairscale")]
    made += [["export", "huggingface", "naive.plan.json"]]
    for name, plan in (
        ("megatron", "flat"),
        ("torch", "flat"),
        ("torchgpipe", "gpipe"),
        ("deepspeed", "flat"),
    ):
        script = ["--script", f"{name}.{'sh' if name == 'megatron' else 'py'}", "-o", f"{name}.made.json"]
        made.append(["export", name, f"{plan}.plan.json", *script])
    for command in made:
        yield Output(command, *run(command, debug=False))


def check_texts(output: Output) -> None:
    """It ended as documented, and steers no terminal."""
    assert output.status in (0, 2), f"{output.command}: {output.status}\n{output.err}"
    for text in (output.out, output.err):
        steers = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n", "\t"}
        assert not steers, f"{output.command}: {steers}"


def check_files(folder: Path) -> None:
    """Each is what its name says, and none runs what a name says."""
    for path in sorted(folder.iterdir()):
        assert re.fullmatch(r"[\w.+-]+", path.name), path.name
        assert path.name != "owned"
        CHECKS[path.suffix](path)
    assert not (folder / "owned").exists()


def check_json(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if path.name.endswith("plan.json"):
        assert tomllib.loads(content["machine"])


def check_svg(path: Path) -> None:
    tags = {own.tag.rpartition("}")[2] for own in ElementTree.parse(path).iter()}
    described = {"metadata", "RDF", "Work", "type", "format", "creator", "Agent", "title", "date"}
    assert tags - described <= {
        "svg",
        "g",
        "text",
        "tspan",
        "path",
        "style",
        "defs",
        "use",
        "clipPath",
        "rect",
    }


def check_csv(path: Path) -> None:
    for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8"))):
        for cell in row:
            assert not cell.startswith(tuple(FORMULA)) or re.fullmatch(r"-?[\d.e-]+", cell), cell


def check_shell(path: Path) -> None:
    """It is read by bash as one list of words, and running it without torchrun does nothing besides."""
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    empty = path.parent.with_name("empty")
    empty.mkdir(exist_ok=True)
    subprocess.run(
        ["bash", "-c", 'source "$1" || true', "bash", str(path)],
        cwd=path.parent,
        env={"PATH": f"{empty}:/usr/bin:/bin", "HOME": str(empty)},
        capture_output=True,
        timeout=20,
        check=False,
    )
    assert not (path.parent / "owned").exists(), path.read_text(encoding="utf-8")


def check_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)


def check_python(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = {ast.unparse(own.func) for own in ast.walk(tree) if isinstance(own, ast.Call)}
    assert not calls & {"eval", "exec", "os.system", "__import__", "compile"}


CHECKS = {
    ".json": check_json,
    ".svg": check_svg,
    ".csv": check_csv,
    ".sh": check_shell,
    ".yaml": check_yaml,
    ".py": check_python,
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_names_of_layers(here: Path) -> None:
    layers = tuple(dict.fromkeys(NAMES))
    half = len(layers) // 2
    for output in outputs(here, with_names(layers, "model"), f"{half},{len(layers) - half}"):
        check_texts(output)
    check_files(here)
    exported = json.loads((here / "model.huggingface.json").read_text(encoding="utf-8"))
    assert list(exported["device_map"]) == list(layers)


@pytest.mark.parametrize(
    "name", [*EVERYWHERE[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in EVERYWHERE[3:])]
)
def test_every_other_name(name: str, here: Path) -> None:
    """Of the model, its devices, notes and what made it; and of the blocks of a transformer."""
    layers = tuple(f"{name}.{own}" for own in TRANSFORMER)
    for output in outputs(here, with_names(layers, name), "3,4"):
        check_texts(output)
    check_files(here)
    recipes = list(here.glob("*.yaml"))
    assert recipes or "\n" in name, "blocks of a transformer are not found behind such a name"
    for path in recipes:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        parts = recipe["distributed"]["pipeline"]["module_fqns_per_model_part"]
        listed = [own for part in parts for own in part if not own.endswith(".rotary_emb")]
        assert listed == list(layers)


@pytest.mark.parametrize("name", NAMES)
def test_names_of_a_machine(name: str, here: Path) -> None:
    text = json.dumps(name, ensure_ascii=True)
    (here / "m.toml").write_text(
        f'[[device]]\nname = {text}\nmemory = "16GiB"\ncount = 2\n[[level]]\nname = {text}\nlink = {text}\n'
        'bandwidth = "1GB/s"\n',
        encoding="utf-8",
    )
    for command in (["topology", "show", "m.toml"], ["topology", "show", "m.toml", "--toml"]):
        status, out, err = run(command, debug=False)
        check_texts(Output(command, status, out if "--toml" not in command else "", err))
    if status == 0:
        assert tomllib.loads(out)["device"][0]["name"] == name
        assert [path.name for path in here.iterdir()] == ["m.toml"]
