"""The crops of the paper: which part of an image is seen, and what is made of it.

Where a random crop lies follows from (seed, epoch, image) alone, so that every way of making it (Pillow in a worker
process, a kernel on the graphics card) shows the network the same part of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.colors import RandomColors, recolor
from proxy_anchor.data.sampling import mix, uniform
from proxy_anchor.errors import UsageError, check_int, check_number

_RATIO = (3 / 4, 4 / 3)  # width over height, as in the paper's code
_AS_THEY_ARE = RandomColors()
_ATTEMPTS = 10  # until the largest central crop of an allowed ratio is taken, as in torchvision
_NUMBERS = 2 * _ATTEMPTS + 3  # random numbers of one image in one epoch


@dataclass(frozen=True)
class RandomCrops:
    """Random resized crop and horizontal flip, as in the paper and with torchvision's distribution.

    crop: side in pixels of what comes out. scale: range of the cropped share of the area. flip: probability of mirroring.
    seed: of all crops. colors: how colours vary; not at all unless told. Raises UsageError for a value out of range.
    """

    crop: int
    scale: Sequence[float] = (0.08, 1.0)
    flip: float = 0.5
    seed: int = 0
    colors: RandomColors = _AS_THEY_ARE

    def __post_init__(self) -> None:
        check_int("dataset.images.crop", self.crop, 1)
        check_number("dataset.images.flip", self.flip, 0, maximum=1)
        if not isinstance(self.scale, Sequence) or len(self.scale) != 2:
            given = list(self.scale) if isinstance(self.scale, Sequence) else self.scale
            raise UsageError(f"dataset.images.scale={given}: expected two numbers, smallest and largest share.")
        low, high = self.scale
        check_number("dataset.images.scale[1]", high, 0, maximum=1, exclusive=True)
        check_number("dataset.images.scale[0]", low, 0, maximum=high, exclusive=True)

    def boxes(self, epoch: int, rows: np.ndarray, heights: np.ndarray, widths: np.ndarray) -> np.ndarray:
        """(B, 5) int64: top, left, height, width and whether it is mirrored, of image `rows[b]` in this epoch.

        rows, heights, widths: (B,) integers; an image's box depends on its own row and size, not on its neighbours here.
        """
        numbers = uniform(mix(self.seed, epoch), rows, _NUMBERS)
        heights, widths = heights.astype(np.int64), widths.astype(np.int64)
        low, high = self.scale
        area = (heights * widths)[:, None] * (low + (high - low) * numbers[:, :_ATTEMPTS])
        logs = math.log(_RATIO[0]), math.log(_RATIO[1])
        ratio = np.exp(logs[0] + (logs[1] - logs[0]) * numbers[:, _ATTEMPTS : 2 * _ATTEMPTS])
        tried_w, tried_h = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
        fits = (tried_w >= 1) & (tried_w <= widths[:, None]) & (tried_h >= 1) & (tried_h <= heights[:, None])
        first, every = fits.argmax(1), np.arange(len(fits))
        found = fits[every, first]

        # Otherwise the middle of the image, cut to the nearest allowed ratio.
        wide, tall = widths / heights > _RATIO[1], widths / heights < _RATIO[0]
        h = np.where(found, tried_h[every, first], np.where(tall, np.rint(widths / _RATIO[0]), heights)).astype(
            np.int64
        )
        w = np.where(found, tried_w[every, first], np.where(wide, np.rint(heights * _RATIO[1]), widths)).astype(
            np.int64
        )
        y, x, mirror = numbers[:, -3:].T
        top = np.where(found, np.floor(y * (heights - h + 1)), (heights - h) // 2).astype(np.int64)
        left = np.where(found, np.floor(x * (widths - w + 1)), (widths - w) // 2).astype(np.int64)
        return np.stack([top, left, h, w, mirror < self.flip], axis=1)

    def __call__(self, image: Image.Image, epoch: int, row: int) -> Tensor:
        """The crop of image `row` in this epoch: uint8 (3, crop, crop)."""
        width, height = image.size
        [box] = self.boxes(epoch, np.array([row]), np.array([height]), np.array([width]))
        top, left, h, w, mirror = box.tolist()
        cropped = F.resized_crop(image, top, left, h, w, [self.crop, self.crop], antialias=True)
        seen = F.pil_to_tensor(F.horizontal_flip(cropped) if mirror else cropped)
        if not self.colors.is_on:
            return seen
        return recolor(seen[None], torch.from_numpy(self.colors.maps(epoch, np.array([row]))))[0]


@dataclass(frozen=True)
class CentralCrop:
    """Shorter side to `resize`, then the central square of `crop` pixels. Bilinear, as in the paper's code.

    Raises UsageError for a value out of range.
    """

    crop: int
    resize: int

    def __post_init__(self) -> None:
        check_int("dataset.images.crop", self.crop, 1)
        check_int("dataset.images.resize", self.resize, self.crop)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the crop of any image."""
        return self.crop, self.crop

    def keep(self, image: Image.Image) -> Image.Image:
        """The crop, as Pillow's image."""
        resized = F.resize(image, [self.resize], InterpolationMode.BILINEAR, antialias=True)
        return F.center_crop(resized, [self.crop, self.crop])

    def __call__(self, image: Image.Image, epoch: int = 0, row: int = 0) -> Tensor:
        """uint8 (3, crop, crop), the same in every epoch."""
        return F.pil_to_tensor(self.keep(image))
