"""The house rules: imports run one way, what knows no torch loads none, and every folder is packaged."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("cost_models", "profiler", "planner", "runtimes", "pplan/api", "cli")
MAY_IMPORT = {
    "cost_models": set[str](),
    "profiler": {"cost_models"},
    "planner": {"cost_models"},
    "runtimes": {"cost_models", "profiler", "planner"},
    "api": {"cost_models", "profiler", "planner", "runtimes"},
    "cli": {"cost_models", "profiler", "planner", "runtimes", "api"},
}
"""By the folder's name under `pplan.`; imports for type checkers and inside functions count."""
FROM_RUNTIMES = {"planner": {"planner.plan_degrees", "planner.plan_file"}}
"""What a room may take of another, where that is not all of it."""
WITHOUT_CIRCLES = ("cost_models", "planner", "profiler", "runtimes")
"""Folders in which imports run one way, file by file and sub-folder by sub-folder."""
TORCH = {"torch", "torchvision", "torchgpipe", "fairscale", "deepspeed"}
NO_TORCH_FOLDERS = ("cost_models", "planner", "cli")
NO_TORCH_FILES = (
    "profiler/__init__.py",
    "profiler/profile_file.py",
    "profiler/names.py",
    "profiler/imports.py",
)


@cache
def tracked() -> tuple[Path, ...]:
    """Files that git tracks and that exist, so that a virtual environment in the clone is never read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file())


def sources(room: str) -> list[Path]:
    """Python files of a folder, sub-folders included."""
    return [path for path in tracked() if path.suffix == ".py" and path.is_relative_to(ROOT / room)]


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's, walked once."""
    return tuple(ast.walk(parse(path)))


@cache
def imported(path: Path) -> tuple[tuple[str, bool], ...]:
    """Absolute names of the modules a file imports, pplan's own without `pplan.`, and whether at its top
    level (else inside a function or for type checkers only)."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[str, bool]]:
    package = path.relative_to(ROOT).parts[:-1]
    top = {id(node) for node in parse(path).body}
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module.removeprefix("pplan."), id(node) in top
            for name in node.names:
                yield f"{module}.{name.name}".removeprefix("pplan.").lstrip("."), id(node) in top


def top_folder(module: str) -> str:
    """The folder of a module of pplan's; what is in none, `pplan` itself, is "pplan"."""
    parts = module.removeprefix("pplan.").split(".")
    return parts[0] if parts[0] in {*MAY_IMPORT, "pplan"} else ""


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    files = sources(room)
    own = room.removeprefix("pplan/")
    assert files
    for path in files:
        for module, _ in imported(path):
            other = top_folder(module)
            if other not in ("", own):
                assert other in MAY_IMPORT[own], f"{path} imports {module}"
                allowed = FROM_RUNTIMES.get(other) if own == "runtimes" else None
                if allowed and module != other:
                    assert any(module.startswith(name) for name in allowed), f"{path} imports {module}"


def test_the_public_api_is_above_all_but_the_command_line() -> None:
    names = [module for module, _ in imported(ROOT / "pplan/__init__.py")]
    assert {"api", "cost_models", "planner", "profiler"} <= {top_folder(name) for name in names}
    assert "cli" not in {top_folder(name) for name in names}
    assert len((ROOT / "pplan/__init__.py").read_text().splitlines()) < 100


OPTIONS_OF_OTHER_TOOLS = {
    "profiler/gpu_state.py": "nvidia-smi's",
    "runtimes/exports.py": "torchtitan's",
    "runtimes/documents.py": "torchtitan's",
    "runtimes/degree_exports.py": "torchtitan's",
    "cost_models/runtime.py": "torchtitan's",
}
"""Files that may name an option which pplan has, too."""


@pytest.mark.parametrize("room", ["cost_models", "profiler", "planner", "runtimes"])
def test_no_text_below_the_command_line_names_its_options(room: str) -> None:
    """Errors, notes and docstrings name fields; `cli/field_names.py` makes options of them."""
    from pplan.cli.field_names import FIELDS
    from pplan.cli.verbs import enter_all_fields

    enter_all_fields()
    options, texts = set(FIELDS.values()), 0
    for path in sources(room):
        if path.relative_to(ROOT).as_posix() in OPTIONS_OF_OTHER_TOOLS:
            continue
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += 1
                option = options & set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", node.value))
                assert not option, f"{path}:{node.lineno} names {option}"
    assert texts > 100


