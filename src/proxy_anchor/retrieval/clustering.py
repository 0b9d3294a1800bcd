"""NMI: do the clusters of a k-means agree with the classes? On demand, once: it costs about 20 searches.

Read it with care. It depends on the start of k-means and on the engine, and it rises with the number of classes whatever
the network: 60,502 random vectors in 11,316 classes, as many as SOP has, score 0.8 (weakness described by Musgrave et al.
2020). MAP@R is the better number; NMI is for comparison with older papers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.clustering import normalized_mutual_info_score

from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.retrieval.metrics import Array, as_labels
from proxy_anchor.retrieval.search import as_rows, full_precision, normalise, resolve_engine, row_chunks


def nmi(embeddings: Array, labels: Array, *, seed: int = 0, num_iterations: int = 20, engine: str = "auto") -> float:
    """Normalised mutual information, in [0, 1], of the classes and a k-means with as many clusters as classes.

    embeddings: (N, D) float, clustered as unit vectors. labels: (N,) any integers. With a query-gallery split pass
    the rows to be clustered. seed, num_iterations, engine: see `kmeans`; the same seed and engine give the same value.
    Classes of one image count like all others: nothing is searched, so no image lacks a positive. One class alone: 0.
    Memory: a table of classes x clusters, 8 bytes each.
    Raises UsageError for NaN or infinite embeddings (counted), shapes that disagree, and what `kmeans` refuses.
    Manning et al. 2008, section 16.3, with the arithmetic mean of the entropies below the line, as in Song et al. 2016.
    """
    rows, classes = as_rows(embeddings, "embeddings"), as_labels(labels, "labels").cpu()
    if len(rows) != len(classes):
        raise UsageError(f"{len(rows)} embeddings but {len(classes)} labels: each row needs one.")
    clusters = kmeans(rows, len(classes.unique()), seed=seed, num_iterations=num_iterations, engine=engine).cpu()
    return normalized_mutual_info_score(clusters, classes, "arithmetic").clamp(0, 1).item()


def kmeans(
    embeddings: Array, num_clusters: int, *, seed: int = 0, num_iterations: int = 20, engine: str = "auto"
) -> Tensor:
    """(N,) int64 cluster of each row in [0, num_clusters), on the device of `embeddings`: Lloyd's k-means.

    embeddings: (N, D) float; clustered as unit vectors, by Euclidean distance, all of them. num_clusters: 1 to N.
    seed: of the rows to start from. num_iterations: how often centroids move to the mean of their rows.
    engine: see `search.resolve_engine`; faiss has its own start and its own rule for empty clusters, so that its clusters
    differ from those of torch, which leaves the centroid of an empty cluster where it was.
    Raises UsageError for num_clusters out of range, NaN or infinite embeddings, and an engine that is not there.
    """
    check_int("num_iterations", num_iterations, 1)
    check_int("num_clusters", num_clusters, 1)
    check_int("seed", seed, 0)
    table = as_rows(embeddings, "embeddings")
    if num_clusters > len(table):
        raise UsageError(f"num_clusters={num_clusters}, but there are only {len(table)} rows to start from.")
    engine = resolve_engine(engine, 1, device=table.device)
    rows = normalise(table, "input").float()
    if engine == "torch":
        return _kmeans_torch(rows, num_clusters, seed, num_iterations)
    import faiss

    points = rows.cpu().numpy()
    found = faiss.Kmeans(
        rows.shape[1],
        num_clusters,
        niter=num_iterations,
        seed=seed,
        gpu=engine == "faiss_gpu",
        min_points_per_centroid=1,
        max_points_per_centroid=len(points),
    )
    found.train(points)
    return torch.from_numpy(found.index.search(points, 1)[1][:, 0]).to(table.device)


def _kmeans_torch(rows: Tensor, num_clusters: int, seed: int, num_iterations: int) -> Tensor:
    start = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centroids = rows[start.to(rows.device)]
    with full_precision(rows.device):
        for step in range(num_iterations + 1):
            chunks = row_chunks(len(rows), num_clusters)
            clusters = torch.cat([torch.cdist(rows[chunk], centroids).argmin(1) for chunk in chunks])
            if step < num_iterations:
                # Sums on a GPU depend on the order in which its threads arrive.
                sums = torch.zeros(centroids.shape).index_add_(0, clusters.cpu(), rows.cpu()).to(rows.device)
                sizes = clusters.bincount(minlength=num_clusters)[:, None]
                centroids = torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)
    return clusters
