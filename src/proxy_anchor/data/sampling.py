"""The order of training images, and the random numbers of each image, from (seed, epoch, image) alone.

So a run depends neither on how many processes decode its images nor on how many devices share its batches, and one that is
continued at epoch 7 sees the order and the crops that epoch 7 would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Sampler

from proxy_anchor.errors import UsageError, check_int


class ShuffledBatches(Sampler[list[int]]):
    """Full batches of a shuffled pass over N images; the last short batch is dropped. The trainer calls `set_epoch`.

    Yields lists of epoch * N + index, so that the dataset, which may live in another process, also knows the epoch.

    Args:
        num_images: N.
        batch_size: images per step over all processes.
        seed: the order follows from it and the epoch.
        rank, world_size: this process takes the rank-th of world_size equal slices of every batch.

    Raises UsageError when the batch cannot be filled or not be divided.
    """

    def __init__(self, num_images: int, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        check_int("data.batch_size", batch_size, 1)
        if batch_size > num_images:
            raise UsageError(
                f"data.batch_size={batch_size} is larger than the {num_images} training images: no batch would be full. "
                f"Set data.batch_size={num_images} or less."
            )
        if batch_size % world_size:
            nearest = max(1, round(batch_size / world_size)) * world_size
            raise UsageError(
                f"data.batch_size={batch_size} is the batch over all devices and cannot be divided over {world_size}: set "
                f"data.batch_size={nearest}."
            )
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.sampler = self  # where the trainer looks for set_epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def batches(self, generator: torch.Generator) -> Tensor:
        """(batches, batch_size) image indices of one pass, over all processes."""
        order = torch.randperm(self.num_images, generator=generator)
        return order[: len(self) * self.batch_size].view(len(self), self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        mine = self.batches(generator).chunk(self.world_size, dim=1)[self.rank]
        yield from (mine + self.epoch * self.num_images).tolist()


def mix(*numbers: int) -> int:
    """A seed in [0, 2**63) that depends on all the numbers and on their order."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