def drawn(folder: str) -> dict[str, set[str]]:
    """By file of the folder, those of its files that it imports: at its top, inside functions and for type
    checkers alike. A package stands for its `__init__.py`."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        .removeprefix("pplan.")
        .removesuffix(".__init__"): path
        for path in sources(folder)
    }
    return {
        name: {module for module, _ in imported(path) if module in paths and module != name}
        for name, path in paths.items()
    }


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other."""
    graph = networkx.DiGraph((name, other) for name, others in imports.items() for other in others)
    return [sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1]


@pytest.mark.parametrize("folder", [*WITHOUT_CIRCLES, "pplan/api", "cli"])
def test_no_files_import_each_other_in_a_circle(folder: str) -> None:
    imports = drawn(folder)
    assert sum(map(len, imports.values())) > len(imports)
    assert circles(imports) == []


@pytest.mark.parametrize("folder", WITHOUT_CIRCLES)
def test_sub_folders_import_one_way(folder: str) -> None:
    """Each sub-folder taken as one, beside the files of the folder itself: what a sub-folder imports, however
    far down, imports nothing of the sub-folder."""
    taken = dict[str, set[str]]()
    for name, others in drawn(folder).items():
        own = ".".join(name.split(".")[:2])
        taken.setdefault(own, set()).update(".".join(other.split(".")[:2]) for other in others)
    together = {name: others - {name} for name, others in taken.items()}
    assert any((ROOT / name.replace(".", "/")).is_dir() for name in together)
    assert circles(together) == []


def test_the_oracle_shares_no_code_with_what_it_attacks() -> None:
    files = sources("tests/oracle")
    assert files
    for path in files:
        names = [alias.name for node in nodes(path) if isinstance(node, ast.Import) for alias in node.names]
        names += [
            node.module or "" for node in nodes(path) if isinstance(node, ast.ImportFrom) and not node.level
        ]
        assert not {name.split(".")[0] for name in names} & {"pplan", "tests"}, path


def test_torch_is_imported_in_the_profiler_and_the_runtimes_only() -> None:
    without = [path for folder in NO_TORCH_FOLDERS for path in sources(folder)]
    for path in (*without, *(ROOT / name for name in NO_TORCH_FILES)):
        for module, _ in imported(path):
            assert module.split(".")[0] not in TORCH, f"{path} imports {module}"
    for path in sources("runtimes"):
        if path.parent.name in ("pipelining", "processes"):
            continue  # the modules that a training process runs
        for module, top in imported(path):
            trains = module.split(".")[0] in TORCH or module.startswith(
                ("runtimes.pipelining", "runtimes.checking.processes")
            )
            assert not (top and trains), f"{path} imports {module} at its top"
    assert any(module == "torch" for path in sources("profiler") for module, _ in imported(path))


INTERNALS = (
    "profiler/torch_private.py",
    "runtimes/pipelining/runtime_internals.py",
)
"""Where names stand that PyTorch and the runtimes do not promise to keep."""
LIKE_PUBLIC = {"_replace", "_asdict", "_fields", "_exit", "_operator", "_constants", "_parser"}
"""Of Python itself."""
NAMES_OF_FILES = {"_PipelineScheduleRuntime": "runtimes/torch_actions.py"}
"""What pplan writes into an export, by the file that does."""


