"""A run that is killed, stopped or damaged, and the same command again: the end is that of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time

import pytest
import pytorch_lightning as pl
import torch
from commands import TINY_GLYPHS, compose_train, refused, run_ok
from hydra.core.hydra_config import HydraConfig
from interruptions import RUN, StopBefore, assert_same_end, start, truncate_last, wait_for_line

from proxy_anchor.cli import main as entry
from proxy_anchor.cli import start as starting
from proxy_anchor.errors import UsageError
from train import train

ARGUMENTS = RUN  # of the fixture `straight`


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_twice_and_started_again(seed, straight, arguments, tmp_path):
    chance = random.Random(seed)
    for _ in range(2):
        process = start(*arguments, cwd=tmp_path)
        time.sleep(chance.uniform(2, 10))  # from the imports to the last epoch
        process.send_signal(signal.SIGKILL)
        process.communicate()
    run_ok("train.py", *arguments, cwd=tmp_path)
    assert_same_end(tmp_path, straight)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_stops_with_a_code_of_its_own(number, straight, arguments, tmp_path):
    process = start(*arguments, cwd=tmp_path)
    wait_for_line(process, "epoch 2/5")
    process.send_signal(number)
    rest, _ = process.communicate()
    assert process.returncode == 75
    assert f"{number.name}: stopped; the same command continues" in rest
    assert "continued after epoch 2 of 5 (last.ckpt)" in run_ok("train.py", *arguments, cwd=tmp_path)
    assert_same_end(tmp_path, straight)


def test_killed_between_the_last_epoch_and_the_result(interrupted, straight, arguments):
    assert "continued after epoch 5 of 5" in run_ok("train.py", *arguments, cwd=interrupted)
    assert_same_end(interrupted, straight)
    result = json.loads((interrupted / "runs/x/result.json").read_text())
    assert result["peak_memory_gib"] > 0.05
    assert result["peak_memory_training_gib"] is result["peak_memory_evaluation_gib"] is None  # nothing was left to do


def test_a_truncated_checkpoint_is_said_and_the_one_before_is_used(interrupted, straight, arguments):
    truncate_last(interrupted)
    output = run_ok("train.py", *arguments, cwd=interrupted)
    assert "is damaged or no checkpoint" in output
    assert "last.ckpt.previous of epoch" in output
    assert_same_end(interrupted, straight)


def test_killed_between_best_ckpt_and_the_first_last_ckpt(interrupted, straight, arguments):
    for file in (interrupted / "runs/x").glob("last.ckpt*"):
        file.unlink()
    epoch = torch.load(interrupted / "runs/x/best.ckpt", weights_only=True)["epoch"] + 1
    assert f"continued after epoch {epoch} of 5 (last.ckpt)" in run_ok("train.py", *arguments, cwd=interrupted)
    assert (interrupted / "runs/x/best.ckpt").is_file()
    assert_same_end(interrupted, straight)


@pytest.mark.parametrize("name", ["config.yaml", "result.json"])
def test_a_damaged_text_file_is_one_line(name, interrupted, arguments):
    file = interrupted / "runs/x" / name
    file.write_text("{[")
    assert f"{file} is damaged" in refused("train.py", *arguments, cwd=interrupted)
    assert file.read_text() == "{["


class Evil:
    """What a pickle would make of it runs a command."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no earlier one"),
        ({"more": Evil()}, "more than tensors and plain values, and none of it is executed"),
    ],
    ids=["empty", "code"],
)
def test_with_no_whole_checkpoint_the_run_is_refused(content, message, interrupted, arguments):
    for file in (interrupted / "runs/x").glob("last.ckpt*"):
        file.write_bytes(b"") if content is None else torch.save(torch.load(file, weights_only=True) | content, file)
    line = refused("train.py", *arguments, cwd=interrupted)
    assert message in line
    assert "weights_only" not in line
    assert not (interrupted / "executed").exists()


def test_a_finished_run_is_not_repeated(straight, arguments):
    before = (straight / "runs/x/last.ckpt").stat().st_mtime_ns
    assert "finished: it is not repeated" in run_ok("train.py", *arguments, cwd=straight)
    assert (straight / "runs/x/last.ckpt").stat().st_mtime_ns == before
    line = refused("train.py", *arguments, "resume=never", cwd=straight)
    assert "already holds a run: choose another run=NAME" in line


