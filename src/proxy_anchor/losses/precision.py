"""What every loss with learnable tensors shares: they are weights, and stay in float32 under every precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from proxy_anchor.errors import UsageError


class KeepsPrecision(nn.Module):
    """A module whose tensors follow `.to(device)` and `.double()`, but stay as they are under `.half()` and `.bfloat16()`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def keep_precision(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

        return super()._apply(keep_precision, recurse)


def autocast_off(device_type: str) -> AbstractContextManager[Any]:
    """Matrix products in the precision of their factors; costs next to nothing where autocast is off anyway."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def refuse_second_derivative() -> NoReturn:
    """Raise UsageError for create_graph=True.

    Not `once_differentiable`: it returns a constant where a gradient penalty would go on to differentiate.
    """
    raise UsageError(
        "the Proxy-Anchor loss gives first derivatives only, received create_graph=True; for second ones, call "
        "proxy_anchor_loss(unit_length(embeddings) @ unit_length(proxies).T, labels, alpha, delta)."
    )
