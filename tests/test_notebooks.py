"""The notebooks of examples/ run, from an empty folder, and show what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "schedules"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_it_runs(name: str, tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are not committed"
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawings = [output for output in shown if "image/svg+xml" in output.get("data", {})]
    tables = [output for output in shown if "<table>" in output.get("data", {}).get("text/html", "")]
    assert len(drawings) >= 2
    assert tables
