"""report.py on real runs: the commands of docs/getting_started.md, the choices beyond, what is refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pandas
import pytest
from commands import REPOSITORY, TINY_GLYPHS, compose_train, refused

from proxy_anchor.errors import UsageError
from train import train

DOCUMENT = (REPOSITORY / "docs" / "getting_started.md").read_text()
COMMANDS = re.findall(r"^python src/report\.py (.*)$", DOCUMENT, re.M)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A user's folder with two small runs."""
    folder = tmp_path_factory.mktemp("user")
    for seed, name in enumerate(("first", "second"), start=1):
        overrides = (f"dataset.root={folder}/data", f"seed={seed}", *TINY_GLYPHS, "trainer.accelerator=cpu")
        train(compose_train(*overrides, "trainer.enable_progress_bar=false", "logger=csv"), folder / "runs" / name)
    return folder


@pytest.fixture
def here(runs, monkeypatch):
    monkeypatch.chdir(runs)
    return runs


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command(here, report, command):
    assert report(*shlex.split(command, comments=True))


def test_choices(here, report):
    arguments = ("retrieval=runs/first", "against=runs/second", "choose=worst", "queries=5", "k=3", "output=a")
    assert "worst classes, Recall@1: " in report(*arguments)
    assert (here / "a/retrieval.html").read_text().count("<section") == 5
    table = pandas.read_csv(here / "a/class_recall.csv")
    assert list(table) == ["class", "queries", "runs/first", "runs/second"]
    assert table["queries"].sum() == 64
    assert table["runs/first"].is_monotonic_increasing
    picture = next((here / "data").rglob("test/*/*.png"))
    # Several reports in one command.
    output = report("retrieval=runs/first", f"choose={picture}", "map=runs/first", "method=pca", "tile=24", "output=b")
    assert picture.name in (here / "b/retrieval.html").read_text()
    assert "64 of 64 images" in output
    names = {file.name for file in (here / "b").iterdir()}
    assert {"map.png", "class_recall.csv", "retrieval.png"} <= names


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "a report is needed: add one of runs="),
        (("runs=",), "a report is needed"),
        (("runs=nowhere",), "runs=nowhere: no such folder"),
        (("map=x",), "x holds no config.yaml: pass the folder of a finished run, runs/NAME."),
        (("map=x", "method=mds"), "method=mds is not known"),
        (("retrieval=x", "k=0"), "k=0: expected a whole number of at least 1"),
        (("map=x", "images=2501"), "images=2501"),
    ],
)
def test_bad_arguments(here, report, arguments, text):
    with pytest.raises(UsageError, match=re.escape(text)):
        report(*arguments)


def test_the_command(tmp_path):
    assert "unknown key 'rums'. Did you mean 'runs'?" in refused("report.py", "rums=x", cwd=tmp_path)
