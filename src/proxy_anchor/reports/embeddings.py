"""Embeddings as a file for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from proxy_anchor.errors import UsageError


def write_embeddings(file: Path, paths: Sequence[str], labels: Sequence[str | None], embeddings: np.ndarray) -> None:
    """Columns path, label ("" or null for unknown) and embedding (N, D) float32, by the file's suffix .npz or .parquet.

    Written aside and renamed. The npz opens with allow_pickle=False; the Parquet file needs pyarrow, else UsageError.
    Names that are not UTF-8 are written with backslashes.
    """
    aside = file.with_name(file.name + ".tmp")
    paths = [_utf8(path) for path in paths]
    labels = [label and _utf8(label) for label in labels]
    if file.suffix == ".parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise UsageError("a .parquet file needs pyarrow: pip install -e '.[export]', or write .npz.") from error
        vectors = pyarrow.FixedSizeListArray.from_arrays(
            pyarrow.array(embeddings.ravel(), pyarrow.float32()), embeddings.shape[1]
        )
        columns = {
            "path": pyarrow.array(paths, pyarrow.string()),
            "label": pyarrow.array(labels, pyarrow.string()),
            "embedding": vectors,
        }
        parquet.write_table(pyarrow.table(columns), aside)
    else:
        with aside.open("wb") as stream:
            np.savez(
                stream,
                path=np.array(paths, dtype=np.str_),
                label=np.array([label or "" for label in labels], dtype=np.str_),
                embedding=embeddings.astype(np.float32, copy=False),
            )
    aside.replace(file)


def _utf8(name: str) -> str:
    return name.encode("utf-8", "backslashreplace").decode()
