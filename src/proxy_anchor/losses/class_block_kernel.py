"""The Triton kernels behind `class_block_loss`, and how they are called. Imported on a machine with a graphics card only.

The same gradient by hand as in class_block.py, with what stands between the three matrix products in one kernel each:

    normalise   lengths of the embeddings, and their unit vectors
    torch.mm    proxies @ units.T
    weigh       a class per row: both logarithms of Eq. 4, and dL/ds of Eq. 6 written over the row
    torch.mm    twice, backward
    finish      both gradients: the part along the vector itself is taken off, the gradient of the value put on

A call that Python launches costs more than what it computes at the sizes of the benchmarks, hence so few of them. Each row is
the work of one program that holds it in registers, so nothing is added by several at a time: two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from proxy_anchor.losses.precision import autocast_off, refuse_second_derivative

# Numbers per program, where one row has no more: 16 per thread of 4 warps.
_TILE = 2048


@triton.jit(do_not_specialize=["batch", "classes"])
def _normalise(  # type: ignore[no-untyped-def]
    embeddings,
    labels,
    units,
    per_image,
    batch,
    classes,
    dim: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
):
    """Program i: image i. units: (W, D), rows from B on become zero. per_image: (2, B), 1 / length and 1 for the first image
    of a class, 0 for the others. NaN for a label outside [0, C), which then reaches the loss if this block is the whole of it.
    """
    image = tl.program_id(0)
    column = tl.arange(0, block_d)
    place = image * dim + column
    x = tl.load(embeddings + place, mask=(column < dim) & (image < batch), other=0.0)
    scale = tl.rsqrt(tl.sum(x * x, 0) + 1e-12)  # the epsilon of `unit_length`
    tl.store(units + place, x * scale, mask=column < dim)
    if image < batch:
        other = tl.arange(0, block_b)
        earlier = other < image
        label = tl.load(labels + image)
        same = earlier & (tl.load(labels + other, mask=earlier, other=0) == label)
        first = 1.0 - tl.max(same.to(tl.float32), 0)
        tl.store(per_image + image, scale)
        tl.store(per_image + batch + image, tl.where((label >= 0) & (label < classes), first, float("nan")))


@triton.jit
def _log_sum_and_shares(terms):  # type: ignore[no-untyped-def]
    """Per row of (N, W), log(1 + sum exp(terms)) and each term's share in 1 + sum exp(terms)."""
    peak = tl.maximum(tl.max(terms, 1), 0.0)  # the "1 +" is a term of 0, so the peak is finite where all are left out
    powers = tl.exp(terms - peak[:, None])
    total = tl.sum(powers, 1) + tl.exp(-peak)
    return peak + tl.log(total), powers / total[:, None]


@triton.jit(do_not_specialize=["batch", "quads", "classes"])
def _weigh(  # type: ignore[no-untyped-def]
    dots,
    proxies,
    labels,
    present,
    per_class,
    alpha,
    shift,
    num_classes,
    batch,
    quads,
    classes,
    dim: tl.constexpr,
    count_present: tl.constexpr,
    differentiate: tl.constexpr,
    tile: tl.constexpr,
    block_b: tl.constexpr,
    block_d: tl.constexpr,
):
    """Program i: classes i * tile ... dots: (C, W) with W = 4 * quads, proxies @ units.T; becomes dL/ds / |p_j| in units of
    alpha / C, with zeros from column B on. per_class: (2, C), the row's part of the loss, and what its gradient takes off per
    unit of proxy. present: per_image of `_normalise`, or the number of classes present. shift: alpha * delta.
    """
    row = tl.program_id(0) * tile + tl.arange(0, tile).to(tl.int64)  # C x W may pass 2**31
    inside = row < classes
    column = tl.arange(0, block_d)
    proxy = tl.load(
        proxies + row[:, None] * dim + column[None, :], mask=inside[:, None] & (column < dim)[None, :], other=0.0
    )
    scale = tl.rsqrt(tl.sum(proxy * proxy, 1) + 1e-12)

    image = tl.arange(0, block_b)
    is_image = image < batch
    # The width in fours tells the compiler that rows begin at 16 bytes, without a kernel for each width.
    place = dots + row[:, None] * (4 * quads) + image[None, :]
    in_row = inside[:, None] & (image < 4 * quads)[None, :]
    dot = tl.load(place, mask=in_row, other=0.0)
    label = tl.load(labels + image, mask=is_image, other=-1)
    own = label[None, :] == row[:, None]
    others = is_image[None, :] & (label[None, :] != row[:, None])  # images of other blocks' classes are among them
    similarity = alpha * scale[:, None] * dot
    negative, push = _log_sum_and_shares(tl.where(others, similarity + shift, float("-inf")))
    positive, pull = _log_sum_and_shares(tl.where(own, shift - similarity, float("-inf")))  # 0 where there are none

    if count_present:
        num_present = tl.sum(tl.load(present + batch + image, mask=is_image, other=0.0), 0)
    else:
        num_present = tl.load(present).to(tl.float32)
    tl.store(per_class + row, negative / num_classes + positive / num_present, mask=inside)
    if differentiate:
        strength = push - pull * (num_classes / num_present)
        # Where a row is shorter than the program has threads, several hold the same number: all have read before one writes.
        tl.debug_barrier()
        tl.store(place, strength * scale[:, None], mask=in_row)
        radial = tl.sum(strength * dot, 1) * (scale * scale * scale)
        tl.store(per_class + classes + row, radial, mask=inside)


