"""Every notebook runs from top to bottom, quickly, and is kept small and without a trace of the machine it ran on."""

from __future__ import annotations

import nbformat
import pytest
from commands import REPOSITORY
from nbclient import NotebookClient

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    options = {"timeout": 180, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, **options).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_executed_and_small(path):
    assert path.stat().st_size < 300_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any({"image/png", "image/jpeg"} & set(output.get("data", {})) for output in outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert str(REPOSITORY) not in path.read_text()
    assert "/tmp/" not in path.read_text()
    assert "\\u001b" not in path.read_text()  # colours and cursors of a terminal
    assert not any(output.get("name") == "stderr" for output in outputs)
