from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy_anchor import Retriever

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (pip install -e '.[app]')")
pytest.importorskip("starlette", reason="starlette is not installed (pip install -e '.[app]')")


@pytest.fixture
def serving() -> Callable:
    """serving(app) is a context: the application on a free port of this machine, in a thread; its address."""

    @contextmanager
    def served(app) -> Iterator[str]:
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
        socket = config.bind_socket()
        socket.listen()  # a request that comes before the server is ready waits
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([socket],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
        server.should_exit = True
        thread.join(timeout=10)

    return served


@pytest.fixture
def retrievers(make_checkpoint: Callable, write_images: Callable, tmp_path: Path) -> dict[str, Retriever]:
    """Two models over the same gallery of 3 classes of 5 images; the second lacks the first image."""
    write_images({"cat": 5, "dog": 5, "eel": 5})
    made = {}
    for seed, name in enumerate(("first", "second")):
        retriever = Retriever.from_pretrained(make_checkpoint(f"{name}.ckpt", seed=seed), num_workers=0)
        made[name] = retriever.index(tmp_path / "images", progress=False)
    made["second"].remove(tmp_path / "images" / "cat" / "0.png")
    # In another order than the first model's: one image has different ids.
    made["second"].remove(tmp_path / "images" / "dog" / "2.png")
    made["second"].add([tmp_path / "images" / "dog" / "2.png"], ["dog"], progress=False)
    return made
