"""What test_class_block_fused computes, on a card or in Triton's interpreter."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from proxy_anchor.losses.class_block_kernel import FusedClassBlockLoss
from proxy_anchor.losses.proxy_anchor import proxy_anchor_loss, unit_length


class Case(NamedTuple):
    """labels: "random", or one class for each image. cuts: where the classes are divided into blocks."""

    batch: int
    classes: int
    dim: int
    alpha: float = 32.0
    delta: float = 0.1
    labels: str | list[int] = "random"
    cuts: tuple[int, ...] | None = None
    zero: bool = False  # one embedding and the first proxy
    wanted: tuple[bool, bool] = (True, True)


CASES = {
    "ordinary": Case(24, 40, 16),
    "one image": Case(1, 3, 5),
    "seven images": Case(7, 300, 9),
    "180 images": Case(180, 150, 64),
    "more images than a program has threads": Case(1030, 3, 16),
    "more dimensions than images": Case(5, 9, 600),
    "one class has the batch": Case(12, 5, 6, labels=[2] * 12),
    "one image in the last class": Case(1, 33, 8, labels=[32]),
    "C=1": Case(4, 1, 4),
    "C=1, B=1": Case(1, 1, 2),
    "alpha 1000": Case(20, 12, 8, alpha=1000.0),
    "alpha 1000, the easy way round": Case(4, 12, 8, alpha=1000.0, delta=0.0, labels=[0, 1, 2, 3]),
    "alpha 0.5": Case(20, 12, 8, alpha=0.5, delta=0.3),
    "delta 0": Case(20, 12, 8, delta=0.0),
    "delta 0.7": Case(20, 12, 8, delta=0.7),
    "zero rows": Case(6, 4, 5, zero=True),
    "blocks": Case(18, 19, 6, cuts=(0, 4, 5, 19)),
    "a block without images": Case(6, 20, 6, labels=[0, 1, 1, 0, 19, 19], cuts=(0, 2, 18, 20)),
    "embeddings only": Case(9, 7, 4, wanted=(True, False)),
    "proxies only": Case(9, 7, 4, wanted=(False, True)),
}


def make(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings (B, D) and proxies (C, D) in float32, labels (B,)."""
    generator = torch.Generator().manual_seed(1)
    x, proxies = (torch.randn(n, case.dim, generator=generator) for n in (case.batch, case.classes))
    labels = torch.randint(case.classes, (case.batch,), generator=generator)
    if case.labels != "random":
        labels = torch.tensor(case.labels)
    if case.zero:
        x[-1], proxies[0] = 0, 0
    return 3 * x, proxies, labels


def expected(case: Case) -> list[Tensor]:
    """Value, and the gradients that are wanted of 3 x the value, by the definition in float64."""
    x, proxies, labels = make(case)
    x, proxies = x.double().requires_grad_(), proxies.double().requires_grad_()
    value = proxy_anchor_loss(unit_length(x) @ unit_length(proxies).T, labels, case.alpha, case.delta)
    leaves = [leaf for leaf, wanted in zip((x, proxies), case.wanted, strict=True) if wanted]
    return [value.detach(), *torch.autograd.grad(3 * value, leaves)]


def found(case: Case, device: str) -> list[Tensor]:
    """The same by the kernels, block by block of classes."""
    x, proxies, labels = (each.to(device) for each in make(case))
    x.requires_grad_(case.wanted[0])
    proxies.requires_grad_(case.wanted[1])
    present = torch.tensor(len(labels.unique()), device=device) if case.cuts else None
    value = sum(
        FusedClassBlockLoss.apply(
            x, proxies[a:b], labels - a, case.alpha, case.delta, case.classes if case.cuts else None, present, True
        )
        for a, b in pairwise(case.cuts or (0, case.classes))
    )
    leaves = [leaf for leaf in (x, proxies) if leaf.requires_grad]
    return [value.detach().cpu(), *(each.cpu() for each in torch.autograd.grad(3 * value, leaves))]


def without_gradients() -> Tensor:
    """The value of "ordinary" where nothing is differentiated."""
    case = CASES["ordinary"]
    return FusedClassBlockLoss.apply(*make(case), case.alpha, case.delta, None, None, False)


def not_contiguous() -> list[Tensor]:
    """Value and gradients of "ordinary" from views with strides."""
    case = CASES["ordinary"]
    x, proxies, labels = make(case)
    x, proxies = x.T.contiguous().T.requires_grad_(), F.pad(proxies, (1, 2))[:, 1:-2].requires_grad_()
    labels = torch.stack([labels, labels], 1)[:, 0]
    value = FusedClassBlockLoss.apply(x, proxies, labels, case.alpha, case.delta, None, None, True)
    return [value.detach(), *torch.autograd.grad(3 * value, [x, proxies])]


def with_a_not_a_number() -> list[float]:
    """Values where an embedding, the own proxy, or another one holds a NaN."""
    values = []
    for where in range(3):
        x, proxies, labels = torch.randn(4, 3), torch.randn(5, 3), torch.zeros(4, dtype=torch.long)
        (x if where == 0 else proxies)[0 if where < 2 else 3, 1] = torch.nan
        values.append(float(FusedClassBlockLoss.apply(x, proxies, labels, 32.0, 0.1, None, None, False)))
    return values


def with_a_label_out_of_range() -> list[float]:
    """Values where a label is below and above the range, and where such a label may be another block's."""
    x, proxies, present = torch.randn(2, 3), torch.randn(5, 3), torch.tensor(2)
    return [
        float(FusedClassBlockLoss.apply(x, proxies, torch.tensor([0, label]), 32.0, 0.1, None, count, False))
        for label, count in ((-1, None), (5, None), (-1, present), (5, present))
    ]


if __name__ == "__main__":
    results: dict[str, Any] = {name: found(case, "cpu") for name, case in CASES.items()}
    for each in (without_gradients, not_contiguous, with_a_not_a_number, with_a_label_out_of_range):
        results[each.__name__] = each()
    torch.save(results, Path(sys.argv[1]))
