"""The page's routes, asked as a browser would and as it would not."""

from __future__ import annotations

import http.client
import io
import json
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from commands import one_line
from pictures import encoded
from PIL import Image

from proxy_anchor import Retriever
from proxy_anchor.inference.app import pictures
from proxy_anchor.inference.app import server as module
from proxy_anchor.inference.app.server import make_app


@pytest.fixture
def address(retrievers: dict[str, Retriever], serving: Callable) -> Iterator[str]:
    with serving(make_app(retrievers, max_upload_mb=0.05, max_pixels=5000)) as found:
        yield found


def ask(address: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Message, bytes]:
    """(status, headers, content); the path goes out as it is, without the clean-up that a browser does."""
    made = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    made.request("GET" if body is None else "POST", path, body, sent)
    answer = made.getresponse()
    found = answer.status, answer.headers, answer.read()
    made.close()
    return found


def test_upload_is_searched_with_every_model(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    status, headers, body = ask(address, "/api/search?k=4", content, Content_Type="image/png")
    assert (status, headers["content-security-policy"][:18]) == (200, "default-src 'self'")
    for result in json.loads(body)["results"]:
        first, *others = result["hits"]
        assert (first["name"], first["label"], first["ratio"], len(others)) == ("2.png", "dog", 1.0, 3)
        assert first["path"].endswith("dog/2.png")


def test_search_from_a_gallery_image_asks_every_model_that_has_it(address: str, retrievers) -> None:
    name = retrievers["first"].items[7].name
    assert retrievers["second"].id_of(name) == 15
    for path in ("/api/search/0/7?k=5", "/api/search/1/15?k=5"):
        answer = json.loads(ask(address, path)[2])
        assert answer["query"]["path"] == name
        for result, retriever in zip(answer["results"], retrievers.values(), strict=True):
            expected = retriever.search_item(retriever.id_of(name), 5)
            assert [hit["path"] for hit in result["hits"]] == [hit.name for hit in expected]
    first, second = json.loads(ask(address, "/api/search/0/0?k=10")[2])["results"]  # which the second model lacks
    assert len(first["hits"]) == 10
    assert second["hits"] == []
    assert second["error"] == "0.png is not in the gallery."


def test_map_and_pictures(address: str, tmp_path: Path) -> None:
    _, _, body = ask(address, "/api/map/1")
    points = json.loads(body)["points"]
    assert len(points) == 14
    assert all(0 <= point["x"] <= 1 and 0 <= point["y"] <= 1 for point in points)
    status, headers, body = ask(address, f"/thumbnail/1/{points[0]['id']}")
    assert (status, headers["content-type"], body[8:12]) == (200, "image/webp", b"WEBP")
    assert headers["cache-control"] == "private, max-age=86400"
    status, headers, body = ask(address, f"/image/1/{points[0]['id']}")
    assert (status, headers["content-type"], body) == (200, "image/png", Path(points[0]["path"]).read_bytes())


def test_thumbnails_are_sharp_on_dense_screens(tmp_path: Path) -> None:
    for size, expected in {(1600, 1000): (640, 400), (3000, 300): (800, 80), (90, 60): (90, 60)}.items():
        file = tmp_path / f"{size[0]}.png"
        Image.new("RGB", size, "orange").save(file)
        assert Image.open(io.BytesIO(pictures.thumbnail(str(file))[0])).size == expected
        assert pictures.ratio(str(file)) == size[0] / size[1]


def test_only_images_are_served_and_as_images(address: str, retrievers, tmp_path: Path) -> None:
    """The type is the content's, not the name's: what is no image (any more) is not served."""
    first = Path(retrievers["first"].items[0].name)
    first.write_bytes(b"<html><script>alert(1)</script>")
    for path in ("/image/0/0", "/thumbnail/0/0"):
        status, _, body = ask(address, path, X_Forwarded_For="203.0.113.9")
        assert (status, body) == (404, b"")  # no path of this machine
    Image.new("RGB", (20, 10), "orange").save(first, "TIFF")  # which browsers do not show
    status, headers, body = ask(address, "/image/0/0")
    assert (status, headers["content-type"], body[1:4]) == (200, "image/png", b"PNG")


def test_gallery_orders(address: str) -> None:
    def listed(options: str) -> tuple[int, list[dict]]:
        answer = json.loads(ask(address, f"/api/gallery/0?{options}")[2])
        return answer["total"], answer["images"]

    total, images = listed("seed=1")
    assert (total, sorted(each["id"] for each in images)) == (15, list(range(15)))
    assert images == listed("seed=1")[1] != listed("seed=2")[1]
    hits = module._listed.cache_info().hits
    assert listed("seed=1&offset=10")[1] == images[10:]
    assert module._listed.cache_info().hits == hits + 1  # a further part of a large gallery takes no time
    assert [each["label"] for each in listed("order=class")[1]] == ["cat"] * 5 + ["dog"] * 5 + ["eel"] * 5
    assert sorted(each["label"] for each in listed("order=example")[1]) == ["cat", "dog", "eel"]
    total, images = listed("class=E")  # any letters of a class's name
    assert (total, {each["label"] for each in images}) == (5, {"eel"})
    assert listed("class=none") == (0, [])
    for options in ("order=size", "offset=-1", "seed=x"):
        status, _, body = ask(address, f"/api/gallery/0?{options}")
        assert status == 404
        assert options.partition("=")[0] in json.loads(body)["error"]


def test_visitors_from_elsewhere_see_names_without_folders(address: str, tmp_path: Path) -> None:
    for path in ("/api/search/0/7", "/api/search/0/0", "/api/gallery/0", "/api/map/0"):
        assert str(tmp_path).encode() in ask(address, path)[2]
        # uvicorn takes this header from a proxy on this machine.
        body = ask(address, path, X_Forwarded_For="203.0.113.9")[2]
        assert b".png" in body
        assert str(tmp_path).encode() not in body


def test_k_is_cut_to_the_gallery_and_checked(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    _, _, body = ask(address, "/api/search?k=50", content, Content_Type="image/png")
    assert [len(result["hits"]) for result in json.loads(body)["results"]] == [15, 14]
    for k in ("0", "-1", "x", "%C2%B2", "9" * 30):
        _, _, body = ask(address, f"/api/search?k={k}", content, Content_Type="image/png")
        assert "k" in json.loads(body)["error"]


@pytest.mark.parametrize(
    ("content", "kind", "status", "reason"),
    [
        (b"no image", "image/png", 200, "no image of a known format"),
        (b"", "image/png", 200, "no image of a known format"),
        (encoded(Image.new("1", (100, 100)), "PNG"), "image/png", 200, "100 x 100 pixels; at most 5,000"),
        (bytes(60_000), "image/png", 413, "larger than 0.05 MB"),
        (b"x=1", "application/x-www-form-urlencoded", 415, "expected an image"),
    ],
)
def test_bad_uploads_get_a_message(address: str, content: bytes, kind: str, status: int, reason: str) -> None:
    found, _, body = ask(address, "/api/search", content, Content_Type=kind)
    assert found == status
    assert reason in json.loads(body)["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/server.py",
        "/thumbnail/0/99",
        "/image/0/99",
        "/image/9/0",
        "/image/0/../../page.html",
        "/api/gallery/7",
        "/thumbnail/9/0",
        "/api/search/0/99",
        "/api/search/7/0",
        "/api/map/7",
    ],
)
def test_nothing_else_is_served(address: str, path: str) -> None:
    status, _, body = ask(address, path)
    assert status == 404
    assert b"root:" not in body


def test_another_host_name_is_refused(address: str) -> None:
    """A page elsewhere whose name is made to lead to this machine (DNS rebinding) cannot read the gallery."""
    assert ask(address, "/api/about", Host="evil.example")[0] == 400
    assert ask(address, "/api/about", Host="localhost:1")[0] == 200


def test_a_port_in_use_is_one_line(address: str, retrievers) -> None:
    one_line(module.run, make_app(retrievers), "127.0.0.1", urlsplit(address).port, match="cannot be opened")
