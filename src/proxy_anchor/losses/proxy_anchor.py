"""Proxy-Anchor loss: Kim et al., CVPR 2020, Eq. 4 and 5.

"Proxy Anchor Loss for Deep Metric Learning".

The paper's values: alpha 32, delta 0.1, one proxy per class, proxies at 100 x the learning rate of the network.

Differences from the released code; values and gradients are equal wherever the latter is finite:
- log(1 + sum exp) is a log-sum-exp with a zero among its terms (Eq. 5), so it is finite for every alpha;
- similarities and log-sum-exp are float32 (float64 for float64 input) under every precision;
- classes are addressed by index, without a one-hot matrix or a (C, C) buffer.

`proxy_anchor_loss` runs both eagerly and compiled (`compile=true`).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import ProxyLoss

# Excludes a term from a sum of exponentials. With infinity, a class without negatives has a gradient of NaN.
EXCLUDED = -1e30


def proxy_anchor_loss(similarities: Tensor, labels: Tensor, alpha: float, delta: float) -> Tensor:
    """Eq. 4 on cosine similarities (B, C) and labels (B,) in [0, C): a scalar."""
    own = labels.unsqueeze(1)

    # log(1 + sum over positives of exp(-alpha (s - delta))), averaged over the classes in the batch. It is computed for
    # each image; the images of a class share the weight of one term.
    same_class = own == labels  # (B, B)
    share = same_class.sum(1, dtype=similarities.dtype).reciprocal()  # (B,), sums to 1 over the images of a class
    pull = -alpha * (similarities.gather(1, own).squeeze(1) - delta)  # (B,)
    pull = torch.where(same_class, pull, -torch.inf)  # (B, B)
    positive = (log_one_plus_sum_exp(pull, dim=1) * share).sum() / share.sum()

    # log(1 + sum over negatives of exp(alpha (s + delta))), averaged over all classes; the own class is excluded.
    push = (alpha * (similarities + delta)).scatter_(1, own, EXCLUDED)  # (B, C)
    negative = log_one_plus_sum_exp(push, dim=0).mean()

    return positive + negative


def log_one_plus_sum_exp(terms: Tensor, dim: int) -> Tensor:
    """log(1 + sum of exp(terms) along `dim`); finite for every finite term."""
    # Above 40 the 1 is below the precision of float64; torch's default threshold is 20.
    return F.softplus(torch.logsumexp(terms, dim), threshold=40)


class ProxyAnchorLoss(ProxyLoss):
    """Pulls each proxy to its samples and pushes it from others.

    Args:
        num_classes: C, the number of training classes; one proxy each. 1 is allowed: the sum over
            negatives is empty, and training on that class alone makes all embeddings equal.
        embedding_dim: D.
        alpha: scale, above 0 (paper: 32).
        delta: margin on the cosine similarity, at least 0 (paper: 0.1).

    Attributes:
        proxies: (C, D) parameter, see `ProxyLoss`.

    Raises UsageError for arguments out of range.
    """

    def __init__(self, num_classes: int, embedding_dim: int, alpha: float = 32.0, delta: float = 0.1) -> None:
        super().__init__(num_classes, embedding_dim)
        self.alpha = check_number("loss.alpha", alpha, 0, exclusive=True)
        self.delta = check_number("loss.delta", delta, 0)

    def of_similarities(self, similarities: Tensor, labels: Tensor) -> Tensor:
        """Eq. 4 of Kim et al. 2020: a scalar."""
        return proxy_anchor_loss(similarities, labels, self.alpha, self.delta)
