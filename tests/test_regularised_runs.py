"""Runs with regularisers, as a user starts them."""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest
import yaml
from commands import TINY_GLYPHS, run_ok

from proxy_anchor.reports.runs import method_name, read_runs, settings

NAMES = ["anti_collapse", "metrix_features", "nested", "proxy_synthesis", "tcm"]
ALL = [f"regulariser=[{','.join(NAMES)}]", "regulariser.nested.dims=[4,8]", "regulariser.tcm.weight=0.5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Working directory of a run with all regularisers at once."""
    folder = tmp_path_factory.mktemp("regularised")
    run_ok("train.py", "run=x", *ALL, *TINY_GLYPHS, "validation=classes", cwd=folder)
    return folder


def test_terms_and_the_recall_of_each_dimension_are_logged(trained: Path) -> None:
    metrics = pandas.read_csv(trained / "runs" / "x" / "metrics.csv")
    terms = {f"train/{name}_term" for name in ["loss", *NAMES] if name != "proxy_synthesis"}  # that one mixes alone
    assert {each for each in metrics if each.endswith("_term")} == terms
    whole, *cut = (metrics[f"test/recall_at_1{suffix}"].dropna() for suffix in ("", "_dim4", "_dim8"))
    assert all(len(each) == 2 and each.between(0, 1).all() for each in (whole, *cut))
    assert not whole.equals(cut[0])


def test_evaluate_reports_the_recall_of_each_dimension(trained: Path) -> None:
    output = run_ok("evaluate.py", "checkpoint=runs/x/last.ckpt", "output=numbers.json", cwd=trained)
    numbers = json.loads((trained / "numbers.json").read_text())
    metrics = pandas.read_csv(trained / "runs" / "x" / "metrics.csv")
    for dim in (4, 8):
        key = f"recall_at_1_dim{dim}"
        assert numbers[key] == pytest.approx(metrics[f"test/{key}"].dropna().iloc[-1], abs=1e-6)
        assert f"{key} {100 * numbers[key]:.2f}" in output


def test_the_record_says_what_was_used(trained: Path) -> None:
    config = yaml.safe_load((trained / "runs" / "x" / "config.yaml").read_text())
    assert method_name(config) == f"Proxy-Anchor + {' + '.join(NAMES)}"
    assert settings(config)["regulariser.tcm.weight"] == 0.5
    assert f"regularisers: {', '.join(NAMES)}" in (trained / "runs" / "x" / "README.md").read_text()
    [run] = read_runs(trained / "runs")
    assert settings(run.config) != settings({**run.config, "regulariser": {}})
