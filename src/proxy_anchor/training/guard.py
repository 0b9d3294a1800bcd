"""Stopping before a number that is not finite spoils the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import UsageError


class NotFinite(UsageError):
    """A loss or gradient that is not finite."""


class FiniteGuard:
    """Looks at the loss and the gradient's norm of every step.

    On a GPU the answer is copied to the host while other work is queued and read a step later, so that looking costs no
    waiting; until then a fused optimizer, given `show`'s answer, leaves the weights alone.
    """

    def __init__(self) -> None:
        self._where = ""
        self._flags: Tensor | None = None  # (2,) bool on the host: loss, gradient
        self._copied: torch.cuda.Event | None = None

    def show(self, where: str, loss_finite: Tensor, norm: Tensor) -> Tensor:
        """Remember a step's numbers; returns a () float on their device: 1 if one of them is not finite, else 0.

        where: names the step. loss_finite: () bool. norm: () float, of all gradients.
        """
        flags = torch.stack([loss_finite, torch.isfinite(norm)])
        self._where = where
        if flags.is_cuda:
            self._flags = torch.empty(2, dtype=torch.bool, pin_memory=True).copy_(flags, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._flags = flags
        return 1.0 - flags.all().float()

    def check(self) -> None:
        """Raise NotFinite if the step that was shown last had a number that is not finite."""
        if self._flags is None:
            return
        if self._copied is not None:
            self._copied.synchronize()
        loss_finite, gradient_finite = self._flags.tolist()
        if not loss_finite:
            raise NotFinite(
                f"the loss is not finite {self._where}, and no step was taken on it: lower optimizer.lr (or loss.alpha), or "
                "train with trainer.precision=32."
            )
        if not gradient_finite:
            raise NotFinite(
                f"a gradient is not finite {self._where} although the loss is, and no step was taken on it: lower "
                "optimizer.lr, or train with trainer.precision=32."
            )
