"""Stopping before a number that is not finite spoils the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import AgreedError
from proxy_anchor.training.distributed import reduce_max, world_size
from proxy_anchor.utils import HostCopy


class NotFinite(AgreedError):
    """A loss or gradient that is not finite."""


class FiniteGuard:
    """Looks at the loss and the gradient's norm of every step.

    On a GPU the answer is copied to the host while other work is queued and read a step later, so that looking costs no
    waiting; until then a fused optimizer, given `show`'s answer, leaves the weights alone. Of several processes all get the
    answer that one has: they stop after the same step, and none waits for another that has stopped.
    """

    def __init__(self) -> None:
        self._where = ""
        self._shown: HostCopy | None = None  # (2,) whether they are bad: loss, gradient

    def show(self, where: str, loss_finite: Tensor, norm: Tensor) -> Tensor:
        """Remember a step's numbers; returns a () float on their device: 1 if one of them is not finite, else 0.

        where: names the step. loss_finite: () bool. norm: () float, of all gradients.
        """
        bad = ~torch.stack([loss_finite, torch.isfinite(norm)])
        if world_size() > 1:
            bad = reduce_max(bad.int())
        self._where = where
        self._shown = HostCopy(bad)
        return bad.any().float()

    def check(self) -> None:
        """Raise NotFinite if the step that was shown last had a number that is not finite."""
        loss_bad, gradient_bad = (False, False) if self._shown is None else self._shown.get().tolist()
        if loss_bad:
            raise NotFinite(
                f"the loss is not finite {self._where}, and no step was taken on it: lower optimizer.lr (or loss.alpha), or "
                "train with trainer.precision=32."
            )
        if gradient_bad:
            raise NotFinite(
                f"a gradient is not finite {self._where} although the loss is, and no step was taken on it: lower "
                "optimizer.lr, or train with trainer.precision=32."
            )
