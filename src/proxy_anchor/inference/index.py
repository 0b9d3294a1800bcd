"""Search, addition, removal and storage of unit vectors with integer ids.

An index of faiss finds the neighbours; their similarities are computed exactly from the vectors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.retrieval.rows import as_rows, check_k, check_same_dim, normalise, warn_of_copies
from proxy_anchor.retrieval.search import has_faiss, nearest, resolve_engine

VECTORS_FILE, FAISS_FILE = "embeddings.npy", "index.faiss"


class VectorIndex:
    """Unit vectors with integer ids.

    Args:
        dim: D.
        kind: "exact", or a string of `faiss.index_factory` ("HNSW32", "IVF1024,PQ32").
        engine: of exact search, see `resolve_engine`.
        device: of the vectors in exact search.

    Attributes:
        ids: (n,) int64, increasing.
        vectors: (n, D) float32.

    Raises:
        UsageError: when faiss is needed and not installed, or does not accept `kind`.
    """

    def __init__(
        self, dim: int, *, kind: str = "exact", engine: str = "auto", device: str | torch.device = "cpu"
    ) -> None:
        self.dim, self.kind, self.engine, self.device = dim, str(kind), engine, torch.device(device)
        self._set(np.empty(0), torch.empty(0, dim))
        if self.kind != "exact":
            self._empty_faiss()  # refuses an unknown kind before an image is read

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: np.ndarray, vectors: Tensor | np.ndarray) -> None:
        """Add rows (n, D) with increasing new ids (n,)."""
        rows = as_rows(vectors, "vectors")
        check_same_dim(rows, self.vectors)
        unit = normalise(rows, "gallery").float().cpu()
        self._set(np.concatenate([self.ids, ids]), torch.cat([self.vectors, unit]) if len(self) else unit)

    def remove(self, ids: np.ndarray) -> None:
        """Remove these ids; unknown ones are ignored."""
        kept = np.flatnonzero(~np.isin(self.ids, ids))
        if len(kept) < len(self):
            self._set(self.ids[kept], self.vectors[torch.from_numpy(kept)])

    def _set(self, ids: np.ndarray, vectors: Tensor) -> None:
        self.ids, self.vectors = ids.astype(np.int64), vectors
        self._on_device: Tensor | None = None
        self._faiss: Any = None

    def get(self, ids: np.ndarray) -> Tensor:
        """(n, D) vectors of present ids."""
        return self.vectors[torch.from_numpy(np.searchsorted(self.ids, ids))]

    def search(self, queries: Tensor | np.ndarray, k: int) -> tuple[Tensor, np.ndarray]:
        """(Q, K) similarities on the CPU and (Q, K) ids of the nearest vectors.

        Raises UsageError when the index is empty, K is larger than it, D differs, or a query holds NaN or infinity.
        """
        if len(self) == 0:
            raise UsageError("the gallery is empty: index some images before searching.")
        rows = as_rows(queries, "queries")
        check_same_dim(rows, self.vectors)
        check_k(k, len(self), exclude_self=False)
        unit = normalise(rows, "query").float()
        similarities, found = self._search_exactly(unit, k) if self.kind == "exact" else self._search_faiss(unit, k)
        found = found.cpu()
        warn_of_copies(unit.cpu(), self.vectors, found[:, 0])
        return similarities.cpu(), self.ids[found.numpy()]

    def _search_exactly(self, unit: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if self._on_device is None:
            self._on_device = self.vectors.to(self.device)
        engine = resolve_engine(self.engine, k, device=self.device, resident=True)
        return nearest(unit.to(self.device), self._on_device, k, engine, exclude_self=False)

    def _search_faiss(self, unit: Tensor, k: int) -> tuple[Tensor, Tensor]:
        self.build()
        unit = unit.cpu()
        found = torch.from_numpy(self._faiss.search(unit.numpy(), k)[1])
        similarities = torch.stack([self.vectors[listed] @ query for query, listed in zip(unit, found, strict=True)])
        similarities, order = similarities.sort(dim=1, descending=True, stable=True)
        found = found.gather(1, order)
        short = (found < 0).any(1)  # faiss visited fewer than K vectors
        if short.any():
            similarities[short], found[short] = (each.cpu() for each in self._search_exactly(unit[short], k))
        return similarities, found

    def build(self) -> None:
        """Build the index of faiss if it is missing; UsageError on failure."""
        if self.kind == "exact" or self._faiss is not None:
            return
        index, vectors = self._empty_faiss(), self.vectors.numpy()
        try:
            index.train(vectors)
            index.add(vectors)
        except RuntimeError as error:
            raise UsageError(
                f"kind={self.kind}: faiss cannot build it from {len(self):,} vectors ({_reason(error)}); "
                "use kind=exact."
            ) from error
        self._faiss = index

    def _empty_faiss(self) -> Any:
        if not has_faiss():
            raise UsageError(f"kind={self.kind}: faiss is not installed; pip install faiss-cpu, or use kind=exact.")
        import faiss

        try:
            return faiss.index_factory(self.dim, self.kind, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise UsageError(
                f"kind={self.kind}: expected exact, or a string of faiss.index_factory for D={self.dim}, such as "
                f"HNSW32 ({_reason(error)})."
            ) from error

    def save(self, folder: Path) -> None:
        """Write embeddings.npy and, unless the search is exact, index.faiss."""
        np.save(folder / VECTORS_FILE, self.vectors.numpy())
        if self.kind != "exact":
            import faiss

            self.build()
            faiss.write_index(self._faiss, str(folder / FAISS_FILE))

    def load(self, folder: Path, ids: np.ndarray) -> None:
        """Fill an empty index with ids (n,) from the files of `save`.

        Raises:
            UsageError: when files are missing, damaged or of another size.
        """
        file = folder / VECTORS_FILE
        try:
            # Memory-mapped: an approximate search reads few rows. Copy-on-write: torch needs a writable array.
            self._set(ids, torch.from_numpy(np.load(file, mmap_mode="c", allow_pickle=False)))
            if self.kind != "exact":
                import faiss

                file = folder / FAISS_FILE
                self._faiss = faiss.read_index(str(file))
        except (OSError, ValueError, RuntimeError, EOFError, TypeError) as error:
            raise UsageError(f"{file} is missing or damaged: build the index again.") from error
        if tuple(self.vectors.shape) != (len(ids), self.dim) or (self._faiss and self._faiss.ntotal != len(ids)):
            raise UsageError(f"{folder} lists {len(ids)} images but holds {len(self.vectors)} vectors: build it again.")


def _reason(error: Exception) -> str:
    """The message of faiss on one line, without file and function."""
    return " ".join(str(error).split()).rpartition(": ")[2]
