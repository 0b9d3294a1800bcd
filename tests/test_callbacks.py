"""Callbacks and loggers by YAML; a key that would be dropped is refused."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import yaml
from commands import TINY_GLYPHS, compose_train

from proxy_anchor.cli import checks, config
from train import train


@pytest.mark.parametrize(
    ("command", "names"),
    {
        "": [],
        "dataset=cars": [],
        "dataset=folder": ["EarlyStopping"],
        "dataset=folder callbacks=none": [],
        "dataset=folder callbacks=lr_monitor": ["EarlyStopping", "LearningRateMonitor"],
        "dataset=folder callbacks=early_stopping": ["EarlyStopping"],
        "dataset=folder recipe=cub": [],
        "dataset=folder debug=limit": [],  # there is no Recall to watch
        "dataset=folder debug=limit callbacks.early_stopping.monitor=train/loss_epoch": ["EarlyStopping"],
    }.items(),
)
def test_own_images_stop_early_unless_told_otherwise(command: str, names: list[str]) -> None:
    own = ["dataset.root=.", "trainer=cpu"] if "folder" in command else []
    cfg = compose_train(*own, *command.split())
    checks.check_config(cfg)
    assert [type(each).__name__ for each in config.further_callbacks(cfg)] == names


def test_a_run_stops_early_and_logs_learning_rates_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stops = ["callbacks=[early_stopping,lr_monitor]", "callbacks.early_stopping.patience=1", "trainer.max_epochs=4"]
    # The second epoch cannot be better than the first by the whole range.
    stops += ["+callbacks.early_stopping.min_delta=1", "trainer.log_every_n_steps=1", f"dataset.root={tmp_path}/data"]
    cfg = compose_train(*TINY_GLYPHS, *stops, "scheduler.step_size=1", "scheduler.gamma=0.5")
    folder = tmp_path / "run"
    result = train(cfg, folder)
    assert (result["last"]["epoch"], result["max_epochs"]) == (2, 4)
    said = capsys.readouterr().out
    assert (
        "early stopping: training ends when the Recall that selects the epoch has not improved in 1 evaluation "
        "(callbacks=none: after all 4 epochs)\n"
    ) in said
    assert "\n  training ended early, after epoch 2 of 4\n" in said
    assert (folder / "best.ckpt").is_file()
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    expected = {"backbone": cfg.optimizer.lr, "head": cfg.optimizer.lr, "proxies": 100 * cfg.optimizer.lr}
    for name, rate in expected.items():
        assert [float(row[f"lr/{name}"]) for row in rows if row[f"lr/{name}"]] == pytest.approx([rate, rate / 2])
        assert any(row[f"lr-AdamW/{name}"] for row in rows)
    assert yaml.safe_load((folder / "hparams.yaml").read_text())["optimizer"]["lr"] == cfg.optimizer.lr
