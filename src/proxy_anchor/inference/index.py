"""A set of unit vectors that can be searched, extended, thinned out and saved: exact, or through faiss's approximations.

Up to EXACT_LIMIT vectors every one is compared (`retrieval.search`). Beyond, faiss proposes candidates and their
similarities are then computed exactly, so that only which neighbours are found is approximate, never a similarity.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.retrieval.search import (
    as_rows,
    check_k,
    check_same_dim,
    has_faiss,
    nearest,
    normalise,
    resolve_engine,
)

KINDS = ("auto", "exact", "hnsw", "ivf_pq")
EXACT_LIMIT = 1_000_000  # vectors; above, one query against all takes longer than a page should
HNSW_LIMIT = 4_000_000  # above, building the graph takes hours and the lists of IVF are the better choice
VECTORS_FILE, FAISS_FILE = "embeddings.npy", "index.faiss"

_MIN_CANDIDATES = 200  # proposed by faiss and compared exactly
_TRAINING_VECTORS = 40  # per list, of which faiss asks for at least 39
_WANTED_RECALL = (
    0.95  # of the exact 10 nearest: the effort is doubled until it is reached, or is a quarter of the lists
)
_PROBES = 200  # queries that measure it
_MAX_REMOVED = 0.1  # share of removed vectors above which an approximate index is built anew
_MAX_GROWTH = 2  # and by what factor it may grow until it is


def kind_for(num_vectors: int) -> str:
    """The index for so many vectors: "exact", "hnsw" (Malkov & Yashunin 2016) or "ivf_pq" (Jegou et al. 2011)."""
    if num_vectors <= EXACT_LIMIT:
        return "exact"
    return "hnsw" if num_vectors <= HNSW_LIMIT else "ivf_pq"


class VectorIndex:
    """Vectors under integer ids.

    Args:
        dim: D. kind: one of KINDS; auto is `kind_for` the present size. engine: of exact search, see `resolve_engine`.
        device: where exact search keeps the vectors.

    Attributes:
        ids: (n,) int64, increasing. vectors: (n, D) float32 unit rows. measured_recall: share of the exact 10 nearest
            that an approximate index finds, None while exact.
    """

    def __init__(
        self, dim: int, *, kind: str = "auto", engine: str = "auto", device: str | torch.device = "cpu"
    ) -> None:
        check_choice("kind", kind, KINDS)
        if kind in ("hnsw", "ivf_pq"):
            _require_faiss(f"kind={kind}")
        self.wanted_kind, self.engine, self.device = kind, engine, torch.device(device)
        self.ids = np.empty(0, dtype=np.int64)
        self.vectors = torch.empty(0, dim)
        self.measured_recall: float | None = None
        self._alive = np.empty(0, dtype=bool)  # False: removed, but still in the approximate index
        self._on_device: Tensor | None = None
        self._faiss: Any = None
        self._built_with = 0

    def __len__(self) -> int:
        return int(self._alive.sum())

    @property
    def dim(self) -> int:
        """D."""
        return self.vectors.shape[1]

    @property
    def kind(self) -> str:
        """What searches now: "exact", "hnsw" or "ivf_pq"."""
        return kind_for(len(self)) if self.wanted_kind == "auto" else self.wanted_kind

    def add(self, ids: np.ndarray, vectors: Tensor | np.ndarray) -> None:
        """Add rows (n, D) of any float type under new ids (n,), larger than all there are."""
        rows = as_rows(vectors, "vectors")
        check_same_dim(rows, self.vectors)
        if len(ids) != len(rows) or (len(self.ids) and ids.min() <= self.ids.max()) or (np.diff(ids) <= 0).any():
            raise ValueError("ids must be one per vector, increasing, and larger than those there are")
        unit = normalise(rows, "gallery").float().cpu()
        self._on_device = None
        self.vectors = torch.cat([self.vectors, unit]) if len(self.vectors) else unit
        self.ids = np.concatenate([self.ids, ids.astype(np.int64)])
        self._alive = np.concatenate([self._alive, np.ones(len(ids), dtype=bool)])
        if self._faiss is not None:
            self._faiss.add(unit.numpy())
            if len(self.ids) > _MAX_GROWTH * self._built_with:
                self._faiss = None

    def remove(self, ids: np.ndarray) -> None:
        """Forget these ids; those that are not there are passed over."""
        gone = np.isin(self.ids, ids)
        self._alive[gone] = False
        if self._faiss is None or (~self._alive).mean() > _MAX_REMOVED:
            kept = np.flatnonzero(self._alive)
            self.ids, self.vectors = self.ids[kept], self.vectors[torch.from_numpy(kept)]
            self._alive = np.ones(len(kept), dtype=bool)
            self._faiss = self._on_device = None

    def get(self, ids: np.ndarray) -> Tensor:
        """(n, D) vectors of ids that are there."""
        return self.vectors[torch.from_numpy(np.searchsorted(self.ids, ids))]

    def live(self) -> tuple[np.ndarray, Tensor]:
        """(ids (n,), vectors (n, D)) without what was removed."""
        kept = np.flatnonzero(self._alive)
        return self.ids[kept], self.vectors if len(kept) == len(self.ids) else self.vectors[torch.from_numpy(kept)]

    def search(self, queries: Tensor | np.ndarray, k: int) -> tuple[Tensor, np.ndarray]:
        """The K most similar vectors of each row of `queries` (Q, D): similarities (Q, K) on the CPU, ids (Q, K).

        Raises UsageError when the index is empty, K is larger than it, D differs, or a query holds NaN or infinity.
        """
        if len(self) == 0:
            raise UsageError("the gallery is empty: index some images before searching.")
        rows = as_rows(queries, "queries")
        check_same_dim(rows, self.vectors)
        check_k(k, len(self), exclude_self=False)
        unit = normalise(rows, "query").float()
        if self.kind == "exact":
            similarities, found = self._search_exactly(unit, k)
        else:
            self.build()
            similarities, found = self._search_candidates(unit.cpu(), k)
        return similarities.cpu(), self.ids[found.cpu().numpy()]

    def _search_exactly(self, unit: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self._faiss is not None:  # it has shrunk below the limit, or was removed from
            self._faiss = None
            self.remove(np.empty(0, dtype=np.int64))
        if self._on_device is None:
            self._on_device = self.vectors.to(self.device)
        engine = resolve_engine(self.engine, k, device=self.device, resident=True)
        return nearest(unit.to(self.device), self._on_device, k, engine, exclude_self=False)

    def _search_candidates(self, unit: Tensor, k: int) -> tuple[Tensor, Tensor]:
        removed = int((~self._alive).sum())
        wanted = min(len(self.ids), max(_MIN_CANDIDATES, 4 * k) + min(removed, 4 * k))
        similarities = torch.empty(len(unit), k)
        found = torch.empty(len(unit), k, dtype=torch.int64)
        alive = torch.from_numpy(self._alive)
        for start in range(0, len(unit), 256):  # 256 x 200 x D floats are gathered at a time
            chunk = unit[start : start + 256]
            _, listed = self._faiss.search(chunk.numpy(), wanted)
            candidates = torch.from_numpy(listed)
            gathered = self.vectors[candidates.clamp_min(0)]  # -1 stands where faiss found fewer
            scores = torch.einsum("qd,qcd->qc", chunk, gathered)
            scores[(candidates < 0) | ~alive[candidates.clamp_min(0)]] = -torch.inf
            best = scores.topk(k)
            if torch.isinf(best.values).any():  # more removed, or fewer proposed, than foreseen: compare all
                scores = chunk @ self.vectors.T
                scores[:, ~alive] = -torch.inf
                best, candidates = scores.topk(k), torch.arange(len(self.ids)).expand(len(chunk), -1)
            similarities[start : start + 256] = best.values
            found[start : start + 256] = candidates.gather(1, best.indices)
        return similarities, found

    def build(self) -> None:
        """Make the approximate index if the size asks for one and there is none; prints its measured recall."""
        if self.kind == "exact" or self._faiss is not None:
            return
        _require_faiss(f"{len(self):,} vectors")
        import faiss

        self.remove(np.empty(0, dtype=np.int64))
        kind, n = self.kind, len(self)
        num_lists = max(1, min(int(4 * n**0.5), n // _TRAINING_VECTORS))
        codes = max(each for each in range(1, 65) if self.dim % each == 0 and each <= max(1, self.dim // 2))
        bits = 8 if n >= _TRAINING_VECTORS * 256 else 4  # a codebook of 256 entries needs that many vectors to train
        recipe = "HNSW32_SQ8" if kind == "hnsw" else f"IVF{num_lists},PQ{codes}x{bits}"
        index = faiss.index_factory(self.dim, recipe, faiss.METRIC_INNER_PRODUCT)
        rng = np.random.default_rng(0)
        sample = np.sort(rng.choice(n, min(n, _TRAINING_VECTORS * max(num_lists, 256)), replace=False))
        index.train(self.vectors[torch.from_numpy(sample)].numpy())
        for start in range(0, n, 2**17):
            index.add(self.vectors[start : start + 2**17].numpy())
        self._faiss, self._built_with = index, n
        self._measure(rng, num_lists)

    def _measure(self, rng: np.random.Generator, num_lists: int) -> None:
        """Double the search effort until the recall is good, and say what it is."""
        n = len(self.ids)
        k = min(10, n - 1)
        probes = torch.from_numpy(np.sort(rng.choice(n, min(n, _PROBES), replace=False)))
        unit = self.vectors[probes]
        # Each probe finds itself too: one more is listed, in both searches.
        _, exact = nearest(unit, self.vectors, k + 1, resolve_engine("auto", k + 1), exclude_self=False)
        name, effort = ("efSearch", 64) if self.kind == "hnsw" else ("nprobe", 8)
        limit = 1024 if self.kind == "hnsw" else max(8, num_lists // 4)
        while True:
            self._set_effort(name, effort)
            _, found = self._search_candidates(unit, k + 1)
            hits = (exact[:, :, None] == found[:, None, :]).any(2) & (exact != probes[:, None])
            self.measured_recall = hits.sum().item() / (exact != probes[:, None]).sum().item()
            if self.measured_recall >= _WANTED_RECALL or effort >= limit:
                break
            effort *= 2
        print(
            f"approximate index: {self.kind} over {n:,} vectors, {name} {effort}, finds {100 * self.measured_recall:.1f} % "
            f"of the exact {k} nearest neighbours ({len(probes)} queries)",
            flush=True,
        )

    def _set_effort(self, name: str, effort: int) -> None:
        import faiss

        faiss.ParameterSpace().set_index_parameter(self._faiss, name, effort)

    def save(self, folder: Path) -> None:
        """Write index.faiss (exact: the vectors in a flat index) and, where that does not hold them, embeddings.npy."""
        self.build()
        if (self.kind == "exact" and self._faiss is not None) or not self._alive.all():
            self._faiss = None
            self.remove(np.empty(0, dtype=np.int64))
            self.build()
        if has_faiss():
            import faiss

            index = self._faiss
            if index is None:
                index = faiss.IndexFlatIP(self.dim)
                index.add(self.vectors.numpy())
            faiss.write_index(index, str(folder / FAISS_FILE))
        if self._faiss is not None or not has_faiss():
            np.save(folder / VECTORS_FILE, self.vectors.numpy())

    def load(self, folder: Path, ids: np.ndarray) -> None:
        """Fill an empty index from what `save` wrote, for these ids (n,).

        Raises UsageError when files are missing, damaged, of another size, or need a faiss that is not installed.
        """
        file, dim = folder / FAISS_FILE, self.dim
        index: Any = None
        if file.is_file() and (has_faiss() or not (folder / VECTORS_FILE).is_file()):
            _require_faiss(f"{file}")
            import faiss

            try:
                index = faiss.read_index(str(file))
            except RuntimeError as error:
                raise UsageError(f"{file} is damaged: build the index again.") from error
            if not isinstance(index, faiss.IndexFlat):
                self._faiss, self._built_with = index, len(ids)
        try:
            if (folder / VECTORS_FILE).is_file():
                # Mapped, not read: an approximate search touches few rows. Copy on write, which torch asks for.
                self.vectors = torch.from_numpy(np.load(folder / VECTORS_FILE, mmap_mode="c", allow_pickle=False))
            elif index is not None and self._faiss is None:
                # A tensor once faiss.contrib.torch_utils was imported, which a search on the GPU does.
                self.vectors = torch.as_tensor(index.reconstruct_n(0, index.ntotal))
            else:
                raise UsageError(f"{folder} holds no vectors: build the index again.")
        except (OSError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{folder / VECTORS_FILE} is damaged: build the index again.") from error
        if tuple(self.vectors.shape) != (len(ids), dim) or (index is not None and index.ntotal != len(ids)):
            raise UsageError(f"{folder} lists {len(ids)} images but holds {len(self.vectors)} vectors: build it again.")
        self.ids, self._alive = ids.astype(np.int64), np.ones(len(ids), dtype=bool)


def _require_faiss(what: str) -> None:
    if not has_faiss():
        raise UsageError(
            f"{what}: an index beyond exact search needs faiss; pip install faiss-cpu, or use kind=exact with fewer vectors."
        )
