"""Global pooling of a feature map (B, F, H, W) to (B, F)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def average_pool(features: Tensor) -> Tensor:
    """Mean over the spatial dimensions."""
    return features.flatten(2).mean(2)


def max_pool(features: Tensor) -> Tensor:
    """Maximum over the spatial dimensions.

    Written as `max().values`: under torch.compile and bf16 autocast the gradient of `amax` was NaN (H100, torch 2.11),
    and the CUDA backward of adaptive max pooling is not deterministic.
    """
    return features.flatten(2).max(2).values


def average_plus_max_pool(features: Tensor) -> Tensor:
    """Sum of average and max pooling, as in the released Proxy-Anchor code."""
    return average_pool(features) + max_pool(features)


class GeMPool(nn.Module):
    """Generalised mean, Radenovic et al., TPAMI 2019, with learnable exponent p."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.tensor(3.0))

    def forward(self, features: Tensor) -> Tensor:
        """(B, F, H, W) to (B, F), in float32, because powers of small bf16 numbers underflow."""
        with torch.autocast(features.device.type, enabled=False):
            return features.float().clamp(min=1e-6).flatten(2).pow(self.p).mean(2).pow(1.0 / self.p)


class Pool(nn.Module):
    """Module of a pooling function, which print(net) shows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, features: Tensor) -> Tensor:
        """(B, F, H, W) to (B, F)."""
        return self.function(features)

    def extra_repr(self) -> str:
        """The function's name."""
        return self.function.__name__


POOLINGS: dict[str, Callable[[], nn.Module]] = {
    "avg+max": lambda: Pool(average_plus_max_pool),
    "avg": lambda: Pool(average_pool),
    "max": lambda: Pool(max_pool),
    "gem": GeMPool,
}
