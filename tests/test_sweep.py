"""Sweeps by every launcher: a job is the run that its command alone would be, and a failed one stops no other."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from commands import TINY_GLYPHS, run_entry, run_ok

SWEEP = ["-m", "run=sweep", "loss.alpha=16,-1,32", "trainer.max_epochs=2", *TINY_GLYPHS]
LOCAL = ["launcher=local", "launcher.jobs_at_once=2"]
LAUNCHERS = [[], pytest.param(LOCAL, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """(the user's folder, the finished command) of three jobs, one of them failing."""
    here = tmp_path_factory.mktemp("user")
    return here, run_entry("train.py", *SWEEP, cwd=here)


def test_a_failed_job_is_marked_in_its_folder_and_the_others_finish(swept):
    here, done = swept
    assert done.returncode == 2, done.stderr
    reason = "loss.alpha=-1: expected a finite number above 0."
    trace = (here / "runs/sweep/1/error.txt").read_text()
    assert trace.startswith("Traceback")
    assert trace.splitlines()[-1] == reason
    assert done.stderr.splitlines()[-1] == f"error: {reason}"
    assert re.search(r"^job +loss.alpha .*best R@1", done.stdout, re.M)  # the table
    assert re.search(rf"^1 +-1 .*{re.escape(reason)}$", done.stdout, re.M)
    assert "Traces: error.txt in the folders of failed jobs." in done.stdout
    rows = list(csv.DictReader((here / "runs/sweep/sweep.csv").open()))
    best = [json.loads((here / f"runs/sweep/{job}/result.json").read_text())["best"]["recall"]["1"] for job in (0, 2)]
    assert [float(rows[job]["best R@1"]) for job in (0, 2)] == pytest.approx([100 * each for each in best])
    assert (here / "runs/sweep/index.html").read_text().count("index.html") == 2  # the runs
    assert [(here / f"runs/sweep/{number}/result.json").is_file() for number in range(3)] == [True, False, True]


def test_a_job_equals_the_same_command_alone(swept):
    here, _ = swept
    run_ok("train.py", "run=single", "loss.alpha=32", "trainer.max_epochs=2", *TINY_GLYPHS, cwd=here)
    job, single = here / "runs/sweep/2", here / "runs/single"
    files = [{each.name for each in folder.iterdir()} - {"last.ckpt.previous"} for folder in (job, single)]
    assert files[0] == files[1]  # but for that one, which a slow run has
    configs = [yaml.safe_load((each / "config.yaml").read_text()) for each in (job, single)]
    assert configs[0] | {"run": "single"} == configs[1]
    results = [json.loads((each / "result.json").read_text()) for each in (job, single)]
    for mine, theirs in zip(*(result["history"] for result in results), strict=True):
        assert (mine["recall"], mine["train_loss"]) == (theirs["recall"], theirs["train_loss"])


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["basic", "local"])
def test_the_same_command_repeats_what_is_missing_by_any_launcher(launcher, swept, tmp_path):
    here, _ = swept
    shutil.copytree(here / "runs/sweep", tmp_path / "runs/sweep")
    shutil.rmtree(tmp_path / "runs/sweep/2")
    finished = (tmp_path / "runs/sweep/0/result.json").stat().st_mtime_ns
    # The failed job's setting is repaired: its mark goes.
    same = [each.replace(",-1,", ",24,") for each in SWEEP]
    run_ok("train.py", *same, f"dataset.root={here}/data/glyphs", *launcher, cwd=tmp_path)
    assert (tmp_path / "runs/sweep/0/result.json").stat().st_mtime_ns == finished
    assert not (tmp_path / "runs/sweep/1/error.txt").exists()
    assert all((tmp_path / f"runs/sweep/{job}/result.json").is_file() for job in (1, 2))


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=["basic", "local"])
def test_a_job_that_is_refused_leaves_the_run_in_its_folder_as_it_is(launcher, swept, tmp_path):
    here, _ = swept
    shutil.copytree(here / "runs/sweep/0", tmp_path / "runs/sweep/0")  # finished
    shutil.copytree(here / "runs/sweep/2", tmp_path / "runs/sweep/1")  # and one that was interrupted
    (tmp_path / "runs/sweep/1/result.json").unlink()
    (tmp_path / "runs/sweep/1/error.txt").write_text("out of memory\n")
    before = contents(tmp_path)
    others = ["-m", "run=sweep", "loss.alpha=8,9", "trainer.max_epochs=2", *TINY_GLYPHS]
    done = run_entry("train.py", *others, f"dataset.root={here}/data/glyphs", *launcher, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    refused = "holds a run with other settings (loss.alpha): choose another run=NAME"
    assert all(refused in row for row in done.stdout.strip().splitlines()[-3:-1])  # of the table
    assert not (tmp_path / "runs/sweep/sweep.md").exists()
    assert contents(tmp_path) == before


def contents(here: Path) -> dict[str, bytes]:
    return {str(each.relative_to(here)): each.read_bytes() for each in here.glob("runs/*/*/*") if each.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["slurm", "ray"])
def test_jobs_through_a_cluster(launcher, swept, tmp_path):
    pytest.importorskip({"slurm": "submitit"}.get(launcher, launcher))
    here, _ = swept
    words = {"slurm": ["launcher=slurm", "launcher.cluster=local"], "ray": ["launcher=ray"]}[launcher]
    data = f"dataset.root={here}/data/glyphs"
    sweep = ["-m", "run=it's", "loss.alpha=32,-1", "trainer.max_epochs=2", *TINY_GLYPHS, data, *words]
    done = run_entry("train.py", *sweep[:1], 'run="it\'s"', *sweep[2:], cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    folder = tmp_path / "runs" / "it's"
    results = [json.loads((each / "result.json").read_text()) for each in (folder / "0", here / "runs/sweep/2")]
    assert results[0]["last"]["recall"] == results[1]["last"]["recall"]
    assert (folder / "1/error.txt").read_text().splitlines()[-1].startswith("loss.alpha=-1: expected")
