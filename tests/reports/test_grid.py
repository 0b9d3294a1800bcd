"""Places on a grid: a cell for each, the nearest assignment, the same every time; the picture."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from commands import one_line
from PIL import Image

from proxy_anchor.reports.grid import grid_picture, snap_to_grid

FREE = np.array([[0, 0], [1, 0], [0, 1], [1, 1]])


def test_no_assignment_of_four_is_nearer() -> None:
    for seed in range(5):
        places = np.random.default_rng(seed).random((4, 2))

        def cost(cells: np.ndarray, places: np.ndarray = places) -> float:
            return float(((places - (cells + 0.5) / 2) ** 2).sum())

        least = min(cost(FREE[list(order)]) for order in permutations(range(4)))
        assert cost(snap_to_grid(places)) == pytest.approx(least)


@pytest.mark.parametrize("count", [1, 2, 5, 400])
def test_every_cell_once_and_the_same_again(count: int) -> None:
    places = np.random.default_rng(1).random((count, 2))
    cells = snap_to_grid(places)
    assert set(cells.ravel()) <= set(range(int(np.ceil(np.sqrt(count)))))
    assert len(np.unique(cells, axis=0)) == count
    assert np.array_equal(cells, snap_to_grid(places))


def test_pictures_lie_in_their_cells(tmp_path: Path) -> None:
    paths = []
    for number in range(4):
        paths.append(tmp_path / f"{number}.png")
        Image.new("RGB", (20, 20), (50 * number, 0, 0)).save(paths[-1])
    page = grid_picture(paths, FREE, tile=24)
    assert page.size == (48, 48)
    assert [page.getpixel((x, y))[0] for x, y in ((12, 36), (36, 36), (12, 12), (36, 12))] == [0, 50, 100, 150]
    one_line(grid_picture, paths, FREE, tile=9000, match="tile=9000")
