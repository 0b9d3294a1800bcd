from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

from proxy_anchor import Retriever
from proxy_anchor.reports.pages import write_search_page


class Images(HTMLParser):
    """Collects the pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name == "src"]


def test_page_holds_its_pictures_and_escapes_names(make_checkpoint: Callable, write_images: Callable, tmp_path: Path):
    rows = write_images({"cat": 3, "<script>alert(1)</script>".replace("/", "_"): 2})
    paths = [path for path, _ in rows]
    retriever = Retriever.from_pretrained(make_checkpoint()).index(paths, [name for _, name in rows], progress=False)
    retriever.calibrate(0.5)
    results = retriever.search(paths[:2], k=4)
    Path(results[0][3].name).unlink()
    write_search_page(tmp_path / "page.html", retriever, paths[:2], ["one", "two"], results)
    text = (tmp_path / "page.html").read_text()
    page = Images()
    page.feed(text)
    assert len(page.sources) == 2 * (1 + 4)
    gone = sum(hit.name == results[0][3].name for hits in results for hit in hits)
    assert page.sources.count("data:,") == gone
    assert sum(source.startswith("data:image/jpeg;base64,") for source in page.sources) == 10 - gone
    assert "script" not in page.tags
    assert not re.search(r"https?://", text)
    assert "match threshold" in text
    assert "class by vote" in text
