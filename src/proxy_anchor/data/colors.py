"""Colours of training images varied at random: off unless asked for, since the paper has none of it.

One affine map of (red, green, blue) per image, so that a whole batch is recoloured at once on the graphics card and an
image in a worker process by the same function. Which map follows from (seed, epoch, image) alone, as the crops do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.data.sampling import mix, uniform
from proxy_anchor.errors import check_number

_STREAM = 1  # random numbers of colours are no function of those of crops
_MID_GREY = 127.5
_LUMA = np.array([0.299, 0.587, 0.114])
# Luma and the plane of chroma: YIQ's I and Q are U and V turned by 33 degrees, so a turn of one is a turn of the other.
_TO_YUV = np.stack([_LUMA, 0.492 * (np.eye(3)[2] - _LUMA), 0.877 * (np.eye(3)[0] - _LUMA)])


@dataclass(frozen=True)
class RandomColors:
    """Ranges of the random colours, named and bounded as in torchvision's ColorJitter and RandomGrayscale.

    brightness, contrast, saturation: x draws a factor from [max(0, 1 - x), 1 + x]. Brightness scales the pixels, contrast
    their distance from mid-grey (127.5), saturation their distance from their luma. hue: h, at most 0.5, turns the chroma
    plane of YIQ by [-h, h] full turns; luma stays. grayscale: probability of the luma alone. seed: of all draws.

    Applied in this order and as one affine map, clamped once at the end. torchvision shuffles the order and clamps after
    each, turns hue in HSV and takes contrast around the image's own mean luma: neither is linear in the pixels, so each
    would be a pass of its own over the batch, and the mean a reduction before the map is known.

    Raises UsageError for a value out of range.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    grayscale: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, maximum in {**dict.fromkeys(COLOR_KEYS, math.inf), "hue": 0.5, "grayscale": 1}.items():
            check_number(f"dataset.images.{name}", getattr(self, name), 0, maximum=maximum)

    @property
    def is_on(self) -> bool:
        """Whether any image changes."""
        return any(getattr(self, name) for name in COLOR_KEYS)

    def maps(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """(B, 12) float32: of image `rows[b]` in this epoch, the rows of a 3 x 3 matrix and the three offsets behind them.

        rows: (B,) integers; an image's map depends on its own row, not on its neighbours here.
        """
        numbers = uniform(mix(self.seed, epoch, _STREAM), rows, len(COLOR_KEYS))
        ranges = np.array([self.brightness, self.contrast, self.saturation], dtype=np.float64)
        low = np.maximum(0, 1 - ranges)
        factors = low + (1 + ranges - low) * numbers[:, :3]
        brightness, contrast, saturation = (factors[:, i, None, None] for i in range(3))
        saturation = np.where((numbers[:, 4] < self.grayscale)[:, None, None], 0.0, saturation)
        grey = np.tile(_LUMA, (3, 1))
        matrix = _hue_turn(self.hue * (2 * numbers[:, 3] - 1)) @ (saturation * np.eye(3) + (1 - saturation) * grey)
        # A turn and a change of saturation leave grey as it is, so contrast's offset passes through both.
        offset = np.broadcast_to((1 - contrast[:, 0]) * _MID_GREY, (len(rows), 3))
        return np.concatenate([(contrast * brightness * matrix).reshape(-1, 9), offset], axis=1).astype(np.float32)


COLOR_KEYS = tuple(field.name for field in fields(RandomColors) if field.name != "seed")


def described_colors(images: Mapping[str, Any]) -> str:
    """'brightness 0.4, hue 0.1': the colours that vary by these settings of images; "" for none."""
    return ", ".join(f"{key} {images[key]:g}" for key in COLOR_KEYS if images.get(key))


def _hue_turn(turns: np.ndarray) -> np.ndarray:
    """(B, 3, 3): positive turns lead from red over yellow to green, as in HSV."""
    cosine, sine = np.cos(2 * math.pi * turns), np.sin(2 * math.pi * turns)
    turn = np.zeros((len(turns), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = cosine
    turn[:, 1, 2], turn[:, 2, 1] = -sine, sine
    turned: np.ndarray = np.linalg.inv(_TO_YUV) @ turn @ _TO_YUV
    return turned


def recolor(images: Tensor, maps: Tensor) -> Tensor:
    """Images uint8 (B, 3, H, W) after their maps (B, 12) float32, rounded to the nearest level, in the same memory order.

    Sums of three products, not a matrix product, which TF32 or autocast would round to fewer digits than a level has.
    """
    out, values = torch.empty_like(images), maps[:, :, None, None]
    red, green, blue = images.unbind(1)
    for channel in range(3):
        first, second, third = (values[:, 3 * channel + i] for i in range(3))
        # uint8 times float32 is float32: at most two planes of one channel are in memory beside the images.
        mixed = (red * first).add_(green * second).add_(blue * third).add_(values[:, 9 + channel])
        out[:, channel] = mixed.clamp_(0, 255).round_()
    return out
