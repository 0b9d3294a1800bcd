"""The page in a browser, with a clean console and no request to elsewhere.

The file is long because each part of the page is tested with the others around it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from proxy_anchor import Retriever
from proxy_anchor.inference.app import server

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (a test extra)")
expect = playwright.expect


@pytest.fixture
def page(open_page: Callable, retrievers: dict[str, Retriever], serving: Callable, monkeypatch) -> Iterator:
    """The page over two models."""
    monkeypatch.setattr(server, "PART_IMAGES", 4)
    for each in retrievers.values():
        each.calibrate(0.3)
    with (
        serving(server.make_app(retrievers, max_upload_mb=0.05)) as address,
        open_page(address, viewport={"width": 1440, "height": 900}) as page,
    ):
        page.goto(f"{address}/?seed=1")
        expect(page.locator("#gallery-title")).to_have_text("Gallery: 15 images of 3 classes")
        expect(page.locator("#gallery .card")).to_have_count(15)
        yield page


def hits(page, model: int):
    return page.locator("#results > section").nth(model).locator(".card:visible")


def upload(page, *files: Path) -> None:
    page.locator("#file").set_input_files(files)
    expect(page.locator("#heading")).to_have_text(files[0].name)


def ids(cards) -> list[int]:
    return cards.evaluate_all("cards => cards.map(card => card.image.id)")


def labels(cards) -> list[str]:
    return cards.evaluate_all("cards => cards.map(card => card.image.label)")


def focused(page) -> str:
    return page.evaluate("document.activeElement.id || document.activeElement.ariaLabel")


def similarities(page, model: int) -> list[float]:
    return [float(text) for text in hits(page, model).locator("b").all_inner_texts()]


def test_upload_then_search_with_a_hit(page, tmp_path: Path) -> None:
    upload(page, tmp_path / "images" / "dog" / "2.png")
    page.locator("#k").fill("4")
    for model, name in enumerate(("first (15 images)", "second (14 images)")):
        expect(page.locator("#results h2").nth(model)).to_contain_text(name)
        expect(hits(page, model)).to_have_count(4)
        for text in ("1.000", "match", "dog", "2.png"):
            expect(hits(page, model).first).to_contain_text(text)
    # decode() waits until a picture is there, and fails for one that is none.
    page.locator("#results img").evaluate_all("images => Promise.all(images.map(image => image.decode()))")
    expect(page.locator("#message")).to_have_text("")

    chosen = hits(page, 1).nth(1)
    path = chosen.evaluate("card => card.image.path")
    chosen.hover()
    chosen.locator(".second").click()
    expect(page.locator("#facts")).to_contain_text(path)
    assert focused(page) == "heading"
    for model in (0, 1):
        expect(hits(page, model)).to_have_count(4)
        assert path not in hits(page, model).evaluate_all("cards => cards.map(card => card.image.path)")


def test_a_model_without_the_image_says_so(page) -> None:
    page.locator("#gallery").get_by_role("button", name="Search with cat, 0.png").click()
    expect(page.locator(".vote").nth(1)).to_have_text("0.png is not in the gallery.")
    expect(hits(page, 0)).to_have_count(14)
    expect(hits(page, 1)).to_have_count(0)


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_several_files_are_dropped_or_pasted(page, tmp_path: Path, way: str) -> None:
    contents = [list((tmp_path / "images" / name / "1.png").read_bytes()) for name in ("eel", "dog")]
    transfer = page.evaluate_handle(
        """([first, second]) => { const all = new DataTransfer();
        const file = (bytes, name, type) => all.items.add(new File([new Uint8Array(bytes)], name, { type }));
        file(first, "eel.png", "image/png"); file(second, "dog.png", "image/png"); file([], "a.txt", "text/plain");
        return all; }""",
        contents,
    )
    if way == "drop":
        page.dispatch_event("body", "dragover", {"dataTransfer": transfer})
        expect(page.locator("body")).to_have_class("start over")
        page.dispatch_event("body", "drop", {"dataTransfer": transfer})
    else:
        page.evaluate("all => document.dispatchEvent(new ClipboardEvent('paste', { clipboardData: all }))", transfer)
    expect(hits(page, 0).first).to_contain_text("eel")
    expect(page.locator("#heading")).to_have_text("eel.png")
    expect(page.locator("#message")).to_have_text("a.txt is not an image.")
    page.get_by_role("button", name="Results of dog.png").click()
    expect(page.locator("#heading")).to_have_text("dog.png")
    expect(hits(page, 0).first).to_contain_text("dog")
    page.go_back()
    expect(page.locator("#heading")).to_have_text("eel.png")
    expect(hits(page, 0).first).to_contain_text("eel")


def test_an_error_clears_what_it_contradicts(page, tmp_path: Path) -> None:
    files = {
        "broken.png": (b"no image", "the image cannot be read (no image of a known format)."),
        "notes.txt": (b"text", "notes.txt is not an image."),
        "large.png": (bytes(60_000), "large.png is larger than 0.05 MB."),
    }
    for name, (content, message) in files.items():
        upload(page, tmp_path / "images" / "cat" / "0.png")
        expect(hits(page, 0)).to_have_count(15)
        expect(page.locator("#message")).to_have_text("")
        (tmp_path / name).write_bytes(content)
        page.locator("#file").set_input_files(tmp_path / name)
        expect(page.locator("#message")).to_have_text(message)
        expect(page.locator("#message")).to_have_class("error")
        expect(page.locator("#results .card")).to_have_count(0)
        expect(page.locator("#query")).to_be_hidden()
        expect(page.locator("#gallery")).to_be_visible()
        assert focused(page)
    page.locator("#shuffle").click()
    expect(page.locator("#message")).to_have_text("")
    page.goto(page.url.partition("?")[0] + "?query=u7")
    expect(page.locator("#message")).to_contain_text("choose it once more")
    expect(page.locator("#gallery .card")).to_have_count(15)


def test_large_view(page, tmp_path: Path) -> None:
    upload(page, tmp_path / "images" / "dog" / "2.png")
    hits(page, 0).nth(0).locator(".picture").click()
    view = page.get_by_role("dialog")
    for text in ("2.png", "1 of 15", "dog", "1.000 match", str(tmp_path / "images" / "dog" / "2.png")):
        expect(view).to_contain_text(text)
    assert view.locator("img").evaluate("image => image.decode().then(() => image.naturalWidth)") == 32
    page.keyboard.press("ArrowLeft")  # there is none before
    page.keyboard.press("ArrowRight")
    view.get_by_role("button", name="Next image").click()
    expect(view).to_contain_text("3 of 15")
    for _ in range(12):
        view.get_by_role("button", name="Next image").click()
    expect(view).to_contain_text("15 of 15")
    for _ in range(12):
        page.keyboard.press("ArrowLeft")
    expect(view).to_contain_text("3 of 15")
    with page.expect_download() as saved:
        view.get_by_role("link", name="Download").click()
    third = hits(page, 0).nth(2)
    assert saved.value.path().read_bytes() == Path(third.evaluate("card => card.image.path")).read_bytes()
    page.keyboard.press("Escape")
    expect(view).to_be_hidden()
    assert third.locator(".picture").evaluate("button => button === document.activeElement")


def test_filters_act_at_once_and_results_are_exported(page, tmp_path: Path) -> None:
    upload(page, tmp_path / "images" / "dog" / "2.png")
    expect(page.locator("#count")).to_have_text("29 shown")
    found = similarities(page, 0)
    limit = next(value / 100 for value in range(1, 100) if 0 < sum(each >= value / 100 for each in found) < 15)
    page.locator("#min").fill(str(limit))
    expect(hits(page, 0)).to_have_count(sum(each >= limit for each in found))
    page.locator("#min").fill("0")
    page.locator("#class").fill("DO")
    expect(hits(page, 0)).to_have_count(5)
    expect(page.locator("#count")).to_have_text("10 of 29 shown")
    page.locator("#k").fill("3")
    expect(page.locator("#results .card")).to_have_count(6)
    page.locator("#class").fill("")
    expect(page.locator("#count")).to_have_text("6 shown")
    assert focused(page) == "class"

    rows = exported(page, "#export")
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 2
    assert [row["model"] for row in rows] == ["first"] * 3 + ["second"] * 3
    expected = {"query": "2.png", "name": "2.png", "class": "dog", "match": "match"}
    assert rows[0] == rows[0] | expected | {"path": str(tmp_path / "images" / "dog" / "2.png")}
    assert float(rows[0]["similarity"]) == pytest.approx(1)

    hits(page, 1).nth(2).hover()
    hits(page, 1).nth(2).locator(".pick input").check()
    hits(page, 0).nth(1).hover()
    hits(page, 0).nth(1).locator(".pick input").check()
    expect(page.locator("#selected")).to_have_text("2 selected")
    assert exported(page, "#export-selection") == [rows[5], rows[1]]
    page.locator("#show-selection").click()
    expect(page.locator("#heading")).to_have_text("Selected images")
    expect(page.locator("#results .card")).to_have_count(2)
    page.locator("#clear-selection").click()
    expect(page.locator("#selection")).to_be_hidden()
    assert focused(page) == "heading"


def exported(page, button: str) -> list[dict[str, str]]:
    with page.expect_download() as saved:
        page.locator(button).click()
    return list(csv.DictReader(io.StringIO(saved.value.path().read_text(encoding="utf-8"))))


def test_the_address_holds_the_state(page) -> None:
    page.locator("#class").fill("eel")
    expect(page.locator("#gallery .card")).to_have_count(5)
    card = page.locator("#gallery .card").nth(2)
    name = card.locator(".picture").get_attribute("aria-label")
    card.locator(".picture").click()
    expect(hits(page, 0)).to_have_count(14)
    page.locator("#k").fill("12")
    expect(page.locator("#results .card")).to_have_count(24)
    page.locator("#class").fill("dog")
    page.locator("#min").fill("0.1")
    expect(page).to_have_url(re.compile(r"\?query=0%2F\d+&k=12&class=dog&min=0.1&seed=1$"))
    left = ids(hits(page, 0))
    assert 3 <= len(left) <= 5  # two of the 14 others are not asked for, and 5 are dogs
    page.reload()
    expect(page.locator("#results .card")).to_have_count(24)
    assert ids(hits(page, 0)) == left
    values = {each: page.locator(each).input_value() for each in ("#k", "#class", "#min")}
    assert values == {"#k": "12", "#class": "dog", "#min": "0.1"}
    page.locator("#home").click()
    expect(page.locator("#gallery .card")).to_have_count(15)
    page.go_back()
    expect(page.locator("#results .card")).to_have_count(24)
    page.go_back()
    expect(page.locator("#class")).to_have_value("eel")
    expect(page.locator("#gallery .card")).to_have_count(5)
    page.locator("#gallery").get_by_role("button", name=name).click()
    expect(page.locator("#results .card")).to_have_count(27)
    page.go_back()
    expect(page.locator("#gallery")).to_be_visible()
    assert focused(page) == name


def test_gallery_is_loaded_in_parts_and_ordered(page) -> None:
    cards = page.locator("#gallery .card")
    assert sorted(ids(cards)) == list(range(15))
    assert page.locator("#examples .card").count() == 3
    before = ids(cards)
    first = cards.first.text_content()
    page.locator("#shuffle").click()
    expect(cards.first).not_to_have_text(first)
    expect(cards).to_have_count(15)
    assert sorted(ids(cards)) == list(range(15))
    assert ids(cards) != before
    page.locator("#order").select_option("example")
    expect(cards).to_have_count(3)
    expect(page.locator("#count")).to_have_text("3 shown")


def test_cards_far_from_the_window_are_removed(page) -> None:
    parts = page.locator("#gallery ul")
    page.evaluate("document.documentElement.style.setProperty('--row', '5000px')")
    page.locator("#shuffle").click()
    for count in (1, 2, 3):
        expect(parts).to_have_count(count)
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
    expect(parts.nth(3).locator(".card")).to_have_count(3)
    expect(parts.first.locator(".card")).to_have_count(0)
    assert parts.first.bounding_box()["height"] > 3000
    page.evaluate("scrollTo(0, 0)")
    expect(parts.first.locator(".card")).to_have_count(4)
    expect(parts.nth(3).locator(".card")).to_have_count(0)


def test_map(page) -> None:
    page.locator("#show-map").click()
    expect(page.locator("#map-title")).to_have_text("Map: 15 images")
    canvas = page.locator("#plot canvas")
    colours = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
    assert canvas.evaluate(colours) > 3
    main, beside = page.locator("main").bounding_box(), page.locator("#map").bounding_box()
    assert beside["x"] >= main["x"] + main["width"]

    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_be_visible()
    first = page.locator("#map-point").text_content()
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#tip")).to_be_visible()
    chosen = page.locator("#map-point").text_content()
    assert first.endswith(".png")
    page.keyboard.press(" ")
    expect(page.locator("#selected")).to_have_text("1 selected")
    page.keyboard.press("Enter")
    expect(page.locator("#heading")).to_have_text(chosen.partition(", ")[2])
    expect(hits(page, 0)).to_have_count(14)

    page.locator("#legend").get_by_role("button", name="dog").click()
    expect(page.locator("#class")).to_have_value("dog")
    expect(page.locator("#legend").get_by_role("button", name="dog")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="Reset").click()
    page.locator("#lasso").click()
    box = canvas.bounding_box()
    corners = [(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)]
    for place, (across, down) in enumerate(corners):
        page.mouse.move(box["x"] + 2 + across * (box["width"] - 4), box["y"] + 2 + down * (box["height"] - 4))
        if place == 0:
            page.mouse.down()
    page.mouse.up()
    expect(page.locator("#heading")).to_have_text("Selected images")
    expect(page.locator("#selected")).to_have_text("5 selected")  # of the class that is lit
    page.locator("#map-model").select_option("second")
    expect(page.locator("#map-title")).to_have_text("Map: 14 images")
    page.locator("#show-map").click()
    expect(page.locator("#map")).to_be_hidden()


def place_of_query(page) -> tuple[float, float]:
    """Where the map's mark of an uploaded query is, in pixels of the canvas."""
    expect(page.locator("#map-query")).to_be_visible()
    return page.locator("#map-query").evaluate("mark => [parseFloat(mark.style.left), parseFloat(mark.style.top)]")


