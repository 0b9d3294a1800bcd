from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from commands import one_line

from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.sampling import PKBatches, ShuffledBatches, evaluation_share, share_seen, uniform
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError

UNEVEN = [0] * 9 + [1] * 4 + [2] * 3 + [3] + [4] * 7 + [5] * 8 + [6] * 2 + [7] * 10


def passes(order: ShuffledBatches, *epochs: int) -> list[list[list[int]]]:
    found = []
    for epoch in epochs:
        order.set_epoch(epoch)
        found.append(list(order))
    return found


def test_every_image_once_per_epoch_in_an_order_of_its_own():
    found = passes(ShuffledBatches(10, 5, seed=3), 0, 1, 1, 0)
    flat = [[index for batch in each for index in batch] for each in found]
    assert [sorted(index % 10 for index in each) for each in flat] == [list(range(10))] * 4
    assert [{index // 10 for index in each} for each in flat] == [{0}, {1}, {1}, {0}]
    assert found[0] == found[3]
    assert found[1] == found[2]
    assert [index % 10 for index in flat[1]] != flat[0]


def test_the_short_batch_is_dropped_and_another_one_each_epoch():
    order = ShuffledBatches(11, 4, seed=0)
    assert len(order) == 2
    seen = [{index % 11 for batch in each for index in batch} for each in passes(order, *range(12))]
    assert {len(each) for each in seen} == {8}
    assert set.union(*seen) == set(range(11))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("make", [partial(ShuffledBatches, 20, 12), partial(PKBatches, UNEVEN, 16, 4)])
def test_processes_divide_the_batches_of_one(world_size, make):
    whole = list(make(seed=4))
    parts = [list(make(seed=4, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert [[index for part in slices for index in part] for slices in zip(*parts, strict=True)] == whole


def test_a_batch_that_cannot_be_filled_or_divided():
    with pytest.raises(UsageError, match=r"^data\.batch_size=12 is larger than the 11 training images: .*=11 or less"):
        ShuffledBatches(11, 12)
    said = r"^data\.batch_size=10 .* cannot be divided over 4: set data\.batch_size=8\.$"
    one_line(ShuffledBatches, 40, 10, world_size=4, match=said)


def test_no_two_images_share_a_random_number():
    assert len(np.unique(uniform(5, np.arange(1000), 23))) == 23_000


# P x K


def test_pk_batches_hold_p_classes_of_k_images():
    labels = torch.tensor(UNEVEN)
    order = PKBatches(UNEVEN, 16, 4, seed=1)
    assert len(order) == len(UNEVEN) // 16 == 2
    for batches in passes(order, *range(20)):
        assert len(batches) == 2
        for batch in batches:
            groups = labels[torch.tensor(batch) % len(UNEVEN)].view(4, 4)
            assert (groups == groups[:, :1]).all()
            assert len(groups[:, 0].unique()) == 4
            # Only a class that has fewer than 4 images repeats one, and then as seldom as possible.
            for group, label in zip(torch.tensor(batch).view(4, 4), groups[:, 0].tolist(), strict=True):
                assert len(group.unique()) == min(4, UNEVEN.count(label))


def test_pk_sees_every_image_in_the_long_run_and_about_equally_often():
    labels = [index // 6 for index in range(60)]
    seen = torch.zeros(60)
    for batches in passes(PKBatches(labels, 12, 4, seed=0), *range(400)):
        for batch in batches:
            seen += torch.bincount(torch.tensor(batch) % 60, minlength=60)
    assert seen.sum() == 400 * 60
    assert seen.min() > 350
    assert seen.max() < 450
    uneven = {index % len(UNEVEN) for each in passes(PKBatches(UNEVEN, 16, 4), *range(30)) for b in each for index in b}
    assert uneven == set(range(len(UNEVEN)))


def test_pk_is_a_pass_over_the_images_where_classes_are_of_equal_size():
    order = PKBatches([index // 8 for index in range(96)], 12, 4, seed=2)
    assert min(share_seen(order, epoch) for epoch in range(10)) > 0.9
    assert share_seen(ShuffledBatches(96, 12), 0) == 1


def test_pk_draws_classes_by_the_groups_they_have_left():
    # 8 groups of class 0 and one of each of 8 others: class 0 is in a first batch of two with 1 - 8/16 * 7/15 = 23/30.
    order = PKBatches([0] * 32 + [label for label in range(1, 9) for _ in range(4)], 8, 4)
    drawn = [min(batches[0]) % 64 < 32 or max(batches[0]) % 64 < 32 for batches in passes(order, *range(1000))]
    assert np.mean(drawn) == pytest.approx(23 / 30, abs=0.05)  # 2/9 if all were as likely


def test_pk_takes_the_groups_of_a_class_in_random_order():
    # Of 10 images in groups of 4 the last group repeats 2 of the first: each group is equally often the one taken last.
    order, generator, repeats = PKBatches([0] * 10 + [1] * 10, 8, 4), torch.Generator().manual_seed(0), []
    for _ in range(900):
        _, *taken = order._cut(torch.arange(10), generator)  # `pop` takes from the end
        repeats.append(8 - len(torch.cat(taken).unique()))
    assert set(repeats) == {0, 2}
    assert np.mean(repeats) == pytest.approx(2 / 3, abs=0.15)


@pytest.mark.parametrize(
    ("batch_size", "k", "message"),
    [
        (14, 4, r"^data\.batch_size=14 is not a multiple of data\.images_per_class=4 .*: set data\.batch_size=16, or "),
        (36, 4, r"takes 9 classes and there are 8: set data\.batch_size=32 or less\.$"),
        (16, 1, r"^data\.images_per_class=1: expected a whole number of at least 2"),
        (64, 4, r"^data\.batch_size=64 is larger than the 44 training images"),
        (4, 4, r"set data\.batch_size=8, or "),
        (5, 4, r"set data\.batch_size=8, or "),
    ],
)
def test_pk_refuses_what_cannot_be_filled(batch_size, k, message):
    one_line(PKBatches, UNEVEN, batch_size, k, match=message)


def test_data_module_takes_pk_batches_and_says_so(write_images):
    [table] = make_tables(write_images({"a": 4, "b": 4, "c": 4}))
    plain, data = (
        ImageDataModule(Splits("mine", table, table), batch_size=4, num_workers=0, images_per_class=k)
        for k in (None, 2)
    )
    assert "2 classes x 2 images" in data.describe()
    assert "of the images" in data.describe()
    assert "classes x" not in plain.describe()
    labels = [batch[1] for batch in data.train_dataloader()]
    assert len(labels) == 3
    assert all((each.bincount() == 2).sum() == 2 for each in labels)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_images", "batch_size"), [(33, 5), (33, 180), (4, 4), (100, 7), (9, 1)])
def test_evaluation_shares_are_all_images_once_in_whole_batches(
    num_images: int, batch_size: int, world_size: int
) -> None:
    shares = [evaluation_share(num_images, batch_size, rank, world_size) for rank in range(world_size)]
    assert [index for rows, _ in shares for index in rows] == list(range(num_images))
    sizes = {size for _, size in shares}
    assert len(sizes) == 1
    assert all(len(rows) >= 1 and rows.start % size == 0 for rows, size in shares)
    if num_images >= world_size * batch_size:
        assert sizes == {batch_size}  # as in one process, whose embeddings they then are to the last bit


def test_more_devices_than_images_to_evaluate_are_refused() -> None:
    one_line(evaluation_share, 3, 8, 0, 4, match=r"3 images cannot be evaluated on 4 devices: set trainer\.devices=3")
