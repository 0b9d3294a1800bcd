"""Order of the training images, and random numbers of each image.

Both depend on (seed, epoch, image) alone: not on the number of worker processes or devices. A run that resumes at
epoch 7 has the order and the crops that epoch 7 would have had.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Sampler

from proxy_anchor.errors import UsageError, check_int


class ShuffledBatches(Sampler[list[int]]):
    """Shuffled full batches; the last incomplete batch is dropped.

    Yields lists of epoch * N + index, so that the dataset in a worker process also knows the epoch. The trainer calls
    `set_epoch`.

    Args:
        num_images: N.
        batch_size: images per step over all ranks.
        seed: of the order, together with the epoch.
        rank, world_size: this rank takes the rank-th of world_size equal slices of every batch.

    Raises UsageError when a batch cannot be filled or divided.
    """

    def __init__(self, num_images: int, batch_size: int, *, seed: int = 0, rank: int = 0, world_size: int = 1) -> None:
        check_int("data.batch_size", batch_size, 1)
        if batch_size > num_images:
            raise UsageError(
                f"data.batch_size={batch_size} is larger than the {num_images} training images: no batch would be "
                f"full. Set data.batch_size={num_images} or less."
            )
        check_divisible(batch_size, world_size)
        self.num_images, self.batch_size, self.seed = num_images, batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.sampler = self  # Lightning calls set_epoch on this attribute

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_images // self.batch_size

    def batches(self, generator: torch.Generator) -> Tensor:
        """(batches, batch_size) image indices of one pass over all ranks."""
        order = torch.randperm(self.num_images, generator=generator)
        return order[: len(self) * self.batch_size].view(len(self), self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        mine = self.batches(generator).chunk(self.world_size, dim=1)[self.rank]
        yield from (mine + self.epoch * self.num_images).tolist()


class PKBatches(ShuffledBatches):
    """Batches of P classes with K images each; P = batch_size / K.

    For losses that need positives in the batch. An epoch has as many batches as a shuffled pass. Each class's images
    are shuffled and split into groups of K. Every batch draws P groups of different classes, with a probability
    proportional to the number of groups that a class has left, so images appear about as often as in a shuffled pass.
    An incomplete group is filled with images of its class, each repeated as rarely as possible. When fewer than P
    classes have groups left, the other classes are shuffled and split again. The groups that an epoch leaves out are
    random, so every image is seen in the long run.

    Args:
        labels: (N,) class of each image.
        images_per_class: K, at least 2.
        batch_size, and place (seed, rank, world_size): see `ShuffledBatches`.

    Raises UsageError when the batch cannot be divided by K, P is 1 (no negatives), or there are fewer than P
        classes.
    """

    def __init__(
        self, labels: Sequence[int] | np.ndarray, batch_size: int, images_per_class: int, **place: int
    ) -> None:
        check_int("data.images_per_class", images_per_class, 2)
        super().__init__(len(labels), batch_size, **place)
        self.images_per_class, self.num_groups = images_per_class, batch_size // images_per_class
        if batch_size % images_per_class or self.num_groups < 2:  # a single class has no negatives
            step = math.lcm(images_per_class, self.world_size)
            nearest = max(-(-2 * images_per_class // step), round(batch_size / step)) * step
            raise UsageError(
                f"data.batch_size={batch_size} is not a multiple of data.images_per_class={images_per_class} for two "
                f"classes or more: set data.batch_size={nearest}, or data.images_per_class=null for shuffled batches."
            )
        order = np.argsort(labels, kind="stable")
        counts = np.unique(np.asarray(labels)[order], return_counts=True)[1]
        self.members = [torch.from_numpy(each) for each in np.split(order, np.cumsum(counts)[:-1])]
        if len(counts) < self.num_groups:
            raise UsageError(
                f"data.batch_size={batch_size} with data.images_per_class={images_per_class} takes "
                f"{self.num_groups} classes and there are {len(counts)}: set "
                f"data.batch_size={len(counts) * images_per_class} or less."
            )

    def batches(self, generator: torch.Generator) -> Tensor:
        """(batches, batch_size) image indices of one pass over all ranks, the K images of a class in a row."""
        groups = [self._cut(images, generator) for images in self.members]
        left = torch.tensor([len(each) for each in groups], dtype=torch.float64)
        rows = []
        for _ in range(len(self)):
            chosen = torch.multinomial(left, min(self.num_groups, int((left > 0).sum())), generator=generator)
            if len(chosen) < self.num_groups:
                empty = (left == 0).nonzero().flatten()
                again = empty[torch.randperm(len(empty), generator=generator)[: self.num_groups - len(chosen)]]
                for index in again.tolist():
                    groups[index] = self._cut(self.members[index], generator)
                    left[index] = len(groups[index])
                chosen = torch.cat([chosen, again])
            left[chosen] -= 1
            rows.append(torch.cat([groups[index].pop() for index in chosen.tolist()]))
        return torch.stack(rows)

    def _cut(self, images: Tensor, generator: torch.Generator) -> list[Tensor]:
        """Random groups of K images of a class; the last is filled up."""
        k, count = self.images_per_class, len(images)
        shuffled = images[torch.randperm(count, generator=generator)]
        # The last continues at the start of the order. Only in a small class it holds those images itself.
        groups = shuffled[torch.arange(-(-count // k) * k) % count].split(k)
        # `pop` takes the last group, which would otherwise always be the one that was filled up.
        return [groups[index] for index in torch.randperm(len(groups), generator=generator).tolist()]


def check_divisible(batch_size: int, world_size: int) -> None:
    """Raise UsageError unless the ranks can divide a batch equally."""
    if batch_size % world_size:
        nearest = max(1, round(batch_size / world_size)) * world_size
        raise UsageError(
            f"data.batch_size={batch_size} is the batch over all devices and cannot be divided over {world_size}: set "
            f"data.batch_size={nearest}."
        )


def evaluation_share(num_images: int, batch_size: int, rank: int, world_size: int) -> tuple[range, int]:
    """(images, batch size) that a rank evaluates; each image belongs to one rank.

    Batches are those of a single process, so that embeddings do not depend on the number of ranks. They are smaller
    only if there are fewer batches than ranks, since each rank needs one. Raises UsageError for fewer images than
    ranks.
    """
    if num_images < world_size:
        raise UsageError(
            f"{num_images} images cannot be evaluated on {world_size} devices: set trainer.devices={num_images} or "
            "less."
        )
    batch_size = min(batch_size, num_images // world_size)
    batches = -(-num_images // batch_size)
    start, stop = (batches * part // world_size * batch_size for part in (rank, rank + 1))
    return range(start, min(stop, num_images)), batch_size


def share_seen(order: ShuffledBatches, epoch: int) -> float:
    """Share of the images in the batches of an epoch, over all ranks."""
    return len(order.batches(torch.Generator().manual_seed(mix(order.seed, epoch))).unique()) / order.num_images


def mix(*numbers: int) -> int:
    """Hash numbers to a seed in [0, 2**63)."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little") >> 1


def uniform(key: int, rows: np.ndarray, count: int) -> np.ndarray:
    """(B, count) float64 in [0, 1): SplitMix64 (Steele et al. 2014) at the counters of each row."""
    with np.errstate(over="ignore"):
        counter = rows.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
        bits: np.ndarray = np.uint64(key) + counter * np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return (bits >> np.uint64(11)) * 2.0**-53
