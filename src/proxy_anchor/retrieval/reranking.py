"""Re-ranking after a search: what the neighbours of an image say about its own ranking. Pure functions on tensors.

Both use the searched images alone, no labels, and need no training.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice, check_int, check_number
from proxy_anchor.retrieval.metrics import metrics_of_ranking, num_positives
from proxy_anchor.retrieval.search import (
    as_rows,
    check_k,
    check_same_dim,
    full_precision,
    nearest,
    normalise,
    resolve_engine,
    row_chunks,
    search,
)

Array = Tensor | np.ndarray
RERANKINGS = ("none", "query_expansion", "k_reciprocal")
_MAX_PAIRS = 2**24  # shared neighbours looked at together by k_reciprocal: 0.5 GB


def rerank(
    name: str, embeddings: Array, k: int, *, gallery: Array | None = None, engine: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The first K gallery rows of each query by one of RERANKINGS with its paper's values: (scores, indices), (Q, K).

    embeddings: (Q, D); without gallery (N, D) they search each other, each without itself (by index).
    Scores decrease along a row: cosine similarities, or for k_reciprocal one minus the final distance.
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
    """`metrics_of_ranking` after `rerank`, under names like "k_reciprocal_recall_at_1"; arguments as in `recall_at_k`."""
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
    """(Q, D) float32 unit vectors: each query plus its nearest neighbours, weighted by similarity ** alpha.

    embeddings: (Q, D) float; gallery: (N, D), None: the other rows of `embeddings`. num_neighbours: at most what there
    is. A neighbour of negative similarity weighs nothing. alpha = 0 is the plain average of Chum et al. 2007.
    Raises UsageError for a value out of range, NaN, shapes that disagree.
    Radenovic et al. 2018, "Fine-tuning CNN Image Retrieval with No Human Annotation", section 3.4 (alpha 3; they average
    50 neighbours of a gallery of a million, here 5: classes are small).
    """
    check_int("num_neighbours", num_neighbours, 1)
    check_number("alpha", alpha, 0)
    rows = as_rows(embeddings, "queries")
    found = rows if gallery is None else as_rows(gallery, "gallery").to(rows.device)
    available = len(found) - (gallery is None)
    similarities, indices = search(
        rows, found, min(num_neighbours, max(available, 1)), engine=engine, exclude_self=gallery is None
    )
    unit = normalise(rows, "query").float()
    unit_gallery = unit if gallery is None else normalise(found, "gallery").float()
    expanded = unit.clone()
    weights = similarities.clamp_min(0) ** alpha * (similarities > 0)  # 0 ** 0 is 1
    for chunk in row_chunks(len(unit), indices.shape[1] * unit.shape[1]):
        expanded[chunk] += (weights[chunk, :, None] * unit_gallery[indices[chunk]]).sum(1)
    return normalise(expanded, "expanded query").float()


def k_reciprocal(
    embeddings: Array, k: int, *, gallery: Array | None = None, k1: int = 20, k2: int = 6, weight: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Distances (Q, K) and indices (Q, K) of the nearest gallery rows after k-reciprocal encoding.

    embeddings: (Q, D) float; gallery: (N, D), None: the other rows of `embeddings`. Queries take part as neighbours of
    each other, as in the paper's code. k1: neighbours that must name each other; k2: neighbours whose encodings are
    averaged; weight: of the first distance (lambda in the paper), the rest is the Jaccard distance.
    The first distance is 2 - 2 cos, divided by the largest of its row. An image is always its own first neighbour.
    Ties: equal distances rank by index, lower first, within the K listed.
    Memory beyond the input: normalised copies; some 60 * k2 entries of 12 bytes per image; chunks of search.CHUNK_ELEMENTS.
    Time: two products of all images with all, and about (60 * k2)^2 operations per query.
    Raises UsageError for K out of range, a value out of range, NaN, shapes that disagree.
    Zhong et al. 2017, "Re-ranking Person Re-identification with k-reciprocal Encoding", equations 1-12 (20, 6, 0.3).
    """
    check_int("k1", k1, 1)
    check_int("k2", k2, 1)
    check_number("weight", weight, 0, maximum=1)
    queries = as_rows(embeddings, "queries")
    rows = normalise(queries, "query").float()
    if gallery is not None:
        found = as_rows(gallery, "gallery").to(queries.device)
        check_same_dim(queries, found)
        rows = torch.cat([rows, normalise(found, "gallery").float()])
    offset = 0 if gallery is None else len(queries)
    num_found = len(rows) - offset
    check_k(k, num_found, exclude_self=gallery is None)
    if len(rows) < 2:
        raise UsageError("k_reciprocal needs at least two images.")
    with full_precision(rows.device):
        ranking = _neighbours(rows, min(k1 + 1, len(rows)))
        largest = _largest_distance(rows)
        encoding = _encode(rows, ranking, largest, k1)
        if k2 > 1:
            encoding = _average(encoding, ranking[:, : min(k2, ranking.shape[1])])
        by_neighbour = encoding.t().coalesce()
        starts = _row_starts(by_neighbour.indices()[0], len(rows))
        distances = rows.new_empty(len(queries), k)
        indices = torch.empty(len(queries), k, dtype=torch.int64, device=rows.device)
        own_starts = _row_starts(encoding.indices()[0], len(rows))
        for chunk in row_chunks(len(queries), 4 * num_found):
            shared = _shared_weight(encoding, own_starts, by_neighbour, starts, chunk, len(rows))[:, offset:]
            first = (2 - 2 * rows[chunk] @ rows[offset:].T) / largest[chunk, None]
            total = (1 - weight) * (1 - shared / (2 - shared)) + weight * first
            if gallery is None:
                own = torch.arange(chunk.start, chunk.stop, device=rows.device)
                total.scatter_(1, own[:, None], torch.inf)
            order = total.topk(k, largest=False)
            by_index, places = order.indices.sort(1)
            values, places = order.values.gather(1, places).sort(dim=1, stable=True)
            distances[chunk], indices[chunk] = values, by_index.gather(1, places)
    return distances, indices


