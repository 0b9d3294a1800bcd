from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval import search as search_module
from proxy_anchor.retrieval.clustering import kmeans, nmi, normalised_mutual_information

AVAILABLE = ["torch"]
AVAILABLE += ["faiss_cpu"] if search_module.has_faiss() else []
AVAILABLE += ["faiss_gpu"] if search_module.faiss_gpu_works() else []
each_engine = pytest.mark.parametrize("engine", AVAILABLE)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def blobs(noise: float, count: int = 400, classes: int = 10, dim: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % classes
    centres = torch.randn(classes, dim, generator=generator)
    return centres[labels] + noise * torch.randn(count, dim, generator=generator), labels


def by_loops(x: np.ndarray, start: np.ndarray, moves: int) -> np.ndarray:
    """Lloyd's k-means of unit vectors; fails where a cluster runs empty."""
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    centroids = x[start]
    for move in range(moves + 1):
        clusters = np.array([np.argmin([np.sum((row - c) ** 2) for c in centroids]) for row in x])
        if move < moves:
            centroids = np.stack([x[clusters == c].mean(0) for c in range(len(centroids))])
    return clusters


class TestNormalisedMutualInformation:
    def test_by_hand(self) -> None:
        # Classes aabb, clusters 0111. H(classes) = log 2. H(clusters) = log 4 - 3/4 log 3.
        # I = 1/4 log(1/4 / (1/2 1/4)) + 1/4 log(1/4 / (1/2 3/4)) + 1/2 log(1/2 / (1/2 3/4))
        information = (math.log(2) + math.log(2 / 3) + 2 * math.log(4 / 3)) / 4
        mean_entropy = (math.log(2) + math.log(4) - 3 / 4 * math.log(3)) / 2
        got = normalised_mutual_information(np.array([5, 5, 9, 9]), np.array([0, 1, 1, 1]))
        assert got == pytest.approx(information / mean_entropy, abs=1e-15)

    def test_bounds(self) -> None:
        a = np.array([0, 0, 1, 1, 2, 2])
        assert normalised_mutual_information(a, 7 - a) == pytest.approx(1, abs=1e-15)
        assert normalised_mutual_information(a, np.array([0, 1] * 3)) == pytest.approx(0, abs=1e-15)
        assert normalised_mutual_information(a, np.zeros(6, dtype=int)) == 0
        assert normalised_mutual_information(np.zeros(6), np.ones(6)) == 1

    @pytest.mark.parametrize("seed", range(5))
    def test_scikit_learn(self, seed: int) -> None:
        cluster = pytest.importorskip("sklearn.metrics")
        random = np.random.default_rng(seed)
        a = random.integers(-3, 2 + 40 * seed, 500) * 2**40
        b = np.where(random.random(500) < 0.5, a, random.integers(0, 9, 500))
        got = normalised_mutual_information(a, b)
        assert got == pytest.approx(cluster.normalized_mutual_info_score(a, b), abs=1e-12)
        assert got == pytest.approx(normalised_mutual_information(b, a), abs=1e-15)


class TestKmeans:
    @each_engine
    @pytest.mark.parametrize("moves", [1, 3, 20])
    def test_plain_loops(self, engine: str, moves: int) -> None:
        x, _ = blobs(1.5, 200)
        start = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:8]
        got = kmeans(x, 8, seed=4, num_iterations=moves, engine=engine)
        assert got.tolist() == by_loops(x.double().numpy(), start.numpy(), moves).tolist()

    def test_faiss_from_the_same_start(self) -> None:
        """faiss's own k-means, told to take all rows, agrees; told nothing, it would draw 256 per cluster."""
        faiss = pytest.importorskip("faiss")
        x, _ = blobs(1.5, 3000)
        x = torch.nn.functional.normalize(x)
        start = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:5]
        theirs = faiss.Kmeans(16, 5, niter=10, max_points_per_centroid=3000)
        theirs.train(x.numpy(), init_centroids=x[start].numpy())
        _, expected = theirs.index.search(x.numpy(), 1)
        got = kmeans(x, 5, num_iterations=10)
        assert (got.numpy() == expected[:, 0]).mean() > 0.999

    def test_engines_agree(self) -> None:
        x, labels = blobs(1.0, 2000, 50, 64)
        first, *others = [kmeans(x, 50, engine=engine) for engine in AVAILABLE]
        for other in others:
            assert (other == first).float().mean() > 0.999
        values = [nmi(x, labels, engine=engine) for engine in AVAILABLE]
        assert max(values) - min(values) < 1e-3

    @each_engine
    def test_every_cluster_of_distinct_rows_is_used(self, engine: str) -> None:
        """Nine starts in one heap: empty clusters move to the rows that are served worst."""
        random = np.random.default_rng(0)
        centres = np.eye(10)
        x = centres[np.repeat(np.arange(10), [911, *[10] * 9])] + 0.01 * random.normal(size=(1001, 10))
        for seed in range(3):
            assert len(kmeans(x, 30, seed=seed, engine=engine).unique()) == 30

    def test_empty_clusters_move_to_the_farthest_rows(self) -> None:
        # Rows 0-4 are equal; a start of three of them leaves two clusters empty, which take the two other rows.
        x = torch.tensor([[1.0, 0]] * 5 + [[0, 1.0], [-1.0, 0]])
        starts = (torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:3] for seed in range(1000))
        seed = next(seed for seed, start in enumerate(starts) if start.max() < 5)
        got = kmeans(x, 3, seed=seed, engine="torch").tolist()
        assert len(set(got[:5])) == 1
        assert len(set(got)) == 3

    @each_engine
    def test_as_many_clusters_as_rows(self, engine: str) -> None:
        x, _ = blobs(1.0, 60)
        assert sorted(kmeans(x, 60, engine=engine).tolist()) == list(range(60))
        assert kmeans(x, 1, engine=engine).tolist() == [0] * 60

    def test_chunks_that_do_not_divide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, _ = blobs(1.0, 203)
        expected = kmeans(x, 12, engine="torch")
        monkeypatch.setattr(search_module, "CHUNK_ELEMENTS", 77)
        assert torch.equal(kmeans(x, 12, engine="torch"), expected)

    def test_scale_of_a_row_does_not_matter(self) -> None:
        x, _ = blobs(1.0, 200)
        scaled = x * torch.logspace(-3, 3, 200)[:, None]
        assert torch.equal(kmeans(x.double(), 12), kmeans(scaled.double(), 12))

    def test_refusals(self) -> None:
        x, _ = blobs(1.0, 20)
        with pytest.raises(UsageError, match=r"num_clusters=21, .* 20 rows"):
            kmeans(x, 21)
        for name in ("num_clusters", "num_iterations"):
            with pytest.raises(UsageError, match=f"{name}=0"):
                kmeans(x, **{"num_clusters": 3, name: 0})
        with pytest.raises(UsageError, match="seed=-1"):
            kmeans(x, 3, seed=-1)
        with pytest.raises(UsageError, match="engine=fiass"):
            kmeans(x, 3, engine="fiass")


