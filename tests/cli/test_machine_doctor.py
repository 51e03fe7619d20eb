"""`pplan machine doctor`: what is here, and the command for what is not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import pytest

from pplan.api import doctor

Run = Callable[..., Any]


def test_it_tells_what_is_here_and_how_to_get_the_rest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "ray" else find(name))
    ran = run("machine", "doctor", "--json")
    assert ran.status == 0
    findings = {finding["subject"]: finding for finding in json.loads(ran.out)["findings"]}
    import torch

    assert findings["torch"]["text"] == torch.__version__.split("+")[0] or torch.__version__
    assert (findings["ray"]["state"], findings["ray"]["advice"]) == (
        "optional",
        'pip install "pplan[ray]"',
    )
    assert findings["torchgpipe"]["state"] == "ok"
    assert "gloo" in findings["backends"]["text"]
    assert "core" in findings["cpu"]["text"]
    table = run("machine", "doctor").out
    assert 'ray: pip install "pplan[ray]"' in table


def test_without_torch_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "torch" else "1")
    ran = run("machine", "doctor")
    assert ran.status == 2
    assert "MISSING" in ran.out
    assert "torch: pip install torch" in ran.out
