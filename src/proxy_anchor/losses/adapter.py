"""Any loss, miner and distance of pytorch-metric-learning as `loss(embeddings, labels)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from proxy_anchor.errors import UsageError
from proxy_anchor.losses.base import MetricLoss

# What that library calls C and D, in one loss or another.
_SIZES = {"num_classes": "num_classes"} | dict.fromkeys(
    ("embedding_size", "embedding_dim", "descriptors_dim"), "embedding_dim"
)

# How that library says what it cannot do: it also asserts.
_REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError)


class PMLLoss(MetricLoss):
    """A loss of pytorch-metric-learning, with a miner and a distance where wanted.

    Args:
        num_classes: C. embedding_dim: D. Both are handed to the loss if it takes them.
        loss: a class of `pytorch_metric_learning.losses`, or a partial of one with further arguments; in a config its
            `_target_` with `_partial_: true`.
        miner: a miner made already, called with every batch; None takes all pairs or triplets.
        distance: a distance made already, for loss and miner; None leaves each its own.

    Raises UsageError when the loss cannot be made with these arguments, or does not take embeddings with labels.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        loss: Callable[..., nn.Module],
        miner: nn.Module | None = None,
        distance: nn.Module | None = None,
    ) -> None:
        super().__init__(num_classes, embedding_dim)
        made = loss.func if isinstance(loss, partial) else loss
        name = getattr(made, "__name__", type(made).__name__)
        if not inspect.isclass(made):
            raise UsageError(f"loss.loss: expected a class of pytorch_metric_learning.losses, received {name}.")
        given = set(loss.keywords) if isinstance(loss, partial) else set()
        known = _parameters(made) - given
        arguments = {theirs: getattr(self, ours) for theirs, ours in _SIZES.items() if theirs in known}
        if distance is not None:
            arguments["distance"] = distance
            if miner is not None:
                miner.distance = distance
        try:
            self.loss = loss(**arguments)
        except _REFUSALS as error:
            raise UsageError(f"loss: {name} does not accept these arguments ({_reason(error)}).") from error
        self.miner = miner

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mine, then the loss of (B, D) embeddings with labels (B,); 0, with a gradient of 0, when nothing was mined."""
        try:
            return self.loss(embeddings, labels, None if self.miner is None else self.miner(embeddings, labels))
        except _REFUSALS as error:
            name = type(self.loss).__name__ + ("" if self.miner is None else f" with {type(self.miner).__name__}")
            raise UsageError(f"loss: {name} does not take these embeddings with labels ({_reason(error)}).") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parameters(made: type) -> set[str]:
    """The names that a constructor and those behind its **kwargs take."""
    constructors = [vars(each)["__init__"] for each in made.__mro__ if "__init__" in vars(each)]
    return {name for each in constructors for name in inspect.signature(each).parameters}
