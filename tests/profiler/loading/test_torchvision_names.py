"""Names of torchvision's models without torchvision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torchvision

import pplan
from pplan.profiler.names import list_torchvision_names


def test_all_names() -> None:
    assert list_torchvision_names() == sorted(torchvision.models.list_models())


UNET = """
raise SystemExit("nobody runs this")
class Block:
    def __init__(self, width): pass
class UNet:
    def __init__(self, classes=2): pass
"""


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("vgg91", "Did you mean vgg19"),
        ("unet.py", "its factory: unet:UNet. It has UNet, Block."),
        ("nets/unet.py", "its factory: nets.unet:UNet."),
        ("unet.UNet", "Name it as unet:UNet."),
        ("unet.Unet", "Name it as unet:UNet."),
        ("nets.unet.UNet", "Name it as nets.unet:UNet."),
        ("unet", "as in unet:UNet."),
        ("torchvision.models.resnet18", "Name it as torchvision.models:resnet18."),
    ],
)
def test_a_wrong_name_loads_no_torch_and_runs_nothing(tmp_path: Path, name: str, advice: str) -> None:
    (tmp_path / "nets").mkdir()
    for folder in (tmp_path, tmp_path / "nets"):
        (folder / "unet.py").write_text(UNET)
    code = (
        "import sys, pplan.cli.app as app\n"
        "print(app.main(sys.argv[1:]), {'torch', 'unet'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code, "profile", name]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert ran.stdout == "2 set()\n"
    assert advice in ran.stderr


def test_upper_case_is_a_name() -> None:
    assert pplan.profile("AlexNet", device="analytic:h100", micro_batch_sizes=[1]).model == "alexnet"
