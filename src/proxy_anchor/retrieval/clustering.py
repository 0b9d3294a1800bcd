"""NMI: agreement of k-means clusters with the classes.

Computed on demand, because it costs about 20 searches.

NMI depends on the start of k-means, and it rises with the number of classes whatever the network: 60,502 random
vectors in 11,316 classes, as many as SOP has, score 0.8 (weakness described by Musgrave et al. 2020). It is here for
comparison with older papers; MAP@R is the better metric.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics.functional.clustering import normalized_mutual_info_score

from proxy_anchor.retrieval.ranking import Array, paired
from proxy_anchor.retrieval.rows import as_rows, normalise
from proxy_anchor.retrieval.search import full_precision, row_chunks


def nmi(embeddings: Array, labels: Array, *, seed: int = 0, num_iterations: int = 20) -> float:
    """Normalised mutual information, in [0, 1], of classes and k-means clusters.

    embeddings: (N, D) float, clustered as unit vectors, with as many clusters as classes. labels: (N,) any integers.
    With a query-gallery split, pass the rows to be clustered. seed, num_iterations: see `kmeans`.
    Classes of one image count like all others, because nothing is searched. A single class gives 0.
    Memory: a table of classes x clusters, 8 bytes each.
    Raises UsageError for NaN or infinite embeddings (counted) and shapes that disagree.
    Manning et al. 2008, section 16.3, with the arithmetic mean of the entropies as denominator, as in Song et al. 2016.
    """
    rows, classes = paired(embeddings, labels, "input")
    clusters = kmeans(rows, len(classes.unique()), seed=seed, num_iterations=num_iterations)
    return normalized_mutual_info_score(clusters.cpu(), classes.cpu(), "arithmetic").clamp(0, 1).item()


def kmeans(embeddings: Array, num_clusters: int, *, seed: int = 0, num_iterations: int = 20) -> Tensor:
    """Lloyd's k-means: (N,) int64 cluster of each row, in [0, num_clusters).

    embeddings: (N, D) float; clustered as unit vectors by Euclidean distance. The result is on their device.
    num_clusters: 1 to N. seed: of the rows to start from. num_iterations: how often each centroid moves to the mean of
    its rows. The centroid of an empty cluster stays.
    Raises UsageError for NaN or infinite embeddings.
    """
    rows = normalise(as_rows(embeddings, "embeddings"), "input").float()
    start = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_clusters]
    centroids = rows[start.to(rows.device)]
    with full_precision(rows.device):
        for step in range(num_iterations + 1):
            chunks = row_chunks(len(rows), num_clusters)
            clusters = torch.cat([torch.cdist(rows[chunk], centroids).argmin(1) for chunk in chunks])
            if step < num_iterations:
                # On the CPU: on a GPU the order of summation, and so the rounding, varies.
                sums = torch.zeros(centroids.shape).index_add_(0, clusters.cpu(), rows.cpu()).to(rows.device)
                sizes = clusters.bincount(minlength=num_clusters)[:, None]
                centroids = torch.where(sizes > 0, sums / sizes.clamp_min(1), centroids)
    return clusters
