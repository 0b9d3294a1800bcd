"""The trainer's keys that move evaluations, checkpoints or the loss: what is reported is what the files hold."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from commands import TINY_GLYPHS, compose_entry, compose_train
from interruptions import StopBefore
from omegaconf import DictConfig

from evaluate import evaluate
from train import train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def config(glyphs: str, *overrides: str) -> DictConfig:
    """8 classes of 8 images in batches of 16: an epoch has 4 steps."""
    return compose_train(*TINY_GLYPHS, "trainer.max_epochs=3", glyphs, *overrides)


def evaluated(file: Path) -> dict[str, float]:
    """What evaluate.py finds in a checkpoint."""
    numbers = evaluate(compose_entry("evaluate", f"checkpoint={file}"))
    return {key.removeprefix("recall_at_"): value for key, value in numbers.items() if key.startswith("recall_at_")}


@pytest.mark.parametrize(
    ("overrides", "epochs"),
    [
        (["+trainer.max_steps=6", "+trainer.min_epochs=3"], [0, 1, 2]),
        (["+trainer.max_time=00:00:00:01", "trainer.max_epochs=1000"], None),
        (["trainer.check_val_every_n_epoch=3"], [0, 3]),
        (["trainer.num_sanity_val_steps=2", "+trainer.accumulate_grad_batches=2"], [0, 1, 2, 3]),
    ],
    ids=lambda value: " ".join(map(str, value or ["any"])),
)
def test_what_is_reported_is_what_the_checkpoints_and_metrics_csv_hold(
    glyphs: str, tmp_path: Path, overrides: list[str], epochs: list[int] | None
) -> None:
    result = train(config(glyphs, *overrides), tmp_path)
    trained = result["history"][1:]
    assert epochs is None or [row["epoch"] for row in result["history"]] == epochs
    assert result["best"]["recall"] == evaluated(tmp_path / "best.ckpt")
    assert result["last"]["recall"] == evaluated(tmp_path / "last.ckpt")
    [file] = tmp_path.glob("**/metrics.csv")
    logged = list(csv.DictReader(file.read_text().splitlines()))
    losses = [float(row["train/loss_epoch"]) for row in logged if row["train/loss_epoch"]]
    if trained[0]["epoch"] == 1:  # every epoch is evaluated
        assert losses == [row["train_loss"] for row in trained]
    assert [row["train_loss"] for row in trained] == [losses[row["epoch"] - 1] for row in trained]


@pytest.mark.parametrize(
    ("overrides", "epochs"),
    [
        (["debug=fdr"], 1),
        (["debug=limit"], 3),
        (["debug=overfit", "trainer.max_epochs=4"], 4),
        (["+trainer.limit_val_batches=0"], 3),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_recall_of_a_part_of_the_images_is_not_scored(
    glyphs: str, tmp_path: Path, overrides: list[str], epochs: int, capsys: pytest.CaptureFixture
) -> None:
    seen, batches = pl.Callback(), []
    seen.on_train_batch_start = lambda trainer, learner, batch, number: batches.append(set(batch[2].tolist()))
    assert train(config(glyphs, *overrides), tmp_path, [seen]) == {}
    printed = capsys.readouterr().out
    assert printed.count("a part of the images: Recall is not computed") == epochs
    assert "Recall@1" not in printed
    assert "no result.json: a run on a part of the images has no Recall." in printed
    left = {each.name for each in tmp_path.iterdir()}
    assert not left & {"result.json", "best.ckpt", "index.html"}
    assert ("last.ckpt" in left) == (overrides != ["debug=fdr"])
    if "debug=overfit" in overrides:
        assert len(batches) == epochs
        assert all(each == batches[0] for each in batches)


def rows(result: dict[str, Any]) -> list[tuple]:
    return [(row["epoch"], row["recall"], row["train_loss"]) for row in result["history"]]


def test_a_run_with_max_steps_continues(glyphs: str, tmp_path: Path) -> None:
    cfg = config(glyphs, "run=x", "+trainer.max_steps=10")
    whole = train(cfg, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped"):
        train(cfg, tmp_path / "stopped", [StopBefore(2)])
    assert rows(train(cfg, tmp_path / "stopped")) == rows(whole)
    (tmp_path / "stopped" / "result.json").unlink()
    assert rows(train(cfg, tmp_path / "stopped")) == rows(whole)  # all steps done: nothing is trained again
