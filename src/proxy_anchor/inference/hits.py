"""Neighbours of a query, and the class for which they vote."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """One neighbour.

    Attributes:
        id: of the image in the gallery.
        name: its path, or the name it was added under.
        label: its class, None for unknown.
        similarity: cosine, in [-1, 1].
        is_match: whether the similarity reaches the calibrated threshold; None without one.
    """

    id: int
    name: str
    label: str | None
    similarity: float
    is_match: bool | None = None


def vote(hits: Sequence[Hit]) -> tuple[str | None, float]:
    """(class, share of the votes): each labelled hit votes with its similarity, if positive.

    Among equals the class of the nearer hit wins. (None, 0.0) when no hit has a label.
    """
    votes: dict[str, float] = defaultdict(float)
    for hit in hits:
        if hit.label is not None:
            votes[hit.label] += max(hit.similarity, 0.0)
    if not votes:
        return None, 0.0
    winner = max(votes, key=lambda name: votes[name])  # the first of equals; hits come nearest first
    total = sum(votes.values())
    return winner, votes[winner] / total if total else 1 / len(votes)
