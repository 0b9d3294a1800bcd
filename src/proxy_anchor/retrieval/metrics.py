"""Recall@K, MAP@R and R-precision as pure functions, exact with every search engine.

A query without a positive (R = 0) counts as 0 in every metric and stays in the denominator.

Recall@K depends only on the rank of each query's best positive. An engine bounds that rank in float32: a gallery image
whose similarity exceeds the best positive's by more than the rounding error is certainly ahead of it, and vice versa.
Queries whose hit or miss at some K depends on images in between are decided in float64, under one tie rule. The engine
therefore affects the speed and never the value. In the worst case, a collapsed network, this costs one more pass, in
float64.

MAP@R depends on the order of all first R neighbours, and in float32 two of them are nearly always within rounding.
MAP@R and R-precision are therefore ranked in float64, by torch on the device of the embeddings, without an engine.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.ranking import (
    Array,
    as_labels,
    first_positive_ranks,
    make_problem,
    nearest_at_r,
    num_positives,
)
from proxy_anchor.retrieval.rows import check_k
from proxy_anchor.retrieval.search import full_precision, row_chunks


def recall_at_k(
    embeddings: Array,
    labels: Array,
    k: int | Iterable[int] = (1, 2, 4, 8),
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    exclude_self: bool = False,
    engine: str = "auto",
) -> dict[int, float]:
    """Share of queries with a positive among their K nearest neighbours.

    A positive is a gallery image of the query's class. This is a hit rate, not the recall of information retrieval.
    Neighbours are ranked by cosine similarity.

    embeddings: (Q, D) float, need not be normalised; a zero row has similarity 0 to all. labels: (Q,) any integers.
    gallery: (N, D) and gallery_labels: (N,), in the label map of `labels`; without them every row searches all
    others, and the row itself is removed by index, not by position. With a gallery nothing is removed, unless
    exclude_self: the queries are the first Q rows of the gallery, and query i never finds gallery row i. Without it,
    queries that are also rows of the gallery score 100 %, with a warning.
    k: one K or several, each at least 1 and at most N (Q - 1 without gallery). engine: see `search.resolve_engine`.
    Returns {K: recall in [0, 1]} in the order of `k`.

    Denominator: all Q queries. A query without a positive in the gallery is a miss at every K and stays in the
    denominator, as in the authors' code; `num_queries_without_positive` counts them.
    Ties: similarities within 1e-12 of the best positive's are equal to it, and equal similarities rank by gallery
    index, lower first: deterministic and independent of labels. A collapsed network scores the share of queries that
    have the class of one of the first K rows, not 100 %.
    Every engine and every chunk size gives the same value to the last digit.
    Memory beyond the input: normalised copies, 12 bytes per value; about 12 bytes x search.CHUNK_ELEMENTS (400 MB, or
    one row of similarities if that is more); with faiss also its lists, 12 bytes x Q x (K + 32).
    Raises UsageError for K out of range, NaN or infinite embeddings (counted), and shapes that disagree.
    Kim et al. 2020, section 4 (evaluation protocol of Song et al. 2016).
    """
    ks = as_ks(k)
    problem = make_problem(embeddings, labels, gallery, gallery_labels, exclude_self)
    for each in ks:
        check_k(each, len(problem.gallery), problem.exclude_self)
    ranks = first_positive_ranks(problem, ks, engine)
    hits = (ranks[:, None] <= torch.tensor(ks, device=ranks.device)).sum(0).tolist()
    return {each: count / len(ranks) for each, count in zip(ks, hits, strict=True)}


def metrics_at_r(
    embeddings: Array,
    labels: Array,
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    exclude_self: bool = False,
) -> dict[str, float]:
    """{"map_at_r": mean average precision at R, "r_precision"} from one ranking.

    R: number of positives of a query in the gallery, itself excluded; it differs between queries.
    AP@R = 1/R * sum over ranks i = 1..R of P(i), where P(i) is the precision of the i nearest neighbours if the i-th is
    of the query's class, else 0. MAP@R is the mean of AP@R over queries, in [0, 1]. R-precision is the share of
    positives among the R nearest neighbours, averaged over queries, in [0, 1].

    embeddings, labels, gallery, gallery_labels, exclude_self: as in `recall_at_k`.
    Denominator: all Q queries; one with R = 0 counts as 0, as it is a miss in Recall@K, so that all columns of a
    table are over the same queries and MAP@R <= R-precision. pytorch-metric-learning leaves those queries out; its
    value is this one times Q / (Q - num_queries_without_positive).
    Ties: ranked in float64; a run of neighbours whose consecutive similarities differ by at most 1e-12 is one tie,
    which ranks by gallery index, lower first. A collapsed network scores chance, not 100 %.
    Every device and chunk size gives the same neighbours and the same value up to rounding in the mean (1e-15), unless
    two similarities are within float64 rounding of exactly 1e-12 apart. There is no limit on R.
    Memory beyond the input: normalised copies, 8 bytes per value; 2 bytes x search.CHUNK_ELEMENTS (64 MB, or one row of
    similarities in float64 if that is more), up to 10 times as much where R is near N. Time: one Q x N product in
    float64; a collapsed network, where most neighbours are tied, also costs a full sort of each row.
    Raises UsageError for NaN or infinite embeddings (counted) and shapes that disagree.
    Musgrave et al. 2020, "A Metric Learning Reality Check", the two equations of MAP@R.
    """
    problem = make_problem(embeddings, labels, gallery, gallery_labels, exclude_self)
    positives = problem.positives
    average_precision, precision = torch.zeros_like(positives, dtype=torch.float64).repeat(2, 1)
    with full_precision(problem.queries.device):
        # Queries of one chunk have about the same R, so lists are short where R is small.
        by_r = positives.argsort(stable=True)
        by_r = by_r[positives[by_r] > 0]
        for chunk in row_chunks(len(by_r), 4 * len(problem.gallery)):  # 4: float64, and lists up to the same size
            rows = by_r[chunk]
            r = positives[rows, None]
            found = nearest_at_r(problem, rows, r)
            correct = problem.gallery_labels[found] == problem.labels[rows, None]
            average_precision[rows], precision[rows] = _at_r(correct, r)
    return _means(average_precision, precision)


def _means(average_precision: Tensor, precision: Tensor) -> dict[str, float]:
    return {"map_at_r": average_precision.mean().item(), "r_precision": precision.mean().item()}


def metrics_of_ranking(
    ranking: Tensor, labels: Array, k: int | Iterable[int] = (1, 2, 4, 8), *, gallery_labels: Array | None = None
) -> dict[str, float]:
    """Recall@K, MAP@R and R-precision of given neighbour lists.

    For re-ranking or an approximate index. ranking: (Q, M) gallery indices, nearest first, without the query itself.
    labels: (Q,) integers. gallery_labels: (N,); None: the queries search each other.
    Denominators and queries without a positive: as in `recall_at_k` and `metrics_at_r`; the order is taken as given.
    Raises UsageError when M is below the largest K or the largest R, and for an index outside the gallery.
    """
    ks = as_ks(k)
    wanted = as_labels(labels, "labels").to(ranking.device)
    held = wanted if gallery_labels is None else as_labels(gallery_labels, "gallery_labels").to(ranking.device)
    r = num_positives(wanted, None if gallery_labels is None else held)[:, None]
    needed = max(*ks, int(r.max()))
    if ranking.ndim != 2 or len(ranking) != len(wanted) or ranking.shape[1] < needed:
        raise UsageError(
            f"ranking of shape {tuple(ranking.shape)}: expected {len(wanted)} rows of at least {needed} neighbours."
        )
    if ranking.min() < 0 or ranking.max() >= len(held):
        raise UsageError(f"ranking holds an index outside the gallery of {len(held)} images.")
    correct = held[ranking] == wanted[:, None]
    values = {f"recall_at_{each}": correct[:, :each].any(1).double().mean().item() for each in ks}
    return values | _means(*_at_r(correct, r))


def _at_r(correct: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Average precision at R and R-precision, (q,) float64 each.

    correct: (q, M) bool, ranked, M >= max R. r: (q, 1).
    """
    rank = torch.arange(1, correct.shape[1] + 1, device=correct.device, dtype=torch.float64)
    correct = correct & (rank <= r)
    hits, positives = correct.cumsum(1), r[:, 0].clamp_min(1)
    return (correct * hits / rank).sum(1) / positives, hits[:, -1].double() / positives


def num_queries_without_positive(labels: Array, gallery_labels: Array | None = None) -> int:
    """Number of queries without a positive, which cannot hit at any K.

    labels: (Q,) and gallery_labels: (N,), integers of one label map.
    """
    return int((num_positives(labels, gallery_labels) == 0).sum())


def as_ks(k: int | Iterable[int]) -> tuple[int, ...]:
    """Convert to distinct Ks, each at least 1, or raise UsageError."""
    try:
        ks = [operator.index(each) for each in (k if isinstance(k, Iterable) else [k])]
    except TypeError:
        raise UsageError(f"k={k!r}: expected a whole number or several.") from None
    if not ks or min(ks) < 1:
        raise UsageError(f"k={k!r}: expected at least one K, each at least 1.")
    return tuple(dict.fromkeys(ks))
