"""Where images lie relative to each other, in two dimensions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.retrieval.search import as_rows, normalise

METHODS = ("pca", "tsne", "umap")


def embedding_map(embeddings: Tensor | np.ndarray, *, method: str = "pca", seed: int = 0) -> np.ndarray:
    """(N, 2) float64 places in [0, 1] of (N, D) embeddings; one embedding lies in the middle.

    method: "pca" (the two directions of largest variance) or "tsne" (van der Maaten & Hinton 2008, by scikit-learn,
    started from the PCA; some 10 s for 2,000 images on one core) or "umap" (McInnes et al. 2018, by umap-learn, which is not
    among the dependencies). The same seed gives the same map on one machine; t-SNE runs on one thread, because sums over
    several depend on their order.
    Raises UsageError for NaN, or where scikit-learn or umap-learn is missing.
    """
    check_choice("method", method, METHODS)
    rows = normalise(as_rows(embeddings, "embeddings").cpu(), "map")
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(
        centred.T @ centred if len(rows) > rows.shape[1] else centred, full_matrices=False
    )
    axes = directions[:2]
    # A direction has no sign of its own: the largest entry is made positive, so that maps can be compared.
    signs = axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    places = (centred @ (axes * signs).T).numpy()
    if places.shape[1] < 2:
        places = np.concatenate([places, np.zeros((len(places), 2 - places.shape[1]))], axis=1)
    if method == "tsne" and len(rows) > 3:
        places = _tsne(rows.numpy(), places, seed)
    elif method == "umap" and len(rows) > 3:
        places = _umap(rows.numpy(), seed)
    low, high = places.min(0), places.max(0)
    return np.where(high > low, (places - low) / np.where(high > low, high - low, 1), 0.5)


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
    # One job, as a fixed seed asks for: with the default of all cores it warns.
    mapper = UMAP(n_neighbors=neighbours, metric="cosine", init="random", random_state=seed, n_jobs=1)
    return mapper.fit_transform(rows)
