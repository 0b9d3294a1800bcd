from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from commands import one_line
from torch import Tensor

from proxy_anchor import recall_at_k
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError
from proxy_anchor.training.callbacks.progress import LossBar
from proxy_anchor.training.callbacks.recall import EpochResult, RecallCallback, format_recall

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def embed(learner: pl.LightningModule, images) -> Tensor:
    with torch.no_grad():
        return torch.cat([learner.eval()(images[i][0][None]) for i in range(len(images))])


def test_before_training_and_after_each_epoch(
    make_data: Callable, make_learner: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    recall, learner, data = RecallCallback((4, 1, 2, 1), engine="torch"), make_learner(), make_data()
    trainer = make_trainer(max_epochs=2, callbacks=[recall])
    trainer.validate(learner, data, verbose=False)
    by_hand = recall_at_k(embed(learner, data.eval_images[0]), data.eval_images[0].labels, (1, 2, 4), engine="torch")
    assert recall.history[0].recall == by_hand
    assert by_hand[1] < by_hand[4]
    assert recall.history[0].train_loss is None
    trainer.fit(learner, data)
    by_hand = recall_at_k(embed(learner, data.eval_images[0]), data.eval_images[0].labels, (1, 2, 4), engine="torch")
    assert [result.epoch for result in recall.history] == [0, 1, 2]
    assert recall.history[2].recall == by_hand
    assert float(trainer.callback_metrics["test/recall_at_2"]) == pytest.approx(by_hand[2])
    assert float(trainer.callback_metrics["selecting_recall"]) == pytest.approx(by_hand[1])
    assert all(result.train_loss > 0 and result.train_seconds > 0 for result in recall.history[1:])
    printed = capsys.readouterr().out
    assert f"epoch 2/2: loss {recall.history[2].train_loss:.3f}  {format_recall(by_hand)}" in printed


def test_embeddings_of_the_best_epoch_are_in_dataset_order(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    recall, learner, data = RecallCallback((1,), engine="torch"), make_learner(), make_data()
    loader = torch.utils.data.DataLoader(data.eval_images[0], batch_size=3, sampler=[5, 2, 7, 0, 1, 6, 4, 3])
    data.val_dataloader = lambda: [loader]
    make_trainer(callbacks=[recall]).fit(learner, data)
    assert len(recall.selected_embeddings) == 1
    torch.testing.assert_close(recall.selected_embeddings[0], embed(learner, data.eval_images[0]))


def test_query_and_gallery(
    write_images: Callable,
    make_data: Callable,
    make_learner: Callable,
    make_trainer: Callable,
    capsys: pytest.CaptureFixture,
) -> None:
    rows = write_images({"a": 4, "b": 2, "x": 3, "y": 3, "z": 2})
    query, gallery = make_tables([rows[6], rows[9], rows[12], rows[13]], [rows[7], rows[8], rows[10], rows[11]])
    data = make_data(splits=Splits("tiny", make_tables(rows[:6])[0], query, gallery))
    recall, learner = RecallCallback((1, 4), engine="torch"), make_learner()
    make_trainer(callbacks=[recall]).validate(learner, data, verbose=False)
    embeddings = [embed(learner, images) for images in (data.eval_images[0], data.eval_images[1])]
    by_hand = recall_at_k(
        embeddings[0], query.labels, (1, 4), gallery=embeddings[1], gallery_labels=gallery.labels, engine="torch"
    )
    assert recall.history[0].recall == by_hand
    assert by_hand[1] < by_hand[4] == 0.5  # both z queries have nothing to find, and the whole gallery is searched
    assert "2 of 4 test queries have no image of their class to find: counted as misses." in capsys.readouterr().out
    for found, expected in zip(recall.selected_embeddings, embeddings, strict=True):
        torch.testing.assert_close(found, expected)


def test_k_above_the_gallery_is_refused_before_the_first_epoch(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    RecallCallback((1, 7)).check(make_data().splits)
    trainer = make_trainer(callbacks=[RecallCallback((1, 8), engine="torch")])
    one_line(trainer.fit, make_learner(), make_data(), match="K=8 is larger than the gallery: it has 7 images")
    assert trainer.global_step == 0


def test_embeddings_that_are_not_numbers_are_refused(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    learner, recall = make_learner(), RecallCallback((1,), engine="torch")
    with torch.no_grad():
        learner.net.head.bias[0] = torch.nan
    with pytest.raises(UsageError, match="8 of 8 query embeddings hold NaN"):
        make_trainer(callbacks=[recall]).validate(learner, make_data(), verbose=False)
    assert recall.history == []


@pytest.mark.parametrize("k", [(), (0,), (1, -2), (1.5,), (True,)], ids=str)
def test_k_is_checked(k: tuple) -> None:
    one_line(RecallCallback, k, match="recall_k")


def test_result_as_plain_types() -> None:
    result = EpochResult(3, {1: 0.25, 10: 0.5}, 2.0, 1.0, 9.5)
    assert EpochResult.from_dict(json.loads(json.dumps(result.as_dict()))) == result
    assert (result.as_dict()["recall"], result.as_dict()["validation"]) == ({"1": 0.25, "10": 0.5}, None)
    assert format_recall(result.recall) == "Recall@1 25.0  @10 50.0"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_loss_is_the_mean_of_its_own_epoch(make_data, make_learner, make_trainer, accumulate: int, capsys) -> None:
    losses: list[float] = []
    shown: list[str] = []
    recall, learner, bar = RecallCallback((1,), engine="torch"), make_learner(), LossBar()
    learner.loss.register_forward_hook(lambda module, given, loss: losses.append(float(loss)))
    watch = pl.Callback()
    watch.on_train_batch_end = lambda trainer, *given: shown.append(bar.get_metrics(trainer, learner)["loss"])
    trainer = make_trainer(
        callbacks=[recall, bar, watch], max_epochs=3, accumulate_grad_batches=accumulate, enable_progress_bar=True
    )
    trainer.fit(learner, make_data())
    assert len(losses) == 3 * 2
    means = [sum(losses[start : start + 2]) / 2 for start in (0, 2, 4)]
    assert [result.train_loss for result in recall.history] == pytest.approx(means)
    assert recall.history[-1].train_loss == float(trainer.logged_metrics["train/loss_epoch"])
    printed, bars = capsys.readouterr()
    assert f"epoch 3/3: loss {means[-1]:.3f}  " in printed
    assert re.search(r"epoch 3/3: +\d+%.*2/2", bars)  # it counts epochs as the lines do
    assert shown == [f"{loss:.3f}" for loss in losses]


def test_all_ranks_decide_by_the_numbers_of_the_first(make_data, make_learner, make_trainer, monkeypatch) -> None:
    told, recall = {"test": {1: 0.25}}, RecallCallback(1, engine="torch")
    monkeypatch.setattr("proxy_anchor.training.callbacks.recall.decided_by_first", lambda decide: told)
    trainer = make_trainer(callbacks=[recall])
    trainer.validate(make_learner(), make_data(), verbose=False)
    assert recall.history[0].recall == told["test"]
    assert float(trainer.callback_metrics["selecting_recall"]) == 0.25


def test_held_out_classes_select_the_epoch(make_data, make_learner, make_trainer, splits, write_images) -> None:
    [validation] = make_tables(write_images({"v": 3, "w": 3}))
    data = make_data(splits=replace(splits, validation=validation))
    recall, learner = RecallCallback((2, 1), engine="torch"), make_learner()
    trainer = make_trainer(callbacks=[recall], max_epochs=2)
    trainer.fit(learner, data)
    by_hand = [
        recall_at_k(embed(learner, images), images.labels, (1, 2), engine="torch") for images in data.eval_images
    ]
    assert [recall.history[-1].recall, recall.history[-1].validation] == by_hand
    assert float(trainer.callback_metrics["selecting_recall"]) == pytest.approx(by_hand[1][1])

    def result(epoch: int, test: float, held_out: float) -> EpochResult:
        return EpochResult(epoch, {1: test, 2: 1.0}, 0, 0, validation={1: held_out, 2: 1.0})

    recall.history = [result(1, 0.1, 0.5), result(2, 0.3, 0.9), result(3, 0.8, 0.2)]
    assert (recall.selected.epoch, recall.best.epoch) == (2, 3)
