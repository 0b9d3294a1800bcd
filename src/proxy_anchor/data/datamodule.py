"""LightningDataModule that turns the tables of any data set into loaders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from proxy_anchor.data.augment import CentralCrop, RandomColors, RandomCrops
from proxy_anchor.data.bad_images import ON_BAD_IMAGE
from proxy_anchor.data.gpu_batches import CroppedBatches, StoredBatches
from proxy_anchor.data.image_cache import Form, Shrunk, decode_to_device, decode_to_file, free_memory, kept_sizes
from proxy_anchor.data.images import SHARED_MEMORY, DecodedImages, ImageDataset, fit_workers
from proxy_anchor.data.sampling import PKBatches, ShuffledBatches, evaluation_share, share_seen
from proxy_anchor.data.table import ImageTable, Splits
from proxy_anchor.errors import UsageError, check_choice, check_int

_SHARE = 0.5  # of free memory that decoded images may take; the rest is for the network and other processes


class ImageDataModule(pl.LightningDataModule):
    """Loaders over the splits of a data set.

    Batches are (images uint8 (B, 3, crop, crop), labels (B,), dataset indices (B,)). Training batches are shuffled and
    the last incomplete one is dropped; evaluation keeps the order and all images. Order and crops do not depend on
    where and by how many processes images are decoded. With several devices each one takes a part of every training
    batch and a share of the evaluated images, without duplicates.

    Args:
        splits: what to train on and what to search.
        batch_size: training images per step, over all devices.
        eval_batch_size: images per evaluation step and device (default: batch_size).
        images_per_class: K of P x K batches (see `PKBatches`); None shuffles.
        seed: of the training order and crops, which depend only on the seed and the epoch.
        num_workers: decoding processes; None: the available CPUs, at most 16, and as many as `setup` finds room for.
        crop, resize: sides in pixels (see `CentralCrop`). scale, flip: see `RandomCrops`.
        eval_crop: side of searched images; None: as crop.
        brightness, contrast, saturation, hue, grayscale: of training images, see `RandomColors`.
        crop_on: where training images are cropped. "cpu": in the worker processes, image by image (the reference).
            "gpu": on the GPU, from images that the worker processes decode once, before training. "auto": on the GPU
            if there is one and the decoded images fit into half of its free memory, or of the host's. Worker
            processes decode with Pillow in every case.
        cache: where decoded images are stored: "gpu", "ram" (shared by all processes until the run ends), "disk" (a
            file in `cache_dir`, reused by later runs), "none" (decoded in every epoch) or "auto" (with crop_on "gpu"
            the first of gpu and ram that fits, otherwise none).
        cache_side: largest shorter side of cached training images; None stores them unchanged.
        cache_dir: folder of cache "disk".
        on_bad_image: "raise", or "skip" if the splits are from `drop_bad_images`; selects the repair in error messages.

    Attributes:
        loading: where images are cropped and stored, after `setup`: crop_on, cache, bytes, seconds.

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
        resize: int | None = 256,
        eval_crop: int | None = None,
        scale: Sequence[float] = (0.08, 1.0),
        flip: float = 0.5,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        hue: float = 0.0,
        grayscale: float = 0.0,
        crop_on: str = "cpu",
        cache: str = "none",
        cache_side: int | None = None,
        cache_dir: str | Path = "~/.cache/proxy_anchor",
        on_bad_image: str = "raise",
    ) -> None:
        super().__init__()
        check_int("data.num_workers", num_workers, 0, optional=True)
        check_int("data.eval_batch_size", eval_batch_size, 1, optional=True)
        check_int("dataset.images.eval_crop", eval_crop, 1, optional=True)
        check_choice("data.crop_on", crop_on, ("auto", "cpu", "gpu"))
        check_choice("data.cache", cache, ("auto", "gpu", "ram", "disk", "none"))
        if crop_on == "cpu" and cache == "gpu":
            raise UsageError(
                "data.crop_on=cpu crops in worker processes, which cannot read data.cache=gpu: set ram or disk."
            )
        if crop_on == "gpu" and cache == "none":
            raise UsageError("data.crop_on=gpu crops cached images: set data.cache=auto, gpu, ram or disk.")
        check_choice("data.on_bad_image", on_bad_image, ON_BAD_IMAGE)
        self.splits, self.on_bad_image = splits, on_bad_image
        self.batch_size = batch_size
        self.images_per_class = images_per_class
        self.eval_batch_size = eval_batch_size or batch_size
        self._num_workers, self.num_workers = num_workers, fit_workers(num_workers, [])
        self.seed = seed
        # Made here so that a batch size that does not fit is refused early.
        self.order = self.make_order() if len(splits.train) else None
        colors = RandomColors(brightness, contrast, saturation, hue, grayscale, seed)
        self.train_crops = RandomCrops(crop, scale, flip, seed, colors)
        self.eval_crop = CentralCrop.of({"crop": crop, "eval_crop": eval_crop, "resize": resize})
        self.train_images = ImageDataset(splits.train, self.train_crops)
        # One loader per searched table; its role is (name of the set, whether it is the gallery).
        self.eval_images: list[ImageDataset] = []
        self.eval_roles: list[tuple[str, bool]] = []
        for name, (query, gallery) in splits.evaluated.items():
            for table, is_gallery in ((query, False), (gallery, True)):
                if table is not None:
                    self.eval_images.append(ImageDataset(table, self.eval_crop))
                    self.eval_roles.append((name, is_gallery))
        self._crop_on, self._cache, self._form = crop_on, cache, Shrunk(cache_side)
        self._cache_dir = Path(cache_dir).expanduser()
        self._device = torch.device("cpu")
        self._eval_decoded: list[DecodedImages] = []
        self.loading: dict[str, Any] | None = None

    @property
    def num_eval_images(self) -> int:
        """Number of images that one evaluation embeds."""
        return sum(map(len, self.eval_images))

    def describe(self) -> str:
        """Lines on the splits and on P x K batches."""
        lines = [self.splits.describe()]
        if isinstance(self.order, PKBatches):
            lines.append(
                f"batches: {self.order.num_groups} classes x {self.images_per_class} images, for positives in "
                f"every batch (data.images_per_class); the first epoch holds {100 * share_seen(self.order, 0):.1f} "
                "% of the images"
            )
        return "\n".join(lines)

    def make_order(self, rank: int = 0, world_size: int = 1) -> ShuffledBatches:
        """Training batches of a rank: shuffled, or P x K."""
        place: dict[str, int] = {"seed": self.seed, "rank": rank, "world_size": world_size}
        if self.images_per_class is None:
            return ShuffledBatches(len(self.splits.train), self.batch_size, **place)
        return PKBatches(self.splits.train.labels, self.batch_size, self.images_per_class, **place)

    def describe_loading(self) -> str:
        """One line on where images are decoded and cropped."""
        if self.loading is None or self.loading["cache"] == "none":
            return f"images: decoded in every epoch by {self.num_workers} worker processes"
        return (
            f"images: decoded once, {self.loading['bytes'] / 1e9:.2f} GB in {self.loading['seconds']:.1f} s "
            f"(data.cache={self.loading['cache']} data.crop_on={self.loading['crop_on']})"
        )

    def setup(self, stage: str) -> None:
        """Choose where images are cropped and stored, and fill the cache, once."""
        if self.loading is not None:
            return
        start = time.perf_counter()
        trainer: Any = self.trainer  # None: on the CPU, alone
        if trainer is not None:
            if trainer.world_size > 1 and trainer._accelerator_connector.use_distributed_sampler:
                raise UsageError(
                    "ImageDataModule divides its batches over the devices itself: pass "
                    "use_distributed_sampler=False to pl.Trainer."
                )
            if trainer.strategy.broadcast(self.splits.skipped) != self.splits.skipped:
                raise UsageError(
                    "different images are unreadable on different ranks: check that all ranks see the same files."
                )
            self._device = trainer.strategy.root_device
        crop_on, cache = self._choose()
        image = 3 * self.eval_crop.crop**2  # bytes
        loaders = [(image * (self.batch_size // self._place[1]), len(self.order or ()))] if crop_on == "cpu" else []
        if cache == "none":
            loaders += [(image * size, -(-len(rows) // size)) for rows, size in self._shares]
        # A cache is filled through pipes, by the processes of one loader.
        self.num_workers = fit_workers(self._num_workers, loaders or [(0, 0)])
        kept: list[tuple[ImageTable, Form]] = [(self.splits.train, self._form)]
        kept += [(images.table, self.eval_crop) for images in self.eval_images]
        if cache == "gpu":
            self.train_images.decoded, *self._eval_decoded = [self._on_gpu(table, form) for table, form in kept]
        elif cache != "none":
            folder = SHARED_MEMORY / f"proxy_anchor-{os.getuid()}" if cache == "ram" else self._cache_dir
            files = [decode_to_file(*each, folder, self.num_workers, name=self.splits.name) for each in kept]
            self.train_images.decoded, *self._eval_decoded = [decoded for decoded, _ in files]
            if trainer is not None:
                trainer.strategy.barrier()
            if cache == "ram" and self._place[0] == 0:
                for _, file in files:
                    file.unlink(missing_ok=True)  # the memory is freed when the last process that maps it ends
        stored = [each for each in (self.train_images.decoded, *self._eval_decoded) if each is not None]
        self.loading = {
            "crop_on": crop_on,
            "cache": cache,
            "bytes": sum(len(each.values) for each in stored),
            "seconds": time.perf_counter() - start,
        }

    def _choose(self) -> tuple[str, str]:
        """(crop_on, cache) with "auto" resolved, equal on all ranks."""
        crop_on, cache = self._crop_on, self._cache
        has_gpu = self._device.type == "cuda"
        if not has_gpu and "gpu" in (crop_on, cache):
            key = "crop_on" if crop_on == "gpu" else "cache"
            raise UsageError(f"data.{key}=gpu needs an NVIDIA GPU and trainer.accelerator=gpu: set data.{key}=auto.")
        if crop_on == "cpu" or cache == "none" or not has_gpu:
            return "cpu", "none" if cache == "auto" else cache
        if cache != "auto":
            return "gpu", cache
        needed = 3 * (int(self._train_sizes.prod(1).sum()) + self.num_eval_images * self.eval_crop.crop**2)  # bytes
        room = {"gpu": torch.cuda.mem_get_info(self._device)[0], "ram": free_memory()}
        fitting = [place for place, free in room.items() if needed <= _SHARE * free]
        choice = ("gpu", fitting[0]) if fitting else ("cpu", "none")
        choice = self.trainer.strategy.broadcast(choice)  # type: ignore[union-attr]  # memory differs between ranks
        if choice[0] == "cpu" and crop_on == "gpu":
            raise UsageError(
                f"data.crop_on=gpu: the decoded images take {needed / 1e9:.0f} GB, more than half of what is free on "
                "the GPU or in memory: set data.cache_side to shrink them, data.cache=disk, or data.crop_on=cpu."
            )
        return choice

    @cached_property
    def _train_sizes(self) -> torch.Tensor:
        return kept_sizes(self.splits.train, self._form, self.num_workers)

    def _on_gpu(self, table: ImageTable, form: Form) -> DecodedImages:
        sizes = self._train_sizes if form is self._form else kept_sizes(table, form, self.num_workers)
        return decode_to_device(table, form, sizes, self._device, self.num_workers, *self._place)

    def train_dataloader(self) -> Any:
        """Full batches, shuffled or P x K."""
        images, order = self.train_images, self.make_order(*self._place)
        if getattr(self.trainer, "overfit_batches", 0):
            order = [*order]  # type: ignore[assignment]  # the same batches in every epoch
        if self.loading is not None and self.loading["crop_on"] == "gpu":
            assert images.decoded is not None
            return CroppedBatches(images.decoded, images.labels, self.train_crops, order, self._device)
        return self._loader(images, batch_sampler=order)

    def val_dataloader(self) -> list[Any]:
        """One loader per entry of `eval_roles`, over this rank's share in table order."""
        if self._eval_decoded:
            stored = zip(self._eval_decoded, self.eval_images, self._shares, strict=True)
            return [StoredBatches(kept, each.labels, size, self._device, rows) for kept, each, (rows, size) in stored]
        pairs = zip(self.eval_images, self._shares, strict=True)
        return [self._loader(images, rows, batch_size=size) for images, (rows, size) in pairs]

    test_dataloader = predict_dataloader = val_dataloader

    @property
    def _shares(self) -> list[tuple[range, int]]:
        return [evaluation_share(len(images), self.eval_batch_size, *self._place) for images in self.eval_images]

    @property
    def _place(self) -> tuple[int, int]:
        """(rank, world size)."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _loader(self, images: ImageDataset, rows: range | None = None, **batches: Any) -> DataLoader:
        mapped = images.decoded is not None and self.num_workers > 0
        share: Dataset = images if rows is None or len(rows) == len(images) else Subset(images, rows)
        return LazyLoader(
            share,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=self.num_workers > 0,
            worker_init_fn=_leave_process_group,
            multiprocessing_context="fork" if mapped else None,  # inherits the memory map, whose file may be deleted
            # Each pass draws a number: not from torch's generator, on which drop path and random losses depend.
            generator=torch.Generator().manual_seed(self.seed),
            **batches,
        )


class LazyLoader(DataLoader):
    """Workers begin to read at the first batch of a pass, not when the pass is made.

    Lightning makes the first pass of a resumed run before it sets the epoch, and workers read ahead.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


def _leave_process_group(worker: int) -> None:
    """Leave the process group, to which torchrun sends SIGTERM.

    The rank needs its workers until it has finished the step.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()
