"""Recall@K, MAP@R and R-precision as pure functions, exact with every search engine, and a thin torchmetrics class.

One policy for all of them: a query without a positive (R = 0) counts as 0 and stays in the denominator.

Recall@K depends only on the rank of each query's best positive. An engine bounds that rank in float32: a gallery image
whose similarity is more than the rounding error above (below) the best positive's is certainly before (behind) it.
Queries whose hit or miss at some K hangs on images in between are settled in float64 on the embeddings as given, under
one tie rule. So the engine decides the speed and never the number; in the worst case, a collapsed network, the search
costs one pass more, in float64.

MAP@R hangs on the whole order of the first R neighbours, and in float32 some pair of them is nearly always within
rounding. It and R-precision are therefore ranked in float64 outright, by torch where the embeddings are: no engine.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from proxy_anchor.errors import AgreedError, UsageError
from proxy_anchor.retrieval.search import (
    FAISS_GPU_MAX_K,
    as_rows,
    check_k,
    check_same_dim,
    float32_error,
    full_precision,
    nearest,
    normalise,
    resolve_engine,
    row_chunks,
    similarity_chunk,
)

TIE_TOLERANCE = 1e-12  # float64 similarities of exact duplicates differ by about 1e-16, at most 2e-16 * D
_NO_INDEX = torch.iinfo(torch.int64).min  # of a row that was added without its dataset index
_SPARE_HITS = 32  # hits asked for beyond K (or R), so that the K-th is seldom tied with the last one listed

Array = Tensor | np.ndarray


def recall_at_k(
    embeddings: Array,
    labels: Array,
    k: int | Iterable[int] = (1, 2, 4, 8),
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    engine: str = "auto",
) -> dict[int, float]:
    """Share of queries with at least one image of their class among their K nearest neighbours, for each K.

    A hit rate, not the information-retrieval recall. Neighbours are nearest by cosine similarity.

    embeddings: (Q, D) float, need not be normalised; a zero row has similarity 0 to all. labels: (Q,) any integers.
    gallery: (N, D) and gallery_labels: (N,), in the label map of `labels`; without them every row searches all the
    others, and is itself removed by index, never by position. With a gallery nothing is removed.
    k: one K or several, each at least 1 and at most N (Q - 1 without gallery). engine: see `search.resolve_engine`.
    Returns {K: recall in [0, 1]} in the order asked for.

    Denominator: all Q queries. A query without a positive in the gallery is a miss at every K and stays in the
    denominator, as in the authors' code; `num_queries_without_positive` counts them.
    Ties: similarities within 1e-12 of the best positive's are equal to it, and equal similarities rank by gallery
    index, lower first: deterministic and blind to labels. A collapsed network gets the share of queries that have the
    class of one of the K first rows, not 100 %.
    Every engine and every chunk size gives the same value to the last digit.
    Memory beyond the input: normalised copies, 12 bytes per value; about 12 bytes x search.CHUNK_ELEMENTS (400 MB, or
    one row of similarities if that is more); with faiss also its lists, 12 bytes x Q x (K + 32).
    Raises UsageError for K out of range, NaN or infinite embeddings (counted), and shapes that disagree.
    Kim et al. 2020, section 4 (evaluation protocol of Song et al. 2016).
    """
    problem = _make_problem(embeddings, labels, gallery, gallery_labels)
    return _recall(problem, _as_ks(k), engine)


def map_at_r(
    embeddings: Array, labels: Array, *, gallery: Array | None = None, gallery_labels: Array | None = None
) -> float:
    """Mean average precision at R: rewards a query for each of its positives, and for having them first.

    R: how many positives a query has in the gallery, itself excluded; it differs from query to query.
    AP@R = 1/R * sum over ranks i = 1..R of P(i), where P(i) is the precision of the i nearest neighbours if the i-th is
    of the query's class, else 0. The value is the mean of AP@R over queries, in [0, 1].

    embeddings, labels, gallery, gallery_labels, and the removal of the query itself by index: as in `recall_at_k`.
    Denominator: all Q queries; one with R = 0 counts as 0, as it counts as a miss in Recall@K, so that all columns of
    a table speak of the same queries and MAP@R <= R-precision. pytorch-metric-learning leaves those queries out; its
    value is this one times Q / (Q - num_queries_without_positive).
    Ties: ranked in float64; each run of neighbours whose similarities differ by at most 1e-12 from one to the next is
    one tie, and ranks by gallery index, lower first. A collapsed network gets chance, not 100 %.
    Every device and chunk size gives the same neighbours and the same value up to rounding in the mean (1e-15), unless
    two similarities are within float64 rounding of exactly 1e-12 apart. There is no limit on R.
    Memory beyond the input: normalised copies, 8 bytes per value; 2 bytes x search.CHUNK_ELEMENTS (64 MB, or one row of
    similarities in float64 if that is more), up to 10 times as much where R is near N. Time: one Q x N product in
    float64; a collapsed network, where most neighbours are tied, costs a full sort of each row besides.
    Raises UsageError for NaN or infinite embeddings (counted) and shapes that disagree.
    Musgrave et al. 2020, "A Metric Learning Reality Check", the two equations of MAP@R.
    """
    average_precision, _ = _scores_at_r(_make_problem(embeddings, labels, gallery, gallery_labels))
    return average_precision.mean().item()


def r_precision(
    embeddings: Array, labels: Array, *, gallery: Array | None = None, gallery_labels: Array | None = None
) -> float:
    """Share of positives among the R nearest neighbours, averaged over queries, in [0, 1].

    R, denominator (all Q queries, 0 where R = 0), self-match, ties, memory, raises: as in `map_at_r`.
    Musgrave et al. 2020, "A Metric Learning Reality Check".
    """
    _, precision = _scores_at_r(_make_problem(embeddings, labels, gallery, gallery_labels))
    return precision.mean().item()


def retrieval_metrics(
    embeddings: Array,
    labels: Array,
    k: int | Iterable[int] = (1, 2, 4, 8),
    *,
    gallery: Array | None = None,
    gallery_labels: Array | None = None,
    engine: str = "auto",
) -> dict[str, float]:
    """{"recall_at_1": ..., "map_at_r": ..., "r_precision": ...}: the three metrics from one check of the input.

    Arguments, rules and errors: as in `recall_at_k` and `map_at_r`; `engine` searches for Recall@K only.
    """
    problem = _make_problem(embeddings, labels, gallery, gallery_labels)
    values = {f"recall_at_{each}": recall for each, recall in _recall(problem, _as_ks(k), engine).items()}
    average_precision, precision = _scores_at_r(problem)
    return {**values, "map_at_r": average_precision.mean().item(), "r_precision": precision.mean().item()}


def metrics_of_ranking(
    ranking: Tensor, labels: Array, k: int | Iterable[int] = (1, 2, 4, 8), *, gallery_labels: Array | None = None
) -> dict[str, float]:
    """The same metrics of neighbour lists that somebody else has ranked (re-ranking, an approximate index).

    ranking: (Q, M) gallery indices, nearest first, without the query itself. labels: (Q,) integers; gallery_labels:
    (N,), None: the queries search each other and a query is not its own positive.
    Denominators and queries without a positive: as in `recall_at_k` and `map_at_r`; the order is taken as given.
    Raises UsageError when M is below the largest K or below R, the most positives that a query has, and for an index that
    is no gallery row.
    """
    ks = _as_ks(k)
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
    average_precision, precision = _at_r(correct, r)
    return {**values, "map_at_r": average_precision.mean().item(), "r_precision": precision.mean().item()}


def _at_r(correct: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Average precision at R and R-precision, (q,) float64, of ranked neighbours (q, M), M >= max R; r: (q, 1)."""
    rank = torch.arange(1, correct.shape[1] + 1, device=correct.device, dtype=torch.float64)
    correct = correct & (rank <= r)
    hits, positives = correct.cumsum(1), r[:, 0].clamp_min(1)
    return (correct * hits / rank).sum(1) / positives, hits[:, -1].double() / positives


