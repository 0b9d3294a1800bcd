"""Rows of embeddings: checks, unit length, rounding."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_int

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def float32_error(dim: int) -> float:
    """Largest error of a float32 similarity of unit vectors, in any summation order.

    Each of the D products takes part in at most D roundings of relative size 2**-24, and by Cauchy-Schwarz the
    products' absolute values add up to at most 1, so the sum is off by at most D * 2**-24 (to first order: hence the
    1 % for the second). Rounding the inputs adds 2 * 2**-24; the rest of the 8 covers rounding in later comparisons.
    """
    return (1.01 * dim + 8) * 2.0**-24


def as_rows(embeddings: Tensor | np.ndarray, name: str) -> Tensor:
    """Convert to a detached (rows, D) floating-point tensor, or raise UsageError."""
    if isinstance(embeddings, np.ndarray):
        # A copy, because torch refuses negative strides and warns about read-only arrays.
        try:
            embeddings = torch.from_numpy(np.array(embeddings))
        except TypeError:  # strings, objects
            raise UsageError(f"{name}: expected a float array, got {embeddings.dtype}.") from None
    if not isinstance(embeddings, Tensor):
        raise UsageError(f"{name}: expected a torch tensor or numpy array, got {type(embeddings).__name__}.")
    dense = embeddings.layout == torch.strided and embeddings.dtype in _FLOATS
    if embeddings.ndim != 2 or 0 in embeddings.shape or not dense:
        kind = f"{embeddings.dtype} ({embeddings.layout}) of shape {tuple(embeddings.shape)}"
        raise UsageError(f"{name}: expected a non-empty, dense (rows, D) float table, got {kind}.")
    return embeddings.detach()


def normalise(rows: Tensor, name: str) -> Tensor:
    """(rows, D) float64 unit vectors; zero rows stay zero.

    Raises UsageError for NaN or infinity. Comparisons with NaN are false, so a metric would count every row as a hit.
    """
    if bad := int((~rows.isfinite()).any(1).sum()):
        raise UsageError(
            f"{bad} of {len(rows)} {name} embeddings hold NaN or infinity; nothing was searched. Look for a diverged "
            "loss or a half-precision overflow in the network."
        )
    unit = rows.double()
    unit = unit / unit.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)  # no overflow in squares
    return unit / unit.norm(dim=1, keepdim=True).clamp_min(0.5)  # the norm is at least 1, or the row is zero


def warn_of_copies(queries: Tensor, gallery: Tensor, first: Tensor) -> None:
    """Warn where nearly every query is in the gallery and finds itself.

    queries: (Q, D), of which 1,000 are looked at. gallery: (N, D). first: (Q,) row of each query's nearest neighbour.
    Entries may differ by 1e-6: an image embedded in another batch is rounded differently. No sign are one query alone,
    and queries that are all nearly equal: those of a collapsed network.
    """
    step = -(-len(queries) // 1000)
    queries, first = queries[::step], first[::step]
    copies = int(((queries - gallery[first]).abs().amax(1) <= 1e-6).sum())
    if copies >= 0.95 * len(queries) and bool(((queries - queries[:1]).abs() > 1e-3).any()):
        warnings.warn(
            "nearly all queries are also rows of the gallery and find themselves first: leave them out of the gallery "
            "(in metrics and search: or pass exclude_self=True).",
            stacklevel=3,
        )


def check_same_dim(queries: Tensor, gallery: Tensor) -> None:
    """Raise UsageError unless both tables have the same D."""
    if queries.shape[1] != gallery.shape[1]:
        raise UsageError(
            f"queries have D={queries.shape[1]} and the gallery D={gallery.shape[1]}: embed both with one network."
        )


def check_k(k: int, gallery_size: int, exclude_self: bool) -> None:
    """Raise UsageError unless 1 <= K <= the number of other rows."""
    check_int("k", k, 1)
    available = gallery_size - exclude_self
    if k > available:
        excluded = " besides the query itself" if exclude_self else ""
        raise UsageError(f"K={k} is larger than the gallery: it has {available} images{excluded}; lower K.")
