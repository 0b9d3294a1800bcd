"""Training and the other commands from Python."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_GLYPHS, one_line
from hydra.core.hydra_config import HydraConfig

from proxy_anchor import command, train
from proxy_anchor.training.run_folder import StopOnSignal


def test_a_run_from_python_is_the_run_of_the_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    before = list(sys.argv)
    document = (REPOSITORY / "docs" / "getting_started.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", document, re.S)
    found: dict = {"TINY": TINY_GLYPHS}
    exec(example.replace('"trainer.max_epochs=5"', "*TINY"), found)
    result, metrics = found["result"], found["metrics"]
    assert result == json.loads(Path("runs/first/result.json").read_text())
    assert result["command"].startswith("train.py run=first dataset.load.train_classes=8")
    assert metrics["recall_at_1"] == pytest.approx(result["best"]["recall"]["1"])
    command("report", "retrieval=runs/first", "queries=2", "output=report")
    assert Path("report/retrieval.html").is_file()
    assert sys.argv == before
    assert not HydraConfig.initialized()
    assert str(tmp_path) not in capsys.readouterr().out


def test_mistakes_are_errors_and_no_exit(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    one_line(command, "trian", match=r"trian is no command; .* Did you mean 'train'")
    for words, message in {
        ("seed=-1",): "seed=-1",
        ("launcher=slurm",): "launcher=slurm: it runs the jobs of a sweep",
        ("backbone=nothing",): "backbone.*nothing",
        ("-m", "seed=1,2"): "-m cannot be understood: write key=value",
    }.items():
        one_line(train, *words, match=message)
    assert list(Path("runs").iterdir()) == []
    for part in ("train/a", "test/b"):
        Path("my", part).mkdir(parents=True)
        Path("my", part, "0.png").write_bytes(b"damaged")
    assert command("check", "dataset=folder", "dataset.root=my") is False


def test_training_in_a_thread_listens_to_no_signals() -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(StopOnSignal()._listen).result()


def test_a_train_py_of_the_user_is_not_the_command(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "train.py").write_text("raise AssertionError")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for imported in (False, True):
        monkeypatch.delitem(sys.modules, "train", raising=False)
        if imported:
            monkeypatch.setitem(sys.modules, "train", object())
        before = sys.modules.get("train"), list(sys.path)
        one_line(train, "seed=-1", match="seed=-1")
        assert (sys.modules.get("train"), sys.path) == before
