"""Ranked List Loss: Wang et al., CVPR 2019.

"Ranked List Loss for Deep Metric Learning".

For each query, with d the distance of unit vectors, it keeps the positives outside a ball of radius alpha - m and the
negatives inside a ball of radius alpha:

    L_P = mean over kept positives of d - (alpha - m)
    L_N = sum over kept negatives of w (alpha - d) / sum of w,      w = exp(temperature (alpha - d))
    (1 - balance) L_P + balance L_N,                                averaged over the batch.

The paper's values: alpha 1.2, m 0.4, temperature 10, balance 1/2 (both parts alike).

pytorch-metric-learning's RankedListLoss (2.9) differentiates through the weights, which are constants in the paper.
With their derivative, a kept negative that is easier than the weighted mean by more than 1 / temperature is *pulled
towards* the query.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import MetricLoss, unit_length


class RankedListLoss(MetricLoss):
    """Keeps each class inside a ball and others outside, with weights by hardness.

    Args:
        num_classes: C. embedding_dim: D.
        alpha: radius outside which negatives do not count, in (0, 2].
        m: difference of the two radii, in [0, alpha].
        temperature: of the negatives' weights, at least 0 (0: equal weights).
        balance: weight of the negative part, in [0, 1].
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        alpha: float = 1.2,
        m: float = 0.4,
        temperature: float = 10.0,
        balance: float = 0.5,
    ) -> None:
        super().__init__(num_classes, embedding_dim)
        self.alpha = check_number("loss.alpha", alpha, 0, maximum=2, exclusive=True)
        self.m = check_number("loss.m", m, 0, maximum=alpha)
        self.temperature = check_number("loss.temperature", temperature, 0)
        self.balance = check_number("loss.balance", balance, 0, maximum=1)

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch of (B, D) embeddings with labels (B,).

        A query without kept pairs counts as 0.
        """
        unit = unit_length(embeddings)
        distances = (2 - 2 * unit @ unit.T).clamp(min=1e-12).sqrt()  # the root of 0 has no gradient
        same = labels.unsqueeze(1) == labels.unsqueeze(0)
        others = ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)

        far = same & others & (distances > self.alpha - self.m)
        positive = ((distances - (self.alpha - self.m)) * far).sum(1) / far.sum(1).clamp(min=1)

        near = ~same & (distances < self.alpha)
        # A softmax over the kept ones; the weights are constants.
        logits = (self.temperature * (self.alpha - distances.detach())).masked_fill(~near, -torch.inf)
        weights = torch.softmax(logits, dim=1).masked_fill(~near, 0.0)  # NaN in a row without kept negatives
        negative = ((self.alpha - distances) * weights).sum(1)

        return ((1 - self.balance) * positive + self.balance * negative).mean()
