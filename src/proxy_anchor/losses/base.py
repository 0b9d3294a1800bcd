"""What all losses but Proxy-Anchor, which stands on its own, have in common."""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import check_int
from proxy_anchor.losses.precision import KeepsPrecision
from proxy_anchor.losses.proxy_anchor import check_range, check_shapes


class MetricLoss(KeepsPrecision):
    """Checks a batch and hands it on in full precision, with autocast off, to `compute`, which a loss defines.

    Args:
        num_classes: C, the number of training classes.
        embedding_dim: D.
        check_labels: look at the range of every batch's labels, which waits for a GPU (as in `ProxyAnchorLoss`).

    Its tensors stay float32 (or float64) under every precision. Raises UsageError for arguments out of range.
    """

    def __init__(self, num_classes: int, embedding_dim: int, *, check_labels: bool = True) -> None:
        super().__init__()
        check_int("num_classes", num_classes, 1)
        check_int("embedding_dim", embedding_dim, 1)
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.check_labels = check_labels

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """embeddings: (B, D) float. labels: (B,) integers in [0, C). Returns a scalar in the precision of the loss.

        Raises UsageError when shapes do not fit or a label is outside the range, naming it.
        """
        check_shapes(embeddings, labels, self.embedding_dim)
        if self.check_labels:
            check_range(labels, self.num_classes)
        own = next((tensor.dtype for tensor in self.parameters()), torch.promote_types(embeddings.dtype, torch.float32))
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.to(own), labels.long())

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss of (B, D) embeddings in float32 or float64 and (B,) int64 labels: a scalar."""
        raise NotImplementedError
