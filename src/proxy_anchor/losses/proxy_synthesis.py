"""Proxy Synthesis: Gu et al., AAAI 2021, arXiv 2103.15454.

"Proxy Synthesis: Learning with Synthetic Classes for Deep Metric Learning".

Interpolated embeddings are samples of further classes, whose proxies are interpolated alike. With one lambda ~
Beta(alpha, alpha) for each batch, x and x' of two classes y and y':

    x~ = lambda x + (1 - lambda) x',    p~ = lambda p_y + (1 - lambda) p_y',    normalised,

mu x B of them, each a class of its own, are appended to the batch and to the proxies; the loss sees all.
The paper's values: alpha 0.4, mu 1. Its released code pairs each row with the one before and expects that they differ
in class; here each is paired with the next row of another class.
Reported on Cars-196 (8 runs): Proxy-NCA 83.3 to 84.2, normalised softmax 83.1 to 84.3.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import check_number
from proxy_anchor.losses.base import ProxyLoss, unit_length
from proxy_anchor.losses.regulariser import Regulariser, partners


class ProxySynthesis(Regulariser):
    """Appends synthetic classes to a batch and to the proxies.

    Args:
        alpha: of the Beta distribution, above 0.
        mu: synthetic embeddings for each one of the batch, in (0, 1].
    """

    loss_type = ProxyLoss

    def __init__(self, alpha: float = 0.4, mu: float = 1.0) -> None:
        super().__init__()
        self.alpha = check_number("regulariser.proxy_synthesis.alpha", alpha, 0, exclusive=True)
        self.mu = check_number("regulariser.proxy_synthesis.mu", mu, 0, maximum=1, exclusive=True)

    def mix(
        self, embeddings: Tensor, labels: Tensor, proxies: Tensor, random: np.random.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B + mu B, D) embeddings, their labels, and (C + mu B, D) proxies, all of unit length."""
        share = random.beta(self.alpha, self.alpha)
        first = torch.arange(int(self.mu * len(labels)), device=labels.device)
        second = partners(labels)[first]
        own, other = labels[first], labels[second]
        rows = torch.cat([embeddings, unit_length(share * embeddings[first] + (1 - share) * embeddings[second])])
        centres = torch.cat([proxies, unit_length(share * proxies[own] + (1 - share) * proxies[other])])
        # A batch of one class has no pairs: its rows are repeated, and further proxies are zero, without gradient.
        alone = own == other
        centres[len(proxies) :].masked_fill_(alone[:, None], 0)
        return rows, torch.cat([labels, torch.where(alone, own, len(proxies) + first)]), centres
