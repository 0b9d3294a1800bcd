"""Embeddings made up for tests, and their rankings without any rounding."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from proxy_anchor.retrieval.search import faiss_gpu_works, has_faiss

ENGINES = ["torch", *["faiss_cpu"] * has_faiss(), *["faiss_gpu"] * faiss_gpu_works()]
each_engine = pytest.mark.parametrize("engine", ENGINES)


def rows(count: int, dim: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(seed))


def classes(count: int, number: int, dim: int = 8, noise: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings around a random centre of each class, and labels 0, 1, 2, ... in turn."""
    labels, centres = torch.arange(count) % number, rows(number, dim, seed)
    return centres[labels] + noise * rows(count, dim, seed + 1), labels


def on_circle(*degrees: float) -> np.ndarray:
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@st.composite
def coarse_problems(draw: Callable) -> tuple[np.ndarray, ...]:
    """Small integer queries with many ties, their labels, a gallery of the same vectors, and its labels."""
    dim, count, more = draw(st.integers(1, 4)), draw(st.integers(2, 14)), draw(st.integers(1, 14))
    row = st.lists(st.integers(-1, 1), min_size=dim, max_size=dim)
    x = np.array(draw(st.lists(row, min_size=count, max_size=count)))
    labels = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)))
    return x, labels, np.resize(x[::-1], (more, dim)), np.resize(labels[::-1] + 1, more)


def ranked_hits(x: np.ndarray, labels: np.ndarray, g: np.ndarray, g_labels: np.ndarray) -> list[list[bool]]:
    """Hit or miss, rank by rank, of each small integer vector: sorted by sign(s) * s**2, then by index.

    s**2 = dot**2 / (|a|**2 |b|**2) is a fraction, and |a| is the same for the whole row. `g is x` means self-search.
    """
    hits = []
    for i, a in enumerate(x.tolist()):
        keys = []
        for j, b in enumerate(g.tolist()):
            dot = sum(p * q for p, q in zip(a, b, strict=True))
            if not (g is x and i == j):
                keys.append((-Fraction(dot * abs(dot), sum(q * q for q in b) or 1), j))
        hits.append([bool(g_labels[j] == labels[i]) for _, j in sorted(keys)])
    return hits
