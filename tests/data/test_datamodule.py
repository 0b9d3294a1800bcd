"""Loaders: what a batch holds, shuffling that follows the seed, evaluation that keeps order and every image."""

import os
from pathlib import Path

import pytest
import torch
from commands import one_line
from PIL import Image

from proxy_anchor.data import datamodule as module
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.table import Splits, make_tables

NUM_TRAIN, NUM_QUERY, NUM_GALLERY = 11, 7, 5
SMALL = {"crop": 8, "resize": 10, "num_workers": 0, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("images")
    for number in range(NUM_TRAIN + NUM_QUERY + NUM_GALLERY):
        Image.new("RGB", (12, 10), (number, 0, 0)).save(root / f"{number}.png")
    return root


def make_splits(folder: Path, *, gallery: bool = False, notice: str = "") -> Splits:
    """Image i is of class i % 3, plus 10 in the test part; its red value is i."""
    files = [folder / f"{number}.png" for number in range(NUM_TRAIN + NUM_QUERY + NUM_GALLERY)]
    ends = (NUM_TRAIN, NUM_TRAIN + NUM_QUERY)
    train = [(file, str(i % 3)) for i, file in enumerate(files[: ends[0]])]
    query = [(file, str(10 + i % 3)) for i, file in enumerate(files[ends[0] : ends[1]])]
    rest = [(file, str(10 + i % 4)) for i, file in enumerate(files[ends[1] :])]
    [train_table] = make_tables(train)
    query_table, *gallery_table = make_tables(query, *([rest] if gallery else []))
    return Splits("mine", train_table, query_table, gallery_table[0] if gallery else None, notice)


def indices(loader) -> list[int]:
    return [index for _, _, batch in loader for index in batch.tolist()]


def test_a_batch(folder):
    images, labels, numbers = next(iter(ImageDataModule(make_splits(folder), **SMALL).train_dataloader()))
    assert (images.dtype, images.shape) == (torch.uint8, (4, 3, 8, 8))
    assert (labels.dtype, labels.shape) == (torch.int64, (4,))
    assert (numbers.dtype, numbers.shape) == (torch.int64, (4,))
    assert images[:, 0, 0, 0].tolist() == numbers.tolist()
    assert labels.tolist() == [number % 3 for number in numbers.tolist()]


@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [4, 3]), (1, [1] * 7), (100, [7])])
def test_the_evaluation_batch(folder, batch_size, sizes):
    [loader] = ImageDataModule(make_splits(folder), eval_batch_size=batch_size, eval_crop=9, **SMALL).val_dataloader()
    assert [batch[0].shape for batch in loader] == [(size, 3, 9, 9) for size in sizes]
    assert indices(loader) == list(range(NUM_QUERY))
    assert [value for images, _, _ in loader for value in images[:, 0, 0, 0].tolist()] == list(range(11, 18))


def test_query_and_gallery_are_two_loaders_over_one_label_map(folder):
    data = ImageDataModule(make_splits(folder, gallery=True), **SMALL)
    query, gallery = data.val_dataloader()
    assert indices(query) == list(range(NUM_QUERY))
    assert indices(gallery) == list(range(NUM_GALLERY))
    names = data.splits.query.classes
    assert [names[i] for _, labels, _ in gallery for i in labels] == ["10", "11", "12", "13", "10"]
    assert data.num_eval_images == NUM_QUERY + NUM_GALLERY
    assert ImageDataModule(make_splits(folder), **SMALL).num_eval_images == NUM_QUERY


def test_describe(folder):
    # The gallery has one class more; each table counts its own.
    assert ImageDataModule(make_splits(folder, gallery=True, notice="a word."), **SMALL).describe() == (
        "data: mine, 11 train images of 3 classes, 7 query images of 3 classes, 5 gallery images of 4 classes\n"
        "note: a word."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, r"^data\.batch_size=0"),
        ({"num_workers": -1}, r"^data\.num_workers=-1"),
        ({"crop_on": "fast"}, r"^data\.crop_on=fast is not known"),
        ({"cache": "tape"}, r"^data\.cache=tape is not known"),
        ({"crop_on": "cpu", "cache": "gpu"}, r"^data\.crop_on=cpu crops in worker processes"),
        ({"crop_on": "gpu", "cache": "none"}, r"^data\.crop_on=gpu crops cached images"),
        ({"on_bad_image": "ignore"}, r"^data\.on_bad_image=ignore is not known; choose one of: raise, skip"),
        ({"cache_side": 1.5}, r"^data\.cache_side=1\.5"),
        ({"crop_on": "gpu", "cache": "auto"}, r"^data\.crop_on=gpu needs an NVIDIA GPU"),
        ({"crop_on": "auto", "cache": "gpu"}, r"^data\.cache=gpu needs an NVIDIA GPU"),
    ],
)
def test_bad_values_and_contradictions_are_one_line(folder, arguments, message):
    one_line(lambda: ImageDataModule(make_splits(folder), **{**SMALL, **arguments}).setup("fit"), match=message)


@pytest.mark.parametrize(("cores", "of_host", "workers"), [(3, 8, 3), (64, 64, 16), (None, 3, 3), (None, None, 1)])
def test_the_number_of_workers_follows_the_cores(folder, monkeypatch, cores, of_host, workers):
    if cores is None:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS
    else:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: of_host)
    assert ImageDataModule(make_splits(folder), **{**SMALL, "num_workers": None}).num_workers == workers


@pytest.mark.parametrize("cache", ["auto", "ram", "disk"])
def test_loaders_without_a_trainer(folder, tmp_path, cache):
    data = ImageDataModule(make_splits(folder), cache=cache, cache_dir=tmp_path, **SMALL)
    data.setup("fit")
    assert data.loading["cache"] == ("none" if cache == "auto" else cache)
    assert len(indices(data.train_dataloader())) == 8
    for loaders in (data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        assert indices(loaders[0]) == list(range(NUM_QUERY))


@pytest.mark.parametrize("cache", ["none", "disk"])
def test_the_room_of_workers_is_looked_at_for_all_loaders_together(folder, monkeypatch, tmp_path, cache):
    asked = []
    monkeypatch.setattr(module, "fit_workers", lambda *given: asked.append(given) or 0)
    small = SMALL | {"eval_batch_size": 3, "num_workers": None, "cache": cache, "cache_dir": tmp_path}
    data = ImageDataModule(make_splits(folder, gallery=True), **small)
    data.setup("fit")
    searched = [(3 * 3 * 8 * 8, -(-n // 3)) for n in map(len, data.eval_images)] if cache == "none" else []
    assert asked[1:] == [(None, [(4 * 3 * 8 * 8, 2), *searched])]
    assert data.train_dataloader().num_workers == 0  # what was found to fit
