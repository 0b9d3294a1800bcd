"""The checks behind the one-line errors: what passes, what does not, and what is said."""

import math
import shlex

import pytest
from commands import compose_train, run_entry
from hydra import compose, initialize_config_dir
from omegaconf.errors import ConfigAttributeError

from proxy_anchor.cli import checks, messages, start
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import FolderTaken, UsageError, check_choice, check_int, check_number, did_you_mean


@pytest.mark.parametrize("value", [1, -1, 2.0, 2.5, "2", None, True, math.nan, [2]])
def test_other_values_are_no_whole_number(value):
    with pytest.raises(UsageError) as caught:
        check_int("data.batch_size", value, 2)
    assert str(caught.value) == f"data.batch_size={value!r}: expected a whole number of at least 2."


@pytest.mark.parametrize("value", [0.49, 1.01, -1, math.nan, math.inf, -math.inf, "0.7", None, True, [0.7]])
def test_numbers_out_of_range_are_named(value):
    with pytest.raises(UsageError) as caught:
        check_number("x.y", value, 0.5, maximum=1)
    assert str(caught.value) == f"x.y={value!r}: expected a finite number of at least 0.5 and at most 1."


def test_an_exclusive_minimum():
    check_number("loss.alpha", 1e-9, 0, exclusive=True)
    with pytest.raises(UsageError) as caught:
        check_number("loss.alpha", 0, 0, exclusive=True)
    assert str(caught.value) == "loss.alpha=0: expected a finite number above 0."
    check_number("loss.delta", 0, 0)
    with pytest.raises(UsageError, match=r"of at least 0\.$"):
        check_number("loss.delta", -1, 0)


def test_choices():
    check_choice("x", 32, [32, "bf16"])
    check_choice("x", "a", iter("abc"))
    with pytest.raises(UsageError) as caught:
        check_choice("trainer.precision", "b", iter([32, "bf16"]))
    assert str(caught.value) == "trainer.precision=b is not known; choose one of: 32, bf16."


def test_did_you_mean():
    assert did_you_mean("aplha", ["alpha", "delta"]) == " Did you mean 'alpha'?"
    assert did_you_mean("gamma_ray", ["x", "y"]) == ""
    assert did_you_mean("x", []) == ""
    assert did_you_mean("alpa", iter(["alpha"])) == " Did you mean 'alpha'?"


def test_the_line_is_found_below_another_error():
    error = RuntimeError("Error in call to target\nfull_key: loss")
    error.__cause__ = UsageError("the cause: repair it.")
    assert messages.one_line(error) == "the cause: repair it."


def test_a_name_with_line_breaks_does_not_cut_the_message():
    assert messages.one_line(UsageError("class a\nb has no image: add one.")) == "class a b has no image: add one."


def test_the_trace_of_a_failed_run_is_left_only_where_the_folder_holds_no_other_run(tmp_path):
    entry.mark_failed(tmp_path, FolderTaken("holds a run with other settings"))
    assert not (tmp_path / "error.txt").exists()
    entry.mark_failed(tmp_path, UsageError("no room"))
    assert (tmp_path / "error.txt").read_text().endswith("\nno room\n")
    cfg = compose_train("dataset=folder", "dataset.root=x")
    assert start.resume_or_start(cfg, tmp_path) == (None, None)  # the next attempt removes it
    assert not (tmp_path / "error.txt").exists()
    (tmp_path / "result.json").touch()
    entry.mark_failed(tmp_path, UsageError("no room"))
    assert not (tmp_path / "error.txt").exists()


@pytest.mark.parametrize(
    "path", ["/home/é/图", "~/x", "/a'b", '/a"b', "/a&b#c", "/a(b", "/a=b", "/a[b{c", "a,b", "a;b!c", '\\"']
)
def test_a_path_that_hydra_refuses_is_shown_as_it_works(path, tmp_path):
    done = run_entry("train.py", "dataset=folder", f"dataset.root={path}", cwd=tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    [works] = shlex.split(line.partition(" write ")[2].removesuffix(" for one with a comma.").removesuffix("."))
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        assert compose("train", ["dataset=folder", works]).dataset.root == path


def test_several_values_without_a_sweep_name_what_works(tmp_path):
    said = "seed=1,2 has several values: give one, add -m to a command for a sweep (from Python: a call for each)"
    assert said in run_entry("train.py", "seed=1,2", cwd=tmp_path).stderr
    jobs = run_entry("train.py", "dataset=folder", "-m", "seed=1,2", "run=x", cwd=tmp_path)
    assert jobs.stdout.count("dataset.root=FOLDER") == 2


def test_a_group_that_is_taken_away():
    for group in ("regulariser", "logger", "callbacks"):
        assert compose_train(f"~{group}")[group] == {}
    with pytest.raises(ConfigAttributeError) as caught:
        checks.check_config(compose_train("~loss"))
    assert messages.one_line(caught.value).startswith("loss is needed: add loss=NAME, one of: arcface, ")
