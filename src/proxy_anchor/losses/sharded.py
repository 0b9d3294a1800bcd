"""Proxy-Anchor with its proxies divided over processes, for more classes than one card holds.

Each of W processes owns about C / W classes. What travels per step are embeddings (once forward, once their gradient
backward) and one number, the block's share of Eq. 4, which is a sum over classes. Proxies, their gradients and the
optimizer's moments never leave their process, so memory and time per process fall with W.

For use in code of your own; `train.py` does not offer it: its checkpoints hold one process's tensors.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from proxy_anchor.data.sampling import mix
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.class_block import class_block_loss
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss, check_range, check_shapes

_ROWS_PER_DRAW = 4096  # proxies drawn at a time, each such block from a seed of its own


class ShardedProxyAnchorLoss(ProxyAnchorLoss):
    """`ProxyAnchorLoss` over all processes of the default group: the same value and gradients, a W-th of the memory.

    Every process calls it with the whole batch (see `training.distributed.gather_batch`) and gets the whole loss. The gradient of
    the embeddings is that of the whole loss, on every process; that of `proxies` is complete too, and no other process
    has it: DDP must not average it (`ignored_by_ddp`; `MetricLearner` sees to it).

    Args:
        num_classes: C of all processes, at least W. embedding_dim, alpha, delta, check_labels: as in `ProxyAnchorLoss`.

    Attributes:
        classes: the range of classes that this process owns.
        proxies: (len(classes), D) parameter, drawn with the deviation of `ProxyAnchorLoss`; the same for any W.

    Raises UsageError for arguments out of range. Where torch.distributed is not initialised, this process owns all.
    """

    def _make_proxies(self) -> nn.Parameter:
        self.distributed = dist.is_available() and dist.is_initialized()
        rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if self.distributed else (0, 1)
        if self.num_classes < self.world_size:
            raise UsageError(
                f"num_classes={self.num_classes} cannot be divided over {self.world_size} processes: each needs one at least."
            )
        self.classes = _share(self.num_classes, rank, self.world_size)
        return nn.Parameter(_draw(self.classes, self.num_classes, self.embedding_dim))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Eq. 4 of Kim et al. 2020 over all processes' classes.

        embeddings: (B, D) float. labels: (B,) integers in [0, C). Both the same on every process. Returns a scalar, the same on
        every process. Raises UsageError when shapes do not fit or a label is outside the range, naming it.
        """
        check_shapes(embeddings, labels, self.embedding_dim)
        if self.check_labels:
            check_range(labels, self.num_classes)
        labels = labels.long()
        in_order = labels.sort().values
        num_present = 1 + (in_order[1:] != in_order[:-1]).sum()  # `unique` would wait for the device
        if self.distributed:
            embeddings = _SumGradient.apply(embeddings)
        block = class_block_loss(
            embeddings,
            self.proxies,
            labels - self.classes.start,
            self.alpha,
            self.delta,
            num_classes=self.num_classes,
            num_present=num_present,
        )
        return _Sum.apply(block) if self.distributed else block

    @torch.no_grad()
    def gather_proxies(self) -> Tensor:
        """(C, D) proxies of all processes in order of class, on the CPU of every process; all call it together."""
        if not self.distributed:
            return self.proxies.detach().to("cpu", copy=True)
        parts = []
        for owner in range(self.world_size):  # one at a time: all together may not fit onto a card
            classes = _share(self.num_classes, owner, self.world_size)
            part = self.proxies.new_empty(len(classes), self.embedding_dim)
            if classes == self.classes:
                part.copy_(self.proxies)
            dist.broadcast(part, src=owner)
            parts.append(part.cpu())
        return torch.cat(parts)

    def extra_repr(self) -> str:
        """The arguments, for print(module)."""
        return f"{super().extra_repr()}, classes={self.classes.start}..{self.classes.stop - 1}"


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """The names of a module's parameters that belong to one process alone, for DDP's `_ddp_params_and_buffers_to_ignore`."""
    return [
        f"{name}.proxies" if name else "proxies"
        for name, each in module.named_modules()
        if isinstance(each, ShardedProxyAnchorLoss)
    ]


def _share(num_classes: int, rank: int, world_size: int) -> range:
    """Shares differ by one class at most."""
    return range(num_classes * rank // world_size, num_classes * (rank + 1) // world_size)


def _draw(classes: range, num_classes: int, embedding_dim: int) -> Tensor:
    """The rows of `classes` of a normal (C, D) matrix that follows from torch's seed, without drawing the others'."""
    seed = int(torch.randint(2**62, ()))
    rows = torch.empty(len(classes), embedding_dim)
    for block in range(classes.start // _ROWS_PER_DRAW, -(-classes.stop // _ROWS_PER_DRAW)):
        first = block * _ROWS_PER_DRAW
        start, stop = max(first, classes.start), min(first + _ROWS_PER_DRAW, classes.stop)
        generator = torch.Generator().manual_seed(mix(seed, block))
        drawn = torch.randn(_ROWS_PER_DRAW, embedding_dim, generator=generator)
        rows[start - classes.start : stop - classes.start] = drawn[start - first : stop - first]
    return rows.mul_(math.sqrt(2 / num_classes))  # kaiming_normal_ with fan_out of (C, D)


class _Sum(torch.autograd.Function):
    """A value summed over processes; each adds its own, so backward is the identity."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _SumGradient(torch.autograd.Function):
    """The identity; backward sums what the processes' blocks of classes ask of the embeddings."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor) -> Tensor:
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total