def test_an_uploaded_query_is_on_the_map_and_two_fingers_zoom(page, tmp_path: Path) -> None:
    page.locator("#show-map").click()
    expect(page.locator("#map-title")).to_have_text("Map: 15 images")
    expect(page.locator("#map-note")).to_be_hidden()
    upload(page, tmp_path / "images" / "dog" / "2.png")
    expect(hits(page, 0)).to_have_count(15)
    expect(page.locator("#map-note")).to_contain_text("the query, at an approximate place")
    # The mean of the five nearest images' places, weighted by similarity; a margin of 0.04 is around the map.
    places = {each["id"]: each for each in page.request.get(page.url.partition("?")[0] + "api/map/0").json()["points"]}
    weights = dict(
        zip(ids(hits(page, 0))[:5], hits(page, 0).evaluate_all("all => all.map(c => c.image.similarity)"), strict=False)
    )
    x, y = (sum(w * places[id_][axis] for id_, w in weights.items()) / sum(weights.values()) for axis in "xy")
    box = page.locator("#plot canvas").bounding_box()
    side = min(box["width"], box["height"]) - 2  # without the border
    place = place_of_query(page)
    indent = (box["width"] - 2 - side) / 2, (box["height"] - 2 - side) / 2
    assert place == pytest.approx([indent[0] + side * (x + 0.04) / 1.08, indent[1] + side * (1.04 - y) / 1.08], abs=1)

    page.locator("#map-title").hover()  # what was pressed elsewhere is no click on the image where it is released
    page.mouse.down()
    x, y = places[0]["x"], places[0]["y"]
    page.mouse.move(
        box["x"] + 1 + indent[0] + side * (x + 0.04) / 1.08, box["y"] + 1 + indent[1] + side * (1.04 - y) / 1.08
    )
    expect(page.locator("#tip")).to_be_visible()
    page.mouse.up()
    assert "query=u" in page.url

    # Two fingers go from 40 to 80 pixels apart, and their middle 30 pixels to the right and 10 down.
    middle = [place[0] - 20, place[1] - 10]
    touch = page.context.new_cdp_session(page)
    for kind, across, down, apart in (("Start", 0, 0, 20), ("Move", 30, 10, 40), ("End", 0, 0, 0)):
        at = [box["x"] + 1 + middle[0] + across, box["y"] + 1 + middle[1] + down]
        points = [{"x": at[0] + sign * apart, "y": at[1], "id": sign + 1} for sign in (-1, 1)] if apart else []
        touch.send("Input.dispatchTouchEvent", {"type": f"touch{kind}", "touchPoints": points})
    expect(page.locator("#heading")).to_have_text("2.png")  # and nothing was searched
    expected = [middle[0] + 30 + 2 * 20, middle[1] + 10 + 2 * 10]
    page.wait_for_function(f"Math.abs(parseFloat(document.getElementById('map-query').style.left) - {expected[0]}) < 1")
    assert place_of_query(page) == pytest.approx(expected, abs=1)

    page.locator("#home").click()
    expect(page.locator("#map-note")).to_be_hidden()


