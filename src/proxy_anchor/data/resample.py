"""Crops of many images of different sizes at once, resized as Pillow resizes: bilinear with antialiasing.

On a graphics card one Triton kernel reads the windows where they lie, so that nothing is padded or copied; elsewhere
torchvision does it image by image. Both round once, Pillow after each of its two passes: values differ from Pillow's by at
most 1 of 255.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from proxy_anchor.utils import have_triton


def resample(values: Tensor, windows: Tensor, side: int, targets: Tensor | None = None) -> Tensor:
    """Windows of images to uint8 (B, 3, side, side) in channels-last order, on the device of `values`.

    values: flat uint8, images as rows of (width, 3). windows: (B, 5) int64 on the same device: where the window starts in
    `values`, the width of the image that it lies in, the window's height and width, and whether it is mirrored.
    targets: (B, 4) int64, for windows that are whole images: height and width to which an image is resized, and top and left
    of the square that is taken of it; None: the square is the whole. With targets, `values` holds images as (3, height,
    width), as decoders give them.
    """
    if values.is_cuda and (kernel := _kernel()) is not None:
        out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8, device=values.device)
        block, placed = 512, targets is not None
        blocks = -(-side * side // block)
        kernel[(len(windows), blocks)](values, windows, targets if placed else windows, out, side, placed, block)
        return out.permute(0, 3, 1, 2)
    return _resample_one_by_one(values, windows, side, targets)


def _resample_one_by_one(values: Tensor, windows: Tensor, side: int, targets: Tensor | None) -> Tensor:
    out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8, device=values.device).permute(0, 3, 1, 2)
    places = [(side, side, 0, 0)] * len(windows) if targets is None else targets.tolist()
    for image, (start, stride, height, width, mirror), place in zip(out, windows.tolist(), places, strict=True):
        full_h, full_w, top, left = place
        strides = (1, 3 * stride, 3) if targets is None else (height * width, width, 1)
        window = values.as_strided((3, height, width), strides, start)
        resized = F.resize(window, [full_h, full_w], antialias=True)[:, top : top + side, left : left + side]
        image.copy_(resized.flip(-1) if mirror else resized)
    if values.is_cuda:
        # The card's JPEG decoder writes into memory that is free, also where this has yet to read it: see inference/jpeg.py.
        torch.cuda.current_stream(values.device).synchronize()
    return out


def _kernel():  # type: ignore[no-untyped-def]
    """The Triton kernel; None where it cannot run."""
    if not have_triton():
        return None
    from proxy_anchor.data.resample_kernel import resample_kernel

    return resample_kernel
