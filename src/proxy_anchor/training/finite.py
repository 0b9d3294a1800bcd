"""Stop before a number that is not finite reaches the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from proxy_anchor.errors import AgreedError
from proxy_anchor.training.distributed import reduce_max


class HostCopy:
    """Asynchronous device-to-host copy; `get()` blocks."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._copied = values, None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def get(self) -> Tensor:
        """Wait for the copy and return the tensor on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class NotFinite(AgreedError):
    """A loss or gradient that is not finite."""


class FiniteGuard:
    """Checks the loss and the norm of the gradients of every step.

    The result is copied to the host asynchronously and read one step later, so the host does not wait for the GPU;
    until then a fused optimizer that gets the result of `show` skips the step. All ranks share one result and stop
    after the same step.
    """

    def __init__(self) -> None:
        self._where = ""
        self._shown: HostCopy | None = None  # (2,) whether they are bad: loss, gradient

    def show(self, where: str, loss_finite: Tensor, norm: Tensor) -> Tensor:
        """Keep the result of a step; returns a () float on its device: 1 if a number is not finite, else 0.

        where: names the step in the error. loss_finite: () bool. norm: () float, of all gradients.
        """
        bad = reduce_max((~torch.stack([loss_finite, torch.isfinite(norm)])).int())
        self._where = where
        self._shown = HostCopy(bad)
        return bad.any().float()

    def check(self) -> None:
        """Raise NotFinite if the last step shown had a number that is not finite."""
        shown = () if self._shown is None else self._shown.get().tolist()
        for bad, what in zip(shown, ("the loss", "a gradient"), strict=False):
            if bad:
                raise NotFinite(
                    f"{what} is not finite {self._where}, and no step was taken on it: lower optimizer.lr (or "
                    "loss.alpha), or train with trainer.precision=32."
                )
