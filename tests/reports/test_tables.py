"""Text tables, and result files that are whole or not there."""

import json
from pathlib import Path

import pytest

from proxy_anchor.reports.tables import format_table
from proxy_anchor.utils import RESULT_FILE, read_result, write_json


def test_numbers_stand_right_and_texts_left():
    rows = [{"loss": "proxy_anchor", "R@1": 86.123, "epoch": 7}, {"loss": "pa", "R@1": 9.96, "epoch": 40}]
    assert format_table(rows).splitlines() == [
        "loss           R@1  epoch",
        "------------  ----  -----",
        "proxy_anchor  86.1      7",
        "pa            10.0     40",
    ]


def test_keys_may_differ_from_row_to_row():
    rows = [{"job": 0, "R@1": 50.0}, {"job": 1, "failed": "no such file"}]
    assert format_table(rows).splitlines() == [
        "job   R@1  failed",
        "---  ----  ------------",
        "  0  50.0  -",
        "  1     -  no such file",
    ]


def test_a_column_with_one_text_stands_left():
    assert format_table([{"lr": "auto"}, {"lr": 1}]).splitlines()[2:] == ["auto", "1"]


def test_no_rows_and_no_trailing_spaces():
    assert format_table([]) == ""
    assert all(
        line == line.rstrip() for line in format_table([{"a": "x", "b": "y"}, {"a": "xx", "b": ""}]).splitlines()
    )


def test_what_is_written_is_read(tmp_path):
    result = {"best": {"recall": {"1": 0.1 + 0.2}}, "name": "é", "nothing": None}
    write_json(tmp_path / RESULT_FILE, result)
    assert read_result(tmp_path) == result
    assert (tmp_path / RESULT_FILE).read_text(encoding="utf-8").endswith("}\n")
    assert [file.name for file in tmp_path.iterdir()] == [RESULT_FILE]


def test_an_unfinished_run_has_no_result(tmp_path):
    assert read_result(tmp_path) is None
    assert read_result(tmp_path / "nowhere") is None


def test_a_failed_write_leaves_the_old_result(tmp_path):
    write_json(tmp_path / RESULT_FILE, {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / RESULT_FILE, {"a": Path()})
    assert read_result(tmp_path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == [RESULT_FILE]


def test_the_result_appears_whole(tmp_path, monkeypatch):
    seen = []
    replace = Path.replace

    def spy(self, target):
        seen.append((target.exists(), json.loads(self.read_text())))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", spy)
    write_json(tmp_path / "numbers.json", {"a": 1})
    assert seen == [(False, {"a": 1})]
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"a": 1}
