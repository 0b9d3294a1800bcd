"""benchmarks/complexity.py runs, on sizes that take seconds; what it counts is right where it can be known."""

from __future__ import annotations

import json

import pytest
import torch
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


@pytest.mark.parametrize("axis", ["images", "batch", "classes", "proxies"])
def test_every_size_has_classes_for_its_batch(complexity, axis):
    # n_pair looks at one pair per class: with too few classes it stops growing with the batch.
    for size in complexity.SIZES[axis]:
        point = {**complexity.BASE, axis: size}
        assert point["batch"] <= 2 * point["classes"]
    with pytest.raises(ValueError, match="takes more than 100 classes"):
        complexity.make_step("n_pair", {**complexity.BASE, "batch": 240, "classes": 100}, torch.device("cpu"))


def test_memory_without_torchs_own_count(complexity):
    device = torch.device("cpu")
    kept = torch.ones(250_000, requires_grad=True)

    def chain():
        x = torch.ones(250_000)
        for _ in range(10):
            x = x * 2

    def all_at_once():
        return [torch.ones(250_000) for _ in range(10)]

    def backward():
        (kept * 2).exp().sum().backward()
        kept.grad = None

    assert complexity.peak_memory(chain, device) == 2_000_000
    assert complexity.peak_memory(all_at_once, device) == 10_000_000
    assert complexity.peak_memory(backward, device) == pytest.approx(
        2_000_000, abs=100
    )  # what exp keeps, and one gradient
