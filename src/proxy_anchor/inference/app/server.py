"""A local page that searches by picture.

The browser fetches nothing from elsewhere, and pictures are requested by number, never by path.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any

import numpy as np

from proxy_anchor.data.images import open_input
from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.inference.hits import Hit, vote
from proxy_anchor.inference.retriever import Retriever
from proxy_anchor.retrieval.embedding_map import embedding_map

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as missing:
    raise UsageError(f"the page needs {missing.name}: pip install -e '.[app]'.") from missing

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")  # Pillow's names
LOCAL = ("127.0.0.1", "localhost")
MAX_NEIGHBOURS = 50
MAP_IMAGES = 2000  # more points hide each other: of larger galleries a random part is drawn
_STATIC = {
    "": ("page.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
_HEADERS = {
    # The page loads nothing from elsewhere; no other site may show it in a frame or guess types.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(
    retrievers: Mapping[str, Retriever],
    *,
    hosts: Sequence[str] = LOCAL,
    max_upload_mb: float = 10,
    max_pixels: int = 50_000_000,
) -> Starlette:
    """The application over one retriever, or two to compare.

    Args:
        retrievers: {model's name, to show: retriever with a gallery}.
        hosts: accepted host names; "*": any.
        max_upload_mb: size of an upload, checked while it arrives.
        max_pixels: width x height of an upload, checked on its header.
    """
    page = _Page(retrievers, int(max_upload_mb * 2**20), max_pixels)
    routes = [
        Route("/api/about", page.about),
        Route("/api/search", page.search_upload, methods=["POST"]),
        Route("/api/search/{model:int}/{id:int}", page.search_item),
        Route("/api/map/{model:int}", page.map),
        Route("/thumbnail/{model:int}/{id:int}", page.thumbnail),
        Route("/{name}", _static),
        Route("/", _static),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))])


def run(app: Starlette, host: str, port: int) -> None:
    """Serve until interrupted; UsageError when the address cannot be opened."""
    config = uvicorn.Config(app, host=host, port=port, log_level="error", limit_concurrency=64)
    try:
        socket = config.bind_socket()
    except SystemExit as error:  # what uvicorn raises for a port in use
        raise UsageError(
            f"{host}:{port} cannot be opened: it is in use or not this machine's; choose another port."
        ) from error
    socket.listen()  # a browser that connects before the server is ready waits
    print(f"open http://{host}:{socket.getsockname()[1]}  (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run([socket])


async def _static(request: Request) -> Response:
    name = request.path_params.get("name", "")
    if name not in _STATIC:
        return Response("not found", 404, _HEADERS)
    file, kind = _STATIC[name]
    content = files("proxy_anchor.inference.app").joinpath(file).read_bytes()
    return Response(content, headers=_HEADERS, media_type=kind)


def _json(content: Any, status: int = 200) -> Response:
    # Escaped, unlike JSONResponse: a file's name need not be UTF-8.
    return Response(json.dumps(content, allow_nan=False), status, _HEADERS, "application/json")


class _Page:
    """The routes' functions."""

    def __init__(self, retrievers: Mapping[str, Retriever], max_bytes: int, max_pixels: int) -> None:
        self.names, self.retrievers = list(retrievers), list(retrievers.values())
        self.max_bytes, self.max_pixels = max_bytes, max_pixels
        self._lock = threading.Lock()  # one network pass or search at a time
        self._map_lock = threading.Lock()  # separate: a map takes seconds, and searches continue meanwhile
        self._maps: dict[int, list[dict[str, Any]]] = {}

    def about(self, request: Request) -> Response:
        """Models and limits, which the page shows and checks before it sends."""
        models = [{"name": name, "images": len(each)} for name, each in zip(self.names, self.retrievers, strict=True)]
        return _json({"models": models, "max_bytes": self.max_bytes, "max_k": MAX_NEIGHBOURS})

    async def search_upload(self, request: Request) -> Response:
        """Neighbours of the image file in the request's body.

        An unreadable picture is status 200 with "error", for the page to show. Only image types are accepted: a browser
        does not let a page of another site post those here.
        """
        if not request.headers.get("content-type", "").startswith("image/"):
            return _json({"error": "expected an image file."}, 415)
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > self.max_bytes:
                    return _json({"error": f"the file is larger than {self.max_bytes / 2**20:.3g} MB."}, 413)
        except ClientDisconnect:
            return Response(status_code=400)
        try:
            return _json(await run_in_threadpool(self._search_bytes, bytes(body), _count(request)))
        except UsageError as error:
            return _json({"error": str(error)})

    def _search_bytes(self, content: bytes, k: int) -> dict[str, Any]:
        image = open_input(content, max_pixels=self.max_pixels, formats=FORMATS)
        with self._lock:
            results = [_describe(each.search(image, min(k, len(each)))[0]) for each in self.retrievers]
        return {"results": results}

    def search_item(self, request: Request) -> Response:
        """Neighbours of a gallery image, by every model whose gallery has an image of that name."""
        try:
            retriever, id_ = self._item(request)
            name, k = retriever.items[id_].name, _count(request)
            with self._lock:
                results = [_search_name(each, name, k) for each in self.retrievers]
            return _json({"name": name, "results": results})
        except UsageError as error:
            return _json({"error": str(error)}, 404)

    def map(self, request: Request) -> Response:
        """Places in [0, 1] x [0, 1] of at most MAP_IMAGES images, computed once."""
        model = request.path_params["model"]
        if model >= len(self.retrievers):
            return _json({"error": f"there is no model {model}."}, 404)
        with self._map_lock:
            if model not in self._maps:
                self._maps[model] = _map(self.retrievers[model])
            return _json({"points": self._maps[model]})

    def thumbnail(self, request: Request) -> Response:
        """A small JPEG of a gallery image."""
        try:
            retriever, id_ = self._item(request)
        except UsageError:
            return Response(status_code=404, headers=_HEADERS)
        return Response(retriever.thumbnail(id_), headers=_HEADERS, media_type="image/jpeg")

    def _item(self, request: Request) -> tuple[Retriever, int]:
        model, id_ = request.path_params["model"], request.path_params["id"]
        if model >= len(self.retrievers) or id_ not in self.retrievers[model].items:
            raise UsageError(f"model {model} has no image {id_}.")
        return self.retrievers[model], id_


def _count(request: Request) -> int:
    text = request.query_params.get("k", "10")
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise UsageError(f"k={text[:20]}: expected a whole number.")
    check_int("k", int(text), 1)
    return min(int(text), MAX_NEIGHBOURS)


def _search_name(retriever: Retriever, name: str, k: int) -> dict[str, Any]:
    try:
        id_ = retriever.id_of(name)
    except UsageError as error:
        return _describe([]) | {"error": str(error)}
    k = min(k, len(retriever) - 1)
    return _describe(retriever.search_item(id_, k) if k else [])


def _describe(hits: Sequence[Hit]) -> dict[str, Any]:
    label, share = vote(hits)
    return {"class": label, "share": share, "hits": [vars(hit) for hit in hits]}


def _map(retriever: Retriever) -> list[dict[str, Any]]:
    ids, vectors = retriever.embeddings
    if len(ids) > MAP_IMAGES:
        chosen = np.sort(np.random.default_rng(0).choice(len(ids), MAP_IMAGES, replace=False))
        ids, vectors = ids[chosen], vectors[chosen]
    try:
        places = embedding_map(vectors, method="tsne")
    except UsageError:  # without scikit-learn
        places = embedding_map(vectors)
    items = retriever.items
    return [
        {"id": id_, "x": x, "y": y, "label": items[id_].label, "name": items[id_].name}
        for id_, (x, y) in zip(ids.tolist(), places.tolist(), strict=True)
    ]
