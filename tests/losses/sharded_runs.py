"""What the processes of test_sharded compute."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from proxy_anchor.losses.sharded import ShardedProxyAnchorLoss

CASES = [(7, torch.float64), (12, torch.float64), (7, torch.float32), (5000, torch.float32)]  # C, precision
LABELS = [0, 0, 1, 6, 6, 6, 3, 5]


def batch(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(LABELS), 4, generator=generator, dtype=torch.float64).to(dtype), torch.tensor(LABELS)


def sharded() -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    results = []
    for num_classes, dtype in CASES:
        torch.manual_seed(3)
        loss = ShardedProxyAnchorLoss(num_classes, 4).to(dtype)
        embeddings, labels = batch(dtype)
        embeddings.requires_grad_()
        value = loss(embeddings, labels)
        (2 * value).backward()
        results.append(
            {
                "value": value.detach(),
                "embeddings": embeddings.grad,
                "proxies": loss.proxies.grad,
                "classes": loss.classes,
                "all": loss.gather_proxies(),
            }
        )
    dist.destroy_process_group()
    return results
