"""Text tables, and result files that are whole or not there."""

import re
from pathlib import Path

import pytest

from proxy_anchor.reports.figures import recall_by_settings
from proxy_anchor.reports.tables import format_table, paired_difference, write_table
from proxy_anchor.utils import RESULT_FILE, read_result, write_json


def test_numbers_stand_right_and_texts_left_and_keys_may_differ():
    rows = [{"loss": "proxy_anchor", "R@1": 86.123, "epoch": 7}, {"loss": "pa", "R@1": 9.96, "failed": "no such file"}]
    assert format_table(rows).splitlines() == [
        "loss           R@1  epoch  failed",
        "------------  ----  -----  ------------",
        "proxy_anchor  86.1      7  -",
        "pa            10.0      -  no such file",
    ]


def test_columns_beyond_the_width_follow_below_after_the_first():
    rows = [{"loss": "triplet", "R@1": 86.123, "epoch": 7, "s": None}]
    whole = format_table(rows)
    assert format_table(rows, width=max(map(len, whole.splitlines()))) == whole
    below = ["loss      R@1", "-------  ----", "triplet  86.1", ""]
    assert format_table(rows, width=1).splitlines()[:4] == below  # at least one column next to the first
    last = ["loss     epoch  s", "-------  -----  -", "triplet      7  -"]
    assert format_table(rows, width=19).splitlines() == [*below, *last]


def test_a_table_is_left_with_its_figure_and_links_to_the_runs(tmp_path):
    for run in ("trial10", "trial2", "loss/seed1"):
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "index.html").touch()
    rows = [
        {"trial": "trial2", "state": "complete", "R@1": 50.0, "loss.alpha": "16"},
        {"trial": "trial10", "state": "failed", "R@1": None, "loss.alpha": "<a|b>"},
    ]
    figure = recall_by_settings(rows, ["loss.alpha"], "R@1")
    for _ in range(2):  # the second time over its own files
        said = write_table(tmp_path, "tuning", rows, {"recall_by_settings": figure}, "A note.")
    assert said == f"table, recall_by_settings, links to the runs: {tmp_path}/index.html; tuning.md, .csv"
    assert (tmp_path / "tuning.md").read_text().splitlines() == [
        "| trial | state | R@1 | loss.alpha |",
        "| --- | --- | --- | --- |",
        "| trial2 | complete | 50.0 | 16 |",
        r"| trial10 | failed | - | <a\|b> |",
        "",
        "A note.",
    ]
    lines = ["trial,state,R@1,loss.alpha", "trial2,complete,50.0,16", "trial10,failed,,<a|b>"]
    assert (tmp_path / "tuning.csv").read_text().splitlines() == lines
    assert all((tmp_path / f"recall_by_settings.{kind}").stat().st_size > 1000 for kind in ("svg", "png"))
    page = (tmp_path / "index.html").read_text()
    assert "<td>complete</td><td>50.0</td>" in page
    assert "&lt;a|b&gt;" in page
    assert page.count("<svg") == 1
    # A run that has a row is linked there.
    assert re.findall('<td><a href="(.*?)">', page) == ["trial2/index.html", "trial10/index.html"]
    assert re.findall('<li><a href="(.*?)">', page) == ["loss/seed1/index.html"]


def test_parallel_coordinates():
    def row(alpha, rate, kind, recall):
        return {"alpha": alpha, "rate": rate, "kind": kind, "R@1": recall}

    rows = [row("16", "1e-3", "b", 50.0), row("32", "1e-1", "a", 70.0), row("64", "1e-2", "b", 60.0)]
    [axes] = recall_by_settings([*rows, row("8", "1", "c", None)], ["alpha", "rate", "kind"], "R@1").axes
    *settings, _ = axes.get_xticklabels()
    assert [each.get_text() for each in settings] == ["alpha", "rate", "kind"]
    lines = [each for each in axes.lines if len(each.get_ydata()) == 4]
    # The best last, on top of the others and thick. Rates are on a logarithmic scale, names on even steps.
    expected = [(0, 0, 1, 0), (1, 0.5, 1, 0.5), (1 / 3, 1, 0, 1)]
    assert [pytest.approx(each) for each in expected] == [each.get_ydata() for each in lines]
    assert [each.get_linewidth() for each in lines] == [1.2, 1.2, 3]
    written = "16 32 64 1e-3 1e-2 1e-1 a b 50.0 60.0 70.0"
    assert {each.get_text() for each in axes.texts} == set(written.split())
    [axes] = recall_by_settings([row("8", "1", "c", None)], ["alpha"], "R@1").axes
    assert not axes.lines
    many = [row(str(100 + each), "1", "a", 50.0) for each in range(100)]
    [axes] = recall_by_settings(many, ["alpha"], "R@1").axes
    labels = [each.get_text() for each in axes.texts][:-1]
    assert {"100", "199"} < set(labels)
    assert len(labels) < 18


def test_what_is_written_is_read_and_a_failed_write_leaves_it(tmp_path):
    result = {"best": {"recall": {"1": 0.1 + 0.2}}, "name": "é", "nothing": None}
    write_json(tmp_path / RESULT_FILE, result)
    with pytest.raises(TypeError):
        write_json(tmp_path / RESULT_FILE, {"a": Path()})
    assert read_result(tmp_path) == result
    assert [file.name for file in tmp_path.iterdir()] == [RESULT_FILE]


def test_a_paired_difference_is_over_the_seeds_of_both_with_students_interval():
    def run(seed, recall):
        return {"seed": seed, "best": {"recall": {"1": recall / 100}}}

    others = [run(seed, 50) for seed in (3, 1, 2)]
    runs = [run(1, 51), run(2, 52), run(3, 53), run(4, 99)]
    # Mean 2, deviation 1, n 3: 2 ± 4.3027 / sqrt(3).
    assert paired_difference(runs, others, "best") == "+2.0 [-0.5, +4.5]"
    assert paired_difference(runs[:2], [run(1, 50.5), run(2, 51.5)], "best") == "+0.5 [+0.5, +0.5]"
    assert paired_difference(runs[2:], others[1:], "best") is None
    assert paired_difference(others, others, "best") is None
