"""A trained network with its preprocessing, from a checkpoint, run folder or exported folder."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training.checkpoint import checkpoint_of, load_checkpoint, load_embedding_net

EXPORT_FORMAT = 1
CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = "config.json", "model.safetensors", "README.md"


@dataclass(frozen=True, eq=False)
class TrainedNet:
    """A network and how to prepare its images.

    Attributes:
        net: in evaluation mode, on the CPU.
        prepare: RGB image to uint8 pixels (3, crop, crop), as in evaluation.
        path: file or folder that it was read from.
        about: data set, epoch, class names; plain types.
    """

    net: EmbeddingNet
    prepare: CentralCrop
    path: Path
    about: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over all tensors and the preprocessing: equal fingerprints mean equal embeddings."""
        digest = hashlib.sha256(json.dumps(self.describe()["model"], sort_keys=True).encode())
        digest.update(f"{self.prepare.crop} {self.prepare.resize}".encode())
        for name, value in sorted(self.net.state_dict().items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def describe(self) -> dict[str, Any]:
        """Model, preprocessing and training data as plain types."""
        return {
            "model": {key: value for key, value in self.net.config.items() if key != "batch_norm"},
            "images": {"crop": self.prepare.crop, "resize": self.prepare.resize, "interpolation": "bilinear"},
            "about": self.about,
        }


def load_trained(path: str | Path) -> TrainedNet:
    """Read a checkpoint file, a run folder or a folder of export.py.

    Nothing in the files is executed.

    Raises:
        UsageError: when it is missing, damaged, something else, or of a newer version.
    """
    path = checkpoint_of(path)
    if not path.is_dir():
        return _from_checkpoint(path)
    if (path / WEIGHTS_FILE).is_file() and (path / CONFIG_FILE).is_file():
        return _from_export(path)
    raise UsageError(
        f"checkpoint={path} is a folder without best.ckpt, last.ckpt, or {WEIGHTS_FILE} with {CONFIG_FILE}: pass a run "
        "folder, a folder written by export.py format=safetensors, or a .ckpt file."
    )


def _from_checkpoint(path: Path) -> TrainedNet:
    saved = load_checkpoint(path)
    config = saved.metadata["config"]
    dataset = config.get("dataset", {})
    try:
        prepare = CentralCrop(dataset["images"]["crop"], dataset["images"]["resize"])
    except KeyError as error:
        raise UsageError(
            f"checkpoint={path} does not say how its images were prepared: train it with train.py."
        ) from error
    about = {"dataset": dataset.get("name"), "epoch": saved.epoch, "classes": list(saved.metadata["classes"])}
    return TrainedNet(load_embedding_net(saved), prepare, path, about)


def _from_export(folder: Path) -> TrainedNet:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        version = config["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / CONFIG_FILE} was not written by export.py, or is damaged.") from error
    if version != EXPORT_FORMAT:
        raise UsageError(f"{folder} has format {version}; this version reads format {EXPORT_FORMAT}: export it again.")
    try:
        net = EmbeddingNet.from_config(config["model"])
        prepare = CentralCrop(config["images"]["crop"], config["images"]["resize"])
        net.load_state_dict(load_file(folder / WEIGHTS_FILE))
    except (SafetensorError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"{folder} cannot be read ({reason}): it is damaged, or its parts belong to two models."
        ) from error
    return TrainedNet(net.eval(), prepare, folder, config.get("about", {}))


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
