"""`pplan demo`: the main job on the costs that come with pplan."""

from __future__ import annotations

from pathlib import Path

import pytest

from pplan.cli.app import main
from pplan.cli.demo_command import STEPS

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_every_command_of_the_demonstration_runs(tmp_path: Path, capfd: Capture) -> None:
    folder = tmp_path / "a folder"
    assert main(["demo", str(folder)]) == 0
    assert {path.name for path in folder.iterdir()} == {
        *("gpt2-xl.csv", "gpt2-xl.profile.json", "gpt2-xl.plan.json", "gpt2-xl.torch.json", "gpt2-xl.html"),
    }
    assert "A pipeline of 2 stages over 8 GPUs is the fastest" in capfd.readouterr().out
    # Again: what it wrote may be replaced.
    assert main(["demo", str(folder)]) == 0


def test_a_command_that_fails_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    monkeypatch.setattr("pplan.cli.demo_command.STEPS", (STEPS[0]._replace(command="solve --gpus x"), *STEPS))
    assert main(["demo", str(tmp_path)]) == 2
    assert "gpus" in capfd.readouterr().err
    assert not list(tmp_path.glob("*.json"))


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["demo", str(file)]) == 2
    assert str(file) in capfd.readouterr().err
    assert file.read_text() == ""


def test_a_file_of_yours_is_kept(tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "gpt2-xl.csv").write_text("mine")
    assert main(["demo", str(tmp_path)]) == 2
    assert "gpt2-xl.csv" in capfd.readouterr().err
    assert (tmp_path / "gpt2-xl.csv").read_text() == "mine"
