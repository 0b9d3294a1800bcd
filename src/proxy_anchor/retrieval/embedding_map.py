"""Two-dimensional maps of embeddings."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.retrieval.rows import as_rows, normalise

METHODS = ("pca", "tsne", "umap")


def embedding_map(embeddings: Tensor | np.ndarray, *, method: str = "pca", seed: int = 0) -> np.ndarray:
    """Project (N, D) embeddings to (N, 2) float64 positions in [0, 1].

    method: "pca" (the two directions of largest variance), "tsne" (van der Maaten & Hinton 2008, by scikit-learn,
    initialised with the PCA; about 10 s for 2,000 images on one core) or "umap" (McInnes et al. 2018, by umap-learn,
    which is not a dependency). The same seed gives the same map on one machine. t-SNE runs on one thread, because sums
    over several threads depend on their order. A single embedding is at the centre.
    Raises UsageError for NaN, and if scikit-learn or umap-learn is missing.
    """
    check_choice("method", method, METHODS)
    rows = normalise(as_rows(embeddings, "embeddings").cpu(), "map")
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(
        centred.T @ centred if len(rows) > rows.shape[1] else centred, full_matrices=False
    )
    axes = directions[:2]
    # The sign of a direction is arbitrary: the largest entry is made positive, so that maps are comparable.
    signs = axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    positions = (centred @ (axes * signs).T).numpy()
    if positions.shape[1] < 2:
        positions = np.concatenate([positions, np.zeros((len(positions), 2 - positions.shape[1]))], axis=1)
    if method == "tsne" and len(rows) > 3:
        positions = _tsne(rows.numpy(), positions, seed)
    elif method == "umap" and len(rows) > 3:
        positions = _umap(rows.numpy(), seed)
    low, high = positions.min(0), positions.max(0)
    return np.where(high > low, (positions - low) / np.where(high > low, high - low, 1), 0.5)


def _tsne(rows: np.ndarray, start: np.ndarray, seed: int) -> np.ndarray:
    try:
        from sklearn.manifold import TSNE
        from threadpoolctl import threadpool_limits  # a dependency of scikit-learn
    except ImportError as error:
        raise UsageError("method=tsne needs scikit-learn: pip install scikit-learn, or use method=pca.") from error
    spread = start / max(float(start[:, 0].std()), 1e-12) * 1e-4  # as scikit-learn scales its own PCA start
    perplexity = min(30.0, (len(rows) - 1) / 3)
    with threadpool_limits(1):
        return TSNE(init=spread, perplexity=perplexity, random_state=seed).fit_transform(rows.astype(np.float32))


def _umap(rows: np.ndarray, seed: int) -> np.ndarray:
    try:
        from umap import UMAP
    except ImportError as error:
        raise UsageError("method=umap needs umap-learn: pip install umap-learn, or use method=tsne.") from error
    neighbours = min(15, len(rows) - 1)
    # umap-learn warns about a fixed seed with several jobs.
    mapper = UMAP(n_neighbors=neighbours, metric="cosine", init="random", random_state=seed, n_jobs=1)
    return mapper.fit_transform(rows)
