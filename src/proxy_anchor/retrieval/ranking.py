"""Exact ranks of the best positives, and exact first R neighbours.

One tie rule: similarities that differ by at most TIE_TOLERANCE in float64 are equal, and rank by gallery index, lower
first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.rows import as_rows, check_same_dim, float32_error, normalise, warn_of_copies
from proxy_anchor.retrieval.search import (
    FAISS_GPU_MAX_K,
    full_precision,
    nearest,
    resolve_engine,
    row_chunks,
    similarity_chunk,
)

TIE_TOLERANCE = 1e-12  # float64 similarities of exact duplicates differ by about 1e-16, at most 2e-16 * D
_MANY = 64  # pairs of one query at the edge of a tie: its embeddings have collapsed, and no order means anything
_PAIRS = 2**13  # whose similarities are summed anew at once
_SPARE_HITS = 32  # hits requested beyond K (or R), so that the K-th is rarely tied with the last one listed

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class Problem:
    """Checked input of a metric: float64 unit rows and labels on one device."""

    queries: Tensor  # (Q, D)
    labels: Tensor  # (Q,)
    gallery: Tensor  # (N, D), the queries themselves without a gallery
    gallery_labels: Tensor  # (N,)
    exclude_self: bool  # query i is gallery row i, which is never its neighbour

    @property
    def positives(self) -> Tensor:
        """(Q,) number of positives of each query."""
        return num_positives(self.labels, self.gallery_labels) - int(self.exclude_self)

    def float32(self) -> tuple[Tensor, Tensor]:
        """Queries and gallery in float32."""
        queries = self.queries.float()
        return queries, queries if self.gallery is self.queries else self.gallery.float()


def make_problem(
    embeddings: Array, labels: Array, gallery: Array | None, gallery_labels: Array | None, exclude_self: bool
) -> Problem:
    """Check the input of a metric; arguments as in `metrics.recall_at_k`."""
    if (gallery is None) != (gallery_labels is None):
        raise UsageError("gallery and gallery_labels go together: give both, or neither to search the queries.")
    rows, wanted = paired(embeddings, labels, "query")
    if gallery is None or gallery_labels is None:
        unit = normalise(rows, "query")
        return Problem(unit, wanted, unit, wanted, True)
    gallery_rows, held = (each.to(rows.device) for each in paired(gallery, gallery_labels, "gallery"))
    check_same_dim(rows, gallery_rows)
    queries, unit = normalise(rows, "query"), normalise(gallery_rows, "gallery")
    if exclude_self and not torch.equal(wanted, held[: len(wanted)]):
        raise UsageError(
            "exclude_self=True: query i must be gallery row i, but their labels differ or the gallery is shorter; put "
            "the queries' rows first, or set it to False for a separate gallery."
        )
    if not exclude_self:
        sample = queries[:: -(-len(queries) // 64)]
        warn_of_copies(sample, unit, (sample @ unit.T).argmax(1))
    return Problem(queries, wanted, unit, held, exclude_self)


def num_positives(labels: Array, gallery_labels: Array | None = None) -> Tensor:
    """(Q,) int64 number of positives of each query.

    Without gallery labels: the number of other rows of its class.
    """
    wanted = as_labels(labels, "labels")
    held = wanted if gallery_labels is None else as_labels(gallery_labels, "gallery_labels").to(wanted.device)
    classes, counts = held.unique(return_counts=True)
    place = torch.searchsorted(classes, wanted).clamp_max(len(classes) - 1)
    found = torch.where(classes[place] == wanted, counts[place], 0)
    return found - 1 if gallery_labels is None else found


def nearest_at_r(problem: Problem, rows: Tensor, r: Tensor) -> Tensor:
    """(q, max R) gallery indices of the chosen queries' neighbours, nearest first.

    The order is exact up to each row's R; r: (q, 1).
    """
    similarities = similarity_chunk(problem.queries, problem.gallery, rows, problem.exclude_self)
    available = len(problem.gallery) - problem.exclude_self
    longest = int(r.max())
    values, listed = similarities.topk(min(longest + _SPARE_HITS, available))
    tied = _tied_with_next(values)
    found = _order_runs(tied, listed)[:, :longest]
    if listed.shape[1] < available:
        # A run of ties from within R to the end of the list may continue with rows that are not listed.
        position = torch.arange(1, listed.shape[1], device=rows.device)
        cut = (tied | (position < r)).all(1)
        if cut.any():
            values, listed = similarities[cut].topk(available)
            found[cut] = _order_runs(_tied_with_next(values), listed)[:, :longest]
    return found


def _tied_with_next(values: Tensor) -> Tensor:
    """(q, L) decreasing similarities to (q, L - 1) bool."""
    return values[:, :-1] - values[:, 1:] <= TIE_TOLERANCE


def _order_runs(tied: Tensor, indices: Tensor) -> Tensor:
    """Sort the indices within each run of ties."""
    run = torch.zeros_like(indices)
    run[:, 1:] = (~tied).cumsum(1)
    size = int(indices.max()) + 1
    return (run * size + indices).sort(1).values % size


def first_positive_ranks(problem: Problem, ks: tuple[int, ...], engine: str) -> Tensor:
    """(Q,) int64 rank of each query's best positive, from 1; N + 1 without one.

    Ranks are exact only as far as "rank <= K?" for the given ks requires.
    """
    engine = resolve_engine(engine, max(ks), exclude_self=problem.exclude_self, device=problem.queries.device)
    with full_precision(problem.queries.device):
        ahead, maybe_ahead = _count_torch(problem) if engine == "torch" else _count_listed(problem, max(ks), engine)
        positives = problem.positives
        wanted = torch.tensor(ks, device=ahead.device)
        # A hit at K needs fewer than K images ahead: certain if maybe_ahead < K, excluded if ahead >= K.
        open_ = ((ahead[:, None] < wanted) & (wanted <= maybe_ahead[:, None])).any(1) & (positives > 0)
        ahead[positives == 0] = len(problem.gallery)
        open_rows = open_.nonzero().squeeze(1)
        for chunk in row_chunks(len(open_rows), 2 * len(problem.gallery)):  # 2: float64
            ahead[open_rows[chunk]] = _count_exact(problem, open_rows[chunk])
        return ahead + 1


def _count_torch(problem: Problem) -> tuple[Tensor, Tensor]:
    """Bounds of the number of negatives ahead of the best positive.

    Two (Q,) int64, by counting instead of sorting.
    """
    queries, gallery = problem.float32()
    margin = _margin(problem)
    ahead, maybe_ahead = torch.empty(2, len(queries), dtype=torch.int64, device=queries.device)
    for rows in row_chunks(len(queries), len(gallery)):
        similarities = similarity_chunk(queries, gallery, rows, problem.exclude_self)
        same = problem.labels[rows, None] == problem.gallery_labels
        best = similarities.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
        ahead[rows] = _count(similarities > best + margin)  # no positive is above the best one
        maybe_ahead[rows] = _count((similarities >= best - margin) & ~same)
    return ahead, maybe_ahead


def _count_listed(problem: Problem, k: int, engine: str) -> tuple[Tensor, Tensor]:
    """The same bounds from an engine's list of slightly more than max K neighbours."""
    available = len(problem.gallery) - problem.exclude_self
    limit = FAISS_GPU_MAX_K - problem.exclude_self if engine == "faiss_gpu" else available
    listed = min(k + _SPARE_HITS, available, limit)
    queries, gallery = problem.float32()
    similarities, indices = nearest(queries, gallery, listed, engine, exclude_self=problem.exclude_self)
    margin = _margin(problem)
    ahead, maybe_ahead = torch.empty(2, len(queries), dtype=torch.int64, device=queries.device)
    for rows in row_chunks(len(queries), listed):
        values = similarities[rows]
        same = problem.gallery_labels[indices[rows]] == problem.labels[rows, None]
        last = values[:, -1:]
        # A positive outside the list is at most as similar as the list's last row.
        best = torch.where(same.any(1, keepdim=True), values.masked_fill(~same, -torch.inf).amax(1, keepdim=True), last)
        ahead[rows] = _count(values > best + margin)
        complete = (last < best - margin).squeeze(1) | (listed == available)  # nothing unlisted can be ahead
        maybe_ahead[rows] = torch.where(complete, _count((values >= best - margin) & ~same), available)
    return ahead, maybe_ahead


