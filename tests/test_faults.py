"""Disks, folders, data and devices that are not as they were: one line, and the last good checkpoint stays."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import pytorch_lightning as pl
from commands import TINY_FOLDER, compose_train, one_line, refused
from omegaconf import OmegaConf
from pictures import write_noise_images
from processes import permissions_count

from proxy_anchor.cli import start
from proxy_anchor.errors import UsageError
from proxy_anchor.training.callbacks.checkpoint import BackgroundWriter
from proxy_anchor.training.run_folder import newest_checkpoint
from train import train

RUN = [*TINY_FOLDER, "trainer.max_epochs=3", "run=x"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(*overrides) trains here, in tmp_path/run, on six classes of eight images; writes every checkpoint."""
    write_noise_images(tmp_path, dict.fromkeys("abcdef", 8))
    monkeypatch.setattr(BackgroundWriter.__init__, "__defaults__", (0.0,))

    def start(*more: str, callbacks: Sequence[pl.Callback] = ()) -> dict:
        return train(compose_train(*RUN, f"dataset.root={tmp_path / 'images'}", *more), tmp_path / "run", callbacks)

    return start


@pytest.fixture
def interrupted(run, tmp_path):
    """The same, after a run that was killed just before its end."""
    run()
    (tmp_path / "run" / "result.json").unlink()
    return run


class FullDisk(pl.Callback):
    """A limit on the size of files makes the same calls fail, in the same places, as a disk without room."""

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            trainer.strategy.checkpoint_io.teardown()  # what the second epoch left is written
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, LIMITS[1]))


LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)


def test_a_disk_that_is_full_in_the_third_epoch_leaves_the_second_to_go_on_from(run, tmp_path, capsys):
    try:
        with pytest.raises(
            UsageError, match=r"cannot be written \(File too large\): make room .* continues from there"
        ):
            run(callbacks=[FullDisk()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)
    assert newest_checkpoint(tmp_path / "run").epoch == 2
    assert not list((tmp_path / "run").glob("*.partial"))
    run()
    assert "continued after epoch 2 of 3" in capsys.readouterr().out


def test_a_folder_that_may_not_be_written_is_one_line(tmp_path):
    write_noise_images(tmp_path, dict.fromkeys("abcdef", 8))
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if not permissions_count():
        closed = Path("/sys")  # where nobody may make anything
    line = refused("train.py", *RUN, "dataset.root=images", f"hydra.run.dir={closed}/x", cwd=tmp_path)
    assert str(closed) in line


def test_images_that_vanish_before_the_run_goes_on_are_one_line(interrupted, tmp_path):
    shutil.rmtree(tmp_path / "images" / "a")
    one_line(interrupted, match="images are not those that this run began with")
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(Exception, match=r"dataset\.root=.* is not a folder"):
        interrupted()
    assert newest_checkpoint(tmp_path / "run").epoch == 3


def test_another_number_of_classes_on_resume_is_refused_with_both(interrupted, tmp_path):
    for number, name in enumerate("ghij"):
        shutil.copytree(tmp_path / "images" / "abcdef"[number], tmp_path / "images" / name)
    line = one_line(interrupted)
    assert line.startswith("the train images are not those that this run began with (then 24 images of 3")
    assert "; now 40 images of 5 classes" in line
    assert newest_checkpoint(tmp_path / "run").epoch == 3


@pytest.mark.parametrize(("before", "now"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_devices_on_resume_is_refused(before, now, tmp_path):
    def config(devices: int):
        return compose_train(*RUN, f"dataset.root={tmp_path}", f"trainer.devices={devices}", "trainer.strategy=ddp")

    OmegaConf.save(config(before), tmp_path / "config.yaml", resolve=True)
    (tmp_path / "last.ckpt").touch()
    ask = start.checkpoint_to_continue if now == 1 else start.ranks_to_start  # what `main` asks first
    one_line(ask, config(now), tmp_path, match=r"other settings \(trainer.devices\): choose another run=NAME")
    assert (tmp_path / "last.ckpt").is_file()
