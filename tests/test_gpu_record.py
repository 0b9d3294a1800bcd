"""`make test-gpu`: what its record says."""

from __future__ import annotations

import json
import runpy
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import REPOSITORY


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_row_says_where_the_tests_ran_and_how_they_ended(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = runpy.run_path(str(REPOSITORY / "tests" / "conftest.py"))["pytest_terminal_summary"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setenv("PROXY_ANCHOR_COMMIT", "0123abcd")
    reports = {"passed": [1, 2], "skipped": [3]}
    file = tmp_path / "test_gpu.jsonl"
    summary(SimpleNamespace(getreports=lambda name: reports.get(name, [])), SimpleNamespace(getoption=lambda _: file))
    assert file.is_file() == has_gpu
    if has_gpu:
        row = json.loads(file.read_text())
        assert (row["device"], row["commit"]) == ("NVIDIA H200", "0123abcd")
        assert [row[name] for name in ("passed", "failed", "error", "skipped")] == [2, 0, 0, 1]
        assert row["versions"]["torch"] == version("torch")
