"""Dry-run every network that timm knows at its own size: does it work as a backbone, and how is it pooled?

    python benchmarks/all_backbones.py --pooling auto gem

On the meta device: no weights are read and nothing is computed. The record has one row per name and pooling, outcome
"works", "refused" (a UsageError: one line) or "traceback"; its last row counts them.
"""

from __future__ import annotations

import argparse
import fnmatch
import warnings
from collections import Counter
from pathlib import Path

import timm
import torch
from common import HERE, append_rows, where_it_ran
from tqdm import tqdm

import proxy_anchor.models  # noqa: F401  (registers the networks that timm lacks)
from proxy_anchor.errors import UsageError, reason_of
from proxy_anchor.models.embedding_net import inspect_backbone


def dry_run(name: str, pooling: str) -> dict[str, object]:
    """A row of the record."""
    config = timm.models.get_pretrained_cfg(name)
    size = config.input_size[-1] if config else 224
    row: dict[str, object] = {"name": name, "asked": pooling, "size": size}
    try:
        feature_map, features, _ = inspect_backbone(name, pooling, size)
    except UsageError as error:
        return row | {"outcome": "refused", "pooling": None, "features": None, "message": str(error)}
    except Exception as error:  # what this command looks for
        message = f"{type(error).__name__}: {reason_of(error)}"
        return row | {"outcome": "traceback", "pooling": None, "features": None, "message": message}
    used = "own" if not feature_map else f"{'avg+max' if pooling == 'auto' else pooling} of {feature_map}"
    return row | {"outcome": "works", "pooling": used, "features": features, "message": ""}


def main() -> None:
    """Write the rows, then their summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pooling", nargs="+", default=["auto"])
    parser.add_argument("--names", default="*", help="pattern, such as 'efficientv*'")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    names = fnmatch.filter(timm.list_models(), arguments.names)
    rows = [dry_run(name, pooling) for name in tqdm(names, disable=None) for pooling in arguments.pooling]
    counts = Counter(f"{row['asked']}: {row['pooling'] or row['outcome']}" for row in rows)
    where = where_it_ran(torch.device("cpu"))
    append_rows(arguments.output / "all_backbones.jsonl", [*rows, {"summary": counts, "names": len(names), **where}])
    print("\n".join(f"{count:5} {kind}" for kind, count in counts.items()))


if __name__ == "__main__":
    main()
