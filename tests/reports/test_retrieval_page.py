"""Which queries and classes fail, by hand on a circle, and what the page shows of them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.retrieval_page import (
    class_recall,
    select_queries,
    side_by_side,
    worst_of_classes,
    worst_queries,
    write_retrieval_page,
)


def on_circle(*degrees: float) -> torch.Tensor:
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


@pytest.fixture
def splits(write_images: Callable) -> Splits:
    [table] = make_tables(write_images({"a": 2, "b": 2}))
    return Splits("made up", table, table)


# a at 0 and 10 degrees, b at 25 and 100: each a finds the other, the first b finds an a, the second b the first b.
ANGLES = (0, 10, 25, 100)


def test_recall_of_each_class(splits):
    assert class_recall(splits, [on_circle(*ANGLES)]) == {"a": 1.0, "b": 0.5}
    assert class_recall(splits, [on_circle(*ANGLES)], k=3) == {"a": 1.0, "b": 1.0}


def test_worst_first(splits):
    # cos(own) - cos(other): 0: 10/25, 1: 10/15, 2: 75/15, 3: 75/90.
    assert worst_queries(splits, [on_circle(*ANGLES)]) == [2, 1, 0, 3]


def test_choices(splits):
    embeddings = [on_circle(*ANGLES)]
    assert select_queries(splits, embeddings, "worst", count=1) == [2]
    assert select_queries(splits, embeddings, "path", paths=[splits.query.paths[3], str(splits.query.paths[1])]) == [
        3,
        1,
    ]
    assert {splits.query.labels[each] for each in select_queries(splits, embeddings, count=2)} == {0, 1}
    with pytest.raises(UsageError, match=r"not among them: nowhere\.png"):
        select_queries(splits, embeddings, "path", paths=["nowhere.png"])
    with pytest.raises(UsageError, match="choose=best is not known"):
        select_queries(splits, embeddings, "best")


def test_the_worst_query_of_a_class_with_what_it_found(splits):
    shown = worst_of_classes(splits, [on_circle(*ANGLES)], ["b", "a"])
    assert list(shown) == ["b", "a"]
    for name, (query, found) in {"b": (2, 1), "a": (1, 0)}.items():
        for picture, row in zip(shown[name], (query, found), strict=True):
            expected = Image.open(splits.query.paths[row]).resize(picture.size, Image.Resampling.BICUBIC)
            assert np.abs(np.asarray(picture, float) - np.asarray(expected, float)).mean() < 1


def test_two_models_beside_each_other(splits, tmp_path):
    models = {"first": [on_circle(*ANGLES)], "second": [on_circle(0, 10, 100, 110)]}
    page = side_by_side(splits, models, [2, 0], k=2)
    alone = side_by_side(splits, {"first": models["first"]}, [2, 0], k=2)
    assert page.width > 2 * alone.width
    write_retrieval_page(tmp_path / "page.html", splits, models, [2, 0], k=2)
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'data-first="([^"]*)"', text) == ["miss hit", "hit hit"]
    assert text.count("<img") == text.count('src="data:image/jpeg;base64,') == 2 * (1 + 2 * 2)
    assert "://" not in text
