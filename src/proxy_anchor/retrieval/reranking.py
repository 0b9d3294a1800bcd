"""Re-ranking of search results by the neighbours of the images.

Both methods use the searched images alone, without labels or training.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from scipy.sparse import csc_matrix, csr_matrix
from torch import Tensor

from proxy_anchor.errors import check_choice
from proxy_anchor.retrieval.metrics import metrics_of_ranking, num_positives
from proxy_anchor.retrieval.rows import as_rows, check_k, check_same_dim, normalise
from proxy_anchor.retrieval.search import full_precision, nearest, order_ties, resolve_engine, row_chunks, search

Array = Tensor | np.ndarray
RERANKINGS = ("none", "query_expansion", "k_reciprocal")


def rerank(
    name: str, embeddings: Array, k: int, *, gallery: Array | None = None, engine: str = "auto"
) -> tuple[Tensor, Tensor]:
    """First K gallery rows of each query by one of RERANKINGS.

    embeddings: (Q, D). gallery: (N, D); None: the queries search each other, each except itself (by index).
    Returns (scores (Q, K), indices (Q, K)), with the parameters of the method's paper. Scores decrease along a row:
    cosine similarities, or for k_reciprocal one minus the final distance.
    Raises UsageError for another name, K out of range, shapes that disagree, NaN.
    """
    check_choice("rerank", name, RERANKINGS)
    if name == "k_reciprocal":
        distances, indices = k_reciprocal(embeddings, k, gallery=gallery)
        return 1 - distances, indices
    queries = query_expansion(embeddings, gallery=gallery, engine=engine) if name == "query_expansion" else embeddings
    return search(queries, embeddings if gallery is None else gallery, k, engine=engine, exclude_self=gallery is None)


def reranked_metrics(
    name: str,
    embeddings: Array,
    labels: Array,
    k: Iterable[int],
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
) -> dict[str, float]:
    """`metrics_of_ranking` after `rerank`, named "k_reciprocal_recall_at_1" and so on.

    Arguments as in `recall_at_k`.
    """
    ks = list(k)
    listed = max(*ks, int(num_positives(labels, gallery_labels).max()))
    _, ranking = rerank(name, embeddings, listed, gallery=gallery)
    values = metrics_of_ranking(ranking, labels, ks, gallery_labels=gallery_labels)
    return {f"{name}_{metric}": value for metric, value in values.items()}


def query_expansion(
    embeddings: Array,
    *,
    gallery: Array | None = None,
    num_neighbours: int = 5,
    alpha: float = 3.0,
    engine: str = "auto",
) -> Tensor:
    """Each query plus its nearest neighbours, weighted by similarity ** alpha.

    embeddings: (Q, D) float. gallery: (N, D); None: the other rows of `embeddings`. num_neighbours: capped at the size
    of the gallery. Neighbours of negative similarity have weight 0. alpha = 0 is the plain average of Chum et al. 2007.
    Returns (Q, D) float32 unit vectors. Raises UsageError for NaN and shapes that disagree.
    Radenovic et al. 2018, "Fine-tuning CNN Image Retrieval with No Human Annotation", section 3.4 (alpha 3). They
    average 50 neighbours in a gallery of a million images; 5 here, because classes are small.
    """
    rows = normalise(as_rows(embeddings, "queries"), "query").float()
    found = rows if gallery is None else normalise(as_rows(gallery, "gallery").to(rows.device), "gallery").float()
    k = min(num_neighbours, max(len(found) - (gallery is None), 1))
    similarities, indices = search(rows, found, k, engine=engine, exclude_self=gallery is None)
    expanded = rows.clone()
    weights = similarities.clamp_min(0) ** alpha * (similarities > 0)  # 0 ** 0 is 1
    for chunk in row_chunks(len(rows), k * rows.shape[1]):
        expanded[chunk] += (weights[chunk, :, None] * found[indices[chunk]]).sum(1)
    return normalise(expanded, "expanded query").float()


def k_reciprocal(
    embeddings: Array, k: int, *, gallery: Array | None = None, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Nearest gallery rows after k-reciprocal encoding: distances and indices, (Q, K) each.

    embeddings: (Q, D) float. gallery: (N, D); None: the other rows of `embeddings`. Queries are also neighbours of
    each other, as in the paper's code. k1: number of neighbours that must be mutual. k2: number of neighbours whose
    encodings are averaged. weight: of the first distance (lambda in the paper); the rest is the Jaccard distance.
    The first distance is 2 - 2 cos, divided by the largest of its row. An image is always its own first neighbour.
    Ties: equal distances rank by index, lower first, within the K listed.
    Memory beyond the input: normalised copies, about 60 * k2 entries of 12 bytes per image, and chunks of
    search.CHUNK_ELEMENTS. Time: two products of all images with all, and about (60 * k2)^2 operations per query.
    Raises UsageError for K out of range, NaN, shapes that disagree.
    Zhong et al. 2017, "Re-ranking Person Re-identification with k-reciprocal Encoding", equations 1-12 (20, 6, 0.3).
    """
    queries = as_rows(embeddings, "queries")
    rows = normalise(queries, "query").float()
    if gallery is not None:
        found = as_rows(gallery, "gallery").to(queries.device)
        check_same_dim(queries, found)
        rows = torch.cat([rows, normalise(found, "gallery").float()])
    offset = 0 if gallery is None else len(queries)
    num_found = len(rows) - offset
    check_k(k, num_found, exclude_self=gallery is None)
    with full_precision(rows.device):
        listed = min(k1, len(rows) - 1)
        engine = resolve_engine("auto", listed, exclude_self=True, device=rows.device)
        others = nearest(rows, rows, listed, engine, exclude_self=True)[1]
        ranking = torch.cat([torch.arange(len(rows), device=rows.device)[:, None], others], dim=1)  # itself first
        parts = [(2 - 2 * rows[chunk] @ rows.T).amax(1) for chunk in row_chunks(len(rows), len(rows))]
        largest = torch.cat(parts).clamp_min(torch.finfo(rows.dtype).tiny)  # of each row to any row; positive
        encoding = _encode(rows, ranking, largest, k1)
        if k2 > 1:  # Eq. 11: the mean encoding of the first k2 neighbours, itself included
            near = ranking[:, :k2].cpu().numpy()
            starts = np.arange(0, near.size + 1, near.shape[1])
            weights = np.full(near.size, 1 / near.shape[1], dtype=np.float32)
            encoding = csr_matrix((weights, near.ravel(), starts), shape=encoding.shape) @ encoding
        columns = encoding.tocsc()
        distances = rows.new_empty(len(queries), k)
        indices = torch.empty(len(queries), k, dtype=torch.int64, device=rows.device)
        for chunk in row_chunks(len(queries), 4 * num_found):
            found_here = [_shared_weight(encoding, columns, query)[offset:] for query in range(chunk.start, chunk.stop)]
            shared = torch.from_numpy(np.stack(found_here)).to(rows)
            first = (2 - 2 * rows[chunk] @ rows[offset:].T) / largest[chunk, None]
            total = (1 - weight) * (1 - shared / (2 - shared)) + weight * first
            if gallery is None:
                total[:, chunk].fill_diagonal_(torch.inf)
            nearness, indices[chunk] = order_ties(*(-total).topk(k))
            distances[chunk] = -nearness
    return distances, indices


