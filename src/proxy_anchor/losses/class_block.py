"""Eq. 4 of Proxy-Anchor with its gradient by hand (Eq. 6), for all classes or for a block of them.

The definition is `proxy_anchor_loss` in proxy_anchor.py; this file gives the same numbers in the time and memory of the
bare similarity product. What makes it small:
- Eq. 4 is a sum over classes, so forward already knows the gradient with respect to the similarities and writes it
  over them: one (C, B) tensor is kept, whatever the loss needs in between is made for a chunk of classes at a time.
- Proxies are never normalised as a matrix: the factor 1 / |p_j| is a number per row of similarities.
- One softmax over the terms of 1 + sum exp(...) gives both: the log of the share of the "1" is minus the logarithm in
  Eq. 4, and the shares of the others are the weights of Eq. 6.

Written twice: in torch, below, and for float32 on a graphics card as three Triton kernels (class_block_kernel.py), for which
Python launches nine calls instead of about sixty. Tests hold both to the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from proxy_anchor.losses.precision import autocast_off, refuse_second_derivative
from proxy_anchor.utils import have_triton

# Similarities per chunk: 16 MiB in float32, which stays in a GPU's cache and is worth a kernel launch.
CHUNK_ELEMENTS = 2**22

# The most images and dimensions that one program of the kernels holds in its registers.
_LARGEST_ROW = 4096

# Stands for minus infinity where it will be multiplied by a share of 0.
_EXCLUDED = 1e30


def class_block_loss(
    embeddings: Tensor,
    proxies: Tensor,
    labels: Tensor,
    alpha: float,
    delta: float,
    *,
    num_classes: int | None = None,
    num_present: Tensor | None = None,
) -> Tensor:
    """What a block of classes adds to Eq. 4 of Kim et al. 2020; the shares of disjoint blocks sum to the whole loss.

    embeddings: (B, D) float, need not be normalised. proxies: (C, D) of this block. labels: (B,) int64, counted from
    the block's first class; with `num_present`, a label outside [0, C) belongs to another block and its image is a
    negative of every class here. num_classes: classes of all blocks; None = C. num_present: scalar, classes of all blocks
    with an image in the batch; None = this block is the whole loss and all labels lie in it.

    Returns a scalar in float32 (float64 if embeddings or proxies are), differentiable once in embeddings and proxies;
    backward with create_graph=True raises UsageError.
    """
    dtype = torch.float64 if torch.float64 in (embeddings.dtype, proxies.dtype) else torch.float32
    differentiate = torch.is_grad_enabled() and (embeddings.requires_grad or proxies.requires_grad)
    embeddings, proxies = embeddings.to(dtype), proxies.to(dtype)
    fused = _fused() if _fits_the_kernels(embeddings, proxies, labels, num_present) else None
    with autocast_off(embeddings.device.type):
        return (fused or _ClassBlockLoss).apply(
            embeddings, proxies, labels, alpha, delta, num_classes, num_present, differentiate
        )


def _fits_the_kernels(embeddings: Tensor, proxies: Tensor, labels: Tensor, num_present: Tensor | None) -> bool:
    """Whether the kernels compute this: all on the current card, float32, rows that a program holds, nothing empty."""
    return (
        embeddings.is_cuda
        and embeddings.dtype == torch.float32
        and proxies.is_cuda
        and labels.is_cuda
        and (num_present is None or num_present.is_cuda)
        and embeddings.get_device() == torch.cuda.current_device()  # where Triton launches
        and max(embeddings.shape) <= _LARGEST_ROW
        and min(*embeddings.shape, proxies.shape[0]) > 0
    )


def _fused() -> type[torch.autograd.Function] | None:
    """The same as Triton kernels; None where these cannot run."""
    if not have_triton():
        return None
    from proxy_anchor.losses.class_block_kernel import FusedClassBlockLoss

    return FusedClassBlockLoss


def _log_shares(dots: Tensor, scale: Tensor, alpha: float, shift: Tensor) -> Tensor:
    """Per row, the log of each term's share in sum_b exp(alpha * scale * dots_b + shift_b); (N, W) from dots (N, W)."""
    return torch.addcmul(shift, dots, scale.unsqueeze(1), value=alpha).log_softmax(dim=1)


