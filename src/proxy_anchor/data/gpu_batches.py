"""Batches of decoded images (see `image_cache`), cropped on the device without worker processes.

The loaders replace a DataLoader: they have a length and an order whose epoch the trainer sets, and they yield
(images uint8 (B, 3, crop, crop), labels (B,), dataset indices (B,)) on the device.
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
_BATCHES_AHEAD = 4  # prepared in advance when the images are in host memory
_PACKERS = 4  # threads; copying rows of images releases the GIL


def resample(values: Tensor, windows: Tensor, side: int) -> Tensor:
    """Resize windows of images to uint8 (B, 3, side, side), channels-last.

    Bilinear with antialiasing, as in Pillow. On a GPU one Triton kernel reads the windows in place, without padding or
    copies; elsewhere torchvision resizes image by image. Both round once, Pillow after each of its two passes, so
    values differ from Pillow's by at most 1 of 255.

    values: flat uint8, images as rows of (width, 3). windows: (B, 5) int64 on the same device: start of the window in
    `values`, width of its image, height and width of the window, and whether it is mirrored.
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
    """Training batches: random crops of decoded images, as `RandomCrops` makes them.

    Args:
        decoded: the training images, on `device` or in host memory. From host memory only the windows are copied, a few
            batches in advance.
        labels: (N,) int64. crops: windows of the images. order: batches of image indices.
    """

    def __init__(
        self, decoded: DecodedImages, labels: Tensor, crops: RandomCrops, order: ShuffledBatches, device: torch.device
    ) -> None:
        self.decoded, self.crops, self.batch_sampler, self.device = decoded, crops, order, device
        self.labels = labels.to(device)
        self.num_images = len(decoded)
        self._heights, self._widths = decoded.sizes.numpy().T
        self._offsets = decoded.offsets.numpy()

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:
        # Compared with the labels' device, because torch.device("cuda") has no index.
        return self._on_device() if self.decoded.values.device == self.labels.device else self._from_host()

    def _table(self, items: np.ndarray) -> np.ndarray:
        """(B, 6) int64 windows and rows of images, or (B, 12) with colour maps.

        items: (B,) epoch * N + row. An int64 of the colour maps holds two float32.
        """
        epochs, rows = np.divmod(items, self.num_images)
        epoch, heights, widths = int(epochs[0]), self._heights[rows], self._widths[rows]
        top, left, height, width, mirror = self.crops.boxes(epoch, rows, heights, widths).T
        start = self._offsets[rows] + 3 * (top * widths + left)
        table = np.stack([start, widths, height, width, mirror, rows], axis=1)
        if not self.crops.colors.is_on:
            return table
        return np.concatenate([table, self.crops.colors.maps(epoch, rows).view(np.int64)], axis=1)

    def _make(self, values: Tensor, table: Tensor) -> Batch:
        """Make a batch from its table: windows, image rows, colour maps."""
        images, indices = resample(values, table[:, :5].contiguous(), self.crops.crop), table[:, 5]
        if self.crops.colors.is_on:
            images = recolor(images, table[:, 6:].view(torch.float32))
        return images, self.labels[indices], indices

    def _on_device(self) -> Iterator[Batch]:
        for batch in self.batch_sampler:
            # One small asynchronous copy per step, queued after the previous step.
            yield self._make(self.decoded.values, self._send(self._table(np.array(batch))))

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

    def _pack(self, items: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Concatenated windows of a batch, and their table (see `_make`)."""
        table = self._table(items)
        heights, widths = table[:, 2], table[:, 3]
        lengths = 3 * heights * widths
        starts = lengths.cumsum() - lengths
        packed = torch.empty(int(lengths.sum()), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        flat, source = packed.numpy(), self.decoded.values.numpy()
        for (first, stride, height, width), start in zip(table[:, :4], starts, strict=True):
            window = np.lib.stride_tricks.as_strided(source[first:], (height, 3 * width), (3 * stride, 1))
            flat[start : start + 3 * height * width].reshape(height, 3 * width)[:] = window
        table[:, 0], table[:, 1] = starts, widths  # of the packed windows
        return packed, table

    def _unpack(self, packed: Tensor, table: np.ndarray) -> Batch:
        return self._make(packed.to(self.device, non_blocking=True), self._send(table))


class StoredBatches:
    """Evaluation batches: slices of cropped images, in table order.

    decoded: images of one size, on `device` or in host memory. labels: (N,) int64. rows: contiguous range of images.
    """

    def __init__(
        self, decoded: DecodedImages, labels: Tensor, batch_size: int, device: torch.device, rows: range
    ) -> None:
        height, width = decoded.sizes[0].tolist()
        self.images = decoded.values.view(-1, height, width, 3).permute(0, 3, 1, 2)  # channels-last
        self.labels = labels.to(device)
        self.indices = torch.arange(len(decoded), device=device)
        self.rows, self.batch_size, self.device = rows, batch_size, device

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        for start in self.rows[:: self.batch_size]:
            rows = slice(start, min(start + self.batch_size, self.rows.stop))
            images = self.images[rows]
            if images.device != self.labels.device:
                images = images.pin_memory().to(self.device, non_blocking=True)
            yield images, self.labels[rows], self.indices[rows]
