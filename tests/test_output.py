"""What a run prints: the same lines on a terminal, with the bar, and in a log, without it."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_GLYPHS, run_entry

ARGUMENTS = [*TINY_GLYPHS, "trainer.max_epochs=2", "run=x"]
COMMAND = [sys.executable, str(REPOSITORY / "src/train.py"), *ARGUMENTS]
PROMISED = [
    r"run folder: \S+/runs/x",
    r"data: glyphs, 64 train images of 8 classes, 64 query images of 8 classes",
    r"before training: Recall@1 \d+\.\d",
    r"learning rates: backbone 0\.006 \(.*\| proxies 0\.6 ",
    r"epoch 1/2: loss \d+\.\d{3}  Recall@1",
    r"epoch 2/2: loss \d+\.\d{3}  Recall@1",
    r"  best       Recall@1",
]


def on_a_terminal(command: list[str]) -> str:
    """What the command shows on a terminal."""
    shown = []

    def read(terminal: int) -> bytes:
        termios.tcsetwinsize(terminal, (40, 120))
        shown.append(os.read(terminal, 65536))
        return shown[-1]

    assert pty.spawn(command, read) == 0, shown
    return b"".join(shown).decode()


@pytest.mark.slow
def test_on_a_terminal_the_bar_hides_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = on_a_terminal([*COMMAND, "+trainer.profiler=simple"])
    for line in PROMISED:
        assert re.search(line, shown), line
    assert re.search(r"epoch 1/2: +\d+%.*4/4", shown)  # the bar counts epochs as the lines do
    assert not re.search(r"[Ee]poch 0", shown)
    assert "run_training_epoch" in shown  # the profiler's table, of which Lightning's other lines are no part
    assert "GPU available" not in shown


def test_a_log_is_plain_lines(tmp_path: Path) -> None:
    done = run_entry("train.py", *ARGUMENTS, cwd=tmp_path)
    for line in PROMISED:
        assert re.search(rf"^{line}", done.stdout, re.M), line
    assert "\r" not in done.stdout + done.stderr
    assert done.stderr == ""
    run = tmp_path / "runs" / "x"
    classes = json.loads((run / "classes.json").read_text())
    assert {name: len(each) for name, each in classes.items()} == {"train": 8, "test": 8}
    assert not set(classes["train"]) & set(classes["test"])
    assert not (run / "last.ckpt.previous").exists()


@pytest.mark.slow
def test_an_interrupted_run_names_what_continues_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "trainer.max_epochs=500"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch 2/"):
        assert process.poll() is None
    process.send_signal(2)
    _, said = process.communicate()
    assert process.returncode == 130
    assert said.endswith(f"interrupted: the same command with run=x continues {tmp_path}/runs/x.\n")
