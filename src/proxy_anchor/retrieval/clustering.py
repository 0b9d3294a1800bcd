"""NMI: do the clusters of a k-means agree with the classes? On demand, once: it costs about 20 searches.

Read it with care. It depends on the start of k-means, and it rises with the number of classes whatever the network:
60,502 random vectors in 11,316 classes, as many as SOP has, score 0.8 (weakness described by Musgrave et al. 2020).
MAP@R is the better number; NMI is for comparison with older papers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.retrieval.metrics import Array, as_labels
from proxy_anchor.retrieval.search import as_rows, nearest, normalise, resolve_engine


def nmi(embeddings: Array, labels: Array, *, seed: int = 0, num_iterations: int = 20, engine: str = "auto") -> float:
    """Normalised mutual information, in [0, 1], of the classes and a k-means with as many clusters as classes.

    embeddings: (N, D) float, clustered as unit vectors. labels: (N,) any integers. With a query-gallery split pass
    the rows to be clustered. seed, num_iterations, engine: see `kmeans`; the same seed and engine give the same value.
    Classes of one image count like all others: nothing is searched, so no image lacks a positive.
    Raises UsageError for NaN or infinite embeddings (counted), shapes that disagree, and what `kmeans` refuses.
    Manning et al. 2008, section 16.3, with the arithmetic mean of the entropies below the line, as in Song et al. 2016.
    """
    rows, classes = as_rows(embeddings, "embeddings"), as_labels(labels, "labels")
    if len(rows) != len(classes):
        raise UsageError(f"{len(rows)} embeddings but {len(classes)} labels: each row needs one.")
    num_classes = len(classes.unique())
    clusters = kmeans(rows, num_classes, seed=seed, num_iterations=num_iterations, engine=engine)
    return normalised_mutual_information(classes.cpu().numpy(), clusters.cpu().numpy())


def normalised_mutual_information(a: np.ndarray, b: np.ndarray) -> float:
    """2 I(a; b) / (H(a) + H(b)) of two labellings (N,) of the same rows; 1 where both put all rows into one group."""
    (_, a), (_, b) = (np.unique(each, return_inverse=True) for each in (a, b))
    a_sizes, b_sizes = np.bincount(a), np.bincount(b)
    cells, shared = np.unique(a.astype(np.int64) * len(b_sizes) + b, return_counts=True)
    expected = a_sizes[cells // len(b_sizes)] / len(a) * b_sizes[cells % len(b_sizes)]
    information = np.sum(shared / len(a) * np.log(shared / expected))
    entropies = sum(-np.sum(sizes / len(a) * np.log(sizes / len(a))) for sizes in (a_sizes, b_sizes))
    return float(np.clip(2 * information / entropies, 0, 1)) if entropies > 0 else 1.0


def kmeans(
    embeddings: Array, num_clusters: int, *, seed: int = 0, num_iterations: int = 20, engine: str = "auto"
) -> Tensor:
    """(N,) int64 cluster of each row in [0, num_clusters), on the device of `embeddings`: Lloyd's k-means.

    embeddings: (N, D) float; clustered as unit vectors, by Euclidean distance. num_clusters: 1 to N.
    seed: picks num_clusters different rows to start from, the same with every engine. num_iterations: how often
    centroids move to the mean of their rows, at most; stops early when no row changes its cluster.
    A cluster that runs empty moves to the row that is farthest from its own centroid.
    engine: finds the nearest centroids, see `search.resolve_engine`. All rows take part (faiss's own k-means would draw
    256 per cluster). With one engine and seed the result is the same each time; two engines may part at a row that is
    within float32 rounding of two centroids.
    Memory beyond the input: normalised copies, 16 bytes per value, and what the search needs.
    Raises UsageError for num_clusters out of range, NaN or infinite embeddings, and an engine that is not there.
    """
    check_int("num_iterations", num_iterations, 1)
    check_int("num_clusters", num_clusters, 1)
    check_int("seed", seed, 0)
    table = as_rows(embeddings, "embeddings")
    if num_clusters > len(table):
        raise UsageError(f"num_clusters={num_clusters}, but there are only {len(table)} rows to start from.")
    engine = resolve_engine(engine, 1, device=table.device)
    unit = normalise(table, "input")
    # |x - c|^2 is smallest where <x, c> - |c|^2 / 2 is largest: with one more column, a search by inner product.
    rows = torch.nn.functional.pad(unit, (0, 1), value=1.0).float()
    unit = unit.cpu()  # sums on a GPU depend on the order in which its threads arrive
    half_norms = unit.square().sum(1) / 2

    def assign(centroids: Tensor) -> tuple[Tensor, Tensor]:
        targets = torch.cat([centroids, -centroids.square().sum(1, keepdim=True) / 2], dim=1)
        scores, indices = nearest(rows, targets.float().to(rows.device), 1, engine, exclude_self=False)
        return indices[:, 0].cpu(), half_norms - scores[:, 0].cpu()

    start = torch.randperm(len(unit), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    clusters, distances = assign(unit[start])
    for _ in range(num_iterations):
        sizes = clusters.bincount(minlength=num_clusters)
        sums = unit.new_zeros(num_clusters, unit.shape[1]).index_add_(0, clusters, unit)
        centroids = sums / sizes.clamp_min(1)[:, None]
        empty = (sizes == 0).nonzero().squeeze(1)
        centroids[empty] = unit[distances.argsort(descending=True, stable=True)[: len(empty)]]
        before = clusters
        clusters, distances = assign(centroids)
        if torch.equal(clusters, before):
            break
    return clusters.to(table.device)
