"""Write docs/pictures/search_page.webp: `python src/train.py run=first`, then `python scripts/search_page.py`.

Needs Chromium and the extras app and test. The images are characters that the package drew itself.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
import threading
from pathlib import Path

import uvicorn
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from proxy_anchor import Retriever
from proxy_anchor.inference.app.server import make_app

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "search_page.webp"
CLASSES = 15


def main() -> None:
    """Search some of the test images with one that is not among them, and take a screenshot."""
    retriever = Retriever.from_pretrained("runs/first")
    [images] = Path("data/glyphs").resolve().glob("*/test")
    classes = [sorted(each.iterdir()) for each in sorted(images.iterdir())[:CLASSES]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # so that the page shows no path of this machine
        for files in classes:
            for file in files[1:]:
                place = Path("my_pictures", file.parent.name, file.name)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
        query = shutil.copy(classes[0][0], "query.png")
        retriever.index("my_pictures", progress=False)
        retriever.calibrate(0.01)
        screenshot = take(retriever, Path(query))
    Image.open(io.BytesIO(screenshot)).convert("RGB").save(PICTURE, quality=80, method=6)


def take(retriever: Retriever, query: Path) -> bytes:
    """PNG of the page with the results of an uploaded query and the map."""
    config = uvicorn.Config(make_app({"first": retriever}), port=0, log_level="error")
    socket = config.bind_socket()
    socket.listen()
    threading.Thread(target=uvicorn.Server(config).run, args=([socket],), daemon=True).start()
    with sync_playwright() as started:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1200, "height": 760})
        page.goto(f"http://127.0.0.1:{socket.getsockname()[1]}/?map=1&seed=1")
        expect(page.locator("#map-title")).to_contain_text("images", timeout=60_000)
        page.locator("#file").set_input_files(query)
        expect(page.locator("#map-query")).to_be_visible()
        page.evaluate("Promise.all([...document.querySelectorAll('#results img')].map((each) => each.decode()))")
        screenshot = page.screenshot()
        browser.close()
    return screenshot


if __name__ == "__main__":
    main()