def test_a_gallery_image_that_the_map_lacks_has_an_approximate_place(page, monkeypatch) -> None:
    monkeypatch.setattr(server, "MAP_IMAGES", 14)
    address = page.url.partition("?")[0]
    shown = {each["id"] for each in page.request.get(f"{address}api/map/0").json()["points"]}
    for id_ in (0, *({*range(15)} - shown)):
        page.goto(f"{address}?query=0/{id_}&map=1")
        expect(page.locator("#map-title")).to_contain_text("14")
        expect(hits(page, 0)).to_have_count(14)
        expect(page.locator("#map-query")).to_be_visible(visible=id_ not in shown)


def test_a_box_searches_for_a_part(page, tmp_path: Path) -> None:
    both = Image.new("RGB", (64, 32))
    for left, name in ((0, "eel"), (32, "dog")):
        both.paste(Image.open(tmp_path / "images" / name / "3.png"), (left, 0))
    both.save(tmp_path / "both.png")
    upload(page, tmp_path / "both.png")
    expect(hits(page, 0)).to_have_count(15)
    whole = similarities(page, 0)
    box = page.locator("#stage").bounding_box()
    for name, share, address in (("eel", 0, "box=0.000%2C0.000%2C0.500"), ("dog", 1, "box=0.500%2C0.000%2C0.500")):
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] - 1)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * (2 * share - 0.5), box["y"] - 20)  # cut to the picture
        page.mouse.up()
        expect(page).to_have_url(re.compile(address))
        expect(page.locator("#heading")).to_be_focused()
        expect(page.locator("#results")).to_have_attribute("aria-busy", "false")
        assert labels(hits(page, 0))[0] == name
    page.locator("#whole").click()
    expect(page.locator("#whole")).to_be_hidden()
    expect(page.locator("#results")).to_have_attribute("aria-busy", "false")
    assert similarities(page, 0) == whole


def test_phone_dark_and_names_for_screen_readers(page) -> None:
    page.locator("#gallery .picture").first.click()
    expect(hits(page, 0)).to_have_count(14)
    page.locator("#show-map").click()
    expect(page.locator("#map-title")).to_contain_text("images")
    unnamed = """() => [...document.querySelectorAll("button, a, input, select, canvas, dialog, aside, img")].filter(
        (each) => !(each.ariaLabel || each.textContent.trim() || each.labels?.[0]?.textContent.trim()
          || each.hasAttribute("alt") || each.getAttribute("aria-labelledby"))).map((each) => each.outerHTML)"""
    assert page.evaluate(unnamed) == []
    assert background(page) == (251, 251, 250)
    page.emulate_media(color_scheme="dark")
    assert background(page) == (23, 24, 26)
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.locator("header").bounding_box()["height"] < 70


def background(page) -> tuple[int, ...]:
    colour = page.locator("body").evaluate("body => getComputedStyle(body).backgroundColor")
    return tuple(map(int, re.findall(r"\d+", colour)))
