"""What every loss with learnable tensors shares: they are weights, and stay in float32 under every precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """A module whose tensors follow `.to(device)` and `.double()`, but stay as they are under `.half()` and `.bfloat16()`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)
