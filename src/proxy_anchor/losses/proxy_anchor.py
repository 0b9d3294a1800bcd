"""Proxy-Anchor loss: Kim et al., "Proxy Anchor Loss for Deep Metric Learning", CVPR 2020, Eq. 4 and 5.

The paper's values: alpha 32, delta 0.1, one proxy per class, proxies at 100 x the learning rate of the network.

Where the released code and this file differ, with equal values and gradients wherever the former is finite:
- log(1 + sum exp) is computed as a log-sum-exp with a zero among its terms (Eq. 5), so it is finite for every alpha;
- similarities and log-sum-exp are float32 (float64 for float64 input) under every precision;
- classes are addressed by index; no one-hot matrix and no (C, C) buffer is made.

`proxy_anchor_loss` is what runs, eager or compiled (`compile=true`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.errors import UsageError, check_int, check_number
from proxy_anchor.losses.precision import KeepsPrecision


def unit_length(vectors: Tensor) -> Tensor:
    """Rows of (N, D) scaled to length 1 in float32 or better; a zero row stays zero and keeps a finite gradient."""
    vectors = vectors if vectors.dtype == torch.float64 else vectors.float()
    # The epsilon stands inside the root, as in the released code: the norm of a zero vector has no gradient.
    return vectors * torch.rsqrt(vectors.square().sum(dim=1, keepdim=True) + 1e-12)


def check_shapes(embeddings: Tensor, labels: Tensor, dim: int) -> None:
    """Raise UsageError unless embeddings are (B, D) and labels (B,) integers; costs no look at the device."""
    if embeddings.ndim != 2 or embeddings.shape[1] != dim or labels.shape != embeddings.shape[:1]:
        raise UsageError(
            f"expected embeddings (B, {dim}) and labels (B,), received {tuple(embeddings.shape)} and "
            f"{tuple(labels.shape)}."
        )
    if embeddings.shape[0] == 0:
        raise UsageError("the batch is empty: the loss needs at least one embedding.")
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise UsageError(f"labels are {labels.dtype}; pass class indices as integers (labels.long()).")


def check_range(labels: Tensor, num_classes: int) -> None:
    """Raise UsageError for a label outside [0, C), naming the first."""
    outside = (labels < 0) | (labels >= num_classes)
    if bool(outside.any()):
        raise UsageError(
            f"label {int(labels[outside][0])} is outside [0, {num_classes}); number the classes 0 to C - 1 without gaps."
        )


# Excludes a term from a sum of exponentials. Not infinity: a class without negatives would have a gradient of NaN.
_EXCLUDED = -1e30


def proxy_anchor_loss(similarities: Tensor, labels: Tensor, alpha: float, delta: float) -> Tensor:
    """Eq. 4 on cosine similarities (B, C) and labels (B,) in [0, C); returns a scalar."""
    own = labels.unsqueeze(1)

    # log(1 + sum over positives of exp(-alpha (s - delta))), for the classes present in the batch: once per image, and the
    # images of a class share its term.
    same_class = own == labels  # (B, B)
    share = same_class.sum(1, dtype=similarities.dtype).reciprocal()  # (B,), sums to 1 over the images of a class
    pull = -alpha * (similarities.gather(1, own).squeeze(1) - delta)  # (B,)
    pull = torch.where(same_class, pull, -torch.inf)  # (B, B)
    positive = (log_one_plus_sum_exp(pull, dim=1) * share).sum() / share.sum()

    # log(1 + sum over negatives of exp(alpha (s + delta))), for all classes: the own class is left out by index.
    push = (alpha * (similarities + delta)).scatter_(1, own, _EXCLUDED)  # (B, C)
    negative = log_one_plus_sum_exp(push, dim=0).mean()

    return positive + negative


def log_one_plus_sum_exp(terms: Tensor, dim: int) -> Tensor:
    """log(1 + sum of exp(terms) along `dim`); finite for every finite term."""
    # From 40 on the 1 is below the precision of float64; torch's threshold is 20.
    return F.softplus(torch.logsumexp(terms, dim), threshold=40)


def make_proxies(num_classes: int, embedding_dim: int) -> nn.Parameter:
    """(C, D) proxies, drawn as in the released code: their norm sets how fast they turn, so all losses start with this one."""
    proxies = nn.Parameter(torch.empty(num_classes, embedding_dim))
    nn.init.kaiming_normal_(proxies, mode="fan_out")
    return proxies


class ProxyAnchorLoss(KeepsPrecision):
    """Pulls each class's proxy to its samples and pushes it from all others, weighted by relative hardness.

    Args:
        num_classes: C, the number of training classes; one proxy each.
        embedding_dim: D.
        alpha: scale, above 0 (paper: 32).
        delta: margin on the cosine similarity, at least 0 (paper: 0.1).
        check_labels: look at the range of every batch's labels. On a GPU this waits for the device; a caller that has checked its
            whole label map once turns it off.

    Attributes:
        proxies: (C, D) parameter, kept in float32 (or float64) under every precision. Only its direction matters to
            the loss, but its norm sets how fast the proxies turn.

    Raises UsageError for arguments out of range.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        alpha: float = 32.0,
        delta: float = 0.1,
        *,
        check_labels: bool = True,
    ) -> None:
        super().__init__()
        check_int("num_classes", num_classes, 1)
        check_int("embedding_dim", embedding_dim, 1)
        check_number("loss.alpha", alpha, 0, exclusive=True)
        check_number("loss.delta", delta, 0)
        self.num_classes, self.embedding_dim = num_classes, embedding_dim
        self.alpha, self.delta = float(alpha), float(delta)
        self.check_labels = check_labels
        self.proxies = make_proxies(num_classes, embedding_dim)

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Eq. 4 of Kim et al. 2020.

        embeddings: (B, D) float, need not be normalised. labels: (B,) integers in [0, C). Returns a scalar in float32
        (float64 if embeddings or proxies are). Raises UsageError when shapes do not fit or a label is outside
        the range, naming it.
        """
        check_shapes(embeddings, labels, self.embedding_dim)
        if self.check_labels:
            check_range(labels, self.num_classes)
        dtype = torch.promote_types(embeddings.dtype, self.proxies.dtype)
        with torch.autocast(embeddings.device.type, enabled=False):
            similarities = unit_length(embeddings.to(dtype)) @ unit_length(self.proxies.to(dtype)).T
            return proxy_anchor_loss(similarities, labels.long(), self.alpha, self.delta)

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        return f"{self.num_classes}, {self.embedding_dim}, alpha={self.alpha:g}, delta={self.delta:g}"
