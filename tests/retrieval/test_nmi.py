from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from by_fractions import classes
from commands import one_line

from proxy_anchor.retrieval import search as search_module
from proxy_anchor.retrieval.clustering import kmeans, nmi


def test_by_hand() -> None:
    # Classes aabb, clusters 0111. H(classes) = log 2. H(clusters) = log 4 - 3/4 log 3.
    # I = 1/4 log(1/4 / (1/2 1/4)) + 1/4 log(1/4 / (1/2 3/4)) + 1/2 log(1/2 / (1/2 3/4))
    information = (math.log(2) + math.log(2 / 3) + 2 * math.log(4 / 3)) / 4
    mean_entropy = (math.log(2) + math.log(4) - 3 / 4 * math.log(3)) / 2
    x, labels = torch.tensor([[1.0, 0], [0, 1], [0, 3], [0, 9]]), torch.tensor([5, 5, 9, 9])
    got = max(nmi(x, labels, seed=seed) for seed in range(9))  # some start with equal rows
    assert got == pytest.approx(information / mean_entropy, abs=1e-6)


@pytest.mark.parametrize("chunk", [search_module.CHUNK_ELEMENTS, 77])  # 77: parts of 9 rows
def test_torch_is_plain_loops(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "CHUNK_ELEMENTS", chunk)
    x, _ = classes(200, 10, 16)
    start = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:8]
    points = x.double().numpy() / np.linalg.norm(x.double().numpy(), axis=1, keepdims=True)
    centroids = points[start]
    for _ in range(3):
        clusters = np.array([np.argmin([np.sum((row - c) ** 2) for c in centroids]) for row in points])
        centroids = np.stack([points[clusters == c].mean(0) for c in range(8)])
    expected = [np.argmin([np.sum((row - c) ** 2) for c in centroids]) for row in points]
    assert kmeans(x, 8, seed=4, num_iterations=3).tolist() == expected


def test_tight_classes_score_1_and_noise_does_not() -> None:
    x, labels = classes(300, 3, 16, noise=1e-3)
    assert max(nmi(x, labels, seed=seed) for seed in range(5)) == pytest.approx(1, abs=1e-6)
    x, labels = classes(2000, 4, 16, noise=100.0)
    assert nmi(x, labels) < 0.02


def test_the_same_seed_gives_the_same_value() -> None:
    x, labels = classes(400, 10, 16, noise=1.5)
    before = torch.get_rng_state()
    values = [nmi(x, labels, seed=seed) for seed in (0, 0, 1)]
    assert values[0] == values[1] != values[2]
    assert torch.equal(torch.get_rng_state(), before)  # and the run's own random numbers are not touched
    assert nmi(x.numpy(), labels.numpy() * 7 - 3) == values[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert nmi(x, labels) == values[0]


def test_degenerate_inputs() -> None:
    x, labels = classes(60, 10, 16)
    assert sorted(kmeans(x, 60).tolist()) == list(range(60))
    assert nmi(x, torch.arange(60)) == pytest.approx(1, abs=1e-6)  # all alone
    assert nmi(x, torch.zeros(60, dtype=torch.long)) == 0  # one class
    assert 0 <= nmi(torch.ones(60, 4), labels) < 0.6  # a collapsed network
    assert 0 <= nmi(torch.zeros(60, 4), labels) < 0.6


@pytest.mark.gpu
def test_cuda() -> None:
    x, labels = classes(300, 3, 16, noise=1e-3)
    got = [nmi(x.cuda(), each, seed=3) for each in (labels, labels, labels.cuda())]
    assert got[0] == got[1] == got[2] > 0.5


def test_refusals() -> None:
    x, labels = classes(20, 10, 16)
    bad = x.clone()
    bad[[3, 4], 0] = float("nan")
    one_line(nmi, bad, labels, match="2 of 20 input embeddings hold NaN")
    one_line(nmi, x, labels[:19], match="20 input embeddings but 19 labels")
    one_line(nmi, x, labels.float(), match="labels: expected a one-dimensional")
