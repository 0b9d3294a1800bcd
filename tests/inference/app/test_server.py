"""The page's routes, asked as a browser would and as it would not."""

from __future__ import annotations

import http.client
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy_anchor import Retriever
from proxy_anchor.errors import UsageError
from proxy_anchor.inference.app import server as module
from proxy_anchor.inference.app.server import make_app


@pytest.fixture
def address(retrievers: dict[str, Retriever], serving: Callable) -> Iterator[str]:
    with serving(make_app(retrievers, max_upload_mb=0.05, max_pixels=5000)) as found:
        yield found


@contextmanager
def connection(address: str) -> Iterator[http.client.HTTPConnection]:
    made = http.client.HTTPConnection(urlsplit(address).netloc, timeout=30)
    yield made
    made.close()


def ask(
    address: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """(status, headers, content); the path goes out as it is, without the clean-up that a browser does."""
    with connection(address) as made:
        made.request(
            "GET" if body is None else "POST", path, body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        answer = made.getresponse()
        return answer.status, answer.headers, answer.read()


def test_upload_is_searched_with_every_model(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    status, headers, body = ask(address, "/api/search?k=4", content, Content_Type="image/png")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    first, second = [result["hits"] for result in json.loads(body)["results"]]
    for hits in (first, second):
        assert len(hits) == 4
        assert hits[0]["name"].endswith("dog/2.png")
        assert hits[0]["label"] == "dog"
    assert [hit["similarity"] for hit in first] != [hit["similarity"] for hit in second]


def test_search_from_a_gallery_image_asks_every_model_that_has_it(address: str, retrievers) -> None:
    name = retrievers["first"].items[7].name
    assert retrievers["second"].id_of(name) == 15
    for path in ("/api/search/0/7?k=5", "/api/search/1/15?k=5"):
        answer = json.loads(ask(address, path)[2])
        assert answer["name"] == name
        for result, retriever in zip(answer["results"], retrievers.values(), strict=True):
            expected = retriever.search_item(retriever.id_of(name), 5)
            assert [hit["name"] for hit in result["hits"]] == [hit.name for hit in expected]
    first, second = json.loads(ask(address, "/api/search/0/0")[2])["results"]  # which the second model lacks
    assert len(first["hits"]) == 10
    assert second["hits"] == []
    assert "is not in the gallery" in second["error"]


def test_map_and_thumbnails(address: str) -> None:
    _, _, body = ask(address, "/api/map/1")
    points = json.loads(body)["points"]
    assert len(points) == 14
    assert all(0 <= point["x"] <= 1 and 0 <= point["y"] <= 1 for point in points)
    status, headers, body = ask(address, f"/thumbnail/1/{points[0]['id']}")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    assert body.startswith(b"\xff\xd8")


def test_k_is_cut_to_the_gallery_and_checked(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    _, _, body = ask(address, "/api/search?k=50", content, Content_Type="image/png")
    assert [len(result["hits"]) for result in json.loads(body)["results"]] == [15, 14]
    for k in ("0", "-1", "x", "%C2%B2", "9" * 30):
        _, _, body = ask(address, f"/api/search?k={k}", content, Content_Type="image/png")
        assert "k" in json.loads(body)["error"]


def bomb(width: int, height: int) -> bytes:
    """A small PNG file of many pixels."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))]
    chunks += [(b"IDAT", zlib.compress(bytes((width // 8 + 2) * height))), (b"IEND", b"")]
    packed = [struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    ("content", "kind", "status", "reason"),
    [
        (b"no image", "image/png", 200, "no image of a known format"),
        (b"", "image/png", 200, "empty"),
        (bomb(100, 100), "image/png", 200, "100 x 100 pixels; at most 5,000"),
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
        "/page.html",
        "/thumbnail/0/99",
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
    with pytest.raises(UsageError, match="cannot be opened"):
        module.run(make_app(retrievers), "127.0.0.1", urlsplit(address).port)
