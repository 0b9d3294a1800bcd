"""Random and central crops, and random colours, of training and evaluation images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.sampling import mix, uniform
from proxy_anchor.errors import UsageError, check_int, check_number

_STREAM = 1  # makes the random numbers of colours independent of those of crops
_MID_GREY = 127.5
_LUMA = np.array([0.299, 0.587, 0.114])
# Luma and chroma. YIQ's I and Q are U and V rotated by 33 degrees, so hue rotations are the same in both.
_TO_YUV = np.stack([_LUMA, 0.492 * (np.eye(3)[2] - _LUMA), 0.877 * (np.eye(3)[0] - _LUMA)])


@dataclass(frozen=True)
class RandomColors:
    """Random colours, with the ranges of torchvision's ColorJitter and RandomGrayscale.

    brightness, contrast, saturation: x draws a factor from [max(0, 1 - x), 1 + x]. Brightness scales the pixels,
    contrast their distance from mid-grey (127.5), saturation their distance from their luma. hue: h, at most 0.5,
    rotates the chroma plane of YIQ by [-h, h] full turns and keeps luma. grayscale: probability of an image without
    chroma. seed: of all draws.

    Applied in this order as one affine map and clamped once at the end. torchvision shuffles the order, clamps after
    each step, rotates hue in HSV and uses the image's mean luma for contrast. These steps are not linear in the
    pixels, so each would need its own pass over the batch.

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
        """Whether any colour varies."""
        return any(getattr(self, name) for name in COLOR_KEYS)

    def maps(self, epoch: int, rows: np.ndarray) -> np.ndarray:
        """(B, 12) float32 colour maps of a batch.

        Each is a 3 x 3 matrix, row by row, and 3 offsets. rows: (B,) integers, the images of the batch; a map depends
        only on the epoch and its own row.
        """
        numbers = uniform(mix(self.seed, epoch, _STREAM), rows, len(COLOR_KEYS))
        ranges = np.array([self.brightness, self.contrast, self.saturation], dtype=np.float64)
        low = np.maximum(0, 1 - ranges)
        factors = low + (1 + ranges - low) * numbers[:, :3]
        brightness, contrast, saturation = (factors[:, i, None, None] for i in range(3))
        saturation = np.where((numbers[:, 4] < self.grayscale)[:, None, None], 0.0, saturation)
        grey = np.tile(_LUMA, (3, 1))
        matrix = _hue_turn(self.hue * (2 * numbers[:, 3] - 1)) @ (saturation * np.eye(3) + (1 - saturation) * grey)
        # Hue and saturation do not change grey, so they do not change the offset of contrast.
        offset = np.broadcast_to((1 - contrast[:, 0]) * _MID_GREY, (len(rows), 3))
        return np.concatenate([(contrast * brightness * matrix).reshape(-1, 9), offset], axis=1).astype(np.float32)


COLOR_KEYS = tuple(field.name for field in fields(RandomColors) if field.name != "seed")


def described_colors(images: Mapping[str, Any]) -> str:
    """Describe settings of colours: 'brightness 0.4, hue 0.1', or ""."""
    return ", ".join(f"{key} {images[key]:g}" for key in COLOR_KEYS if images.get(key))


def _hue_turn(turns: np.ndarray) -> np.ndarray:
    """(B, 3, 3) hue rotations; positive from red to yellow."""
    cosine, sine = np.cos(2 * math.pi * turns), np.sin(2 * math.pi * turns)
    turn = np.zeros((len(turns), 3, 3))
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = cosine
    turn[:, 1, 2], turn[:, 2, 1] = -sine, sine
    turned: np.ndarray = np.linalg.inv(_TO_YUV) @ turn @ _TO_YUV
    return turned


def recolor(images: Tensor, maps: Tensor) -> Tensor:
    """Apply colour maps (B, 12) float32 to images uint8 (B, 3, H, W).

    Values are rounded to the nearest level; the memory format is kept. Written as sums of products, because TF32 or
    autocast would round a matrix product to less than one level.
    """
    out, values = torch.empty_like(images), maps[:, :, None, None]
    red, green, blue = images.unbind(1)
    for channel in range(3):
        first, second, third = (values[:, 3 * channel + i] for i in range(3))
        # uint8 times float32 is float32. At most two float32 planes of one channel are in memory at once.
        mixed = (red * first).add_(green * second).add_(blue * third).add_(values[:, 9 + channel])
        out[:, channel] = mixed.clamp_(0, 255).round_()
    return out


