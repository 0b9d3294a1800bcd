"""The script that takes the picture of the page for the documents."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import REPOSITORY
from PIL import Image

pytest.importorskip("playwright.sync_api", reason="playwright is not installed (a test extra)")


@pytest.mark.skipif(not shutil.which("chromium") and not shutil.which("google-chrome"), reason="no Chromium")
def test_the_picture_is_taken(make_checkpoint: Callable, write_images: Callable, tmp_path: Path, monkeypatch) -> None:
    make_checkpoint("runs/first/best.ckpt")
    write_images({"cat": 5, "dog": 5, "eel": 5})
    shutil.copytree(tmp_path / "images", tmp_path / "data" / "glyphs" / "made" / "test")
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(REPOSITORY / "scripts" / "search_page.py"))["main"]
    monkeypatch.setitem(main.__globals__, "PICTURE", tmp_path / "page.webp")
    main()
    with Image.open(tmp_path / "page.webp") as picture:
        assert picture.size == (1200, 760)
        assert len(picture.getcolors(2**20)) > 1000  # pictures and a map, not an empty page
