"""The checks behind the one-line errors: what passes, what does not, and what is said."""

import errno
import functools
import math
import shlex

import pytest
from commands import compose_train, one_line, refused, run_entry

from proxy_anchor.cli import main as entry
from proxy_anchor.cli import messages, start
from proxy_anchor.errors import FolderTaken, UsageError, check_int, check_number, did_you_mean

WHOLE = functools.partial(check_int, minimum=2)
PART = functools.partial(check_number, minimum=0.5, maximum=1)
ABOVE = functools.partial(check_number, minimum=0, exclusive=True)


@pytest.mark.parametrize(
    ("check", "expected", "values"),
    [
        (WHOLE, "a whole number of at least 2", [1, -1, 2.0, 2.5, "2", None, True, math.nan, [2]]),
        (
            PART,
            "a finite number of at least 0.5 and at most 1",
            [0.49, 1.01, -1, math.nan, math.inf, "0.7", None, True],
        ),
        (ABOVE, "a finite number above 0", [0, -math.inf, [0.7]]),
    ],
    ids=["whole", "part", "above"],
)
def test_numbers_out_of_range_are_named(check, expected, values):
    for value in values:
        assert one_line(check, "x.y", value) == f"x.y={value!r}: expected {expected}."
    check("x.y", 2 if check is WHOLE else 1)


def test_did_you_mean():
    assert did_you_mean("aplha", ["alpha", "delta"]) == " Did you mean 'alpha'?"
    assert did_you_mean("gamma_ray", ["x", "y"]) == did_you_mean("x", []) == ""


def test_an_error_of_the_system_names_the_repair():
    line = messages.one_line(OSError(errno.ENOSPC, "No space left on device", "a.npz"))
    assert line == "a.npz: No space left on device: make room, and give the same command again."
    assert "change its permissions" in messages.one_line(PermissionError(errno.EACCES, "Permission denied", "a"))


def test_the_line_is_found_below_another_error_and_a_line_break_does_not_cut_it():
    error = RuntimeError("Error in call to target\nfull_key: loss")
    error.__cause__ = UsageError("class a\nb has no image: add one.")
    assert messages.one_line(error) == "class a b has no image: add one."


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
    line = refused("train.py", "dataset=folder", f"dataset.root={path}", cwd=tmp_path)
    [works] = shlex.split(line.partition(" write ")[2].removesuffix(" for one with a comma.").removesuffix("."))
    assert compose_train("dataset=folder", works).dataset.root == path


def test_every_job_of_a_sweep_that_fails_is_in_its_table(tmp_path):
    jobs = run_entry("train.py", "dataset=folder", "-m", "seed=1,2", "run=x", cwd=tmp_path)
    assert jobs.stdout.count("dataset.root=FOLDER") == 2


def test_a_group_that_is_taken_away():
    for group in ("regulariser", "logger", "callbacks"):
        assert compose_train(f"~{group}")[group] == {}
