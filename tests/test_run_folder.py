"""A run folder belongs to one process at a time: commands of one moment, of one name, killed ones, ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from commands import REPOSITORY, TINY_GLYPHS, refused, run_entry, run_ok
from interruptions import RUN, TORCHRUN, start, wait_for_line

from proxy_anchor.errors import FolderTaken
from proxy_anchor.training import run_lock
from proxy_anchor.training.module import CHECKPOINT_KEY


def assert_one_run(folder: Path) -> int:
    """The seed of the run in the folder, which all of its files are of."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    result = json.loads((folder / "result.json").read_text())
    for name, row in (("best.ckpt", result["best"]), ("last.ckpt", result["last"])):
        checkpoint = torch.load(folder / name, weights_only=True)
        assert checkpoint[CHECKPOINT_KEY]["config"] == config, name
        assert checkpoint["epoch"] + 1 == row["epoch"], name
        recalls = [each["best_model_score"] for each in checkpoint["callbacks"].values() if each.get("monitor")]
        assert [float(each) for each in recalls] == [pytest.approx(result["best"]["recall"]["1"])], name
    return config["seed"]


@pytest.mark.slow
def test_commands_of_one_moment_have_a_folder_each(glyphs, tmp_path):
    seeds = [1, 2, 3, 4]
    processes = [start(*TINY_GLYPHS, glyphs, f"seed={seed}", cwd=tmp_path) for seed in seeds]
    processes.append(start("-m", *TINY_GLYPHS, glyphs, "seed=5,6", cwd=tmp_path))
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, outputs
    folders = [each.parent for each in (tmp_path / "runs").rglob("result.json")]
    assert sorted(map(assert_one_run, folders)) == [1, 2, 3, 4, 5, 6]
    assert len(list((tmp_path / "runs").iterdir())) == 5  # and no lock file is left


def test_a_second_command_is_refused_in_one_line_and_changes_nothing(glyphs, tmp_path):
    folder = tmp_path / "runs/x"
    with other_process(folder) as first:
        tune = ("tune.py", *RUN, "search={loss.alpha:[16]}")
        for command in (("train.py", *RUN, "seed=7"), ("train.py", *RUN, "-m"), ("compare.py", *RUN), tune):
            assert refused(*command, glyphs, cwd=tmp_path) == (
                f"error: {folder} is in use by process {first} on {socket.gethostname()}: "
                "wait until that has ended, or choose another run=NAME."
            )
    assert not folder.exists()


@pytest.mark.slow
def test_a_killed_command_of_several_ranks_frees_its_folder_and_a_running_one_does_not(glyphs, tmp_path):
    arguments = [*RUN, glyphs, "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_epochs=400"]
    first = start(*arguments, cwd=tmp_path)
    wait_for_line(first, "epoch 2/400")
    refused = run_entry("train.py", *arguments, cwd=tmp_path)
    assert f"in use by process {first.pid} on" in refused.stderr
    # Ranks that torchrun starts are told by the first of them.
    torchrun = [*TORCHRUN, str(REPOSITORY / "src/train.py"), *arguments]
    other = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert other.returncode != 0
    assert other.stderr.count(f"in use by process {first.pid} on") == 1, other.stderr
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert "continued after epoch" in run_ok("train.py", *arguments, cwd=tmp_path)
    assert assert_one_run(tmp_path / "runs/x") == 1


@contextmanager
def other_process(folder: Path) -> Iterator[int]:
    """The number of a process that holds the folder."""
    context = multiprocessing.get_context("fork")
    held, end = context.Event(), context.Event()
    process = context.Process(target=lambda: (run_lock.take(folder), held.set(), end.wait()), daemon=True)
    process.start()
    assert held.wait(30)
    yield process.pid
    end.set()
    process.join()


def test_held_until_the_other_has_ended(tmp_path):
    folder = tmp_path / "x"
    with other_process(folder) as other:
        for _ in range(2):  # who was refused says nothing in its place
            with pytest.raises(FolderTaken, match=f"is in use by process {other} on"):
                run_lock.take(folder, wait_s=0)
    with run_lock.held(folder), run_lock.held(folder):
        assert run_lock.lock_file(folder).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert not run_lock.lock_file(folder).exists()
    with other_process(folder):  # given back by both
        pass


def test_a_lock_ends_with_its_process_and_not_with_what_that_forked(tmp_path):
    folder = tmp_path / "x"
    reader, writer = os.pipe()
    parent = os.fork()
    if not parent:
        run_lock.take(folder)
        child = os.fork()
        if not child:
            time.sleep(60)
        os.write(writer, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(parent, 0)
    child = int(os.read(reader, 20))
    try:
        with run_lock.held(folder):
            assert run_lock.lock_file(folder).is_file()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK"])
def test_without_locks_in_the_file_system_a_run_goes_on_with_a_warning(code, tmp_path, monkeypatch, capsys):
    import errno
    import fcntl

    def refuse(*arguments):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", refuse)
    folder = tmp_path / "x"
    for _ in range(2):
        with run_lock.held(folder):
            pass
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"warning: {tmp_path}/.x.lock cannot be locked (") for line in lines)
