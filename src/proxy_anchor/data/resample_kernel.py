"""Triton kernel of `resample`, for NVIDIA GPUs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def resample_kernel(  # type: ignore[no-untyped-def]
    values, windows, out, side: tl.constexpr, block: tl.constexpr
):
    """Program (b, i): pixels from i * block on of image b.

    Arguments: see `resample`; out: (B, side, side, 3). The weights are Pillow's: a triangle of half-width max(1, scale)
    around the pixel's centre, cut at the window's edges and normalised.
    """
    window = windows + 5 * tl.program_id(0).to(tl.int64)
    start, stride = tl.load(window), tl.load(window + 1)
    height, width, mirror = tl.load(window + 2).to(tl.int32), tl.load(window + 3).to(tl.int32), tl.load(window + 4)
    place = tl.program_id(1) * block + tl.arange(0, block)
    inside = place < side * side
    y, x_out = place // side, place % side
    x = tl.where(mirror != 0, side - 1 - x_out, x_out)

    scale_y, scale_x = height.to(tl.float32) / side, width.to(tl.float32) / side
    reach_y, reach_x = tl.maximum(scale_y, 1.0), tl.maximum(scale_x, 1.0)
    centre_y, centre_x = (y.to(tl.float32) + 0.5) * scale_y, (x.to(tl.float32) + 0.5) * scale_x
    first_y = tl.maximum(centre_y - reach_y + 0.5, 0.0).to(tl.int32)
    first_x = tl.maximum(centre_x - reach_x + 0.5, 0.0).to(tl.int32)

    red = tl.zeros([block], tl.float32)
    green = tl.zeros([block], tl.float32)
    blue = tl.zeros([block], tl.float32)
    total = tl.zeros([block], tl.float32)
    for step_y in range(0, (2 * reach_y).to(tl.int32) + 2):
        row = first_y + step_y
        weight_y = tl.maximum(1.0 - tl.abs(row.to(tl.float32) + 0.5 - centre_y) / reach_y, 0.0)
        weight_y = tl.where(row < height, weight_y, 0.0)
        for step_x in range(0, (2 * reach_x).to(tl.int32) + 2):
            column = first_x + step_x
            weight = weight_y * tl.maximum(1.0 - tl.abs(column.to(tl.float32) + 0.5 - centre_x) / reach_x, 0.0)
            weight = tl.where(column < width, weight, 0.0)
            pixel = values + start + 3 * (row.to(tl.int64) * stride + column)
            seen = inside & (weight > 0.0)
            red += weight * tl.load(pixel, mask=seen, other=0).to(tl.float32)
            green += weight * tl.load(pixel + 1, mask=seen, other=0).to(tl.float32)
            blue += weight * tl.load(pixel + 2, mask=seen, other=0).to(tl.float32)
            total += weight

    pixels = out + 3 * (tl.program_id(0).to(tl.int64) * side * side + place)
    tl.store(pixels, (red / total + 0.5).to(tl.uint8), mask=inside)
    tl.store(pixels + 1, (green / total + 0.5).to(tl.uint8), mask=inside)
    tl.store(pixels + 2, (blue / total + 0.5).to(tl.uint8), mask=inside)
