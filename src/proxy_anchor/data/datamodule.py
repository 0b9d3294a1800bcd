"""One LightningDataModule for every data set: it only turns tables into loaders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset

from proxy_anchor.data.crops import CentralCrop, RandomCrops
from proxy_anchor.data.images import ImageDataset
from proxy_anchor.data.sampling import PKBatches, ShuffledBatches, share_seen
from proxy_anchor.data.table import Splits
from proxy_anchor.errors import check_int


def _num_cores() -> int:
    """The cores that this process may use; where the system does not tell (macOS, Windows), all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ImageDataModule(pl.LightningDataModule):
    """Loaders over a benchmark's splits.

    Batches are (images uint8 (B, 3, crop, crop), labels (B,), dataset indices (B,)). Training batches are shuffled and
    the last short one is dropped; evaluation keeps order and drops nothing.

    Args:
        splits: what to train on and what to search.
        batch_size: training images per step, over all devices.
        eval_batch_size: images per evaluation step (default: batch_size).
        images_per_class: K of P x K batches (see `PKBatches`); None shuffles.
        seed: of the training order and crops, which depend on nothing but it and the epoch.
        num_workers: decoding processes; None takes the cores of this process, at most 16.
        crop, resize: sides in pixels (see `CentralCrop`). scale, flip: see `RandomCrops`.

    Raises UsageError when a value is out of range or the training images do not fill one batch.
    """

    def __init__(
        self,
        splits: Splits,
        *,
        batch_size: int = 180,
        eval_batch_size: int | None = None,
        images_per_class: int | None = None,
        num_workers: int | None = None,
        seed: int = 0,
        crop: int = 224,
        resize: int = 256,
        scale: Sequence[float] = (0.08, 1.0),
        flip: float = 0.5,
    ) -> None:
        super().__init__()
        if eval_batch_size is not None:
            check_int("data.eval_batch_size", eval_batch_size, 1)
        if num_workers is not None:
            check_int("data.num_workers", num_workers, 0)
        check_int("data.batch_size", batch_size, 1)
        self.splits = splits
        self.batch_size = batch_size
        self.images_per_class = images_per_class
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = min(_num_cores(), 16) if num_workers is None else num_workers
        self.seed = seed
        # Made here to refuse batches that cannot be filled before training; without training images there are none.
        self.order = self.make_order() if len(splits.train) else None
        self.train_images = ImageDataset(splits.train, RandomCrops(crop, scale, flip, seed))
        test = CentralCrop(crop, resize)
        # One loader per table that is searched, with the name of its set and whether it is that set's gallery.
        self.eval_images: list[ImageDataset] = []
        self.eval_roles: list[tuple[str, bool]] = []
        for name, (query, gallery) in splits.evaluated.items():
            for table, is_gallery in ((query, False), (gallery, True)):
                if table is not None:
                    self.eval_images.append(ImageDataset(table, test))
                    self.eval_roles.append((name, is_gallery))

    @property
    def num_eval_images(self) -> int:
        """All images that one evaluation embeds."""
        return sum(map(len, self.eval_images))

    def describe(self) -> str:
        """One line on what is trained on and what is searched, and one for the loader's notice if it has any."""
        lines = [self.splits.describe()]
        if isinstance(self.order, PKBatches):
            lines.append(
                f"batches: {self.order.num_groups} classes x {self.images_per_class} images, for positives in every batch "
                f"(data.images_per_class); the first epoch holds {100 * share_seen(self.order, 0):.1f} % of the images"
            )
        return "\n".join(lines)

    def make_order(self, rank: int = 0, world_size: int = 1) -> ShuffledBatches:
        """The batches of this process: shuffled, or P x K."""
        place: dict[str, int] = {"seed": self.seed, "rank": rank, "world_size": world_size}
        if self.images_per_class is None:
            return ShuffledBatches(len(self.splits.train), self.batch_size, **place)
        return PKBatches(self.splits.train.labels, self.batch_size, self.images_per_class, **place)

    def train_dataloader(self) -> DataLoader:
        """Full batches."""
        return self._loader(self.train_images, batch_sampler=self.make_order())

    def val_dataloader(self) -> list[DataLoader]:
        """One loader per entry of `eval_roles`, in table order."""
        return [self._loader(images, batch_size=self.eval_batch_size) for images in self.eval_images]

    def _loader(self, images: Dataset, **batches: Any) -> DataLoader:
        return DataLoader(
            images,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            **batches,
        )
