"""Proxy-NCA loss: Movshovitz-Attias et al., ICCV 2017.

"No Fuss Distance Metric Learning using Proxies".

In the notation of Kim et al. 2020 (Eq. 1 to 3), with s(x, p) = -scale |x - p|^2 of unit vectors, for each sample:

    -s(x, p+) + log sum over the negative proxies p- of exp(s(x, p-)),          averaged over the batch.

Scale in Kim et al.'s released code: 32 on the squared distance, that is 64 on the cosine.

pytorch-metric-learning's ProxyNCALoss (2.9), which the released code uses, is another function: its sum includes the
positive proxy, so the pull on a sample is not constant (Eq. 3) but fades, as in Proxy-NCA++. It also takes the
logarithm of a softmax, which is 0 in float32 for the hardest samples, and drops those.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import ProxyLoss


def proxy_nca_loss(similarities: Tensor, labels: Tensor) -> Tensor:
    """Eq. 2 of Kim et al. for each sample: (B,) losses.

    similarities: (B, C), at least 2 classes. labels: (B,).
    """
    own = labels.unsqueeze(1)
    negatives = similarities.scatter(1, own, -torch.inf)
    return torch.logsumexp(negatives, dim=1) - similarities.gather(1, own).squeeze(1)


class ProxyNCALoss(ProxyLoss):
    """Pulls samples to their proxy with constant strength and pushes them from others.

    Args:
        num_classes: C, at least 2; one proxy each. embedding_dim: D.
        scale: factor of the squared distance between unit vectors, above 0.

    Attributes:
        proxies: (C, D) parameter, see `ProxyLoss`.
    """

    def __init__(self, num_classes: int, embedding_dim: int, scale: float = 32.0) -> None:
        super().__init__(num_classes, embedding_dim)
        self.scale = check_number("loss.scale", scale, 0, exclusive=True)
        check_number("num_classes", num_classes, 2)

    def of_similarities(self, similarities: Tensor, labels: Tensor) -> Tensor:
        """Mean of Eq. 2 over the batch."""
        return proxy_nca_loss(self.scale * (2 * similarities - 2), labels).mean()
