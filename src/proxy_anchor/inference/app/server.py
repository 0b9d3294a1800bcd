"""A local page that searches by picture.

The browser fetches nothing from elsewhere, and pictures are requested by number, never by path. Visitors from other
machines see the names of files, without folders.
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from proxy_anchor.data.images import open_input
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.inference.app import pictures
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
MAX_NEIGHBOURS = 200
PART_IMAGES = 100  # of the gallery, in one answer
MAP_IMAGES = 2000  # more points hide each other: of larger galleries a random part is drawn
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_STATIC = {
    each.name: each for each in files("proxy_anchor.inference.app").iterdir() if each.name.endswith(tuple(_TYPES))
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
        Route("/api/gallery/{model:int}", page.gallery),
        Route("/api/map/{model:int}", page.map),
        Route("/thumbnail/{model:int}/{id:int}", partial(page.picture, pictures.thumbnail)),
        Route("/image/{model:int}/{id:int}", partial(page.picture, pictures.original)),
        Route("/{name}", _static),
        Route("/", _static),
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))],
        exception_handlers={UsageError: lambda _, error: _json({"error": str(error)}, 404)},
    )


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
    name = request.path_params.get("name", "page.html")
    if name not in _STATIC:
        return Response("not found", 404, _HEADERS)
    return Response(_STATIC[name].read_bytes(), headers=_HEADERS, media_type=_TYPES[Path(name).suffix])


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
        self._map = lru_cache(_map)
        # Of one start of the server: browsers keep pictures, and another start may have other images.
        self._version = secrets.token_hex(4)

    def about(self, request: Request) -> Response:
        """Models and limits, which the page shows and checks before it sends."""
        models = [
            {
                "name": name,
                "images": len(each),
                "classes": sorted({item.label for item in each.items.values() if item.label}),
                "threshold": None if each.threshold is None else each.threshold.similarity,
            }
            for name, each in zip(self.names, self.retrievers, strict=True)
        ]
        limits = {"max_bytes": self.max_bytes, "max_k": MAX_NEIGHBOURS, "version": self._version}
        return _json({"models": models, **limits})

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
            return _json(await run_in_threadpool(self._search_bytes, bytes(body), request))
        except UsageError as error:
            return _json({"error": str(error)})

    def _search_bytes(self, content: bytes, request: Request) -> dict[str, Any]:
        k = min(_whole(request, "k", 1), MAX_NEIGHBOURS)
        image = open_input(content, max_pixels=self.max_pixels, formats=FORMATS)
        with self._lock:
            found = [each.search(image, min(k, len(each)))[0] for each in self.retrievers]
        return {"results": [self._result(model, hits, request) for model, hits in enumerate(found)]}

    def search_item(self, request: Request) -> Response:
        """Neighbours of a gallery image, by every model whose gallery has an image of that name."""
        model, id_ = self._item(request)
        name, k = self.retrievers[model].items[id_].name, min(_whole(request, "k", 1), MAX_NEIGHBOURS)
        with self._lock:
            results = [self._near(place, name, k, request) for place in range(len(self.retrievers))]
        return _json({"query": self._image(model, id_, request), "results": results})

    def _near(self, model: int, name: str, k: int, request: Request) -> dict[str, Any]:
        """Neighbours of the image of that name in a model's gallery, or that it is missing there."""
        retriever = self.retrievers[model]
        try:
            id_ = retriever.id_of(name)
        except UsageError:
            return self._result(model, [], request) | {"error": f"{Path(name).name} is not in the gallery."}
        k = min(k, len(retriever) - 1)
        return self._result(model, retriever.search_item(id_, k) if k else [], request)

    def gallery(self, request: Request) -> Response:
        """A part of the gallery, see `_listed`; total: images of the whole."""
        model, params = self._model(request), request.query_params
        offset, seed = _whole(request, "offset", 0), _whole(request, "seed", 0)
        ids = _listed(self.retrievers[model], params.get("order", "random"), params.get("class", ""), seed)
        part = [self._image(model, id_, request) for id_ in ids[offset : offset + PART_IMAGES].tolist()]
        return _json({"total": len(ids), "images": part})

    def map(self, request: Request) -> Response:
        """Positions, classes and names of the gallery's images, or of a part of them."""
        model = self._model(request)
        with self._map_lock:
            places = self._map(self.retrievers[model])
        return _json({"points": [{**self._image(model, id_, request), "x": x, "y": y} for id_, x, y in places]})

    def picture(self, read: Callable[[str], tuple[bytes, str]], request: Request) -> Response:
        """A gallery image, small or as it is."""
        model, id_ = self._item(request)
        try:
            content, kind = read(self.retrievers[model].items[id_].name)
        except UsageError:  # which names the path
            return Response(status_code=404, headers=_HEADERS)
        return Response(content, headers=_HEADERS | {"Cache-Control": "private, max-age=86400"}, media_type=kind)

    def _model(self, request: Request) -> int:
        if (model := request.path_params["model"]) >= len(self.retrievers):
            raise UsageError(f"there is no model {model}.")
        return model

    def _item(self, request: Request) -> tuple[int, int]:
        model, id_ = self._model(request), request.path_params["id"]
        if id_ not in self.retrievers[model].items:
            raise UsageError(f"model {model} has no image {id_}.")
        return model, id_

    def _image(self, model: int, id_: int, request: Request) -> dict[str, Any]:
        item = self.retrievers[model].items[id_]
        # uvicorn replaces the address of a proxy on this machine by its visitor's.
        is_local = request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
        path, ratio = item.name if is_local else None, pictures.ratio(item.name)
        return {"id": id_, "name": Path(item.name).name, "path": path, "label": item.label, "ratio": ratio}

    def _result(self, model: int, hits: Sequence[Hit], request: Request) -> dict[str, Any]:
        label, share = vote(hits)
        listed = [{**vars(hit), **self._image(model, hit.id, request)} for hit in hits]
        return {"class": label, "share": share, "hits": listed}


@lru_cache(8)  # sorting 100,000 images takes 0.2 s, and a page asks for one part after another
def _listed(retriever: Retriever, order: str, text: str, seed: int) -> np.ndarray:
    """Ids of the images whose class contains the text.

    order: "random", "class" (alphabetical, images at random), or "example" (one image of each class, at random).
    """
    check_choice("order", order, ("random", "class", "example"))
    ids = np.random.default_rng(seed).permutation(retriever.embeddings[0])
    labels = [retriever.items[id_].label or "" for id_ in ids.tolist()]
    kept = [row for row, label in enumerate(labels) if text.lower() in label.lower()]
    if order != "random":
        kept.sort(key=labels.__getitem__)  # stable
    if order == "example":
        kept = sorted({labels[row]: row for row in kept}.values())
    return ids[kept]


def _whole(request: Request, name: str, default: int) -> int:
    """The number of that name in the address, at least the default."""
    text = request.query_params.get(name, str(default))
    value = int(text) if re.fullmatch("[0-9]{1,9}", text) else text[:20]
    check_int(name, value, default)
    return int(value)


def _map(retriever: Retriever) -> list[tuple[int, float, float]]:
    """(id, x, y), positions in [0, 1]."""
    ids, vectors = retriever.embeddings
    chosen = np.sort(np.random.default_rng(0).permutation(len(ids))[:MAP_IMAGES])
    places = embedding_map(vectors[chosen], method="tsne")
    return [(id_, x, y) for id_, (x, y) in zip(ids[chosen].tolist(), places.tolist(), strict=True)]
