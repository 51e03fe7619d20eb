"""The examples in the docstrings of the public API give what they say."""

from __future__ import annotations

import doctest
import inspect
import re
from pathlib import Path

import pytest

import pplan

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = {
    "check": "trains for some seconds, in processes of its own",
    "load_model": "in the example of `sequential`",
    "load_plan": "in the example of `export`",
    "load_profile": "as `load_plan`",
}
"""Functions without an example of their own, and why."""


def examples() -> dict[str, doctest.DocTest]:
    parser, found = doctest.DocTestParser(), {}
    for name in pplan.__all__:
        text = inspect.getdoc(getattr(pplan, name)) or ""
        test = parser.get_doctest(text, {}, name, name, 0)
        if test.examples and inspect.isfunction(getattr(pplan, name)):
            found[name] = test
    return found


EXAMPLES = examples()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the examples name: those of docs/getting-started.md."""
    folder = tmp_path_factory.mktemp("examples")
    page = (ROOT / "docs/getting-started.md").read_text()
    (folder / "gpt.csv").write_text(re.findall(r"```csv\n(.*?)```", page, flags=re.DOTALL)[0])
    profile = pplan.import_profile(folder / "gpt.csv", micro_batch_size=4)
    (folder / "gpt.profile.json").write_text(profile.to_json())
    plan = pplan.solve(
        folder / "gpt.profile.json",
        gpus=4,
        memory_bytes=6 * 2**30,
        mini_batch=64,
        micro_batches=16,
        optimizer="adam",
    )
    (folder / "gpt.plan.json").write_text(plan.to_json())
    return folder


SLOW = {"explain", "frontier", "profile", "sequential"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in EXAMPLES]
)
def test_it_is_so(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(EXAMPLES[name], out=said.append)
    assert not said, "".join(said)


def test_every_function_has_an_example() -> None:
    functions = {name for name in pplan.__all__ if inspect.isfunction(getattr(pplan, name))}
    assert functions - set(EXAMPLES) == set(LEFT_OUT)
