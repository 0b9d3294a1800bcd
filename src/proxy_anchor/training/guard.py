"""Stopping before a number that is not finite spoils the weights."""

from __future__ import annotations

import torch


class FiniteGuard:
    """Remembers whether every scalar (loss, gradient norm) shown to it was finite.

    On a GPU the flag is copied to the host while other work is queued, so that looking at it a little later costs no waiting.
    """

    def __init__(self) -> None:
        self._seen: torch.Tensor | None = None  # on the scalar's device
        self._flag: torch.Tensor | None = None  # its copy on the host
        self._copied: torch.cuda.Event | None = None

    def watch(self, scalar: torch.Tensor) -> None:
        """Remember whether this scalar and those before it are finite."""
        flag = torch.isfinite(scalar.detach())
        if self._seen is not None:  # gradients may be accumulated over several losses
            flag &= self._seen
        self._seen = flag
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._flag = flag

    def is_finite(self) -> bool:
        """Whether all scalars so far were finite."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._flag is None or bool(self._flag)
