"""Map of embeddings: an image in every cell of a square grid."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from proxy_anchor.data.images import read_rgb
from proxy_anchor.errors import UsageError

# The assignment takes time with the cube of the cells: seconds for 2,500, minutes for 10,000.
MAX_IMAGES = 2500
MAX_SIDE_PX = 16384


def snap_to_grid(places: np.ndarray) -> np.ndarray:
    """Assign (N, 2) places in [0, 1] to different cells of the smallest square grid.

    The sum of squared distances is minimal (SciPy's linear_sum_assignment).

    Returns:
        (N, 2) int64: column, and row from the bottom.
    """
    from scipy.optimize import linear_sum_assignment

    side = ceil(sqrt(len(places)))
    columns, rows = np.meshgrid(np.arange(side), np.arange(side))
    free = np.stack([columns.ravel(), rows.ravel()], axis=1)
    _, taken = linear_sum_assignment(((places[:, None] - (free + 0.5) / side) ** 2).sum(-1))
    return free[taken]


def grid_picture(paths: Sequence[Path], cells: np.ndarray, *, tile: int = 64) -> Image.Image:
    """The central square of each image in its cell, `tile` pixels wide.

    Raises UsageError when the picture would be wider than MAX_SIDE_PX, or for an image that cannot be read.
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
