"""Checkpoints written in the background: whole, the newest, and errors are not lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from commands import one_line

from proxy_anchor.training.callbacks import checkpoint as module
from proxy_anchor.training.callbacks.checkpoint import BackgroundWriter


def wait_for(file: Path, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not file.is_file() and time.monotonic() < end:
        time.sleep(0.01)
    assert file.is_file()


def test_what_was_saved_is_what_the_tensors_held_then(tmp_path: Path) -> None:
    writer, weight = BackgroundWriter(every_seconds=0), torch.ones(3)
    writer.save_checkpoint({"weight": weight, "epoch": 1}, tmp_path / "a.ckpt")
    weight.zero_()
    writer.teardown()
    assert torch.load(tmp_path / "a.ckpt")["weight"].tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["a.ckpt"]


def test_only_the_newest_of_many_versions_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = [], module.write_whole
    monkeypatch.setattr(module, "write_whole", lambda ckpt, path: (written.append(ckpt["epoch"]), write(ckpt, path)))
    writer = BackgroundWriter(every_seconds=3600)
    writer.save_checkpoint({"epoch": 0}, tmp_path / "last.ckpt")
    wait_for(tmp_path / "last.ckpt")  # the first is written at once
    for epoch in range(1, 6):
        writer.save_checkpoint({"epoch": epoch}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt")["epoch"] == 0
    assert writer.load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 5
    assert written == [0, 5]
    writer.save_checkpoint({"epoch": 6}, tmp_path / "last.ckpt")  # it goes on after a teardown
    writer.teardown()
    assert torch.load(tmp_path / "last.ckpt")["epoch"] == 6


def test_best_is_written_with_last_and_not_before(tmp_path: Path) -> None:
    writer = BackgroundWriter(every_seconds=3600)
    writer.save_checkpoint({"epoch": 1}, tmp_path / "best.ckpt")
    assert writer._writing is None
    writer.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    wait_for(tmp_path / "last.ckpt")
    assert (tmp_path / "best.ckpt").is_file()
    writer.save_checkpoint({"epoch": 2}, tmp_path / "best.ckpt")
    writer.save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")  # not due
    assert [torch.load(tmp_path / f"{name}.ckpt")["epoch"] for name in ("best", "last")] == [1, 1]
    writer.teardown()
    assert [torch.load(tmp_path / f"{name}.ckpt")["epoch"] for name in ("best", "last")] == [2, 2]


def test_an_error_reaches_the_trainer_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(every_seconds=0)
    writer.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    writer.teardown()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.torch, "save", full)
    writer.save_checkpoint({"epoch": 2}, tmp_path / "last.ckpt")
    one_line(writer.teardown, match=r"last\.ckpt cannot be written \(No space left on device\): make room")
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["epoch"] == 1


def test_a_removed_checkpoint_does_not_come_back(tmp_path: Path) -> None:
    writer = BackgroundWriter(every_seconds=3600)
    writer.save_checkpoint({"epoch": 0}, tmp_path / "last.ckpt")
    wait_for(tmp_path / "last.ckpt")
    writer.save_checkpoint({"epoch": 1}, tmp_path / "last.ckpt")
    writer.remove_checkpoint(tmp_path / "last.ckpt")
    writer.teardown()
    assert not (tmp_path / "last.ckpt").exists()
