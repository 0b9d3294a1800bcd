"""Regularisers: terms beside the loss, and batches that are mixed before it.

Everything is computed on the global batch, on every rank alike, so it is exact on several ranks as the loss is (see
training/distributed.py). Random numbers come from one generator, which has the same state on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from proxy_anchor.errors import UsageError, check_number
from proxy_anchor.losses.base import ProxyLoss, unit_length


class Regulariser(nn.Module):
    """A term that is added to the loss of a batch, times `weight`.

    `forward(embeddings, labels, proxies)` returns a scalar. embeddings: (B, D) of the global batch, of unit length.
    labels: (B,). proxies: the parameter of the loss, (C, D), or (C M, D) for M per class; None for a loss without. It
    may name further arguments: loss (the module), random (a numpy Generator, in the same state on every rank), features
    ((B, F), pooled, before the head) and head (features to embeddings that are not normalised).

    A regulariser that has `mix(embeddings, labels, proxies, random)` returns the batch and the proxies that the loss
    sees instead, of unit length; further labels belong to further proxies. Its forward, if any, sees the given ones.

    Args:
        weight: factor of the term, at least 0.

    Attributes:
        loss_type: the kind of loss that it can be added to; a kind of `ProxyLoss` where it has `mix`.
    """

    loss_type: type[nn.Module] = nn.Module
    mix: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = check_number("regulariser weight", weight, 0)

    def check(self, loss: nn.Module) -> None:
        """Raise UsageError for a loss that it cannot be added to."""
        if not isinstance(loss, self.loss_type):
            raise UsageError(
                f"regulariser {type(self).__name__} needs a {self.loss_type.__name__} (for example "
                f"loss=proxy_anchor), received {type(loss).__name__}: leave it out, or choose another loss."
            )


def wants(regulariser: nn.Module) -> set[str]:
    """Which further arguments of `Regulariser` its forward names."""
    return {*inspect.signature(regulariser.forward).parameters} & {"features", "head", "loss", "random"}


def regularised_loss(
    loss: nn.Module,
    regularisers: Mapping[str, Regulariser],
    embeddings: Tensor,
    labels: Tensor,
    *,
    random: np.random.Generator,
    features: Tensor | None = None,
    head: nn.Module | None = None,
    compute: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """{"loss": of the (mixed) batch, NAME: weight x term}, scalars in float32 or float64.

    embeddings, labels, features, head, random: see `Regulariser`. compute: the compiled loss, for a batch that is not
    mixed.
    """
    with torch.autocast(embeddings.device.type, enabled=False):
        proxies = getattr(loss, "proxies", None)
        if mixes := [each.mix for each in regularisers.values() if each.mix is not None]:
            assert isinstance(loss, ProxyLoss)
            rows, classes, centres = unit_length(embeddings), labels, unit_length(loss.proxies)
            for mix in mixes:
                rows, classes, centres = mix(rows, classes, centres, random)
            terms = {"loss": loss.of_similarities(rows @ centres.to(rows.dtype).T, classes)}
        else:
            terms = {"loss": (compute or loss)(embeddings, labels)}
        given = {"features": features, "head": head, "loss": loss, "random": random}
        for name, each in regularisers.items():
            if type(each).forward is not Regulariser.forward:
                more = {key: given[key] for key in wants(each)}
                terms[name] = each.weight * each(embeddings, labels, proxies, **more)
    return terms


def partners(labels: Tensor) -> Tensor:
    """(B,) index of the next row of another class, cyclically; itself in a batch of one class."""
    count = len(labels)
    order = (torch.arange(count, device=labels.device)[:, None] + torch.arange(count, device=labels.device)) % count
    first = (labels[order] != labels[:, None]).int().argmax(1, keepdim=True)
    return order.gather(1, first).squeeze(1)
