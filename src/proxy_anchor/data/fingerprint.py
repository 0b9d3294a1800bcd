"""Which images a run was trained on, in a few characters, so that it is not continued on others."""

from __future__ import annotations

import hashlib
import os

from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError


def data_fingerprint(splits: Splits) -> dict[str, str]:
    """{table: "N images of C classes, HASH"}; the hash is over names, labels and file sizes, not over the place or time."""
    found = {}
    for name, table in splits.tables.items():
        digest = hashlib.sha256()
        for path, label in zip(table.paths, table.labels.tolist(), strict=True):
            size = os.stat(path).st_size if os.path.exists(path) else -1
            digest.update(os.fsencode(f"{path.parent.name}/{path.name}") + f"\0{label} {size}\n".encode())
        found[name] = f"{len(table)} images of {table.num_classes} classes, {digest.hexdigest()[:12]}"
    return found


def require_same_data(made: dict[str, str] | None, now: dict[str, str]) -> None:
    """Raise UsageError that names the tables in which the images are others than those of the checkpoint."""
    for name in now if made is not None else ():
        if (before := (made or {}).get(name)) != now[name]:
            raise UsageError(
                f"the {name} images are not those that this run began with (then {before}; now {now[name]}): restore them, "
                "or choose another run=NAME."
            )