def test_other_settings_are_named(interrupted, arguments):
    line = refused("train.py", *arguments, "loss.alpha=16", "optimizer.lr=1e-3", cwd=interrupted)
    assert "holds a run with other settings (loss.alpha, optimizer.lr)" in line
    assert (interrupted / "runs/x/last.ckpt").is_file()


def test_devices_auto_on_one_device_may_be_continued(tmp_path):
    # The command asks whether it has to become several processes before it looks for what to continue.
    (tmp_path / "last.ckpt").touch()
    cfg = compose_train(*TINY_GLYPHS, "trainer.devices=auto", f"dataset.root={tmp_path}")
    assert starting.ranks_to_start(cfg, tmp_path) == 1
    never = [*TINY_GLYPHS, "trainer.devices=2", "trainer.strategy=ddp", "resume=never"]
    with pytest.raises(UsageError, match="already holds a run: choose another run=NAME"):
        starting.ranks_to_start(compose_train(*never), tmp_path)


class Draws(pl.Callback):
    """Keeps the last random number of every epoch, as drop path or a random loss would draw it."""

    def __init__(self) -> None:
        self.drawn: dict[int, float] = {}

    def on_train_batch_end(self, trainer, *given):
        self.drawn[trainer.current_epoch] = float(torch.rand(()))


def test_the_running_mean_and_the_weights_beside_it_go_on(straight, tmp_path):
    chosen = [
        "callbacks=ema",
        "callbacks.ema.multi_avg_fn.decay=0.9",
        "trainer.max_epochs=3",
        "data.num_workers=1",  # which reads ahead
        "scheduler=constant",
        "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
        "scheduler.factor=0.5",
        "+scheduler={patience:0,threshold:0.9}",  # it halves the rates after every epoch but the first
        f"dataset.root={straight}/data/glyphs",
    ]
    here, there = (tmp_path / each / "runs/x" for each in ("one", "two"))
    whole, resumed = Draws(), Draws()
    train(compose_train(*RUN, *chosen), here, [whole])
    with pytest.raises(RuntimeError, match="stopped"):
        train(compose_train(*RUN, *chosen), there, [Draws(), StopBefore(3)])
    train(compose_train(*RUN, *chosen), there, [resumed])
    assert resumed.drawn == {2: whole.drawn[2]}
    assert_same_end(tmp_path / "one", tmp_path / "two")
    mine, theirs = (torch.load(each / "last.ckpt", weights_only=True)["current_model_state"] for each in (here, there))
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=0, atol=1e-6)


def test_what_early_stopping_has_ended_stays_ended(straight, tmp_path):
    chosen = [*RUN, "callbacks=early_stopping", "callbacks.early_stopping.patience=1", "trainer.max_epochs=20"]
    runs = []
    for _ in range(2):
        runs.append(train(compose_train(*chosen, f"dataset.root={straight}/data/glyphs"), tmp_path))
        (tmp_path / "result.json").unlink()
    assert len(runs[0]["history"]) < 20
    assert runs[0]["history"] == runs[1]["history"]


def test_sigterm_before_the_first_step_is_no_finished_run(straight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *RUN, f"dataset.root={straight}/data/glyphs"])
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # afterwards as before
    stopped = pl.Callback()
    stopped.on_validation_batch_end = lambda *given: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        entry.run(lambda cfg: train(cfg, entry.output_folder(), [stopped]), "train")
    assert stop.value.code == 75
    assert not list(tmp_path.rglob("*.json"))
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_best_ckpt_stays_the_best_epoch_in_a_folder_that_was_renamed(arguments, tmp_path):
    with pytest.raises(RuntimeError, match="stopped"):
        train(compose_train(*arguments), tmp_path / "x", [StopBefore(3)])
    file = (tmp_path / "x").rename(tmp_path / "y") / "last.ckpt"
    content = torch.load(file, weights_only=True)
    for name, state in content["callbacks"].items():
        if name.startswith("ModelCheckpoint") and state["monitor"]:  # as if no later epoch could be better
            best = torch.tensor(1.0)
            state |= {"best_model_score": best, "kth_value": best, "best_k_models": {state["best_model_path"]: best}}
    torch.save(content, file)
    before = (tmp_path / "y/best.ckpt").read_bytes()
    assert train(compose_train(*arguments), tmp_path / "y")["last"]["epoch"] == 5
    assert (tmp_path / "y/best.ckpt").read_bytes() == before
    assert not (tmp_path / "x").exists()
