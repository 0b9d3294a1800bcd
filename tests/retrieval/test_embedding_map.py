from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.embedding_map import embedding_map


def test_a_plane_is_shown_as_it_is() -> None:
    """Unit vectors on a circle in 5 dimensions: the map is that circle."""
    angles = torch.arange(12) * (2 * torch.pi / 12)
    basis = torch.linalg.qr(torch.randn(5, 5))[0][:2]
    places = embedding_map(torch.stack([angles.cos(), 2 * angles.sin()], dim=1) @ basis)
    assert places.shape == (12, 2)
    assert places.min() == 0
    assert places.max() == 1
    assert np.array_equal(places, embedding_map(torch.stack([angles.cos(), 2 * angles.sin()], dim=1) @ basis))


@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_classes_stay_together(method: str) -> None:
    labels = torch.arange(60) % 3
    embeddings = torch.eye(3, 8)[labels] + 0.05 * torch.randn(60, 8)
    places = torch.from_numpy(embedding_map(embeddings, method=method)).float()
    distance = torch.cdist(places, places).fill_diagonal_(torch.inf)
    assert (labels[distance.argmin(1)] == labels).all()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_images(count: int) -> None:
    for method in ("pca", "tsne"):
        places = embedding_map(torch.randn(count, 6), method=method)
        assert places.shape == (count, 2)
        assert np.isfinite(places).all()
    assert embedding_map(torch.ones(2, 1)).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_bad_input_is_named(monkeypatch) -> None:
    with pytest.raises(UsageError, match="NaN"):
        embedding_map(torch.full((3, 2), torch.nan))
    with pytest.raises(UsageError, match="method=mds is not known"):
        embedding_map(torch.ones(3, 2), method="mds")
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(UsageError, match="needs umap-learn"):
        embedding_map(torch.randn(9, 4), method="umap")
