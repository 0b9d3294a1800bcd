from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from proxy_anchor import Retriever
from proxy_anchor.reports.pages import write_search_page


def test_page_holds_its_pictures_and_escapes_names(make_checkpoint: Callable, write_images: Callable, tmp_path: Path):
    rows = write_images({"cat": 3, "<script>alert(1)</script>".replace("/", "_"): 2})
    paths = [path for path, _ in rows]
    retriever = Retriever.from_pretrained(make_checkpoint()).index(paths, [name for _, name in rows], progress=False)
    retriever.calibrate(0.5)
    results = retriever.search(paths[:2], k=4)
    Path(results[0][3].name).unlink()
    write_search_page(tmp_path / "page.html", retriever, paths[:2], results)
    text = (tmp_path / "page.html").read_text()
    gone = sum(hit.name == results[0][3].name for hits in results for hit in hits)
    assert text.count('src="data:,"') == gone
    assert text.count('src="data:image/webp;base64,') == 2 * (1 + 4) - gone
    assert text.count("src=") == 10
    assert "<script" not in text
    assert not re.search(r"https?://", text)
    assert "match threshold" in text
    assert "class by vote" in text
