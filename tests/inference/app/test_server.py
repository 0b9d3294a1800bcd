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
def address(retriever: Retriever, serving: Callable) -> Iterator[str]:
    with serving(make_app(retriever, "first", max_upload_mb=0.05, max_pixels=5000)) as found:
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


def test_upload_is_searched(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    status, headers, body = ask(address, "/api/search?k=4", content, Content_Type="image/png")
    assert status == 200
    assert headers["content-security-policy"].startswith("default-src 'self'")
    hits = json.loads(body)["hits"]
    assert len(hits) == 4
    assert hits[0]["name"].endswith("dog/2.png")
    assert hits[0]["label"] == "dog"


def test_search_from_a_gallery_image(address: str) -> None:
    answer = json.loads(ask(address, "/api/search/3?k=5")[2])
    assert len(answer["hits"]) == 5
    assert answer["name"] not in [hit["name"] for hit in answer["hits"]]


def test_map_and_thumbnails(address: str) -> None:
    _, _, body = ask(address, "/api/map")
    points = json.loads(body)["points"]
    assert len(points) == 15
    assert all(0 <= point["x"] <= 1 and 0 <= point["y"] <= 1 for point in points)
    status, headers, body = ask(address, f"/thumbnail/{points[0]['id']}")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    assert body.startswith(b"\xff\xd8")


def test_k_is_cut_to_the_gallery_and_checked(address: str, tmp_path: Path) -> None:
    content = (tmp_path / "images" / "dog" / "2.png").read_bytes()
    _, _, body = ask(address, "/api/search?k=50", content, Content_Type="image/png")
    assert len(json.loads(body)["hits"]) == 15
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
        "/thumbnail/99",
        "/api/search/99",
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


def test_a_port_in_use_is_one_line(address: str, retriever) -> None:
    with pytest.raises(UsageError, match="cannot be opened"):
        module.run(make_app(retriever, "first"), "127.0.0.1", urlsplit(address).port)
