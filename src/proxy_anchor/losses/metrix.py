"""Metrix, mixup for metric learning: Venkataramanan et al., ICLR 2022, arXiv 2106.04990.

"It Takes Two to Tango: Mixup for Deep Metric Learning".

A mixed embedding v = lambda x + (1 - lambda) x' is positive for an anchor to the degree y = lambda y(x) + (1 - lambda)
y(x'), and negative to the degree 1 - y. Both weigh its exponential *inside* the logarithm. For Proxy-Anchor, whose
anchors are the proxies p, with s the cosine:

    mean over p with any y > 0 of log(1 + sum over v of y exp(-alpha (s(v, p) - delta)))
    + mean over all p of log(1 + sum over v of (1 - y) exp(alpha (s(v, p) + delta))),

added to the loss of the plain batch. The paper's values: lambda ~ Beta(2, 2), weight 0.4. It mixes images, feature maps
or embeddings; here `Metrix` mixes embeddings and `MetrixFeatures` pooled features, before the head. One lambda for each
batch, as in the authors' code. That code is for the contrastive loss and mixes all pairs of a positive and a negative;
here each row is mixed with the next one of another class.
Reported for Proxy-Anchor: higher Recall@1 on CUB-200-2011, Cars-196, SOP and In-Shop, the most by feature maps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import unit_length
from proxy_anchor.losses.proxy_anchor import EXCLUDED, ProxyAnchorLoss, log_one_plus_sum_exp
from proxy_anchor.losses.regulariser import Regulariser, partners


def mixed_proxy_anchor_loss(similarities: Tensor, positivity: Tensor, alpha: float, delta: float) -> Tensor:
    """The term for cosine similarities (B, C) and degrees y (B, C) in [0, 1]: a scalar."""
    pull = -alpha * (similarities - delta) + positivity.log().clamp_min(EXCLUDED)
    push = alpha * (similarities + delta) + (1 - positivity).log().clamp_min(EXCLUDED)
    present = (positivity > 0).any(0)
    positive = log_one_plus_sum_exp(pull, dim=0).sum() / present.sum()  # 0 for a proxy without positives
    return positive + log_one_plus_sum_exp(push, dim=0).mean()


class Metrix(Regulariser):
    """Proxy-Anchor of mixed embeddings.

    Args:
        weight: of the term, at least 0.
        beta: parameter of the Beta distribution of lambda, above 0.
    """

    loss_type = ProxyAnchorLoss

    def __init__(self, weight: float = 0.4, beta: float = 2.0) -> None:
        super().__init__(weight)
        self.beta = check_number("regulariser.metrix.beta", beta, 0, exclusive=True)

    def forward(
        self, embeddings: Tensor, labels: Tensor, proxies: Tensor, loss: ProxyAnchorLoss, random: np.random.Generator
    ) -> Tensor:
        """The term of (B, D) embeddings with labels (B,), mixed with each other."""
        share, others = random.beta(self.beta, self.beta), partners(labels)
        mixed = unit_length(share * embeddings + (1 - share) * embeddings[others])
        positivity = mixed.new_zeros(len(labels), len(proxies)).scatter_(1, labels[:, None], share)
        positivity.scatter_add_(1, labels[others][:, None], torch.full_like(positivity[:, :1], 1 - share))
        similarities = mixed @ unit_length(proxies.to(mixed.dtype)).T
        return mixed_proxy_anchor_loss(similarities, positivity, loss.alpha, loss.delta)


class MetrixFeatures(Metrix):
    """As Metrix, of embeddings of mixed features."""

    def forward(  # type: ignore[override]
        self,
        embeddings: Tensor,
        labels: Tensor,
        proxies: Tensor,
        loss: ProxyAnchorLoss,
        random: np.random.Generator,
        features: Tensor,
        head: nn.Linear,
    ) -> Tensor:
        """The term of (B, F) features; the head is linear, so it is applied before mixing."""
        return super().forward(head(features.to(head.weight.dtype)), labels, proxies, loss, random)
