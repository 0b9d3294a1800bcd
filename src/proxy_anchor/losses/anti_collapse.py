"""Anti-collapse: Jiang et al. 2024, arXiv 2407.03106.

"Anti-Collapse Loss for Deep Metric Learning Based on Coding Rate Metric".

Maximises the coding rate of the proxies P (D, C), of unit length, so that they span the space evenly:

    R(P) = 1/2 log det(I + D / (C epsilon) P P^T),        the term is -R(P).

The paper takes the proxies of the batch or, as here, all of them; its released code has epsilon 0.5 and adds exp(-R)
to 0.0035 x the proxy loss. Weight 0.01 is ours: R itself keeps its gradient where exp(-R) has vanished.
The paper reports gains on CUB-200-2011, Cars-196 and SOP over Proxy-Anchor and pair losses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import ProxyLoss, unit_length
from proxy_anchor.losses.regulariser import Regulariser


class AntiCollapse(Regulariser):
    """Minus the coding rate of the proxies.

    Args:
        weight: of the term, at least 0.
        epsilon: distortion, above 0.
    """

    loss_type = ProxyLoss

    def __init__(self, weight: float = 0.01, epsilon: float = 0.5) -> None:
        super().__init__(weight)
        self.epsilon = check_number("regulariser.anti_collapse.epsilon", epsilon, 0, exclusive=True)

    def forward(self, embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
        """-R of (C, D) proxies."""
        unit = unit_length(proxies)
        count, dim = unit.shape
        gram = unit @ unit.T if count < dim else unit.T @ unit  # both have the same determinant
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        return -torch.logdet(identity + dim / (count * self.epsilon) * gram) / 2
