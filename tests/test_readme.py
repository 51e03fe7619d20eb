"""What the README shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


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
