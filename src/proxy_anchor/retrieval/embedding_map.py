"""Two-dimensional maps of embeddings."""

from __future__ import annotations

import numpy as np
from sklearn.decomposition import PCA
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.retrieval.rows import as_rows, normalise

_ROUNDING = 1e-6  # places of unit vectors that are closer than this are equal
METHODS = ("pca", "tsne", "umap")


def embedding_map(embeddings: Tensor | np.ndarray, *, method: str = "pca", seed: int = 0) -> np.ndarray:
    """Project (N, D) embeddings to (N, 2) float64 positions in [0, 1].

    method: "pca" (the two directions of largest variance), "tsne" (van der Maaten & Hinton 2008, by scikit-learn,
    initialised with the PCA; about 10 s for 2,000 images on one core) or "umap" (McInnes et al. 2018, by umap-learn,
    which is not a dependency). The same seed gives the same map on one machine. t-SNE runs on one thread, because sums
    over several threads depend on their order. Of fewer than 4 images all methods show the PCA; equal embeddings, or a
    single one, are at the centre.
    Raises UsageError for NaN, and if umap-learn is missing.
    """
    check_choice("method", method, METHODS)
    rows = normalise(as_rows(embeddings, "embeddings").cpu(), "map").numpy()
    with np.errstate(invalid="ignore"):  # scikit-learn divides by the total variance, which may be 0
        positions = PCA(min(2, *rows.shape), svd_solver="full").fit_transform(rows)
    positions = np.pad(positions, ((0, 0), (0, 2 - positions.shape[1])))
    if len(rows) > 3 and np.ptp(positions) > _ROUNDING:
        if method == "tsne":
            start = positions / positions[:, 0].std() * 1e-4  # as scikit-learn scales its own PCA
            tsne = TSNE(init=start, perplexity=min(30.0, (len(rows) - 1) / 3), random_state=seed)
            with threadpool_limits(1):
                positions = tsne.fit_transform(rows.astype(np.float32))
        elif method == "umap":
            positions = _umap(rows, seed)
    low, spread = positions.min(0), np.ptp(positions, axis=0)
    wide = spread > _ROUNDING
    return np.where(wide, (positions - low) / np.where(wide, spread, 1), 0.5)


def _umap(rows: np.ndarray, seed: int) -> np.ndarray:
    try:
        from umap import UMAP
    except ImportError as error:
        raise UsageError("method=umap needs umap-learn: pip install umap-learn, or use method=tsne.") from error
    # umap-learn warns about a fixed seed with several jobs.
    mapper = UMAP(n_neighbors=min(15, len(rows) - 1), metric="cosine", init="random", random_state=seed, n_jobs=1)
    return mapper.fit_transform(rows)
