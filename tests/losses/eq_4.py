"""Eq. 4 of Kim et al. 2020, term by term."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


def cosine(a: Tensor, b: Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def proxy_anchor(
    x: Sequence[Tensor], labels: Sequence[int], proxies: Sequence[Tensor], alpha: float, delta: float
) -> float:
    positive = negative = 0.0
    for number, proxy in enumerate(proxies):
        pull = push = 0.0
        for row, label in zip(x, labels, strict=True):
            if label == number:
                pull += math.exp(-alpha * (cosine(row, proxy) - delta))
            else:
                push += math.exp(alpha * (cosine(row, proxy) + delta))
        positive += math.log(1 + pull)  # 0 for a class without images
        negative += math.log(1 + push)
    return positive / len(set(labels)) + negative / len(proxies)
