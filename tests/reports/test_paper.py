"""Runs next to the paper's numbers: which row they stand in, the arithmetic, the marks, the forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from commands import compose_train, one_line
from omegaconf import OmegaConf

from proxy_anchor.reports.paper import Contract, paper_tables, terminal_text
from proxy_anchor.reports.runs import read_runs

DATA = {"train": "64 images of 8 classes, 0a1b", "query": "64 images of 8 classes, 2c3d"}
RECALL = {"1": 0.861, "2": 0.917, "4": 0.95, "8": 0.973}


def write_run(folder: Path, *overrides: str, recall_1: float = 0.861, data: Mapping[str, str] = DATA) -> Path:
    """A run folder as train.py leaves it, with made-up numbers: two epochs, the first at half the recall."""
    folder.mkdir(parents=True)
    OmegaConf.save(compose_train(*overrides), folder / "config.yaml", resolve=True)
    rows = [
        {"epoch": epoch, "recall": {**RECALL, "1": share * recall_1}, "train_seconds": 2.0, "validation": None}
        for epoch, share in ((1, 0.5), (2, 1.0))
    ]
    result = {"searched": "test", "selected": rows[1], "best": rows[1], "last": rows[0], "history": rows, "data": data}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


CARS = ("dataset=cars", "backbone=bninception")


def contract(*overrides: str) -> Contract:
    config = OmegaConf.to_container(compose_train(*CARS, *overrides), resolve=True)
    return ["tab:eval_cub_cars"], config


def test_mean_deviation_n_and_difference_over_seeds(tmp_path):
    for seed, recall in ((1, 0.85), (2, 0.86), (3, 0.87)):
        # Where the files lie and how they are read changes nothing in a number; a null key may be newer than a run.
        own = [f"seed={seed}", "dataset.root=x", "data.num_workers=3", *["+data.newer=null"] * (seed == 1)]
        write_run(tmp_path / f"deep/er/{seed}", *CARS, *own, recall_1=recall)
    tables = paper_tables(read_runs(tmp_path), [contract("embedding_dim=512")])
    assert [table.label for table in tables] == ["tab:eval_cub_cars", "tab:eval_cub_cars_supp", "tab:batch_size_fine"]
    [row] = [row for row in tables[0].rows if row.ours]
    assert (row.method, row.dimension, row.backbone) == ("Proxy-Anchor", 512, "bninception")
    assert (row.last.runs, row.mark) == (3, "")
    assert row.paper == {1: 86.1, 2: 91.7, 4: 95.0, 8: 97.3}
    assert row.ours[1].mean == pytest.approx(86)
    assert row.ours[1].deviation == pytest.approx(1)
    assert "86.0 ± 1.0" in (text := terminal_text(tables[0]))
    assert "-0.1" in text
    assert "Proxy-Anchor  512  BN" in text


def test_another_setting_is_marked_and_makes_a_row_of_its_own(tmp_path):
    write_run(tmp_path / "a", *CARS)
    write_run(tmp_path / "b", *CARS, "loss.alpha=16", "dataset.allow_partial=true")
    rows = [row for row in paper_tables(read_runs(tmp_path), [contract()])[0].rows if row.ours]
    assert rows[0].mark == ""
    assert rows[1].mark == (
        "dataset.allow_partial True (contract False); dataset.load.allow_partial True (contract False); "
        "loss.alpha 16 (contract 32)"
    )


def test_rows_without_contract_or_without_a_row_of_the_paper(tmp_path):
    write_run(tmp_path / "nca", *CARS, "loss=proxy_nca", "embedding_dim=64")
    write_run(tmp_path / "lite", "dataset=cars", "backbone=efficientnet_lite0")
    write_run(tmp_path / "glyphs")
    tables = {(each.label, each.dataset): each for each in paper_tables(read_runs(tmp_path))}
    nca, lite = [row for row in tables["tab:eval_cub_cars", "cars"].rows if row.ours]
    assert (nca.method, nca.paper[1]) == ("Proxy-NCA", 73.2)
    assert "no contract" in nca.mark
    assert (lite.backbone, lite.paper, lite.mark) == ("tf_efficientnet_lite0", {}, "the paper has no such row")
    [glyphs] = tables["glyphs", "glyphs"].rows
    assert glyphs.backbone == "test_resnet"


def test_folders_that_are_no_finished_run_are_left_out_and_said(tmp_path, report):
    good = write_run(tmp_path / "runs/good")
    damages = {
        "half": lambda text: text[:9],
        "nothing": lambda text: "{}",
        "fold": lambda text: text.replace('"searched": "test"', '"searched": "validation"'),
    }
    for name, damage in damages.items():
        file = write_run(tmp_path / "runs" / name) / "result.json"
        file.write_text(damage(file.read_text()))
    (write_run(tmp_path / "runs/killed") / "result.json").unlink()
    (write_run(tmp_path / "runs/bare") / "config.yaml").unlink()
    (write_run(tmp_path / "runs/old") / "config.yaml").write_text("seed: 1")
    (write_run(tmp_path / "runs/odd") / "config.yaml").write_text("seed: [")
    left_out: list[str] = []
    assert [run.name for run in read_runs(tmp_path / "runs", left_out)] == [good.name]
    reasons = dict(line.removeprefix(f"{tmp_path}/runs/").split(": ", 1) for line in left_out)
    assert set(reasons) == {*damages, "killed", "bare", "odd", "old"}
    assert (reasons["killed"], reasons["bare"]) == ("not finished", "no config.yaml")
    assert "held-out" in reasons["fold"]
    output = report(f"runs={tmp_path}/runs", f"output={tmp_path}/report")
    assert f"left out: {tmp_path}/runs/killed: not finished" in output
    assert r"test\_resnet" in (tmp_path / "report/tables.tex").read_text()
    one_line(read_runs, tmp_path / "runs/killed", match=r"no finished run: .*killed: not finished")


def test_the_command_writes_every_form_and_checks_the_contract(tmp_path, report):
    write_run(tmp_path / "runs/a", "experiment=cars_512", "seed=1")
    write_run(tmp_path / "runs/b", "experiment=cars_512", "seed=2", "optimizer.lr=2e-4")
    output = report(f"runs={tmp_path}/runs", f"output={tmp_path}/report")
    assert "[1] optimizer.lr 0.0002 (contract 0.0001)" in output
    names = {file.name for file in (tmp_path / "report").iterdir()}
    assert {"tables.md", "tables.tex", "recall_by_epoch.svg", "recall_by_epoch.png"} <= names
    assert "| Proxy-Anchor | 512 | BN |" in (tmp_path / "report/tables.md").read_text()
    latex = (tmp_path / "report/tables.tex").read_text()
    assert "Proxy-Anchor & 512 & BN" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 3