def _count_exact(problem: Problem, rows: Tensor) -> Tensor:
    """(q,) exact number of negatives ahead of the best positive.

    Computed in float64 with the tie rule, for the chosen queries.
    """
    similarities = similarity_chunk(problem.queries, problem.gallery, rows, problem.exclude_self)
    same = problem.labels[rows, None] == problem.gallery_labels
    best = similarities.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
    # Sums in another order, as for another chunk size, could differ on whether these pairs are tied.
    gap, rounding = (similarities - best).abs(), 4 * problem.queries.shape[1] * 2.0**-53
    edge = (gap - TIE_TOLERANCE).abs() <= rounding
    if edge.any():
        unsure = (edge | (same & (gap <= rounding))) & edge.any(1, keepdim=True)
        unsure &= unsure.sum(1, keepdim=True) <= _MANY  # of a collapsed network nearly all are
        for query, row in (pairs.T for pairs in unsure.nonzero().split(_PAIRS)):
            similarities[query, row] = _ordered_sum(problem.queries[rows[query]] * problem.gallery[row])
        best = similarities.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
    index = torch.arange(len(problem.gallery), device=rows.device)
    above = similarities > best + TIE_TOLERANCE
    tied = (similarities >= best - TIE_TOLERANCE) & ~above
    first = torch.where(tied & same, index, len(index)).amin(1, keepdim=True)
    return _count(above | (tied & ~same & (index < first))).long()