_RATIO = (3 / 4, 4 / 3)  # width over height, as in the paper's code
_ATTEMPTS = 10  # before the largest central crop of an allowed ratio is taken, as in torchvision
_NUMBERS = 2 * _ATTEMPTS + 3  # random numbers of one image in one epoch


@dataclass(frozen=True)
class RandomCrops:
    """Random resized crop and horizontal flip, with torchvision's distribution.

    crop: side of the result in pixels. scale: range of the cropped share of the area. flip: probability of mirroring.
    seed: of all crops. colors: random colours; none by default. Raises UsageError for a value out of range.
    """

    crop: int
    scale: Sequence[float] = (0.08, 1.0)
    flip: float = 0.5
    seed: int = 0
    colors: RandomColors = RandomColors()

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
        """(B, 5) int64 boxes: top, left, height, width, mirrored (0 or 1).

        rows, heights, widths: (B,) integers, the images of the batch and their sizes. A box depends only on the epoch
        and its own image.
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

        # Otherwise the centre of the image, cropped to the nearest allowed ratio.
        wide, tall = widths / heights > _RATIO[1], widths / heights < _RATIO[0]
        h = np.where(found, tried_h[every, first], np.where(tall, np.rint(widths / _RATIO[0]), heights))
        w = np.where(found, tried_w[every, first], np.where(wide, np.rint(heights * _RATIO[1]), widths))
        y, x, mirror = numbers[:, -3:].T
        top = np.where(found, np.floor(y * (heights - h + 1)), (heights - h) // 2)
        left = np.where(found, np.floor(x * (widths - w + 1)), (widths - w) // 2)
        return np.stack([top, left, h, w, mirror < self.flip], axis=1).astype(np.int64)  # all are whole numbers

    def __call__(self, image: Image.Image, epoch: int, row: int) -> Tensor:
        """Crop of image `row` in this epoch: uint8 (3, crop, crop)."""
        width, height = image.size
        [box] = self.boxes(epoch, np.array([row]), np.array([height]), np.array([width]))
        top, left, h, w, mirror = box.tolist()
        cropped = F.resized_crop(image, top, left, h, w, [self.crop, self.crop], antialias=True)
        pixels = F.pil_to_tensor(F.horizontal_flip(cropped) if mirror else cropped)
        if not self.colors.is_on:
            return pixels
        return recolor(pixels[None], torch.from_numpy(self.colors.maps(epoch, np.array([row]))))[0]


@dataclass(frozen=True)
class CentralCrop:
    """Central crop after resizing, bilinear, as in the paper's code.

    resize: shorter side in pixels after resizing; None: the whole image is squeezed to the crop, timm's "squash".
    crop: side of the central square in pixels.

    Raises UsageError for a value out of range.
    """

    crop: int
    resize: int | None

    def __post_init__(self) -> None:
        check_int("dataset.images.crop", self.crop, 1)
        check_int("dataset.images.resize", self.resize, self.crop, optional=True)

    @classmethod
    def of(cls, images: Mapping[str, Any]) -> CentralCrop:
        """The crop of searched images, from `dataset.images`."""
        return cls(images.get("eval_crop") or images["crop"], images["resize"])

    def __str__(self) -> str:
        if self.resize is None:
            return f"the whole image is resized to {self.crop} x {self.crop} pixels (bilinear)"
        return (
            f"the shorter side of an image is resized to {self.resize} pixels (bilinear), then the central square of "
            f"{self.crop} pixels is taken"
        )

    def keep(self, image: Image.Image) -> Image.Image:
        """The crop as a Pillow image."""
        size = [self.crop, self.crop] if self.resize is None else [self.resize]
        resized = F.resize(image, size, InterpolationMode.BILINEAR, antialias=True)
        return F.center_crop(resized, [self.crop, self.crop])

    def __call__(self, image: Image.Image, epoch: int = 0, row: int = 0) -> Tensor:
        """The crop as uint8 (3, crop, crop), the same in every epoch."""
        return F.pil_to_tensor(self.keep(image))
