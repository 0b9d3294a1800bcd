"""Runs on data of one's own: which are seeds of one, by the content of the images, and what their table says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import TINY_FOLDER, compose_train
from pictures import write_noise_images
from reports.test_paper import DATA as BIRDS
from reports.test_paper import write_run

from proxy_anchor.errors import UsageError
from proxy_anchor.reports import figures
from proxy_anchor.reports.paper import paper_tables, terminal_text
from proxy_anchor.reports.runs import read_runs
from proxy_anchor.reports.tables import write_comparison
from proxy_anchor.training.module import CHECKPOINT_KEY
from train import train

FOLDER = ("dataset=folder", "backbone=bninception")
BOATS = {"train": "64 images of 8 classes, 4e5f", "query": "64 images of 8 classes, 6a7b"}


def write_own(folder: Path, root: str, data: dict[str, str], *overrides: str, recall_1: float) -> Path:
    return write_run(folder, *FOLDER, f"dataset.root={root}", *overrides, recall_1=recall_1, data=data)


def rows(folder: Path):
    [table] = paper_tables(read_runs(folder))
    assert (table.label, table.dataset) == ("folder", "folder")
    return [(row.data, row.run_names, row.ours[1].mean, row.runs, row.mark) for row in table.rows]


def test_two_data_sets_are_no_seeds_of_one(tmp_path):
    write_own(tmp_path / "a", "/here/birds", BIRDS, "seed=1", recall_1=0.48)
    write_own(tmp_path / "b", "/here/boats", BOATS, "seed=2", recall_1=0.97)
    assert rows(tmp_path) == [
        ("birds", "a", pytest.approx(48), 1, ""),
        ("boats", "b", pytest.approx(97), 1, ""),
    ]


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
    assert rows(tmp_path)[0][-1] == "the epoch is selected on held-out training classes"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three runs of real images: x/images, a copy of it elsewhere, and others of that name, sizes and classes."""
    here = tmp_path_factory.mktemp("own")
    for name in ("x", "z"):
        write_noise_images(here / name, dict.fromkeys("abcdef", 8))
    changed = sorted((here / "z/images").rglob("*.*"))[0]
    with changed.open("ab") as file:
        file.write(b"more")
    shutil.copytree(here / "x", here / "y")
    for seed, name in enumerate("xyz"):
        cfg = compose_train(*TINY_FOLDER, "trainer.max_epochs=1", f"dataset.root={here}/{name}/images", f"seed={seed}")
        train(cfg, here / "runs" / name)
    return here / "runs"


def test_a_run_keeps_the_content_of_its_data(trained):
    results = {each.name: json.loads((each / "result.json").read_text()) for each in trained.iterdir()}
    assert results["x"]["data"] == results["y"]["data"] != results["z"]["data"]
    checkpoint = torch.load(trained / "x/best.ckpt", weights_only=True)
    assert checkpoint[CHECKPOINT_KEY]["data"] == results["x"]["data"]
    assert [(data, names) for data, names, *_ in rows(trained)] == [("images (1)", "x, y"), ("images (2)", "z")]


def test_comparisons_of_different_images_are_not_averaged(trained, tmp_path):
    x, y, z = (json.loads((trained / name / "result.json").read_text()) for name in "xyz")
    write_comparison(tmp_path, {"triplet": [x, y]})
    noisy = y | {"data": y["data"] | {"train": "the same images, other labels"}, "label_noise": 0.5}
    write_comparison(tmp_path, {"triplet": [x, noisy]})
    # The changed image is one of training or one of search; the other half of the data set is what it was.
    other = z | {"data": {"train": z["data"]["train"], "query": "other images"}}
    with pytest.raises(UsageError, match="of 2 different data sets"):
        write_comparison(tmp_path, {"triplet": [x, other]})
