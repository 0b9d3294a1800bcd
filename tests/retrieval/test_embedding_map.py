from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from commands import one_line

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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", ["pca", "tsne"])
def test_few_or_equal_images(method: str) -> None:
    assert embedding_map(torch.randn(1, 6), method=method).tolist() == [[0.5, 0.5]]
    assert sorted(embedding_map(torch.randn(2, 6), method=method).tolist()) == [[0, 0.5], [1, 0.5]]
    assert np.isfinite(embedding_map(torch.randn(3, 6), method=method)).all()
    assert (embedding_map(torch.randn(1, 6).expand(10, 6), method=method) == 0.5).all()  # a collapsed network
    for few in (torch.randn(2, 6), torch.tensor([[-2.0], [3.0]])):
        assert np.isfinite(embedding_map(few.repeat(5, 1), method=method)).all()


def test_bad_input_is_named(monkeypatch) -> None:
    one_line(embedding_map, torch.full((3, 2), torch.nan), match="NaN")
    one_line(embedding_map, torch.ones(3, 2), method="mds", match="method=mds is not known")
    monkeypatch.setitem(sys.modules, "umap", None)
    one_line(embedding_map, torch.randn(9, 4), method="umap", match="needs umap-learn")
