"""Proxy-Anchor deep metric learning: losses, embedding networks, training, exact retrieval and its metrics.

Public names are imported on first use, so a command imports only what it needs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy_anchor.cli.python import command as command
    from proxy_anchor.cli.python import train as train
    from proxy_anchor.inference.retriever import Retriever as Retriever
    from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss as ProxyAnchorLoss
    from proxy_anchor.models.embedding_net import EmbeddingNet as EmbeddingNet
    from proxy_anchor.retrieval.metrics import recall_at_k as recall_at_k

__version__ = "0.1.0"

_HOME = {
    "EmbeddingNet": "proxy_anchor.models.embedding_net",
    "ProxyAnchorLoss": "proxy_anchor.losses.proxy_anchor",
    "Retriever": "proxy_anchor.inference.retriever",
    "command": "proxy_anchor.cli.python",
    "recall_at_k": "proxy_anchor.retrieval.metrics",
    "train": "proxy_anchor.cli.python",
}
__all__ = ["EmbeddingNet", "ProxyAnchorLoss", "Retriever", "command", "recall_at_k", "train"]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
