"""`pplan machine measure kernels`: the file it writes, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pplan.cli.app import main

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 256,
}


def test_a_table_for_degrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, table = tmp_path / "config.json", tmp_path / "kernels.csv"
    config.write_text(json.dumps(MODEL))
    sizes = ["--sequence", "64", "--tp", "1,2"]
    arguments = [
        "machine",
        "measure",
        "kernels",
        str(config),
        *sizes,
        "--device",
        "cpu",
        "--repeats",
        "1",
        "-o",
        str(table),
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "kernels of llama in bfloat16" in printed.out
    assert str(table) in printed.err
    options = ["--gpus", "2", "--gpu", "h100", "--mini-batch", "1", "--micro-batch-size", "1", *sizes]
    assert main(["solve", str(config), *options, "--kernels", str(table), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert not answer["profile"]["estimated"]
    assert any("its kernels may be another device's" in note for note in answer["notes"])
    assert main(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*arguments[:4], *sizes, "--tp", "3", "--device", "cpu", "-o", str(tmp_path / "x.csv")]) == 2
    assert "tensor=3" in capsys.readouterr().err


def test_the_table_under_its_own_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends with a comment, by which the next one may replace it."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(MODEL))
    sizes = ["--sequence", "64", "--micro-batch-size", "1"]
    measure = ["machine", "measure", "kernels", "config.json", *sizes, "--device", "cpu", "--repeats", "1"]
    assert main(measure) == main(measure) == 0
    capsys.readouterr()
    options = ["--gpus", "1", "--gpu", "h100", "--mini-batch", "1", *sizes, "--kernels", "kernels.csv"]
    assert main(["solve", "config.json", *options, "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["profile"]["estimated"]
    table = Path("kernels.csv")
    table.write_text(table.read_text() + "foo,m=1,1,1,1\n")
    line = len(table.read_text().splitlines())
    assert main(["solve", "config.json", *options]) == 2
    assert f"line {line}: operation 'foo'" in capsys.readouterr().err


def test_a_table_whose_peak_is_not_the_gpus_has_a_remark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, table = tmp_path / "config.json", tmp_path / "kernels.csv"
    config.write_text(json.dumps(MODEL))
    options = ["--gpus", "1", "--gpu", "h100", "--mini-batch", "1", "--sequence", "64"]
    for peak, remarks in (("989", 0), ("2250", 1), ("40", 1)):
        rows = ["operation,shape,peak_tflops,efficiency", f'matmul,"m=64, k=64, n=64, layout=TN",{peak},0.5']
        table.write_text("\n".join(rows))
        assert main(["solve", str(config), *options, "--kernels", str(table), "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert sum(f"the table's peak is {peak} TFLOP/s, and that of the GPU" in own for own in notes) == (
            remarks
        )
