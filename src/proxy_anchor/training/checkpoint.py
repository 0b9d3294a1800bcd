"""Reading checkpoints: network, weights, and how they were made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet

CHECKPOINT_KEY = "proxy_anchor"
CHECKPOINT_FORMAT = 1

# Where the parts of a loss may come from: another name in a checkpoint could run any code.
_PARTS = re.compile(
    r"proxy_anchor\.losses\.\w+|pytorch_metric_learning\.(losses|miners|distances|reducers|regularizers)"
)


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
    net = EmbeddingNet.from_config(checkpoint.metadata["model"])
    state = {key.removeprefix("net."): value for key, value in checkpoint.state.items() if key.startswith("net.")}
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"{checkpoint.path} does not fit {checkpoint.metadata['model']['backbone']} as this timm version builds "
            f"it: {' '.join(str(error).split())[:300]}"
        ) from error
    return net.eval()


def make_loss(checkpoint: Checkpoint) -> nn.Module:
    """The loss that train.py made for this run, with untrained parameters.

    Raises UsageError where the config names no loss, or one that is neither of this package nor of
    pytorch-metric-learning.
    """
    known = checkpoint.metadata
    sizes = {"num_classes": len(known["classes"]), "embedding_dim": known["model"]["embedding_dim"]}
    try:
        return _make(known["config"]["loss"], **sizes)
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{checkpoint.path} does not say how its loss is made ({error}): pass loss=...") from error


def make_regularisers(checkpoint: Checkpoint) -> dict[str, Any]:
    """{name: regulariser} that train.py made for this run; none for a config without them.

    Raises UsageError for one that is not of this package.
    """
    try:
        return {name: _make(each) for name, each in checkpoint.metadata["config"].get("regulariser", {}).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{checkpoint.path} does not say how its regularisers are made ({error}): pass regularisers={{...}}."
        ) from error


def _make(value: Any, **more: Any) -> Any:
    if not isinstance(value, dict):
        return value
    module, _, name = value["_target_"].rpartition(".")
    if not _PARTS.fullmatch(module):
        raise KeyError(value["_target_"])
    arguments = {key: _make(each) for key, each in value.items() if key not in ("_target_", "_partial_")}
    made = partial(getattr(import_module(module), name), **arguments, **more)
    return made if value.get("_partial_") else made()
