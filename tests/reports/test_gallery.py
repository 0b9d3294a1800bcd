"""Who is next to whom, by hand on a circle, which queries and classes fail, and what picture and page show."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import one_line
from PIL import Image
from reports.conftest import ANGLES, on_circle

from proxy_anchor import Retriever
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.reports import gallery as module
from proxy_anchor.reports.pages import write_retrieval_page, write_search_page


def make_splits(query: str, gallery: str = "") -> Splits:
    """Images of these classes, a letter each."""
    tables = [[(Path(f"{row}.png"), name) for row, name in enumerate(names)] for names in (query, gallery) if names]
    return Splits("s", make_tables([(Path("t.png"), "t")])[0], *make_tables(*tables))


def found(splits: Splits, embeddings: list[torch.Tensor], k: int) -> list[list[tuple[int, bool]]]:
    neighbours = module.nearest_images(splits, embeddings, range(len(splits.query)), k)
    return [[(each.index, each.is_hit) for each in row] for row in neighbours]


def test_neighbours_are_never_the_query_itself() -> None:
    assert found(make_splits("aabb"), [on_circle(*ANGLES)], 3) == [
        [(1, True), (2, False), (3, False)],
        [(0, True), (2, False), (3, False)],
        [(1, False), (0, False), (3, True)],
        [(2, True), (1, False), (0, False)],
    ]
    for query, row in enumerate(found(make_splits("abcdefgh"), [torch.ones(8, 4)], 3)):  # exact duplicates
        assert len({index for index, _ in row} - {query}) == 3
    # In a gallery of its own, an image with the query's embedding is another image, so a fair neighbour.
    assert found(make_splits("ab", "bab"), [on_circle(0, 90), on_circle(0, 20, 80)], 3) == [
        [(0, False), (1, True), (2, False)],
        [(2, True), (1, False), (0, True)],
    ]


@pytest.mark.parametrize(("query", "gallery", "columns"), [("aab", "", 2), ("aa", "b", 1), ("a", "", 0)])
def test_k_is_bounded_by_what_can_be_found(query: str, gallery: str, columns: int) -> None:
    embeddings = [torch.eye(len(names), 4) for names in (query, gallery) if names]
    assert {len(row) for row in found(make_splits(query, gallery), embeddings, 6)} == {columns}


def test_the_picture_frames_hits_and_misses(splits: Splits) -> None:
    page = module.retrieval_gallery(splits, [on_circle(*ANGLES)], [2, 0], k=3)
    assert page.size == (4 * (96 + 6) + 12, 2 * (96 + 14 + 6) + 6)
    black, miss, hit = (0, 0, 0), (0xCC, 0x33, 0x11), (0x00, 0x9E, 0x73)
    lefts = [6, *(12 + column * 102 for column in (1, 2, 3))]
    assert [page.getpixel((left, 6)) for left in lefts] == [black, miss, miss, hit]
    assert [page.getpixel((left, 6 + 116)) for left in lefts] == [black, hit, miss, miss]
    for left, row in zip(lefts, (2, 1, 0, 3), strict=True):
        with Image.open(splits.query.paths[row]) as image:
            tile = np.asarray(page.crop((left + 4, 10, left + 92, 98)), float)
            assert np.abs(tile - np.asarray(image.convert("RGB").resize((88, 88)), float)).mean() < 10


def test_queries_are_of_different_classes_and_follow_the_seed() -> None:
    labels = np.repeat(range(3), 5)
    chosen = [module.choose_queries(labels, 3, seed) for seed in range(4)]
    assert all(sorted(labels[rows]) == [0, 1, 2] for rows in chosen)
    assert chosen[0] == module.choose_queries(labels, 3)
    assert len(set(map(tuple, chosen))) > 1
    assert sorted(module.choose_queries(labels, 99)) == list(range(15))


def test_recall_of_each_class_and_the_worst_queries(splits: Splits) -> None:
    assert module.class_recall(splits, [on_circle(*ANGLES)]) == {"a": 1.0, "b": 0.5}
    assert module.class_recall(splits, [on_circle(*ANGLES)], k=3) == {"a": 1.0, "b": 1.0}
    # cos(own) - cos(other): 0: 10/25, 1: 10/15, 2: 75/15, 3: 75/90.
    assert module.worst_queries(splits, [on_circle(*ANGLES)]) == [2, 1, 0, 3]


def test_choices(splits: Splits) -> None:
    embeddings = [on_circle(*ANGLES)]
    assert module.select_queries(splits, embeddings, "worst", count=1) == [2]
    assert module.select_queries(splits, embeddings, [splits.query.paths[3], str(splits.query.paths[1])]) == [3, 1]
    assert {splits.query.labels[each] for each in module.select_queries(splits, embeddings, count=2)} == {0, 1}
    for choose, missing in ((["nowhere.png"], r"nowhere\.png"), ("best", "best")):
        one_line(module.select_queries, splits, embeddings, choose, match=f"not among them: {missing}")


def test_two_models_beside_each_other(splits: Splits, tmp_path: Path) -> None:
    models = {"first": [on_circle(*ANGLES)], "second": [on_circle(0, 10, 100, 110)]}
    write_retrieval_page(tmp_path / "page.html", splits, models, [2, 0], k=2)
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'data-first="([^"]*)"', text) == ["miss hit", "hit hit"]
    assert text.count("<img") == text.count('src="data:image/webp;base64,') == 2 * (1 + 2 * 2)
    assert "://" not in text


def test_the_page_of_a_search(make_checkpoint: Callable, write_images: Callable, tmp_path: Path) -> None:
    rows = write_images({"cat": 3, "<script>alert(1)</script>".replace("/", "_"): 2})
    paths = [path for path, _ in rows]
    retriever = Retriever.from_pretrained(make_checkpoint()).index(paths, [name for _, name in rows], progress=False)
    retriever.calibrate(0.5)
    results = retriever.search(paths[:2], k=4)
    Path(results[0][3].name).unlink()
    write_search_page(tmp_path / "page.html", retriever, paths[:2], results)
    text = (tmp_path / "page.html").read_text()
    gone = sum(hit.name == results[0][3].name for hits in results for hit in hits)
    assert text.count('src="data:,"') == gone
    assert text.count('src="data:image/webp;base64,') == 2 * (1 + 4) - gone
    assert text.count("src=") == 10
    assert "<script" not in text
    assert not re.search(r"https?://", text)
    assert "match threshold" in text
    assert "class by vote" in text
