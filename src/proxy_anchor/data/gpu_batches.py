"""Batches of images that were decoded before (see `image_cache`): cropped on the device, without worker processes.

The loaders take the place of a DataLoader: they have a length, an order whose epoch the trainer sets, and yield what its
batches hold, (images uint8 (B, 3, crop, crop), labels (B,), dataset indices (B,)), on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.augment import RandomCrops, recolor
from proxy_anchor.data.images import DecodedImages
from proxy_anchor.data.sampling import ShuffledBatches
from proxy_anchor.utils import have_triton

Batch = tuple[Tensor, Tensor, Tensor]
_BATCHES_AHEAD = 4  # packed in advance when the pixels are in host memory
_PACKERS = 4  # threads; copying rows of images does not hold Python's lock


def resample(values: Tensor, windows: Tensor, side: int) -> Tensor:
    """Windows of images to uint8 (B, 3, side, side) in channels-last order, on the device of `values`.

    Resized as Pillow does: bilinear with antialiasing. On a GPU one Triton kernel reads the windows where they lie, so that
    nothing is padded or copied; elsewhere torchvision does it image by image. Both round once, Pillow after each of its two
    passes: values differ from Pillow's by at most 1 of 255.

    values: flat uint8, images as rows of (width, 3). windows: (B, 5) int64 on the same device: where the window starts in
    `values`, the width of the image that it lies in, the window's height and width, and whether it is mirrored.
    """
    out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8, device=values.device)
    if values.is_cuda and have_triton():
        from proxy_anchor.data.resample_kernel import resample_kernel

        block = 512
        resample_kernel[(len(windows), -(-side * side // block))](values, windows, out, side, block)
        return out.permute(0, 3, 1, 2)
    images = out.permute(0, 3, 1, 2)
    for image, (start, stride, height, width, mirror) in zip(images, windows.tolist(), strict=True):
        window = values.as_strided((3, height, width), (1, 3 * stride, 3), start)
        resized = F.resize(window, [side, side], antialias=True)
        image.copy_(resized.flip(-1) if mirror else resized)
    return images


class CroppedBatches:
    """Training batches: random crops of pixels, the same boxes that the worker processes would cut.

    Args:
        pixels: the training images, on `device` or in host memory (then only the windows travel, a few batches ahead).
        labels: (N,) int64. crops: which window of which image. order: which images, in which epoch.
    """

    def __init__(
        self, pixels: DecodedImages, labels: Tensor, crops: RandomCrops, order: ShuffledBatches, device: torch.device
    ) -> None:
        self.decoded, self.crops, self.batch_sampler, self.device = pixels, crops, order, device
        self.labels = labels.to(device)
        self.num_images = len(pixels)
        self._heights, self._widths = pixels.sizes.numpy().T
        self._offsets = pixels.offsets.numpy()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        # The labels' device has an index, which torch.device("cuda") lacks.
        make = self._on_device if self.decoded.values.device == self.labels.device else self._from_host
        yield from make()

    def _windows(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (B,) and windows (B, 5) of a batch of epoch * N + row."""
        epochs, rows = np.divmod(items, self.num_images)
        boxes = self.crops.boxes(int(epochs[0]), rows, self._heights[rows], self._widths[rows])
        top, left, height, width, mirror = boxes.T
        start = self._offsets[rows] + 3 * (top * self._widths[rows] + left)
        return rows, np.stack([start, self._widths[rows], height, width, mirror], axis=1)

    def _colors(self, items: np.ndarray) -> np.ndarray:
        """The batch's colour maps as (B, 6) int64 that hold two float32 each; (B, 0) where colours do not vary."""
        if not self.crops.colors.is_on:
            return np.empty((len(items), 0), dtype=np.int64)
        epochs, rows = np.divmod(items, self.num_images)
        return self.crops.colors.maps(int(epochs[0]), rows).view(np.int64)

    def _make(self, values: Tensor, table: Tensor) -> Batch:
        """The batch that a table on the device describes: windows of `values`, image rows, colour maps if there are any."""
        images, indices = resample(values, table[:, :5].contiguous(), self.crops.crop), table[:, 5]
        if self.crops.colors.is_on:
            images = recolor(images, table[:, 6:].view(torch.float32))
        return images, self.labels[indices], indices

    def _on_device(self) -> Iterator[Batch]:
        for batch in self.batch_sampler:
            items = np.array(batch)
            rows, windows = self._windows(items)
            # One small copy per step, queued behind the work of the step before: nothing waits.
            table = self._send(np.concatenate([windows, rows[:, None], self._colors(items)], axis=1))
            yield self._make(self.decoded.values, table)

    def _send(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _from_host(self) -> Iterator[Batch]:
        with ThreadPoolExecutor(_PACKERS) as pool:
            waiting: deque[Future] = deque()
            for batch in self.batch_sampler:
                waiting.append(pool.submit(self._pack, np.array(batch)))
                if len(waiting) > _BATCHES_AHEAD:
                    yield self._unpack(*waiting.popleft().result())
            while waiting:
                yield self._unpack(*waiting.popleft().result())

    def _pack(self, items: np.ndarray) -> tuple[Tensor, Tensor]:
        """The windows of a batch behind one another, and their table (see `_make`)."""
        rows, windows = self._windows(items)
        heights, widths = windows[:, 2], windows[:, 3]
        lengths = 3 * heights * widths
        starts = lengths.cumsum() - lengths
        packed = torch.empty(int(lengths.sum()), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        flat, source = packed.numpy(), self.decoded.values.numpy()
        for (first, stride, height, width, _), start in zip(windows, starts, strict=True):
            window = np.lib.stride_tricks.as_strided(source[first:], (height, 3 * width), (3 * stride, 1))
            flat[start : start + 3 * height * width].reshape(height, 3 * width)[:] = window
        table = np.stack([starts, widths, heights, widths, windows[:, 4], rows], axis=1)
        return packed, torch.from_numpy(np.concatenate([table, self._colors(items)], axis=1))

    def _unpack(self, packed: Tensor, table: Tensor) -> Batch:
        return self._make(packed.to(self.device, non_blocking=True), self._send(table.numpy()))


class StoredBatches:
    """Evaluation batches: slices of images that are stored as the network sees them, in table order.

    pixels: images of one size, on `device` or in host memory. labels: (N,) int64. rows: the images to go through, in one
    piece; None: all.
    """

    def __init__(
        self, pixels: DecodedImages, labels: Tensor, batch_size: int, device: torch.device, rows: range | None = None
    ) -> None:
        height, width = pixels.sizes[0].tolist()
        self.images = pixels.values.view(-1, height, width, 3).permute(0, 3, 1, 2)  # channels-last
        self.labels = labels.to(device)
        self.indices = torch.arange(len(pixels), device=device)
        self.rows = range(len(pixels)) if rows is None else rows
        self.batch_size, self.device = batch_size, device

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in self.rows[:: self.batch_size]:
            rows = slice(start, min(start + self.batch_size, self.rows.stop))
            images = self.images[rows]
            if images.device != self.labels.device:
                images = images.pin_memory().to(self.device, non_blocking=True)
            yield images, self.labels[rows], self.indices[rows]