def _neighbours(rows: Tensor, listed: int) -> Tensor:
    """(N, listed) each row itself, then its nearest others."""
    own = torch.arange(len(rows), device=rows.device)[:, None]
    if listed == 1:
        return own
    engine = resolve_engine("auto", listed - 1, exclude_self=True, device=rows.device)
    return torch.cat([own, nearest(rows, rows, listed - 1, engine, exclude_self=True)[1]], dim=1)


def _largest_distance(rows: Tensor) -> Tensor:
    """(N,) the largest 2 - 2 cos of each row to any, at least the smallest positive number."""
    parts = [(2 - 2 * rows[chunk] @ rows.T).amax(1) for chunk in row_chunks(len(rows), len(rows))]
    return torch.cat(parts).clamp_min(torch.finfo(rows.dtype).tiny)


def _reciprocal(ranking: Tensor, k: int) -> Tensor:
    """(N, k + 1) bool: whether the j-th of the first k + 1 in a row has the row among its own first k + 1. Eq. 3."""
    forward = ranking[:, : k + 1]
    own = torch.arange(len(ranking), device=ranking.device)[:, None, None]
    parts = [
        (forward[forward[chunk]] == own[chunk]).any(2) for chunk in row_chunks(len(ranking), forward.shape[1] ** 2)
    ]
    return torch.cat(parts)