def private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def own_names(paths: list[Path]) -> set[str]:
    """What pplan itself defines: functions, classes, fields, attributes, variables and modules' locals."""
    names = set()
    for node in (node for path in paths for node in nodes(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if ast.unparse(node.value) == "self" else set()
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def foreign_names(path: Path, own: set[str], known: Set[str] = frozenset()) -> Iterator[str]:
    """Private names of other libraries: attributes, imported modules, objects. `known`: theirs for sure."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and private(node.attr):
            of_self = ast.unparse(node.value) == "self"
            if node.attr not in own or (node.attr in known and not of_self):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and not node.level:
            parts = (node.module or "").split(".")
            yield from filter(private, (*parts, *(name.name for name in node.names)))
        elif isinstance(node, ast.Import):
            yield from (part for name in node.names for part in name.name.split(".") if private(part))


def texts(path: Path) -> set[str]:
    constants = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


@pytest.mark.parametrize("room", ROOMS)
def test_names_that_a_library_does_not_promise_stand_in_one_place(room: str) -> None:
    """Also as texts, for getattr: those that the three files have."""
    internals = [ROOT / path for path in INTERNALS]
    files = [path for path in sources(room) if path not in internals]
    own = own_names(files)
    known = {name for path in internals for name in foreign_names(path, own_names(internals))}
    known |= {text for path in internals for text in texts(path) if text.isidentifier() and private(text)}
    assert {"_cdata", "_sleep", "_load_csv", "_pytree", "_modules", "_INSTRUCTION_MAP"} <= known
    for path in files:
        place = path.relative_to(ROOT).as_posix()
        found = set(foreign_names(path, own, known)) - LIKE_PUBLIC
        found |= {name for name in texts(path) & known if NAMES_OF_FILES.get(name) != place}
        assert not found, f"{place}: {sorted(found)} belong in {' or '.join(INTERNALS)}, with their reason"


@pytest.fixture
def without_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which torch and what needs it cannot be imported."""
    for name in TORCH:
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('{name} is not to be imported here')\n"
        )
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


IMPORTS_ALL = """
import importlib, pkgutil, sys
for room in ("pplan.planner", "pplan.cost_models"):
    package = importlib.import_module(room)
    for module in pkgutil.walk_packages(package.__path__, room + "."):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("pplan.")]))
"""


@pytest.mark.slow
def test_planner_and_cost_models_need_no_torch(without_torch: dict[str, str]) -> None:
    """Every module, and tests that go through most of them."""
    imports = [sys.executable, "-c", IMPORTS_ALL]
    ran = subprocess.run(imports, env=without_torch, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-1000:]
    assert int(ran.stdout) > 100
    chosen = ["-m", "not slow", "tests/planner/test_build_plan.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-cov", *chosen],
        cwd=ROOT,
        env=without_torch,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
    assert " passed" in ran.stdout


def test_every_folder_is_packaged() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"pplan"} | {
        "pplan." + ".".join(init.parent.relative_to(ROOT).parts).removeprefix("pplan.")
        for room in ROOMS
        for init in sources(room)
        if init.name == "__init__.py"
    }
    assert set(settings["packages"]) == folders
    with_code = {
        "pplan." + ".".join(path.parent.relative_to(ROOT).parts).removeprefix("pplan.")
        for room in ROOMS
        for path in sources(room)
    }
    assert with_code <= folders
    links = {path.name for path in (ROOT / "typings/pplan").iterdir()}
    assert links == {"__init__.py", *MAY_IMPORT}
    shadows = [path for path in tracked() if path.name == "profile.py"]
    assert not shadows, "profile.py would shadow the standard library's"


@pytest.mark.slow
def test_the_wheel_holds_everything(tmp_path: Path) -> None:
    """Built from a copy of the sources, unpacked elsewhere, and imported from there."""
    copy = tmp_path / "sources"
    for path in tracked():
        if not path.is_relative_to(ROOT / "typings"):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    pip = [sys.executable, "-m", "pip"]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    built = subprocess.run([*pip, "wheel", *options, str(copy)], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = tmp_path.glob("pplan-*.whl")
    site = tmp_path / "site"
    shutil.unpack_archive(wheel, site, "zip")
    scripts = "runtimes/scripts"
    templates = {path.name for path in (ROOT / scripts).glob("*.template")}
    assert templates
    assert {path.name for path in (site / "pplan" / scripts).glob("*.template")} == templates
    modules = [
        "pplan."
        + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        .removeprefix("pplan.")
        .removesuffix(".__init__")
        for room in ROOMS
        for path in sources(room)
    ]
    check = f"""
import importlib, pathlib, sys
sys.path.insert(0, {str(site)!r})
for name in {modules!r}:
    module = importlib.import_module(name)
    assert pathlib.Path(module.__file__).is_relative_to({str(site)!r}), module.__file__
for name in ("pplan", *{[f"pplan.{room}" for room in MAY_IMPORT]!r}):
    folder = pathlib.Path(importlib.import_module(name).__file__).parent
    assert (folder / "py.typed").exists(), name
"""
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True)


NAMED_BY_THINGS = ("cost_models", "profiler", "planner", "runtimes", "pplan/api", "cli")
"""Folders whose names were gone through one by one."""
PARTICIPLES = re.compile(
    r"_*(asked|built|chosen|drawn|found|given|handed|held|kept|known|made|named|noted|picked|put|reached"
    r"|said|seen|shown|taken|told|tried|wanted)_*",
    re.IGNORECASE,
)
"""No names: they say what happened to a thing, and not which it is. A plan is a `plan`, not `made`."""


def names_in(path: Path) -> Iterator[str]:
    """What a file names: functions, classes, arguments, variables and attributes."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.mark.parametrize("room", NAMED_BY_THINGS)
def test_names_are_those_of_things(room: str) -> None:
    files = sources(room)
    assert files
    for path in files:
        riddles = {name for name in names_in(path) if PARTICIPLES.fullmatch(name)}
        assert not riddles, f"{path}: {sorted(riddles)}"
