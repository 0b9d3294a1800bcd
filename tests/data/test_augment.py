"""Crops: the paper's, with torchvision's distribution, and the same box for the same (seed, epoch, image)."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from proxy_anchor.data.augment import CentralCrop, RandomCrops
from proxy_anchor.errors import UsageError


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def boxes(crops: RandomCrops, width: int, height: int, count: int = 4000, epoch: int = 0) -> np.ndarray:
    return crops.boxes(epoch, np.arange(count), np.full(count, height), np.full(count, width))


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
    bilinear = image.resize(
        (resize, int(resize * size[1] / size[0])) if size[0] <= size[1] else (int(resize * size[0] / size[1]), resize),
        Image.Resampling.BILINEAR,
    )
    left, top = (round((side - crop) / 2) for side in bilinear.size)
    assert np.array_equal(
        ours.permute(1, 2, 0).numpy(), np.asarray(bilinear.crop((left, top, left + crop, top + crop)))
    )


@pytest.mark.parametrize("size", [(300, 200), (64, 64), (40, 200), (500, 90)])
def test_boxes_have_the_distribution_of_the_papers_crop(size):
    width, height = size
    image, wanted = torch.zeros(1, height, width), []
    for _ in range(4000):
        wanted.append(transforms.RandomResizedCrop.get_params(image, scale=[0.08, 1.0], ratio=[3 / 4, 4 / 3]))
    ours, theirs = boxes(RandomCrops(224), width, height)[:, :4], np.array(wanted)
    for part in range(4):
        # Kolmogorov-Smirnov: two samples of 4,000 of one distribution differ by less than 0.05 but once in 20,000.
        values = np.sort(np.concatenate([ours[:, part], theirs[:, part]]))
        shares = [np.searchsorted(np.sort(each[:, part]), values, side="right") / 4000 for each in (ours, theirs)]
        assert np.abs(shares[0] - shares[1]).max() < 0.05
    assert (
        abs(np.corrcoef(ours[:, 2], ours[:, 3])[0, 1] - np.corrcoef(theirs[:, 2], theirs[:, 3])[0, 1]) < 0.1
        or (ours[:, 2:4].std(0) == 0).any()
    )


def test_ratios_are_log_uniform_and_places_reach_every_border():
    # Every drawn box fits, so none is redrawn; Kolmogorov-Smirnov against the exact distribution.
    top, left, height, width, _ = boxes(RandomCrops(8, (0.05, 0.1)), 1000, 1000, count=20_000).T
    drawn = np.sort((np.log(width / height) / np.log(4 / 3) + 1) / 2)
    assert np.abs(drawn - np.arange(20_000) / 20_000).max() < 0.015  # uniform ratios differ by 0.07
    top, left, height, width, _ = boxes(RandomCrops(8, (0.05, 0.1)), 20, 20).T
    assert (top.min(), (top + height).max(), left.min(), (left + width).max()) == (0, 20, 0, 20)


def test_a_box_follows_from_seed_epoch_and_image_alone():
    crops, rows = RandomCrops(8, seed=3), np.array([7, 2, 9])
    sizes = np.array([50, 60, 70]), np.array([40, 30, 90])
    together = crops.boxes(4, rows, *sizes)
    alone = [crops.boxes(4, rows[[i]], sizes[0][[i]], sizes[1][[i]])[0] for i in range(3)]
    assert np.array_equal(together, alone)
    assert not np.array_equal(together, crops.boxes(5, rows, *sizes))
    assert not np.array_equal(together, RandomCrops(8, seed=4).boxes(4, rows, *sizes))


def test_a_training_image_is_its_box_resized_as_in_the_papers_code():
    image = noise(300, 200)
    crops = RandomCrops(224, seed=1)
    for row in range(5):
        [[top, left, height, width, mirrored]] = crops.boxes(2, np.array([row]), np.array([200]), np.array([300]))
        part = image.crop((left, top, left + width, top + height)).resize((224, 224), Image.Resampling.BILINEAR)
        expected = torch.from_numpy(np.array(part)).permute(2, 0, 1)
        assert torch.equal(crops(image, 2, row), expected.flip(-1) if mirrored else expected)


@pytest.mark.parametrize("flip", [0, 1])
def test_flip_never_and_always(flip):
    image = noise(20, 20)
    expected = CentralCrop(20, 20)(image)
    expected = expected.flip(-1) if flip else expected
    crops = RandomCrops(20, (1, 1), flip)
    seen = [crops(image, 0, row) for row in range(20)]
    whole = boxes(crops, 20, 20, count=20)[:, 2:4].min(1) == 20  # other ratios than 1 do not fit: the whole image
    assert sum(whole) > 5
    assert all(torch.equal(each, expected) for each, is_whole in zip(seen, whole, strict=True) if is_whole)


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 2)])
def test_tiny_images_fill_the_crop(size):
    assert RandomCrops(32)(noise(*size), 0, 0).shape == (3, 32, 32)
    assert CentralCrop(32, 36)(noise(*size)).shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"crop": 0}, "dataset.images.crop=0"),
        ({"flip": -0.1}, "dataset.images.flip=-0.1"),
        ({"scale": (0, 1)}, r"dataset.images.scale\[0\]=0"),
        ({"scale": (0.9, 0.1)}, r"dataset.images.scale\[0\]=0.9"),
        ({"scale": (0.1, 1.5)}, r"dataset.images.scale\[1\]=1.5"),
        ({"scale": (0.5,)}, r"dataset.images.scale=\[0.5\]: expected two"),
    ],
)
def test_bad_training_values_are_named(arguments, named):
    with pytest.raises(UsageError, match=f"^{named}"):
        RandomCrops(**{"crop": 8, **arguments})


def test_a_resize_below_the_crop_is_refused():
    # torchvision would fill up with black borders without a word.
    with pytest.raises(UsageError, match=r"^dataset\.images\.resize=8: expected .* at least 16"):
        CentralCrop(16, resize=8)
