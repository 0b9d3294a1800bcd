"""Batches from decoded pixels equal those that worker processes make: order, boxes, and pixels to one level."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from processes import run_python
from torch import Tensor

from proxy_anchor.data.augment import CentralCrop, RandomColors, RandomCrops
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.gpu_batches import CroppedBatches, StoredBatches, resample
from proxy_anchor.data.image_cache import Shrunk, decode_to_device, kept_sizes
from proxy_anchor.data.images import ImageDataset
from proxy_anchor.data.sampling import ShuffledBatches
from proxy_anchor.data.table import ImageTable, Splits, make_tables

CPU = torch.device("cpu")


def photograph(width: int, height: int, seed: int) -> Image.Image:
    """Noise over several scales: edges and gradients, as photographs have them."""
    random = np.random.default_rng(seed)
    pixels = np.zeros((height, width, 3))
    for side in (2, 8, 32):
        noise = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
        pixels += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)) / 3
    return Image.fromarray(pixels.astype(np.uint8))


@pytest.fixture
def table(tmp_path: Path) -> ImageTable:
    rows = []
    for number in range(12):
        file = tmp_path / f"{number}.png"
        photograph(20 + 9 * number, 110 - 7 * number, number).save(file)
        rows.append((file, str(number % 3)))
    return make_tables(rows)[0]


def test_resampling_is_pillows_to_one_level() -> None:
    image = photograph(90, 70, 0)
    values = torch.from_numpy(np.array(image).reshape(-1))
    boxes = [(0, 0, 70, 90, 0), (3, 5, 10, 12, 1), (60, 80, 10, 10, 0), (0, 0, 1, 1, 0), (0, 40, 70, 2, 1)]
    windows = torch.tensor([[3 * (90 * top + left), 90, h, w, m] for top, left, h, w, m in boxes])
    for side in (1, 7, 32, 100):
        out = resample(values, windows, side)
        assert out.dtype == torch.uint8
        assert out.is_contiguous(memory_format=torch.channels_last)
        for made, (top, left, height, width, mirror) in zip(out, boxes, strict=True):
            part = image.crop((left, top, left + width, top + height)).resize((side, side), Image.Resampling.BILINEAR)
            expected = torch.from_numpy(np.array(part)).permute(2, 0, 1)
            expected = expected.flip(-1) if mirror else expected
            assert (made.int() - expected.int()).abs().max() <= 1


_INTERPRETED = """
import sys
import torch
from proxy_anchor.data.gpu_batches import resample
from proxy_anchor.data.resample_kernel import resample_kernel
values, windows, side = torch.load(sys.argv[1])
out = torch.empty(len(windows), side, side, 3, dtype=torch.uint8)
resample_kernel[(len(windows), -(-side * side // 256))](values, windows, out, side, 256)
difference = (out.permute(0, 3, 1, 2).int() - resample(values, windows, side).int()).abs()
print(int(difference.max()), float((difference > 0).float().mean()))
"""


def test_the_kernel_in_tritons_interpreter_equals_torchvision_to_one_level(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("a GPU runs the kernel itself, below")
    images = [photograph(width, height, width) for width, height in [(90, 70), (120, 33), (31, 64)]]
    values = torch.from_numpy(np.concatenate([np.array(image).reshape(-1) for image in images]))
    torch.save((values, _windows(images, RandomCrops(24), 6), 24), tmp_path / "case.pt")
    most, share = map(float, run_python(_INTERPRETED, tmp_path / "case.pt", TRITON_INTERPRET="1").split())
    assert most <= 1
    assert share < 0.25


def _windows(images: list[Image.Image], crops: RandomCrops, count: int) -> Tensor:
    """(count, 5): random windows of images that lie behind one another."""
    sizes = np.array([(image.height, image.width) for image in images])
    starts = 3 * (sizes.prod(1).cumsum() - sizes.prod(1))
    rows = np.arange(count) % len(images)
    top, left, height, width, mirror = crops.boxes(0, np.arange(count), sizes[rows, 0], sizes[rows, 1]).T
    start = starts[rows] + 3 * (top * sizes[rows, 1] + left)
    return torch.from_numpy(np.stack([start, sizes[rows, 1], height, width, mirror], 1))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [32, 224])
def test_the_kernel_equals_torchvision_to_one_level(side: int) -> None:
    images = [photograph(width, height, width) for width, height in [(90, 70), (500, 333), (31, 640), (224, 224)]]
    values = torch.from_numpy(np.concatenate([np.array(image).reshape(-1) for image in images]))
    windows = _windows(images, RandomCrops(side), 400)
    slow = resample(values, windows, side).int()
    fast = resample(values.cuda(), windows.cuda(), side).cpu().int()
    assert (fast - slow).abs().max() <= 1
    assert ((fast - slow).abs() > 0).float().mean() < 0.25  # torchvision rounds twice


def batches(loader: object, epoch: int) -> list[tuple[Tensor, ...]]:
    loader.batch_sampler.set_epoch(epoch)
    return [tuple(part.cpu() for part in batch) for batch in loader]


@pytest.mark.parametrize("where", ["device", "host", pytest.param("GPU", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("colors", [RandomColors(), RandomColors(0.4, 0.4, 0.4, 0.1, 0.2, 5)], ids=["plain", "colours"])
def test_training_batches_are_the_workers(
    table: ImageTable, where: str, epoch: int, colors: RandomColors, monkeypatch: pytest.MonkeyPatch
) -> None:
    crops, order = RandomCrops(24, seed=5, colors=colors), ShuffledBatches(12, 5, seed=5)
    device = torch.device("cuda") if where == "GPU" else CPU
    pixels = decode_to_device(table, Shrunk(), kept_sizes(table, Shrunk(), 0), device, 0, 0, 1)
    loader = CroppedBatches(pixels, torch.from_numpy(table.labels), crops, order, device)
    if where == "host":  # the way of pixels that live elsewhere than the network
        monkeypatch.setattr(CroppedBatches, "_on_device", CroppedBatches._from_host)
    workers = torch.utils.data.DataLoader(ImageDataset(table, crops), batch_sampler=order)
    assert len(loader) == 2
    for ours, theirs in zip(batches(loader, epoch), batches(workers, epoch), strict=True):
        assert torch.equal(ours[2], theirs[2])
        assert torch.equal(ours[1], theirs[1])
        assert ours[0].is_contiguous(memory_format=torch.channels_last)
        # Resampled pixels differ by up to one level before their colours change, and a map may stretch that level.
        maps = torch.from_numpy(colors.maps(epoch, ours[2].numpy()))
        stretch = maps[:, :9].view(-1, 3, 3).abs().sum(2)[:, :, None, None]
        difference = (ours[0].int() - theirs[0].int()).abs()
        assert (difference <= stretch + 0.01 + colors.is_on).all()
        assert difference.float().mean() < 0.25


def test_evaluation_batches_are_exactly_the_workers(table: ImageTable) -> None:
    form = CentralCrop(24, 28)
    pixels = decode_to_device(table, form, kept_sizes(table, form, 0), CPU, 0, 0, 1)
    loader = StoredBatches(pixels, torch.from_numpy(table.labels), 5, CPU, range(12))
    theirs = list(torch.utils.data.DataLoader(ImageDataset(table, form), batch_size=5))
    assert len(loader) == len(theirs) == 3
    for ours, expected in zip(loader, theirs, strict=True):
        assert all(torch.equal(left, right) for left, right in zip(ours, expected, strict=True))
        assert ours[0].is_contiguous(memory_format=torch.channels_last)


# ---- the data module's choice


def fed(
    table: ImageTable, trainer: pl.Trainer | None = None, num_workers: int = 0, **arguments
) -> tuple[list, ImageDataModule]:
    """(images, dataset indices) of all batches of two epochs and an evaluation."""
    splits = Splits("mine", table, table)
    data = ImageDataModule(splits, batch_size=5, num_workers=num_workers, crop=24, resize=28, seed=2, **arguments)
    data.trainer = trainer
    data.setup("fit")
    found = [batch for epoch in (0, 1) for batch in batches(data.train_dataloader(), epoch)]
    found += [tuple(part.cpu() for part in batch) for loader in data.val_dataloader() for batch in loader]
    return [(images, rows) for images, _, rows in found], data


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_a_cache_changes_nothing_on_the_cpu(table: ImageTable, tmp_path: Path, cache: str, num_workers: int) -> None:
    plain, data = fed(table, crop_on="cpu", cache="none")
    assert data.describe_loading().startswith("images: decoded in every epoch")
    kept, data = fed(table, crop_on="cpu", cache=cache, cache_dir=tmp_path / "cache", num_workers=num_workers)
    assert data.loading is not None
    assert data.loading["bytes"] == 12 * 24 * 24 * 3 + 3 * int(kept_sizes(table, Shrunk(), 0).prod(1).sum())
    for (images, rows), (same, same_rows) in zip(plain, kept, strict=True):
        assert torch.equal(rows, same_rows)
        assert torch.equal(images, same)
    assert bool(list((tmp_path / "cache").glob("*.pixels"))) == (cache == "disk")


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["auto", "gpu", "ram", "disk"])
def test_the_cards_batches_are_the_workers(table: ImageTable, tmp_path: Path, cache: str) -> None:
    trainer = pl.Trainer(accelerator="gpu", devices=1, logger=False, enable_checkpointing=False)
    plain, _ = fed(table, trainer, crop_on="cpu")
    kept, data = fed(table, trainer, crop_on="gpu", cache=cache, cache_dir=tmp_path / "cache")
    assert data.loading is not None
    assert data.loading["crop_on"] == "gpu"
    for (images, rows), (same, same_rows) in zip(plain, kept, strict=True):
        assert torch.equal(rows, same_rows)
        assert (images.int() - same.int()).abs().max() <= 1
