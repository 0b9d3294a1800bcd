"""The page in a browser: upload, results, click-through, comparison, map, messages, and a clean console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from proxy_anchor import Retriever
from proxy_anchor.inference.app.server import make_app

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (a test extra)")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    with playwright.sync_playwright() as started:
        # Chromium's own sandbox refuses to run as root, as containers do.
        options = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        made = started.chromium.launch(executable_path=CHROMIUM, args=[*options, "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def page(browser, retrievers: dict[str, Retriever], serving: Callable) -> Iterator:
    """The page over two models; afterwards its console must be clean and nothing may have been asked of elsewhere."""
    for each in retrievers.values():
        each.calibrate(0.3)
    complaints, elsewhere = [], []
    with serving(make_app(retrievers, max_upload_mb=0.05)) as address:
        page = browser.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: elsewhere.append(asked.url) if not is_own(asked.url, address) else None)
        page.goto(address)
        playwright.expect(page.locator("#message")).to_have_text("Ready: 15 images, 14 images.")
        yield page
        page.close()
    assert complaints == []
    assert elsewhere == []


def is_own(url: str, address: str) -> bool:
    return url.startswith((address, "blob:" + address, "data:"))


def hits(page, model: int):
    return page.locator("#results > section").nth(model).locator(".hit")


def test_upload_then_click_through(page, tmp_path: Path) -> None:
    page.locator("#k").fill("4")
    page.locator("#file").set_input_files(tmp_path / "images" / "dog" / "2.png")
    for model, name in enumerate(("first (15 images)", "second (14 images)")):
        playwright.expect(page.locator("#results h2").nth(model)).to_contain_text(name)
        playwright.expect(hits(page, model)).to_have_count(4)
        for text in ("1.000", "match", "dog", "2.png"):
            playwright.expect(hits(page, model).first).to_contain_text(text)
    # decode() waits until a picture is there, and fails for one that is none.
    page.locator(".hit img").evaluate_all("images => Promise.all(images.map(image => image.decode()))")
    playwright.expect(page.locator("#query figcaption")).to_have_text("2.png")
    playwright.expect(page.locator("#message")).to_have_text("")

    chosen = hits(page, 1).nth(1)
    name = chosen.get_attribute("title").removeprefix("search from ")
    chosen.click()
    playwright.expect(page.locator("#query figcaption")).to_have_text(name)
    for model in (0, 1):
        playwright.expect(hits(page, model)).to_have_count(4)
        titles = [each.get_attribute("title") for each in hits(page, model).all()]
        assert all(name not in title for title in titles)


def test_a_model_without_the_image_says_so(page, tmp_path: Path) -> None:
    page.locator("#file").set_input_files(tmp_path / "images" / "cat" / "0.png")
    hits(page, 0).first.click()
    playwright.expect(page.locator("#results p").nth(1)).to_contain_text("0.png is not in the gallery.")
    playwright.expect(hits(page, 0)).to_have_count(10)
    playwright.expect(hits(page, 1)).to_have_count(0)


def test_a_dropped_file_is_searched(page, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "eel" / "1.png").read_bytes()
    transfer = page.evaluate_handle(
        """bytes => { const all = new DataTransfer();
        all.items.add(new File([new Uint8Array(bytes)], "dropped.png", { type: "image/png" })); return all; }""",
        list(content),
    )
    page.dispatch_event("#drop", "dragover", {"dataTransfer": transfer})
    playwright.expect(page.locator("#drop")).to_have_class("over")
    page.dispatch_event("#drop", "drop", {"dataTransfer": transfer})
    playwright.expect(hits(page, 0).first).to_contain_text("eel")
    playwright.expect(page.locator("#query figcaption")).to_have_text("dropped.png")


def test_bad_uploads_give_messages(page, tmp_path: Path) -> None:
    files = {
        "broken.png": (b"no image", "the image cannot be read (no image of a known format)."),
        "notes.txt": (b"text", "notes.txt is not an image."),
        "large.png": (bytes(60_000), "large.png is larger than 0.05 MB."),
    }
    for name, (content, message) in files.items():
        (tmp_path / name).write_bytes(content)
        page.locator("#file").set_input_files(tmp_path / name)
        playwright.expect(page.locator("#message")).to_have_text(message)
        playwright.expect(page.locator("#message")).to_have_class("error")
    page.locator("#file").set_input_files(tmp_path / "images" / "cat" / "0.png")
    playwright.expect(hits(page, 0)).to_have_count(10)
    playwright.expect(page.locator("#message")).to_have_text("")


def test_map_is_drawn_and_clicked(page) -> None:
    page.locator("#show-map").click()
    playwright.expect(page.locator("#map canvas")).to_have_count(2)
    drawn = "canvas => canvas.getContext('2d').getImageData(0, 0, 560, 560).data.some(value => value !== 0)"
    assert page.locator("#map canvas").first.evaluate(drawn)
    page.locator("#map canvas").first.click(position={"x": 100, "y": 100})
    playwright.expect(hits(page, 0)).to_have_count(10)
    playwright.expect(page.locator("#map p").first).to_contain_text(".png")
    page.locator("#show-map").click()
    playwright.expect(page.locator("#map")).to_be_hidden()
