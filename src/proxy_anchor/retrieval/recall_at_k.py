"""Recall@K over batches and ranks, as a torchmetrics metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from proxy_anchor.errors import AgreedError, UsageError
from proxy_anchor.retrieval.metrics import as_ks, as_labels, recall_at_k
from proxy_anchor.retrieval.rows import as_rows
from proxy_anchor.retrieval.search import resolve_engine

_NO_INDEX = torch.iinfo(torch.int64).min  # of a row that was added without a dataset index


class RecallAtK(Metric):
    """`recall_at_k` over batches and ranks, as a torchmetrics metric.

    k, engine: as in `recall_at_k`. num_images: number of distinct images (queries plus gallery) that `compute`
    requires, so that a partial pass is never reported as a whole one; None accepts any number.
    dims: numbers of leading dimensions to search alone, in addition to the whole embeddings.

    `compute()` returns {"recall_at_1": float64 scalar in [0, 1], ...} on every rank, and "recall_at_1_dim64" for 64 in
    `dims`. `forward` adds a batch as `update` does and returns nothing: the Recall of a batch says little, and K may be
    larger than it. A rank may add no rows.

    exclude_self: gallery rows of a query's dataset index are that query's own, and never its neighbours; every query
    needs one. Among equal similarities the queries' own rows come before the other gallery rows.

    A distributed sampler repeats rows to make shards equal, and a copy of a query is a certain hit. Rows are therefore
    identified by their dataset index: after gathering, each index counts once and rows are in dataset order. The value
    does not depend on the number of ranks.
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
        exclude_self: bool = False,
        num_images: int | None = None,
        dims: Iterable[int] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.ks = as_ks(k)
        self.engine = engine
        self.exclude_self = exclude_self
        self.num_images, self.dims = num_images, list(dims)
        resolve_engine(engine, max(self.ks))  # a missing faiss is reported before the first epoch
        for name in ("embeddings", "labels", "indices", "in_gallery"):
            self.add_state(name, default=[], dist_reduce_fx="cat")

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch, see `update`."""
        self.update(*args, **kwargs)

    def update(
        self, embeddings: Tensor, labels: Tensor, indices: Tensor | None = None, *, is_gallery: bool = False
    ) -> None:
        """Add a batch.

        embeddings: (B, D) float. labels: (B,) integers. indices: (B,) dataset indices; query and gallery may each
        count from 0. None: every row counts, which is an error with several ranks.
        is_gallery: the rows belong to the gallery. Without gallery rows, every row searches all others.
        """
        rows = as_rows(embeddings, "embeddings").float()
        if indices is None:
            if self.distributed_available_fn() and torch.distributed.get_world_size() > 1:
                raise UsageError("RecallAtK: pass dataset indices; with several ranks some images are padded copies.")
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
        """Recall of all rows since the last reset.

        Every rank searches the same rows, exactly: the value, or the error, is the same on all.
        """
        try:
            recall = self._search()
        except UsageError as error:
            raise AgreedError(str(error)) from error
        return {key: torch.tensor(value, dtype=torch.float64, device=self.device) for key, value in recall.items()}

    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any | None = None) -> None:
        """As in the base class, which needs tensors of one kind on every rank, also where this one has no rows."""
        group = process_group or self.process_group
        widths: list[int] = [0] * torch.distributed.get_world_size(group)
        own = self.embeddings[0].shape[1] if self.embeddings else 0
        torch.distributed.all_gather_object(widths, own, group)
        if own == 0 and (width := max(widths)):
            self.embeddings.append(torch.zeros(0, width, device=self.device))
            for name, dtype in {"labels": torch.int64, "indices": torch.int64, "in_gallery": torch.bool}.items():
                getattr(self, name).append(torch.zeros(0, dtype=dtype, device=self.device))
        super()._sync_dist(dist_sync_fn, process_group)

    def gathered_embeddings(self) -> list[Tensor]:
        """Embeddings of all ranks on the CPU, each image once, in dataset order.

        Returns [queries (Q, D)] or [queries (Q, D), gallery (N, D)]. Collective: all ranks must call it.
        Raises UsageError where no rank has a row.
        """
        with self.sync_context():
            embeddings, _, _, queries, found = self._rows()
            return [embeddings[rows].cpu() for rows in ([queries, found] if len(found) else [queries])]

    def _rows(self) -> tuple[Tensor, ...]:
        """Embeddings, labels and dataset indices of all rows; positions of the distinct queries and gallery rows."""
        if not any(map(len, self.embeddings)):
            raise UsageError("RecallAtK: no embeddings were added since the last reset; call update before compute.")
        states = (self.embeddings, self.labels, self.indices, self.in_gallery)
        embeddings, labels, indices, in_gallery = map(dim_zero_cat, states)
        return embeddings, labels, indices, _distinct(indices, ~in_gallery), _distinct(indices, in_gallery)

    def _search(self) -> dict[str, float]:
        embeddings, labels, indices, queries, found = self._rows()
        if self.num_images is not None and len(queries) + len(found) != self.num_images:
            raise UsageError(
                f"RecallAtK: {len(queries) + len(found)} distinct images were seen, expected {self.num_images}; the "
                "pass over the data was partial (limited batches, a sanity check) or the indices are wrong."
            )
        given: dict[str, Any] = {}
        if len(found):
            if self.exclude_self:  # `recall_at_k` takes the queries' own rows first, in their order
                own = torch.isin(indices[found], indices[queries])
                if (paired := int(own.sum())) != len(queries):
                    raise UsageError(
                        f"exclude_self=True: {len(queries)} queries, and {paired} gallery rows of their dataset "
                        "indices: pass one for each, or set it to False for a separate gallery."
                    )
                found = torch.cat([found[own], found[~own]])
            given = {"gallery_labels": labels[found], "exclude_self": self.exclude_self}
        recall: dict[str, float] = {}
        for suffix, dim in ({"": None} | {f"_dim{dim}": dim for dim in self.dims}).items():
            if len(found):
                given["gallery"] = embeddings[found, :dim]
            values = recall_at_k(embeddings[queries, :dim], labels[queries], self.ks, engine=self.engine, **given)
            recall |= {f"recall_at_{k}{suffix}": value for k, value in values.items()}
        return recall


def _distinct(indices: Tensor, rows: Tensor) -> Tensor:
    """Positions of the masked rows, one per dataset index, in dataset order.

    The first copy is kept. Rows without an index are all kept, first, in the order in which they were added.
    """
    positions = rows.nonzero().squeeze(1)
    values, order = indices[positions].sort(stable=True)
    is_first = torch.ones_like(values, dtype=torch.bool)
    is_first[1:] = (values[1:] != values[:-1]) | (values[1:] == _NO_INDEX)
    return positions[order[is_first]]
