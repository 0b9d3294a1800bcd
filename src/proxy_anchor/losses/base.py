"""Base classes of the losses: checks, precision, proxies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from proxy_anchor.errors import UsageError, check_int


def unit_length(vectors: Tensor) -> Tensor:
    """Normalise the rows of (N, D) in float32 or float64.

    A zero row stays zero and keeps a finite gradient.
    """
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    # The epsilon is inside the root, as in the released code: the norm of a zero vector has no gradient.
    return vectors * torch.rsqrt(vectors.square().sum(dim=1, keepdim=True) + 1e-12)


class MetricLoss(nn.Module):
    """Checks a batch and calls `compute`, which a loss defines, in full precision.

    Args:
        num_classes: C, the number of training classes.
        embedding_dim: D.

    Attributes:
        check_labels: whether to check the range of every batch's labels, which waits for the GPU. A caller that has
            checked its whole label map sets it to False, and one that maps over labels with torch.func.vmap has to.

    Parameters and buffers stay float32 (or float64) under every precision. Raises UsageError for arguments out of
    range.
    """

    check_labels = True

    def __init__(self, num_classes: int, embedding_dim: int) -> None:
        super().__init__()
        check_int("num_classes", num_classes, 1)
        check_int("embedding_dim", embedding_dim, 1)
        self.num_classes, self.embedding_dim = num_classes, embedding_dim

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: None = None,
        ref_emb: None = None,
        ref_labels: None = None,
    ) -> Tensor:
        """The loss of a batch, with autocast off.

        embeddings: (B, D) float, need not be normalised. labels: (B,) integers in [0, C). indices_tuple, ref_emb,
        ref_labels: None; wrappers of pytorch-metric-learning pass them. Returns a scalar in float32 (float64 if
        embeddings or parameters are). Raises UsageError when shapes do not fit or a label is out of range.
        """
        if any(each is not None for each in (indices_tuple, ref_emb, ref_labels)):
            raise UsageError(
                f"{type(self).__name__} takes embeddings and labels alone: leave out indices_tuple, ref_emb and "
                "ref_labels. A miner is an argument of PMLLoss (loss=pml)."
            )
        self._check(embeddings, labels)
        own = next((tensor.dtype for tensor in self.parameters()), torch.float32)
        with torch.autocast(embeddings.device.type, enabled=False):
            return self.compute(embeddings.to(torch.promote_types(embeddings.dtype, own)), labels.long())

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar, of float32 or float64 (B, D) embeddings.

        labels: (B,) int64.
        """
        raise NotImplementedError

    def _check(self, embeddings: Tensor, labels: Tensor) -> None:
        dim = self.embedding_dim
        if embeddings.ndim != 2 or embeddings.shape[1] != dim or labels.shape != embeddings.shape[:1]:
            raise UsageError(
                f"expected embeddings (B, {dim}) and labels (B,), received {tuple(embeddings.shape)} and "
                f"{tuple(labels.shape)}."
            )
        if embeddings.shape[0] == 0:
            raise UsageError("the batch is empty: the loss needs at least one embedding.")
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise UsageError(f"labels are {labels.dtype}; pass class indices as integers (labels.long()).")
        if self.check_labels:
            outside = (labels < 0) | (labels >= self.num_classes)
            if bool(outside.any()):
                raise UsageError(
                    f"label {int(labels[outside][0])} is outside [0, {self.num_classes}); number the classes 0 to "
                    "C - 1 without gaps."
                )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            """Follow `.to(device)` and `.double()`, but not `.half()` and `.bfloat16()`."""
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)


class ProxyLoss(MetricLoss):
    """A loss with one learnable proxy per class.

    Attributes:
        proxies: (C, D) parameter. Only its direction matters to the loss, but its norm sets how fast proxies rotate.
    """

    def __init__(self, num_classes: int, embedding_dim: int) -> None:
        super().__init__(num_classes, embedding_dim)
        # As in the released code; all losses use this initialisation, because of the norm.
        self.proxies = nn.Parameter(torch.empty(num_classes, embedding_dim))
        nn.init.kaiming_normal_(self.proxies, mode="fan_out")

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """`of_similarities` of (B, D) embeddings to the proxies."""
        return self.of_similarities(unit_length(embeddings) @ unit_length(self.proxies.to(embeddings.dtype)).T, labels)

    def of_similarities(self, similarities: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar, of cosine similarities (B, C') to any number of proxies.

        labels: (B,) int64 in [0, C').
        """
        raise NotImplementedError
