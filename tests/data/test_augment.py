"""Crops: the paper's, with torchvision's distribution, and the same box for the same (seed, epoch, image)."""

import hashlib
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from commands import one_line
from pictures import noise
from PIL import Image
from scipy.stats import ks_2samp, kstest
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.v2 import functional as F

from proxy_anchor.data.augment import COLOR_KEYS, CentralCrop, RandomColors, RandomCrops, recolor
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.table import Splits, make_tables

ALL = {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1, "grayscale": 0.2}


def boxes(crops: RandomCrops, width: int, height: int, count: int = 4000, epoch: int = 0) -> np.ndarray:
    return crops.boxes(epoch, np.arange(count), np.full(count, height), np.full(count, width))


def sides(boxes: np.ndarray) -> list[np.ndarray]:
    """Top, left, height, width, and the area, which shows how the last two go together."""
    return [*boxes.T[:4], boxes[:, 2] * boxes[:, 3]]


@pytest.mark.parametrize(
    ("size", "crop", "resize"),
    [((500, 333), 224, 256), ((120, 400), 224, 256), ((60, 40), 48, 48), ((5, 3), 16, 20), ((37, 37), 32, 37)],
)
def test_test_images_are_those_of_the_classic_pipeline(size, crop, resize):
    image = noise(*size)
    classic = transforms.Compose([transforms.Resize(resize), transforms.CenterCrop(crop), transforms.PILToTensor()])
    ours = CentralCrop(crop, resize)(image)
    assert ours.dtype == torch.uint8
    assert ours.shape == (3, crop, crop)
    assert torch.equal(ours, classic(image))
    squeezed = transforms.Compose([transforms.Resize((crop, crop)), transforms.PILToTensor()])
    assert torch.equal(CentralCrop(crop, None)(image), squeezed(image))


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (40, 200), (500, 90)])
def test_boxes_have_the_distribution_of_the_papers_crop(size):
    width, height = size
    image, wanted = torch.zeros(1, height, width), []
    for _ in range(4000):
        wanted.append(transforms.RandomResizedCrop.get_params(image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]))
    for ours, theirs in zip(sides(boxes(RandomCrops(224), width, height)), sides(np.array(wanted)), strict=True):
        assert ks_2samp(ours, theirs).statistic < 0.05  # two samples of one distribution: but once in 20,000


def test_ratios_are_log_uniform_and_places_reach_every_border():
    # Every drawn box fits, so none is redrawn; Kolmogorov-Smirnov against the exact distribution.
    top, left, height, width, _ = boxes(RandomCrops(8, (0.05, 0.1)), 1000, 1000, count=20_000).T
    drawn = (np.log(width / height) / np.log(4 / 3) + 1) / 2
    assert kstest(drawn, "uniform").statistic < 0.015  # uniform ratios differ by 0.07
    top, left, height, width, _ = boxes(RandomCrops(8, (0.05, 0.1)), 20, 20).T
    assert (top.min(), (top + height).max(), left.min(), (left + width).max()) == (0, 20, 0, 20)


@pytest.mark.parametrize("kind", ["boxes", "colours"])
def test_random_numbers_follow_from_seed_epoch_and_image_alone(kind):
    def drawn(epoch: int = 4, seed: int = 3, only: slice = slice(None)) -> np.ndarray:
        rows, heights, widths = np.array([[7, 2, 9], [50, 60, 70], [40, 30, 90]])[:, only]
        if kind == "boxes":
            return RandomCrops(8, seed=seed).boxes(epoch, rows, heights, widths)
        return RandomColors(**ALL, seed=seed).maps(epoch, rows)

    assert np.array_equal(drawn(), np.concatenate([drawn(only=slice(i, i + 1)) for i in range(3)]))
    assert not np.isclose(drawn(), drawn(epoch=5)).all(1).any()
    assert not np.isclose(drawn(), drawn(seed=4)).all(1).any()


def test_a_training_image_is_its_box_resized_as_in_the_papers_code():
    image = noise(300, 200)
    crops = RandomCrops(224, seed=1)
    for row in range(5):
        [[top, left, height, width, mirrored]] = crops.boxes(2, np.array([row]), np.array([200]), np.array([300]))
        part = image.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        assert torch.equal(crops(image, 2, row), expected.flip(-1) if mirrored else expected)


@pytest.mark.parametrize("flip", [0, 0.3, 1])
def test_flip_is_a_probability(flip):
    mirrored = boxes(RandomCrops(20, flip=flip), 30, 20)[:, 4]
    assert set(mirrored) <= {0, 1}
    assert mirrored.mean() == pytest.approx(flip, rel=0.1)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 2)])
def test_tiny_images_fill_the_crop(size):
    assert RandomCrops(32)(noise(*size), 0, 0).shape == (3, 32, 32)
    assert CentralCrop(32, 36)(noise(*size)).shape == (3, 32, 32)


# ---- colours


LUMA = torch.tensor([0.299, 0.587, 0.114])


def pictures(count: int = 4, side: int = 16) -> Tensor:
    random = torch.Generator().manual_seed(count)
    return torch.randint(256, (count, 3, side, side), generator=random, dtype=torch.uint8)


def maps_of(count: int = 500, epoch: int = 0, **colors: float) -> np.ndarray:
    return RandomColors(**colors).maps(epoch, np.arange(count))


def recolored(images: Tensor, **colors: float) -> Tensor:
    return recolor(images, torch.from_numpy(maps_of(len(images), **colors)))


# ---- off


