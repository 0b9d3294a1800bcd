"""The metrics of neighbour lists that were ranked elsewhere."""

from __future__ import annotations

import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.metrics import metrics_of_ranking, retrieval_metrics
from proxy_anchor.retrieval.search import search


def test_metrics_of_a_ranking_are_fractions_a_person_can_check():
    """Classes a a a b, each ranked by hand; b has no positive and counts as a miss."""
    ranking = torch.tensor([[1, 3, 2], [3, 0, 2], [3, 1, 0], [0, 1, 2]])
    values = metrics_of_ranking(ranking, torch.tensor([0, 0, 0, 1]), [1, 2])
    assert values["recall_at_1"] == 1 / 4
    assert values["recall_at_2"] == 3 / 4
    # R = 2: (1 + 0) / 2, (0 + 1/2) / 2, (0 + 1/2) / 2, nothing
    assert values["map_at_r"] == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 4)
    assert values["r_precision"] == pytest.approx((1 / 2 + 1 / 2 + 1 / 2) / 4)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_metrics_of_the_search_s_own_ranking_are_the_metrics(with_gallery):
    embeddings, labels = torch.randn(60, 8), torch.arange(60) % 7
    gallery = {"gallery": embeddings[20:], "gallery_labels": labels[20:]} if with_gallery else {}
    queries, wanted = (embeddings[:20], labels[:20]) if with_gallery else (embeddings, labels)
    _, ranking = search(queries, gallery.get("gallery", queries), 15, exclude_self=not with_gallery)
    found = metrics_of_ranking(ranking, wanted, [1, 4], gallery_labels=gallery.get("gallery_labels"))
    assert found == pytest.approx(retrieval_metrics(queries, wanted, [1, 4], **gallery))


def test_a_ranking_that_is_too_short_or_wrong_is_refused():
    labels = torch.tensor([0, 0, 0, 1])
    with pytest.raises(UsageError, match="at least 2 neighbours"):
        metrics_of_ranking(torch.zeros(4, 1, dtype=torch.int64), labels, 1)
    with pytest.raises(UsageError, match="outside the gallery"):
        metrics_of_ranking(torch.full((4, 3), 4), labels, 1)
