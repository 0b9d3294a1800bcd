"""Re-ranking against plain loops written from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from by_fractions import classes
from commands import one_line

from proxy_anchor.retrieval.reranking import k_reciprocal, query_expansion, rerank


def k_reciprocal_loops(rows: np.ndarray, k1: int, k2: int, weight: float) -> np.ndarray:
    """(N, N) final distances of all rows to all, in float64, after the equations of Zhong et al. 2017."""
    n = len(rows)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    distance = 2 - 2 * unit @ unit.T
    distance /= distance.max(1, keepdims=True)
    order = []
    for i in range(n):
        others = sorted((j for j in range(n) if j != i), key=lambda j: distance[i, j])
        order.append([i, *others])

    def reciprocal(i: int, k: int) -> set[int]:
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    encoding = np.zeros((n, n))
    for i in range(n):
        base = reciprocal(i, k1)
        members = set(base)
        for j in base:
            candidates = reciprocal(j, round(k1 / 2))
            if len(candidates & base) > 2 / 3 * len(candidates):
                members |= candidates
        for j in members:
            encoding[i, j] = math.exp(-distance[i, j])
        encoding[i] /= encoding[i].sum()
    if k2 > 1:
        encoding = np.stack([encoding[order[i][:k2]].mean(0) for i in range(n)])
    final = np.empty((n, n))
    for i in range(n):
        for j in range(n):
            shared = np.minimum(encoding[i], encoding[j]).sum()
            final[i, j] = (1 - weight) * (1 - shared / (2 - shared)) + weight * distance[i, j]
    return final


@pytest.mark.parametrize(("k1", "k2", "weight"), [(20, 6, 0.3), (7, 3, 0.5), (5, 1, 0.0), (1, 1, 0.3), (100, 6, 0.3)])
def test_k_reciprocal_is_the_loop(k1: int, k2: int, weight: float) -> None:
    embeddings, _ = classes(60, 6, noise=0.6)
    expected = k_reciprocal_loops(embeddings.double().numpy(), k1, k2, weight)
    distances, indices = k_reciprocal(embeddings, 59, k1=k1, k2=k2, weight=weight)
    own = np.arange(60)[:, None]
    assert not (indices.numpy() == own).any()
    assert np.allclose(distances.numpy(), expected[own, indices.numpy()], atol=1e-5)
    assert (distances[:, 1:] >= distances[:, :-1]).all()


def test_k_reciprocal_with_a_gallery_is_the_loop_over_both() -> None:
    embeddings, _ = classes(60, 6, noise=0.6)
    expected = k_reciprocal_loops(embeddings.double().numpy(), 20, 6, 0.3)[:15, 15:]
    distances, indices = k_reciprocal(embeddings[:15], 45, gallery=embeddings[15:])
    assert np.allclose(distances.numpy(), expected[np.arange(15)[:, None], indices.numpy()], atol=1e-5)


def test_k_reciprocal_of_duplicates_is_finite() -> None:
    distances, indices = k_reciprocal(torch.ones(5, 3), 4)
    assert torch.isfinite(distances).all()
    assert [sorted(row) for row in indices.tolist()] == [[j for j in range(5) if j != i] for i in range(5)]


@pytest.mark.parametrize("with_gallery", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_query_expansion_is_the_loop(with_gallery: bool, alpha: float) -> None:
    embeddings, _ = classes(30, 6, noise=0.6)
    unit = embeddings.double() / embeddings.double().norm(dim=1, keepdim=True)
    queries, gallery = (unit[:10], unit[10:]) if with_gallery else (unit, unit)
    expected = []
    for i, query in enumerate(queries):
        ranked = sorted(range(len(gallery)), key=lambda j: -float(query @ gallery[j]))
        near = [j for j in ranked if with_gallery or j != i][:12]
        total = query + sum(
            max(float(query @ gallery[j]), 0) ** alpha * gallery[j] for j in near if query @ gallery[j] > 0
        )
        expected.append(total / total.norm())
    found = query_expansion(
        embeddings[:10] if with_gallery else embeddings,
        gallery=embeddings[10:] if with_gallery else None,
        num_neighbours=12,
        alpha=alpha,
    )
    assert torch.allclose(found.double(), torch.stack(expected), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda x: rerank("magic", x, 2), "rerank=magic is not known"),
        (lambda x: k_reciprocal(x, 30), "larger than the gallery"),
        (lambda x: k_reciprocal(x, 2, gallery=x[:, :3]), "embed both with one network"),
        (lambda x: query_expansion(x * math.nan), "NaN"),
    ],
)
def test_bad_values_are_named(call, reason: str) -> None:
    one_line(call, classes(30, 6, noise=0.6)[0], match=reason)
