from __future__ import annotations

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.sampling import ShuffledBatches, mix
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError


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


@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_processes_divide_the_batches_of_one(world_size):
    whole = list(ShuffledBatches(20, 6, seed=4))
    parts = [list(ShuffledBatches(20, 6, seed=4, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert [[index for part in slices for index in part] for slices in zip(*parts, strict=True)] == whole


def test_a_batch_that_cannot_be_filled_or_divided():
    with pytest.raises(UsageError, match=r"^data\.batch_size=12 is larger than the 11 training images: .*=11 or less"):
        ShuffledBatches(11, 12)
    with pytest.raises(
        UsageError, match=r"^data\.batch_size=10 .* cannot be divided over 4: set data\.batch_size=8\.$"
    ):
        ShuffledBatches(40, 10, world_size=4)


def test_mix_depends_on_every_number_and_on_their_order():
    seeds = {mix(*numbers) for numbers in [(0, 1, 2), (0, 2, 1), (1, 0, 2), (0, 12), (1, 1, 2), (0, 1, 3)]}
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.fixture
def make_data(tmp_path):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(12):
        path = tmp_path / f"{index}.png"
        pixels = torch.randint(0, 256, (40, 40, 3), dtype=torch.uint8, generator=generator)
        Image.fromarray(pixels.numpy()).save(path)
        rows.append((path, str(index % 3)))
    [table] = make_tables(rows)

    def make(num_workers: int, seed: int = 5) -> ImageDataModule:
        return ImageDataModule(
            Splits("made-up", table, table), batch_size=4, num_workers=num_workers, seed=seed, crop=16, resize=16
        )

    return make


class Recorder(pl.LightningModule):
    """Keeps what a trainer feeds it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def training_step(self, batch, batch_idx):
        self.batches.append((batch[0].clone(), batch[2].clone()))
        return self.weight * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fed(data: ImageDataModule) -> list[tuple[torch.Tensor, torch.Tensor]]:
    recorder = Recorder()
    pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).fit(recorder, data.train_dataloader())
    return recorder.batches


def test_order_and_crops_do_not_depend_on_the_number_of_workers(make_data):
    alone, helped = fed(make_data(0)), fed(make_data(2))
    assert len(alone) == 6
    for (images, indices), (same_images, same_indices) in zip(alone, helped, strict=True):
        assert torch.equal(indices, same_indices)
        assert torch.equal(images, same_images)
    orders = [torch.cat([indices for _, indices in alone[start : start + 3]]).tolist() for start in (0, 3)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(12))
    assert orders[0] != orders[1]  # the trainer has told the sampler its epoch
    other = fed(make_data(0, seed=6))
    assert not torch.equal(alone[0][0], other[0][0])


def test_crops_leave_the_random_numbers_of_the_caller_alone(make_data):
    data = make_data(0)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    _ = data.train_images[0]
    assert torch.equal(torch.rand(3), expected)
