"""The source holds nothing that runs what a file says: no pickle, eval, exec or shell, no unsafe loading."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("cli", "cost_models", "planner", "pplan", "profiler", "runtimes")
MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "pty", "commands"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "torch.hub.load"}
LOADERS = {
    "yaml.Loader",
    "yaml.FullLoader",
    "yaml.UnsafeLoader",
    "yaml.CLoader",
    "yaml.CFullLoader",
    "yaml.CUnsafeLoader",
}
"""`compile` alone: torch.compile is another, and so is re.compile."""
READS_PICKLES = {"runtimes/pipelining/checkpoint_reader.py"}
"""DCP's metadata, of known records alone: tests/runtimes/test_checkpoint_files.py attacks it."""
SHELLS = {"subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"}


def trees() -> Iterator[tuple[str, ast.AST]]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def forbidden(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (own.name for own in node.names if own.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from [node.module] if node.module and node.module.split(".")[0] in MODULES else []
        elif isinstance(node, ast.Attribute | ast.Constant):
            loader = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
            yield from [loader] if loader in LOADERS or f"yaml.{loader}" in LOADERS else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {own.arg: ast.unparse(own.value) for own in node.keywords}
            if name in CALLS | SHELLS or keywords.get("shell", "False") != "False":
                yield ast.unparse(node)[:80]
            if name in ("torch.load", "numpy.load", "np.load"):
                safe = keywords.get("weights_only") == "True" or name != "torch.load"
                if not safe or keywords.get("allow_pickle", "False") != "False":
                    yield ast.unparse(node)[:80]


@pytest.mark.slow
def test_nothing_runs_what_a_file_says() -> None:
    found = [(path, what) for path, tree in trees() for what in forbidden(tree)]
    assert found == [(path, "pickle") for path in READS_PICKLES]


def test_templates_load_by_the_training_object() -> None:
    """Which reads tensors alone; a template loads nothing by itself."""
    templates = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "runtimes" / "scripts").glob("*.template"))
    }
    assert any("training.load(" in text for text in templates.values())
    assert [name for name, text in templates.items() if re.search(r"torch\.load|pickle", text)] == []


def test_what_is_forbidden_is_recognised() -> None:
    """The search itself finds what it is to find."""
    code = (
        "import pickle\nfrom dill import loads\neval('1')\nsubprocess.run('ls', shell=True)\n"
        "torch.load('a')\nnp.load('a', allow_pickle=True)\nos.system('ls')\n"
        "yaml.Loader(a)\ngetattr(yaml, 'CLoader')(a)\n"
    )
    assert len(list(forbidden(ast.parse(code)))) == 9
    fine = "torch.compile(m)\nm.eval()\nsubprocess.run(['ls'])\ntorch.load('a', weights_only=True)\n"
    fine += "yaml.SafeLoader(a)\n"
    assert list(forbidden(ast.parse(fine))) == []
