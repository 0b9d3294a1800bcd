"""benchmarks/complexity.py runs, on sizes that take seconds; what it counts is right where it can be known."""

from __future__ import annotations

import json

import pytest
from commands import REPOSITORY

BENCHMARKS = REPOSITORY / "benchmarks"


@pytest.fixture
def complexity(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return pytest.importorskip("complexity")


def test_complexity_quick(complexity, tmp_path, monkeypatch, capsys):
    arguments = ["--quick", "--device", "cpu", "--output", str(tmp_path), "--losses"]
    monkeypatch.setattr("sys.argv", ["complexity.py", *arguments, "proxy_anchor", "soft_triple", "triplet"])
    complexity.main()
    rows = [json.loads(line) for line in (tmp_path / "complexity.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 2 * 3 + 2  # three axes for all, proxies for one
    assert all(row["seconds"] > 0 and row["peak_bytes"] > 0 and row["commit"] for row in rows)
    for axis in ("images", "batch", "classes", "proxies"):
        for suffix in ("svg", "png"):
            assert (tmp_path / f"complexity_{axis}.{suffix}").stat().st_size > 1000
    assert "O(M³/B²)" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["complexity.py", *arguments, "triplett"])
    with pytest.raises(SystemExit):
        complexity.main()
    assert "--losses triplett: choose from arcface" in capsys.readouterr().err