def _encode(rows: Tensor, ranking: Tensor, largest: Tensor, k1: int) -> Tensor:
    """Sparse (N, N): row i weighs its extended reciprocal neighbours by exp(-distance), summing to 1. Eq. 5 and 7."""
    n, half = len(rows), round(k1 / 2)
    near, reciprocal = ranking[:, : k1 + 1], _reciprocal(ranking, k1)
    half_near, half_reciprocal = ranking[:, : half + 1], _reciprocal(ranking, half)
    own, members = [], []
    for chunk in row_chunks(n, near.shape[1] ** 2 * half_near.shape[1]):
        mine = torch.where(reciprocal[chunk], near[chunk], -1)  # (b, k1 + 1); -1: not reciprocal
        candidates = half_near[near[chunk]]  # (b, k1 + 1, half + 1) neighbours of each neighbour
        valid = half_reciprocal[near[chunk]] & reciprocal[chunk][:, :, None]
        in_mine = (candidates[:, :, :, None] == mine[:, None, None, :]).any(3) & valid
        taken = in_mine.sum(2) > 2 / 3 * valid.sum(2)  # Eq. 5: at least two thirds of them are mine already
        extended = torch.where(valid & taken[:, :, None], candidates, -1).flatten(1)
        everything = torch.cat([mine, extended], dim=1)
        index = torch.arange(chunk.start, chunk.stop, device=rows.device)[:, None].expand_as(everything)
        kept = everything >= 0
        own.append(index[kept])
        members.append(everything[kept])
    pairs = torch.stack([torch.cat(own), torch.cat(members)])
    pairs = pairs.unique(dim=1)  # sorted by row
    distance = torch.cat(
        [
            (2 - 2 * (rows[pairs[0, chunk]] * rows[pairs[1, chunk]]).sum(1)) / largest[pairs[0, chunk]]
            for chunk in row_chunks(pairs.shape[1], rows.shape[1])
        ]
    )
    values = torch.exp(-distance)
    total = values.new_zeros(n).index_add_(0, pairs[0], values)
    return torch.sparse_coo_tensor(pairs, values / total[pairs[0]], (n, n), check_invariants=False).coalesce()


def _average(encoding: Tensor, nearest_rows: Tensor) -> Tensor:
    """Sparse (N, N): the mean of each row's encoding over its first k2 neighbours, itself included. Eq. 11."""
    n, k2 = nearest_rows.shape
    starts = _row_starts(encoding.indices()[0], n)
    chosen = nearest_rows.flatten()
    entries, owner = _entries_of(chosen, starts)
    indices = torch.stack([owner // k2, encoding.indices()[1, entries]])
    return torch.sparse_coo_tensor(indices, encoding.values()[entries] / k2, (n, n), check_invariants=False).coalesce()


def _entries_of(chosen: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Where the entries of the `chosen` rows stand, row after row, and to which place in `chosen` each belongs."""
    counts = starts[chosen + 1] - starts[chosen]
    owner = torch.repeat_interleave(torch.arange(len(chosen), device=chosen.device), counts)
    within = torch.arange(len(owner), device=chosen.device) - (counts.cumsum(0) - counts)[owner]
    return starts[chosen[owner]] + within, owner


def _row_starts(sorted_rows: Tensor, num_rows: int) -> Tensor:
    """(num_rows + 1,) where each row's entries start in a list sorted by row."""
    counts = torch.bincount(sorted_rows, minlength=num_rows)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _shared_weight(
    encoding: Tensor, own_starts: Tensor, by_neighbour: Tensor, starts: Tensor, chunk: slice, num_rows: int
) -> Tensor:
    """(q, N) sum over neighbours of the smaller of the two weights: the intersection of Eq. 10."""
    shared = encoding.values().new_zeros(chunk.stop - chunk.start, num_rows)
    first, last = int(own_starts[chunk.start]), int(own_starts[chunk.stop])
    row, neighbour = encoding.indices()[:, first:last]
    weight = encoding.values()[first:last]
    counts = starts[neighbour + 1] - starts[neighbour]  # images that have this neighbour too
    ends = counts.cumsum(0)
    begin = 0
    while begin < len(counts):
        done = int(ends[begin - 1]) if begin else 0
        stop = max(begin + 1, int(torch.searchsorted(ends, done + _MAX_PAIRS, right=True)))
        other, owner = _entries_of(neighbour[begin:stop], starts)
        smaller = torch.minimum(weight[begin:stop][owner], by_neighbour.values()[other])
        place = (row[begin:stop][owner] - chunk.start) * num_rows + by_neighbour.indices()[1, other]
        shared.view(-1).index_add_(0, place, smaller)
        begin = stop
    return shared
