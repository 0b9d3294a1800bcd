"""An embedding map as in the paper's appendix: places snapped to a square grid, an image in every cell; or a scatter."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image, ImageOps

from proxy_anchor.data.images import read_rgb
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.figures import COLOURS, empty_figure

# The assignment costs its size cubed: 3.6 s for 2,500 cells on one core, which would be minutes for 10,000.
EXACT_CELLS, BLOCK_CELLS = 2500, 1024
MAX_SIDE_PX = 16384


def snap_to_grid(places: np.ndarray) -> np.ndarray:
    """(N, 2) int64 cells (column, row from the bottom) of (N, 2) places, each cell taken once; the grid is the smallest square.

    Up to EXACT_CELLS cells the sum of squared distances is the least possible (Jonker & Volgenant 1987, in SciPy). Beyond,
    the plane is halved along its longer side, points in proportion to cells, until blocks have at most BLOCK_CELLS, and
    each block is assigned so. The same places give the same cells.
    """
    places = np.asarray(places, dtype=np.float64)
    if places.ndim != 2 or places.shape[1] != 2 or not len(places) or not np.isfinite(places).all():
        raise UsageError(f"places of shape {places.shape}: expected finite (N, 2) with at least one.")
    side = ceil(sqrt(len(places)))
    cells = np.empty((len(places), 2), dtype=np.int64)
    largest = EXACT_CELLS if side * side <= EXACT_CELLS else BLOCK_CELLS
    _assign(places, np.arange(len(places)), (0, 0), (side, side), largest, cells)
    return cells


def _assign(
    places: np.ndarray,
    rows: np.ndarray,
    corner: tuple[int, int],
    size: tuple[int, int],
    largest: int,
    cells: np.ndarray,
) -> None:
    """Fill `cells` of these rows from the block of `size` (columns, rows) at `corner`."""
    width, height = size
    if not len(rows):
        return
    if width * height > largest:
        axis = 0 if width >= height else 1
        first = size[axis] // 2
        other = size[1 - axis]
        # Stable, so that equal places go the same way every time.
        order = rows[np.argsort(places[rows, axis], kind="stable")]
        share = round(len(rows) * first / size[axis])
        share = min(max(share, len(rows) - (size[axis] - first) * other), first * other)
        sizes = [(first, other), (size[axis] - first, other)]
        corners = [corner, (corner[0] + first, corner[1]) if axis == 0 else (corner[0], corner[1] + first)]
        for part, at, extent in zip((order[:share], order[share:]), corners, sizes, strict=True):
            _assign(places, part, at, extent if axis == 0 else (extent[1], extent[0]), largest, cells)
        return
    from scipy.optimize import linear_sum_assignment

    columns, lines = np.meshgrid(np.arange(width), np.arange(height))
    free = np.stack([columns.ravel(), lines.ravel()], axis=1)
    low, high = places[rows].min(0), places[rows].max(0)
    scaled = np.where(high > low, (places[rows] - low) / np.where(high > low, high - low, 1), 0.5)
    distance = ((scaled[:, None] - (free + 0.5) / np.array(size)) ** 2).sum(-1)
    chosen, taken = linear_sum_assignment(distance)
    cells[rows[chosen]] = free[taken] + np.array(corner)


def grid_picture(paths: Sequence[Path], cells: np.ndarray, *, tile: int = 64) -> Image.Image:
    """The middle of each image, which is as wide as high, in its cell, `tile` pixels wide.

    Raises UsageError when the picture would have more than MAX_SIDE_PX on a side, and for an image that cannot be read.
    """
    side = int(cells.max()) + 1
    if side * tile > MAX_SIDE_PX:
        raise UsageError(
            f"tile={tile}: {side} cells would be {side * tile} pixels; take at most {MAX_SIDE_PX // side}."
        )
    page = Image.new("RGB", (side * tile, side * tile), "white")
    for path, (column, row) in zip(paths, cells.tolist(), strict=True):
        page.paste(ImageOps.fit(read_rgb(path), (tile, tile)), (column * tile, (side - 1 - row) * tile))
    return page


def scatter(places: np.ndarray, labels: Sequence[int] | np.ndarray, classes: Sequence[str]) -> Figure:
    """Points coloured and marked by class; a legend up to 16 classes. More classes than colours share them, by form apart."""
    labels = np.asarray(labels)
    present = np.unique(labels)
    lines = ceil(len(present) / 2) if len(present) <= 16 else 0
    figure, axes = empty_figure(7, 7 + 0.2 * lines)
    forms = "os^Dv<>P"
    for number, label in enumerate(present):
        chosen = places[labels == label]
        colour, form = COLOURS[number % len(COLOURS)], forms[number // len(COLOURS) % len(forms)]
        axes.scatter(chosen[:, 0], chosen[:, 1], s=14, color=colour, marker=form, linewidths=0, label=classes[label])
    if lines:
        figure.legend(
            loc="outside lower center", ncols=2, frameon=False, fontsize="small"
        )  # inside it would cover points
    axes.set(xticks=[], yticks=[], aspect="equal")
    return figure
