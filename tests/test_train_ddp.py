"""The command with two devices: one run, one folder, one voice, and the exit code of whoever failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import yaml
from commands import REPOSITORY, TINY_GLYPHS, run_entry, run_ok
from processes import free_port

TRAIN = str(REPOSITORY / "src" / "train.py")
TWO = ["trainer.devices=2", "trainer.strategy=ddp"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A weights file, with which batch norm can be frozen: torch synchronises it on GPUs only."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("weights") / "test_resnet.pth"
    torch.save(timm.create_model("test_resnet", pretrained=False).state_dict(), file)
    return str(file)


@pytest.mark.slow
def test_two_processes_give_the_numbers_of_one(weights: str, tmp_path: Path) -> None:
    options = [*TINY_GLYPHS, "trainer.max_epochs=2", f"backbone.weights={weights}", "batch_norm=frozen_statistics"]
    # The paper's rate: AdamW turns rounding into whole steps, which at the characters' 6e-3 can change a neighbour.
    options += ["optimizer.lr=1e-4"]
    run_ok("train.py", "run=one", *options, *TWO, "trainer.devices=1", "trainer.strategy=auto", cwd=tmp_path)
    done = run_entry("train.py", *options, *TWO, cwd=tmp_path)  # its folder is named by the time, the same for both
    assert done.returncode == 0, done.stderr
    assert "FutureWarning" not in done.stderr
    printed = done.stdout
    folders = [folder for folder in (tmp_path / "runs").iterdir() if folder.name != "one"]
    assert len(folders) == 1
    # Whether a version before the last was written depends on how long the two epochs took.
    alone, together = ({each.name for each in place.iterdir()} for place in (tmp_path / "runs/one", folders[0]))
    assert alone - {"last.ckpt.previous"} == together - {"last.ckpt.previous"}
    assert yaml.safe_load((folders[0] / "config.yaml").read_text())["run"] == folders[0].name
    assert printed.count("epoch 2/2:") == printed.count("summary") == printed.count("before training") == 1

    one, two = (json.loads((each / "result.json").read_text()) for each in (tmp_path / "runs/one", folders[0]))
    assert (one["num_devices"], two["num_devices"]) == (1, 2)
    assert two["command"].split() == ["train.py", *options, *TWO]
    for single, several in zip(one["history"], two["history"], strict=True):
        assert several["recall"] == single["recall"]
        assert several["train_loss"] == (single["train_loss"] and pytest.approx(single["train_loss"], rel=1e-4))


@pytest.mark.slow
def test_a_sweep_runs_its_jobs_one_after_another_and_outlives_a_failed_one(tmp_path: Path) -> None:
    done = run_entry("train.py", "-m", "run=x", "loss.alpha=1e30,16", *TINY_GLYPHS, *TWO, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    results = [(tmp_path / "runs" / "x" / str(job) / "result.json").is_file() for job in range(2)]
    assert results == [False, True], done.stderr
    assert done.stderr.count("error: a gradient is not finite") == 1
    [row] = [line for line in done.stdout.splitlines() if line.startswith("0 ")]  # of the table
    assert "gradient is not finite" in row


def assert_one_run(commands: list[list[str]], variables: list[dict[str, str]], epoch: str, folder: Path) -> None:
    """Two commands, started from outside, train together in runs/x: the first prints, the second is silent."""
    processes = [
        subprocess.Popen(
            command, cwd=folder, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command, own in zip(commands, variables, strict=True)
    ]
    output, silent = (process.communicate(timeout=120)[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0], output + silent
    assert f"epoch {epoch}:" in output
    assert f"epoch {epoch}:" not in silent
    assert json.loads((folder / "runs" / "x" / "result.json").read_text())["num_devices"] == 2


@pytest.mark.slow
def test_two_launchers_are_two_nodes(tmp_path: Path) -> None:
    place = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place]
    options = [TRAIN, *TINY_GLYPHS, *TWO, "trainer.devices=1", "trainer.num_nodes=2", "run=x"]
    nodes = [[*torchrun, f"--node-rank={node}", *options] for node in (0, 1)]
    assert_one_run(nodes, [{}, {}], "1/1", tmp_path)


@pytest.mark.slow
def test_two_tasks_of_srun_are_one_run(tmp_path: Path) -> None:
    step = {"JOB_ID": "7", "JOB_NAME": "x", "NODELIST": "127.0.0.1", "NODEID": "0"}
    step |= dict.fromkeys(("NTASKS", "NTASKS_PER_NODE", "STEP_NUM_TASKS"), "2")
    tasks = [{**step, "PROCID": task, "LOCALID": task} for task in ("0", "1")]
    command = [sys.executable, TRAIN, *TINY_GLYPHS, *TWO, "run=x", "trainer.max_epochs=2", "callbacks=ema"]
    variables = [{f"SLURM_{key}": value for key, value in task.items()} for task in tasks]
    assert_one_run([command, command], variables, "2/2", tmp_path)


@pytest.mark.parametrize(("code", "ends_with", "queued"), [(0, 0, ""), (3, 3, ""), (75, 75, "requeue 7")])
def test_a_slurm_job_that_was_stopped_is_queued_again(code: int, ends_with: int, queued: str, tmp_path: Path) -> None:
    # Stand-ins: srun runs its command; the program ends at once, after a SIGTERM to its group where it is stopped.
    for name, text in {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec setsid --wait "$@"',
        "scontrol": f"echo $* > {tmp_path}/queued",
        "program": f"trap : TERM\n{'kill -TERM 0; sleep 0.2' if code == 75 else ':'}\nexit {code}",
    }.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    step = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / "scripts" / "slurm.sh"), "run=x"],
        cwd=tmp_path,
        env={**os.environ, **step, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "program"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ends_with, done.stderr
    assert ((tmp_path / "queued").read_text().strip() if queued else "") == queued
    assert not (tmp_path / "queued").exists() or queued
    assert not list(tmp_path.glob(".stopped*"))
