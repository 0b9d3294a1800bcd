"""tune.py as a user runs it: a study that goes on, ends hopeless trials, and survives the failed ones."""

from __future__ import annotations

import json
import re

import pytest
from commands import TINY_GLYPHS, one_line, refused, run_entry, run_ok

optuna = pytest.importorskip("optuna")
from proxy_anchor.sweeps.tuning import Tuning, make_space  # noqa: E402

ARGUMENTS = [*TINY_GLYPHS, "trainer.max_epochs=2"]
SEARCH = "search={optimizer.lr: {min: 1e-4, max: 1e-2, log: true}, loss.alpha: [16, 32]}"


def rows_of(folder):
    return {row["trial"]: row for row in json.loads((folder / "tuning.json").read_text())["trials"]}


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """The user's folder after two trials, and what was printed."""
    here = tmp_path_factory.mktemp("user")
    return here, run_ok("tune.py", "run=t", "trials=2", SEARCH, *ARGUMENTS, cwd=here)


def test_a_search_ends_with_a_table_and_a_command(searched):
    here, output = searched
    folder = here / "runs/t"
    rows = list(rows_of(folder).values())
    assert {row["state"] for row in rows} == {"complete"}
    assert rows[0]["validation recall"] >= rows[1]["validation recall"]
    for row in rows:
        result = json.loads((folder / row["trial"] / "result.json").read_text())
        assert row["validation recall"] == pytest.approx(100 * result["selected"]["validation"]["1"])
        assert 1e-4 <= row["optimizer.lr"] <= 1e-2
        assert row["loss.alpha"] in (16, 32)
    assert rows[0]["optimizer.lr"] != rows[1]["optimizer.lr"]
    assert f"<td>{rows[0]['validation recall']:.1f}</td>" in (folder / "index.html").read_text()
    last = output.strip().splitlines()[-1]
    assert last.startswith(f"best: {rows[0]['trial']}. On all training classes: python src/train.py ")
    assert f"optimizer.lr={rows[0]['optimizer.lr']} loss.alpha={rows[0]['loss.alpha']}" in last
    assert "validation=" not in last


def test_the_same_command_goes_on_prunes_and_repeats_what_was_interrupted(searched):
    here, _ = searched
    folder = here / "runs/t"
    finished = (folder / "trial0/result.json").stat().st_mtime_ns
    study = optuna.load_study(study_name="tuning", storage=f"sqlite:///{folder}/study.db")
    distributions = study.trials[0].distributions
    study.ask(distributions)  # trial2: of a process that was killed
    for _ in range(4):  # trial3 ... trial6: nothing can be better than these
        study.add_trial(
            optuna.trial.create_trial(
                params=study.trials[0].params,
                distributions=distributions,
                value=2.0,
                intermediate_values={1: 2.0, 2: 2.0},
            )
        )
    output = run_ok("tune.py", "run=t", "trials=8", SEARCH, *ARGUMENTS, cwd=here)
    rows = rows_of(folder)
    assert sorted(rows) == [f"trial{number}" for number in range(8)]
    assert [rows[f"trial{number}"]["state"] for number in (0, 1, 2, 7)] == ["complete"] * 2 + ["pruned"] * 2
    assert rows["trial2"]["epochs"] == rows["trial7"]["epochs"] == 1
    assert "trial2: pruned" in output
    assert not (folder / "trial7/result.json").exists()
    assert (folder / "trial0/result.json").stat().st_mtime_ns == finished
    line = refused("tune.py", "run=t", "trials=8", SEARCH.replace("32", "64"), *ARGUMENTS, cwd=here)
    assert "holds a search of other values (loss.alpha): choose another run=NAME" in line
    line = refused("tune.py", "run=t", "trials=8", SEARCH, *ARGUMENTS, "loss.delta=0.2", cwd=here)
    assert "trial0 holds a run with other settings (loss.delta): choose another run=NAME" in line


@pytest.mark.slow
def test_two_at_once_and_failed_trials(tmp_path):
    search = "search={loss.alpha: [1e30], seed: {min: 1, max: 1000}}"
    arguments = ["run=t", "trials=3", search, *ARGUMENTS]
    done = run_entry("tune.py", *arguments, "launcher=local", "launcher.jobs_at_once=2", cwd=tmp_path)
    folder = tmp_path / "runs/t"
    assert done.returncode == 2, done.stdout + done.stderr
    assert "3 of 3 trials failed" in done.stderr
    assert "best:" not in done.stdout
    assert {row["state"] for row in rows_of(folder).values()} == {"failed"}
    for number in range(3):
        assert (folder / f"trial{number}/error.txt").read_text().splitlines()[-1].startswith("a gradient is not finite")
    logs = [(folder / f"worker{number}.log").read_text() for number in range(2)]
    assert sorted(re.findall(r"(trial\d): failed", "".join(logs))) == ["trial0", "trial1", "trial2"]
    assert all("failed" in log for log in logs)  # both had work


def test_what_may_vary():
    kinds = optuna.distributions
    assert make_space({"a": [1, "x", None], "b": {"min": 1, "max": 9}, "c": {"min": 0.1, "max": 1, "log": True}}) == {
        "a": kinds.CategoricalDistribution((1, "x", None)),
        "b": kinds.IntDistribution(1, 9),
        "c": kinds.FloatDistribution(0.1, 1, log=True),
    }
    for given in ([], {"min": 1}, {"min": 2, "max": 1}, {"min": 0.0, "max": 1.0, "log": True}):
        one_line(make_space, {"a": given}, match="expected, for each key, a list of values or a range")


def test_several_processes_take_trials_of_one_study_and_repeat_what_failed(tmp_path):
    space = make_space({"a": {"min": 0.0, "max": 1.0}})

    def open_again() -> Tuning:
        return Tuning(tmp_path, space)

    trials = [open_again().next_trial(4) for _ in range(4)]  # a process each
    assert len({trial.params["a"] for trial in trials}) == 4
    assert open_again().next_trial(4) is None
    study = open_again()
    study.study.tell(trials[1].number, 0.5)
    study.study.tell(trials[2].number, state=optuna.trial.TrialState.FAIL)
    study.repeat_failed()
    again = [study.next_trial(4) for _ in range(3)]
    assert [study.folder_of(trial).name for trial in again] == ["trial0", "trial2", "trial3"]
    assert [trial.params for trial in again] == [trials[number].params for number in (0, 2, 3)]
    assert study.next_trial(4) is None
    for trial in again:
        study.study.tell(trial, 0.25)
    assert [row["trial"] for row in study.rows()] == ["trial1", "trial0", "trial2", "trial3"]
