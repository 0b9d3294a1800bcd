"""Trained networks from a checkpoint, run folder, exported folder or the hub; folders written whole."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.models.hub import CARD_FILE, CONFIG_FILE
from proxy_anchor.training.checkpoint import checkpoint_of, load_checkpoint, load_embedding_net


def load_trained(path: str | Path) -> EmbeddingNet:
    """Read a checkpoint file, a run folder, a folder of `save_pretrained`, or user/name of a model on the hub.

    Nothing in the files is executed.

    Raises:
        UsageError: when it is missing, damaged, something else, or of a newer version.
    """
    given, path = path, checkpoint_of(path)
    # A misspelt runs/NAME is not looked up on the hub.
    on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(given)) and not path.exists() and not path.parent.exists()
    if on_hub or (path / CONFIG_FILE).is_file():
        return EmbeddingNet.from_pretrained(path)
    if path.is_dir():
        raise UsageError(
            f"checkpoint={path} is a folder without best.ckpt, last.ckpt, or {CONFIG_FILE}: pass a run folder, a "
            "folder written by export.py format=safetensors, or a .ckpt file."
        )
    saved = load_checkpoint(path)
    dataset = saved.metadata["config"].get("dataset", {})
    net = load_embedding_net(saved)
    try:
        net.prepare = CentralCrop.of(dataset["images"])
    except KeyError as error:
        raise UsageError(
            f"checkpoint={path} does not say how its images were prepared: train it with train.py."
        ) from error
    net.about = {"dataset": dataset.get("name"), "epoch": saved.epoch, "classes": list(saved.metadata["classes"])}
    card = path.parent / CARD_FILE
    net.card = card.read_text(encoding="utf-8") if card.is_file() else ""
    return net


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A temporary folder that replaces `folder` at the end, unless the block raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        aside.chmod(0o755)  # mkdtemp's folders are readable by the owner only
        old = aside.with_name(f"{aside.name}-old")
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