def _ordered_sum(terms: Tensor) -> Tensor:
    """(n, D) to (n,), by adding halves: the same order of additions for every n, engine and device."""
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = torch.cat([terms[:, :half] + terms[:, half : 2 * half], terms[:, 2 * half :]], dim=1)
    return terms[:, 0]


def _count(rows: Tensor) -> Tensor:
    return rows.sum(1, dtype=torch.int32)  # twice as fast on a CPU as the default int64


def _margin(problem: Problem) -> float:
    """Difference above which the order of two float32 similarities is certain."""
    return 2 * float32_error(problem.queries.shape[1]) + TIE_TOLERANCE


def as_labels(labels: Array, name: str) -> Tensor:
    """Convert to a detached (rows,) int64 tensor, or raise UsageError."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
        labels = torch.from_numpy(labels.astype(np.int64))
    integers = isinstance(labels, Tensor) and not (
        labels.dtype == torch.bool or labels.is_floating_point() or labels.is_complex()
    )
    if not isinstance(labels, Tensor) or labels.ndim != 1 or not integers:
        kind = f"{labels.dtype} of shape {tuple(labels.shape)}" if hasattr(labels, "shape") else type(labels).__name__
        raise UsageError(f"{name}: expected a one-dimensional tensor or array of integers, got {kind}.")
    return labels.detach().long()


def paired(embeddings: Array, labels: Array, name: str) -> tuple[Tensor, Tensor]:
    """Convert to (rows, D) floats and (rows,) int64 labels on their device, or raise UsageError."""
    rows = as_rows(embeddings, f"{name} embeddings")
    classes = as_labels(labels, f"{name} labels").to(rows.device)
    if len(rows) != len(classes):
        raise UsageError(f"{len(rows)} {name} embeddings but {len(classes)} labels: each row needs one.")
    return rows, classes
