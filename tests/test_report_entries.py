"""Pictures of finished runs, as a user asks for them: the commands of docs/getting_started.md, and the choices beyond."""

from __future__ import annotations

import csv
import re
import shlex
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_GLYPHS, run_entry, run_ok

DOCUMENT = (REPOSITORY / "docs" / "getting_started.md").read_text()
COMMANDS = re.findall(r"^python src/report\.py .*$", DOCUMENT, re.M)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A user's folder with two small runs."""
    folder = tmp_path_factory.mktemp("user")
    for seed, name in enumerate(("first", "second"), start=1):
        run_ok("train.py", f"run={name}", f"seed={seed}", *TINY_GLYPHS, cwd=folder)
    return folder


def test_a_run_leaves_its_page(here):
    assert (here / "runs/first/index.html").read_text().count("<svg") == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_documented_command(here, command):
    python, script, *arguments = shlex.split(command, comments=True)
    assert (python, script) == ("python", "src/report.py")
    run_ok("report.py", *arguments, cwd=here)


def test_there_are_documented_commands():
    assert len(COMMANDS) == 4


def test_choices(here):
    arguments = ("retrieval=runs/first", "against=runs/second", "choose=worst", "queries=5", "k=3", "output=a")
    assert "worst classes, Recall@1: " in run_ok("report.py", *arguments, cwd=here)
    assert (here / "a/retrieval.html").read_text().count("<section") == 5
    header, *rows = csv.reader((here / "a/class_recall.csv").read_text().splitlines())
    assert header == ["class", "queries", "runs/first", "runs/second"]
    assert sum(int(row[1]) for row in rows) == 64
    assert [float(row[2]) for row in rows] == sorted(float(row[2]) for row in rows)
    refused = run_entry("report.py", "retrieval=runs/first", "against=runs/first", "output=c", cwd=here)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "another run's folder" in refused.stderr
    (here / "file").touch()
    refused = run_entry("report.py", "map=runs/first", "method=pca", "output=file", cwd=here)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    picture = next((here / "data/glyphs").rglob("test/*/*.png"))
    run_ok("report.py", "retrieval=runs/first", f"choose={picture}", "output=b", cwd=here)
    assert picture.name in (here / "b/retrieval.html").read_text()
    assert "64 of 64 images" in run_ok("report.py", "map=runs/first", "method=pca", "tile=24", "output=b", cwd=here)
    names = {file.name for file in (here / "b").iterdir()}
    assert {"map.png", "map_classes.svg", "class_recall.png", "retrieval.png"} <= names