def num_positives(labels: Array, gallery_labels: Array | None = None) -> Tensor:
    """(Q,) int64: how many gallery images have the class of each query; without a gallery, how many other rows."""
    wanted = as_labels(labels, "labels")
    held = wanted if gallery_labels is None else as_labels(gallery_labels, "gallery_labels").to(wanted.device)
    classes, counts = held.unique(return_counts=True)
    place = torch.searchsorted(classes, wanted).clamp_max(len(classes) - 1)
    found = torch.where(classes[place] == wanted, counts[place], 0)
    return found - 1 if gallery_labels is None else found


def num_queries_without_positive(labels: Array, gallery_labels: Array | None = None) -> int:
    """How many queries cannot hit at any K: no gallery image (without a gallery: no other row) shares their class.

    labels: (Q,) and gallery_labels: (N,) integers of one label map.
    """
    return int((num_positives(labels, gallery_labels) == 0).sum())


class RecallAtK(Metric):
    """`recall_at_k` over batches and processes, as a torchmetrics metric.

    k, engine: as in `recall_at_k`. num_images: how many distinct images (queries plus gallery) `compute` must have
    seen, so that a partial pass is never reported as a whole one; None accepts any number.

    `compute()` returns {"recall_at_1": float64 scalar in [0, 1], ...} on every process. `forward` returns the same of
    its batch alone, NaN for a K that the batch cannot answer: it has at most K rows, or no query.

    A distributed sampler repeats rows to make shards equal, and a copy of a query is a certain hit. Rows are therefore
    identified by their dataset index: after gathering each index counts once and rows are in dataset order, which
    makes any number of processes give the number of one.
    """

    full_state_update = False
    is_differentiable = False
    higher_is_better = True
    embeddings: list[Tensor]
    labels: list[Tensor]
    indices: list[Tensor]
    in_gallery: list[Tensor]

    def __init__(
        self,
        k: int | Iterable[int] = (1, 2, 4, 8),
        *,
        engine: str = "auto",
        num_images: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.ks = _as_ks(k)
        self.engine = engine
        self.num_images = num_images
        self._batch_alone = False
        resolve_engine(engine, max(self.ks))  # a missing faiss shows before the first epoch, not after it
        for name in ("embeddings", "labels", "indices", "in_gallery"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Add a batch, with the arguments of `update`, and return the Recall of that batch alone."""
        self._batch_alone = True
        try:
            return super().forward(*args, **kwargs)
        finally:
            self._batch_alone = False

    def update(
        self, embeddings: Tensor, labels: Tensor, indices: Tensor | None = None, *, is_gallery: bool = False
    ) -> None:
        """Add a batch.

        embeddings: (B, D) float. labels: (B,) integers. indices: (B,) dataset indices; query and gallery may each
        count from 0. None: every row counts, which is refused when several processes take part.
        is_gallery: rows to be found. If there are none, every row searches all the others.
        """
        rows = as_rows(embeddings, "embeddings").float()
        if indices is None:
            if _several_processes():
                raise UsageError("RecallAtK: pass dataset indices; several processes see padded copies of some images.")
            indices = torch.full((len(rows),), _NO_INDEX)
        batch_labels = as_labels(labels, "labels").to(rows.device)
        batch_indices = as_labels(indices, "indices").to(rows.device)
        if not len(rows) == len(batch_labels) == len(batch_indices):
            raise UsageError(
                f"RecallAtK: {len(rows)} embeddings, {len(batch_labels)} labels and {len(batch_indices)} indices."
            )
        self.embeddings.append(rows)
        self.labels.append(batch_labels)
        self.indices.append(batch_indices)
        self.in_gallery.append(torch.full_like(batch_labels, is_gallery, dtype=torch.bool))

    def compute(self) -> dict[str, Tensor]:
        """Recall of everything added since the last reset. One process searches and tells the others.

        Raises what the search raised, on every process.
        """
        recall = self._search_once() if self._is_synced and _several_processes() else self._search()
        return {
            f"recall_at_{k}": torch.tensor(value, dtype=torch.float64, device=self.device)
            for k, value in recall.items()
        }

    def gathered_embeddings(self) -> list[Tensor]:
        """[(Q, D)] or [(Q, D), (N, D)] queries and gallery of all processes on the CPU, each image once, in dataset order.

        All processes call it together.
        """
        with self.sync_context():
            embeddings, indices = dim_zero_cat(self.embeddings), dim_zero_cat(self.indices)
            in_gallery = dim_zero_cat(self.in_gallery)
            parts = [embeddings[_distinct(indices, ~in_gallery)].cpu()]
            if in_gallery.any():
                parts.append(embeddings[_distinct(indices, in_gallery)].cpu())
        return parts

    def _sync_dist(self, dist_sync_fn: Callable[..., Any] = gather_all_tensors, process_group: Any = None) -> None:
        """Gather the rows of all processes.

        torchmetrics sends float32 of shape (0,) for a process without rows, which cannot be gathered with the others'.
        """
        group = process_group or self.process_group
        dim = self.embeddings[0].shape[-1] if len(self.embeddings) else 0
        device = self.embeddings[0].device if len(self.embeddings) else self.device
        dims = dist_sync_fn(torch.tensor(dim, device=device), group=group)
        if not len(self.embeddings):
            self.embeddings = [torch.empty(0, int(max(dims)), device=device)]
            self.labels = [torch.empty(0, dtype=torch.int64, device=device)]
            self.indices = [torch.empty(0, dtype=torch.int64, device=device)]
            self.in_gallery = [torch.empty(0, dtype=torch.bool, device=device)]
        super()._sync_dist(dist_sync_fn, process_group=group)

    def _search_once(self) -> dict[int, float]:
        outcome: list[Any] = [None]
        if torch.distributed.get_rank(self.process_group) == 0:
            try:
                outcome = [self._search()]
            except UsageError as error:  # the others wait for an answer
                outcome = [str(error)]
        torch.distributed.broadcast_object_list(outcome, group=self.process_group, group_src=0)
        if isinstance(outcome[0], str):
            raise AgreedError(outcome[0])
        return outcome[0]

    def _search(self) -> dict[int, float]:
        if not any(map(len, self.embeddings)):
            raise UsageError("RecallAtK: no embeddings were added since the last reset; call update before compute.")
        embeddings, labels = dim_zero_cat(self.embeddings), dim_zero_cat(self.labels)
        indices, in_gallery = dim_zero_cat(self.indices), dim_zero_cat(self.in_gallery)
        queries, found = (_distinct(indices, rows) for rows in (~in_gallery, in_gallery))
        ks = self.ks
        if self._batch_alone:
            longest = (len(found) or len(queries) - 1) if len(queries) else 0
            ks = tuple(k for k in self.ks if k <= longest)
        elif self.num_images is not None and len(queries) + len(found) != self.num_images:
            raise UsageError(
                f"RecallAtK: {len(queries) + len(found)} distinct images were seen, expected {self.num_images}; the "
                "pass over the data was partial (limited batches, a sanity check) or the indices are wrong."
            )
        recall: dict[int, float] = {}
        if ks:
            gallery = {"gallery": embeddings[found], "gallery_labels": labels[found]} if len(found) else {}
            recall = recall_at_k(embeddings[queries], labels[queries], ks, engine=self.engine, **gallery)
        return {k: recall.get(k, math.nan) for k in self.ks}


@dataclass(frozen=True, eq=False)
class _Problem:
    """Checked input of a metric: unit rows in float64 and labels, all on the device of the queries."""

    queries: Tensor  # (Q, D)
    labels: Tensor  # (Q,)
    gallery: Tensor  # (N, D), the queries themselves when exclude_self
    gallery_labels: Tensor  # (N,)
    exclude_self: bool


def _make_problem(embeddings: Array, labels: Array, gallery: Array | None, gallery_labels: Array | None) -> _Problem:
    if (gallery is None) != (gallery_labels is None):
        raise UsageError("gallery and gallery_labels go together: give both, or neither to search the queries.")
    rows, wanted = _paired(embeddings, labels, "query")
    if gallery is None or gallery_labels is None:
        unit = normalise(rows, "query")
        return _Problem(unit, wanted, unit, wanted, True)
    gallery_rows, held = (each.to(rows.device) for each in _paired(gallery, gallery_labels, "gallery"))
    check_same_dim(rows, gallery_rows)
    return _Problem(normalise(rows, "query"), wanted, normalise(gallery_rows, "gallery"), held, False)


def _recall(problem: _Problem, ks: tuple[int, ...], engine: str) -> dict[int, float]:
    for each in ks:
        check_k(each, len(problem.gallery), problem.exclude_self)
    ranks = _first_positive_ranks(problem, ks, engine)
    hits = (ranks[:, None] <= torch.tensor(ks, device=ranks.device)).sum(0).tolist()
    return {each: count / len(ranks) for each, count in zip(ks, hits, strict=True)}


def _scores_at_r(problem: _Problem) -> tuple[Tensor, Tensor]:
    """Each query's average precision at R and its R-precision, two (Q,) float64; 0 where R is 0."""
    positives = num_positives(problem.labels, None if problem.exclude_self else problem.gallery_labels)
    average_precision, precision = torch.zeros_like(positives, dtype=torch.float64).repeat(2, 1)
    with full_precision(problem.queries.device):
        by_r = positives.argsort(
            stable=True
        )  # queries of one chunk have about the same R: short lists where R is small
        by_r = by_r[positives[by_r] > 0]
        for chunk in row_chunks(len(by_r), 4 * len(problem.gallery)):  # 4: float64, and lists up to the same size
            rows = by_r[chunk]
            r = positives[rows, None]
            found = _ranked(problem, rows, r)
            correct = problem.gallery_labels[found] == problem.labels[rows, None]
            average_precision[rows], precision[rows] = _at_r(correct, r)
    return average_precision, precision


def _ranked(problem: _Problem, rows: Tensor, r: Tensor) -> Tensor:
    """(q, max R) gallery indices of the chosen queries' neighbours, nearest first; right up to each row's R (q, 1)."""
    similarities = similarity_chunk(problem.queries, problem.gallery, rows, problem.exclude_self)
    available = len(problem.gallery) - problem.exclude_self
    longest = int(r.max())
    values, listed = similarities.topk(min(longest + _SPARE_HITS, available))
    tied = _tied_with_next(values)
    found = _order_runs(tied, listed)[:, :longest]
    if listed.shape[1] < available:
        # Where a run of ties reaches from within R to the end of the list, rows that belong in it may not be listed.
        position = torch.arange(1, listed.shape[1], device=rows.device)
        cut = (tied | (position < r)).all(1)
        if cut.any():
            values, listed = similarities[cut].topk(available)
            found[cut] = _order_runs(_tied_with_next(values), listed)[:, :longest]
    return found


def _tied_with_next(values: Tensor) -> Tensor:
    """(q, L) decreasing similarities -> (q, L - 1) bool."""
    return values[:, :-1] - values[:, 1:] <= TIE_TOLERANCE


def _order_runs(tied: Tensor, indices: Tensor) -> Tensor:
    """Sort the indices within each run of ties."""
    run = torch.zeros_like(indices)
    run[:, 1:] = (~tied).cumsum(1)
    size = int(indices.max()) + 1
    return (run * size + indices).sort(1).values % size


def _first_positive_ranks(problem: _Problem, ks: tuple[int, ...], engine: str) -> Tensor:
    """(Q,) int64 rank of each query's best positive, from 1; N + 1 where it has none.

    A rank may be off where that changes no answer to "rank <= K?" for the given ks; every such answer is exact.
    """
    engine = resolve_engine(engine, max(ks), exclude_self=problem.exclude_self, device=problem.queries.device)
    with full_precision(problem.queries.device):
        torch_counts = engine == "torch"
        ahead, maybe_ahead = _count_torch(problem) if torch_counts else _count_listed(problem, max(ks), engine)
        positives = num_positives(problem.labels, None if problem.exclude_self else problem.gallery_labels)
        wanted = torch.tensor(ks, device=ahead.device)
        # A hit at K needs fewer than K images ahead: certain if maybe_ahead < K, excluded if ahead >= K.
        open_ = ((ahead[:, None] < wanted) & (wanted <= maybe_ahead[:, None])).any(1) & (positives > 0)
        ahead[positives == 0] = len(problem.gallery)
        open_rows = open_.nonzero().squeeze(1)
        for chunk in row_chunks(len(open_rows), 2 * len(problem.gallery)):  # 2: float64
            ahead[open_rows[chunk]] = _count_exact(problem, open_rows[chunk])
        return ahead + 1


def _count_torch(problem: _Problem) -> tuple[Tensor, Tensor]:
    """Bounds on how many negatives are ahead of the best positive, two (Q,) int64, by counting instead of sorting."""
    queries = problem.queries.float()
    gallery = queries if problem.exclude_self else problem.gallery.float()
    margin = _margin(problem)
    ahead, maybe_ahead = torch.empty(2, len(queries), dtype=torch.int64, device=queries.device)
    for rows in row_chunks(len(queries), len(gallery)):
        similarities = similarity_chunk(queries, gallery, rows, problem.exclude_self)
        same = problem.labels[rows, None] == problem.gallery_labels
        best = similarities.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
        ahead[rows] = _count(similarities > best + margin)  # no positive is above the best one
        maybe_ahead[rows] = _count((similarities >= best - margin) & ~same)
    return ahead, maybe_ahead


def _count_listed(problem: _Problem, k: int, engine: str) -> tuple[Tensor, Tensor]:
    """The same bounds from an engine's list of nearest neighbours, which ends a little behind the largest K."""
    available = len(problem.gallery) - problem.exclude_self
    limit = FAISS_GPU_MAX_K - problem.exclude_self if engine == "faiss_gpu" else available
    listed = min(k + _SPARE_HITS, available, limit)
    queries = problem.queries.float()
    gallery = queries if problem.exclude_self else problem.gallery.float()
    similarities, indices = nearest(queries, gallery, listed, engine, exclude_self=problem.exclude_self)
    margin = _margin(problem)
    ahead, maybe_ahead = torch.empty(2, len(queries), dtype=torch.int64, device=queries.device)
    for rows in row_chunks(len(queries), listed):
        values = similarities[rows]
        same = problem.gallery_labels[indices[rows]] == problem.labels[rows, None]
        last = values[:, -1:]
        # A positive that is not in the list is at most as similar as the list's last row.
        best = torch.where(same.any(1, keepdim=True), values.masked_fill(~same, -torch.inf).amax(1, keepdim=True), last)
        ahead[rows] = _count(values > best + margin)
        complete = (last < best - margin).squeeze(1) | (listed == available)  # nothing unlisted can be ahead
        maybe_ahead[rows] = torch.where(complete, _count((values >= best - margin) & ~same), available)
    return ahead, maybe_ahead


def _count_exact(problem: _Problem, rows: Tensor) -> Tensor:
    """How many negatives rank before the best positive of the chosen queries: float64 and the tie rule, no bounds."""
    similarities = similarity_chunk(problem.queries, problem.gallery, rows, problem.exclude_self)
    same = problem.labels[rows, None] == problem.gallery_labels
    best = similarities.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
    index = torch.arange(len(problem.gallery), device=rows.device)
    above = similarities > best + TIE_TOLERANCE
    tied = (similarities >= best - TIE_TOLERANCE) & ~above
    first = torch.where(tied & same, index, len(index)).amin(1, keepdim=True)
    return _count(above | (tied & ~same & (index < first))).long()


def _count(rows: Tensor) -> Tensor:
    return rows.sum(1, dtype=torch.int32)  # twice as fast on a CPU as the default int64


def _margin(problem: _Problem) -> float:
    """Two float32 similarities that differ by more are in their true order and not tied."""
    return 2 * float32_error(problem.queries.shape[1]) + TIE_TOLERANCE


def _several_processes() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _distinct(indices: Tensor, rows: Tensor) -> Tensor:
    """Positions of the masked rows, each dataset index once (its first copy), in dataset order.

    Rows without an index are all kept, before the others, in the order in which they were added.
    """
    positions = rows.nonzero().squeeze(1)
    values, order = indices[positions].sort(stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = (values[1:] != values[:-1]) | (values[1:] == _NO_INDEX)
    return positions[order[is_first]]


def _as_ks(k: int | Iterable[int]) -> tuple[int, ...]:
    try:
        ks = [k] if not isinstance(k, Iterable) else list(k)
        if any(isinstance(each, bool) for each in ks):
            raise TypeError
        ks = [operator.index(each) for each in ks]
    except TypeError:
        raise UsageError(f"k={k!r}: expected a whole number or several.") from None
    if not ks or min(ks) < 1:
        raise UsageError(f"k={k!r}: expected at least one K, each at least 1.")
    return tuple(dict.fromkeys(ks))


def as_labels(labels: Array, name: str) -> Tensor:
    """A detached (rows,) int64 tensor, or UsageError."""
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu":
        labels = torch.from_numpy(labels.astype(np.int64))
    integers = isinstance(labels, Tensor) and not (labels.dtype == torch.bool or labels.dtype.is_floating_point)
    if not isinstance(labels, Tensor) or labels.ndim != 1 or not integers:
        kind = f"{labels.dtype} of shape {tuple(labels.shape)}" if hasattr(labels, "shape") else type(labels).__name__
        raise UsageError(f"{name}: expected a one-dimensional tensor or array of integers, got {kind}.")
    return labels.detach().long()


def _paired(embeddings: Array, labels: Array, name: str) -> tuple[Tensor, Tensor]:
    rows = as_rows(embeddings, f"{name} embeddings")
    classes = as_labels(labels, f"{name} labels").to(rows.device)
    if len(rows) != len(classes):
        raise UsageError(f"{len(rows)} {name} embeddings but {len(classes)} labels: each row needs one.")
    return rows, classes
