"""The order of training images, and the random numbers of each image, from (seed, epoch, image) alone.

So a run does not depend on how many processes decode its images, and one that is continued at epoch 7 sees the order and
the crops that epoch 7 would have had.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch.utils.data import Sampler


class EpochShuffle(Sampler[int]):
    """Every image once per epoch, in another order each epoch; the trainer calls `set_epoch`.

    Yields epoch * N + index, so that the dataset, which may live in another process, also knows the epoch.
    """

    def __init__(self, num_images: int, seed: int) -> None:
        self.num_images = num_images
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_images

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        order = torch.randperm(self.num_images, generator=generator)
        yield from (order + self.epoch * self.num_images).tolist()


def mix(*numbers: int) -> int:
    """A seed in [0, 2**63) that depends on all the numbers and on their order."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
