"""The batch of all processes, with gradients: what makes a loss over pairs or classes the same on one device and on many.

Gradients are averaged over W processes (`training.ddp`). Every process computes the loss L of the whole batch, so
- the proxies' gradient is the whole one on every process, and so is its mean;
- an embedding's gradient arrives from all W losses: summed it is W x dL/dx, which the mean over processes, of which only
  one made that embedding, brings back to dL/dx.
Backbone, head and proxies therefore move as in one process; no factor is left over.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Processes that train together; 1 outside distributed training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_batch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(b, D) embeddings and (b,) labels of each process -> (B, D) and (B,) of all, in order of rank, on every process.

    All processes hold equally many. Backward gives each process the sum over all processes' gradients of its own rows.
    In one process they are returned as they are.
    """
    if world_size() == 1:
        return embeddings, labels
    return _GatherRows.apply(embeddings), _gather(labels)


def _gather(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    everyone = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
    # Newer versions of torch give the function another name, and warn of this one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, rows)
    return everyone


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all processes; backward sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # (B, D) is small beside the network's gradients: no need for the backends' various ways to sum only one's share.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(world_size())[dist.get_rank()]