def _mutual(ranking: Tensor, k: int) -> list[set[int]]:
    """Mutual neighbours of each row, among the first k and itself. Eq. 3."""
    first = [set(row) for row in ranking[:, : k + 1].tolist()]
    return [{other for other in row if own in first[other]} for own, row in enumerate(first)]


def _encode(rows: Tensor, ranking: Tensor, largest: Tensor, k1: int) -> csr_matrix:
    """Sparse (N, N): weights of each row's extended mutual neighbours. Eq. 5 and 7.

    The weights are exp(-distance), scaled so that each row sums to 1.
    """
    n, near, half = len(rows), _mutual(ranking, k1), _mutual(ranking, round(k1 / 2))
    members = []
    for base in near:
        extension = [half[other] for other in base if len(half[other] & base) > 2 / 3 * len(half[other])]
        members.append(sorted(base.union(*extension)))
    own = [row for row, each in enumerate(members) for _ in each]
    pairs = torch.tensor([own, [other for each in members for other in each]], device=rows.device)
    chunks = (pairs[:, chunk] for chunk in row_chunks(pairs.shape[1], rows.shape[1]))
    cosines = torch.cat([(rows[first] * rows[second]).sum(1) for first, second in chunks])
    values = torch.exp((2 * cosines - 2) / largest[pairs[0]])
    total = values.new_zeros(n).index_add_(0, pairs[0], values)
    return csr_matrix(((values / total[pairs[0]]).cpu().numpy(), pairs.cpu().numpy()), shape=(n, n))


def _shared_weight(encoding: csr_matrix, columns: csc_matrix, query: int) -> np.ndarray:
    """(N,) intersections of one query with each image. Eq. 10."""
    own = encoding[query]
    others = columns[:, own.indices]  # the images that share a neighbour with the query
    smaller = np.minimum(others.data, np.repeat(own.data, np.diff(others.indptr)))
    return np.bincount(others.indices, smaller, minlength=encoding.shape[0])
