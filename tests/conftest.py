from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


@pytest.fixture(autouse=True)
def _seeded_single_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def write_images(tmp_path: Path) -> Callable[..., list[tuple[Path, str]]]:
    """write_images({"cat": 3, "dog": 2}) writes small noisy PNG files, a colour per class: rows for `make_tables`."""

    def write(counts: dict[str, int], size: int = 32) -> list[tuple[Path, str]]:
        rows = []
        for name, count in counts.items():
            random = np.random.default_rng([ord(letter) for letter in name])
            colour = random.integers(0, 256, 3)
            for number in range(count):
                noise = random.normal(0, 40, (size, size, 3)) + random.normal(0, 60, 3)
                path = tmp_path / "images" / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(path)
                rows.append((path, name))
        return rows

    return write
