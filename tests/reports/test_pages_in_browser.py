"""The pages of a run in a browser, from the disk: pictures load, filters work, the console is clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import compose_train
from omegaconf import OmegaConf
from reports.conftest import ANGLES, on_circle
from reports.test_model_card import RESULT

from proxy_anchor.data.table import Splits
from proxy_anchor.reports.figures import recall_by_settings
from proxy_anchor.reports.pages import write_retrieval_page, write_run_page
from proxy_anchor.reports.tables import write_table

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (a test extra)")


@pytest.fixture
def page(open_page: Callable) -> Iterator:
    """A page without a network."""
    with open_page("file:") as page:
        yield page


def pictures_load(page) -> bool:
    return page.evaluate("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth > 0)))")


def fits(page) -> bool:
    """Whether the page, opened on a phone, need not be scrolled to the side."""
    phone = page.context.browser.new_page(viewport={"width": 390, "height": 844}, is_mobile=True)
    phone.goto(page.url)
    width = phone.evaluate("document.documentElement.scrollWidth")
    phone.close()
    return width == 390


def colours(page, scheme: str) -> list[str]:
    """Background and text of the page for a reader who prefers light or dark."""
    page.emulate_media(color_scheme=scheme)
    return page.evaluate("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")


def test_run_page(page, splits: Splits, tmp_path: Path) -> None:
    rows = [{"epoch": e, "recall": {"1": 0.2 * e, "2": 0.3 * e}, "train_loss": 9 - e} for e in range(3)]
    result = RESULT | {"untrained": rows[0], "history": rows} | dict.fromkeys(("selected", "best", "last"), rows[2])
    config = OmegaConf.to_container(compose_train("run=first"), resolve=True)
    write_run_page(tmp_path, config, result, "data: <made up>", splits, [on_circle(*ANGLES)], range(4))
    page.goto((tmp_path / "index.html").as_uri())
    assert page.title() == "first: made up, test_resnet, 128-d"
    playwright.expect(page.locator("h1")).to_have_text(page.title())
    playwright.expect(page.locator("tr", has_text="selected")).to_contain_text("40.0")
    assert page.locator("svg").count() == 2
    assert page.locator("svg").first.bounding_box()["width"] > 300
    classes = page.locator("details", has_text="2 classes searched (test)")
    classes.locator("summary").click()
    assert classes.inner_text().splitlines()[-1] == "a, b"
    # Two images of each class: a query and the three others, each with the class that was found.
    assert pictures_load(page) == [True] * 16
    captions = page.locator("section", has=page.locator(".query", has_text="b1.png")).locator(".hit, .miss")
    assert [each.split("\n")[:2] for each in captions.all_inner_texts()] == [
        ["hit 0.259", "b"], ["miss 0.000", "a"], ["miss -0.174", "a"]
    ]  # fmt: skip
    page.locator("details", has_text="every setting").locator("summary").click()
    assert "batch_size: 120" in page.locator("pre").inner_text()
    assert fits(page)
    assert colours(page, "light") == ["rgb(255, 255, 255)", "rgb(34, 34, 34)"]
    assert colours(page, "dark") == ["rgb(25, 25, 25)", "rgb(221, 221, 221)"]


def test_page_of_a_sweep(page, tmp_path: Path) -> None:
    keys = ["loss.a_setting_with_a_long_name", "optimizer.another_setting_with_a_long_name", "a.third_one"]
    rows = [{"job": str(n)} | dict.fromkeys(keys, str(n)) | {"best R@1": 50.0 + n} for n in range(3)]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "index.html").write_text("<title>run 1</title>")
    write_table(tmp_path, "sweep", rows, {"recall_by_settings": recall_by_settings(rows, keys, "best R@1")})
    page.goto((tmp_path / "index.html").as_uri())
    assert page.title() == f"sweep {tmp_path.name}"
    assert fits(page)
    playwright.expect(page.locator("a")).to_have_text(["1"])  # the others have no page, and no list repeats the row
    page.locator("a").click()
    assert page.title() == "run 1"


def test_retrieval_page_filters(page, splits: Splits, tmp_path: Path) -> None:
    models = {"first": [on_circle(*ANGLES)], "second": [on_circle(0, 10, 100, 110)]}
    write_retrieval_page(tmp_path / "page.html", splits, models, [0, 1, 2, 3], k=2)
    page.goto((tmp_path / "page.html").as_uri())
    visible = page.locator("section:visible")
    assert visible.count() == 4
    assert pictures_load(page) == [True] * 20
    for show, count in {"miss": 1, "hit": 3, "differ": 1, "all": 4}.items():
        page.select_option("select", show)
        assert visible.count() == count
    page.fill("input", "B ")
    playwright.expect(page.locator("output")).to_have_text("2 of 4 queries")
    assert fits(page)