class _ClassBlockLoss(torch.autograd.Function):
    """See `class_block_loss`. Works without waiting for the device, and the same way each time (no atomic additions).

    Shapes: B images, C classes of this block, D dimensions, W columns. `dots` is (C + 1, W): one row per class, contiguous
    along the batch as softmax likes it, and a spare row for the images whose class is elsewhere. Column B is the "1 +" of
    Eq. 4; the columns after it count nothing and keep the rows aligned for the matrix products.
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
        batch, block = embeddings.shape[0], proxies.shape[0]
        num_classes = block if num_classes is None else num_classes
        width = 4 * (batch // 4 + 1)

        # 1 / length of proxies and embeddings, with the epsilon of `unit_length`. The spare row shares the number of the
        # first image: it only has to be finite.
        lengths = embeddings.new_empty(block + batch)
        torch.linalg.vector_norm(proxies, dim=1, out=lengths[:block])
        torch.linalg.vector_norm(embeddings, dim=1, out=lengths[block:])
        lengths.square_().add_(1e-12).rsqrt_()
        scale, image_scale = lengths[: block + 1], lengths[block:].unsqueeze(1)

        units = embeddings.new_zeros(width, embeddings.shape[1])
        torch.mul(embeddings, image_scale, out=units[:batch])
        dots = embeddings.new_empty(block + 1, width)
        torch.mm(proxies, units.T, out=dots[:block])
        shift = dots.new_full((width,), alpha * delta)
        # Assigning a number to a single element would wait for the device; filling slices does not.
        shift[batch:].fill_(-torch.inf)
        shift[batch : batch + 1].zero_()

        # log(1 + sum over positives of exp(-alpha (s - delta))), once per image. Images of one class are found by comparing
        # all pairs of labels: B x B is small beside B x C, needs no sum by index (atomic, hence not repeatable, on a GPU)
        # and gives each image the sum over its whole class.
        own = labels
        if num_present is not None:
            own = labels.clamp(-1, block).remainder(block + 1)  # a label from elsewhere, on either side, becomes C
            dots[block].zero_()
        same_class = own.unsqueeze(1) == own  # (B, B)
        per_image = same_class.sum(1, dtype=dots.dtype).reciprocal_()  # (B,), sums to 1 over the images of a class
        if num_present is None:
            num_present = per_image.sum()
        else:
            per_image = per_image * (own < block)
            num_present = num_present.to(dots.dtype)
        own_scale = scale.index_select(0, own)
        own_dots = dots.index_select(0, own)  # (B, W)
        own_dots[:, :batch].masked_fill_(~same_class, _EXCLUDED)
        own_shares = _log_shares(own_dots, own_scale, -alpha, shift)
        # From here on in units of 1 / C, the weight of the negative sum; that of the positive one is this many of them:
        ratio = -num_classes / num_present
        value = torch.dot(per_image, own_shares[:, batch]) * ratio

        # log(1 + sum over negatives of exp(alpha (s + delta))), for all classes: the own class is left out by index.
        own_row = own.unsqueeze(0)
        dots.scatter_(0, own_row, -_EXCLUDED)
        radial = torch.empty_like(scale) if differentiate and ctx.needs_input_grad[1] else None  # (C + 1,)
        rows = max(1, CHUNK_ELEMENTS // width)
        for start in range(0, block, rows):
            chunk = slice(start, min(start + rows, block))
            shares = _log_shares(dots[chunk], scale[chunk], alpha, shift)
            value -= shares[:, batch].sum()
            if differentiate:
                shares.exp_()
                if radial is not None:
                    torch.sum(dots[chunk] * shares, dim=1, out=radial[chunk])
                torch.mul(shares, scale[chunk].unsqueeze(1), out=dots[chunk])

        if differentiate:
            own_shares.exp_()
            dots.scatter_(0, own_row, (own_shares.diagonal() * own_scale).mul_(ratio).unsqueeze(0))
            if radial is not None:
                # Images of one class write the same number.
                own_radial = torch.addcmul(radial.index_select(0, own), (own_dots * own_shares).sum(1), ratio)
                radial = radial.scatter_(0, own, own_radial).mul_(scale.pow(3))[:block]
            ctx.unit = alpha / num_classes
            ctx.save_for_backward(proxies, units[:batch], image_scale, dots[:block, :batch], radial)
        return value / num_classes

    @staticmethod
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            refuse_second_derivative()
        # weights (C, B): dL / ds, divided by |p_j|. With u = x / |x|: dL/dx = (I - u u^T) dL/du / |x|, and the same for p,
        # whose radial part is known from forward.
        proxies, units, image_scale, weights, radial = ctx.saved_tensors
        grad_embeddings = grad_proxies = None
        with autocast_off(grad_value.device.type):
            unit = grad_value * ctx.unit
            if ctx.needs_input_grad[0]:
                grad_units = torch.mm(weights.T, proxies)
                along = (grad_units * units).sum(1, keepdim=True)
                grad_embeddings = grad_units.addcmul_(units, along, value=-1).mul_(image_scale * unit)
            if ctx.needs_input_grad[1]:
                grad_proxies = torch.mm(weights, units * unit)
                grad_proxies.addcmul_(proxies, (radial * unit).unsqueeze(1), value=-1)
        return grad_embeddings, grad_proxies, None, None, None, None, None, None
