"""A run on several devices that is killed, stopped or damaged, and the same command again."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from commands import refused, run_ok
from interruptions import RUN, TORCHRUN, assert_same_end, start, truncate_last, wait_for_line
from omegaconf import OmegaConf
from processes import await_end

from proxy_anchor.training.run_folder import newest_checkpoint

pytestmark = pytest.mark.slow

TWO = ["trainer.devices=2", "trainer.strategy=ddp"]
ARGUMENTS = [*RUN, *TWO]  # of the fixture `straight`


def test_all_processes_killed_and_started_again(straight, arguments, tmp_path):
    process = start(*arguments, cwd=tmp_path)
    wait_for_line(process, "epoch 2/5")
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    output = run_ok("train.py", *arguments, cwd=tmp_path)
    assert output.count("continued after epoch") == 1
    assert_same_end(tmp_path, straight)
    assert output.count("epoch 5/5") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the processes are found as Linux lists them")
def test_one_killed_process_ends_the_others_and_the_same_command_continues(straight, arguments, tmp_path):
    process = start(*arguments, cwd=tmp_path)
    wait_for_line(process, "epoch 2/5")
    ranks = children(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode == 1
    for each in ranks:
        await_end(each)
    run_ok("train.py", *arguments, cwd=tmp_path)
    assert_same_end(tmp_path, straight)


def test_a_truncated_checkpoint_is_said_once_and_all_use_the_one_before(interrupted, straight, arguments):
    truncate_last(interrupted)
    process = start(*arguments, cwd=interrupted, launcher=TORCHRUN)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert output.count("is damaged or no checkpoint") == output.count("last.ckpt.previous of epoch") == 1
    assert_same_end(interrupted, straight)


def test_other_settings_are_named_once(interrupted, arguments):
    for launcher in (None, TORCHRUN):
        process = start(*arguments, "loss.alpha=16", cwd=interrupted, launcher=launcher)
        output, _ = process.communicate(timeout=120)
        assert process.returncode != 0
        assert output.count("error: ") == 1, output
        assert output.count("holds a run with other settings (loss.alpha): choose another run=NAME") == 1


def test_fewer_devices_than_auto_found_at_first_are_refused(interrupted, arguments):
    # devices=auto is no other setting; on a CPU it is one device, where there were two.
    file = interrupted / "runs/x/config.yaml"
    config = OmegaConf.load(file)
    config.trainer.devices = "auto"
    OmegaConf.save(config, file)
    line = refused("train.py", *arguments, "trainer.devices=auto", cwd=interrupted)
    assert "this run began with trainer.devices=2 and there is another number now, 1" in line


@pytest.mark.parametrize("whom", ["command", "all", "one", "torchrun"])
def test_a_signal_stops_all_after_the_same_step(whom, straight, arguments, tmp_path):
    number = signal.SIGUSR1 if whom == "command" else signal.SIGTERM
    workers = ["data.num_workers=2"] if whom in ("command", "torchrun") else []  # in the group of a rank
    process = start(*arguments, *workers, cwd=tmp_path, launcher=TORCHRUN if whom == "torchrun" else None)
    output = wait_for_line(process, "epoch 2/5")
    if whom == "all":
        os.killpg(process.pid, number)
    elif whom == "one":
        os.kill(children(process.pid)[-1], number)
    else:
        process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == (1 if whom == "torchrun" else 75), rest  # torchrun has codes of its own
    assert (output + rest).count(f"{number.name}: stopped; the same command continues") == 1, rest
    assert "Error" not in rest or whom == "torchrun", rest
    assert newest_checkpoint(tmp_path / "runs/x").epoch == 2
    if whom in ("one", "torchrun"):
        assert "continued after epoch 2 of 5 (last.ckpt)" in run_ok("train.py", *arguments, cwd=tmp_path)
        assert_same_end(tmp_path, straight)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_signal_before_the_first_step_has_the_same_code(arguments, tmp_path):
    process = start(*arguments, cwd=tmp_path)
    wait_for_line(process, "network: ")  # the first evaluation follows
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75, output
    assert not list(tmp_path.rglob("*.json"))


def test_a_full_disk_is_one_line_though_the_others_wait_for_the_first(straight, arguments, tmp_path):
    limited = ["bash", "-c", 'ulimit -f 1000; exec "$0" "$@"', sys.executable]  # blocks of 1 KiB; a checkpoint has more
    process = start(*arguments, cwd=tmp_path, launcher=limited)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert output.count(".ckpt cannot be written (File too large): make room") == 1, output
    assert "Traceback" not in output, output
