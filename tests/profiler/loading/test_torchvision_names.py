"""Names of torchvision's models without torchvision."""

from __future__ import annotations

import subprocess
import sys

import torchvision

import pplan
from pplan.profiler.names import list_torchvision_names


def test_all_names() -> None:
    assert list_torchvision_names() == sorted(torchvision.models.list_models())


def test_a_typo_loads_no_torch() -> None:
    code = "import sys, pplan.cli.app as app; print(app.main(['profile', 'vgg91']), 'torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["2", "False"]
    assert "Did you mean vgg19" in ran.stderr


def test_upper_case_is_a_name() -> None:
    assert pplan.profile("AlexNet", device="analytic:h100", micro_batch_sizes=[1]).model == "alexnet"
