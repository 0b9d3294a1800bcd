"""Numbers brought from the device to the host without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor


class Fetch:
    """A tensor on its way to the host. The copy is queued here; only who looks at it waits, and only for this copy."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._copied = values, None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def get(self) -> Tensor:
        """The tensor, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
