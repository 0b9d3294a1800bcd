"""Threshold-consistent margin (TCM): Zhang et al., ICLR 2024.

"Threshold-Consistent Margin Loss for Open-World Deep Metric Learning", arXiv 2307.04047.

One pair of margins on the cosine s for all classes, so that one threshold serves all:

    mean of (m+ - s) over pairs of one class with s <= m+  +  mean of (s - m-) over pairs of two with s >= m-,

each part 0 without such pairs. The paper's values: m+ 0.9, m- 0.5, both parts and the term with weight 1. It reports
a lower OPIS (see `retrieval.threshold`) at the same or a better Recall@1 on four data sets, iNaturalist among them.

pytorch-metric-learning's ThresholdConsistentMarginLoss (2.9) is the same function; it copies the embeddings of every
pair, B^2 D numbers, and waits for the GPU.
"""

from __future__ import annotations

from torch import Tensor

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import unit_length
from proxy_anchor.losses.regulariser import Regulariser


class ThresholdConsistentMargin(Regulariser):
    """Hinges on the hard pairs of a batch, with the same margins for every class.

    Args:
        weight: of the term, at least 0.
        positive_margin, negative_margin: m+ and m-, in [-1, 1].
    """

    def __init__(self, weight: float = 1.0, positive_margin: float = 0.9, negative_margin: float = 0.5) -> None:
        super().__init__(weight)
        self.positive_margin = check_number("regulariser.tcm.positive_margin", positive_margin, -1, maximum=1)
        self.negative_margin = check_number("regulariser.tcm.negative_margin", negative_margin, -1, maximum=1)

    def forward(self, embeddings: Tensor, labels: Tensor, proxies: Tensor | None) -> Tensor:
        """The term of (B, D) embeddings with labels (B,)."""
        unit = unit_length(embeddings)
        similarities = unit @ unit.T
        same = labels[:, None] == labels
        below, above = self.positive_margin - similarities, similarities - self.negative_margin
        return _mean(below, (same & (below >= 0)).triu(1)) + _mean(above, (~same & (above >= 0)).triu(1))


def _mean(values: Tensor, kept: Tensor) -> Tensor:
    return values.masked_fill(~kept, 0).sum() / kept.sum().clamp_min(1)