def test_boxes_are_those_from_before_there_were_colours() -> None:
    rows = np.arange(500)
    found = RandomCrops(224, seed=3, colors=RandomColors(**ALL, seed=3)).boxes(7, rows, 100 + rows, 400 - rows // 2)
    assert np.array_equal(found, RandomCrops(224, seed=3).boxes(7, rows, 100 + rows, 400 - rows // 2))
    assert hashlib.sha256(found.tobytes()).hexdigest()[:16] == "8ef2f5526ca760ad"  # of the code without colours


def test_evaluated_images_are_never_touched(write_images: Callable) -> None:
    [table] = make_tables(write_images({"a": 4, "b": 4}))
    splits = Splits("made-up", table, table)
    plain, colored = (
        ImageDataModule(splits, batch_size=4, num_workers=0, crop=32, resize=36, **colors) for colors in ({}, ALL)
    )
    for ours, theirs in zip(colored.val_dataloader(), plain.val_dataloader(), strict=True):
        for (images, *_), (expected, *_) in zip(ours, theirs, strict=True):
            assert torch.equal(images, expected)
    seen, expected = (next(iter(data.train_dataloader()))[0] for data in (colored, plain))
    assert not torch.equal(seen, expected)


# ---- what the numbers mean


@pytest.mark.parametrize(("x", "low", "high"), [(0.4, 0.6, 1.4), (2, 0, 3)])
def test_factors_fill_their_ranges(x: float, low: float, high: float) -> None:
    contrast = maps_of(contrast=x)
    saturation = (maps_of(saturation=x)[:, 0] - 0.299) / (1 - 0.299)
    for found in (maps_of(brightness=x)[:, 0], contrast[:, 0], saturation):
        assert low - 1e-6 <= found.min() < low + 0.02
        assert high - 0.02 < found.max() <= high + 1e-6
    assert np.allclose(contrast[:, 9:], 127.5 * (1 - contrast[:, :1]), atol=1e-3)


def test_brightness_and_saturation_are_torchvisions() -> None:
    [image] = pictures(1, 64)
    for (name, function), row in itertools.product(
        {"brightness": F.adjust_brightness, "saturation": F.adjust_saturation}.items(), range(20)
    ):
        found = RandomColors(**{name: 0.6}).maps(0, np.array([row]))
        factor = float(found[0, 0]) if name == "brightness" else float((found[0, 0] - 0.299) / 0.701)
        expected = 255 * function(image.double() / 255, factor)
        ours = recolor(image[None], torch.from_numpy(found))[0]
        # Half a level of rounding; torchvision's weight of red is 0.2989.
        assert (ours - expected).abs().max() <= 0.5 + (0.03 if name == "saturation" else 1e-3)


def test_hue_turns_chroma_and_keeps_luma() -> None:
    maps = torch.from_numpy(maps_of(hue=0.5)).double()
    matrices = maps[:, :9].view(-1, 3, 3)
    pixel = torch.tensor([150.0, 100.0, 60.0]).double()
    turned = matrices @ pixel
    torch.testing.assert_close(turned @ LUMA.double(), (pixel @ LUMA.double()).expand(500), atol=1e-3, rtol=0)
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]]).double()
    size = (yiq @ pixel)[1:].norm()
    chroma = (turned @ yiq.T)[:, 1:]
    torch.testing.assert_close(chroma.norm(dim=1), size.expand(500), atol=0.2, rtol=0)
    start = torch.atan2(*(yiq @ pixel)[1:].flip(0))
    turns = (torch.atan2(chroma[:, 1], chroma[:, 0]) - start) / (2 * torch.pi)
    assert ((turns + 0.5) % 1).histc(10, 0, 1).min() > 25  # every angle as likely
    assert torch.equal(maps[:, 9:], torch.zeros(500, 3).double())


def test_grayscale_is_a_probability_and_leaves_equal_channels() -> None:
    images = pictures(20)
    grey = recolored(images, grayscale=1)
    assert torch.equal(grey[:, :1].expand_as(grey), grey)
    assert (grey[:, 0] - (images.movedim(1, 3).float() @ LUMA)).abs().max() <= 0.501
    with_the_rest = recolored(images, **{**ALL, "grayscale": 1})
    assert (with_the_rest.int().amax(1) - with_the_rest.int().amin(1)).max() <= 1
    assert 0.17 < np.isclose(maps_of(4000, grayscale=0.2)[:, 0], 0.299).mean() < 0.23


# ---- what is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrops(0), "crop=0"),
        (lambda: RandomCrops(8, flip=-0.1), "flip=-0.1"),
        (lambda: RandomCrops(8, (0, 1)), r"scale\[0\]=0"),
        (lambda: RandomCrops(8, (0.9, 0.1)), r"scale\[0\]=0.9"),
        (lambda: RandomCrops(8, (0.1, 1.5)), r"scale\[1\]=1.5"),
        (lambda: RandomCrops(8, (0.5,)), r"scale=\[0.5\]: expected two"),
        (lambda: RandomColors(hue=0.6), r"hue=0\.6: expected .* at most 0\.5"),
        (lambda: RandomColors(grayscale=1.5), r"grayscale=1\.5: expected .* at most 1"),
        *[
            (lambda key=key: RandomColors(**{key: -0.1}), rf"{key}=-0\.1: expected a finite number of at least 0")
            for key in COLOR_KEYS
        ],
        # torchvision would fill up with black borders without a word.
        (lambda: CentralCrop(16, resize=8), r"resize=8: expected .* at least 16"),
    ],
)
def test_bad_values_are_named(make: Callable, message: str) -> None:
    one_line(make, match=rf"^dataset\.images\.{message}")
