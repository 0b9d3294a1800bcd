"""Nested dimensions: Kusupati et al., NeurIPS 2022, and Roth et al., ICML 2021.

"Matryoshka Representation Learning", arXiv 2205.13147, with tied weights; "Simultaneous Similarity-based
Self-Distillation for Deep Metric Learning" (S2SD), arXiv 2009.08348, between the parts of one embedding.

The first d numbers of an embedding, normalised, are an embedding of their own, for each d of `dims`. With L_d the loss
of the first d numbers of embeddings and proxies, S_d the (B, B) similarities of the former and S those of the whole:

    sum over d of L_d  +  gamma x mean over d of T^2 KL(softmax(S / T), softmax(S_d / T)),       S without gradient,

added to the loss of the whole. Matryoshka: every d has weight 1, gamma 0. S2SD distils into the embedding from wider
heads beside it, with gamma 50 and T 1 in its released command; here the whole embedding is the wider one.
Reported: an embedding of 2,048 numbers cut to a fourteenth at equal accuracy (Matryoshka, ImageNet); S2SD gains
most at few dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.errors import UsageError, check_int, check_number
from proxy_anchor.losses.base import ProxyLoss, unit_length
from proxy_anchor.losses.regulariser import Regulariser


class Nested(Regulariser):
    """The loss of the first d numbers, for several d.

    Args:
        weight: of the term, at least 0.
        dims: each d, below the embedding's D.
        gamma: weight of the distillation, at least 0.
        temperature: T, above 0.
    """

    loss_type = ProxyLoss

    def __init__(
        self,
        weight: float = 1.0,
        dims: Sequence[int] = (64, 128, 256),
        gamma: float = 0.0,
        temperature: float = 1.0,
    ) -> None:
        super().__init__(weight)
        if not isinstance(dims, Sequence):
            raise UsageError(f"regulariser.nested.dims={dims}: expected a list, as in dims=[64].")
        for dim in dims:
            check_int("regulariser.nested.dims", dim, 1)
        self.dims = [*dims]
        self.gamma = check_number("regulariser.nested.gamma", gamma, 0)
        self.temperature = check_number("regulariser.nested.temperature", temperature, 0, exclusive=True)

    def check(self, loss: nn.Module) -> None:
        """Raise UsageError for a loss of another kind, or a d that is not below its D."""
        super().check(loss)
        assert isinstance(loss, ProxyLoss)
        whole = loss.embedding_dim
        if max(self.dims, default=whole) >= whole:
            raise UsageError(
                f"regulariser.nested.dims={self.dims}: expected numbers below embedding_dim={whole}, as in "
                f"regulariser.nested.dims=[{whole // 4},{whole // 2}]."
            )

    def forward(self, embeddings: Tensor, labels: Tensor, proxies: Tensor, loss: ProxyLoss) -> Tensor:
        """The term of (B, D) embeddings with labels (B,)."""
        whole = unit_length(embeddings.detach())
        target = torch.softmax(whole @ whole.T / self.temperature, dim=1)
        total = embeddings.new_zeros(())
        for dim in self.dims:
            rows, centres = unit_length(embeddings[:, :dim]), unit_length(proxies[:, :dim].to(embeddings.dtype))
            total = total + loss.of_similarities(rows @ centres.T, labels)
            if self.gamma:
                found = torch.log_softmax(rows @ rows.T / self.temperature, dim=1)
                distance = self.temperature**2 * F.kl_div(found, target, reduction="batchmean")
                total = total + self.gamma / len(self.dims) * distance
        return total
