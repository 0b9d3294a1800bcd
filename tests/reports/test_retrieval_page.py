"""Which queries and classes fail, by hand on a circle, and what the page shows of them."""

from __future__ import annotations

import re

import pytest
from reports.conftest import ANGLES, on_circle

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.gallery import class_recall, select_queries, worst_queries
from proxy_anchor.reports.pages import write_retrieval_page


def test_recall_of_each_class(splits):
    assert class_recall(splits, [on_circle(*ANGLES)]) == {"a": 1.0, "b": 0.5}
    assert class_recall(splits, [on_circle(*ANGLES)], k=3) == {"a": 1.0, "b": 1.0}


def test_worst_first(splits):
    # cos(own) - cos(other): 0: 10/25, 1: 10/15, 2: 75/15, 3: 75/90.
    assert worst_queries(splits, [on_circle(*ANGLES)]) == [2, 1, 0, 3]


def test_choices(splits):
    embeddings = [on_circle(*ANGLES)]
    assert select_queries(splits, embeddings, "worst", count=1) == [2]
    assert select_queries(splits, embeddings, [splits.query.paths[3], str(splits.query.paths[1])]) == [
        3,
        1,
    ]
    assert {splits.query.labels[each] for each in select_queries(splits, embeddings, count=2)} == {0, 1}
    with pytest.raises(UsageError, match=r"not among them: nowhere\.png"):
        select_queries(splits, embeddings, ["nowhere.png"])
    with pytest.raises(UsageError, match="not among them: best"):
        select_queries(splits, embeddings, "best")


def test_two_models_beside_each_other(splits, tmp_path):
    models = {"first": [on_circle(*ANGLES)], "second": [on_circle(0, 10, 100, 110)]}
    write_retrieval_page(tmp_path / "page.html", splits, models, [2, 0], k=2)
    text = (tmp_path / "page.html").read_text()
    assert re.findall(r'data-first="([^"]*)"', text) == ["miss hit", "hit hit"]
    assert text.count("<img") == text.count('src="data:image/jpeg;base64,') == 2 * (1 + 2 * 2)
    assert "://" not in text
