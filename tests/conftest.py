from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from pictures import write_noise_images

from proxy_anchor.models.embedding_net import EmbeddingNet

# Another number of threads rounds otherwise: fixtures, tests and the commands that they start have the same.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
constants.HF_HUB_OFFLINE = True  # without a network each attempt to fetch weights takes most of a minute


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="append the outcome of a machine with a GPU to this .jsonl file")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in tests/ itself run whole commands and take longest: first, or one process runs the last alone."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)
    for item in items:
        for marker in item.iter_markers("gpu"):
            needed, found = marker.args[0] if marker.args else 1, torch.cuda.device_count()
            if found < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} NVIDIA GPU(s), {found} found"))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays: commands collect between their runs, and would look through it each time


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write where the tests ran and how they ended."""
    file = config.getoption("record")
    if file is None or not torch.cuda.is_available() or hasattr(config, "workerinput"):  # one of xdist's processes
        return
    from proxy_anchor.reports.run import commit, device_name, versions

    row = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit()}
    row |= {"device": device_name(torch.device("cuda")), "gpus": torch.cuda.device_count(), "versions": versions()}
    row |= {name: len(terminalreporter.getreports(name)) for name in ("passed", "failed", "error", "skipped")}
    with file.open("a", encoding="utf-8") as rows:
        rows.write(json.dumps(row) + "\n")


@pytest.fixture(autouse=True)
def _seeded_single_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """make_checkpoint("a.ckpt", seed=1) writes a checkpoint as train.py does, of a small random network."""

    def make(name: str = "best.ckpt", *, seed: int = 0, embedding_dim: int = 16, **sides: Any) -> Path:
        more = {"search_with": sides.pop("search_with", None), "batch_norm": "train"}
        images = {"crop": 32, "resize": 36} | sides
        torch.manual_seed(seed)
        net = EmbeddingNet("test_resnet", embedding_dim, pretrained=False, image_size=32, **more).eval()
        config = {"dataset": {"name": "folder", "images": images}}
        content = {
            "proxy_anchor": {"format": 1, "model": net.config, "config": config, "classes": ["a", "b"]},
            "epoch": 2,
            "state_dict": {f"net.{key}": value for key, value in net.state_dict().items()},
        }
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, file)
        return file

    return make


@pytest.fixture
def write_images(tmp_path: Path) -> Callable[..., list[tuple[Path, str]]]:
    """write_images({"cat": 3, "dog": 2}) writes small noisy PNG files, a colour per class: rows for `make_tables`."""
    return lambda counts, size=32: write_noise_images(tmp_path, counts, size)


@pytest.fixture(scope="session")
def glyphs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Argument that names the data set of TINY_GLYPHS, which has been drawn."""
    from commands import TINY_GLYPHS, compose_train
    from hydra.utils import instantiate

    root = tmp_path_factory.mktemp("drawn")
    instantiate(compose_train(*TINY_GLYPHS, f"dataset.root={root}").dataset.load)
    return f"dataset.root={root}"


@pytest.fixture(scope="module")
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with an uninterrupted run, of the module's ARGUMENTS."""
    from commands import run_ok

    here = tmp_path_factory.mktemp("straight")
    run_ok("train.py", *request.module.ARGUMENTS, cwd=here)
    return here


@pytest.fixture
def arguments(request: pytest.FixtureRequest, straight: Path) -> list[str]:
    """The same arguments, with the same images."""
    return [*request.module.ARGUMENTS, f"dataset.root={straight}/data/glyphs"]


@pytest.fixture
def interrupted(straight: Path, tmp_path: Path) -> Path:
    """A user's folder with that run as if it had been killed just before its end."""
    shutil.copytree(straight / "runs", tmp_path / "runs")
    (tmp_path / "runs/x/result.json").unlink()
    return tmp_path


@pytest.fixture(scope="module")
def browser() -> Iterator:
    """Chromium; the test is skipped where it or playwright is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (a test extra)")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        # Chromium's own sandbox refuses to run as root, as containers do.
        made = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def open_page(browser) -> Callable:
    """open_page(ADDRESS, **options) is a context: a page that may ask for nothing else and complains of nothing."""

    @contextmanager
    def opened(address: str, **options: object) -> Iterator:
        complaints, elsewhere = [], []
        page = browser.new_page(**options)
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        own = (address, f"blob:{address}", "data:")
        page.on("request", lambda asked: None if asked.url.startswith(own) else elsewhere.append(asked.url))
        yield page
        page.close()
        assert complaints == []
        assert elsewhere == []

    return opened
