"""Text tables, and result files that are whole or not there."""

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


def test_what_is_written_is_read(tmp_path):
    result = {"best": {"recall": {"1": 0.1 + 0.2}}, "name": "é", "nothing": None}
    write_json(tmp_path / RESULT_FILE, result)
    assert read_result(tmp_path) == result
    assert (tmp_path / RESULT_FILE).read_text(encoding="utf-8").endswith("}\n")
    assert [file.name for file in tmp_path.iterdir()] == [RESULT_FILE]


def test_a_failed_write_leaves_the_old_result(tmp_path):
    write_json(tmp_path / RESULT_FILE, {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / RESULT_FILE, {"a": Path()})
    assert read_result(tmp_path) == {"a": 1}
    assert [file.name for file in tmp_path.iterdir()] == [RESULT_FILE]
