"""Runs on data of one's own: which are seeds of one, by the content of the images, and what their table says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import TINY_FOLDER, compose_train
from pictures import write_noise_images
from reports.test_paper import DATA as BIRDS
from reports.test_paper import write_run

from proxy_anchor.data.folder import load_folder
from proxy_anchor.data.table import data_fingerprint
from proxy_anchor.reports import figures
from proxy_anchor.reports.paper import paper_tables, terminal_text
from proxy_anchor.reports.runs import by_seed, read_runs
from proxy_anchor.training.module import CHECKPOINT_KEY
from train import train

FOLDER = ("dataset=folder", "backbone=bninception")
BOATS = {"train": "64 images of 8 classes, 4e5f", "query": "64 images of 8 classes, 6a7b"}


def write_own(folder: Path, root: str, data: dict[str, str], *overrides: str, recall_1: float) -> Path:
    return write_run(folder, *FOLDER, f"dataset.root={root}", *overrides, recall_1=recall_1, data=data)


def rows(folder: Path):
    [table] = paper_tables(read_runs(folder))
    assert (table.label, table.dataset) == ("folder", "folder")
    return [(row.data, row.run_names, row.ours[1].mean, row.last.runs, row.mark) for row in table.rows]


def test_the_content_is_what_counts_and_not_name_or_place(tmp_path):
    write_own(tmp_path / "deep/a", "/here/images", BIRDS, "seed=1", recall_1=0.4)
    write_own(tmp_path / "deep/b", "/there/images", BOATS, "seed=2", recall_1=0.6)  # another folder of that name
    write_own(tmp_path / "deep/c", "/moved/images", BIRDS, "seed=3", recall_1=0.5)
    write_own(tmp_path / "old", "/here/images", BOATS, "seed=4", recall_1=0.8)  # the same folder, other images by then
    assert rows(tmp_path) == [
        ("images (1)", "deep/a, deep/c", pytest.approx(45), 2, ""),
        ("images (2)", "deep/b, old", pytest.approx(70), 2, ""),
    ]
    text = terminal_text(paper_tables(read_runs(tmp_path))[0])
    assert "images (1)  deep/a, deep/c  Proxy-Anchor  512  BN   45.0 ± 7.1" in text
    names = list(figures.named_groups(read_runs(tmp_path)))
    assert names == [f"images ({number}), Proxy-Anchor, BN, 512-d" for number in (1, 2)]


def test_copies_of_a_whole_benchmark_are_one_data_set_and_parts_are_not(tmp_path):
    for part in (False, True):
        folder = tmp_path / str(part)
        for seed, data in enumerate((BIRDS, BOATS)):  # another copy: other sizes of files
            setting = (f"dataset.allow_partial={str(part).lower()}", f"seed={seed}")
            write_run(folder / str(seed), "dataset=cars", "backbone=bninception", *setting, data=data)
        assert len(by_seed(read_runs(folder))) == 1 + part


def test_the_files_name_data_and_run_and_say_nothing_of_the_paper(tmp_path, report):
    write_own(tmp_path / "runs/a", "/here/my_birds", BIRDS, recall_1=0.4)
    output = report(f"runs={tmp_path}/runs", f"output={tmp_path}/report")
    texts = [output, *((tmp_path / f"report/tables.{form}").read_text() for form in ("md", "tex"))]
    assert not any("the paper" in text or "[1]" in text or "diff" in text for text in texts)
    assert "| my_birds | a | Proxy-Anchor | 512 | BN | 40.0 |" in texts[1]
    assert r"\begin{tabular}{" in texts[2]
    assert r"my\_birds & a & Proxy-Anchor & 512 & BN & 40.0" in texts[2]
    write_run(tmp_path / "runs/cars", "dataset=cars", "backbone=bninception")
    both = report(f"runs={tmp_path}/runs", f"output={tmp_path}/report")
    assert "diff is ours minus the paper" in both


def test_an_epoch_chosen_by_held_out_classes_is_said(tmp_path):
    folder = write_own(tmp_path / "a", "/x/birds", BIRDS, recall_1=0.4)
    result = json.loads((folder / "result.json").read_text())
    result["selected"]["validation"] = {"1": 0.5}
    (folder / "result.json").write_text(json.dumps(result))
    assert rows(tmp_path)[0][-1] == "the epoch is selected on held-out classes"


def test_a_run_keeps_the_content_of_its_data(tmp_path):
    write_noise_images(tmp_path, dict.fromkeys("abcdef", 8))
    cfg = compose_train(*TINY_FOLDER, "trainer.max_epochs=1", f"dataset.root={tmp_path}/images")
    result = train(cfg, tmp_path / "run")
    data = data_fingerprint(load_folder(tmp_path / "images"))
    checkpoint = torch.load(tmp_path / "run/best.ckpt", weights_only=True)
    assert result["data"] == checkpoint[CHECKPOINT_KEY]["data"] == data
