"""Reading checkpoints: network, weights, and how they were made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training.module import CHECKPOINT_FORMAT, CHECKPOINT_KEY


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint: epoch from 1, tensors of the learner, plain metadata of its run."""

    path: Path
    epoch: int
    state: dict[str, Tensor]
    metadata: dict[str, Any]


def checkpoint_of(path: str | Path) -> Path:
    """best.ckpt of a run folder, or its last.ckpt; any other path unchanged."""
    path = Path(path)
    return next((path / name for name in ("best.ckpt", "last.ckpt") if (path / name).is_file()), path)


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Read a checkpoint of train.py, executing no code in it.

    Raises UsageError where it is missing, damaged, another kind of file, or of a newer format.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"checkpoint={path}: no such file; pass the best.ckpt or last.ckpt of a run folder.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises another type for each kind of damage
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, UnpicklingError):  # torch's message says how to execute the file
            reason = "it holds more than tensors and plain values, and none of it is executed"
        raise UsageError(f"checkpoint={path} cannot be read ({reason}): it is damaged or no checkpoint.") from error
    metadata = content.get(CHECKPOINT_KEY) if isinstance(content, dict) else None
    if (
        not isinstance(metadata, dict)
        or not {"format", "model", "config", "classes"} <= metadata.keys()
        or not {"epoch", "state_dict"} <= content.keys()
    ):
        raise UsageError(f"checkpoint={path} was not written by train.py: it does not say which network it holds.")
    if metadata["format"] > CHECKPOINT_FORMAT:
        raise UsageError(f"checkpoint={path} has format {metadata['format']}, newer than this version reads: update.")
    return Checkpoint(path, content["epoch"] + 1, content["state_dict"], metadata)


def load_embedding_net(checkpoint: Checkpoint) -> EmbeddingNet:
    """The trained network, on the CPU, in evaluation mode.

    Raises UsageError where the stored tensors and the network differ.
    """
    try:
        net = EmbeddingNet.from_config(checkpoint.metadata["model"])
    except TypeError as error:
        raise UsageError(f"{checkpoint.path} describes a network that this version does not know ({error}).") from error
    state = {key.removeprefix("net."): value for key, value in checkpoint.state.items() if key.startswith("net.")}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"{checkpoint.path} does not fit {checkpoint.metadata['model']['backbone']} as this timm version builds "
            f"it: {' '.join(str(error).split())[:300]}"
        ) from error
    return net.eval()
