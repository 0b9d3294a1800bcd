"""Crops of many images of different sizes at once, resized as Pillow resizes: bilinear with antialiasing.

On a graphics card one Triton kernel reads the windows where they lie, so that nothing is padded or copied; elsewhere
torchvision does it image by image. Both round once, Pillow after each of its two passes: values differ from Pillow's by at
most 1 of 255.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F


def resample(values: Tensor, windows: Tensor, side: int) -> Tensor:
    """Windows of images to uint8 (B, 3, side, side) in channels-last order, on the device of `values`.

    values: flat uint8, images as rows of (width, 3). windows: (B, 5) int64 on the same device: where the window starts in
    `values`, the width of the image that it lies in, the window's height and width, and whether it is mirrored.
    """
    if values.is_cuda and (kernel := _kernel()) is not None:
        out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8, device=values.device)
        block = 512
        kernel[(len(windows), -(-side * side // block))](values, windows, out, side, block)
        return out.permute(0, 3, 1, 2)
    return _resample_one_by_one(values, windows, side)


def _resample_one_by_one(values: Tensor, windows: Tensor, side: int) -> Tensor:
    out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8, device=values.device).permute(0, 3, 1, 2)
    for image, (start, stride, height, width, mirror) in zip(out, windows.tolist(), strict=True):
        window = values.as_strided((3, height, width), (1, 3 * stride, 3), start)
        resized = F.resize(window, [side, side], antialias=True)
        image.copy_(resized.flip(-1) if mirror else resized)
    return out


@cache
def _kernel():  # type: ignore[no-untyped-def]
    """The Triton kernel; None where there is no Triton (its wheels exist for Linux only)."""
    try:
        from proxy_anchor.data.resample_kernel import resample_kernel
    except ImportError:
        return None
    return resample_kernel
