"""What a loss does to each sample: the gradients of Proxy-NCA and Proxy-Anchor, as in Kim et al. 2020, Fig. 2 and 3.

Both losses see a batch through its similarities s(x, p) to the proxies. The gradient in s(x, p) is how strongly x and p are
pulled together (below 0) or pushed apart (above 0). It comes from autograd here; `eq_3` and `eq_6` are the paper's forms.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.losses.proxy_anchor import proxy_anchor_loss
from proxy_anchor.losses.proxy_nca import proxy_nca_loss

LOSSES = ("proxy_nca", "proxy_anchor")


def similarity_gradients(
    loss: str, similarities: Tensor, labels: Tensor, *, alpha: float = 32.0, delta: float = 0.1
) -> Tensor:
    """(B, C) gradients of `loss`, one of LOSSES, in similarities (B, C) with labels (B,), by autograd.

    Proxy-NCA as in Eq. 1, summed over the batch, which has no alpha and no delta. Raises UsageError for another name.
    """
    check_choice("loss", loss, LOSSES)
    leaf = similarities.detach().clone().requires_grad_()
    values = proxy_nca_loss(leaf, labels) if loss == "proxy_nca" else proxy_anchor_loss(leaf, labels, alpha, delta)
    return torch.autograd.grad(values.sum(), leaf)[0]


def eq_3(similarities: Tensor, labels: Tensor) -> Tensor:
    """The gradient of Proxy-NCA, Eq. 3: -1 for the own proxy, a softmax over the others. (B, C) to (B, C)."""
    own = F.one_hot(labels, similarities.shape[1]).bool()
    return torch.softmax(similarities.masked_fill(own, -torch.inf), dim=1).masked_fill(own, -1.0)


def eq_6(similarities: Tensor, labels: Tensor, *, alpha: float = 32.0, delta: float = 0.1) -> Tensor:
    """The gradient of Proxy-Anchor, Eq. 6, term by term (float64: its exponentials are taken as they stand)."""
    own = F.one_hot(labels, similarities.shape[1]).bool()
    pull = torch.exp(-alpha * (similarities - delta)) * own  # h+ of each sample and proxy
    push = torch.exp(alpha * (similarities + delta)) * ~own  # h-
    positive = -alpha * pull / (1 + pull.sum(0)) / own.any(0).sum()
    negative = alpha * push / (1 + push.sum(0)) / similarities.shape[1]
    return positive + negative


def gradient_by_hardness(
    loss: str,
    grid: Tensor,
    others: Tensor,
    *,
    positive: bool,
    alpha: float = 32.0,
    delta: float = 0.1,
) -> Tensor:
    """(G,) gradients of one sample in its similarity to one proxy, as that takes each value of `grid` (G,).

    The batch holds the sample and one more for each of `others` (M,), the similarities of its companions to that proxy.
    positive: all of them are of the proxy's class; otherwise none is: they are of a second class. Of the two other proxies
    the second class's has similarity 0.5 to all of them, and the third's 0. With Proxy-Anchor the companions matter, with
    Proxy-NCA they do not.
    Raises UsageError for similarities outside [-1, 1].
    """
    for name, values in {"grid": grid, "others": others}.items():
        if values.numel() and float(values.abs().max()) > 1:
            raise UsageError(
                f"{name}: expected cosine similarities in [-1, 1], received {float(values.abs().max()):g}."
            )
    found = []
    for value in grid:
        to_proxy = torch.cat([value.view(1), others]).double()  # (1 + M,)
        similarities = torch.stack([to_proxy, torch.full_like(to_proxy, 0.5), torch.zeros_like(to_proxy)], dim=1)
        labels = torch.full((len(to_proxy),), 0 if positive else 1)
        found.append(similarity_gradients(loss, similarities, labels, alpha=alpha, delta=delta)[0, 0])
    return torch.stack(found)
