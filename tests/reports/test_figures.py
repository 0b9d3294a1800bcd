"""The figures: which runs a line joins, what it is called, and the same bytes every time."""

from __future__ import annotations

from itertools import product

import pytest
from commands import one_line
from reports.test_paper import CARS, write_run

from proxy_anchor.reports import figures
from proxy_anchor.reports.runs import read_runs


def test_figures_show_what_was_varied_and_nothing_else(tmp_path):
    for number, dimension in enumerate((64, 512)):
        for seed in (1, 2):
            overrides = (f"embedding_dim={dimension}", f"seed={seed}")
            write_run(tmp_path / f"d/{dimension}/{seed}", *CARS, *overrides, recall_1=0.7 + 0.1 * number + 0.01 * seed)
    for alpha, delta in product((16, 32), (0, 0.1)):
        setting = (f"loss.alpha={alpha}", f"loss.delta={delta}")
        write_run(tmp_path / f"a/{alpha}/{delta}", *CARS, *setting, recall_1=0.8)
    write_run(tmp_path / "a/cub", "dataset=cub", "backbone=bninception", recall_1=0.6)
    runs = read_runs(tmp_path / "d")
    [line] = figures.recall_by("recall_by_dimension", runs).axes[0].containers
    assert list(line.lines[0].get_xdata()) == [64, 512]
    assert list(line.lines[0].get_ydata()) == pytest.approx([71.5, 81.5])
    assert line.lines[2][0].get_segments()[0][:, 1] == pytest.approx([71.5 - 0.5**0.5, 71.5 + 0.5**0.5])
    one_line(figures.recall_by, "recall_by_batch_size", runs, match="nothing to draw")
    one_line(figures.alpha_delta_map, runs, match="two values of each")
    axes = figures.alpha_delta_map(read_runs(tmp_path / "a")).axes[0]  # of runs that are alike in all else
    assert axes.images[0].get_array().tolist() == [pytest.approx([80, 80])] * 2
    names = figures.write_figures(tmp_path / "out", read_runs(tmp_path))
    assert names == ["recall_by_epoch", "recall_by_seconds", "recall_by_dimension", "alpha_delta_map"]
    for name in names:
        assert (tmp_path / "out" / f"{name}.svg").stat().st_size > 1000


def test_image_size_goes_with_its_resize(tmp_path):
    for crop, resize in ((224, 256), (324, 361)):
        write_run(tmp_path / str(crop), *CARS, f"dataset.images.crop={crop}", f"dataset.images.resize={resize}")
    assert "recall_by_image_size" in figures.write_figures(tmp_path / "out", read_runs(tmp_path))
    [line] = figures.recall_by("recall_by_image_size", read_runs(tmp_path)).axes[0].containers
    assert list(line.lines[0].get_xdata()) == [224, 324]


def test_runs_with_other_settings_are_not_taken_for_seeds(tmp_path):
    for alpha in (16, 32):
        for seed in (1, 2):
            write_run(tmp_path / f"{alpha}/{seed}", *CARS, f"loss.alpha={alpha}", f"seed={seed}")
    named = figures.named_groups(read_runs(tmp_path))
    assert {name: len(group) for name, group in named.items()} == {
        "cars, Proxy-Anchor, BN, 512-d, alpha 16": 2,
        "cars, Proxy-Anchor, BN, 512-d, alpha 32": 2,
    }


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        figures.save_figure(
            figures.recall_curves({"a": [{"history": [{"epoch": 1, "recall": {"1": 0.5}, "train_seconds": 1.0}]}]}),
            tmp_path / name / "chart",
        )
    for suffix in (".svg", ".png"):
        first, second = ((tmp_path / name / "chart").with_suffix(suffix).read_bytes() for name in ("a", "b"))
        assert first == second


def test_the_curves_of_a_run_are_recall_of_each_set_and_loss():
    def row(epoch: int, recall: float, validation: float | None, loss: float | None) -> dict[str, object]:
        held_out = validation and {"1": validation, "2": 1.0}
        return {"epoch": epoch, "recall": {"1": recall, "2": 1.0}, "validation": held_out, "train_loss": loss}

    def lines(rows: list[dict[str, object]]) -> dict[str, list[list[list[float]]]]:
        drawn = {name: figure.axes[0].lines for name, figure in figures.run_curves(rows).items()}
        return {name: [[*map(list, line.get_data())] for line in each] for name, each in drawn.items()}

    assert lines([row(0, 0.25, 0.5, None), row(2, 0.5, 0.75, 3.0)]) == {
        "Recall@1 (%)": [[[0, 2], [25, 50]], [[0, 2], [50, 75]]],
        "training loss": [[[2], [3]]],
    }
    assert lines([row(1, 0.25, None, 4.0)]) == {"Recall@1 (%)": [[[1], [25]]], "training loss": [[[1], [4]]]}