class TestNmi:
    @each_engine
    def test_tight_classes_score_1_and_noise_does_not(self, engine: str) -> None:
        x, labels = blobs(1e-3, 300, 3)
        assert max(nmi(x, labels, seed=seed, engine=engine) for seed in range(3)) == pytest.approx(1, abs=1e-12)
        x, labels = blobs(100.0, 2000, 4)
        assert nmi(x, labels, engine=engine) < 0.02

    @each_engine
    def test_the_same_seed_gives_the_same_value(self, engine: str) -> None:
        x, labels = blobs(1.5)
        before = torch.get_rng_state()
        values = [nmi(x, labels, seed=seed, engine=engine) for seed in (0, 0, 1)]
        assert values[0] == values[1] != values[2]
        assert torch.equal(torch.get_rng_state(), before)  # and the run's own random numbers are not touched
        assert nmi(x.numpy(), labels.numpy() * 7 - 3, engine=engine) == values[0]

    def test_scikit_learn_on_the_same_clusters(self) -> None:
        cluster = pytest.importorskip("sklearn.metrics")
        x, labels = blobs(1.5)
        expected = cluster.normalized_mutual_info_score(labels.numpy(), kmeans(x, 10).numpy())
        assert nmi(x, labels) == pytest.approx(expected, abs=1e-12)
        assert 0.2 < expected < 0.95

    @each_engine
    def test_degenerate_inputs(self, engine: str) -> None:
        x, labels = blobs(1.0, 60)
        assert nmi(x, torch.zeros(60, dtype=torch.long), engine=engine) == 1  # one class, one cluster
        assert nmi(x, torch.arange(60), engine=engine) == pytest.approx(1, abs=1e-12)  # all alone
        assert nmi(torch.ones(60, 4), labels, engine=engine) < 0.6  # a collapsed network
        assert 0 <= nmi(torch.zeros(60, 4), labels, engine=engine) < 0.6
        assert nmi(x[:1], labels[:1], engine=engine) == 1

    def test_without_faiss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x, labels = blobs(0.5)
        expected = nmi(x, labels, engine="torch")
        monkeypatch.setitem(sys.modules, "faiss", None)
        assert nmi(x, labels) == expected
        with pytest.raises(UsageError, match="faiss is not installed"):
            nmi(x, labels, engine="faiss_cpu")

    def test_autocast_changes_nothing(self) -> None:
        x, labels = blobs(1.5)
        expected = nmi(x, labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert nmi(x, labels) == expected

    @needs_cuda
    @each_engine
    def test_cuda(self, engine: str) -> None:
        x, labels = blobs(1.0, 2000, 50, 64)
        got = nmi(x.cuda(), labels, engine=engine)
        assert got == pytest.approx(nmi(x, labels, engine="torch"), abs=1e-3)
        assert got == nmi(x.cuda(), labels.cuda(), engine=engine)

    def test_refusals(self) -> None:
        x, labels = blobs(1.0, 20)
        bad = x.clone()
        bad[[3, 4], 0] = float("nan")
        with pytest.raises(UsageError, match="2 of 20 input embeddings hold NaN"):
            nmi(bad, labels)
        with pytest.raises(UsageError, match="20 embeddings but 19 labels"):
            nmi(x, labels[:19])
        with pytest.raises(UsageError, match="labels: expected a one-dimensional"):
            nmi(x, labels.float())
