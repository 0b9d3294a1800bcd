"""Made-up pictures."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str) -> bytes:
    stream = BytesIO()
    image.save(stream, form)
    return stream.getvalue()


def write_noise_images(folder: Path, counts: dict[str, int], size: int = 32) -> list[tuple[Path, str]]:
    """Small noisy PNG files below a folder, a colour per class: rows for `make_tables`."""
    rows = []
    for name, count in counts.items():
        random = np.random.default_rng([ord(letter) for letter in name])
        colour = random.integers(0, 256, 3)
        for number in range(count):
            noise = random.normal(0, 40, (size, size, 3)) + random.normal(0, 60, 3)
            path = folder / "images" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(path)
            rows.append((path, name))
    return rows


def pixels(count: int = 3, size: int = 64) -> torch.Tensor:
    return torch.randint(256, (count, 3, size, size), dtype=torch.uint8)