@triton.jit(do_not_specialize=["batch", "classes", "image_programs"])
def _finish(  # type: ignore[no-untyped-def]
    grad_embeddings,
    grad_proxies,
    units,
    proxies,
    per_image,
    per_class,
    factor,
    batch,
    classes,
    image_programs,
    dim: tl.constexpr,
    tile: tl.constexpr,
    block_d: tl.constexpr,
):
    """Programs below image_programs: images i * tile ..., the others: classes. In place, on weights.T @ proxies (W, D) and
    weights @ units (C, D). factor: a scalar on the card.

    With u = x / |x|: dL/dx = (I - u u^T) dL/du / |x|, and the same for p, whose part along p is known from forward.
    """
    program = tl.program_id(0)
    column = tl.arange(0, block_d)  # rows are int64 below: C x D may pass 2**31
    unit = tl.load(factor)
    if program < image_programs:
        row = program * tile + tl.arange(0, tile).to(tl.int64)
        place = row[:, None] * dim + column[None, :]
        inside = (row < batch)[:, None] & (column < dim)[None, :]
        gradient = tl.load(grad_embeddings + place, mask=inside, other=0.0)
        u = tl.load(units + place, mask=inside, other=0.0)
        scale = tl.load(per_image + row, mask=row < batch, other=0.0)
        along = tl.sum(gradient * u, 1)
        tl.store(grad_embeddings + place, (gradient - u * along[:, None]) * (scale * unit)[:, None], mask=inside)
    else:
        row = (program - image_programs) * tile + tl.arange(0, tile).to(tl.int64)
        place = row[:, None] * dim + column[None, :]
        inside = (row < classes)[:, None] & (column < dim)[None, :]
        gradient = tl.load(grad_proxies + place, mask=inside, other=0.0)
        proxy = tl.load(proxies + place, mask=inside, other=0.0)
        radial = tl.load(per_class + classes + row, mask=row < classes, other=0.0)
        tl.store(grad_proxies + place, (gradient - proxy * radial[:, None]) * unit, mask=inside)


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()  # Triton's own is wrapped for use in kernels, which takes microseconds


def _warps(numbers: int) -> int:
    return 4 if numbers <= _TILE else 8


class FusedClassBlockLoss(torch.autograd.Function):
    """What `_ClassBlockLoss` computes, in float32 on a card, for B and D that one program holds.

    Shapes: B images, C classes of this block, D dimensions, W: B rounded up to a multiple of 4, for the matrix products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        proxies: Tensor,
        labels: Tensor,
        alpha: float,
        delta: float,
        num_classes: int | None,
        num_present: Tensor | None,
        differentiate: bool,
    ) -> Tensor:
        """The value, a scalar. Arguments: those of `class_block_loss`; differentiate: whether backward may follow."""
        batch, dim = embeddings.shape
        classes = proxies.shape[0]
        num_classes = classes if num_classes is None else num_classes
        embeddings, proxies, labels = embeddings.contiguous(), proxies.contiguous(), labels.contiguous()
        quads = -(-batch // 4)
        block_b, block_d = _power_of_2(4 * quads), _power_of_2(dim)
        block = max(block_b, block_d)
        tile = max(1, _TILE // block)

        units = embeddings.new_empty(4 * quads, dim)
        per_image = embeddings.new_empty(2, batch)
        per_class = embeddings.new_empty(2, classes)
        _normalise[(4 * quads,)](
            embeddings, labels, units, per_image, batch, classes, dim, block_b, block_d, num_warps=_warps(block)
        )
        dots = torch.mm(proxies, units.T)
        _weigh[(-(-classes // tile),)](
            dots,
            proxies,
            labels,
            per_image if num_present is None else num_present,
            per_class,
            float(alpha),  # an integer would be compiled in
            float(alpha * delta),
            float(num_classes),
            batch,
            quads,
            classes,
            dim,
            num_present is None,
            differentiate,
            tile,
            block_b,
            block_d,
            num_warps=_warps(block),
        )
        if differentiate:
            ctx.unit = alpha / num_classes
            ctx.save_for_backward(proxies, units, per_image, dots, per_class)
        return per_class[0].sum()

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients (B, D) and (C, D), each where it is wanted; nothing for the other arguments."""
        if torch.is_grad_enabled():
            refuse_second_derivative()
        proxies, units, per_image, weights, per_class = ctx.saved_tensors
        (classes, dim), batch = proxies.shape, per_image.shape[1]
        block_d = _power_of_2(dim)
        tile = max(1, _TILE // block_d)
        for_embeddings, for_proxies = ctx.needs_input_grad[:2]
        # Before the products: a thread of autograd has no card yet, of which the matrix library warns and a launch takes one.
        factor = grad_value * ctx.unit
        with autocast_off(proxies.device.type):
            grad_embeddings = torch.mm(weights.T, proxies) if for_embeddings else None
            grad_proxies = torch.mm(weights, units) if for_proxies else None
        image_programs = -(-batch // tile) if for_embeddings else 0
        class_programs = -(-classes // tile) if for_proxies else 0
        _finish[(image_programs + class_programs,)](
            grad_embeddings if for_embeddings else units,  # what stands in for a missing one is not touched
            grad_proxies if for_proxies else proxies,
            units,
            proxies,
            per_image,
            per_class,
            factor,
            batch,
            classes,
            image_programs,
            dim,
            tile,
            block_d,
            num_warps=_warps(block_d),
        )
        return grad_embeddings if grad_embeddings is None else grad_embeddings[:batch], grad_proxies, *[None] * 6
