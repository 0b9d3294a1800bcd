"""Pictures of finished runs, as a user asks for them."""

from __future__ import annotations

from cli import TINY_GLYPHS, run_ok


def test_retrieval_and_map_of_a_run(tmp_path):
    run_ok("train.py", "run=first", *TINY_GLYPHS, cwd=tmp_path)
    run_ok("train.py", "run=second", "seed=2", *TINY_GLYPHS, cwd=tmp_path)
    arguments = ("retrieval=runs/first", "against=runs/second", "choose=worst", "queries=5", "k=3", "output=a")
    assert "worst classes, Recall@1: " in run_ok("report.py", *arguments, cwd=tmp_path)
    assert (tmp_path / "a/retrieval.html").read_text().count("<section") == 5
    picture = next((tmp_path / "data/glyphs").rglob("test/*/*.png"))
    run_ok("report.py", "retrieval=runs/first", f"choose={picture}", cwd=tmp_path)
    assert picture.name in (tmp_path / "runs/first/report/retrieval.html").read_text()
    assert "64 of 64 images" in run_ok("report.py", "map=runs/first", "method=pca", "tile=24", cwd=tmp_path)
    names = {file.name for file in (tmp_path / "runs/first/report").iterdir()}
    assert {"map.png", "map_classes.svg", "class_recall.png", "retrieval.png"} <= names
