"""Pictures of the gallery as the page shows them: small and original."""

from __future__ import annotations

import io
from functools import lru_cache
from pathlib import Path

from proxy_anchor.data.images import make_thumbnail, open_image, read_rgb, upright_size
from proxy_anchor.data.table import split_box
from proxy_anchor.errors import UsageError

SHOWN = ("JPEG", "PNG", "WEBP", "BMP", "GIF")  # Pillow's names of what browsers show
THUMBNAIL_PX = (800, 400)  # twice the shown size, for screens of two pixels per unit


@lru_cache(200_000)
def ratio(file: str) -> float:
    """Width / height, from the header; 1 for an unreadable image."""
    path, box = split_box(Path(file))
    try:
        with open_image(path) as image:
            height, width = upright_size(image) if box is None else (box[3], box[2])
    except UsageError:
        return 1.0
    return round(width / height, 3)


@lru_cache(2000)
def thumbnail(file: str) -> tuple[bytes, str]:
    """(content, type) of a small WebP; UsageError if the file is unreadable."""
    return make_thumbnail(read_rgb(Path(file)), *THUMBNAIL_PX), "image/webp"


def original(file: str) -> tuple[bytes, str]:
    """(content, type) of the file as it is, or as a PNG where browsers cannot show it; UsageError if unreadable.

    Of an object in a box, the whole picture.
    """
    path = split_box(Path(file))[0]
    # The type is the content's, so that a file with a picture's name and other content is never served.
    with open_image(path) as image:
        kind = str(image.format)
    if kind in SHOWN:
        return path.read_bytes(), f"image/{kind.lower()}"
    stream = io.BytesIO()
    read_rgb(path).save(stream, "PNG")
    return stream.getvalue(), "image/png"
