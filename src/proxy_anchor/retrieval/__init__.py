"""Exact search by cosine similarity and the metrics that are counted from it.

The names below are loaded on first use. The search function itself is `proxy_anchor.retrieval.search.search`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy_anchor.retrieval.clustering import nmi as nmi
    from proxy_anchor.retrieval.metrics import RecallAtK as RecallAtK
    from proxy_anchor.retrieval.metrics import map_at_r as map_at_r
    from proxy_anchor.retrieval.metrics import metrics_of_ranking as metrics_of_ranking
    from proxy_anchor.retrieval.metrics import num_queries_without_positive as num_queries_without_positive
    from proxy_anchor.retrieval.metrics import r_precision as r_precision
    from proxy_anchor.retrieval.metrics import recall_at_k as recall_at_k
    from proxy_anchor.retrieval.metrics import retrieval_metrics as retrieval_metrics
    from proxy_anchor.retrieval.reranking import k_reciprocal as k_reciprocal
    from proxy_anchor.retrieval.reranking import query_expansion as query_expansion
    from proxy_anchor.retrieval.search import resolve_engine as resolve_engine

_HOME = {
    "RecallAtK": "proxy_anchor.retrieval.metrics",
    "k_reciprocal": "proxy_anchor.retrieval.reranking",
    "map_at_r": "proxy_anchor.retrieval.metrics",
    "metrics_of_ranking": "proxy_anchor.retrieval.metrics",
    "nmi": "proxy_anchor.retrieval.clustering",
    "num_queries_without_positive": "proxy_anchor.retrieval.metrics",
    "query_expansion": "proxy_anchor.retrieval.reranking",
    "r_precision": "proxy_anchor.retrieval.metrics",
    "recall_at_k": "proxy_anchor.retrieval.metrics",
    "resolve_engine": "proxy_anchor.retrieval.search",
    "retrieval_metrics": "proxy_anchor.retrieval.metrics",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
